// SIMD primitives of the neon_dotprod ISA: products by sdot.  Meanings: defaults.h.
#pragma once

#include "kernels/isa/neon_float.h"

namespace bitnet::BITNET_ISA {
namespace {

// ---- canonical rows -----------------------------------------------------------------------------

constexpr int64_t kStepBlocks = 1;
constexpr int64_t kFlushSteps = int64_t{1} << 30;  // sdot sums in int32: the bound is the caller's
constexpr int kGemvRows = 4;
constexpr bool kGemvStreams = false;
constexpr int kTileRows = 2;  // 2 x 4 accumulators, 4 raw, 4 code, 2 activation registers of 32
constexpr int kTileTokens = 4;

struct Raw {
  uint8x16_t lo, hi;
};
struct Codes {
  int8x16_t lo, hi;  // 0..3: the sign of the type does not matter
};
struct Activations {
  int8x16_t lo, hi;
};
using Partial = int32x4_t;
using Acc = int32x4_t;

inline Raw load_raw(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
inline Raw load_raw_tail(const uint8_t* p) { return load_raw(p); }
template <int F>
inline int8x16_t field(uint8x16_t raw) {
  if constexpr (F == 0) {
    return vreinterpretq_s8_u8(vshrq_n_u8(raw, 6));
  } else if constexpr (F == 3) {
    return vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(3)));
  } else {
    return vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(raw, 6 - 2 * F), vdupq_n_u8(3)));
  }
}
template <int F>
inline Codes codes(Raw raw) {
  return {field<F>(raw.lo), field<F>(raw.hi)};
}
template <int F>
inline Activations load_x(const int8_t* p) {
  return {vld1q_s8(p + 32 * F), vld1q_s8(p + 32 * F + 16)};
}
template <int F>
inline Activations load_x_tail(const int8_t* p) {
  return load_x<F>(p);
}
constexpr bool kDotInTwoSteps = false;
inline Partial dot(Partial p, Codes c, Activations x) {
  return vdotq_s32(vdotq_s32(p, c.lo, x.lo), c.hi, x.hi);
}
inline Acc widen(Acc acc, Partial p) { return vaddq_s32(acc, p); }
inline int32_t reduce(Acc acc) { return vaddvq_s32(acc); }
// Volatile assembly: see ymm_int.h.
[[gnu::always_inline]] inline void prefetch(const void* p) {
  __asm__ volatile("prfm pldl1keep, [%0]" : : "r"(p));
}
[[gnu::always_inline]] inline void prefetch_l2(const void* p) {
  __asm__ volatile("prfm pldl2keep, [%0]" : : "r"(p));
}

template <class T>
[[gnu::always_inline]] inline void pin(T& v) {
  __asm__ volatile("" : "+w"(v));
}
template <class T>
inline void renew(T&) {}  // needless: sdot adds into its accumulator

// ---- tiles: 4 lanes -----------------------------------------------------------------------------

constexpr int64_t kTileLanes = 4;
constexpr int kTileAccs = 24, kPanelAccs = 24;
constexpr int kTileStreams = 0;  // one tile after the other, sums in registers

using TileStep = uint8x16_t;
using TileCodes = uint8x16_t;
using TileX = int8x16_t;
using TileAcc = int32x4_t;
using TileSum = int32x4_t;

