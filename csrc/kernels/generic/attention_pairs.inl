// Attention over bfloat16 caches in the order of the matrix instruction TDPBF16PS: two chains of
// fused multiply-adds, over the even and the odd ones of 32 elements (scores) or positions
// (values).  Keys are read in panels, so that a lane is a position and no sum runs across lanes;
// where the cache holds rows, they are laid out once for all queries.  Included inside an ISA's
// anonymous namespace; never mentions an ISA.  Definition: kernel_table.h, attend_chunk.

constexpr int64_t kPairBytes = 64;  // of 16 positions or features

// Panels of 16 positions, [pair of elements][16 positions][2] each.
using PairKeys = const char* const*;

// What is read next is asked for a line at a time, between the sums (many lines at once would wait
// for each other): scores ask for the values, at the places where they read keys, and weighted sums
// for the keys to come, where they read values.  Where there is nothing to ask for, the hint is the
// memory itself.

// Values of 16 features at a time, by pairs of positions.  Of rows: 16 features of a position side
// by side.
struct RowValues {
  const char *data, *next;
  int64_t position_bytes, step_bytes;  // from a position, or 16 features, to the next

  // Of the position 2 * pair + P.
  template <int P>
  [[gnu::always_inline]] F32x16 load(int64_t pair, int64_t step) const {
    return load_mixed<DType::kBF16>(data + (2 * pair + P) * position_bytes + step * step_bytes);
  }
  template <int B>
  [[gnu::always_inline]] void ask(int64_t pair, int64_t step) const {
    const char* at = next + 2 * pair * position_bytes + step * step_bytes;
    for (int b = 0; b < (B + 1) / 2; ++b) {  // a line is two steps
      prefetch_l2(at + 64 * b);
      prefetch_l2(at + 64 * b + position_bytes);
    }
  }
  void ask_no_more() { next = data; }
  static F32x16 in_order(F32x16 sum) { return unmix<DType::kBF16>(sum); }
};
// Of panels: [pair of positions][dim][2] each.
struct PanelValues {
  const char *panels[kChunkPanels], *next[kChunkPanels];
  int64_t pair_bytes;  // of all dim

  [[gnu::always_inline]] int64_t offset(int64_t pair, int64_t step) const {
    return pair % (kPanelPositions / 2) * pair_bytes + step * kPairBytes;
  }
  template <int P>
  [[gnu::always_inline]] F32x16 load(int64_t pair, int64_t step) const {
    const void* words = panels[pair / (kPanelPositions / 2)] + offset(pair, step);
    return load_of_pairs<P>(words);
  }
  template <int B>
  [[gnu::always_inline]] void ask(int64_t pair, int64_t step) const {
    const char* at = next[pair / (kPanelPositions / 2)] + offset(pair, step);
    for (int b = 0; b < B; ++b) prefetch_l2(at + kPairBytes * b);
  }
  void ask_no_more() {
    for (int64_t i = 0; i < kChunkPanels; ++i) next[i] = panels[i];
  }
  static F32x16 in_order(F32x16 sum) { return sum; }
};

// Sums of N vectors in chain P, or in both if there are registers for them.
template <int N>
constexpr bool kBothChains = 2 * N <= kPairTiles;

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
[[gnu::always_inline]] inline void add_chains(const F32x16 (&first)[N], const F32x16 (&second)[N],
                                              float* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    store_n(sums + 16 * i, add(load_n(sums + 16 * i, 16), add(first[i], second[i])), 16);
  }
}

template <int N>
[[gnu::always_inline]] inline void store_chain(const F32x16 (&chain)[N], float* first) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) store_n(first + 16 * i, chain[i], 16);
}

template <int N>
[[gnu::always_inline]] inline void clear(F32x16 (&acc)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) acc[i] = zero();
}

