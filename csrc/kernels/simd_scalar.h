// Vocabulary of the scalar ISA: plain C++ for any CPU, and the reading copy of every word.
// The words' meaning is defined here; each other simd_*.h must agree bit for bit.
// Must not include anything that is shared with other translation units beyond the two headers
// below.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/simd_defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

// ---- float words: 16 lanes ------------------------------------------------------------------

struct F32x16 {
  float lane[16];
};

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t x) { return __builtin_bit_cast(float, x); }

template <class Op>
inline F32x16 map(Op op) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.lane[i] = op(i);
  return r;
}

inline F32x16 set1(float x) {
  return map([&](int) { return x; });
}
inline F32x16 zero() { return set1(0.0f); }
// The first `count` elements (all 16 if count >= 16), zeros in the other lanes.
inline F32x16 load_n(const float* p, int64_t count) {
  return map([&](int i) { return i < count ? p[i] : 0.0f; });
}
inline void store_n(float* p, F32x16 v, int64_t count) {
  for (int i = 0; i < 16 && i < count; ++i) p[i] = v.lane[i];
}
inline F32x16 add(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a * b + c with one rounding.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return map([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
// a > b ? a : b, so that a NaN in b survives and one in a does not (the x86 instruction's rule).
inline F32x16 max(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
// 2^n for integral n in [-126, 128]; 2^128 is infinity.
inline F32x16 pow2(F32x16 n) {
  return map([&](int i) {
    const float x = n.lane[i];
    const int32_t e = x == x ? static_cast<int32_t>(x) : 0;
    return float_of(static_cast<uint32_t>(e + 127) << 23);
  });
}
// Largest |x| so far, compared as bit patterns: exact, order-free, and NaN > infinity > finite.
inline F32x16 max_abs_bits(F32x16 acc, F32x16 x) {
  return map([&](int i) {
    const uint32_t b = bits_of(x.lane[i]) & 0x7fffffffu;
    return b > bits_of(acc.lane[i]) ? float_of(b) : acc.lane[i];
  });
}
inline uint32_t reduce_abs_bits(F32x16 acc) {
  uint32_t best = 0;
  for (int i = 0; i < 16; ++i) best = bits_of(acc.lane[i]) > best ? bits_of(acc.lane[i]) : best;
  return best;
}
// The tree: lanes 8 apart, then 4, 2, 1.
inline float reduce_add(F32x16 v) {
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) v.lane[i] += v.lane[i + width];
  }
  return v.lane[0];
}
inline float reduce_max(F32x16 v) {
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) {
      v.lane[i] = v.lane[i] > v.lane[i + width] ? v.lane[i] : v.lane[i + width];
    }
  }
  return v.lane[0];
}

// ---- conversions ------------------------------------------------------------------------------