inline TileStep load_step(const uint8_t* p) { return vld1q_u8(p); }
inline void store_step(uint8_t* p, TileCodes c) { vst1q_u8(p, c); }
inline TileX broadcast_x(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
template <int H>
inline void zip_lines(TileStep a, TileStep b, TileStep c, TileStep d, TileStep (&to)[2]) {
  const uint16x8_t ab = vreinterpretq_u16_u8(H == 0 ? vzip1q_u8(a, b) : vzip2q_u8(a, b));
  const uint16x8_t cd = vreinterpretq_u16_u8(H == 0 ? vzip1q_u8(c, d) : vzip2q_u8(c, d));
  to[0] = vreinterpretq_u8_u16(vzip1q_u16(ab, cd));
  to[1] = vreinterpretq_u8_u16(vzip2q_u16(ab, cd));
}
inline TileAcc tile_dot(TileAcc p, TileCodes c, TileX x) {
  return vdotq_s32(p, vreinterpretq_s8_u8(c), x);
}
inline TileSum load_sum(const int32_t* p) { return vld1q_s32(p); }
inline void store_sum(int32_t* p, TileSum s) { vst1q_s32(p, s); }
inline TileSum set1_sum(int32_t x) { return vdupq_n_s32(x); }
inline TileSum add_sum(TileSum a, TileSum b) { return vaddq_s32(a, b); }
inline TileSum sub_sum(TileSum a, TileSum b) { return vsubq_s32(a, b); }

// Sums as floats, lane by lane, for scales of groups.
using TileFloats = float32x4_t;
inline TileFloats floats_of(TileSum s) { return vcvtq_f32_s32(s); }
inline TileFloats load_floats(const float* p) { return vld1q_f32(p); }
inline TileFloats load_floats(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
inline void store_floats(float* p, TileFloats v) { vst1q_f32(p, v); }
inline TileFloats set1_floats(float x) { return vdupq_n_f32(x); }
inline TileFloats mul_floats(TileFloats a, TileFloats b) { return vmulq_f32(a, b); }
inline TileFloats fma_floats(TileFloats a, TileFloats b, TileFloats c) {
  return vfmaq_f32(c, a, b);
}
inline TileSum times_256(TileSum s) { return vshlq_n_s32(s, 8); }

// The dot takes signed bytes: fields 1 and 2 keep their factor, field 3 is shifted down.
struct TwoBit {
  static constexpr int kFields = 4, kDots = 4, kUnroll = 2, kTokens = 5, kZeroCode = 1;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  using Prepared = TileStep;
  static Prepared prepare(TileStep v) { return v; }
  template <int F>
  static TileCodes codes(Prepared v) {
    return F == 3 ? vshrq_n_u8(v, 6) : vandq_u8(v, vdupq_n_u8(3 << (2 * F % 6)));
  }
  static void finish(TileSum (&s)[4]) {
    s[1] = vshrq_n_s32(s[1], 2);
    s[2] = vshrq_n_s32(s[2], 4);
  }
};
using TwoBitPlain = TwoBit;

// q - 128 for q, a fraction in base 3, and 3 (q - 128) = 3 q - 128 modulo 256: so the offset stays,
// and in (3 q_i - q_{i+1}) / 256, the digit that falls out, it takes exactly 1 off every digit.
struct Base3 {
  static constexpr int kFields = 5, kDots = 6, kUnroll = 2, kTokens = 4, kZeroCode = 0;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  struct Prepared {
    TileStep q[6];
  };
  static Prepared prepare(TileStep q) {
    Prepared s;
    q = veorq_u8(q, vdupq_n_u8(128));
#pragma GCC unroll 8
    for (int i = 0; i < 6; ++i) {
      s.q[i] = q;
      q = vaddq_u8(q, vaddq_u8(q, q));
    }
    return s;
  }
  template <int F>
  static TileCodes codes(const Prepared& s) {
    return s.q[F];
  }
  static void finish(TileSum (&s)[6]) {
#pragma GCC unroll 8
    for (int i = 0; i < 5; ++i) {
      s[i] = vshrq_n_s32(vsubq_s32(vaddq_s32(s[i], vaddq_s32(s[i], s[i])), s[i + 1]), 8);
    }
  }
};
using Base3Digits = Base3;

inline int32_t sum_i8_vector(const int8_t* p, int64_t n) {
  int32x4_t acc = vdupq_n_s32(0);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) acc = vdotq_s32(acc, vld1q_s8(p + i), vdupq_n_s8(1));
  int32_t sum = vaddvq_s32(acc);
  for (; i < n; ++i) sum += p[i];
  return sum;
}
struct LineXor {
  uint8x16_t quarter[4];
};
inline LineXor xor_line(LineXor x, const uint8_t* p) {
  return LineXor{{veorq_u8(x.quarter[0], vld1q_u8(p)), veorq_u8(x.quarter[1], vld1q_u8(p + 16)),
                  veorq_u8(x.quarter[2], vld1q_u8(p + 32)),
                  veorq_u8(x.quarter[3], vld1q_u8(p + 48))}};
}
inline uint64_t reduce_lines(LineXor a, LineXor b) {
  uint8x16_t all =
      veorq_u8(veorq_u8(a.quarter[0], a.quarter[1]), veorq_u8(a.quarter[2], a.quarter[3]));
  all = veorq_u8(
      all, veorq_u8(veorq_u8(b.quarter[0], b.quarter[1]), veorq_u8(b.quarter[2], b.quarter[3])));
  const uint64x2_t r = vreinterpretq_u64_u8(all);
  return vgetq_lane_u64(r, 0) ^ vgetq_lane_u64(r, 1);
}

// ---- int8 caches --------------------------------------------------------------------------------

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

constexpr int kCacheAccs = 4;

struct CacheValues {
  WideStep a, b;
};
using CacheWeights = int16x4_t;
using CacheSum = int32x4_t;

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
inline void store_cache_sums(const CacheSum (&sums)[kCacheAccs], int32_t* out) {
  for (int i = 0; i < kCacheAccs; ++i) vst1q_s32(out + 4 * i, sums[i]);
}

// ---- panels -------------------------------------------------------------------------------------

constexpr int kQuadTiles = 2;
constexpr bool kQuadHalves = true;

struct QuadWords {
  int8x16_t quarter[4];
};
struct QuadSums {
  int32x4_t low[4], high[4];
};
using QuadFactor = int8x16_t;

inline QuadWords quad_words(const void* p) {
  const auto* at = static_cast<const int8_t*>(p);
  return {{vld1q_s8(at), vld1q_s8(at + 16), vld1q_s8(at + 32), vld1q_s8(at + 48)}};
}
inline QuadFactor quad_factor(const int32_t* word) {
  return vreinterpretq_s8_s32(vld1q_dup_s32(word));
}
inline void quad_add(QuadSums& acc, const QuadWords& w, QuadFactor first, QuadFactor second) {
  for (int i = 0; i < 4; ++i) {
    acc.low[i] = vdotq_s32(acc.low[i], w.quarter[i], first);
    acc.high[i] = vdotq_s32(acc.high[i], w.quarter[i], second);
  }
}
inline void store_quads(const QuadSums& acc, int32_t, int32_t* out) {
  for (int i = 0; i < 4; ++i) {
    vst1q_s32(out + 4 * i, vaddq_s32(vshlq_n_s32(acc.high[i], 8), acc.low[i]));
  }
}

// ---- heads --------------------------------------------------------------------------------------

constexpr int kHeadStreams = 1;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens

inline void store_i16(int16_t* p, F32x16 v) {
  for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vqmovn_s32(vcvtnq_s32_f32(v.v[i])));
}
inline int64_t head_distance(int64_t tuned) { return tuned; }

