// Float primitives of NEON: 16 lanes as four registers.  Two habits of Arm differ from what the
// primitives mean and are spelt out: fmax/fmin prefer the number to the NaN, so max and min are a
// compare and a select; and a multiply-add names its addend first.  Needs FPCR at its default
// (round to nearest even, no flushing of denormals).
#pragma once

#include <arm_neon.h>

#include "kernels/isa/defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

// ---- 16 lanes -----------------------------------------------------------------------------------

struct F32x16 {
  float32x4_t v[4];
};

template <class Op>
inline F32x16 map(Op op) {
  return {{op(0), op(1), op(2), op(3)}};
}

inline F32x16 set1(float x) {
  return map([&](int) { return vdupq_n_f32(x); });
}
inline F32x16 load_n(const float* p, int64_t count) {
  float buffer[16];
  if (count < 16) {
    for (int i = 0; i < 16; ++i) buffer[i] = i < count ? p[i] : 0.0f;
    p = buffer;
  }
  return map([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store_n(float* p, F32x16 x, int64_t count) {
  float buffer[16];
  float* to = count < 16 ? buffer : p;
  for (int i = 0; i < 4; ++i) vst1q_f32(to + 4 * i, x.v[i]);
  for (int64_t i = 0; count < 16 && i < count; ++i) p[i] = buffer[i];
}
inline F32x16 add(F32x16 a, F32x16 b) {
  return map([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return map([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return map([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return map([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return map([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline float32x4_t max_quarter(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline F32x16 max(F32x16 a, F32x16 b) {
  return map([&](int i) { return max_quarter(a.v[i], b.v[i]); });
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return map([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline F32x16 pow2(F32x16 n) {
  return map([&](int i) {  // a NaN converts to 0
    const int32x4_t e = vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(e, 23));
  });
}
inline F32x16 times_pow2(F32x16 p, F32x16 shifted) {
  return map([&](int i) {
    const uint32x4_t n = vshlq_n_u32(vreinterpretq_u32_f32(shifted.v[i]), 23);
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p.v[i]), n));
  });
}
template <int kDistance>
inline F32x16 swapped(F32x16 x) {
  return map([&](int i) {
    if constexpr (kDistance == 8) return x.v[i ^ 2];
    if constexpr (kDistance == 4) return x.v[i ^ 1];
    if constexpr (kDistance == 2) return vextq_f32(x.v[i], x.v[i], 2);
    return vrev64q_f32(x.v[i]);
  });
}
inline F32x16 max_abs_bits(F32x16 acc, F32x16 x) {
  return map([&](int i) {
    const uint32x4_t b = vandq_u32(vreinterpretq_u32_f32(x.v[i]), vdupq_n_u32(0x7fffffffu));
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(acc.v[i]), b));
  });
}
inline uint32_t reduce_abs_bits(F32x16 acc) {
  uint32x4_t m[4];
  for (int i = 0; i < 4; ++i) m[i] = vreinterpretq_u32_f32(acc.v[i]);
  return vmaxvq_u32(vmaxq_u32(vmaxq_u32(m[0], m[1]), vmaxq_u32(m[2], m[3])));
}
// The tree: lanes 8 apart (registers 0 and 2, 1 and 3), then 4, 2, 1.
inline float reduce_add(F32x16 x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float reduce_max(F32x16 x) {
  const float32x4_t four = max_quarter(max_quarter(x.v[0], x.v[2]), max_quarter(x.v[1], x.v[3]));
  const float32x2_t lo = vget_low_f32(four), hi = vget_high_f32(four);
  const float32x2_t two = vbsl_f32(vcgt_f32(lo, hi), lo, hi);
  const float a = vget_lane_f32(two, 0), b = vget_lane_f32(two, 1);
  return a > b ? a : b;
}

inline uint32_t less_mask(F32x16 a, F32x16 b) {
  static const uint32_t kBits[4] = {1, 2, 4, 8};
  const uint32x4_t bits = vld1q_u32(kBits);
  uint32_t mask = 0;
  for (int i = 0; i < 4; ++i) {
    mask |= vaddvq_u32(vandq_u32(vcltq_f32(a.v[i], b.v[i]), bits)) << (4 * i);
  }
  return mask;
}
inline F32x16 where_greater(F32x16 a, F32x16 b, F32x16 x) {
  return map([&](int i) {
    const uint32x4_t greater = vcgtq_f32(a.v[i], b.v[i]);
    return vreinterpretq_f32_u32(vandq_u32(greater, vreinterpretq_u32_f32(x.v[i])));
  });
}
struct WideSums {
  double lane[16];
};
struct LaneSums {
  float64x2_t v[8];
};
inline void add_to_lanes(LaneSums& sums, F32x16 x) {
  for (int i = 0; i < 4; ++i) {
    sums.v[2 * i] = vaddq_f64(sums.v[2 * i], vcvt_f64_f32(vget_low_f32(x.v[i])));
    sums.v[2 * i + 1] = vaddq_f64(sums.v[2 * i + 1], vcvt_high_f64_f32(x.v[i]));
  }
}
inline WideSums lanes_of_sums(const LaneSums& sums) {
  WideSums x;
  for (int i = 0; i < 8; ++i) vst1q_f64(x.lane + 2 * i, sums.v[i]);
  return x;
}

// ---- conversions --------------------------------------------------------------------------------

inline F32x16 from_i32_n(const int32_t* p, int64_t count) {
  int32_t buffer[16];
  if (count < 16) {
    for (int i = 0; i < 16; ++i) buffer[i] = i < count ? p[i] : 0;
    p = buffer;
  }
  return map([&](int i) { return vcvtq_f32_s32(vld1q_s32(p + 4 * i)); });
}
inline void to_i8_n(int8_t* p, F32x16 x, int64_t count) {
  // fcvtns rounds half to even; the narrowings saturate, first to int16, then to int8.
  int16x4_t h[4];
  for (int i = 0; i < 4; ++i) h[i] = vqmovn_s32(vcvtnq_s32_f32(x.v[i]));
  const int8x16_t bytes =
      vcombine_s8(vqmovn_s16(vcombine_s16(h[0], h[1])), vqmovn_s16(vcombine_s16(h[2], h[3])));
  if (count >= 16) {
    vst1q_s8(p, bytes);
    return;
  }
  int8_t buffer[16];
  vst1q_s8(buffer, bytes);
  for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
}

struct U16x16 {
  uint16x4_t h[4];
};

inline U16x16 load_u16_n(const uint16_t* p, int64_t count) {
  uint16_t buffer[16];
  if (count < 16) {
    for (int i = 0; i < 16; ++i) buffer[i] = i < count ? p[i] : 0;
    p = buffer;
  }
  return {{vld1_u16(p), vld1_u16(p + 4), vld1_u16(p + 8), vld1_u16(p + 12)}};
}
inline void store_u16_n(uint16_t* p, U16x16 x, int64_t count) {
  uint16_t buffer[16];
  uint16_t* to = count < 16 ? buffer : p;
  for (int i = 0; i < 4; ++i) vst1_u16(to + 4 * i, x.h[i]);
  for (int64_t i = 0; count < 16 && i < count; ++i) p[i] = buffer[i];
}
inline F32x16 load_bf16_n(const uint16_t* p, int64_t count) {
  const U16x16 x = load_u16_n(p, count);
  return map([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(x.h[i], 16)); });
}
inline F32x16 load_f16_n(const uint16_t* p, int64_t count) {
  const U16x16 x = load_u16_n(p, count);
  return map([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(x.h[i])); });
}
inline uint16x4_t f32x4_to_bf16(float32x4_t x) {
  const uint32x4_t b = vreinterpretq_u32_f32(x);
  const uint32x4_t lsb = vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(b, vaddq_u32(lsb, vdupq_n_u32(0x7fff)));
  return vbsl_u16(vmovn_u32(vceqq_f32(x, x)), vshrn_n_u32(rounded, 16), vdup_n_u16(0x7fc0));
}
inline void store_bf16_n(uint16_t* p, F32x16 x, int64_t count) {
  store_u16_n(p,
              {{f32x4_to_bf16(x.v[0]), f32x4_to_bf16(x.v[1]), f32x4_to_bf16(x.v[2]),
                f32x4_to_bf16(x.v[3])}},
              count);
}
inline F32x16 rounded_bf16(F32x16 x) {
  return map([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(f32x4_to_bf16(x.v[i]), 16)); });
}
inline uint16x4_t f32x4_to_f16(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
inline void store_f16_n(uint16_t* p, F32x16 x, int64_t count) {
  store_u16_n(
      p, {{f32x4_to_f16(x.v[0]), f32x4_to_f16(x.v[1]), f32x4_to_f16(x.v[2]), f32x4_to_f16(x.v[3])}},
      count);
}

// Eight bits as the upper byte of 16 words, in two registers.
struct UpperBytes {
  uint16x8_t half[2];
};
inline UpperBytes load_upper_n(const uint8_t* p, int64_t count) {
  uint8_t buffer[16];
  if (count < 16) {
    for (int i = 0; i < 16; ++i) buffer[i] = i < count ? p[i] : 0;
    p = buffer;
  }
  const uint8x16_t b = vld1q_u8(p), none = vdupq_n_u8(0);
  return {{vreinterpretq_u16_u8(vzip1q_u8(none, b)), vreinterpretq_u16_u8(vzip2q_u8(none, b))}};
}
inline F32x16 f16_halves_to_f32(uint16x8_t a, uint16x8_t b) {
  const float16x8_t x = vreinterpretq_f16_u16(a), y = vreinterpretq_f16_u16(b);
  return {{vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x)),
           vcvt_f32_f16(vget_low_f16(y)), vcvt_f32_f16(vget_high_f16(y))}};
}
// A float16 that is 256 times too small, or NaN.
inline uint16x8_t e4m3_to_f16(uint16x8_t words) {
  const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u16(words), 1);
  const uint16x8_t h = vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbf80));
  const uint16x8_t magnitude = vdupq_n_u16(0x3f80);  // of NaN, too: there it would be 480
  const uint16x8_t nan = vceqq_u16(vandq_u16(h, magnitude), magnitude);
  return vorrq_u16(h, vandq_u16(nan, vdupq_n_u16(0x7e00)));
}
inline F32x16 load_e4m3_n(const uint8_t* p, int64_t count) {
  const UpperBytes x = load_upper_n(p, count);
  return mul(f16_halves_to_f32(e4m3_to_f16(x.half[0]), e4m3_to_f16(x.half[1])), set1(256.0f));
}
inline F32x16 load_e5m2_n(const uint8_t* p, int64_t count) {
  const UpperBytes x = load_upper_n(p, count);
  return f16_halves_to_f32(x.half[0], x.half[1]);
}

// ---- attention ----------------------------------------------------------------------------------

using Reg = float32x4_t;
constexpr int kRegs = 4;

template <int P>
inline Reg reg(F32x16 v) {
  return v.v[P];
}
inline Reg load_reg(const float* p) { return vld1q_f32(p); }
inline Reg reg_fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }

// Lanes 2 apart: {a0 + a2, a1 + a3, b0 + b2, b1 + b3}.
inline float32x4_t fold_pairs(float32x4_t a, float32x4_t b) {
  return vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)),
                   vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
}
template <DType>
inline void reduce_eight(const Reg (&sums)[kRegs][8], float* out) {
  float32x4_t four[8];
  for (int i = 0; i < 8; ++i) {
    four[i] = vaddq_f32(vaddq_f32(sums[0][i], sums[2][i]), vaddq_f32(sums[1][i], sums[3][i]));
  }
  for (int i = 0; i < 8; i += 4) {
    vst1q_f32(out + i,
              vpaddq_f32(fold_pairs(four[i], four[i + 1]), fold_pairs(four[i + 2], four[i + 3])));
  }
}

constexpr int kBlockRows = 6;  // 24 of 32 registers hold sums

inline float32x4_t load_words(const char* p) {
  return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p)));
}
inline void transpose_16(const void* rows, int64_t row_bytes, float* to, int64_t stride) {
  for (int r = 0; r < 16; r += 4) {
    for (int c = 0; c < 16; c += 4) {
      const char* from = static_cast<const char*>(rows) + r * row_bytes + 4 * c;
      const float32x4x2_t a = vtrnq_f32(load_words(from), load_words(from + row_bytes));
      const float32x4x2_t b =
          vtrnq_f32(load_words(from + 2 * row_bytes), load_words(from + 3 * row_bytes));
      for (int i = 0; i < 2; ++i) {
        vst1q_f32(to + (c + i) * stride + r,
                  vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i])));
        vst1q_f32(to + (c + i + 2) * stride + r,
                  vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i])));
      }
    }
  }
}

template <int P>
inline F32x16 load_of_pairs(const void* p) {
  return map([&](int i) {
    const auto* bytes = static_cast<const uint8_t*>(p) + 16 * i;
    const uint32x4_t w = vreinterpretq_u32_u8(vld1q_u8(bytes));
    return vreinterpretq_f32_u32(P == 0 ? vshlq_n_u32(w, 16)
                                        : vandq_u32(w, vdupq_n_u32(0xffff0000u)));
  });
}

BITNET_OVERRIDES(LaneSums, Reg, kRegs, kBlockRows, transpose_16, pow2, times_pow2, swapped,
                 max_abs_bits, reduce_abs_bits, reduce_add, reduce_max, less_mask, where_greater,
                 add_to_lanes, lanes_of_sums, from_i32_n, to_i8_n, load_bf16_n, load_f16_n,
                 store_bf16_n, rounded_bf16, store_f16_n, load_e4m3_n, load_e5m2_n, reg, load_reg,
                 reg_fma, reduce_eight, load_of_pairs)

}  // namespace
}  // namespace bitnet::BITNET_ISA
