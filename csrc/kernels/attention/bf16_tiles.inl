// Attention over bfloat16 caches in panels by the matrix unit, sixteen query rows at a time. Its
// products of bfloat16 have the order of sums of bf16_chains.inl, and it reads both kinds of panels
// as they lie: a panel of keys holds 16 positions, a line for each pair of elements; two panels of
// values hold 32 positions, a line for each pair of positions.

constexpr int kUnitRows = 16;  // of a tile

// The values of a chunk as tiles: of each 32 positions a run of lines, pair_bytes apart. Positions
// that nobody sees are zeros there. null: none of them is seen.
struct TileValues {
  const char* runs[kAttentionChunk / kPairGroup];
};

// Panels that follow each other are such a run; others, or those with positions that are hidden or
// not there, are copied to `memory`.
inline TileValues tile_values(const PairChunk<PanelValues>& chunk, char* memory) {
  const AttentionChunk& c = chunk.c;
  const int64_t panel_bytes = 2 * kPanelPositions * c.dim, pair_bytes = 4 * c.dim;
  TileValues found = {};
  for (int64_t g = 0; g < kAttentionChunk / kPairGroup; ++g) {
    const int64_t begin = g * kPairGroup, end = begin + kPairGroup;
    const int64_t from = chunk.hidden() > begin ? chunk.hidden() : begin;
    const int64_t to = c.positions < end ? c.positions : end;
    if (from >= to) continue;
    const char* const* panels = chunk.values.panels + 2 * g;
    if (from == begin && to == end && panels[1] == panels[0] + panel_bytes) {
      found.runs[g] = panels[0];
      continue;
    }
    char* run = memory + 2 * g * panel_bytes;
    found.runs[g] = run;
    for (int64_t j = begin; j < end; j += 2) {
      char* line = run + (j - begin) / 2 * pair_bytes;
      if (j + 1 < from || j >= to) {
        __builtin_memset(line, 0, static_cast<size_t>(pair_bytes));
        continue;
      }
      const char* seen = panels[(j - begin) / kPanelPositions];
      __builtin_memcpy(line, seen + j % kPanelPositions / 2 * pair_bytes,
                       static_cast<size_t>(pair_bytes));
      for (int64_t odd = 0; odd < 2; ++odd) {
        if (j + odd >= from && j + odd < to) continue;
        for (int64_t i = 0; i < c.dim; ++i) __builtin_memset(line + 4 * i + 2 * odd, 0, 2);
      }
    }
  }
  return found;
}

// Where the panels of a chunk begin, and those to ask for beside them; ask: whether there are any.
struct TileKeys {
  const char *panels[kChunkPanels], *next[kChunkPanels];
  bool ask;
};

// Panels of which nothing is seen may be null: other panels take their place.
inline TileKeys tile_keys(const PairChunk<PanelValues>& chunk) {
  TileKeys keys;
  const int64_t first = chunk.hidden() / kPanelPositions;
  const int64_t last = (chunk.c.positions - 1) / kPanelPositions;
  for (int64_t p = 0; p < kChunkPanels; ++p) {
    keys.panels[p] = chunk.keys[p < first ? first : p > last ? last : p];
    keys.next[p] = chunk.hints[p] == nullptr ? keys.panels[p] : chunk.hints[p];
  }
  keys.ask = true;
  return keys;
}

// scores[16][64] = scale * (queries x keys). query: bfloat16 [16][dim].
template <class U>
void tile_scores(const char* query, int64_t dim, const TileKeys& keys, float scale, float* scores) {
  repeat<kChunkPanels>([&]<int p>() BITNET_INLINE_LAMBDA { U::template zero<p>(); });
  for (int64_t line = 0; line < dim / 2; line += kPairGroup / 2) {
    U::template load<4>(query + 4 * line, 2 * dim);
    repeat<kChunkPanels>([&]<int p>() BITNET_INLINE_LAMBDA {
      for (int64_t i = line; keys.ask && i < line + kPairGroup / 2; ++i)
        prefetch_l2(keys.next[p] + i * kPairBytes);
      U::template load<5 + p % 2>(keys.panels[p] + line * kPairBytes, kPairBytes);
      U::template multiply_bf16<p, 4, 5 + p % 2>();
    });
  }
  repeat<kChunkPanels>([&]<int p>() BITNET_INLINE_LAMBDA {
    U::template store<p>(scores + p * kPanelPositions, 4 * kAttentionChunk);
  });
  for (int64_t i = 0; i < kUnitRows * kAttentionChunk; i += 16)
    store_n(scores + i, mul(set1(scale), load_n(scores + i, 16)), 16);
}