// ---- bfloat16 -----------------------------------------------------------------------------------

// ---- int8 ---------------------------------------------------------------------------------------

// Overflow bound: layout::kHeadMaxK.
constexpr int64_t kHead8Step = 32;
constexpr int64_t kHead8FlushSteps = int64_t{1} << 20;
constexpr int kHead8Unroll = 2;
constexpr int kHead8Rows = 2;
constexpr int kHead8Tokens = 4;
constexpr int64_t kHead8Offset = 0;

struct Head8Weights {
  int8x16_t lo, hi;
};
struct Head8Acc {
  int32x4_t high, low;
};

inline Head8Weights head8_weights(const int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16)}; }
inline Head8Acc head8_dot(Head8Acc acc, Head8Weights w, const HeadToken& x, int64_t i) {
  acc.high = vdotq_s32(acc.high, w.lo, vld1q_s8(x.high + i));
  acc.low = vdotq_s32(acc.low, w.lo, vld1q_s8(x.low + i));
  acc.high = vdotq_s32(acc.high, w.hi, vld1q_s8(x.high + i + 16));
  acc.low = vdotq_s32(acc.low, w.hi, vld1q_s8(x.low + i + 16));
  return acc;
}
inline Head8Acc head8_add(Head8Acc a, Head8Acc b) {
  return {vaddq_s32(a.high, b.high), vaddq_s32(a.low, b.low)};
}
inline int64_t head8_sum(Head8Acc acc) {
  return 256 * vaddlvq_s32(acc.high) + vaddlvq_s32(acc.low);
}

