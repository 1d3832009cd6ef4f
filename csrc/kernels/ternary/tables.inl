// Many tokens x whole tiles by tables of sums (the method of the Four Russians), without a
// multiplication. Four weights of a row are one of 81 combinations. For four inputs, a table holds
// the 81 sums that they can make, as 16-bit numbers, for the tokens of a register; a row adds one
// line of the table where a product would multiply four weights with every token. Uses tiles.inl
// and epilogue.inl.
//
// The work is ordered by 64 k, block of tokens, rows: the tables of 32 k lie in L1, the rows' sums
// pass through L2. Which line of each table a row adds is computed once for all blocks of tokens.
// Sums are 16 bits until the activations since the last time could overflow them, then they are
// added to sums of 32 bits. All of it is exact, so results equal those of a product.

constexpr int64_t kTableSums = 81;
constexpr int64_t kTableSpanK = 64;        // whose lines are computed at once: a k-step multiple
constexpr int kTablesAtOnce = 8;           // tables that a row adds together: 32 k
constexpr int64_t kTableBlocks = 4;        // blocks of tokens that share the lines of rows
constexpr int64_t kTableRows = 2048;       // at most, of a call: their sums lie in L2
constexpr int64_t kTableGroupRows = 1024;  // likewise, with scales of groups
// Lines before the first table and behind the last one, which a fourth value of 2 bits would reach.
constexpr int64_t kTableDamaged = 40;

// ---- the lines of rows --------------------------------------------------------------------------

// Codes of field F in a register of bytes, 0 to 2 times kFactor plus an offset for all; powers of
// three weigh the four of a lane.
template <class U>
struct TwoBitLines {
  static constexpr int kFields = 4, kOffset = 0;
  template <int F>
  static constexpr int kFactor = 1 << (2 * F);
  using Prepared = TileStep;
  static Prepared prepare(TileStep v) { return v; }
  template <int F>
  static TileCodes codes(const Prepared& v) {
    return U::masked(v, 3 << (2 * F));
  }
};
template <class D>
struct Base3Lines {
  static constexpr int kFields = 5, kOffset = (D::kZeroCode - 1) * 40;
  template <int F>
  static constexpr int kFactor = D::kFactor;
  using Prepared = typename D::Prepared;
  static Prepared prepare(TileStep v) { return D::prepare(v); }
  template <int F>
  static TileCodes codes(const Prepared& v) {
    return D::template codes<F>(v);
  }
};

// Rows of `tiles` tiles: the lines of k-steps [0, 8) to lines[row][8], those of the next eight to
// lines[rows + row][8]. A line's number is in units of 8 bytes, as an address takes it.
template <class U, class D>
[[gnu::noinline]] void find_lines(const uint8_t* w, int64_t tile_bytes, int64_t tiles, int64_t rows,
                                  uint16_t* lines) {
  constexpr int kUnits = U::kTokens * 2 / 8;
  for (int64_t i = 0; i < tiles; ++i, w += tile_bytes) {
    for (int64_t b = 0; b < 2 * kTablesAtOnce * kStepBytes; b += 64) prefetch(w + tile_bytes + b);
    repeat<2>([&]<int h>() BITNET_INLINE_LAMBDA {
      const uint8_t* from = w + h * kTablesAtOnce * kStepBytes;
      uint16_t* to = lines + (h * rows + i * D::kFields * kTileLanes) * kTablesAtOnce;
      repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
        constexpr int kFactor = D::template kFactor<f>;
        TileSum numbers[kTablesAtOnce];
        repeat<kTablesAtOnce>([&]<int g>() BITNET_INLINE_LAMBDA {
          const auto v = D::prepare(load_step(from + g * kStepBytes));
          numbers[g] = U::base_3(D::template codes<f>(v));
        });
        constexpr int kLeft = kFactor < kUnits ? __builtin_ctz(kUnits / kFactor) : 0;
        constexpr int kRight = kFactor > kUnits ? __builtin_ctz(kFactor / kUnits) : 0;
        U::template store_lines<kLeft, kRight>(numbers, to + f * kTileLanes * kTablesAtOnce);
      });
    });
  }
}

// ---- tables -------------------------------------------------------------------------------------

