// Attention against int8 caches that have a scale for every position: integer dot products of
// 16-bit queries with the keys, softmax in floats, integer sums of the values with 16-bit
// weights. Every sum is exact, so an ISA may take it in any order. Definition and bounds:
// kernel_table.h.

constexpr float kWideMax = 32512.0f;

float quantize_query(const float* x, int64_t n, int64_t n_padded, int16_t* wide) {
  const uint32_t bits = absmax_bits(x, n);
  const bool poisoned = bits >= kInfinityBits;
  const float absmax = absmax_of(bits);
  const F32x16 s = set1(kWideMax / absmax);
  int64_t i = 0;
  for (; !poisoned && i < n; i += 16) store_i16(wide + i, mul(load_n(x + i, n - i), s));
  for (; i < n_padded; ++i) wide[i] = 0;
  return poisoned ? __builtin_nanf("") : absmax / kWideMax;
}

// The elements from `from` to `dim` of `rows` keys or values, each padded with zeros to a step.
void copy_last_step(const int8_t* rows, int64_t stride, int64_t count, int64_t from, int64_t dim,
                    int8_t* steps) {
  for (int64_t j = 0; j < count; ++j) {
    int8_t* step = steps + j * kCacheStep;
    __builtin_memset(step, 0, kCacheStep);
    __builtin_memcpy(step, rows + j * stride + from, dim - from);
  }
}

// acc[r * J + j] += one step of R queries times J keys.
template <int R, int J>
[[gnu::always_inline]] inline void dot_step(const int16_t* query, int64_t padded,
                                            const int8_t* keys, int64_t stride,
                                            CacheDot (&acc)[8]) {
  CacheQuery q[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) q[r] = cache_query(query + r * padded);
#pragma GCC unroll 8
  for (int j = 0; j < J; ++j) {
    const CacheKeys key = cache_keys(keys + j * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r * J + j] = cache_dot(acc[r * J + j], key, q[r]);
  }
}

// dots[r * kAttentionChunk + j] of R queries and J keys, R * J <= 8.
template <int R, int J>
[[gnu::always_inline]] inline void dot_tile(const int16_t* query, int64_t padded,
                                            const int8_t* keys, int64_t stride, int64_t dim,
                                            int32_t* dots) {
  CacheDot acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) acc[i] = CacheDot{};
  int64_t i = 0;
  for (; i + kCacheStep <= dim; i += kCacheStep) {
    dot_step<R, J>(query + i, padded, keys + i, stride, acc);
  }
  if (i < dim) {
    int8_t last[J * kCacheStep];
    copy_last_step(keys, stride, J, i, dim, last);
    dot_step<R, J>(query + i, padded, last, kCacheStep, acc);
  }
  int32_t sums[8];
  reduce_dots(acc, sums);
  for (int r = 0; r < R; ++r) {
    __builtin_memcpy(dots + r * kAttentionChunk, sums + r * J, J * sizeof(int32_t));
  }
}

// Dot products of R queries and keys [begin, count); prefetches keys, then values.  Apart, because
// check_spills takes what a caller lays out between its blocks for a part of its loops.
template <int R>
[[gnu::noinline]] void dot_rows(const AttentionChunk& c, const int16_t* query, int64_t begin,
                                int64_t count, bool first_group, int32_t* dots) {
  constexpr int J = 8 / R;
  const int64_t run = c.positions * c.stride_bytes, padded = wide_padded(c.dim);
  const auto* keys = static_cast<const int8_t*>(c.keys);
  int64_t j = begin;
  for (; j + J <= count; j += J) {
    const int64_t at = j * c.stride_bytes;
    if (first_group) prefetch_run(keys, run, c.values, at + kPrefetchBytes, J * c.stride_bytes);
    dot_tile<R, J>(query, padded, keys + at, c.stride_bytes, c.dim, dots + j);
  }
  for (; j < count; ++j) {
    dot_tile<R, 1>(query, padded, keys + j * c.stride_bytes, c.stride_bytes, c.dim, dots + j);
  }
}

