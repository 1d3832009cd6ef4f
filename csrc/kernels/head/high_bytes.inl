// Bounds of an int8 head's logits by the high bytes of several tokens: half of the work of
// head_int8. Contract: head_bound in kernel_table.h. Uses dense.inl, tiles.inl and int8.inl.
//
// The low bytes change a row's sum by at most the length of the row times the length of the low
// bytes (Cauchy and Schwarz). The length of the row is computed together with its products.

// Two rows, or one twice, x T tokens: sums of codes, as U's add() takes them, to sums[t][row], and
// of the rows' squares.
template <class U, int T, bool kSquares>
[[gnu::noinline]] void high_byte_pair(const int8_t* const (&w)[2], int64_t k, const HeadToken* x,
                                      const int8_t* ahead, int64_t ahead_step,
                                      int32_t (&sums)[2][8], int32_t (&squares)[2]) {
  constexpr int64_t kStep = U::kStep;
  typename U::Acc acc[2][8] = {}, square[2] = {};
  const auto step = [&](const int8_t* first, const int8_t* second, int64_t i)
                        __attribute__((always_inline)) {
                          const auto a = U::weights(first), b = U::weights(second);
#pragma GCC unroll 8
                          for (int t = 0; t < T; ++t) {
                            const auto v = U::token(x[t].high + i);
                            U::add(acc[0][t], a, v);
                            U::add(acc[1][t], b, v);
                          }
                          if constexpr (kSquares) {
                            U::add_squares(square[0], first);
                            U::add_squares(square[1], second);
                          }
                        };
  const int64_t whole = k / kStep * kStep;
#pragma GCC unroll 1
  for (int64_t i = 0; i < whole; i += kStep) {
    prefetch_l2(ahead);
    prefetch_l2(ahead + k);
    ahead += ahead_step;
    step(w[0] + i, w[1] + i, i);
  }
  if (whole < k) {  // must not read behind a row
    alignas(64) int8_t last[2][kStep] = {};
    for (int64_t i = whole; i < k; ++i) last[0][i - whole] = w[0][i], last[1][i - whole] = w[1][i];
    step(last[0], last[1], whole);
  }
  reduce_dots(acc[0], sums[0]);
  reduce_dots(acc[1], sums[1]);
  if constexpr (kSquares) {
    int32_t all[8];
    reduce_dots({square[0], square[1]}, all);
    squares[0] = all[0], squares[1] = all[1];
  }
}

// The bounds of `count` rows and one token from their sums.
inline void finish_bounds(const int32_t* sums, const float* lengths, const float* scale,
                          int64_t count, int32_t excess, const HeadToken& x, float* out) {
  for (int64_t n = 0; n < count; ++n) {
    // Each rounding here is within 2^-22 of the larger term. All later roundings are those of
    // head_int8, which are monotone.
    const float high = 256.0f * static_cast<float>(sums[n] - excess);
    const float rest = lengths[n] * x.low_length + 0x1p-20f * __builtin_fabsf(high);
    const float factor = scale[n] * x.scale;
    out[n] = (high + __builtin_copysignf(rest, factor)) * factor;
  }
}

template <class U>
void bound_rows(const int8_t* w, const float* scale, int64_t k, int64_t rows, const HeadToken* x,
                int64_t tokens, float* out, int64_t out_stride) {
  alignas(64) int32_t sums[8][kHeadRowChunk];
  alignas(64) float lengths[kHeadRowChunk];
  // Every pass over rows prefetches its share of the next rows.
  const int64_t passes = (tokens + U::kTokens - 1) / U::kTokens;
  const int64_t ahead_step = (U::kStep + passes - 1) / passes;
  for (int64_t begin = 0; begin < rows; begin += kHeadRowChunk) {
    const int64_t count = rows - begin < kHeadRowChunk ? rows - begin : kHeadRowChunk;
    int64_t pass = 0;
    for_token_groups<U::kTokens>(tokens, [&]<int T>(int64_t first) {
      const int8_t* ahead = w + (begin + kHeadRowChunk) * k + pass++ * (k / passes);
      for (int64_t n = 0; n < count; n += 2) {
        const int64_t at[2] = {n, n + 1 < count ? n + 1 : n};
        const int8_t* const pair[2] = {w + (begin + at[0]) * k, w + (begin + at[1]) * k};
        int32_t all[2][8], squares[2];
        if (first == 0) {
          high_byte_pair<U, T, true>(pair, k, x, ahead + n * k, ahead_step, all, squares);
          // the sum may hold 128 * 127 for the square of -128; rounded up
          for (int r = 0; r < 2; ++r)
            lengths[at[r]] = 1.004f * __builtin_sqrtf(static_cast<float>(squares[r]));
        } else {
          high_byte_pair<U, T, false>(pair, k, x + first, ahead + n * k, ahead_step, all, squares);
        }
        for (int r = 0; r < 2; ++r) {
          for (int t = 0; t < T; ++t) sums[t][at[r]] = all[r][t];
        }
      }
      for (int t = 0; t < T; ++t) {
        const HeadToken& token = x[first + t];
        finish_bounds(sums[t], lengths, scale + begin, count, U::kOffset * token.high_sum, token,
                      out + (first + t) * out_stride + begin);
      }
    });
  }
}

void head_bound(const int8_t* weight, const float* scale, int64_t k, int64_t row_begin,
                int64_t row_end, const HeadToken* x, int64_t tokens, float* out,
                int64_t out_stride) {
  if constexpr (HeadBytes::kFromTokens > 0) {
    bound_rows<HeadBytes>(weight + row_begin * k, scale + row_begin, k, row_end - row_begin, x,
                          tokens, out, out_stride);
  } else {
    head_int8(weight, scale, k, row_begin, row_end, x, tokens, {}, out, out_stride);
  }
}

// Never without fast products of bytes; nor with a matrix unit, which is always faster than memory.
constexpr int64_t kHeadBoundFrom =
    MatrixUnit::kFromTokens > 0 || HeadBytes::kFromTokens == 0 ? INT64_MAX : HeadBytes::kFromTokens;