// The codes of a block of tokens, 64 k: a word of four for every token, [k / 4][token].
template <class U>
void gather_words(const int8_t* x, int64_t x_stride, int64_t tokens, float* words) {
  for (int64_t t = 0; t < U::kTokens; t += 16) {
    if (t + 16 <= tokens) {
      transpose_16(x + t * x_stride, x_stride, words + t, U::kTokens);
      continue;
    }
    alignas(64) int8_t edge[16][kTableSpanK] = {};
    for (int64_t i = t; i < tokens; ++i)
      __builtin_memcpy(edge[i - t], x + i * x_stride, kTableSpanK);
    transpose_16(edge, kTableSpanK, words + t, U::kTokens);
  }
}

// The table of four inputs; returns what their magnitudes are together.
template <class U>
[[gnu::always_inline]] inline typename U::Sums build_table(const float* words, int16_t* table) {
  using Sums = typename U::Sums;
  Sums x[4];
  repeat<4>([&]<int j>() BITNET_INLINE_LAMBDA { x[j] = U::template codes<j>(words); });
  Sums low[9];  // of the first two inputs
  repeat<9>([&]<int i>() BITNET_INLINE_LAMBDA {
    const Sums second = i / 3 == 0 ? U::negative(x[1]) : i / 3 == 1 ? U::zero() : x[1];
    low[i] = i % 3 == 0 ? U::sub(second, x[0]) : i % 3 == 1 ? second : U::add(second, x[0]);
  });
  repeat<9>([&]<int h>() BITNET_INLINE_LAMBDA {
    const Sums fourth = h / 3 == 0 ? U::negative(x[3]) : h / 3 == 1 ? U::zero() : x[3];
    const Sums high = h % 3 == 0   ? U::sub(fourth, x[2])
                      : h % 3 == 1 ? fourth
                                   : U::add(fourth, x[2]);
    repeat<9>([&]<int i>() BITNET_INLINE_LAMBDA {
      U::store(table + (9 * h + i) * U::kTokens, U::add(high, low[i]));
    });
  });
  return U::add(U::add(U::magnitude(x[0]), U::magnitude(x[1])),
                U::add(U::magnitude(x[2]), U::magnitude(x[3])));
}

// sums[row] (+)= a line of each table.
template <class U, bool kFirst>
[[gnu::noinline]] void add_lines(const uint16_t* lines, const int16_t* tables, int64_t rows,
                                 int16_t* sums) {
  const char* at = reinterpret_cast<const char*>(tables);
  for (int64_t n = 0; n < rows; ++n, lines += kTablesAtOnce, sums += U::kTokens) {
    typename U::Sums sum = kFirst ? U::zero() : U::load(sums);
    repeat<kTablesAtOnce / 4>([&]<int q>() BITNET_INLINE_LAMBDA {
      uint64_t four;  // loads are what this is short of: no more of them for less to take apart
      __builtin_memcpy(&four, lines + 4 * q, 8);
      repeat<4>([&]<int i>() BITNET_INLINE_LAMBDA {
        constexpr int64_t table = (4 * q + i) * kTableSums * U::kTokens * 2;
        const uint64_t line = i == 3 ? four >> 48 : four >> (16 * i) & 0xffff;
        sum = U::add(sum, U::load(reinterpret_cast<const int16_t*>(at + table + 8 * line)));
        U::keep_order(sum);
      });
    });
    U::store(sums, sum);
  }
}

// ---- a job --------------------------------------------------------------------------------------

// A block of tokens: 16-bit sums of all rows, and what they have gone to so far, of 32 bits.
template <class U>
struct TableBlock {
  int16_t* sums;  // [rows][kTokens], rows rounded up to 16
  void* totals;   // likewise
  float* words;   // [16][kTokens]
  int64_t token, tokens;
  typename U::Sums magnitudes;  // since the sums were folded, for every token
  bool fresh, first;            // nothing in `sums`; nothing in `totals`
};

constexpr int64_t table_rows_padded(int64_t rows) { return (rows + 15) / 16 * 16; }

template <class U>
constexpr int64_t table_scratch_bytes(int64_t rows) {
  const int64_t tables = (kTablesAtOnce * kTableSums + 2 * kTableDamaged) * U::kTokens * 2;
  const int64_t lines = 2 * kTablesAtOnce * 2 * rows;
  const int64_t block = rows * U::kTokens * 6 + kTableSpanK * U::kTokens;
  return tables + lines + kTableBlocks * block + 4096;
}

