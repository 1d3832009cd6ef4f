// bfloat16 caches, one chunk for all query rows: where its keys and values lie or are laid out, and
// which rows are processed together. Sums: bf16_chains.inl, or bf16_unit.inl where the CPU has the
// unit; bf16_tiles.inl, where it has a matrix unit, for many rows of a cache in panels.

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
  const char *keys[kChunkPanels], *hints[kChunkPanels];  // hints: what to ask for beside the keys
  float *panels, *query, *scores;                        // scratch
  int64_t laid_out;                                      // positions whose keys are in panels
  bool by_unit;
  bool has_words;  // of the queries, from the last call with this scratch
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
  const bool by_unit = PairUnit::kHere && c.pair_unit && c.dim % kPairGroup == 0;
  return {
      c, {}, {}, scratch, query, query + (c.rows + 4) * padded, laid_out, by_unit, c.same_queries,
      {}};
}

PairChunk<RowValues> chunk_of_rows(const AttentionChunk& c, float* scratch) {
  PairChunk<RowValues> chunk = pair_chunk<RowValues>(c, scratch);
  const bool dense = c.stride_bytes == 2 * c.dim;  // rows without gaps
  for (int64_t i = 0; i < kChunkPanels; ++i) {
    chunk.keys[i] = reinterpret_cast<const char*>(chunk.panels + i * chunk.panel_floats());
    const bool some = dense && 16 * i < c.positions;
    chunk.hints[i] =
        some ? static_cast<const char*>(row_at(c.values, c.stride_bytes, 16 * i)) : chunk.keys[i];
  }
  if (c.rows < kBlockMinRows && c.dim % 16 == 0) {
    const auto* data = static_cast<const char*>(c.values);
    const auto* next = static_cast<const char*>(c.next);
    chunk.values = {data, next == nullptr ? data : next, c.stride_bytes, 32};
    return chunk;
  }
  // Copied side by side for many rows, since lines that are far apart can displace each other; and
  // if the last step of the last position would read behind the cache.
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
    const auto* values = static_cast<const char*>(c.panels.values[i]);
    chunk.keys[i] = static_cast<const char*>(c.panels.keys[i]);
    chunk.values.panels[i] = values;
    chunk.hints[i] = ask_first(c.panels.next_keys[i], values);
    chunk.values.next[i] = ask_first(c.panels.next_values[i], values);
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

// Scores of R rows and positions [begin, count). words: of the queries, for the unit.
template <int R, class Values>
void score_pair_rows(PairChunk<Values>& chunk, const float* query, int64_t query_stride,
                     const float* words, int64_t begin, int64_t count) {
  constexpr int J = pair_tiles(R);
  const auto score = [&]<int N>(int64_t j) {
    while (chunk.laid_out < j + 16 * N) lay_out_panel(chunk);
    const auto keys = chunk.keys + j / 16, hints = chunk.hints + j / 16;
    float* scores = chunk.scores + j;
    if constexpr (PairUnit::kHere) {
      if (chunk.by_unit) {
        return unit_scores<PairUnit, R, N>(words, chunk.c.dim / 2, keys, chunk.c.dim / kPairGroup,
                                           chunk.c.scale, hints, scores);
      }
    }
    score_pairs<R, N>(query, query_stride, keys, chunk.pairs(), chunk.c.scale, hints, scores);
  };
  int64_t j = begin / 16 * 16;
  for (; J > 1 && j + 16 * (J - 1) < count; j += 16 * J) score.template operator()<J>(j);
  for (; j < count; j += 16) score.template operator()<1>(j);
}

// Weighted values of R rows over positions [begin, count).
template <int R, class Values>
void weigh_pair_rows(PairChunk<Values>& chunk, const float* weights, int64_t begin, int64_t count,
                     float* out, int64_t out_stride) {
  constexpr int B = pair_tiles(R);
  alignas(64) float words[PairUnit::kHere ? R * kAttentionChunk / 2 : 1];
  if (chunk.by_unit) store_words<PairUnit>(R * kAttentionChunk, weights, words);
  const auto weigh = [&]<int N>(int64_t b) {
    if constexpr (PairUnit::kHere) {
      if (chunk.by_unit) {
        return unit_weighs<PairUnit, R, N>(weights, words, chunk.values, b, begin, count, out,
                                           out_stride);
      }
    }
    weigh_pairs<R, N>(weights, chunk.values, b, begin, count, out, out_stride);
  };
  int64_t b = 0;
  for (; B > 1 && b + B <= chunk.steps(); b += B) weigh.template operator()<B>(b);
  for (; b < chunk.steps(); ++b) weigh.template operator()<1>(b);
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
  float* words = chunk.query + row * padded;
  if (chunk.by_unit && !chunk.has_words) store_words<PairUnit>(R * c.dim, query, words);
  for (int r = 0; r < R; ++r) {
    hidden[r] = positions_hidden(c, row + r), seen[r] = positions_seen(c, row + r);
  }
  const int64_t from = hidden[0], end = seen[R - 1];
  score_pair_rows<R>(chunk, query, query_stride, words, from, end);
  softmax_rows<DType::kBF16>(chunk.scores, hidden, seen, state + padded, stride);
  for (int r = 0; r < R; ++r) {
    float* scores = chunk.scores + r * kAttentionChunk;
    for (int64_t j = (seen[r] + 15) / 16 * 16; j < kAttentionChunk; ++j) scores[j] = 0.0f;
  }
  // Positions that a row does not see weigh 0. That adds 0 unless they are infinite or NaN.
  if (finite_values(chunk.values, chunk.steps(), from, hidden[R - 1]) &&
      finite_values(chunk.values, chunk.steps(), seen[0], end)) {
    return weigh_pair_rows<R>(chunk, chunk.scores, from, end, state, stride);
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
  for (; c.rows >= kBlockMinRows && row + kBlockRows <= c.rows; row += kBlockRows) {
    attend_pair_rows<kBlockRows>(chunk, row, states);
    chunk.ask_no_more();
  }
  attend_in_groups(row, c.rows, [&]<int R>(int64_t at) {
    attend_pair_rows<R>(chunk, at, states);
    chunk.ask_no_more();
  });
}
