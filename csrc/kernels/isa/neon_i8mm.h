// SIMD primitives of the neon_i8mm ISA: those of neon_dotprod, and products of two tokens with two
// rows by usmmla (ternary/pairs.inl).
#pragma once

#include "kernels/isa/neon_dotprod.h"

namespace bitnet::BITNET_ISA {
namespace {

struct TokenPairs {
  static constexpr bool kHere = true;
  using X = int8x16_t;

  template <int H>
  static TileStep rows(TileStep a, TileStep b) {
    const uint32x4_t first = vreinterpretq_u32_u8(a), second = vreinterpretq_u32_u8(b);
    return vreinterpretq_u8_u32(H == 0 ? vzip1q_u32(first, second) : vzip2q_u32(first, second));
  }
  static X load(const int8_t* a, const int8_t* b) { return vcombine_s8(vld1_s8(a), vld1_s8(b)); }
  static X load(const int8_t* a) { return vcombine_s8(vld1_s8(a), vdup_n_s8(0)); }
  static TileAcc dot(TileAcc p, TileCodes c, X x) { return vusmmlaq_s32(p, c, x); }
  template <int I>
  static TileSum sum(TileAcc low, TileAcc high) {
    return I == 0 ? vuzp1q_s32(low, high) : vuzp2q_s32(low, high);
  }

  // Bytes are unsigned, so that a byte shifted by a field need not lose the fields above it: they
  // are the sum of the next dot. No mask takes a register beside 24 sums.
  struct TwoBit {
    using Pairs = TokenPairs;
    static constexpr int kFields = 4, kDots = 4, kTokens = 6, kZeroCode = 1;
    static constexpr int64_t kFlush = int64_t{1} << 30;
    using Prepared = TileStep;
    static Prepared prepare(TileStep v) { return v; }
    template <int F>
    static TileCodes codes(Prepared v) {
      if constexpr (F == 0) {
        return v;
      } else {
        return vshrq_n_u8(v, 2 * F);
      }
    }
    // Modulo 2^32, as the dots are; the sum of a field is small.
    static void finish(TileSum (&s)[4]) {
#pragma GCC unroll 4
      for (int i = 0; i < 3; ++i) s[i] = vsubq_s32(s[i], vshlq_n_s32(s[i + 1], 2));
    }
  };
  struct TwoBitPlain : TwoBit {
    static constexpr int64_t kPanelSteps = 128;
    static constexpr int64_t kPanelFrom = 13;
  };

  // Base3 and Base3Digits of vnni_tiles.h.
  struct Base3 {
    using Pairs = TokenPairs;
    static constexpr int kFields = 5, kDots = 6, kTokens = 4, kZeroCode = 1;
    static constexpr int64_t kFlush = int64_t{1} << 30;
    struct Prepared {
      TileStep q[6];
    };
    static Prepared prepare(TileStep q) {
      Prepared s;
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
  struct Base3Digits {
    using Pairs = TokenPairs;
    static constexpr int kFields = 5, kDots = 5, kTokens = 4, kZeroCode = 2;
    static constexpr int64_t kFlush = int64_t{1} << 30, kPanelSteps = 128;
    static constexpr int64_t kPanelFrom = 9;
    using Prepared = Base3::Prepared;
    static Prepared prepare(TileStep q) { return Base3::prepare(q); }
    template <int F>
    static TileCodes codes(const Prepared& s) {
      const TileStep q = s.q[F];
      return vandq_u8(vrhaddq_u8(q, vrhaddq_u8(q, vdupq_n_u8(253))), vdupq_n_u8(0xc0));
    }
    static void finish(TileSum (&s)[5]) {
#pragma GCC unroll 8
      for (int i = 0; i < 5; ++i) s[i] = vshrq_n_s32(s[i], 6);
    }
  };
};

BITNET_OVERRIDES(TokenPairs)

}  // namespace
}  // namespace bitnet::BITNET_ISA
