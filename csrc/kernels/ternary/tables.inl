// Many tokens x whole tiles by tables of sums (row_indices.inl), without a multiplication. The
// multipliers, which are idle meanwhile, take some further tokens (tables_with_dot.inl). Uses
// epilogue.inl.
//
// Loops from the outside: 64 k, block of tokens, rows. The tables of 32 k lie in L1, the sums of
// the rows pass through L2. Which line of each table a row adds is computed once for all blocks of
// tokens. Sums have 16 bits; before activations could make them overflow, they are added to sums of
// 32 bits. Everything is exact, so results equal those of a product.

constexpr int64_t kTableBlocks = 4;        // blocks of tokens that share the lines of rows
constexpr int64_t kTableRows = 2560;       // most rows of all blocks: their sums lie in L2
constexpr int64_t kTableGroupRows = 1024;  // likewise, with scales of groups

// ---- a job --------------------------------------------------------------------------------------

// A block of tokens: 16-bit sums of all rows, and the 32-bit totals that they are added to.
template <class U>
struct TableBlock {
  int16_t* sums;  // [places of rows][kTokens], rounded up to 16
  void* totals;   // likewise; values of scales of groups by rows
  float* words;   // [16][kTokens]
  int64_t token, tokens;
  typename U::Sums magnitudes;  // of every token's activations since the sums were folded
  bool fresh, first;            // nothing in `sums`; nothing in `totals`
};

template <class U>
constexpr int64_t table_call_tokens() {
  return kTableBlocks * U::kTokens * (U::kDotTokens == 0 ? 1 : 2);
}

constexpr int64_t table_rows_padded(int64_t rows) { return (rows + 15) / 16 * 16; }

template <class U>
constexpr int64_t table_scratch_bytes(int64_t rows, int64_t blocks) {
  const int64_t tables = (kTablesAtOnce * kTableSums + 2 * kTableDamaged) * U::kTokens * 2;
  const int64_t lines = 2 * kTablesAtOnce * 2 * rows;
  const int64_t block = rows * U::kTokens * 6 + kTableSpanK * U::kTokens;
  const int64_t steps = layout::kGroupedTileMaxK / layout::kTileStepK;
  const int64_t beside = U::kDotTokens == 0 ? 0 : steps * (2 * kStepBytes + 4 * U::kDotTokens);
  return tables + lines + blocks * block + beside + 4096;
}

// What the next call of find_row_indices will read. Each call here prefetches `bytes` of every tile
// into L2: that is nearly all that a job with few tokens reads from memory.
struct NextRead {
  const uint8_t* tiles;
  int64_t tile_bytes, bytes;  // 0: nothing
};

// Adds 32 k, half h of the block's words, to its sums. Returns the magnitudes of the tables.
template <class U, int64_t kTileRows, class M>
typename U::Sums add_tables(const TableBlock<U>& block, int h, int offset, const uint16_t* lines,
                            int16_t* tables, int64_t tiles, const NextRead& next, M& both) {
  constexpr int64_t kTilesAtOnce = 4;  // their rows take as long as the prefetched lines
  typename U::Sums more = U::zero();
  repeat<kTablesAtOnce>([&]<int g>() BITNET_INLINE_LAMBDA {
    const float* words = block.words + (h * kTablesAtOnce + g) * U::kTokens;
    more = U::add(more, build_table<U>(words, tables + g * kTableSums * U::kTokens));
  });
  const int16_t* from = tables - offset * U::kTokens;
  const int64_t at_once = next.bytes == 0 ? tiles : kTilesAtOnce;
  for (int64_t i = 0; i < tiles; i += at_once) {
    const int64_t count = tiles - i < at_once ? tiles - i : at_once, row = i * kTileRows;
    for (int64_t t = i; t < i + count; ++t) {
      for (int64_t b = 0; b < next.bytes; b += 64)
        prefetch_l2(next.tiles + t * next.tile_bytes + b);
    }
    const uint16_t* of_rows = lines + row * kTablesAtOnce;
    int16_t* sums = block.sums + row * U::kTokens;
    if (block.fresh) {
      both.template add_rows<true>(of_rows, from, count * kTileRows, sums);
    } else {
      both.template add_rows<false>(of_rows, from, count * kTileRows, sums);
    }
  }
  return more;
}