// One pair's elements P of J panels times those of R queries.
template <int P, int R, int J>
[[gnu::always_inline]] inline void score_pair_step(const float* query, int64_t query_stride,
                                                   PairKeys keys, int64_t k, F32x16 (&acc)[R * J]) {
  F32x16 key[J];
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) {
    const void* words = keys[j] + k * kPairBytes;
    key[j] = load_of_pairs<P>(words);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F32x16 q = set1(query[r * query_stride + 2 * k + P]);
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) acc[r * J + j] = fma(q, key[j], acc[r * J + j]);
  }
}

template <int J>
[[gnu::always_inline]] inline void ask_panels(PairKeys hints, int64_t line) {
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) prefetch_l2(hints[j] + line * kPairBytes);
}

// Scores of R queries and J panels.
template <int R, int J>
[[gnu::noinline]] void score_pairs(const float* query, int64_t query_stride, PairKeys keys,
                                   int64_t pairs, float scale, PairKeys hints, float* scores) {
  constexpr int64_t kPairs = kPairGroup / 2;
  alignas(64) float first[R * J * 16], sums[R * J * 16];
  for (int i = 0; i < R * J; ++i) store_n(sums + 16 * i, zero(), 16);
  for (int64_t k = 0; k < pairs; k += kPairs) {
    const int64_t end = k + kPairs < pairs ? k + kPairs : pairs;
    F32x16 acc[R * J];
    clear(acc);
    if constexpr (kBothChains<R * J>) {
      F32x16 odd[R * J];
      clear(odd);
#pragma GCC unroll 4
      for (int64_t i = k; i < end; ++i) {
        ask_panels<J>(hints, i);
        score_pair_step<0, R, J>(query, query_stride, keys, i, acc);
        score_pair_step<1, R, J>(query, query_stride, keys, i, odd);
      }
      add_chains(acc, odd, sums);
    } else {
#pragma GCC unroll 4
      for (int64_t i = k; i < end; ++i) {
        ask_panels<J>(hints, i);
        score_pair_step<0, R, J>(query, query_stride, keys, i, acc);
      }
      store_chain(acc, first);
      clear(acc);
#pragma GCC unroll 4
      for (int64_t i = k; i < end; ++i) {
        score_pair_step<1, R, J>(query, query_stride, keys, i, acc);
      }
      add_chains(first, acc, sums);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) {
      const F32x16 dots = load_n(sums + 16 * (r * J + j), 16);
      store_n(scores + r * kAttentionChunk + 16 * j, mul(set1(scale), dots), 16);
    }
  }
}

// B steps of the values at a pair's position P, times the weights of R rows.
template <int P, int R, int B, class Values>
[[gnu::always_inline]] inline void weigh_pair_step(const float* weights, const Values& values,
                                                   int64_t step, int64_t pair,
                                                   F32x16 (&acc)[R * B]) {
  F32x16 v[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) v[b] = values.template load<P>(pair, step + b);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F32x16 w = set1(weights[r * kAttentionChunk + 2 * pair + P]);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) acc[r * B + b] = fma(w, v[b], acc[r * B + b]);
  }
}