// Scores of the positions [begin, count) from a row's dot products.
void scale_dots(const Int8Attention& cache, const int32_t* dots, float factor, int64_t begin,
                int64_t count, float* scores) {
  for (int64_t j = begin / 16 * 16; j < (count + 15) / 16 * 16; j += 16) {
    const F32x16 scale = mul(set1(factor), load_n(cache.key_scale + j, count - j));
    store_n(scores + j, mul(from_i32_n(dots + j, count - j), scale), 16);
  }
}

// What a row's sums of values need: weights of 16 bits from those of the softmax in w, zeros beside
// the positions [begin, count) that it sees, and the factor that makes values of their sums.
float integer_weights(const Int8Attention& cache, float* w, int64_t begin, int64_t count,
                      int16_t* weights) {
  const int64_t first = begin / 16 * 16, whole = (count + 15) / 16 * 16;
  F32x16 best = zero();
  for (int64_t j = first; j < whole; j += 16) {
    F32x16 value_scale = load_n(cache.value_scale + j, count - j);
    if (j < begin) {  // the weight 0 does not suffice: times infinity it is NaN
      float seen[16];
      store_n(seen, value_scale, 16);
      for (int64_t i = 0; i < begin - j; ++i) seen[i] = 0.0f;
      value_scale = load_n(seen, 16);
    }
    const F32x16 u = mul(load_n(w + j, 16), value_scale);
    best = max_abs_bits(best, u);
    store_n(w + j, u, 16);
  }
  const uint32_t bits = reduce_abs_bits(best);
  const bool poisoned = bits >= kInfinityBits;
  const float largest = absmax_of(bits);
  const F32x16 s = set1(kWideMax / largest);
  int64_t j = 0;
  for (; !poisoned && j < whole; j += 16) store_i16(weights + j, mul(load_n(w + j, 16), s));
  for (; j < kAttentionChunk; ++j) weights[j] = 0;
  return poisoned ? __builtin_nanf("") : largest / kWideMax;
}

// R rows' integer weights and factors from their dot products, at kAttentionChunk from one row to
// the next; states get the maximum and the sum of the softmax.
template <int R>
void weigh_positions(const AttentionChunk& c, int64_t row, const int32_t* dots, int16_t* weights,
                     float* factors, float* state, int64_t state_stride) {
  float w[R * kAttentionChunk];
  int64_t hidden[R], seen[R];
  for (int r = 0; r < R; ++r) {
    hidden[r] = positions_hidden(c, row + r), seen[r] = positions_seen(c, row + r);
    scale_dots(c.int8, dots + r * kAttentionChunk, c.int8.query_scale[row + r] * c.scale, hidden[r],
               seen[r], w + r * kAttentionChunk);
  }
  softmax_rows(w, hidden, seen, state, state_stride);
  for (int r = 0; r < R; ++r) {
    factors[r] = integer_weights(c.int8, w + r * kAttentionChunk, hidden[r], seen[r],
                                 weights + r * kAttentionChunk);
  }
}

// sums[r][b] += weights of two positions times B steps of values.
template <int R, int B>
[[gnu::always_inline]] inline void sum_pair(const int16_t* weights, const int8_t* first,
                                            const int8_t* second,
                                            CacheSum (&sums)[R * B][kCacheAccs]) {
  CacheWeights w[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) w[r] = cache_weights(weights + r * kAttentionChunk);
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) {
    const CacheValues v = cache_values(first + b * kCacheStep, second + b * kCacheStep);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      CacheSum(&s)[kCacheAccs] = sums[r * B + b];
      s[0] = cache_sum<0>(s[0], v, w[r]);
      if constexpr (kCacheAccs > 1) s[1] = cache_sum<1>(s[1], v, w[r]);
      if constexpr (kCacheAccs > 2) s[2] = cache_sum<2>(s[2], v, w[r]);
      if constexpr (kCacheAccs > 3) s[3] = cache_sum<3>(s[3], v, w[r]);
    }
  }
}

