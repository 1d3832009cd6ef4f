// SIMD primitives of heads that an ISA need not write; see defaults.h, which includes this.
#pragma once

#include <cstdint>

#include "format/layout.h"
#include "kernels/kernel_table.h"

namespace bitnet {
namespace {

// Streams that one token reads at once, of dense and int8 rows and of int4 tiles; head_distance:
// how far ahead of each to prefetch, given the distance tuned for one stream.
constexpr int kHeadStreams = 1;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens

inline int64_t head_distance(int64_t tuned) { return tuned; }

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

template <int T>
inline void head4_block(const uint8_t* p, const HeadToken* x, int64_t k, Head4Acc (&acc)[T]) {
  for (int t = 0; t < T; ++t) {
    for (int s = 0; s < 4; ++s) {
      const int16_t* v = x[t].wide + k + layout::kHeadStepFeatures * s;
      for (int r = 0; r < 16; ++r) {
        const uint8_t* byte = p + layout::kHeadStepBytes * s + 4 * r;
        for (int j = 0; j < 4; ++j) {
          acc[t].lane[r] += (byte[j] & 15) * v[j] + (byte[j] >> 4) * v[4 + j];
        }
      }
    }
  }
}

}  // namespace
}  // namespace bitnet
