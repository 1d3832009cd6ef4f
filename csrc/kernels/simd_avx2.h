// Vocabulary of the avx2 ISA: the shared ymm words, and a dot product by vpmaddubsw in int16, which
// is flushed to int32 before it can overflow. Meanings: simd_scalar.h. Must not know layouts of
// models or threads.
#pragma once

#include "kernels/simd_avx2_float.h"
#include "kernels/simd_ymm_int.h"

namespace bitnet::BITNET_ISA {
namespace {

// Overflow bound: vpmaddubsw of codes <= 3 (2 in valid weights) with |x| <= 128 gives |pair| <=
// 768; four fields a unit, 8 units: 768 * 4 * 8 = 24576 < 32768.  So any byte is safe for 8 units.
constexpr int64_t kFlushUnits = 8;
// CPUs without more than AVX2 read several far streams faster than one (docs/log.md).
constexpr bool kGemvStreams = true;

using Partial = __m256i;  // 16 x int16

inline Partial partial_zero() { return _mm256_setzero_si256(); }
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
// acc + the sums of neighbouring products of 16-bit numbers, for simd_ymm_cache.h.
inline __m256i add_pairs(__m256i acc, __m256i a, __m256i b) {
  const __m256i pairs = _mm256_madd_epi16(a, b);
#if defined(BITNET_EMULATE)
  return _mm256_add_epi32(acc, pairs);
#else
  __asm__("vpaddd %1, %0, %0" : "+x"(acc) : "x"(pairs));  // in place: no copies, no reassociation
  return acc;
#endif
}

// ---- private tiles ----------------------------------------------------------------------------

constexpr int kPanelFrom = 10;   // tokens from which decoding to memory pays
constexpr int kTileStreams = 2;  // tiles side by side for one token

// 16 x int16: |pair| <= 2 * 128 * code, so codes up to 8 are safe for 16 lines (32768 is reached
// only as -32768), codes up to 2 for 64 and codes up to 3 for 42.
inline TilePart tile_dot(TilePart p, TileCodes c, TileX x) {
  const __m256i pairs = _mm256_maddubs_epi16(c, x);
#if defined(BITNET_EMULATE)
  return _mm256_add_epi16(p, pairs);
#else
  __asm__("vpaddw %1, %0, %0" : "+x"(p) : "x"(pairs));  // in place: no copies, no reassociation
  return p;
#endif
}
inline TileSum part_sum(TilePart p) { return _mm256_madd_epi16(p, _mm256_set1_epi16(1)); }

// One shift for four fields: fields 1 and 3 keep a factor of 4.
struct TwoBit {
  static constexpr int kFields = 4, kDots = 4, kUnroll = 1, kGroup = 5, kZeroCode = 1;
  static constexpr int64_t kFlush = 16;
  struct Split {
    TileLine low, high;
  };
  static Split split(TileLine v) { return {v, shift_bytes<4>(v)}; }
  template <int F>
  static TileCodes codes(const Split& s) {
    return and_bytes(F < 2 ? s.low : s.high, F % 2 == 0 ? 3 : 12);
  }
  static void finish(TileSum (&s)[4]) {
    s[1] = shift_sum<2>(s[1]);
    s[3] = shift_sum<2>(s[3]);
  }
};

struct TwoBitPlain {
  static constexpr int kFields = 4, kZeroCode = 1;
  static constexpr int64_t kPanelLines = 64;
  using Split = TileLine;
  static Split split(TileLine v) { return v; }
  template <int F>
  static TileCodes codes(const Split& s) {
    return and_bytes(shift_bytes<2 * F>(s), 3);
  }
};

// q is a fraction in base 3: its next digit is the integer part of 3 q / 256, which with 1 added
// are the top two bits of 3 q / 4 + 63, two roundings to nearest included (tests walk all 243).
struct TritDigits {
  static constexpr int kFields = 5, kDots = 5, kUnroll = 1, kGroup = 3, kZeroCode = 2;
  static constexpr int64_t kFlush = 32, kPanelLines = 32;
  struct Split {
    TileLine q[5];
  };
  // q, 3 q, 9 q, ... modulo 256
  static Split split(TileLine q) {
    Split s;
#pragma GCC unroll 8
    for (int i = 0; i < 5; ++i) {
      s.q[i] = q;
      q = add_bytes(q, add_bytes(q, q));
    }
    return s;
  }
  template <int F>
  static TileCodes codes(const Split& s) {
    const TileLine top = avg_bytes(s.q[F], avg_bytes(s.q[F], set1_byte(253)));
    return and_bytes(shift_bytes<6>(top), 3);
  }
  static void finish(TileSum (&)[5]) {}
};
using Trits = TritDigits;

}  // namespace
}  // namespace bitnet::BITNET_ISA
