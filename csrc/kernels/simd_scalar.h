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

// ---- heads ---

// Sixteen floats, |v| <= 32512, rounded half to even.
inline void store_i16(int16_t* p, F32x16 v) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>((v.lane[i] + kMagic) - kMagic);
}

// ---- bfloat16 -----------------------------------------------------------------------------------
// Sixteen (or the first `count`) weights and activations, both in the same order of lanes, which
// the ISA may choose; head_bf16_ordered puts the lanes of their sums back.

inline F32x16 head_bf16_x(const float* p, int64_t count) { return load_n(p, count); }
inline F32x16 head_bf16_weights(const uint16_t* p, int64_t count) { return load_bf16_n(p, count); }
inline F32x16 head_bf16_ordered(F32x16 acc) { return acc; }

inline F32x16 head4_float(const Head4Acc& acc, int32_t offset) {
  return map([&](int i) { return static_cast<float>(acc.lane[i] - offset); });
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
