// SIMD primitives of the avx2 ISA: those of ymm_*.h, and a dot product by vpmaddubsw in int16,
// which is flushed to int32 before it can overflow. Meanings: defaults.h. Must not know
// layouts of models or threads.
#pragma once

#include "kernels/isa/ymm_int.h"

namespace bitnet::BITNET_ISA {
namespace {

// Overflow bound: vpmaddubsw of codes <= 3 (2 in valid weights) with |x| <= 128 gives |pair| <=
// 768; four fields a k-step, 8 steps: 768 * 4 * 8 = 24576 < 32768.  So any byte is safe for 8.
constexpr int64_t kFlushSteps = 8;
// CPUs without more than AVX2 read several far streams faster than one (docs/log.md).
constexpr bool kGemvStreams = true;

using Partial = __m256i;  // 16 x int16

inline Partial dot(Partial p, Codes c, Activations x) {
  return _mm256_add_epi16(p, _mm256_maddubs_epi16(c, x));
}
// The two halves of `dot`, for the peak loop.  The sum is spelt out because g++ 12 writes it into
// the product's register and then needs a move per sum.
constexpr bool kDotInTwoSteps = true;
inline Partial dot_product(Codes c, Activations x) { return _mm256_maddubs_epi16(c, x); }
inline void add_product(Partial& p, Partial product) {
#if defined(BITNET_EMULATE)
  p = _mm256_add_epi16(p, product);
#else
  __asm__("vpaddw %1, %0, %0" : "+x"(p) : "x"(product));
#endif
}
inline Acc widen(Acc acc, Partial p) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}
// acc + the sums of neighbouring products of 16-bit numbers, for ymm_int.h.
inline __m256i add_pairs(__m256i acc, __m256i a, __m256i b) {
  const __m256i pairs = _mm256_madd_epi16(a, b);
#if defined(BITNET_EMULATE)
  return _mm256_add_epi32(acc, pairs);
#else
  __asm__("vpaddd %1, %0, %0" : "+x"(acc) : "x"(pairs));  // in place: no copies, no reassociation
  return acc;
#endif
}

// ---- tiles --------------------------------------------------------------------------------------

// Tokens from which decoding to memory pays. Digits of base 3 take many instructions: on Zen 3 a
// panel is 1.15 times as fast at 4 tokens and 1.6 times at 9.
constexpr int64_t kTwoBitPanelFrom = 10, kBase3PanelFrom = 4;
constexpr int kTileStreams = 2;  // tiles side by side for one token

// 16 x int16: |pair| <= 2 * 128 * code, so codes up to 8 are safe for 16 k-steps (32768 is reached
// only as -32768), codes up to 2 for 64 and codes up to 3 for 42.
inline TileAcc tile_dot(TileAcc p, TileCodes c, TileX x) {
  const __m256i pairs = _mm256_maddubs_epi16(c, x);
#if defined(BITNET_EMULATE)
  return _mm256_add_epi16(p, pairs);
#else
  __asm__("vpaddw %1, %0, %0" : "+x"(p) : "x"(pairs));  // in place: no copies, no reassociation
  return p;
#endif
}
inline TileSum tile_acc_sum(TileAcc p) { return _mm256_madd_epi16(p, _mm256_set1_epi16(1)); }

// One shift for four fields: fields 1 and 3 keep a factor of 4.
struct TwoBit {
  static constexpr int kFields = 4, kDots = 4, kUnroll = 1, kTokens = 5, kZeroCode = 1;
  static constexpr int64_t kFlush = 16;
  struct Prepared {
    TileStep low, high;
  };
  static Prepared prepare(TileStep v) { return {v, shift_bytes<4>(v)}; }
  template <int F>
  static TileCodes codes(const Prepared& s) {
    return and_bytes(F < 2 ? s.low : s.high, F % 2 == 0 ? 3 : 12);
  }
  static void finish(TileSum (&s)[4]) {
    s[1] = shift_sum<2>(s[1]);
    s[3] = shift_sum<2>(s[3]);
  }
};

struct TwoBitPlain {
  static constexpr int kFields = 4, kDots = 4, kZeroCode = 1;
  static constexpr int64_t kPanelSteps = 64;
  static constexpr int64_t kPanelFrom = kTwoBitPanelFrom;
  using Prepared = TileStep;
  static Prepared prepare(TileStep v) { return v; }
  template <int F>
  static TileCodes codes(const Prepared& s) {
    return and_bytes(shift_bytes<2 * F>(s), 3);
  }
  static void finish(TileSum (&)[4]) {}
};

// q is a fraction in base 3: its next digit is the integer part of 3 q / 256, which with 1 added
// are the top two bits of 3 q / 4 + 63, two roundings to nearest included (tests walk all 243).
struct Base3Digits {
  static constexpr int kFields = 5, kDots = 5, kUnroll = 1, kTokens = 3, kZeroCode = 2;
  static constexpr int kFactor = 1;  // of its codes
  static constexpr int64_t kFlush = 32, kPanelSteps = 32;
  static constexpr int64_t kPanelFrom = kBase3PanelFrom;
  struct Prepared {
    TileStep q[5];
  };
  // q, 3 q, 9 q, ... modulo 256
  static Prepared prepare(TileStep q) {
    Prepared s;
#pragma GCC unroll 8
    for (int i = 0; i < 5; ++i) {
      s.q[i] = q;
      q = add_bytes(q, add_bytes(q, q));
    }
    return s;
  }
  template <int F>
  static TileCodes codes(const Prepared& s) {
    const TileStep top = avg_bytes(s.q[F], avg_bytes(s.q[F], set1_byte(253)));
    return and_bytes(shift_bytes<6>(top), 3);
  }
  static void finish(TileSum (&)[5]) {}
};
using Base3 = Base3Digits;

using SumTables = YmmTables;

// ---- heads --------------------------------------------------------------------------------------

// Zen 3 reads memory faster in several streams: int8 rows at .67, .84 and .97 of the read limit in
// one, two and four.  int4 computes nearly as long as it reads, and four streams cost it registers.
constexpr int kHeadStreams = 4;
constexpr int kHead4Streams = 2;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens
inline int64_t head_distance(int64_t) { return 1024; }

// ---- int8 ---------------------------------------------------------------------------------------

// Overflow bound: a lane grows by 4 products a step, each at most 128 * 32512 in magnitude; 128
// steps: 512 * 128 * 32512 = 2130706432 < 2^31.
constexpr int64_t kHead8Step = 32;
constexpr int64_t kHead8FlushSteps = 128;
constexpr int kHead8Unroll = 1;
constexpr int kHead8Rows = 2;
constexpr int kHead8Tokens = 4;
constexpr int64_t kHead8Offset = 0;

struct Head8Weights {
  __m256i lo, hi;  // as int16
};
using Head8Acc = __m256i;

inline Head8Weights head8_weights(const int8_t* p) {
  const auto* v = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(v)), _mm256_cvtepi8_epi16(_mm_loadu_si128(v + 1))};
}
inline Head8Acc head8_dot(Head8Acc acc, Head8Weights w, const HeadToken& x, int64_t i) {
  const __m256i a = _mm256_madd_epi16(w.lo, load_bytes(x.wide + i));
  const __m256i b = _mm256_madd_epi16(w.hi, load_bytes(x.wide + i + 16));
  return _mm256_add_epi32(acc, _mm256_add_epi32(a, b));
}
inline Head8Acc head8_add(Head8Acc a, Head8Acc b) { return _mm256_add_epi32(a, b); }
inline int64_t head8_sum(Head8Acc acc) { return sum_i32_wide(acc); }