// Adds 32 k to the sums of a block: h says which half of its words. Returns the magnitudes.
template <class U>
typename U::Sums add_tables(const TableBlock<U>& block, int h, int offset, const uint16_t* lines,
                            int16_t* tables, int64_t rows) {
  typename U::Sums more = U::zero();
  repeat<kTablesAtOnce>([&]<int g>() BITNET_INLINE_LAMBDA {
    const float* words = block.words + (h * kTablesAtOnce + g) * U::kTokens;
    more = U::add(more, build_table<U>(words, tables + g * kTableSums * U::kTokens));
  });
  const int16_t* from = tables - offset * U::kTokens;
  if (block.fresh) {
    add_lines<U, true>(lines, from, rows, block.sums);
  } else {
    add_lines<U, false>(lines, from, rows, block.sums);
  }
  return more;
}

// What a table product needs of a TileJob or a GroupJob.
struct TableInput {
  const uint8_t* tiles;
  int64_t tile_bytes, tile_count, k_steps;
  const int8_t* x;  // of the first token
  int64_t x_stride, token, tokens;
  void* scratch;
};

// Tokens of an input, at most kTableBlocks blocks. F says what becomes of sums: fold() after every
// 32 k, at the end of `k_steps` of them, and store() in the end.
template <class U, class D, class F>
void table_blocks(const TableInput& in, const F& folds) {
  const int64_t rows = in.tile_count * D::kFields * kTileLanes, padded = table_rows_padded(rows);
  const int64_t count = (in.tokens + U::kTokens - 1) / U::kTokens;
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
  TableBlock<U> blocks[kTableBlocks];
  for (int64_t b = 0; b < count; ++b) {
    const int64_t first = b * U::kTokens, left = in.tokens - first;
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
    find_lines<U, D>(in.tiles + s * kStepBytes, in.tile_bytes, in.tile_count, rows, lines);
    for (int64_t b = 0; b < count; ++b) {
      const int8_t* x = in.x + b * U::kTokens * in.x_stride + s * layout::kTileStepK;
      gather_words<U>(x, in.x_stride, blocks[b].tokens, blocks[b].words);
    }
    for (int h = 0; h < 2; ++h) {
      for (int64_t b = 0; b < count; ++b) {
        TableBlock<U>& block = blocks[b];
        const typename U::Sums more =
            add_tables<U>(block, h, D::kOffset, lines + h * rows * kTablesAtOnce, tables, rows);
        block.fresh = folds.fold(block, more, rows, s + (h + 1) * kTablesAtOnce);
        if (block.fresh) block.first = false;
      }
    }
  }
  for (int64_t b = 0; b < count; ++b) folds.store(blocks[b], rows);
}

// part[token][row] of up to 64 rows of a block's totals from `row` on.
template <class U>
[[gnu::always_inline]] inline void transpose_totals(const TableBlock<U>& block, int64_t row,
                                                    int64_t rows, float (*part)[64]) {
  const char* totals = static_cast<const char*>(block.totals);
  for (int64_t i = 0; i < rows; i += 16) {
    for (int64_t t = 0; t < U::kTokens; t += 16) {
      transpose_16(totals + ((row + i) * U::kTokens + t) * 4, U::kTokens * 4, &part[t][i], 64);
    }
  }
}

// ---- sums of all of K, through the epilogue -----------------------------------------------------

// What is left to do for rows [row, row + rows) and tokens [token, token + tokens); the sums are
// the caller's.
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

  // Widens sums that the next 32 k, at most 4096 in magnitude, could overflow.
  bool fold(TableBlock<U>& block, typename U::Sums more, int64_t rows, int64_t done) const {
    block.magnitudes = U::add(block.magnitudes, more);
    if (done < k_steps && !U::any_above(block.magnitudes, 32767 - 4096)) return false;
    auto* wide = static_cast<int32_t*>(block.totals);
    for (int64_t i = 0; i < rows * U::kTokens; i += U::kTokens)
      U::widen(block.sums + i, block.first, wide + i);
    block.magnitudes = U::zero();
    return true;
  }
  void store(const TableBlock<U>& block, int64_t rows) const {
    alignas(64) float part[U::kTokens][64];
    for (int64_t row = 0; row < rows && row < epilogue.rows; row += 64) {
      EpilogueJob job = epilogue_part(epilogue, row, rows - row < 64 ? rows - row : 64, block.token,
                                      block.tokens);
      transpose_totals(block, row, job.rows, part);
      job.sums = reinterpret_cast<const int32_t*>(part[0]);
      job.sums_stride = 64;
      store_block(job);
    }
  }
};

