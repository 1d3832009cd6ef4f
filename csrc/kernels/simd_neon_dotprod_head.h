// Head words of the neon_dotprod ISA: both formats by sdot with the high and the low bytes of the
// activations.  Meanings: simd_scalar_head.h.
#pragma once

#include "format/layout.h"
#include "kernels/kernel_table.h"
#include "kernels/simd_neon_dotprod.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kHeadPrefetch = 2048;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens

inline void store_i16(int16_t* p, F32x16 v) {
  for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vqmovn_s32(vcvtnq_s32_f32(v.v[i])));
}

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

inline Head8Acc head8_zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
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

// ---- int4 ---------------------------------------------------------------------------------------

constexpr int kHead4Tokens = 2;

struct Head4Sums {
  int32x4_t v[4];  // four rows each
};

inline F32x16 head4_float(const Head4Sums& sums, int32_t offset) {
  const int32x4_t o = vdupq_n_s32(offset);
  return map([&](int i) { return vcvtq_f32_s32(vsubq_s32(sums.v[i], o)); });
}
inline int8x16_t broadcast4(const int8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

template <int T>
[[gnu::always_inline]] inline void head4_group(const uint8_t* p, int64_t lines, const HeadToken* x,
                                               int64_t k0, Head4Sums (&sums)[T]) {
  int32x4_t high[T][4], low[T][4];
  for (int t = 0; t < T; ++t) {
    for (int i = 0; i < 4; ++i) high[t][i] = low[t][i] = vdupq_n_s32(0);
  }
  for (int64_t s = 0; s < lines; ++s) {
    const uint8_t* line = p + layout::kHeadLineBytes * s;
    const int64_t k = k0 + layout::kHeadLineFeatures * s;
    prefetch(line + kHeadPrefetch);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t raw = vld1q_u8(line + 16 * i);
      const int8x16_t lo = vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(15)));
      const int8x16_t hi = vreinterpretq_s8_u8(vshrq_n_u8(raw, 4));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        high[t][i] = vdotq_s32(high[t][i], lo, broadcast4(x[t].high + k));
        high[t][i] = vdotq_s32(high[t][i], hi, broadcast4(x[t].high + k + 4));
        low[t][i] = vdotq_s32(low[t][i], lo, broadcast4(x[t].low + k));
        low[t][i] = vdotq_s32(low[t][i], hi, broadcast4(x[t].low + k + 4));
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int i = 0; i < 4; ++i) {
      sums[t].v[i] = vaddq_s32(vshlq_n_s32(high[t][i], 8), low[t][i]);
    }
  }
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