// The tokens of an input, at most kTableBlocks blocks. F decides what happens to sums: fold() is
// called after every 32 k, store() at the end with the sums that fold() has left; run_steps() and
// take() are those of tables_with_dot.inl.
template <class U, class D, class Steps, class F>
void table_blocks(const TableInput& in, const F& folds) {
  const int64_t rows = in.tables.tiles * D::kFields * kTileLanes;
  const int64_t padded = table_rows_padded(rows);
  const int64_t count = (in.tables.tokens + U::kTokens - 1) / U::kTokens;
  char* memory = static_cast<char*>(in.scratch);
  const auto take = [&](int64_t bytes) {
    char* piece = memory;
    memory += (bytes + 63) / 64 * 64;
    return piece;
  };
  auto* tables = reinterpret_cast<int16_t*>(
                     take((kTablesAtOnce * kTableSums + 2 * kTableDamaged) * U::kTokens * 2)) +
                 kTableDamaged * U::kTokens;
  auto* lines = reinterpret_cast<uint16_t*>(take(2 * kTablesAtOnce * 2 * padded));
  using Both = InterleavedDot<U, Steps, F>;
  Both both(in, folds, take(Both::scratch_bytes(in.k_steps)));
  TableBlock<U> blocks[kTableBlocks];
  for (int64_t b = 0; b < count; ++b) {
    const int64_t first = b * U::kTokens, left = in.tables.tokens - first;
    blocks[b] = {reinterpret_cast<int16_t*>(take(padded * U::kTokens * 2)),
                 take(padded * U::kTokens * 4),
                 reinterpret_cast<float*>(take(kTableSpanK * U::kTokens)),
                 in.token + first,
                 left < U::kTokens ? left : U::kTokens,
                 U::zero(),
                 true,
                 true};
  }
  constexpr int64_t kSpanSteps = kTableSpanK / layout::kTileStepK;
  for (int64_t s = 0; s < in.k_steps; s += kSpanSteps) {
    find_row_indices<U, D>(in.tiles + s * kStepBytes, in.tile_bytes, in.tables.tiles, rows, lines);
    for (int64_t b = 0; b < count; ++b) {
      const int8_t* x = in.x + b * U::kTokens * in.x_stride + s * layout::kTileStepK;
      gather_words<U>(x, in.x_stride, blocks[b].tokens, blocks[b].words);
    }
    for (int h = 0; h < 2; ++h) {
      for (int64_t b = 0; b < count; ++b) {
        TableBlock<U>& block = blocks[b];
        const bool few = count <= 2 && b + 1 == count && s + kSpanSteps < in.k_steps;
        const NextRead next{in.tiles + (s + kSpanSteps + h * kTablesAtOnce) * kStepBytes,
                            in.tile_bytes, few ? kTablesAtOnce * kStepBytes : 0};
        const typename U::Sums more = add_tables<U, D::kFields * kTileLanes>(
            block, h, D::kOffset, lines + h * rows * kTablesAtOnce, tables, in.tables.tiles, next,
            both);
        block.fresh = folds.fold(block, more, rows, s + (h + 1) * kTablesAtOnce);
        if (block.fresh) block.first = false;
      }
    }
  }
  for (int64_t b = 0; b < count; ++b) folds.store(blocks[b], rows);
  both.finish();
}

// Transposes 16 rows of all tokens, words of 32 bits: part[token][i + row].
template <class U>
[[gnu::always_inline]] inline void transpose_rows(const void* rows, int64_t i, float (*part)[64]) {
  for (int64_t t = 0; t < U::kTokens; t += 16)
    transpose_16(static_cast<const char*>(rows) + t * 4, U::kTokens * 4, &part[t][i], 64);
}

// ---- sums of all of K, through the epilogue -----------------------------------------------------

