// float32, float16 and 8-bit float caches in rows, a few query rows that share a KV head: every key
// or value is loaded once for all of them. A key's 16 lanes meet those of the query.

// 16 elements in mixed order, the ones past `count` zero.
template <DType kType>
[[gnu::always_inline]] inline F32x16 load_mixed_n(const void* p, int64_t count) {
  if (count >= 16) return load_mixed<kType>(p);
  return mix<kType>(load_as<kType>(p, 0, count));
}

// Register P of R x J dot products of queries (mixed, padded to whole steps) and keys.
template <DType kType, int R, int J, int P>
[[gnu::always_inline]] inline void dot_regs(const float* query, int64_t padded, const void* keys,
                                            int64_t stride_bytes, int64_t dim, LaneReg (&sums)[8]) {
  LaneReg acc[R * J], key[J];
#pragma GCC unroll 8
  for (int i = 0; i < R * J; ++i) acc[i] = LaneReg{};
  for (int64_t i = 0; i + 16 <= dim; i += 16) {
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      key[j] = reg<P>(load_mixed<kType>(element_at<kType>(row_at(keys, stride_bytes, j), i)));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const LaneReg q = load_reg(query + r * padded + i + P * (16 / kRegs));
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) acc[r * J + j] = reg_fma(q, key[j], acc[r * J + j]);
    }
  }
  if (dim % 16 != 0) {
    const int64_t i = dim / 16 * 16;
    for (int j = 0; j < J; ++j) {
      key[j] =
          reg<P>(load_mixed_n<kType>(element_at<kType>(row_at(keys, stride_bytes, j), i), dim - i));
    }
    for (int r = 0; r < R; ++r) {
      const LaneReg q = load_reg(query + r * padded + i + P * (16 / kRegs));
      for (int j = 0; j < J; ++j) acc[r * J + j] = reg_fma(q, key[j], acc[r * J + j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) sums[i] = i < R * J ? acc[i] : LaneReg{};
}

// scores[r * kAttentionChunk + j] = dot(query r, key j) for R queries and J keys, R * J <= 8.
template <DType kType, int R, int J>
[[gnu::always_inline]] inline void score_tile(const float* query, int64_t padded, const void* keys,
                                              int64_t stride_bytes, int64_t dim, float* scores) {
  LaneReg sums[kRegs][8];
  dot_regs<kType, R, J, 0>(query, padded, keys, stride_bytes, dim, sums[0]);
  if constexpr (kRegs > 1) {
    dot_regs<kType, R, J, 1>(query, padded, keys, stride_bytes, dim, sums[1]);
  }
  if constexpr (kRegs > 2) {
    dot_regs<kType, R, J, 2>(query, padded, keys, stride_bytes, dim, sums[2]);
    dot_regs<kType, R, J, 3>(query, padded, keys, stride_bytes, dim, sums[3]);
  }
  float dots[8];
  reduce_eight<kType>(sums, dots);
  for (int r = 0; r < R; ++r) {
    __builtin_memcpy(scores + r * kAttentionChunk, dots + r * J, J * sizeof(float));
  }
}

// Scores of R queries and keys [begin, count); prefetches keys, then values.
template <DType kType, int R>
void score_rows(const AttentionChunk& c, const float* query, int64_t padded, int64_t begin,
                int64_t count, bool first_group, float* scores) {
  constexpr int J = 8 / R;
  const int64_t run = c.positions * c.stride_bytes;
  int64_t j = begin;
  for (; j + J <= count; j += J) {
    if (first_group) {
      prefetch_run(c.keys, run, c.values, j * c.stride_bytes + kPrefetchBytes, J * c.stride_bytes);
    }
    score_tile<kType, R, J>(query, padded, row_at(c.keys, c.stride_bytes, j), c.stride_bytes, c.dim,
                            scores + j);
  }
  for (; j < count; ++j) {
    score_tile<kType, R, 1>(query, padded, row_at(c.keys, c.stride_bytes, j), c.stride_bytes, c.dim,
                            scores + j);
  }
}

// acc[r][b] += sum_j weights[r][j] * values[j][16 b ..], j in [begin, end) ascending, for R rows
// and B steps; acc in mixed order.  `count` elements of every step: fewer than 16 only in the last
// one.
template <DType kType, int R, int B>
[[gnu::always_inline]] inline void weigh_tile(const float* weights, const void* values,
                                              int64_t stride_bytes, int64_t count, int64_t begin,
                                              int64_t end, float* acc, int64_t acc_stride) {
  F32x16 sum[R * B];
#pragma GCC unroll 8
  for (int k = 0; k < R * B; ++k) sum[k] = load_n(acc + k / B * acc_stride + 16 * (k % B), 16);
  for (int64_t j = begin; j < end; ++j) {
    const void* row = row_at(values, stride_bytes, j);
    F32x16 v[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) v[b] = load_mixed_n<kType>(element_at<kType>(row, 16 * b), count);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 w = set1(weights[r * kAttentionChunk + j]);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sum[r * B + b] = fma(w, v[b], sum[r * B + b]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < R * B; ++k) store_n(acc + k / B * acc_stride + 16 * (k % B), sum[k], 16);
}

// The same over all of dim, some positions at a time so that a whole row of values is used while it
// is in cache; prefetches values, then what this thread reads next.
template <DType kType, int R>
void weigh_rows(const AttentionChunk& c, const float* weights, int64_t begin, int64_t end,
                bool first_group, float* acc, int64_t acc_stride) {
  constexpr int B = R == 1 ? 4 : R == 2 ? 2 : 1;
  constexpr int64_t kPositions = 16;
  const int64_t run = c.positions * c.stride_bytes;
  for (int64_t j = begin; j < end; j += kPositions) {
    const int64_t stop = j + kPositions < end ? j + kPositions : end;
    int64_t i = 0;
    const auto ask = [&](int64_t steps) {  // the share of these steps in the rows to come
      if (!first_group) return;
      const int64_t bytes = kPositions * 16 * steps * element_size(kType);
      prefetch_run(c.values, run, c.next,
                   j * c.stride_bytes + kPrefetchBytes + i * kPositions * element_size(kType),
                   bytes);
    };
    for (; B > 1 && i + 16 * B <= c.dim; i += 16 * B) {
      ask(B);
      weigh_tile<kType, R, B>(weights, element_at<kType>(c.values, i), c.stride_bytes, 16, j, stop,
                              acc + i, acc_stride);
    }
    for (; i + 16 <= c.dim; i += 16) {
      ask(1);
      weigh_tile<kType, R, 1>(weights, element_at<kType>(c.values, i), c.stride_bytes, 16, j, stop,
                              acc + i, acc_stride);
    }
    if (i < c.dim) {
      weigh_tile<kType, R, 1>(weights, element_at<kType>(c.values, i), c.stride_bytes, c.dim - i, j,
                              stop, acc + i, acc_stride);
    }
  }
}

// R rows from `row` on.
template <DType kType, int R>
void attend_rows(const AttentionChunk& c, int64_t row, float* scratch, float* states) {
  const int64_t padded = attention_padded(c.dim), stride = attention_state_floats(c.dim);
  float* query = scratch + R * kAttentionChunk;
  float* state = states + row * stride;
  int64_t seen[R], hidden[R];
  for (int r = 0; r < R; ++r) {
    seen[r] = positions_seen(c, row + r);
    hidden[r] = positions_hidden(c, row + r);
    for (int64_t i = 0; i < padded; i += 16) {
      const F32x16 q = load_n(c.query + (row + r) * c.dim + i, c.dim - i);
      store_n(query + r * padded + i, mix<kType>(q), 16);
      store_n(state + r * stride + i, zero(), 16);
    }
  }
  score_rows<kType, R>(c, query, padded, hidden[0], seen[R - 1], row == 0, scratch);
  for (int r = 0; r < R; ++r) {
    float* scores = scratch + r * kAttentionChunk;
    for (int64_t j = hidden[0] / 16 * 16; j < seen[r]; j += 16) {
      store_n(scores + j, mul(set1(c.scale), load_n(scores + j, 16)), 16);
    }
  }
  softmax_rows(scratch, hidden, seen, state + padded, stride);
  const CommonRange all = seen_by_all(hidden[R - 1], seen[0]);
  for (int r = 0; r < R; ++r) {  // positions that the last row does not see
    weigh_rows<kType, 1>(c, scratch + r * kAttentionChunk, hidden[r], all.begin, false,
                         state + r * stride, stride);
  }
  weigh_rows<kType, R>(c, scratch, all.begin, all.end, row == 0, state, stride);
  for (int r = 0; r < R; ++r) {  // positions that the first row does not see
    const int64_t begin = hidden[r] > all.end ? hidden[r] : all.end;
    weigh_rows<kType, 1>(c, scratch + r * kAttentionChunk, begin, seen[r], false,
                         state + r * stride, stride);
    for (int64_t i = 0; i < padded; i += 16) {
      float* acc = state + r * stride + i;
      store_n(acc, unmix<kType>(load_n(acc, 16)), 16);
    }
  }
}

// Rows from `row` on, a few at a time.
template <DType kType>
void attend_few(const AttentionChunk& c, int64_t row, float* scratch, float* states) {
  attend_in_groups(row, c.rows,
                   [&]<int R>(int64_t at) { attend_rows<kType, R>(c, at, scratch, states); });
}
