// Integer words that AVX2 and AVX-VNNI share: 32-byte units, field
// extraction, sums. Meanings: simd_scalar.h. Must not hold `dot`,
// `Partial` or `widen`: the two ISAs differ there.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/simd_defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kUnitBlocks = 1;
constexpr int kGemvRows = 4;
constexpr int kTileRows = 2;  // 2 x 4 accumulators leave half of the 16 registers for operands
constexpr int kTileTokens = 4;

using Raw = __m256i;
using Codes = __m256i;
using Activations = __m256i;
using Acc = __m256i;

inline __m256i load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Raw load_raw(const uint8_t* p) { return load_bytes(p); }
inline Raw load_raw_tail(const uint8_t* p) { return load_bytes(p); }
template <int F>
inline Codes codes(Raw raw) {
  // The 16-bit shift drags bits of the neighbouring byte in; the mask removes them.
  const __m256i three = _mm256_set1_epi8(3);
  return _mm256_and_si256(F == 3 ? raw : _mm256_srli_epi16(raw, 6 - 2 * F), three);
}
template <int F>
inline Activations load_x(const int8_t* p) {
  return load_bytes(p + 32 * F);
}
template <int F>
inline Activations load_x_tail(const int8_t* p) {
  return load_bytes(p + 32 * F);
}
inline Acc acc_zero() { return _mm256_setzero_si256(); }
inline int32_t reduce(Acc acc) {
  __m128i r = _mm_add_epi32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
  r = _mm_add_epi32(r, _mm_shuffle_epi32(r, 0x4e));
  r = _mm_add_epi32(r, _mm_shuffle_epi32(r, 0xb1));
  return _mm_cvtsi128_si32(r);
}
// Volatile assembly, for g++ 12 takes the intrinsic for a thing without effect: it leaves out every
// call of a function or lambda that does nothing else.
[[gnu::always_inline]] inline void prefetch(const void* p) {
  __asm__ volatile("prefetcht0 (%0)" : : "r"(p));
}

// ---- words of the private tiles: 8 lanes -------------------------------------------------------

constexpr int64_t kTileLanes = 8;
constexpr int kTileParts = 10;   // accumulators that leave registers for decoding a line
constexpr int kPanelParts = 12;  // the same where the line is decoded already

using TileLine = __m256i;
using TileCodes = __m256i;
using TileX = __m256i;
using TilePart = __m256i;
using TileSum = __m256i;

inline TileLine load_line(const uint8_t* p) { return load_bytes(p); }
inline void store_line(uint8_t* p, TileCodes c) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), c);
}
inline TileX broadcast_x(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
inline TilePart tile_part_zero() { return _mm256_setzero_si256(); }
inline TileSum load_sum(const int32_t* p) { return load_bytes(p); }
inline void store_sum(int32_t* p, TileSum s) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), s);
}
inline TileSum set1_sum(int32_t x) { return _mm256_set1_epi32(x); }
inline TileSum add_sum(TileSum a, TileSum b) { return _mm256_add_epi32(a, b); }
inline TileSum sub_sum(TileSum a, TileSum b) { return _mm256_sub_epi32(a, b); }
template <int N>
inline TileSum shift_sum(TileSum s) {
  return _mm256_srai_epi32(s, N);
}
inline TileCodes and_bytes(TileLine v, int mask) {
  return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(mask)));
}
// Bit N and up of every 16 bits; a mask must follow.
template <int N>
inline TileLine shift_bytes(TileLine v) {
  return N == 0 ? v : _mm256_srli_epi16(v, N);
}
inline TileLine add_bytes(TileLine a, TileLine b) { return _mm256_add_epi8(a, b); }
inline TileLine avg_bytes(TileLine a, TileLine b) { return _mm256_avg_epu8(a, b); }
inline TileLine set1_byte(int b) { return _mm256_set1_epi8(static_cast<char>(b)); }

#if !defined(BITNET_EMULATE)
template <class T>
[[gnu::always_inline]] inline void pin(T& v) {
  __asm__ volatile("" : "+v"(v));
}
template <class T>
[[gnu::always_inline]] inline void renew(T& v) {
  pin(v);
}
#endif

inline int32_t sum_i8_vector(const int8_t* p, int64_t n) {
  const __m256i ones = _mm256_set1_epi8(1);
  __m256i acc = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    // Pair sums of unsigned ones x signed bytes stay within int16; madd widens them to int32.
    const __m256i pairs = _mm256_maddubs_epi16(ones, load_bytes(p + i));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  int32_t sum = reduce(acc);
  for (; i < n; ++i) sum += p[i];
  return sum;
}
struct LineXor {
  __m256i half[2];
};
inline LineXor line_zero() { return LineXor{{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
inline LineXor xor_line(LineXor x, const uint8_t* p) {
  return LineXor{{_mm256_xor_si256(x.half[0], load_bytes(p)),
                  _mm256_xor_si256(x.half[1], load_bytes(p + 32))}};
}
inline uint64_t reduce_lines(LineXor a, LineXor b) {
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(a.half[0], a.half[1]),
                                       _mm256_xor_si256(b.half[0], b.half[1]));
  const __m128i r = _mm_xor_si128(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  return static_cast<uint64_t>(_mm_extract_epi64(r, 0) ^ _mm_extract_epi64(r, 1));
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