// out[r][16 step ..] of B steps: sums over positions [begin, count).
template <int R, int B, class Values>
[[gnu::noinline]] void weigh_pairs(const float* weights, Values values, int64_t step, int64_t begin,
                                   int64_t count, float* out, int64_t out_stride) {
  alignas(64) float first[R * B * 16], sums[R * B * 16];
  for (int i = 0; i < R * B; ++i) store_n(sums + 16 * i, zero(), 16);
  for (int64_t j = begin / kPairGroup * kPairGroup; j < count; j += kPairGroup) {
    const int64_t end = j + kPairGroup < count ? j + kPairGroup : count;
    const int64_t start = j < begin ? begin : j;
    // a last position may lack the odd one, the first one the even one
    const int64_t from = (start + 1) / 2, both = end / 2;
    F32x16 acc[R * B];
    clear(acc);
    if constexpr (kBothChains<R * B>) {
      F32x16 odd[R * B];
      clear(odd);
      if (start % 2 != 0) weigh_pair_step<1, R, B>(weights, values, step, start / 2, odd);
#pragma GCC unroll 4
      for (int64_t i = from; i < both; ++i) {
        values.template ask<B>(i, step);
        weigh_pair_step<0, R, B>(weights, values, step, i, acc);
        weigh_pair_step<1, R, B>(weights, values, step, i, odd);
      }
      if (end % 2 != 0) weigh_pair_step<0, R, B>(weights, values, step, both, acc);
      add_chains(acc, odd, sums);
    } else {
#pragma GCC unroll 4
      for (int64_t i = from; i < both; ++i) {
        values.template ask<B>(i, step);
        weigh_pair_step<0, R, B>(weights, values, step, i, acc);
      }
      if (end % 2 != 0) weigh_pair_step<0, R, B>(weights, values, step, both, acc);
      store_chain(acc, first);
      clear(acc);
#pragma GCC unroll 4
      for (int64_t i = start / 2; i < both; ++i) {
        weigh_pair_step<1, R, B>(weights, values, step, i, acc);
      }
      add_chains(first, acc, sums);
    }
  }
  for (int i = 0; i < R * B; ++i) {
    store_n(out + i / B * out_stride + 16 * (step + i % B),
            Values::in_order(load_n(sums + 16 * i, 16)), 16);
  }
}

// Whether the values of some positions are numbers, so that a weight of 0 makes 0 of them.
template <class Values>
bool finite_values(const Values& values, int64_t steps, int64_t begin, int64_t end) {
  F32x16 best = zero();
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t b = 0; b < steps; ++b) {
      best = max_abs_bits(
          best, j % 2 == 0 ? values.template load<0>(j / 2, b) : values.template load<1>(j / 2, b));
    }
  }
  return reduce_abs_bits(best) < kInfinityBits;
}

// One chunk for all its rows: its keys in panels, laid out so far or as the cache has them.
template <class Values>
struct PairChunk {
  const AttentionChunk& c;
  const char *keys[kChunkPanels], *hints[kChunkPanels];  // hints: the values, beside the keys
  float *panels, *query, *scores;                        // scratch
  int64_t laid_out;                                      // positions whose keys are in panels
  Values values;

  void ask_no_more() {
    for (int64_t i = 0; i < kChunkPanels; ++i) hints[i] = keys[i];
    values.ask_no_more();
  }
  int64_t hidden() const { return positions_hidden(c, 0); }  // from every row
  int64_t steps() const { return attention_padded(c.dim) / 16; }
  int64_t pairs() const { return (c.dim + 1) / 2; }
  int64_t panel_floats() const { return 16 * ((pairs() + 15) / 16 * 16); }
};

template <class Values>
PairChunk<Values> pair_chunk(const AttentionChunk& c, float* scratch) {
  const int64_t padded = attention_padded(c.dim);
  while (reinterpret_cast<uintptr_t>(scratch) % 64 != 0) ++scratch;  // whole cache lines
  float* query = scratch + 2 * kAttentionChunk * padded;
  const int64_t laid_out = positions_hidden(c, 0) / 16 * 16;
  return {c, {}, {}, scratch, query, query + (c.rows + 4) * padded, laid_out, {}};
}

