// The products over tiles: which algorithm is used for how many tokens, and how the work is cut.
// Contract: tile_gemm in kernel_table.h. Uses gemv.inl, direct.inl, panel.inl, matrix.inl and
// epilogue.inl.

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
  for_token_groups<kTokens>(job.tokens, [&]<int T>(int64_t token) {
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
    return any_tile_gemm<Base3, Base3, Base3Digits>(job);
  }
  any_tile_gemm<TwoBit, TwoBit, TwoBitPlain>(job);
}

void tile_product(const TileJob& job, const EpilogueJob& epilogue) {
  if constexpr (MatrixUnit::kFromTokens > 0) {
    if (takes_matrix<MatrixUnit>(job)) return tiles_matrix<MatrixUnit>(job, &epilogue);
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
  if constexpr (kRowPanelFrom > 0) {
    if (tokens >= kRowPanelFrom) return {.least_rows = kPanelRows, .row_multiple = kPanelRows};
  }
  return {};
}