// The epilogue for rows [row, row + rows) and tokens [token, token + tokens); the caller fills in
// the sums.
inline EpilogueJob epilogue_part(const EpilogueJob& whole, int64_t row, int64_t rows, int64_t token,
                                 int64_t tokens) {
  EpilogueJob part = whole;
  const bool halves = whole.kind == StoreKind::kStore && whole.type != DType::kF32;
  part.rows = whole.rows - row < rows ? whole.rows - row : rows;
  part.tokens = tokens;
  part.x_scale = whole.x_scale == nullptr ? nullptr : whole.x_scale + token;
  part.w_scale = whole.w_scale == nullptr ? nullptr : whole.w_scale + row * whole.w_scale_step;
  part.bias = whole.bias == nullptr ? nullptr : whole.bias + row;
  part.out =
      static_cast<char*>(whole.out) + token * whole.out_stride_bytes + row * (halves ? 2 : 4);
  return part;
}

template <class U>
struct WholeSums {
  const EpilogueJob& epilogue;
  int64_t k_steps;
  const int32_t* x_sum;

  // Widens the sums if the next 32 k, at most 4096 in magnitude, could overflow them. The last sums
  // are widened when they are stored, which saves their totals a way through L2.
  bool fold(TableBlock<U>& block, typename U::Sums more, int64_t rows, int64_t done) const {
    block.magnitudes = U::add(block.magnitudes, more);
    if (done >= k_steps || !U::any_above(block.magnitudes, 32767 - 4096)) return false;
    auto* totals = static_cast<int32_t*>(block.totals);
    const int32_t* before = block.first ? nullptr : totals;
    for (int64_t i = 0; i < rows * U::kTokens; i += U::kTokens)
      U::widen(block.sums + i, before == nullptr ? nullptr : before + i, totals + i);
    block.magnitudes = U::zero();
    return true;
  }
  void store(const TableBlock<U>& block, int64_t rows) const {
    const int32_t* before = block.first ? nullptr : static_cast<const int32_t*>(block.totals);
    alignas(64) float part[U::kTokens][64];
    alignas(64) int32_t wide[16 * U::kTokens];
    for (int64_t row = 0; row < rows && row < epilogue.rows; row += 64) {
      EpilogueJob job = epilogue_part(epilogue, row, rows - row < 64 ? rows - row : 64, block.token,
                                      block.tokens);
      for (int64_t i = 0; i < job.rows; i += 16) {
        for_placed_rows<U>(16, [&](int64_t place, int64_t r) BITNET_INLINE_LAMBDA {
          const int64_t at = (row + i + place) * U::kTokens;
          U::widen(block.sums + at, before == nullptr ? nullptr : before + at,
                   wide + r * U::kTokens);
        });
        transpose_rows<U>(wide, i, part);
      }
      job.sums = reinterpret_cast<const int32_t*>(part[0]);
      job.sums_stride = 64;
      store_block(job);
    }
  }

  int64_t run_steps() const { return k_steps; }
  template <class D>
  void take(const TileSums<D>& sums, int64_t tile, int64_t token, int64_t tokens, int64_t) const {
    constexpr int64_t kRows = D::kFields * kTileLanes;
    if (tile * kRows >= epilogue.rows) return;
    int32_t of_tokens[U::kDotTokens] = {};
    for (int64_t t = 0; t < tokens; ++t) of_tokens[t] = x_sum[token + t];
    alignas(64) int32_t out[U::kDotTokens][kRows];
    finish_tile<D, U::kDotTokens>(sums, of_tokens, out[0], kRows);
    EpilogueJob job = epilogue_part(epilogue, tile * kRows, kRows, token, tokens);
    job.sums = out[0];
    job.sums_stride = kRows;
    store_block(job);
  }
};

// ---- how much of a job --------------------------------------------------------------------------

// How the tokens x tiles of a job are divided, and how many tokens that covers; 0 if an ordinary
// product costs less.
struct TableCut {
  TilePart tables, beside;
  int64_t tokens, cost;
};

// The cost of 32 k of a job by U's constants, in hundredths of a cycle: `rows` rows of b blocks,
// and the products of one token with as many rows.
template <class U>
constexpr int64_t cost_of_both(int64_t rows, int64_t b, int64_t products) {
  constexpr int64_t kTokens = 8 * U::kDotTokens;  // multiplied while a row adds 32 k
  const int64_t alone = rows * b;
  int64_t both = 0;
  if constexpr (kTokens > 0) both = alone < products / kTokens ? alone : products / kTokens;
  return both * U::kBothCost + (alone - both) * U::kRowCost + rows * U::kLinesCost +
         b * U::kBuildCost + (products - both * kTokens) * U::kProductCost;
}

