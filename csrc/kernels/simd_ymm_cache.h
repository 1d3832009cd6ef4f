// Words for int8 caches that AVX2 and AVX-VNNI share.  Meanings: simd_scalar_cache.h.
// Must not hold a dot product: add_pairs differs between the two ISAs. Must not know a cache's
// shape or scales: these words see one row of numbers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kCacheStep = 16;

inline __m256i widen_bytes(__m128i v) { return _mm256_cvtepi8_epi16(v); }
inline __m128i load_step(const int8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// ---- keys ---------------------------------------------------------------------------------------

using CacheKeys = __m256i;
using CacheQuery = __m256i;
using CacheDot = __m256i;

inline CacheDot cache_dot_zero() { return _mm256_setzero_si256(); }
inline CacheKeys cache_keys(const int8_t* p) { return widen_bytes(load_step(p)); }
inline CacheQuery cache_query(const int16_t* p) {
  CacheQuery q = load_bytes(p);
#if !defined(BITNET_EMULATE)
  __asm__("" : "+x"(q));  // else g++ 12 loads it again for every key
#endif
  return q;
}
inline CacheDot cache_dot(CacheDot acc, CacheKeys k, CacheQuery q) { return add_pairs(acc, k, q); }
inline __m256i shuffle_lanes(__m256i a, __m256i b, const int lanes) {
  const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
  return _mm256_castps_si256(lanes == 0x88 ? _mm256_shuffle_ps(x, y, 0x88)
                                           : _mm256_shuffle_ps(x, y, 0xdd));
}
// {low half of a + high half of a, the same of b}; then lanes 2 apart; then neighbours.
inline __m256i sum_halves(__m256i a, __m256i b) {
  return _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xf0), _mm256_permute2x128_si256(a, b, 0x21));
}
inline __m256i sum_pairs(__m256i a, __m256i b) {
  return _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xcc), _mm256_alignr_epi8(b, a, 8));
}
inline __m256i sum_neighbours(__m256i a, __m256i b) {
  return _mm256_add_epi32(shuffle_lanes(a, b, 0x88), shuffle_lanes(a, b, 0xdd));
}
inline void reduce_dots(const CacheDot (&v)[8], int32_t* out) {
  const __m256i a = sum_pairs(sum_halves(v[0], v[1]), sum_halves(v[2], v[3]));
  const __m256i b = sum_pairs(sum_halves(v[4], v[5]), sum_halves(v[6], v[7]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i r = _mm256_permutevar8x32_epi32(sum_neighbours(a, b), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), r);
}

// ---- values -------------------------------------------------------------------------------------

constexpr int kCacheParts = 2;

struct CacheValues {
  __m256i part[kCacheParts];  // elements 0..7 and 8..15, the two positions side by side
};
using CacheWeights = __m256i;
using CacheSum = __m256i;

inline CacheSum cache_sum_zero() { return _mm256_setzero_si256(); }
inline CacheValues cache_values(const int8_t* a, const int8_t* b) {
  const __m128i x = load_step(a), y = load_step(b);
  return {{widen_bytes(_mm_unpacklo_epi8(x, y)), widen_bytes(_mm_unpackhi_epi8(x, y))}};
}
inline CacheWeights cache_weights(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
template <int P>
inline CacheSum cache_sum(CacheSum acc, const CacheValues& v, CacheWeights w) {
  return add_pairs(acc, v.part[P], w);
}
inline void store_cache_sums(const CacheSum (&sums)[kCacheParts], int32_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), sums[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), sums[1]);
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
