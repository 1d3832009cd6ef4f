// The int8 head times a few tokens, and the quantisation of its rows and of tokens. Contracts:
// head_int8, head_quantize_token and head_quantize_int8 in kernel_table.h. Uses dense.inl and
// matrix.inl.

// acc += the products of weights [i, stop) of R rows, `step` bytes apart; a multiple of U steps.
template <int R, int T, int U, class A>
[[gnu::always_inline]] inline int64_t head8_steps(const int8_t* w, int64_t step, const HeadToken* x,
                                                  A ahead, int64_t i, int64_t stop,
                                                  Head8Acc (&acc)[R][T][U]) {
  for (; i + U * kHead8Step <= stop; i += U * kHead8Step) {
#pragma GCC unroll 8
    for (int64_t line = 0; line < U * kHead8Step; line += 64) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) ahead(w + r * step + i + line);
    }
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      Head8Weights v[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) v[r] = head8_weights(w + r * step + i + u * kHead8Step);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const auto v_x = head8_token(x[t], i + u * kHead8Step);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r][t][u] = head8_dot(acc[r][t][u], v[r], v_x);
      }
    }
  }
  return i;
}

template <int R, int T, int U>
[[gnu::always_inline]] inline void head8_clear(Head8Acc (&acc)[R][T][U]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) acc[r][t][u] = Head8Acc{};
    }
  }
}

template <int R, int T, int U>
[[gnu::always_inline]] inline void head8_fold(const Head8Acc (&acc)[R][T][U],
                                              int64_t (&sums)[R][T]) {
  Head8Acc all[R * T];
#pragma GCC unroll 8
  for (int i = 0; i < R * T; ++i) {
    all[i] = acc[i / T][i % T][0];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) all[i] = head8_add(all[i], acc[i / T][i % T][u]);
  }
  static_assert(R * T <= 8);
  if constexpr (R * T == 1) {  // eight sums at once would waste seven
    sums[0][0] += head8_sum(all[0]);
    return;
  }
  alignas(64) int64_t more[8];
  head8_sums(all, more);
#pragma GCC unroll 8
  for (int i = 0; i < R * T; ++i) sums[i / T][i % T] += more[i];
}

// The last weights of a row, fewer than a step: nothing behind the row is read.
template <int R, int T>
[[gnu::noinline]] void head8_tail(const int8_t* w, int64_t step, int64_t k, const HeadToken* x,
                                  int64_t i, int64_t (&sums)[R][T]) {
  for (int r = 0; r < R; ++r) {
    int8_t last[kHead8Step] = {};
    for (int64_t j = i; j < k; ++j) last[j - i] = w[r * step + j];
    const Head8Weights v = head8_weights(last);
    for (int t = 0; t < T; ++t)
      sums[r][t] += head8_sum(head8_dot(Head8Acc{}, v, head8_token(x[t], i)));
  }
}

// R rows, `step` bytes apart, x T tokens, U accumulators each.
template <int R, int T, int U, class A>
[[gnu::always_inline]] inline void head8_tile(const int8_t* w, int64_t step, int64_t k,
                                              const HeadToken* x, A ahead, int64_t (&sums)[R][T]) {
  constexpr int64_t kFlush = kHead8FlushSteps * kHead8Step;
  const int64_t whole = k / kHead8Step * kHead8Step;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[r][t] = 0;
  }
  int64_t i = 0;
  while (i < whole) {
    const int64_t stop = whole - i < kFlush ? whole : i + kFlush;
    Head8Acc acc[R][T][U];
    head8_clear(acc);
    i = head8_steps(w, step, x, ahead, i, stop, acc);
    head8_fold(acc, sums);
    if (U > 1 && i < stop) {
      Head8Acc rest[R][T][1];
      head8_clear(rest);
      i = head8_steps(w, step, x, ahead, i, stop, rest);
      head8_fold(rest, sums);
    }
  }
  if (i < k) head8_tail(w, step, k, x, i, sums);
}

// T tokens against `count` rows, in R streams.
template <int R, int T, int U, class A>
[[gnu::noinline]] void head8_rows(const int8_t* w, const float* scale, int64_t k, int64_t count,
                                  const HeadToken* x, A ahead, float* out, int64_t out_stride) {
  const int64_t part = count / R;
  const auto tile = [&]<int kRows>(int64_t n) __attribute__((always_inline)) {
    int64_t sums[kRows][T];
    head8_tile<kRows, T, U>(w + n * k, part * k, k, x, ahead, sums);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = n + r * part, sum = sums[r][t] - kHead8Offset * x[t].sum;
        out[t * out_stride + at] = static_cast<float>(sum) * (scale[at] * x[t].scale);
      }
    }
  };
  for (int64_t n = 0; n < part; ++n) tile.template operator()<R>(n);
  if constexpr (R > 1) {
    for (int64_t n = R * part; n < count; ++n) tile.template operator()<1>(n);
  }
}

void head_int8(const int8_t* weight, const float* scale, int64_t k, int64_t row_begin,
               int64_t row_end, const HeadToken* x, int64_t tokens, Prefetch wanted, float* out,
               int64_t out_stride) {
  with_matrix_unit([&]<class U> {
    if (tokens < U::kFromTokens) return;
    const int64_t done = matrix_head8<U>(weight + row_begin * k, scale + row_begin, k,
                                         row_end - row_begin, x, tokens, out, out_stride);
    row_begin += done;
    out += done;
  });
  const int64_t count = row_end - row_begin;
  const int8_t* w = weight + row_begin * k;
  const float* s = scale + row_begin;
  const int64_t chunk = tokens <= kHead8Tokens ? count : kHeadRowChunk;
  with_ahead(wanted, tokens, [&](auto ahead) {
    for (int64_t n = 0; n < count; n += chunk) {
      const int64_t part = count - n < chunk ? count - n : chunk;
      for_token_groups<kHead8Tokens>(tokens, [&]<int T>(int64_t t) {
        constexpr int R = T == 1 ? kHeadStreams : kHead8Rows, U = T == 1 ? kHead8Unroll : 1;
        head8_rows<R, T, U>(w + n * k, s + n, k, part, x + t, ahead, out + t * out_stride + n,
                            out_stride);
      });
    }
  });
}

// ---- quantisation -------------------------------------------------------------------------------

float head_quantize_token(const float* x, int64_t n, int64_t n_padded, int16_t* wide, int8_t* high,
                          int8_t* low, int32_t* sums) {
  const float factor = quantize_query(x, n, n_padded, wide);
  for (int64_t i = 0; i < n_padded; ++i) {
    low[i] = static_cast<int8_t>(wide[i]);
    high[i] = static_cast<int8_t>((wide[i] - low[i]) >> 8);
  }
  for (int64_t i = 0; i < n_padded; i += 64) {
    int32_t sum = 0;
    for (int j = 0; j < 64; ++j) sum += wide[i + j];
    sums[i / 64] = sum;
  }
  return factor;
}

float head_quantize_int8(const float* w, int64_t n, int8_t* q) {
  const uint32_t bits = absmax_bits(w, n);
  if (bits >= kInfinityBits) {
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return __builtin_nanf("");
  }
  const float absmax = absmax_of(bits);
  const F32x16 s = set1(127.0f / absmax);
  for (int64_t i = 0; i < n; i += 16) to_i8_n(q + i, mul(load_n(w + i, n - i), s), n - i);
  return absmax / 127.0f;
}
