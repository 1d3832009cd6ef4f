// float32, float16 and 8-bit float caches in rows, many query rows: keys and values are widened and
// laid out once for all of them. The arithmetic is that of float_rows.inl, lane for lane: a
// register holds one lane of 16 keys here, 16 lanes of one key there.

// Parts of the scratch memory.
struct BlockScratch {
  float* keys;    // [panel of 16 positions][lane][step][16 positions]
  float* values;  // [step][position][16]
  float* query;   // [rows, padded], if dim is no multiple of 16
  float* scores;  // [rows, kAttentionChunk]
  int32_t* seen;  // [rows], behind the last position that each sees
};

BlockScratch split_scratch(const AttentionChunk& c, float* scratch) {
  const int64_t padded = attention_padded(c.dim);
  float* values = scratch + kAttentionChunk * padded;
  float* query = values + kAttentionChunk * padded;
  float* scores = query + (padded == c.dim ? 0 : c.rows * padded);
  auto* seen = reinterpret_cast<int32_t*>(scores + c.rows * kAttentionChunk);
  return {scratch, values, query, scores, seen};
}

// From the panel of position `begin` on.
template <DType kType>
void lay_out_keys(const AttentionChunk& c, int64_t begin, float* keys) {
  const int64_t padded = attention_padded(c.dim), steps = padded / 16;
  for (int64_t j = begin / 16 * 16; j < c.positions; j += 16) {
    for (int64_t s = 0; s < steps; ++s) {
      float tile[256];
      for (int64_t r = 0; r < 16; ++r) {
        F32x16 v = zero();
        if (j + r >= begin && j + r < c.positions) {
          v = load_as<kType>(row_at(c.keys, c.stride_bytes, j + r), 16 * s, c.dim - 16 * s);
        }
        store_n(tile + 16 * r, v, 16);
      }
      transpose_16(tile, 64, keys + j * padded + 16 * s, padded);
    }
  }
}

template <DType kType>
void lay_out_values(const AttentionChunk& c, int64_t begin, float* values) {
  for (int64_t j = begin; j < c.positions; ++j) {
    const void* value = row_at(c.values, c.stride_bytes, j);
    for (int64_t i = 0; i < c.dim; i += 16) {
      store_n(values + i * kAttentionChunk + 16 * j, load_as<kType>(value, i, c.dim - i), 16);
    }
  }
}

// Scores of kBlockRows queries and a panel of 16 positions.  The lanes come in bit-reversed order,
// so that sums meet in the order of the tree: 0 and 8, 4 and 12, the two pairs, and so on.
void score_panel(const float* query, int64_t query_stride, const float* panel, int64_t padded,
                 F32x16 scale, float* scores) {
  constexpr int R = kBlockRows;
  constexpr int kLanes[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
  float sums[4][R * 16];  // of a lane, of 2, 4 and 8 lanes, waiting for their other half
  for (int n = 0; n < 16; ++n) {
    const float* keys = panel + kLanes[n] * padded;
    const float* q = query + kLanes[n];
    F32x16 acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = zero();
#pragma GCC unroll 4
    for (int64_t i = 0; i < padded; i += 16) {
      const F32x16 k = load_n(keys + i, 16);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r] = fma(set1(q[r * query_stride + i]), k, acc[r]);
    }
    int level = 0;
    for (int t = n; t % 2 != 0; t /= 2, ++level) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r] = add(load_n(sums[level] + 16 * r, 16), acc[r]);
    }
    if (level < 4) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) store_n(sums[level] + 16 * r, acc[r], 16);
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        store_n(scores + r * kAttentionChunk, mul(scale, acc[r]), 16);
      }
    }
  }
}

// acc[r] = sum_j weights[r][j] * values[j], j in [begin, end), for R rows and one step of values;
// added to what acc holds unless it is the `first`.
template <int R>
[[gnu::always_inline]] inline void weigh_step(const float* weights, const float* values,
                                              int64_t begin, int64_t end, bool first, float* acc,
                                              int64_t acc_stride) {
  F32x16 sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sum[r] = first ? zero() : load_n(acc + r * acc_stride, 16);
#pragma GCC unroll 4
  for (int64_t j = begin; j < end; ++j) {
    const F32x16 v = load_n(values + 16 * j, 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = fma(set1(weights[r * kAttentionChunk + j]), v, sum[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store_n(acc + r * acc_stride, sum[r], 16);
}

// States of the first `rows` rows, a multiple of kBlockRows.
template <DType kType>
void attend_block(const AttentionChunk& c, int64_t rows, float* scratch, float* states) {
  constexpr int R = kBlockRows;
  const BlockScratch s = split_scratch(c, scratch);
  const int64_t padded = attention_padded(c.dim), stride = attention_state_floats(c.dim);
  const float* query = c.query;
  if (padded != c.dim) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < padded; i += 16) {
        store_n(s.query + r * padded + i, load_n(c.query + r * c.dim + i, c.dim - i), 16);
      }
    }
    query = s.query;
  }
  for (int64_t r = 0; r < rows; ++r) s.seen[r] = static_cast<int32_t>(positions_seen(c, r));
  const int64_t begin = positions_hidden(c, 0);
  lay_out_keys<kType>(c, begin, s.keys);
  lay_out_values<kType>(c, begin, s.values);
  for (int64_t j = begin / 16 * 16; j < c.positions; j += 16) {
    for (int64_t r = 0; r < rows; r += R) {
      if (j >= s.seen[r + R - 1] || j + 16 <= positions_hidden(c, r)) continue;
      score_panel(query + r * padded, padded, s.keys + j * padded, padded, set1(c.scale),
                  s.scores + r * kAttentionChunk + j);
    }
  }
  for (int64_t r = 0; r < rows; r += R) {
    int64_t hidden[R], seen[R];
    for (int k = 0; k < R; ++k) hidden[k] = positions_hidden(c, r + k), seen[k] = s.seen[r + k];
    softmax_rows(s.scores + r * kAttentionChunk, hidden, seen, states + r * stride + padded,
                 stride);
  }
  for (int64_t i = 0; i < padded; i += 16) {
    const float* values = s.values + i * kAttentionChunk;
    for (int64_t r = 0; r < rows; r += R) {
      const int64_t first_hidden = positions_hidden(c, r);
      const CommonRange all = seen_by_all(positions_hidden(c, r + R - 1), s.seen[r]);
      const bool heads = first_hidden < all.begin;  // positions that the last row does not see
      for (int64_t k = r; heads && k < r + R; ++k) {
        weigh_step<1>(s.scores + k * kAttentionChunk, values, positions_hidden(c, k), all.begin,
                      true, states + k * stride + i, stride);
      }
      weigh_step<R>(s.scores + r * kAttentionChunk, values, all.begin, all.end, !heads,
                    states + r * stride + i, stride);
      for (int64_t k = r + 1; k < r + R; ++k) {
        if (s.seen[k] == all.end) continue;
        const int64_t hidden = positions_hidden(c, k), from = hidden > all.end ? hidden : all.end;
        weigh_step<1>(s.scores + k * kAttentionChunk, values, from, s.seen[k], false,
                      states + k * stride + i, stride);
      }
    }
  }
}
