// Attention over bfloat16 caches in the order of the matrix instruction TDPBF16PS: two chains of
// fused multiply-adds, over the even and the odd ones of 32 elements (scores) or positions
// (values).  Keys are laid out once for all rows, so that a lane is a position and no sum runs
// across lanes; values are read as they lie.  Included inside an ISA's anonymous namespace; never
// mentions an ISA.  Definition: kernel_table.h, attend_chunk.

// Panels of 16 positions, [pair of elements][16 positions][2] each.
struct PairKeys {
  const char* panels;
  int64_t panel_bytes;  // from one to the next
};

// Rows of values, 16 features of a position side by side.
struct PairValues {
  const char* data;
  int64_t position_bytes, step_bytes;  // from a position, or 16 features, to the next

  const void* at(int64_t position, int64_t step) const {
    return data + position * position_bytes + step * step_bytes;
  }
};

constexpr int64_t kPairBytes = 64;  // of 16 positions

// Memory that is asked for a line at a time, between the sums: many lines at once would wait for
// each other.
struct Ahead {
  const char *next, *end;

  [[gnu::always_inline]] void ask(int lines) {
    for (int i = 0; i < lines && next < end; ++i, next += 64) prefetch(next);
  }
};
inline Ahead ahead_of(const void* from, int64_t bytes) {
  const auto* first = static_cast<const char*>(from);
  return {first, first == nullptr ? first : first + bytes};
}

// Chain P of the scores of R queries and J panels, over the pairs [begin, end).
template <int P, int R, int J>
[[gnu::always_inline]] inline void score_chain(const float* query, int64_t query_stride,
                                               const PairKeys& keys, int64_t begin, int64_t end,
                                               Ahead& ahead, F32x16 (&acc)[R * J]) {
  constexpr int kLines = J < 4 ? 1 - P : 1;
#pragma GCC unroll 16
  for (int i = 0; i < R * J; ++i) acc[i] = zero();
#pragma GCC unroll 4
  for (int64_t k = begin; k < end; ++k) {
    ahead.ask(kLines);
    F32x16 key[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      const void* pairs = keys.panels + j * keys.panel_bytes + k * kPairBytes;
      key[j] = load_of_pairs<P>(pairs);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 q = set1(query[r * query_stride + 2 * k + P]);
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) acc[r * J + j] = fma(q, key[j], acc[r * J + j]);
    }
  }
}

// sums[i] += first[i] + second[i], for N vectors.
template <int N>
[[gnu::always_inline]] inline void add_chains(const float* first, const F32x16 (&second)[N],
                                              float* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    const F32x16 both = add(load_n(first + 16 * i, 16), second[i]);
    store_n(sums + 16 * i, add(load_n(sums + 16 * i, 16), both), 16);
  }
}

template <int N>
[[gnu::always_inline]] inline void store_chain(const F32x16 (&chain)[N], float* first) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) store_n(first + 16 * i, chain[i], 16);
}

// Scores of R queries and J panels.
template <int R, int J>
[[gnu::noinline]] void score_pairs(const float* query, int64_t query_stride, PairKeys keys,
                                   int64_t pairs, float scale, Ahead& hints, float* scores) {
  constexpr int64_t kPairs = kPairGroup / 2;
  Ahead ahead = hints;
  alignas(64) float first[R * J * 16], sums[R * J * 16];
  for (int i = 0; i < R * J; ++i) store_n(sums + 16 * i, zero(), 16);
  for (int64_t k = 0; k < pairs; k += kPairs) {
    const int64_t end = k + kPairs < pairs ? k + kPairs : pairs;
    F32x16 acc[R * J];
    score_chain<0, R, J>(query, query_stride, keys, k, end, ahead, acc);
    store_chain(acc, first);
    score_chain<1, R, J>(query, query_stride, keys, k, end, ahead, acc);
    add_chains(first, acc, sums);
  }
  hints = ahead;
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) {
      const F32x16 dots = load_n(sums + 16 * (r * J + j), 16);
      store_n(scores + r * kAttentionChunk + 16 * j, mul(set1(scale), dots), 16);
    }
  }
}

// Chain P of the weighted sums of B steps of values, over the positions [begin, end).
template <int P, int R, int B>
[[gnu::always_inline]] inline void weigh_chain(const float* weights, const PairValues& values,
                                               int64_t step, int64_t begin, int64_t end,
                                               Ahead& ahead, F32x16 (&acc)[R * B]) {
  constexpr int kLines = B == 1 ? 1 - P : B / 2;
#pragma GCC unroll 16
  for (int i = 0; i < R * B; ++i) acc[i] = zero();
#pragma GCC unroll 4
  for (int64_t j = begin + P; j < end; j += 2) {
    ahead.ask(kLines);
    F32x16 v[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) v[b] = load_mixed<DType::kBF16>(values.at(j, step + b));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 w = set1(weights[r * kAttentionChunk + j]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) acc[r * B + b] = fma(w, v[b], acc[r * B + b]);
    }
  }
}

