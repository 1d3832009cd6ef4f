// Words of the scalar ISA for int8 caches, and the reading copy of them: int8 keys and values
// against 16-bit queries and weights, sums exact in int32.  Each other simd_*_cache.h must agree;
// the bounds that keep the sums exact: kernel_table.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/simd_scalar.h"

namespace bitnet::BITNET_ISA {
namespace {

// Elements of a step: of keys, and of values at a pair of positions.  32 at most.
constexpr int64_t kCacheStep = 16;

// ---- keys ---------------------------------------------------------------------------------------

struct CacheKeys {
  int16_t x[kCacheStep];
};
using CacheQuery = CacheKeys;
using CacheDot = int32_t;

inline CacheDot cache_dot_zero() { return 0; }
inline CacheKeys cache_keys(const int8_t* p) {
  CacheKeys k;
  for (int i = 0; i < kCacheStep; ++i) k.x[i] = p[i];
  return k;
}
inline CacheQuery cache_query(const int16_t* p) {
  CacheQuery q;
  for (int i = 0; i < kCacheStep; ++i) q.x[i] = p[i];
  return q;
}
// Adds the products of a step of keys with a step of queries.
inline CacheDot cache_dot(CacheDot acc, const CacheKeys& k, const CacheQuery& q) {
  for (int i = 0; i < kCacheStep; ++i) acc += int32_t{k.x[i]} * q.x[i];
  return acc;
}
inline void reduce_dots(const CacheDot (&dots)[8], int32_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = dots[i];
}

// ---- values -------------------------------------------------------------------------------------
// The sums of a step are kCacheParts accumulators, in an order of elements that the ISA may choose;
// store_cache_sums puts them in memory's.

constexpr int kCacheParts = 1;

struct CacheValues {
  int16_t a[kCacheStep], b[kCacheStep];
};
struct CacheWeights {
  int16_t a, b;
};
struct CacheSum {
  int32_t lane[kCacheStep];
};

inline CacheSum cache_sum_zero() { return {}; }
// One step of two positions.
inline CacheValues cache_values(const int8_t* a, const int8_t* b) {
  CacheValues v;
  for (int i = 0; i < kCacheStep; ++i) v.a[i] = a[i], v.b[i] = b[i];
  return v;
}
// The weights of two neighbouring positions.
inline CacheWeights cache_weights(const int16_t* p) { return {p[0], p[1]}; }
template <int P>
inline CacheSum cache_sum(CacheSum acc, const CacheValues& v, CacheWeights w) {
  for (int i = 0; i < kCacheStep; ++i) acc.lane[i] += int32_t{v.a[i]} * w.a + int32_t{v.b[i]} * w.b;
  return acc;
}
inline void store_cache_sums(const CacheSum (&sums)[kCacheParts], int32_t* out) {
  for (int i = 0; i < kCacheStep; ++i) out[i] = sums[0].lane[i];
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