// The multipliers take some of the tokens for all tiles; or, if the tokens fill few blocks, all
// tokens for some of the tiles.
template <class U>
inline TableCut cut_table_job(int64_t tokens, int64_t tiles, int64_t tile_rows) {
  constexpr int64_t kGroup = U::kDotTokens == 0 ? 1 : U::kDotTokens;
  const auto whole_groups = [](int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; };
  const int64_t rows = tiles * tile_rows;
  TableCut best{{}, {}, 0, tokens * rows * U::kProductCost};
  for (int64_t b = 1; b <= kTableBlocks && (b - 1) * U::kTokens < tokens; ++b) {
    const int64_t room = b * U::kTokens, left = tokens < room ? 0 : tokens - room;
    const int64_t cost = cost_of_both<U>(rows, b, rows * whole_groups(left));
    if (cost <= best.cost) {
      const int64_t beside = U::kDotTokens == 0 ? 0 : left;
      best = {{0, tiles, 0, tokens - left},
              {0, tiles, tokens - left, beside},
              tokens - left + beside,
              cost};
    }
    if (U::kDotTokens == 0 || left != 0) continue;
    const int64_t all = whole_groups(tokens), at_once = 8 * kGroup * b;
    const int64_t some = (tiles * all + (all + at_once) / 2) / (all + at_once);
    const int64_t cost_by_tiles =
        cost_of_both<U>(some * tile_rows, b, (tiles - some) * tile_rows * all);
    if (some > 0 && cost_by_tiles < best.cost)
      best = {{0, some, 0, tokens}, {some, tiles - some, 0, tokens}, tokens, cost_by_tiles};
  }
  return best;
}

// Calls f.template operator()<U>(parts) for the tokens of one call after the other. U is the wider
// or the narrower kind of tables, whichever costs less. Returns how many tokens are done. A call
// needs only half of the rows for which a product chooses tables: the end of a claim may leave so
// few.
template <class Wide, class F>
inline int64_t for_table_parts(TableInput in, int64_t tokens, int64_t tiles, int64_t tile_rows,
                               const F& f) {
  using Narrow = typename Wide::Narrow;
  if (in.scratch == nullptr || tiles * tile_rows < Wide::kFromRows / 2) return 0;
  constexpr int64_t kOnce = table_call_tokens<Wide>();
  int64_t done = 0;
  while (done < tokens) {
    const int64_t left = tokens - done < kOnce ? tokens - done : kOnce;
    TableCut cut = cut_table_job<Wide>(left, tiles, tile_rows);
    bool narrow = false;
    if constexpr (Narrow::kTokens != Wide::kTokens) {
      const TableCut other = cut_table_job<Narrow>(left, tiles, tile_rows);
      narrow = other.tokens == cut.tokens && other.cost < cut.cost;
      if (narrow) cut = other;
    }
    if (cut.tokens == 0) break;
    in.token = done;
    in.tables = cut.tables;
    in.beside = cut.beside;
    if (narrow) {
      f.template operator()<Narrow>(in);
    } else {
      f.template operator()<Wide>(in);
    }
    in.x += cut.tokens * in.x_stride;
    done += cut.tokens;
  }
  return done;
}

// To build tables pays only for many rows, and all rows come before the next tokens. With scales of
// groups sums pass through L2 more often, so a call has fewer rows.
template <class U>
ProductBlocking blocking_by_tables(int64_t tokens, bool grouped) {
  const int64_t blocks = tokens <= U::kTokens ? 1 : kTableBlocks;
  const int64_t max_rows = (grouped ? kTableGroupRows : kTableRows) * (kTableBlocks / blocks);
  return {.tokens = table_call_tokens<U>(),
          .rows = max_rows,
          .claim_fraction = 1,
          .token_multiple = U::kTokens,
          .tokens_outermost = true,
          .kernel_stores = true,
          .equal_row_parts = true,
          .scratch_bytes = table_scratch_bytes<U>(max_rows + layout::kMaxBlockRows, blocks)};
}