// ---- int4 ---------------------------------------------------------------------------------------

constexpr int kHead4Tokens = 2;

struct Head4Pairs {
  __m256i high, low;  // int16 sums of two neighbouring features, per half of the 16-bit value
};

// Adds the products of 32 bytes of a line (8 rows x 8 features).  Overflow bound: one vpmaddubsw
// gives at most 2 * 15 * 128 = 3840 in magnitude, four lines add eight of them: 30720 < 2^15.
[[gnu::always_inline]] inline void head4_line(const uint8_t* p, const __m256i (&x)[4],
                                              Head4Pairs& sums) {
  __m256i raw = load_bytes(p);
  keep(raw);
  const __m256i lo = low_codes(raw), hi = high_codes(raw);
  // Products together, then sums: Zen 3 issues more of them than of the two in turn.
  __m256i a = _mm256_maddubs_epi16(lo, x[0]), b = _mm256_maddubs_epi16(lo, x[2]);
  __m256i c = _mm256_maddubs_epi16(hi, x[1]), d = _mm256_maddubs_epi16(hi, x[3]);
  keep(a, b, c, d);
  sums.high = _mm256_add_epi16(sums.high, a);
  sums.low = _mm256_add_epi16(sums.low, b);
  sums.high = _mm256_add_epi16(sums.high, c);
  sums.low = _mm256_add_epi16(sums.low, d);
  keep(sums.high);
  keep(sums.low);
}
// 256 * high + low of the four features of a dword, in the two multiplications that widen them.
[[gnu::always_inline]] inline __m256i head4_widen(__m256i acc, Head4Pairs sums) {
  const __m256i high = _mm256_madd_epi16(sums.high, _mm256_set1_epi16(256));
  const __m256i low = _mm256_madd_epi16(sums.low, _mm256_set1_epi16(1));
  return _mm256_add_epi32(acc, _mm256_add_epi32(high, low));
}
[[gnu::always_inline]] inline void head4_x(const HeadToken& x, int64_t k, __m256i (&v)[4]) {
  v[0] = broadcast4(x.high + k);
  v[1] = broadcast4(x.high + k + 4);
  v[2] = broadcast4(x.low + k);
  v[3] = broadcast4(x.low + k + 4);
}

struct Head4Acc {
  __m256i lo, hi;  // rows 0..7 and 8..15 of the tile
};

template <int T>
[[gnu::always_inline]] inline void head4_block(const uint8_t* p, const HeadToken* x, int64_t k,
                                               Head4Acc (&acc)[T]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    Head4Pairs lo = {_mm256_setzero_si256(), _mm256_setzero_si256()}, hi = lo;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m256i v[4];
      head4_x(x[t], k + layout::kHeadStepFeatures * j, v);
      head4_line(p + layout::kHeadStepBytes * j, v, lo);
      head4_line(p + layout::kHeadStepBytes * j + 32, v, hi);
    }
    acc[t] = {head4_widen(acc[t].lo, lo), head4_widen(acc[t].hi, hi)};
  }
}
inline F32x16 head4_float(Head4Acc acc, int32_t offset) {
  return head4_less(acc.lo, acc.hi, offset);
}

BITNET_OVERRIDES(SumTables, kFlushSteps, kGemvStreams, Partial, dot, kDotInTwoSteps, widen,
                 kTileStreams, tile_dot, TwoBit, TwoBitPlain, Base3Digits, Base3, kHeadStreams,
                 kHead4Streams, kHeadPairRows, head_distance, kHead8Step, kHead8FlushSteps,
                 kHead8Unroll, kHead8Rows, kHead8Tokens, kHead8Offset, Head8Weights, Head8Acc,
                 head8_weights, head8_dot, head8_add, head8_sum, kHead4Tokens, Head4Acc,
                 head4_block, tile_acc_sum, head4_float)

}  // namespace
}  // namespace bitnet::BITNET_ISA
