// The ternary product of canonical rows. Contract: products.h. Layouts for CPUs are in tiles.inl.

// Tokens whose activations should stay in L2 while a range of weight rows streams past them.
constexpr int64_t kTokenBlock = 32;

// Adds one k-step (or the last half step) of R rows x T tokens into the partial sums.
template <int F, bool kTail, int R, int T>
[[gnu::always_inline]] inline void accumulate_field(const Raw (&raw)[R], const int8_t* x,
                                                    int64_t x_stride, Partial (&partial)[R][T]) {
  Codes c[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) c[r] = codes<F>(raw[r]);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const int8_t* p = x + t * x_stride;
    const Activations a = kTail ? load_x_tail<F>(p) : load_x<F>(p);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      partial[r][t] = dot(partial[r][t], c[r], a);
      pin(partial[r][t]);
    }
  }
}

template <bool kTail, int R, int T>
[[gnu::always_inline]] inline void accumulate_step(const uint8_t* w, int64_t apart, const int8_t* x,
                                                   int64_t x_stride, Partial (&partial)[R][T]) {
  Raw raw[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    raw[r] = kTail ? load_raw_tail(w + r * apart) : load_raw(w + r * apart);
  }
  accumulate_field<0, kTail>(raw, x, x_stride, partial);
  accumulate_field<1, kTail>(raw, x, x_stride, partial);
  accumulate_field<2, kTail>(raw, x, x_stride, partial);
  accumulate_field<3, kTail>(raw, x, x_stride, partial);
}

// acc += the products of k-steps [u, stop), plus the half step behind them if kTail.
template <bool kTail, bool kPrefetch, int R, int T>
[[gnu::always_inline]] inline void accumulate_steps(const uint8_t* w, int64_t apart,
                                                    const int8_t* x, int64_t x_stride, int64_t u,
                                                    int64_t stop, int64_t ahead, Acc (&acc)[R][T]) {
  constexpr int64_t kStepBytes = kStepBlocks * layout::kBlockBytes;
  constexpr int64_t kStepWeights = kStepBlocks * layout::kBlockWeights;
  Partial partial[R][T];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) partial[r][t] = Partial{};
  }
  for (; u < stop; ++u) {
    const uint8_t* p = w + u * kStepBytes;
    if constexpr (kPrefetch) {
      if constexpr (T == 1 && kGemvStreams) {
        if (kStepBytes >= 64 || u % 2 == 0) {  // one request per cache line of 64 bytes
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) prefetch(p + r * apart + ahead / R);
        }
      } else {  // R rows advance together, but in memory they are one stream: R k-steps at a time
#pragma GCC unroll 8
        for (int64_t b = 0; b < R * kStepBytes; b += 64) {
          prefetch(w + ahead + u * R * kStepBytes + b);
        }
      }
    }
    accumulate_step<false>(p, apart, x + u * kStepWeights, x_stride, partial);
  }
  if constexpr (kTail) {
    accumulate_step<true>(w + u * kStepBytes, apart, x + u * kStepWeights, x_stride, partial);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] = widen(acc[r][t], partial[r][t]);
  }
}

// R rows, `apart` bytes from one to the next, x T tokens over the whole of K.
template <bool kPrefetch, int R, int T>
[[gnu::always_inline]] inline void tile(const uint8_t* w, int64_t row_bytes, int64_t apart,
                                        const int8_t* x, int64_t x_stride, int64_t ahead,
                                        Acc (&acc)[R][T]) {
  constexpr int64_t kStepBytes = kStepBlocks * layout::kBlockBytes;
  const int64_t steps = row_bytes / kStepBytes;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] = Acc{};
  }
  int64_t u = 0;
  for (; steps - u > kFlushSteps; u += kFlushSteps) {
    accumulate_steps<false, kPrefetch>(w, apart, x, x_stride, u, u + kFlushSteps, ahead, acc);
  }
  accumulate_steps<false, kPrefetch>(w, apart, x, x_stride, u, steps, ahead, acc);
  if constexpr (kStepBlocks > 1) {
    if (steps * kStepBytes != row_bytes) {
      accumulate_steps<true, kPrefetch>(w, apart, x, x_stride, steps, steps, ahead, acc);
    }
  }
}

template <bool kPrefetch, int R, int T>
void tile_to_out(const uint8_t* w, int64_t row_bytes, const int8_t* x, int64_t x_stride,
                 const int32_t* x_sum, int64_t ahead, int32_t* out, int64_t out_stride) {
  Acc acc[R][T];
  tile<kPrefetch, R, T>(w, row_bytes, row_bytes, x, x_stride, ahead, acc);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) out[t * out_stride + r] = reduce(acc[r][t]) - x_sum[t];
  }
}

// One token x all rows of a range, in R streams of equally many rows, then what is left over.
template <int R>
void rows_in_streams(const uint8_t* w, int64_t row_bytes, int64_t rows, const int8_t* x,
                     int32_t x_sum, int64_t ahead, int32_t* out) {
  const int64_t each = rows / R;
  for (int64_t n = 0; n < each; ++n) {
    Acc acc[R][1];
    tile<true, R, 1>(w + n * row_bytes, row_bytes, each * row_bytes, x, 0, ahead, acc);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) out[n + r * each] = reduce(acc[r][0]) - x_sum;
  }
  for (int64_t n = R * each; n < rows; ++n) {
    tile_to_out<true, 1, 1>(w + n * row_bytes, row_bytes, x, 0, &x_sum, ahead, out + n, 0);
  }
}

// All rows of a range at T tokens.  kPrefetch: this pass meets the weights first.
template <bool kPrefetch, int R, int T>
void rows_at_tokens(const uint8_t* w, int64_t row_bytes, int64_t rows, const int8_t* x,
                    int64_t x_stride, const int32_t* x_sum, int64_t ahead, int32_t* out,
                    int64_t out_stride) {
  int64_t n = 0;
  for (; n + R <= rows; n += R) {
    tile_to_out<kPrefetch, R, T>(w + n * row_bytes, row_bytes, x, x_stride, x_sum, ahead, out + n,
                                 out_stride);
  }
  for (; n < rows; ++n) {
    tile_to_out<kPrefetch, 1, T>(w + n * row_bytes, row_bytes, x, x_stride, x_sum, ahead, out + n,
                                 out_stride);
  }
}

// Rows outermost, so that a tile of weights meets every token of the block while it is in L1.
void token_block(const uint8_t* w, int64_t row_bytes, int64_t rows, const int8_t* x,
                 int64_t x_stride, const int32_t* x_sum, int64_t tokens, int64_t ahead,
                 int32_t* out, int64_t out_stride) {
  for (int64_t n = 0; n < rows; n += kTileRows) {
    const int64_t group = rows - n < kTileRows ? rows - n : kTileRows;
    const uint8_t* wn = w + n * row_bytes;
    for_token_groups<kTileTokens>(tokens, [&]<int T>(int64_t t) {
      const auto pass =
          t == 0 ? rows_at_tokens<true, kTileRows, T> : rows_at_tokens<false, kTileRows, T>;
      pass(wn, row_bytes, group, x + t * x_stride, x_stride, x_sum + t, ahead,
           out + t * out_stride + n, out_stride);
    });
  }
}

int32_t sum_i8(const int8_t* x, int64_t n) { return sum_i8_vector(x, n); }
