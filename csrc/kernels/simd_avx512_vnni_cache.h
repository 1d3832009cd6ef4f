// Words for int8 caches of the avx512_vnni ISA: vpdpwssd with 32 elements a step.
// Meanings: simd_scalar_cache.h.
// Must not know a cache's shape or scales: these words see one row of numbers.
#pragma once

#include "kernels/simd_avx512_vnni.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kCacheStep = 32;

// acc + the sums of neighbouring products of 16-bit numbers, in place: g++ 12 copies and spills the
// accumulators of the intrinsic.
inline __m512i add_pairs(__m512i acc, __m512i a, __m512i b) {
#if defined(BITNET_EMULATE)
  return _mm512_dpwssd_epi32(acc, a, b);
#else
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#endif
}

// ---- keys ---------------------------------------------------------------------------------------

using CacheKeys = __m512i;
using CacheQuery = __m512i;
using CacheDot = __m512i;

inline CacheDot cache_dot_zero() { return _mm512_setzero_si512(); }
inline CacheKeys cache_keys(const int8_t* p) { return _mm512_cvtepi8_epi16(load_half(p)); }
inline CacheQuery cache_query(const int16_t* p) { return _mm512_loadu_si512(p); }
inline CacheDot cache_dot(CacheDot acc, CacheKeys k, CacheQuery q) { return add_pairs(acc, k, q); }
// Quarters of two sums, then of four, each added to its neighbour 8 and 4 lanes on.
inline __m512i sum_halves(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}
inline __m512i sum_quarters(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
inline void reduce_dots(const CacheDot (&v)[8], int32_t* out) {
  const __m512i a = sum_quarters(sum_halves(v[0], v[1]), sum_halves(v[2], v[3]));
  const __m512i b = sum_quarters(sum_halves(v[4], v[5]), sum_halves(v[6], v[7]));
  const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m512i d = _mm512_add_epi32(c, _mm512_srli_epi64(c, 32));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, d)));
}

// ---- values -------------------------------------------------------------------------------------

constexpr int kCacheParts = 2;

struct CacheValues {
  __m512i part[kCacheParts];  // elements 0..7, 16..23 and 8..15, 24..31, two positions side by side
};
using CacheWeights = __m512i;
using CacheSum = __m512i;

inline CacheSum cache_sum_zero() { return _mm512_setzero_si512(); }
inline CacheValues cache_values(const int8_t* a, const int8_t* b) {
  const __m256i x = load_half(a), y = load_half(b);
  return {{_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y)),
           _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y))}};
}
inline CacheWeights cache_weights(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
template <int P>
inline CacheSum cache_sum(CacheSum acc, const CacheValues& v, CacheWeights w) {
  return add_pairs(acc, v.part[P], w);
}
inline void store_cache_sums(const CacheSum (&sums)[kCacheParts], int32_t* out) {
  const __m512i a = _mm512_shuffle_i32x4(sums[0], sums[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(sums[0], sums[1], 0xee);
  _mm512_storeu_si512(out, a);
  _mm512_storeu_si512(out + 16, b);
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