// acc[r][i ..] of B steps from one element on: sums over positions [begin, count) times the row's
// factor.  `width` elements of every step are wanted.
template <int R, int B>
[[gnu::noinline]] void sum_strip(const int16_t* weights, const float* factors, const int8_t* values,
                                 int64_t stride, int64_t begin, int64_t count, int64_t width,
                                 float* acc, int64_t acc_stride) {
  CacheSum sums[R * B][kCacheAccs];
#pragma GCC unroll 8
  for (int k = 0; k < R * B; ++k) {
#pragma GCC unroll 4
    for (int p = 0; p < kCacheAccs; ++p) sums[k][p] = CacheSum{};
  }
  int64_t j = begin;
  if (j % 2 != 0) {  // an odd first position is paired with the one before, with the weight zero
    sum_pair<R, B>(weights + j - 1, values + j * stride, values + j * stride, sums);
    ++j;
  }
  for (; j + 2 <= count; j += 2) {
    const int8_t* a = values + j * stride;
    sum_pair<R, B>(weights + j, a, a + stride, sums);
  }
  if (j < count) {  // an odd last position is paired with itself, with the weight zero
    sum_pair<R, B>(weights + j, values + j * stride, values + j * stride, sums);
  }
#pragma GCC unroll 8
  for (int k = 0; k < R * B; ++k) {
    int32_t step[kCacheStep];
    store_cache_sums(sums[k], step);
    for (int64_t i = 0; i < kCacheStep && i < width; i += 16) {
      store_n(acc + k / B * acc_stride + k % B * kCacheStep + i,
              mul(from_i32_n(step + i, 16), set1(factors[k / B])), 16);
    }
  }
}

// The same over all of dim; prefetches what this thread reads next.
template <int R>
void sum_rows(const AttentionChunk& c, const int16_t* weights, const float* factors, int64_t begin,
              int64_t count, bool first_group, float* acc, int64_t acc_stride) {
  constexpr int B = R == 1 ? 4 : R == 2 ? 2 : 1;
  const int64_t run = c.positions * c.stride_bytes;
  const auto* values = static_cast<const int8_t*>(c.values);
  const auto ask = [&](int64_t i, int64_t width) {  // these elements' share of the chunk to come
    if (!first_group) return;
    const int64_t share = c.positions * width;
    prefetch_run(values, run, c.next, i * c.positions + kPrefetchBytes, share);
  };
  int64_t i = 0;
  for (; B > 1 && i + B * kCacheStep <= c.dim; i += B * kCacheStep) {
    ask(i, B * kCacheStep);
    sum_strip<R, B>(weights, factors, values + i, c.stride_bytes, begin, count, kCacheStep, acc + i,
                    acc_stride);
  }
  for (; i + kCacheStep <= c.dim; i += kCacheStep) {
    ask(i, kCacheStep);
    sum_strip<R, 1>(weights, factors, values + i, c.stride_bytes, begin, count, kCacheStep, acc + i,
                    acc_stride);
  }
  if (i < c.dim) {
    int8_t last[kAttentionChunk * kCacheStep];
    copy_last_step(values + begin * c.stride_bytes, c.stride_bytes, count - begin, i, c.dim,
                   last + begin * kCacheStep);
    sum_strip<R, 1>(weights, factors, last, kCacheStep, begin, count, c.dim - i, acc + i,
                    acc_stride);
  }
}

inline void ask_for_scales(const Int8Attention& cache) {
  if (cache.next_key_scale == nullptr) return;
  for (int64_t i = 0; i < kAttentionChunk; i += 16) {
    prefetch_l2(cache.next_key_scale + i);
    prefetch_l2(cache.next_value_scale + i);
  }
}

// R rows from `row` on.
template <int R>
void attend_int8_group(const AttentionChunk& c, int64_t row, float* states) {
  const int64_t stride = attention_state_floats(c.dim), padded = attention_padded(c.dim);
  float* state = states + row * stride;
  alignas(64) int32_t dots[R * kAttentionChunk];
  alignas(64) int16_t weights[R * kAttentionChunk];
  float factors[R];
  const int64_t from = positions_hidden(c, row), end = positions_seen(c, row + R - 1);
  if (row == 0) ask_for_scales(c.int8);
  dot_rows<R>(c, c.int8.query + row * wide_padded(c.dim), from, end, row == 0, dots);
  weigh_positions<R>(c, row, dots, weights, factors, state + padded, stride);
  sum_rows<R>(c, weights, factors, from, end, row == 0, state, stride);
}

void attend_int8_rows(const AttentionChunk& c, float* states) {
  attend_in_groups(0, c.rows, [&]<int R>(int64_t row) { attend_int8_group<R>(c, row, states); });
}
