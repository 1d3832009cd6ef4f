// Tile decoders where one instruction multiplies unsigned bytes with int8 and adds to int32 (VNNI,
// any width): bytes may keep their factor and need no mask, for sums are linear.  Included after an
// ISA's primitives of tiles; must not hold an intrinsic.
#pragma once

namespace bitnet::BITNET_ISA {
namespace {

constexpr int kTileStreams = 0;  // one tile after the other, sums in registers

// Fields keep the factor 4^f; the last dot is that of the raw byte, the sum of all four.
struct TwoBit {
  static constexpr int kFields = 4, kDots = 4, kUnroll = kTwoBitUnroll, kTokens = kTwoBitTokens;
  static constexpr int kZeroCode = 1;
  static constexpr int kRawDot = 3;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  using Prepared = TileStep;
  static Prepared prepare(TileStep v) { return v; }
  template <int F>
  static TileCodes codes(Prepared v) {
    return F == 3 ? v : and_bytes(v, 3 << (2 * F));
  }
  static void finish(TileSum (&s)[4]) {
    s[3] = shift_sum<6>(sub_sum(sub_sum(s[3], s[0]), add_sum(s[1], s[2])));
    s[1] = shift_sum<2>(s[1]);
    s[2] = shift_sum<4>(s[2]);
  }
};
// The same decoded to memory.
struct TwoBitPlain : TwoBit {
  static constexpr int64_t kPanelSteps = kVnniPanelSteps, kPanelFrom = kTwoBitPanelFrom;
};

// For several tokens fewer dots count more than fewer byte operations: digits 1..3 times 64 are the
// top two bits of 3 q / 4 + 63, two roundings included (tests walk all 243 codes).
struct Base3Digits {
  static constexpr int kFields = 5, kDots = 5, kUnroll = 1, kTokens = kBase3DigitsTokens;
  static constexpr int kZeroCode = 2, kFactor = 64;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  static constexpr int64_t kPanelSteps = kVnniPanelSteps, kPanelFrom = kBase3PanelFrom;
  struct Prepared {
    TileStep q[5];
  };
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
    return and_bytes(avg_bytes(s.q[F], avg_bytes(s.q[F], set1_byte(253))), 0xc0);
  }
  static void finish(TileSum (&s)[5]) {
#pragma GCC unroll 8
    for (int i = 0; i < 5; ++i) s[i] = shift_sum<6>(s[i]);
  }
};

// The bytes q_0 = q and q_{i+1} = 3 q_i mod 256 are all it takes: the digit that falls out is
// d_i = (3 q_i - q_{i+1}) / 256, and so is its sum.  10 byte additions and 6 dots for 5 rows.
struct Base3 {
  static constexpr int kFields = 5, kDots = 6, kUnroll = kBase3Unroll, kTokens = kBase3Tokens;
  static constexpr int kZeroCode = 1, kWideFrom = 4;
  using Wide = Base3Digits;
  static constexpr int kRawDot = 0;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  struct Prepared {
    TileStep q[6];
  };
  static Prepared prepare(TileStep q) {
    Prepared s;
#pragma GCC unroll 8
    for (int i = 0; i < 6; ++i) {
      s.q[i] = q;
      q = add_bytes(q, add_bytes(q, q));
    }
    return s;
  }
  template <int F>
  static TileCodes codes(const Prepared& s) {
    return s.q[F];
  }
  // The difference is taken modulo 2^32; 256 |sum of digits * x| <= 2^31 makes it exact.
  static void finish(TileSum (&s)[6]) {
#pragma GCC unroll 8
    for (int i = 0; i < 5; ++i) {
      s[i] = shift_sum<8>(sub_sum(add_sum(s[i], add_sum(s[i], s[i])), s[i + 1]));
    }
  }
};

BITNET_OVERRIDES(kTileStreams, TwoBit, TwoBitPlain, Base3Digits, Base3)

}  // namespace
}  // namespace bitnet::BITNET_ISA
