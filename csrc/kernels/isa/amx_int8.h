// SIMD primitives of the amx_int8 ISA: those of avx512_vnni, and a matrix unit
// (ternary/matrix.inl). Must not know threads: the configuration of the unit is taken and given
// back in every call.
#pragma once

#include "kernels/isa/avx512_vnni.h"

namespace bitnet::BITNET_ISA {
namespace {

// Eight tiles of up to 16 rows x 64 bytes.  The memory clobbers keep decoding stores and tile loads
// in order; g++ 12's own intrinsics lack them.
struct MatrixUnit {
  static constexpr int64_t kFromTokens = 5;  // fewer are as fast by vpdpbusd

  // What ldtilecfg reads.
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  static F32x16 floats(TileSum s) { return {floats_of(s)}; }
  // Every byte, modulo 256: words hold the lower ones' products, and those of the upper ones alone.
  static TileStep times_81(TileStep v) {
    __m512i factor = _mm512_set1_epi16(81);
    pin(factor);  // else g++ 12 makes shifts and sums of the product, twice as many operations
    const __m512i upper = _mm512_set1_epi16(-256);
    const __m512i low = _mm512_mullo_epi16(v, factor);
    const __m512i high = _mm512_mullo_epi16(_mm512_and_si512(v, upper), factor);
    return _mm512_ternarylogic_epi32(upper, high, low, 0xca);
  }
  // 16 bfloat16 numbers that are held as floats.
  static void store_bf16(const float* x, void* to) {
    const __m512i upper = _mm512_srli_epi32(_mm512_loadu_si512(x), 16);
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(upper));
  }
#if defined(BITNET_EMULATE_TILES)
  static void configure(const Config& c) { emulated::tile_configure(c.rows, c.row_bytes); }
  static void release() { emulated::tile_release(); }
  template <int N>
  static void zero() {
    emulated::tile_zero(N);
  }
  template <int N>
  static void load(const void* p, int64_t stride) {
    emulated::tile_load(N, p, stride);
  }
  template <int N>
  static void load_once(const void* p, int64_t stride) {
    emulated::tile_load(N, p, stride);
  }
  template <int N>
  static void store(void* p, int64_t stride) {
    emulated::tile_store(N, p, stride);
  }
  template <int C, int A, int B>
  static void multiply() {
    emulated::tile_dpbsud(C, A, B);
  }
  template <int C, int A, int B>
  static void multiply_signed() {
    emulated::tile_dpbssd(C, A, B);
  }
  template <int C, int A, int B>
  static void multiply_bf16() {
    emulated::tile_dpbf16(C, A, B);
  }
#else
  static void configure(const Config& c) { __asm__ volatile("ldtilecfg %0" : : "m"(c) : "memory"); }
  static void release() { __asm__ volatile("tilerelease" : : : "memory"); }
  template <int N>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(N));
  }
  template <int N>
  static void load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
  }
  // For what is not needed in L1 again soon: the tokens must not push out the decoded ring.
  template <int N>
  static void load_once(const void* p, int64_t stride) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
  }
  template <int N>
  static void store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(N) : "memory");
  }
  // C[m][n] += sum over k of A[m][k] (signed) * B[k][n] (unsigned)
  template <int C, int A, int B>
  static void multiply() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  // The same of two signed operands.
  template <int C, int A, int B>
  static void multiply_signed() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  // C[m][n] += (sum over even k) + (sum over odd k) of A[m][k] * B[k / 2][n][k % 2], bfloat16.
  template <int C, int A, int B>
  static void multiply_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
#endif
};

BITNET_OVERRIDES(MatrixUnit)

}  // namespace
}  // namespace bitnet::BITNET_ISA
