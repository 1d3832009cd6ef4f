// Head words that AVX2 and AVX-VNNI share: loads, and codes taken
// out of their bytes. Meanings: simd_scalar_head.h. Must not hold
// a dot product; the two ISAs differ there.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "format/layout.h"
#include "kernels/kernel_table.h"
#include "kernels/simd_avx2_float.h"

namespace bitnet::BITNET_ISA {
namespace {

inline void store_i16(int16_t* p, F32x16 v) {
  const __m256i wide = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(wide, 0xd8));
}

// Fixes v in its register at this point.  Without it g++ 12 holds so many sums of a line at once
// that it spills them.
[[gnu::always_inline]] inline void keep([[maybe_unused]] __m256i& v) {
#if !defined(BITNET_EMULATE)
  __asm__("" : "+x"(v));
#endif
}

[[gnu::always_inline]] inline void keep([[maybe_unused]] __m256i& a, [[maybe_unused]] __m256i& b,
                                        [[maybe_unused]] __m256i& c, [[maybe_unused]] __m256i& d) {
#if !defined(BITNET_EMULATE)
  __asm__("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d));
#endif
}

// Eight 32-bit sums, each of which may use all of its bits.
inline int64_t sum_i32_wide(__m256i v) {
  const __m256i four = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(v)),
                                        _mm256_cvtepi32_epi64(_mm256_extracti128_si256(v, 1)));
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return _mm_extract_epi64(two, 0) + _mm_extract_epi64(two, 1);
}

// ---- bfloat16 -----------------------------------------------------------------------------------
// Unpacking behind zeros makes floats of eight bfloat16 in one instruction, in the order 0-3, 8-11
// and 4-7, 12-15, where widening in order takes two or three.

inline F32x16 head_bf16_swapped(F32x16 v) {
  return {_mm256_permute2f128_ps(v.lo, v.hi, 0x20), _mm256_permute2f128_ps(v.lo, v.hi, 0x31)};
}
inline F32x16 head_bf16_x(const float* p, int64_t count) {
  return head_bf16_swapped(load_n(p, count));
}
inline F32x16 head_bf16_weights(const uint16_t* p, int64_t count) {
  const __m256i h = load_u16_n(p, count), none = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, h)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, h))};
}
inline F32x16 head_bf16_ordered(F32x16 acc) { return head_bf16_swapped(acc); }

// ---- int4 ---------------------------------------------------------------------------------------

// Sums of rows 0..7 and 8..15 of a tile, less an offset.
inline F32x16 head4_less(__m256i lo, __m256i hi, int32_t offset) {
  const __m256i o = _mm256_set1_epi32(offset);
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(lo, o)), _mm256_cvtepi32_ps(_mm256_sub_epi32(hi, o))};
}
// Four bytes of activations for every row.
inline __m256i broadcast4(const int8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}
inline __m256i low_codes(__m256i raw) { return _mm256_and_si256(raw, _mm256_set1_epi8(15)); }
inline __m256i high_codes(__m256i raw) { return low_codes(_mm256_srli_epi16(raw, 4)); }

}  // namespace
}  // namespace bitnet::BITNET_ISA
