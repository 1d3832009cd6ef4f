// Head words of the scalar ISA, and the reading copy of them: 16-bit activations against int8 and
// int4 weights, sums exact. Each other simd_*_head.h must agree; layouts: format/layout.h. Must not
// know which rows a thread has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/layout.h"
#include "kernels/kernel_table.h"
#include "kernels/simd_scalar.h"

namespace bitnet::BITNET_ISA {
namespace {

// Streams that one token reads at once, of dense and int8 rows and of int4 tiles; head_distance:
// how far ahead of each to prefetch, given the distance tuned for one stream.
constexpr int kHeadStreams = 1;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens

// Sixteen floats, |v| <= 32512, rounded half to even.
inline void store_i16(int16_t* p, F32x16 v) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>((v.lane[i] + kMagic) - kMagic);
}
inline int64_t head_distance(int64_t tuned) { return tuned; }

// ---- bfloat16 -----------------------------------------------------------------------------------
// Sixteen (or the first `count`) weights and activations, both in the same order of lanes, which
// the ISA may choose; head_bf16_ordered puts the lanes of their sums back.

inline F32x16 head_bf16_x(const float* p, int64_t count) { return load_n(p, count); }
inline F32x16 head_bf16_weights(const uint16_t* p, int64_t count) { return load_bf16_n(p, count); }
inline F32x16 head_bf16_ordered(F32x16 acc) { return acc; }

// ---- int8 ---------------------------------------------------------------------------------------
// A step is kHead8Step consecutive weights of a row.  head8_dot adds their products with the
// token's values from feature i on; head8_sum folds up to kHead8FlushSteps of them, kHead8Offset
// times the token's sum too large.

constexpr int64_t kHead8Step = 32;
constexpr int64_t kHead8FlushSteps = int64_t{1} << 20;
constexpr int kHead8Unroll = 1;  // accumulators along K at one row and one token
constexpr int kHead8Rows = 2;    // rows x tokens of a tile at more tokens
constexpr int kHead8Tokens = 4;
constexpr int64_t kHead8Offset = 0;

struct Head8Weights {
  int16_t w[kHead8Step];
};
struct Head8Acc {
  int64_t sum;
};
inline Head8Acc head8_zero() { return {0}; }
inline Head8Weights head8_weights(const int8_t* p) {
  Head8Weights r;
  for (int i = 0; i < kHead8Step; ++i) r.w[i] = p[i];
  return r;
}
inline Head8Acc head8_dot(Head8Acc acc, const Head8Weights& w, const HeadToken& x, int64_t i) {
  int32_t sum = 0;  // 32 * 128 * 32512 < 2^31
  for (int j = 0; j < kHead8Step; ++j) sum += int32_t{w.w[j]} * x.wide[i + j];
  return {acc.sum + sum};
}
inline Head8Acc head8_add(Head8Acc a, Head8Acc b) { return {a.sum + b.sum}; }
inline int64_t head8_sum(Head8Acc acc) { return acc.sum; }

// ---- int4 ---------------------------------------------------------------------------------------
// A block is 4 lines of a tile: 16 rows x 32 features.  head4_block adds its products with T
// tokens, from feature k on, of the codes as they are; head4_float makes floats of the sums of one
// group (a lane a row) less an offset, which is 8 times the token's sum.

constexpr int kHead4Tokens = 2;

struct Head4Acc {
  int32_t lane[16];  // 15 * 32512 * 128 < 2^31
};

inline Head4Acc head4_zero() { return {}; }
template <int T>
inline void head4_block(const uint8_t* p, const HeadToken* x, int64_t k, Head4Acc (&acc)[T]) {
  for (int t = 0; t < T; ++t) {
    for (int s = 0; s < 4; ++s) {
      const int16_t* v = x[t].wide + k + layout::kHeadLineFeatures * s;
      for (int r = 0; r < 16; ++r) {
        const uint8_t* byte = p + layout::kHeadLineBytes * s + 4 * r;
        for (int j = 0; j < 4; ++j) {
          acc[t].lane[r] += (byte[j] & 15) * v[j] + (byte[j] >> 4) * v[4 + j];
        }
      }
    }
  }
}
inline F32x16 head4_float(const Head4Acc& acc, int32_t offset) {
  return map([&](int i) { return static_cast<float>(acc.lane[i] - offset); });
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
