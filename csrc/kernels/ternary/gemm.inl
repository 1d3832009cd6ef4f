// The products: which algorithm is used for how many tokens, and how the work is cut. Contracts:
// ternary_gemm, tile_gemm, tile_product and product_blocking in kernel_table.h.

// ---- canonical rows -----------------------------------------------------------------------------

void ternary_gemm(const uint8_t* weight, int64_t row_bytes, int64_t row_begin, int64_t row_end,
                  const int8_t* x, int64_t x_stride, const int32_t* x_sum, int64_t tokens,
                  int32_t* out, int64_t out_stride, int64_t prefetch_bytes) {
  const uint8_t* w = weight + row_begin * row_bytes;
  const int64_t rows = row_end - row_begin;
  if (tokens == 1) {
    if constexpr (kGemvStreams) {
      rows_in_streams<kGemvRows>(w, row_bytes, rows, x, *x_sum, prefetch_bytes, out);
    } else {
      rows_at_tokens<true, kGemvRows, 1>(w, row_bytes, rows, x, x_stride, x_sum, prefetch_bytes,
                                         out, out_stride);
    }
    return;
  }
  for (int64_t t = 0; t < tokens; t += kTokenBlock) {
    const int64_t count = tokens - t < kTokenBlock ? tokens - t : kTokenBlock;
    token_block(w, row_bytes, rows, x + t * x_stride, x_stride, x_sum + t, count, prefetch_bytes,
                out + t * out_stride, out_stride);
  }
}

// ---- tiles --------------------------------------------------------------------------------------

// D1 decodes for one token, DN on the fly for several, DP to memory where it has a panel.
template <class D1, class DN, class DP>
void any_tile_gemm(const TileJob& job) {
  if (job.tokens == 1) {
    if constexpr (kTileStreams > 0) {
      return tiles_in_streams<D1, kTileStreams>(job);
    } else {
      return tiles_direct<D1, 1>(job, 0);
    }
  }
  if constexpr (HasPanel<DP>) {
    if (takes_panel<DP>(job.tokens, job.shared_ports)) return tiles_panel<DP>(job);
  }
  constexpr int kTokens = DN::kTokens;
  for_token_groups<kTokens, kTokensTogether<DN>>(job.tokens, [&]<int T>(int64_t token) {
    if constexpr (HasWide<DN, T>) {
      if (!job.shared_ports) return tiles_direct<typename WideOr<DN>::Type, T>(job, token);
    }
    tiles_direct<DN, T>(job, token);
  });
}

template <class U>
void tiles_matrix(const TileJob& job, const EpilogueJob* epilogue) {
  if (job.format == layout::WeightFormat::kBase3) return matrix_product<U, Base3>(job, epilogue);
  matrix_product<U, TwoBit>(job, epilogue);
}

void tile_gemm(const TileJob& job) {
  if constexpr (MatrixUnit::kFromTokens > 0) {
    if (takes_matrix<MatrixUnit>(job)) return tiles_matrix<MatrixUnit>(job, nullptr);
  }
  if (job.format == layout::WeightFormat::kBase3) {
    return any_tile_gemm<Base3, Several::Thirds, Several::ThirdsDigits>(job);
  }
  any_tile_gemm<TwoBit, Several::TwoBits, Several::TwoBitsPlain>(job);
}

constexpr bool kTablesHere = SumTables::kHere && MatrixUnit::kFromTokens == 0;

// What tables leave: a few tokens, or a small job, in pieces whose sums stay in L1.
inline void tiles_in_pieces(const TileJob& job, const EpilogueJob& epilogue, int64_t token,
                            int64_t tile_rows) {
  constexpr int64_t kSums = 64 * 80;
  alignas(64) int32_t sums[kSums];
  for (int64_t t = token; t < job.tokens; t += kPanelTokens) {
    const int64_t tokens = job.tokens - t < kPanelTokens ? job.tokens - t : kPanelTokens;
    const int64_t once = kSums / (tokens * tile_rows);
    for (int64_t i = 0; i < job.tile_count; i += once) {
      TileJob piece = job;
      piece.tiles += i * job.k_steps * kStepBytes;
      piece.tile_count = job.tile_count - i < once ? job.tile_count - i : once;
      piece.x += t * job.x_stride;
      piece.x_sum += t;
      piece.tokens = tokens;
      piece.out = sums;
      piece.out_stride = piece.tile_count * tile_rows;
      tile_gemm(piece);
      EpilogueJob part = epilogue_part(epilogue, i * tile_rows, piece.out_stride, t, tokens);
      part.sums = sums;
      part.sums_stride = piece.out_stride;
      store_block(part);
    }
  }
}

// D<U>: the lines of a decoder, Steps<U>: its k-steps for multipliers.
template <class U, template <class> class D, template <class> class Steps>
void tables_then_pieces(const TileJob& job, const EpilogueJob& epilogue) {
  const int64_t tile_rows = D<U>::kFields * kTileLanes;
  const TableInput all{
      job.tiles,  job.k_steps * kStepBytes, job.k_steps, job.x, job.x_stride, 0, {}, {},
      job.scratch};
  const int64_t done = for_table_parts<U>(
      all, job.tokens, job.tile_count, tile_rows, [&]<class V>(const TableInput& in) {
        table_blocks<V, D<V>, Steps<V>>(in, WholeSums<V>{epilogue, job.k_steps, job.x_sum});
      });
  if (done < job.tokens) tiles_in_pieces(job, epilogue, done, tile_rows);
}

void tile_product(const TileJob& job, const EpilogueJob& epilogue) {
  if constexpr (MatrixUnit::kFromTokens > 0) {
    if (takes_matrix<MatrixUnit>(job)) return tiles_matrix<MatrixUnit>(job, &epilogue);
  }
  if constexpr (kTablesHere) {
    const bool base3 = job.format == layout::WeightFormat::kBase3;
    const int64_t sums = job.tokens * job.tile_count * (base3 ? 5 : 4) * kTileLanes;
    // a call cut for tables has no room for its sums, whether there is scratch or not
    if (job.scratch != nullptr || sums > kMaxProductSums) {
      if (base3) return tables_then_pieces<SumTables, LinesOfFive, StepsOfFive>(job, epilogue);
      return tables_then_pieces<SumTables, LinesOfFour, StepsOfFour>(job, epilogue);
    }
  }
  tile_gemm(job);
  store_block(epilogue);
}

// Vector units take tokens one after the other, sums in L1, small claims at the end.  A matrix unit
// wants its tokens in tiles, finishes its sums itself, and has something to begin with every claim.
ProductBlocking product_blocking([[maybe_unused]] int64_t tokens, [[maybe_unused]] int64_t k) {
  if constexpr (MatrixUnit::kFromTokens > 0) {
    constexpr int64_t kLeast = kDecodeAhead * kOperandSteps * layout::kTileStepK;
    if (tokens >= MatrixUnit::kFromTokens && (k + 63) / 64 * 64 >= kLeast) {
      return {.tokens = kMatrixChunk,
              .sums = kMatrixChunk * 64,
              .least_rows = kMatrixLeastRows,
              .claim_parts = 3,
              .token_tile = kMatrixTokens,
              .tokens_outermost = true,
              .finishes_sums = true};
    }
  }
  return {.least_rows = 4 * kTileLanes};
}

ProductBlocking table_blocking([[maybe_unused]] int64_t tokens, [[maybe_unused]] int64_t rows,
                               [[maybe_unused]] bool grouped) {
  if constexpr (kTablesHere) return blocking_by_tables<SumTables>(tokens, rows, grouped);
  return {};
}
