// Stands in for the compiler's <immintrin.h> where a kernel file is compiled for the tests on a CPU
// that lacks its instructions: SIMDe (https://github.com/simd-everywhere/simde) turns each
// intrinsic into portable code.  Found first by an include path that only the emulated objects of
// CMakeLists.txt have.
//
// Below: what SIMDe 0.7 lacks, and what it does too loosely.  Masked loads and stores must touch
// the chosen lanes only (guard pages), a multiply-add must round once, conversions of NaN must keep
// the payload as F16C does.  Each definition follows the operation section of the Intel Intrinsics
// Guide, lane by lane.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>

#include "tests/emulated/amx_int8.h"

namespace {
namespace emulated {

#define BITNET_EMULATED [[maybe_unused]] inline

// result lane i = lane(i), of the union member `lanes` of the private form of SIMDe's type.
#define BITNET_LANES(type, lanes, count, expression)           \
  simde##type##_private r;                                     \
  for (int i = 0; i < (count); ++i) r.lanes[i] = (expression); \
  return simde##type##_from_private(r)

// ---- multiply-add, one rounding ----------------------------------------------------------

BITNET_EMULATED simde__m256 fmadd_256(simde__m256 a, simde__m256 b, simde__m256 c) {
  const auto x = simde__m256_to_private(a), y = simde__m256_to_private(b);
  const auto z = simde__m256_to_private(c);
  BITNET_LANES(__m256, f32, 8, __builtin_fmaf(x.f32[i], y.f32[i], z.f32[i]));
}
BITNET_EMULATED simde__m512 fmadd_512(simde__m512 a, simde__m512 b, simde__m512 c) {
  const auto x = simde__m512_to_private(a), y = simde__m512_to_private(b);
  const auto z = simde__m512_to_private(c);
  BITNET_LANES(__m512, f32, 16, __builtin_fmaf(x.f32[i], y.f32[i], z.f32[i]));
}

// ---- masked loads and stores -------------------------------------------------------------

template <class T>
T masked(unsigned mask, const void* p, int i) {
  T value = 0;
  if (mask >> i & 1) __builtin_memcpy(&value, static_cast<const T*>(p) + i, sizeof(T));
  return value;
}
template <class T>
void store_masked(void* p, unsigned mask, int i, T value) {
  if (mask >> i & 1) __builtin_memcpy(static_cast<T*>(p) + i, &value, sizeof(T));
}

BITNET_EMULATED simde__m512 maskz_loadu_ps(unsigned mask, const void* p) {
  BITNET_LANES(__m512, f32, 16, masked<float>(mask, p, i));
}
BITNET_EMULATED simde__m512i maskz_loadu_epi32(unsigned mask, const void* p) {
  BITNET_LANES(__m512i, i32, 16, masked<int32_t>(mask, p, i));
}
BITNET_EMULATED simde__m256i maskz_loadu_epi16(unsigned mask, const void* p) {
  BITNET_LANES(__m256i, i16, 16, masked<int16_t>(mask, p, i));
}
BITNET_EMULATED simde__m128i maskz_loadu_epi8(unsigned mask, const void* p) {
  BITNET_LANES(__m128i, i8, 16, masked<int8_t>(mask, p, i));
}
BITNET_EMULATED void mask_storeu_ps(void* p, unsigned mask, simde__m512 a) {
  const auto x = simde__m512_to_private(a);
  for (int i = 0; i < 16; ++i) store_masked<float>(p, mask, i, x.f32[i]);
}
BITNET_EMULATED void mask_storeu_epi32(void* p, unsigned mask, simde__m512i a) {
  const auto x = simde__m512i_to_private(a);
  for (int i = 0; i < 16; ++i) store_masked<int32_t>(p, mask, i, x.i32[i]);
}
BITNET_EMULATED void mask_storeu_epi16(void* p, unsigned mask, simde__m256i a) {
  const auto x = simde__m256i_to_private(a);
  for (int i = 0; i < 16; ++i) store_masked<int16_t>(p, mask, i, x.i16[i]);
}
BITNET_EMULATED void mask_storeu_epi8(void* p, unsigned mask, simde__m128i a) {
  const auto x = simde__m128i_to_private(a);
  for (int i = 0; i < 16; ++i) store_masked<int8_t>(p, mask, i, x.i8[i]);
}

// ---- conversions -------------------------------------------------------------------------

// Out of range and NaN: the "integer indefinite".
constexpr int32_t kIndefinite = -2147483647 - 1;
BITNET_EMULATED int32_t truncated(float x) {
  return x > -2147483904.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : kIndefinite;
}
BITNET_EMULATED int32_t nearest(float x) {
  return truncated(__builtin_rintf(x));  // under the default rounding mode, half to even
}
BITNET_EMULATED simde__m256i cvtps_epi32_256(simde__m256 a) {
  const auto x = simde__m256_to_private(a);
  BITNET_LANES(__m256i, i32, 8, nearest(x.f32[i]));
}
BITNET_EMULATED simde__m256i cvttps_epi32_256(simde__m256 a) {
  const auto x = simde__m256_to_private(a);
  BITNET_LANES(__m256i, i32, 8, truncated(x.f32[i]));
}
BITNET_EMULATED simde__m512i cvtps_epi32(simde__m512 a) {
  const auto x = simde__m512_to_private(a);
  BITNET_LANES(__m512i, i32, 16, nearest(x.f32[i]));
}
BITNET_EMULATED simde__m512i cvttps_epi32(simde__m512 a) {
  const auto x = simde__m512_to_private(a);
  BITNET_LANES(__m512i, i32, 16, truncated(x.f32[i]));
}
BITNET_EMULATED simde__m512 cvtepi32_ps(simde__m512i a) {
  const auto x = simde__m512i_to_private(a);
  BITNET_LANES(__m512, f32, 16, static_cast<float>(x.i32[i]));
}
BITNET_EMULATED simde__m512i cvtepu16_epi32(simde__m256i a) {
  const auto x = simde__m256i_to_private(a);
  BITNET_LANES(__m512i, i32, 16, static_cast<int32_t>(x.u16[i]));
}
BITNET_EMULATED simde__m512i cvtepi16_epi32(simde__m256i a) {
  const auto x = simde__m256i_to_private(a);
  BITNET_LANES(__m512i, i32, 16, static_cast<int32_t>(x.i16[i]));
}
BITNET_EMULATED simde__m256i cvtepi32_epi16(simde__m512i a) {
  const auto x = simde__m512i_to_private(a);
  BITNET_LANES(__m256i, i16, 16, static_cast<int16_t>(x.i32[i]));
}
BITNET_EMULATED simde__m512i cvtepi8_epi32(simde__m128i a) {
  const auto x = simde__m128i_to_private(a);
  BITNET_LANES(__m512i, i32, 16, static_cast<int32_t>(x.i8[i]));
}
BITNET_EMULATED simde__m128i cvtepi32_epi8(simde__m512i a) {
  const auto x = simde__m512i_to_private(a);
  BITNET_LANES(__m128i, i8, 16, static_cast<int8_t>(x.i32[i]));
}
BITNET_EMULATED simde__m512d cvtps_pd(simde__m256 a) {
  const auto x = simde__m256_to_private(a);
  BITNET_LANES(__m512d, f64, 8, static_cast<double>(x.f32[i]));
}
BITNET_EMULATED simde__m512i zextsi256_si512(simde__m256i a) {
  const auto x = simde__m256i_to_private(a);
  BITNET_LANES(__m512i, i64, 8, i < 4 ? x.i64[i] : 0);
}

// Half precision, through the float whose value it has.
BITNET_EMULATED float f16_to_f32(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, fraction = h & 0x3ffu;
  const int exponent = h >> 10 & 31;
  if (exponent == 31) {
    const uint32_t quiet = fraction != 0 ? 0x400000u : 0;
    return __builtin_bit_cast(float, sign | 0x7f800000u | quiet | fraction << 13);
  }
  const float value = exponent == 0
                          ? __builtin_ldexpf(static_cast<float>(fraction), -24)
                          : __builtin_ldexpf(static_cast<float>(fraction + 1024), exponent - 25);
  return sign != 0 ? -value : value;
}
BITNET_EMULATED uint16_t f32_to_f16(float x) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  if (x != x) return static_cast<uint16_t>(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
  const float magnitude = __builtin_fabsf(x);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  int exponent = -13;  // subnormal and the first normal numbers: multiples of 2^-24
  if (magnitude >= 0x1p-14f) __builtin_frexpf(magnitude, &exponent);  // below 2^exponent
  // The significand as an integer, rounded half to even; a carry moves on into the exponent by
  // itself.
  const float significand = __builtin_rintf(__builtin_ldexpf(magnitude, 11 - exponent));
  const auto code =
      static_cast<uint32_t>(significand) + static_cast<uint32_t>(exponent + 13) * 1024u;
  return static_cast<uint16_t>(sign | code);
}
BITNET_EMULATED simde__m256 cvtph_ps_256(simde__m128i a) {
  const auto x = simde__m128i_to_private(a);
  BITNET_LANES(__m256, f32, 8, f16_to_f32(x.u16[i]));
}
BITNET_EMULATED simde__m512 cvtph_ps(simde__m256i a) {
  const auto x = simde__m256i_to_private(a);
  BITNET_LANES(__m512, f32, 16, f16_to_f32(x.u16[i]));
}
BITNET_EMULATED simde__m128i cvtps_ph_256(simde__m256 a) {
  const auto x = simde__m256_to_private(a);
  BITNET_LANES(__m128i, u16, 8, f32_to_f16(x.f32[i]));
}
BITNET_EMULATED simde__m256i cvtps_ph(simde__m512 a) {
  const auto x = simde__m512_to_private(a);
  BITNET_LANES(__m256i, u16, 16, f32_to_f16(x.f32[i]));
}

BITNET_EMULATED simde__m512i srai_epi32(simde__m512i a, unsigned count) {
  const auto x = simde__m512i_to_private(a);
  BITNET_LANES(__m512i, i32, 16, x.i32[i] >> (count < 31 ? count : 31));
}

BITNET_EMULATED unsigned cmpeq_epi16_mask(simde__m256i a, simde__m256i b) {
  const auto x = simde__m256i_to_private(a), y = simde__m256i_to_private(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= unsigned{x.i16[i] == y.i16[i]} << i;
  return mask;
}

#undef BITNET_LANES

#undef BITNET_EMULATED

}  // namespace emulated
}  // namespace

#undef __mmask16
#define __mmask16 simde__mmask16
#undef _mm256_fmadd_ps
#define _mm256_fmadd_ps emulated::fmadd_256
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulated::fmadd_512
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32 emulated::maskz_loadu_epi32
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#undef _mm_maskz_loadu_epi8
#define _mm_maskz_loadu_epi8 emulated::maskz_loadu_epi8
#undef _mm256_cmpeq_epi16_mask
#define _mm256_cmpeq_epi16_mask emulated::cmpeq_epi16_mask
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#undef _mm512_mask_storeu_epi32
#define _mm512_mask_storeu_epi32 emulated::mask_storeu_epi32
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 emulated::mask_storeu_epi16
#undef _mm_mask_storeu_epi8
#define _mm_mask_storeu_epi8 emulated::mask_storeu_epi8
#undef _mm256_cvtps_epi32
#define _mm256_cvtps_epi32 emulated::cvtps_epi32_256
#undef _mm256_cvttps_epi32
#define _mm256_cvttps_epi32 emulated::cvttps_epi32_256
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#undef _mm512_cvttps_epi32
#define _mm512_cvttps_epi32 emulated::cvttps_epi32
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#undef _mm512_cvtepi16_epi32
#define _mm512_cvtepi16_epi32 emulated::cvtepi16_epi32
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#undef _mm512_cvtps_pd
#define _mm512_cvtps_pd emulated::cvtps_pd
#undef _mm512_zextsi256_si512
#define _mm512_zextsi256_si512 emulated::zextsi256_si512
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#undef _mm256_cvtph_ps
#define _mm256_cvtph_ps emulated::cvtph_ps_256
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
// The kernels ask for round to nearest even, the one mode there is here.
#undef _mm256_cvtps_ph
#define _mm256_cvtps_ph(a, mode) emulated::cvtps_ph_256(a)
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, mode) emulated::cvtps_ph(a)
// The VEX form of vpdpbusd does what the EVEX form does.
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
// Moves whole quarters, so the element type does not matter.
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, imm) \
  simde_mm512_castsi512_ps(             \
      simde_mm512_shuffle_i32x4(simde_mm512_castps_si512(a), simde_mm512_castps_si512(b), imm))