// out[16][16 steps] = weights x values; weights: bfloat16 [16][64].
template <class U, int N>
void tile_weighs(const char* weights, const TileValues& values, int64_t pair_bytes, int64_t step,
                 float* out, int64_t out_stride) {
  repeat<N>([&]<int p>() BITNET_INLINE_LAMBDA { U::template zero<p>(); });
  for (int64_t g = 0; g < kAttentionChunk / kPairGroup; ++g) {
    if (values.runs[g] == nullptr) continue;
    U::template load<4>(weights + g * 2 * kPairGroup, 2 * kAttentionChunk);
    repeat<N>([&]<int p>() BITNET_INLINE_LAMBDA {
      U::template load<5 + p % 2>(values.runs[g] + (step + p) * kPairBytes, pair_bytes);
      U::template multiply_bf16<p, 4, 5 + p % 2>();
    });
  }
  repeat<N>([&]<int p>() BITNET_INLINE_LAMBDA {
    U::template store<p>(out + 16 * (step + p), 4 * out_stride);
  });
}

// Sixteen rows from `row` on.
template <class U>
void attend_unit_rows(PairChunk<PanelValues>& chunk, const TileKeys& keys, const TileValues& values,
                      int64_t row, float* states) {
  constexpr int R = kUnitRows;
  const AttentionChunk& c = chunk.c;
  const int64_t padded = attention_padded(c.dim), stride = attention_state_floats(c.dim);
  int64_t hidden[R], seen[R];
  for (int r = 0; r < R; ++r)
    hidden[r] = positions_hidden(c, row + r), seen[r] = positions_seen(c, row + r);
  // Positions that a row does not see weigh 0. That adds 0 unless they are infinite or NaN.
  if (!finite_values(chunk.values, chunk.steps(), chunk.hidden(), hidden[R - 1]) ||
      !finite_values(chunk.values, chunk.steps(), seen[0], c.positions)) {
    for (int r = 0; r < R; r += 4) attend_pair_rows<4>(chunk, row + r, states);
    return;
  }
  auto* query = reinterpret_cast<char*>(chunk.query);
  const float* from = c.query + row * c.dim;
  for (int64_t i = 0; i < R * c.dim; i += 16) U::store_bf16(from + i, query + 2 * i);
  tile_scores<U>(query, c.dim, keys, c.scale, chunk.scores);
  float* state = states + row * stride;
  softmax_rows<DType::kBF16>(chunk.scores, hidden, seen, state + padded, stride);
  alignas(64) char weights[R * 2 * kAttentionChunk];
  for (int r = 0; r < R; ++r) {
    float* scores = chunk.scores + r * kAttentionChunk;
    for (int64_t j = (seen[r] + 15) / 16 * 16; j < kAttentionChunk; ++j) scores[j] = 0.0f;
    for (int64_t j = 0; j < kAttentionChunk; j += 16)
      U::store_bf16(scores + j, weights + 2 * (r * kAttentionChunk + j));
  }
  const int64_t pair_bytes = chunk.values.pair_bytes;
  int64_t step = 0;
  for (; step + 4 <= chunk.steps(); step += 4)
    tile_weighs<U, 4>(weights, values, pair_bytes, step, state, stride);
  if (step < chunk.steps()) tile_weighs<U, 2>(weights, values, pair_bytes, step, state, stride);
}

// All rows of a chunk with at least sixteen; the last tile may compute some rows again.
template <class U>
void attend_unit_chunk(PairChunk<PanelValues> chunk, float* states) {
  const AttentionChunk& c = chunk.c;
  chunk.has_words = false;  // tiles of queries lie in their place
  const TileValues values = tile_values(chunk, reinterpret_cast<char*>(chunk.panels));
  TileKeys keys = tile_keys(chunk);
  U::configure({});
  for (int64_t row = 0; row < c.rows; row += kUnitRows) {
    attend_unit_rows<U>(chunk, keys, values, row + kUnitRows <= c.rows ? row : c.rows - kUnitRows,
                        states);
    keys.ask = false;
  }
  U::release();
}

// Computes a chunk by the matrix unit; returns false, having done nothing, if it cannot.
bool attended_by_unit(const PairChunk<PanelValues>& chunk, float* states) {
  bool done = false;
  with_matrix_unit([&]<class U>() {
    const AttentionChunk& c = chunk.c;
    done = c.matrix_unit && c.rows >= kUnitRows && c.dim % kPairGroup == 0;
    if (done) attend_unit_chunk<U>(chunk, states);
  });
  return done;
}

void attend_bf16(const AttentionChunk& c, float* scratch, float* states) {
  if (c.layout == CacheLayout::kPanels) {
    const auto chunk = chunk_of_panels(c, scratch);
    if (!attended_by_unit(chunk, states)) attend_pair_chunk(chunk, states);
  } else {
    attend_pair_chunk(chunk_of_rows(c, scratch), states);
  }
}