// ---- sums of groups, scaled ---------------------------------------------------------------------

template <class U, class S, int64_t kTileRows>
struct GroupSums {
  const GroupJob& job;

  // A group of 128 k is at most 16,384 in magnitude: nothing overflows inside one.
  bool fold(TableBlock<U>& block, typename U::Sums, int64_t rows, int64_t done) const {
    if (done < job.k_steps && done % job.group_steps != 0) return false;
    const int64_t g = (done - 1) / job.group_steps;
    alignas(64) float x_scale[U::kTokens] = {}, w_scale[kTileRows];
    for (int64_t t = 0; t < block.tokens; ++t) {
      x_scale[t] =
          job.x_scale == nullptr ? 1.0f : job.x_scale[g * job.x_group_stride + block.token + t];
    }
    const auto factors = U::factors(x_scale);
    auto* values = static_cast<float*>(block.totals);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const S* scale = static_cast<const S*>(job.scale) + row / kTileRows * job.scale_stride;
      for (int64_t i = 0; i < kTileRows; i += kTileLanes)
        store_floats(w_scale + i, load_floats(scale + g * kTileRows + i));
      for (int64_t i = 0; i < kTileRows; ++i) {
        const int64_t at = (row + i) * U::kTokens;
        U::add_scaled(block.sums + at, w_scale[i], factors, block.first, values + at);
      }
    }
    return true;
  }
  void store(const TableBlock<U>& block, int64_t rows) const {
    alignas(64) float part[U::kTokens][64];
    for (int64_t row = 0; row < rows; row += 64) {
      const int64_t count = rows - row < 64 ? rows - row : 64;
      transpose_totals(block, row, count, part);
      for (int64_t t = 0; t < block.tokens; ++t) {
        float* to = job.out + (block.token + t) * job.out_stride + row;
        __builtin_memcpy(to, part[t], static_cast<size_t>(count) * sizeof(float));
      }
    }
  }
};

// ---- how much of a job --------------------------------------------------------------------------

// Tokens of a call that are made by tables, from the first on: those that fill blocks well enough,
// if it has half of the rows for which a product takes tables, as the end of a claim may leave.
template <class U>
inline int64_t table_tokens(int64_t tokens, int64_t rows, const void* scratch) {
  if (scratch == nullptr || rows < U::kFromRows / 2) return 0;
  const int64_t rest = tokens % U::kTokens;
  return rest < U::kRestFrom ? tokens - rest : tokens;
}

// Calls f with kTableBlocks blocks of those tokens at a time.
template <class U, class F>
inline void for_table_tokens(TableInput in, const F& f) {
  constexpr int64_t kOnce = kTableBlocks * U::kTokens;
  const int8_t* x = in.x;
  const int64_t end = in.tokens;
  for (int64_t t = 0; t < end; t += kOnce) {
    in.x = x + t * in.x_stride;
    in.token = t;
    in.tokens = end - t < kOnce ? end - t : kOnce;
    f(in);
  }
}

// Tables want many rows for each building, and all of them before the next tokens. Sums with scales
// of groups pass through L2 more often, so they are fewer.
template <class U>
ProductBlocking blocking_by_tables(int64_t tokens, int64_t rows, bool grouped) {
  if (tokens < U::kFromTokens || rows < U::kFromRows) return {};
  const int64_t most = grouped ? kTableGroupRows : kTableRows;
  return {.tokens = kTableBlocks * U::kTokens,
          .rows = most,
          .claim_parts = 1,
          .token_multiple = U::kTokens,
          .tokens_outermost = true,
          .finishes_sums = true,
          .even_rows = true,
          .scratch_bytes = table_scratch_bytes<U>(most + layout::kMostBlockRows)};
}
