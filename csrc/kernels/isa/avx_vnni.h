// SIMD primitives of the avx_vnni ISA: those of ymm_*.h, and a dot product by VEX vpdpbusd,
// which nothing overflows. Meanings: scalar.h. Must not use EVEX forms: CPUs of this ISA may
// lack AVX-512.
#pragma once

#include "kernels/isa/ymm_int.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kFlushSteps = int64_t{1} << 30;  // int32 sums: the bound is the caller's
constexpr bool kGemvStreams = false;

using Partial = __m256i;  // 8 x int32

constexpr bool kDotInTwoSteps = false;
inline Partial dot(Partial p, Codes c, Activations x) {
#if defined(BITNET_EMULATE) || defined(BITNET_EMULATE_DOTS)
  return _mm256_dpbusd_epi32(p, c, x);
#else
  return _mm256_dpbusd_avx_epi32(p, c, x);
#endif
}
inline Acc widen(Acc acc, Partial p) { return _mm256_add_epi32(acc, p); }
// acc + the sums of neighbouring products of 16-bit numbers, for ymm_int.h.
inline __m256i add_pairs(__m256i acc, __m256i a, __m256i b) {
#if defined(BITNET_EMULATE) || defined(BITNET_EMULATE_DOTS)
  return _mm256_dpwssd_epi32(acc, a, b);
#else
  __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
#endif
}

// ---- tiles: vnni_tiles.h ------------------------------------------------------------------------

constexpr int kTwoBitUnroll = 2, kTwoBitTokens = 6;  // 10 parts hide the latency of the dot
constexpr int kTokensOfTwoSets = 3;
constexpr int kBase3Unroll = 1, kBase3Tokens = 3, kBase3DigitsTokens = 3;
constexpr int64_t kTwoBitPanelFrom = 0, kBase3PanelFrom = 8;
constexpr int64_t kVnniPanelSteps = 64;
inline TileAcc tile_dot(TileAcc p, TileCodes c, TileX x) {
#if defined(BITNET_EMULATE) || defined(BITNET_EMULATE_DOTS)
  return _mm256_dpbusd_epi32(p, c, x);
#else
  // g++ 12 copies and spills the accumulators of the intrinsic
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(p) : "x"(c), "x"(x));
  return p;
#endif
}

// As those of AVX2, where products take 7/9 of the time, an estimate.
struct SumTables : YmmTables {
  using Narrow = SumTables;
  static constexpr int64_t kFromTokens = 16;
  static constexpr int64_t kProductCost = 50;
};

// ---- heads --------------------------------------------------------------------------------------

constexpr int kHeadStreams = 1;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens
inline int64_t head_distance(int64_t tuned) { return tuned; }

// ---- int8 ---------------------------------------------------------------------------------------

// Overflow bound: layout::kHeadMaxK.
constexpr int64_t kHead8Step = 32;
constexpr int64_t kHead8FlushSteps = int64_t{1} << 20;
constexpr int kHead8Unroll = 4;
constexpr int kHead8Rows = 2;  // 2 x 2 x 2 accumulators of 16 registers
constexpr int kHead8Tokens = 2;
constexpr int64_t kHead8Offset = 128;

using Head8Weights = __m256i;
struct Head8Acc {
  __m256i high, low;
};

inline Head8Weights head8_weights(const int8_t* p) {
  return _mm256_xor_si256(load_bytes(p), _mm256_set1_epi8(-128));
}
inline Head8Acc head8_dot(Head8Acc acc, Head8Weights w, const HeadToken& x, int64_t i) {
  return {tile_dot(acc.high, w, load_bytes(x.high + i)),
          tile_dot(acc.low, w, load_bytes(x.low + i))};
}
inline Head8Acc head8_add(Head8Acc a, Head8Acc b) {
  return {_mm256_add_epi32(a.high, b.high), _mm256_add_epi32(a.low, b.low)};
}
inline int64_t head8_sum(Head8Acc acc) {
  return 256 * sum_i32_wide(acc.high) + sum_i32_wide(acc.low);
}

// Of high bytes alone: avx512_heads.h.
struct HeadBytes {
  static constexpr int64_t kFromTokens = 4;  // an estimate
  static constexpr int kTokens = 4;
  static constexpr int64_t kStep = 32;
  static constexpr int32_t kOffset = 128;
  using Acc = __m256i;
  using Weights = __m256i;

  static Weights weights(const int8_t* p) { return head8_weights(p); }
  static __m256i token(const int8_t* p) { return load_bytes(p); }
  [[gnu::always_inline]] static void add(Acc& acc, Weights w, __m256i x) {
    acc = tile_dot(acc, w, x);
  }
  [[gnu::always_inline]] static void add_squares(Acc& acc, const int8_t* p) {
    const __m256i magnitudes = _mm256_abs_epi8(load_bytes(p));
    add(acc, magnitudes, _mm256_min_epu8(magnitudes, _mm256_set1_epi8(127)));
  }
};

// ---- int4 ---------------------------------------------------------------------------------------

constexpr int kHead4Tokens = 2;

// Two chains of vpdpbusd for each of high and low: one alone would wait for its latency.
struct Head4Chains {
  __m256i high[2], low[2];
};
struct Head4Acc {
  Head4Chains lo, hi;  // rows 0..7 and 8..15 of the tile
};

[[gnu::always_inline]] inline void head4_line(const uint8_t* p, const __m256i (&x)[4],
                                              Head4Chains& c) {
  const __m256i raw = load_bytes(p);
  const __m256i lo = low_codes(raw), hi = high_codes(raw);
  c.high[0] = tile_dot(c.high[0], lo, x[0]);
  c.high[1] = tile_dot(c.high[1], hi, x[1]);
  c.low[0] = tile_dot(c.low[0], lo, x[2]);
  c.low[1] = tile_dot(c.low[1], hi, x[3]);
}
[[gnu::always_inline]] inline __m256i head4_total(const Head4Chains& c) {
  return _mm256_add_epi32(_mm256_slli_epi32(_mm256_add_epi32(c.high[0], c.high[1]), 8),
                          _mm256_add_epi32(c.low[0], c.low[1]));
}

template <int T>
[[gnu::always_inline]] inline void head4_block(const uint8_t* p, const HeadToken* x, int64_t k,
                                               Head4Acc (&acc)[T]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int8_t* high = x[t].high + k + layout::kHeadStepFeatures * j;
      const int8_t* low = x[t].low + k + layout::kHeadStepFeatures * j;
      const __m256i v[4] = {broadcast4(high), broadcast4(high + 4), broadcast4(low),
                            broadcast4(low + 4)};
      head4_line(p + layout::kHeadStepBytes * j, v, acc[t].lo);
      head4_line(p + layout::kHeadStepBytes * j + 32, v, acc[t].hi);
    }
  }
}
inline F32x16 head4_float(const Head4Acc& acc, int32_t offset) {
  return head4_less(head4_total(acc.lo), head4_total(acc.hi), offset);
}

BITNET_OVERRIDES(SumTables, kFlushSteps, kGemvStreams, Partial, kDotInTwoSteps, dot, widen,
                 kTokensOfTwoSets, tile_dot, kHeadStreams, kHead4Streams, kHeadPairRows,
                 head_distance, kHead8Step, kHead8FlushSteps, kHead8Unroll, kHead8Rows,
                 kHead8Tokens, kHead8Offset, Head8Weights, Head8Acc, head8_weights, head8_dot,
                 head8_add, head8_sum, HeadBytes, kHead4Tokens, Head4Acc, head4_block, head4_float)

}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/isa/vnni_tiles.h"