// Of high bytes alone: avx512_heads.h.
struct HeadBytes {
  static constexpr int64_t kFromTokens = 4;  // an estimate
  static constexpr int kTokens = 8;
  static constexpr int64_t kStep = 16;
  static constexpr int32_t kOffset = 0;
  using Acc = int32x4_t;
  using Weights = int8x16_t;

  static Weights weights(const int8_t* p) { return vld1q_s8(p); }
  static int8x16_t token(const int8_t* p) { return vld1q_s8(p); }
  static void add(Acc& acc, Weights w, int8x16_t x) { acc = vdotq_s32(acc, w, x); }
  static void add_squares(Acc& acc, const int8_t* p) { add(acc, weights(p), weights(p)); }
};

// ---- int4 ---------------------------------------------------------------------------------------

constexpr int kHead4Tokens = 2;

struct Head4Acc {
  int32x4_t high[4], low[4];  // four rows each
};

inline int8x16_t broadcast4(const int8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(v));
}
template <int T>
[[gnu::always_inline]] inline void head4_block(const uint8_t* p, const HeadToken* x, int64_t k,
                                               Head4Acc (&acc)[T]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t raw = vld1q_u8(p + layout::kHeadStepBytes * j + 16 * i);
      const int8x16_t lo = vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(15)));
      const int8x16_t hi = vreinterpretq_s8_u8(vshrq_n_u8(raw, 4));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const int8_t* high = x[t].high + k + layout::kHeadStepFeatures * j;
        const int8_t* low = x[t].low + k + layout::kHeadStepFeatures * j;
        acc[t].high[i] = vdotq_s32(acc[t].high[i], lo, broadcast4(high));
        acc[t].high[i] = vdotq_s32(acc[t].high[i], hi, broadcast4(high + 4));
        acc[t].low[i] = vdotq_s32(acc[t].low[i], lo, broadcast4(low));
        acc[t].low[i] = vdotq_s32(acc[t].low[i], hi, broadcast4(low + 4));
      }
    }
  }
}
inline F32x16 head4_float(const Head4Acc& acc, int32_t offset) {
  return map([&](int i) {
    const int32x4_t sum = vaddq_s32(vshlq_n_s32(acc.high[i], 8), acc.low[i]);
    return vcvtq_f32_s32(vsubq_s32(sum, vdupq_n_s32(offset)));
  });
}

BITNET_OVERRIDES(kStepBlocks, kFlushSteps, kGemvRows, kGemvStreams, kTileRows, kTileTokens, Raw,
                 Codes, Activations, Partial, Acc, load_raw, load_raw_tail, codes, load_x,
                 load_x_tail, kDotInTwoSteps, dot, widen, reduce, prefetch, prefetch_l2, pin, renew,
                 kTileLanes, kTileAccs, kPanelAccs, kTileStreams, TileStep, TileCodes, TileX,
                 TileAcc, TileSum, load_step, store_step, broadcast_x, zip_lines, tile_dot,
                 load_sum, store_sum, set1_sum, add_sum, sub_sum, TileFloats, floats_of,
                 load_floats, store_floats, set1_floats, mul_floats, fma_floats, times_256, TwoBit,
                 TwoBitPlain, Base3, Base3Digits, sum_i8_vector, LineXor, xor_line, reduce_lines,
                 kCacheStep, CacheKeys, CacheQuery, CacheDot, cache_keys, cache_query, cache_dot,
                 reduce_dots, kCacheAccs, CacheValues, CacheWeights, CacheSum, cache_values,
                 cache_weights, cache_sum, store_cache_sums, kQuadTiles, kQuadHalves, QuadWords,
                 QuadSums, QuadFactor, quad_words, quad_factor, quad_add, store_quads, kHeadStreams,
                 kHead4Streams, kHeadPairRows, head_distance, kHead8Step, kHead8FlushSteps,
                 kHead8Unroll, kHead8Rows, kHead8Tokens, kHead8Offset, Head8Weights, Head8Acc,
                 head8_weights, head8_dot, head8_add, head8_sum, HeadBytes, kHead4Tokens, Head4Acc,
                 head4_block, store_i16, head4_float)

}  // namespace
}  // namespace bitnet::BITNET_ISA