PairChunk<RowValues> chunk_of_rows(const AttentionChunk& c, float* scratch) {
  PairChunk<RowValues> chunk = pair_chunk<RowValues>(c, scratch);
  const bool dense = c.stride_bytes == 2 * c.dim;  // rows without gaps: as many lines as the keys
  for (int64_t i = 0; i < kChunkPanels; ++i) {
    chunk.keys[i] = reinterpret_cast<const char*>(chunk.panels + i * chunk.panel_floats());
    const bool some = dense && 16 * i < c.positions;
    chunk.hints[i] =
        some ? static_cast<const char*>(row_at(c.values, c.stride_bytes, 16 * i)) : chunk.keys[i];
  }
  if (c.rows < kBlockFewest && c.dim % 16 == 0) {
    const auto* data = static_cast<const char*>(c.values);
    const auto* next = static_cast<const char*>(c.next);
    chunk.values = {data, next == nullptr ? data : next, c.stride_bytes, 32};
    return chunk;
  }
  // Side by side for many rows, since lines that are far apart can displace each other; and where
  // the last step of the last position may not be read.
  auto* values = reinterpret_cast<char*>(chunk.panels + kAttentionChunk * attention_padded(c.dim));
  chunk.values = {values, values, 32, 32 * kAttentionChunk};
  for (int64_t j = chunk.hidden(); j < c.positions; ++j) {
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

PairChunk<PanelValues> chunk_of_panels(const AttentionChunk& c, float* scratch) {
  PairChunk<PanelValues> chunk = pair_chunk<PanelValues>(c, scratch);
  chunk.values.pair_bytes = 4 * c.dim;
  for (int64_t i = 0; i < kChunkPanels; ++i) {
    const void *values = c.panels.values[i], *next = c.panels.next[i];
    chunk.keys[i] = static_cast<const char*>(c.panels.keys[i]);
    chunk.hints[i] = chunk.values.panels[i] = static_cast<const char*>(values);
    chunk.values.next[i] = static_cast<const char*>(next == nullptr ? values : next);
  }
  chunk.laid_out = kAttentionChunk;
  return chunk;
}

// Lays out the keys of the next 16 positions.
template <class Values>
void lay_out_panel(PairChunk<Values>& chunk) {
  const AttentionChunk& c = chunk.c;
  const int64_t j = chunk.laid_out, row_bytes = 2 * c.dim;
  const int64_t rows = j + 16 < c.positions ? 16 : c.positions - j;
  const int64_t first = chunk.hidden() > j ? chunk.hidden() - j : 0;
  const auto* keys = static_cast<const char*>(row_at(c.keys, c.stride_bytes, j));
  float* panel = chunk.panels + j / 16 * chunk.panel_floats();
  for (int64_t i = 0; i < row_bytes; i += 64) {
    const void* words = keys + i;
    int64_t stride = c.stride_bytes;
    alignas(64) char tile[16 * 64];
    if (first > 0 || rows < 16 || i + 64 > row_bytes) {
      const int64_t bytes = i + 64 < row_bytes ? 64 : row_bytes - i;
      __builtin_memset(tile, 0, sizeof tile);
      for (int64_t r = first; r < rows; ++r) {
        __builtin_memcpy(tile + 64 * r, keys + r * c.stride_bytes + i, bytes);
      }
      words = tile, stride = 64;
    }
    transpose_16(words, stride, panel + 4 * i, 16);
  }
  chunk.laid_out += 16;
}

// How many panels, or steps of values, meet R rows at once.
constexpr int pair_tiles(int rows) {
  return kPairTiles >= 8 * rows ? 4 : kPairTiles >= 4 * rows ? 2 : 1;
}

// Scores of R rows and positions [begin, count).
template <int R, class Values>
void score_pair_rows(PairChunk<Values>& chunk, const float* query, int64_t query_stride,
                     int64_t begin, int64_t count) {
  constexpr int J = pair_tiles(R);
  int64_t j = begin / 16 * 16;
  for (; J > 1 && j + 16 * (J - 1) < count; j += 16 * J) {
    while (chunk.laid_out < j + 16 * J) lay_out_panel(chunk);
    score_pairs<R, J>(query, query_stride, chunk.keys + j / 16, chunk.pairs(), chunk.c.scale,
                      chunk.hints + j / 16, chunk.scores + j);
  }
  for (; j < count; j += 16) {
    while (chunk.laid_out < j + 16) lay_out_panel(chunk);
    score_pairs<R, 1>(query, query_stride, chunk.keys + j / 16, chunk.pairs(), chunk.c.scale,
                      chunk.hints + j / 16, chunk.scores + j);
  }
}

// Weighted values of R rows over positions [begin, count).
template <int R, class Values>
void weigh_pair_rows(PairChunk<Values>& chunk, const float* weights, int64_t begin, int64_t count,
                     float* out, int64_t out_stride) {
  constexpr int B = pair_tiles(R);
  int64_t b = 0;
  for (; B > 1 && b + B <= chunk.steps(); b += B) {
    weigh_pairs<R, B>(weights, chunk.values, b, begin, count, out, out_stride);
  }
  for (; b < chunk.steps(); ++b) {
    weigh_pairs<R, 1>(weights, chunk.values, b, begin, count, out, out_stride);
  }
}

// R rows from `row` on.
template <int R, class Values>
void attend_pair_rows(PairChunk<Values>& chunk, int64_t row, float* states) {
  const AttentionChunk& c = chunk.c;
  const int64_t padded = attention_padded(c.dim), stride = attention_state_floats(c.dim);
  float* state = states + row * stride;
  const float* query = c.query + row * c.dim;
  int64_t query_stride = c.dim, hidden[R], seen[R];
  if (c.dim % 2 != 0) {
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(chunk.query + r * padded, query + r * c.dim, sizeof(float) * c.dim);
      chunk.query[r * padded + c.dim] = 0.0f;
    }
    query = chunk.query, query_stride = padded;
  }
  for (int r = 0; r < R; ++r) {
    hidden[r] = positions_hidden(c, row + r), seen[r] = positions_seen(c, row + r);
  }
  const int64_t from = hidden[0], most = seen[R - 1];
  score_pair_rows<R>(chunk, query, query_stride, from, most);
  for (int r = 0; r < R; ++r) {
    float* scores = chunk.scores + r * kAttentionChunk;
    softmax_scores<DType::kBF16>(scores, hidden[r], seen[r], state + r * stride + padded);
    for (int64_t j = (seen[r] + 15) / 16 * 16; j < kAttentionChunk; ++j) scores[j] = 0.0f;
  }
  // What a row does not see weighs 0 and adds 0, unless it is infinite or a NaN.
  if (finite_values(chunk.values, chunk.steps(), from, hidden[R - 1]) &&
      finite_values(chunk.values, chunk.steps(), seen[0], most)) {
    return weigh_pair_rows<R>(chunk, chunk.scores, from, most, state, stride);
  }
  for (int r = 0; r < R; ++r) {
    weigh_pair_rows<1>(chunk, chunk.scores + r * kAttentionChunk, hidden[r], seen[r],
                       state + r * stride, stride);
  }
}

template <class Values>
void attend_pair_chunk(PairChunk<Values> chunk, float* states) {
  const AttentionChunk& c = chunk.c;
  int64_t row = 0;
  for (; c.rows >= kBlockFewest && row + kBlockRows <= c.rows; row += kBlockRows) {
    attend_pair_rows<kBlockRows>(chunk, row, states);
    chunk.ask_no_more();
  }
  while (row < c.rows) {
    const int64_t left = c.rows - row;
    const int64_t take = left >= 6 || left == 4 ? 4 : left == 5 ? 3 : left;
    if (take == 4) attend_pair_rows<4>(chunk, row, states);
    if (take == 3) attend_pair_rows<3>(chunk, row, states);
    if (take == 2) attend_pair_rows<2>(chunk, row, states);
    if (take == 1) attend_pair_rows<1>(chunk, row, states);
    row += take;
    chunk.ask_no_more();
  }
}

void attend_pairs(const AttentionChunk& c, float* scratch, float* states) {
  if (c.layout == CacheLayout::kPanels) {
    attend_pair_chunk(chunk_of_panels(c, scratch), states);
  } else {
    attend_pair_chunk(chunk_of_rows(c, scratch), states);
  }
}