// out[r][16 step ..] of B steps: sums over the first `count` positions.
template <int R, int B>
[[gnu::noinline]] void weigh_pairs(const float* weights, PairValues values, int64_t step,
                                   int64_t count, Ahead& hints, float* out, int64_t out_stride) {
  Ahead ahead = hints;
  alignas(64) float first[R * B * 16], sums[R * B * 16];
  for (int i = 0; i < R * B; ++i) store_n(sums + 16 * i, zero(), 16);
  for (int64_t j = 0; j < count; j += kPairGroup) {
    const int64_t end = j + kPairGroup < count ? j + kPairGroup : count;
    F32x16 acc[R * B];
    weigh_chain<0, R, B>(weights, values, step, j, end, ahead, acc);
    store_chain(acc, first);
    weigh_chain<1, R, B>(weights, values, step, j, end, ahead, acc);
    add_chains(first, acc, sums);
  }
  hints = ahead;
  for (int i = 0; i < R * B; ++i) {
    store_n(out + i / B * out_stride + 16 * (step + i % B),
            unmix<DType::kBF16>(load_n(sums + 16 * i, 16)), 16);
  }
}

// Whether the values of some positions are numbers, so that a weight of 0 makes 0 of them.
bool finite_values(const PairValues& values, int64_t steps, int64_t begin, int64_t end) {
  F32x16 best = zero();
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t b = 0; b < steps; ++b) {
      best = max_abs_bits(best, load_mixed<DType::kBF16>(values.at(j, b)));
    }
  }
  return reduce_abs_bits(best) < kInfinityBits;
}

// One chunk for all its rows: what is laid out so far, and where.
struct PairChunk {
  const AttentionChunk& c;
  float *panels, *query, *scores;
  int64_t laid_out;  // positions whose keys are
  PairValues values;
  Ahead ahead;  // the values during scores, then the keys to come

  int64_t steps() const { return attention_padded(c.dim) / 16; }
  int64_t pairs() const { return (c.dim + 1) / 2; }
  int64_t panel_floats() const { return 16 * ((pairs() + 15) / 16 * 16); }
};

PairChunk pair_chunk(const AttentionChunk& c, float* scratch) {
  const int64_t padded = attention_padded(c.dim);
  while (reinterpret_cast<uintptr_t>(scratch) % 64 != 0) ++scratch;  // whole cache lines
  auto* values = reinterpret_cast<char*>(scratch + kAttentionChunk * padded);
  float* query = scratch + 2 * kAttentionChunk * padded;
  float* scores = query + (c.rows + 4) * padded;
  const int64_t bytes = (c.positions - 1) * c.stride_bytes + 2 * c.dim;
  PairChunk chunk = {c, scratch, query, scores, 0, {}, ahead_of(c.values, bytes)};
  if (c.rows < kBlockFewest && c.dim % 16 == 0) {
    chunk.values = {static_cast<const char*>(c.values), c.stride_bytes, 32};
    return chunk;
  }
  // Side by side for many rows, since lines that are far apart can displace each other; and where
  // the last step of the last position may not be read.
  chunk.values = {values, 32, 32 * kAttentionChunk};
  for (int64_t j = 0; j < c.positions; ++j) {
    const auto* row = static_cast<const char*>(row_at(c.values, c.stride_bytes, j));
    for (int64_t i = 0; i < c.dim; i += 16) {
      char* to = values + 32 * j + 2 * kAttentionChunk * i;
      if (i + 16 <= c.dim) {
        __builtin_memcpy(to, row + 2 * i, 32);
      } else {
        __builtin_memset(to, 0, 32);
        __builtin_memcpy(to, row + 2 * i, 2 * (c.dim - i));
      }
    }
  }
  return chunk;
}

// Lays out the keys of the next 16 positions.
void lay_out_panel(PairChunk& chunk) {
  const AttentionChunk& c = chunk.c;
  const int64_t j = chunk.laid_out, row_bytes = 2 * c.dim;
  const int64_t rows = j + 16 < c.positions ? 16 : c.positions - j;
  const auto* keys = static_cast<const char*>(row_at(c.keys, c.stride_bytes, j));
  float* panel = chunk.panels + j / 16 * chunk.panel_floats();
  for (int64_t i = 0; i < row_bytes; i += 64) {
    const void* words = keys + i;
    int64_t stride = c.stride_bytes;
    alignas(64) char tile[16 * 64];
    if (rows < 16 || i + 64 > row_bytes) {
      const int64_t bytes = i + 64 < row_bytes ? 64 : row_bytes - i;
      __builtin_memset(tile, 0, sizeof tile);
      for (int64_t r = 0; r < rows; ++r) {
        __builtin_memcpy(tile + 64 * r, keys + r * c.stride_bytes + i, bytes);
      }
      words = tile, stride = 64;
    }
    transpose_16(words, stride, panel + 4 * i, 16);
    chunk.ahead.ask(8);  // half of the values' lines; the scores ask for the others
  }
  chunk.laid_out += 16;
}

