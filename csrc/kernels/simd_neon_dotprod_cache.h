// Words for int8 caches of the neon_dotprod ISA: widening multiply-adds of 16-bit numbers.
// Meanings: simd_scalar_cache.h.
// Must not know a cache's shape or scales: these words see one row of numbers.
#pragma once

#include "kernels/simd_neon_dotprod.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kCacheStep = 16;

struct WideStep {
  int16x8_t lo, hi;
};
inline WideStep widen_step(const int8_t* p) {
  const int8x16_t v = vld1q_s8(p);
  return {vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v)};
}

// ---- keys ---------------------------------------------------------------------------------------

using CacheKeys = WideStep;
using CacheQuery = WideStep;
using CacheDot = int32x4_t;

inline CacheDot cache_dot_zero() { return vdupq_n_s32(0); }
inline CacheKeys cache_keys(const int8_t* p) { return widen_step(p); }
inline CacheQuery cache_query(const int16_t* p) { return {vld1q_s16(p), vld1q_s16(p + 8)}; }
inline CacheDot cache_dot(CacheDot acc, CacheKeys k, CacheQuery q) {
  acc = vmlal_high_s16(vmlal_s16(acc, vget_low_s16(k.lo), vget_low_s16(q.lo)), k.lo, q.lo);
  return vmlal_high_s16(vmlal_s16(acc, vget_low_s16(k.hi), vget_low_s16(q.hi)), k.hi, q.hi);
}
inline void reduce_dots(const CacheDot (&v)[8], int32_t* out) {
  for (int i = 0; i < 8; i += 4) {
    vst1q_s32(out + i, vpaddq_s32(vpaddq_s32(v[i], v[i + 1]), vpaddq_s32(v[i + 2], v[i + 3])));
  }
}

// ---- values -------------------------------------------------------------------------------------

constexpr int kCacheParts = 4;

struct CacheValues {
  WideStep a, b;
};
using CacheWeights = int16x4_t;
using CacheSum = int32x4_t;

inline CacheSum cache_sum_zero() { return vdupq_n_s32(0); }
inline CacheValues cache_values(const int8_t* a, const int8_t* b) {
  return {widen_step(a), widen_step(b)};
}
inline CacheWeights cache_weights(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return vreinterpret_s16_s32(vdup_n_s32(pair));
}
template <int P>
inline int16x4_t quarter(const WideStep& v) {
  const int16x8_t half = P < 2 ? v.lo : v.hi;
  return P % 2 == 0 ? vget_low_s16(half) : vget_high_s16(half);
}
template <int P>
inline CacheSum cache_sum(CacheSum acc, const CacheValues& v, CacheWeights w) {
  return vmlal_lane_s16(vmlal_lane_s16(acc, quarter<P>(v.a), w, 0), quarter<P>(v.b), w, 1);
}
inline void store_cache_sums(const CacheSum (&sums)[kCacheParts], int32_t* out) {
  for (int i = 0; i < kCacheParts; ++i) vst1q_s32(out + 4 * i, sums[i]);
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