inline F32x16 from_i32_n(const int32_t* p, int64_t count) {
  return map([&](int i) { return i < count ? static_cast<float>(p[i]) : 0.0f; });
}
// Round half to even, clamp to [-128, 127]; |v| < 2^22.
inline void to_i8_n(int8_t* p, F32x16 v, int64_t count) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  for (int i = 0; i < 16 && i < count; ++i) {
    float r = (v.lane[i] + kMagic) - kMagic;
    r = r > 127.0f ? 127.0f : r;
    r = r < -128.0f ? -128.0f : r;
    p[i] = static_cast<int8_t>(r);
  }
}
inline float bf16_to_f32(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
inline uint16_t f32_to_bf16(float x) {
  if (x != x) return 0x7fc0;
  const uint32_t b = bits_of(x);
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t fraction = h & 0x3ffu;
  if (exponent == 31)
    return float_of(sign | 0x7f800000u | (fraction ? 0x400000u | (fraction << 13) : 0));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-08f;  // 2^-24
  return float_of(sign | bits_of(magnitude));
}
inline uint16_t f32_to_f16(float x) {
  const uint32_t b = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>((b >> 16) & 0x8000u);
  const uint32_t a = b & 0x7fffffffu;
  if (a > 0x7f800000u) return sign | 0x7e00u | static_cast<uint16_t>((a >> 13) & 0x3ffu);
  if (a >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (a < 0x38800000u) {  // below 2^-14: subnormal; the add rounds half to even
    const float shifted = float_of(a) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}
inline F32x16 load_bf16_n(const uint16_t* p, int64_t count) {
  return map([&](int i) { return i < count ? bf16_to_f32(p[i]) : 0.0f; });
}
inline F32x16 load_f16_n(const uint16_t* p, int64_t count) {
  return map([&](int i) { return i < count ? f16_to_f32(p[i]) : 0.0f; });
}
inline void store_bf16_n(uint16_t* p, F32x16 v, int64_t count) {
  for (int i = 0; i < 16 && i < count; ++i) p[i] = f32_to_bf16(v.lane[i]);
}
inline void store_f16_n(uint16_t* p, F32x16 v, int64_t count) {
  for (int i = 0; i < 16 && i < count; ++i) p[i] = f32_to_f16(v.lane[i]);
}

// ---- attention words ----------------------------------------------------------------------------
// Many dot products at once, over elements E of a cache: float, or uint16_t for bfloat16.  Part is
// what one register holds of 16 lanes, kParts of them make a step.  A step may come in another
// order than memory's where that loads cheaper: mix brings a row into that order, unmix back.

using Part = F32x16;
constexpr int kParts = 1;

template <int P>
inline Part part(F32x16 v) {
  return v;
}
inline Part part_zero() { return zero(); }
inline Part load_part(const float* p) { return load_n(p, 16); }  // 16 / kParts elements
inline Part part_fma(Part a, Part b, Part c) { return fma(a, b, c); }

inline F32x16 load_mixed(const float* p) { return load_n(p, 16); }
inline F32x16 load_mixed(const uint16_t* p) { return load_bf16_n(p, 16); }
template <class E>
inline F32x16 mix(F32x16 v) {
  return v;
}
template <class E>
inline F32x16 unmix(F32x16 v) {
  return v;
}
// out[i] = reduce_add of the 16 lanes, in their unmixed order, whose parts are sums[0..kParts)[i].
template <class E>
inline void reduce_eight(const Part (&sums)[kParts][8], float* out) {
  for (int i = 0; i < 8; ++i) out[i] = reduce_add(sums[0][i]);
}

// Rows of queries that meet a step of keys or values at once, where there are many of them.
constexpr int kBlockRows = 4;

// to[c * stride + r] = tile[16 * r + c], for r and c in [0, 16).
inline void transpose_16(const float* tile, float* to, int64_t stride) {
  for (int c = 0; c < 16; ++c) {
    for (int r = 0; r < 16; ++r) to[c * stride + r] = tile[16 * r + c];
  }
}

// ---- integer words ------------------------------------------------------------------------------
// A unit is kUnitBlocks weight blocks of a row.  Raw holds its bytes; codes<F> takes field F out
// (0 = bits 7-6, meeting activations 0..31 of each block); load_x<F> loads the activations that
// meet it.  dot adds their products into a Partial, which is safe for kFlushUnits units; widen
// folds a Partial into an Acc.  load_raw_tail / load_x_tail do the same for a last unit of one
// block.

constexpr int64_t kUnitBlocks = 1;
constexpr int64_t kFlushUnits = 1 << 30;  // int32 partial sums: no flush needed
constexpr int kGemvRows = 4;              // rows per tile at one token
constexpr bool kGemvStreams = false;      // which rows: neighbours, or (true) far apart
constexpr int kTileRows = 2;              // rows x tokens per tile at more tokens
constexpr int kTileTokens = 4;

struct Raw {
  uint8_t byte[32];
};
struct Codes {
  int16_t code[32];
};
struct Activations {
  int16_t x[32];
};
using Partial = int32_t;
using Acc = int32_t;

inline Raw load_raw(const uint8_t* p) {
  Raw r;
  for (int i = 0; i < 32; ++i) r.byte[i] = p[i];
  return r;
}
inline Raw load_raw_tail(const uint8_t* p) { return load_raw(p); }
template <int F>
inline Codes codes(const Raw& raw) {
  Codes c;
  for (int i = 0; i < 32; ++i) c.code[i] = static_cast<int16_t>((raw.byte[i] >> (6 - 2 * F)) & 3);
  return c;
}
template <int F>
inline Activations load_x(const int8_t* p) {
  Activations a;
  for (int i = 0; i < 32; ++i) a.x[i] = p[32 * F + i];
  return a;
}
template <int F>
inline Activations load_x_tail(const int8_t* p) {
  return load_x<F>(p);
}
inline Partial partial_zero() { return 0; }
inline Acc acc_zero() { return 0; }
// Whether `dot` is two instructions, which an ISA then names: dot_product and add_product.
constexpr bool kDotInTwoSteps = false;
inline Partial dot(Partial p, const Codes& c, const Activations& a) {
  for (int i = 0; i < 32; ++i) p += static_cast<int32_t>(c.code[i]) * a.x[i];
  return p;
}
inline Acc widen(Acc acc, Partial p) { return acc + p; }
inline int32_t reduce(Acc acc) { return acc; }
inline void prefetch(const void*) {}
template <class T>
[[gnu::always_inline]] inline void pin(T& v) {
  if constexpr (sizeof(v) <= 8) __asm__ volatile("" : "+r"(v));
}
template <class T>
[[gnu::always_inline]] inline void renew(T& v) {
  __asm__ volatile("" : "+m"(v));
}

// ---- words of the private tiles ---------------------------------------------------------------
// A tile line is kTileLanes lanes of 4 bytes.  A decoder (TwoBit, Trits, ...; generic/tiles.inl)
// takes code vectors out of it; broadcast_x gives every lane the same 4 activations; tile_dot adds
// the 4 products of every lane; a TilePart holds them for a decoder's kFlush lines and part_sum
// makes int32 sums of it.

constexpr int64_t kTileLanes = 8;
constexpr int kTileParts = 8, kPanelParts = 8;
constexpr int kPanelFrom = 0;    // never decode to memory
constexpr int kTileStreams = 0;  // one tile after the other, sums in registers

struct TileLine {
  uint8_t byte[32];
};
using TileCodes = TileLine;
struct TileX {
  int8_t x[4];
};
struct TileSum {
  int32_t lane[8];
};
using TilePart = TileSum;

inline TileLine load_line(const uint8_t* p) {
  TileLine v;
  for (int i = 0; i < 32; ++i) v.byte[i] = p[i];
  return v;
}
inline void store_line(uint8_t* p, const TileCodes& c) {
  for (int i = 0; i < 32; ++i) p[i] = c.byte[i];
}
inline TileX broadcast_x(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline TileSum set1_sum(int32_t x) { return {{x, x, x, x, x, x, x, x}}; }
inline TilePart tile_part_zero() { return set1_sum(0); }
inline TilePart tile_dot(TilePart p, const TileCodes& c, const TileX& a) {
  for (int i = 0; i < 32; ++i) p.lane[i / 4] += int32_t{c.byte[i]} * a.x[i % 4];
  return p;
}
inline TileSum part_sum(const TilePart& p) { return p; }
inline TileSum load_sum(const int32_t* p) {
  TileSum s;
  for (int i = 0; i < 8; ++i) s.lane[i] = p[i];
  return s;
}
inline void store_sum(int32_t* p, const TileSum& s) {
  for (int i = 0; i < 8; ++i) p[i] = s.lane[i];
}
inline TileSum add_sum(TileSum a, const TileSum& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline TileSum sub_sum(TileSum a, const TileSum& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] -= b.lane[i];
  return a;
}

struct TwoBit {
  static constexpr int kFields = 4, kDots = 4, kUnroll = 1, kGroup = 2, kZeroCode = 1;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  using Split = TileLine;
  static Split split(const TileLine& v) { return v; }
  template <int F>
  static TileCodes codes(Split v) {
    for (uint8_t& b : v.byte) b = (b >> (2 * F)) & 3;
    return v;
  }
  static void finish(TileSum (&)[4]) {}
};
using TwoBitPlain = TwoBit;

// Digits of a fraction in base 3 come off the top by multiplying with 3.
struct Trits {
  static constexpr int kFields = 5, kDots = 5, kUnroll = 1, kGroup = 1, kZeroCode = 1;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  using Split = TileLine;
  static Split split(const TileLine& v) { return v; }
  template <int F>
  static TileCodes codes(Split v) {
    constexpr int kPower[] = {1, 3, 9, 27, 81};
    for (uint8_t& b : v.byte) b = static_cast<uint8_t>((b * kPower[F] & 0xff) * 3 >> 8);
    return v;
  }
  static void finish(TileSum (&)[5]) {}
};
using TritDigits = Trits;

inline int32_t sum_i8_vector(const int8_t* p, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += p[i];
  return sum;
}
// Reading for the sake of reading: the xor of 64-byte lines, reduced to the xor of their words.
struct LineXor {
  uint64_t word[8];
};
inline LineXor line_zero() { return LineXor{}; }
inline LineXor xor_line(LineXor x, const uint8_t* p) {
  for (int i = 0; i < 8; ++i) {
    uint64_t v;
    __builtin_memcpy(&v, p + 8 * i, 8);
    x.word[i] ^= v;
  }
  return x;
}
inline uint64_t reduce_lines(LineXor a, LineXor b) {
  uint64_t x = 0;
  for (int i = 0; i < 8; ++i) x ^= a.word[i] ^ b.word[i];
  return x;
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