// Scores of R rows and the first `count` positions.
template <int R>
void score_pair_rows(PairChunk& chunk, const float* query, int64_t query_stride, int64_t count) {
  constexpr int J = kPairTiles >= 4 * R ? 4 : kPairTiles >= 2 * R ? 2 : 1;
  const int64_t bytes = chunk.panel_floats() * static_cast<int64_t>(sizeof(float));
  const auto panels = [&](int64_t j) {
    return PairKeys{reinterpret_cast<const char*>(chunk.panels) + j / 16 * bytes, bytes};
  };
  int64_t j = 0;
  for (; J > 1 && j + 16 * (J - 1) < count; j += 16 * J) {
    while (chunk.laid_out < j + 16 * J) lay_out_panel(chunk);
    score_pairs<R, J>(query, query_stride, panels(j), chunk.pairs(), chunk.c.scale, chunk.ahead,
                      chunk.scores + j);
  }
  for (; j < count; j += 16) {
    while (chunk.laid_out < j + 16) lay_out_panel(chunk);
    score_pairs<R, 1>(query, query_stride, panels(j), chunk.pairs(), chunk.c.scale, chunk.ahead,
                      chunk.scores + j);
  }
}

// Weighted values of R rows over the first `count` positions.
template <int R>
void weigh_pair_rows(PairChunk& chunk, const float* weights, int64_t count, float* out,
                     int64_t out_stride) {
  constexpr int B = kPairTiles >= 4 * R ? 4 : kPairTiles >= 2 * R ? 2 : 1;
  int64_t b = 0;
  for (; B > 1 && b + B <= chunk.steps(); b += B) {
    weigh_pairs<R, B>(weights, chunk.values, b, count, chunk.ahead, out, out_stride);
  }
  for (; b < chunk.steps(); ++b) {
    weigh_pairs<R, 1>(weights, chunk.values, b, count, chunk.ahead, out, out_stride);
  }
}

// R rows from `row` on.
template <int R>
void attend_pair_rows(PairChunk& chunk, int64_t row, float* states) {
  const AttentionChunk& c = chunk.c;
  const int64_t padded = attention_padded(c.dim), stride = attention_state_floats(c.dim);
  float* state = states + row * stride;
  const float* query = c.query + row * c.dim;
  int64_t query_stride = c.dim, seen[R];
  if (c.dim % 2 != 0) {
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(chunk.query + r * padded, query + r * c.dim, sizeof(float) * c.dim);
      chunk.query[r * padded + c.dim] = 0.0f;
    }
    query = chunk.query, query_stride = padded;
  }
  for (int r = 0; r < R; ++r) seen[r] = positions_seen(c, row + r);
  const int64_t most = seen[R - 1];
  score_pair_rows<R>(chunk, query, query_stride, most);
  if (row == 0) chunk.ahead = ahead_of(c.next, (c.positions - 1) * c.stride_bytes + 2 * c.dim);
  for (int r = 0; r < R; ++r) {
    float* scores = chunk.scores + r * kAttentionChunk;
    softmax_scores<DType::kBF16>(scores, seen[r], state + r * stride + padded);
    for (int64_t j = (seen[r] + 15) / 16 * 16; j < kAttentionChunk; ++j) scores[j] = 0.0f;
  }
  // What a row does not see weighs 0 and adds 0, unless it is infinite or a NaN.
  if (seen[0] == most || finite_values(chunk.values, chunk.steps(), seen[0], most)) {
    return weigh_pair_rows<R>(chunk, chunk.scores, most, state, stride);
  }
  for (int r = 0; r < R; ++r) {
    weigh_pair_rows<1>(chunk, chunk.scores + r * kAttentionChunk, seen[r], state + r * stride,
                       stride);
  }
}

void attend_pairs(const AttentionChunk& c, float* scratch, float* states) {
  PairChunk chunk = pair_chunk(c, scratch);
  int64_t row = 0;
  for (; c.rows >= kBlockFewest && row + kBlockRows <= c.rows; row += kBlockRows) {
    attend_pair_rows<kBlockRows>(chunk, row, states);
  }
  while (row < c.rows) {
    const int64_t left = c.rows - row;
    const int64_t take = left >= 6 || left == 4 ? 4 : left == 5 ? 3 : left;
    if (take == 4) attend_pair_rows<4>(chunk, row, states);
    if (take == 3) attend_pair_rows<3>(chunk, row, states);
    if (take == 2) attend_pair_rows<2>(chunk, row, states);
    if (take == 1) attend_pair_rows<1>(chunk, row, states);
    row += take;
  }
}
