// Head words of the neon_dotprod ISA: both formats by sdot with the
// high and the low bytes of the activations. Meanings:
// simd_scalar_head.h. Must not know which rows a thread has.
#pragma once

#include "format/layout.h"
#include "kernels/kernel_table.h"
#include "kernels/simd_neon_dotprod.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int kHeadStreams = 1;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens

inline void store_i16(int16_t* p, F32x16 v) {
  for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vqmovn_s32(vcvtnq_s32_f32(v.v[i])));
}
inline int64_t head_distance(int64_t tuned) { return tuned; }

// ---- bfloat16 -----------------------------------------------------------------------------------

inline F32x16 head_bf16_x(const float* p, int64_t count) { return load_n(p, count); }
inline F32x16 head_bf16_weights(const uint16_t* p, int64_t count) { return load_bf16_n(p, count); }
inline F32x16 head_bf16_ordered(F32x16 acc) { return acc; }

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

struct Head4Acc {
  int32x4_t high[4], low[4];  // four rows each
};

inline Head4Acc head4_zero() {
  const int32x4_t none = vdupq_n_s32(0);
  return {{none, none, none, none}, {none, none, none, none}};
}
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
      const uint8x16_t raw = vld1q_u8(p + layout::kHeadLineBytes * j + 16 * i);
      const int8x16_t lo = vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(15)));
      const int8x16_t hi = vreinterpretq_s8_u8(vshrq_n_u8(raw, 4));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const int8_t* high = x[t].high + k + layout::kHeadLineFeatures * j;
        const int8_t* low = x[t].low + k + layout::kHeadLineFeatures * j;
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

}  // namespace
}  // namespace bitnet::BITNET_ISA
