// Head words of the scalar ISA, and the reading copy of them: 16-bit activations against int8 and
// int4 weights, sums exact.  Each other simd_*_head.h must agree; layouts: format/layout.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/layout.h"
#include "kernels/kernel_table.h"
#include "kernels/simd_scalar.h"

namespace bitnet::BITNET_ISA {
namespace {

// How far ahead of the loads the weights are fetched, in bytes of the stream.
constexpr int64_t kHeadPrefetch = 4096;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens

// Sixteen floats, |v| <= 32512, rounded half to even.
inline void store_i16(int16_t* p, F32x16 v) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>((v.lane[i] + kMagic) - kMagic);
}

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
// Sums of `lines` lines of a tile (one group, lines a multiple of 8) with T tokens from feature k0
// on, one lane a row, of the codes as they are: 8 times the tokens' sums too large.

constexpr int kHead4Tokens = 2;

struct Head4Sums {
  int32_t lane[16];
};

template <int T>
inline void head4_group(const uint8_t* p, int64_t lines, const HeadToken* x, int64_t k0,
                        Head4Sums (&sums)[T]) {
  for (int t = 0; t < T; ++t) {
    const int16_t* wide = x[t].wide + k0;
    for (int r = 0; r < 16; ++r) {
      int32_t sum = 0;  // 15 * 32512 * 128 < 2^31
      for (int64_t s = 0; s < lines; ++s) {
        const uint8_t* byte = p + layout::kHeadLineBytes * s + 4 * r;
        const int16_t* v = wide + layout::kHeadLineFeatures * s;
        for (int j = 0; j < 4; ++j) sum += (byte[j] & 15) * v[j] + (byte[j] >> 4) * v[4 + j];
      }
      sums[t].lane[r] = sum;
    }
  }
}
inline F32x16 head4_float(const Head4Sums& sums, int32_t offset) {
  return map([&](int i) { return static_cast<float>(sums.lane[i] - offset); });
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
