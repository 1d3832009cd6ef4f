// Vocabulary of the avx_vnni ISA: the shared ymm words, and a dot product by VEX vpdpbusd in int32,
// which nothing overflows. Meanings: simd_scalar.h. Must not use EVEX forms: CPUs of this ISA may
// lack AVX-512.
#pragma once

#include "kernels/simd_avx2_float.h"
#include "kernels/simd_ymm_int.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kFlushUnits = int64_t{1} << 30;  // int32 sums: the bound is the caller's
constexpr bool kGemvStreams = false;

using Partial = __m256i;  // 8 x int32

inline Partial partial_zero() { return _mm256_setzero_si256(); }
constexpr bool kDotInTwoSteps = false;
inline Partial dot(Partial p, Codes c, Activations x) {
#if defined(BITNET_EMULATE)
  return _mm256_dpbusd_epi32(p, c, x);
#else
  return _mm256_dpbusd_avx_epi32(p, c, x);
#endif
}
inline Acc widen(Acc acc, Partial p) { return _mm256_add_epi32(acc, p); }
// acc + the sums of neighbouring products of 16-bit numbers, for simd_ymm_cache.h.
inline __m256i add_pairs(__m256i acc, __m256i a, __m256i b) {
#if defined(BITNET_EMULATE)
  return _mm256_dpwssd_epi32(acc, a, b);
#else
  __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
#endif
}

// ---- private tiles: simd_tile_vnni.h ------------------------------------------------------------

constexpr int kTwoBitUnroll = 2, kTwoBitGroup = 5;  // 8 parts hide the latency of the dot
constexpr int kTritUnroll = 1, kTritGroup = 3;
inline TilePart tile_dot(TilePart p, TileCodes c, TileX x) {
#if defined(BITNET_EMULATE)
  return _mm256_dpbusd_epi32(p, c, x);
#else
  // g++ 12 copies and spills the accumulators of the intrinsic
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(p) : "x"(c), "x"(x));
  return p;
#endif
}

}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/simd_tile_vnni.h"
