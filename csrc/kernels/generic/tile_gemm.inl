// The products over tiles: which algorithm takes how many tokens.  Over gemv.inl,
// direct.inl, panel.inl and matrix.inl.  Included inside an ISA's anonymous namespace; never
// mentions an ISA.  See tile_gemm in kernel_table.h for the contract.

// D1 decodes for one token, DN on the fly for several, DP to memory from kPanelFrom tokens on.
template <class D1, class DN, class DP>
void any_tile_gemm(const TileJob& job) {
  if (job.tokens == 1) {
    if constexpr (kTileStreams > 0) {
      return tiles_in_streams<D1, kTileStreams>(job);
    } else {
      return tiles_direct<D1, 1>(job, 0);
    }
  }
  if constexpr (kPanelFrom > 0) {
    if (job.tokens >= kPanelFrom) return tiles_panel<DP>(job);
  }
  constexpr int kTokens = DN::kTokens;
  for_token_groups<kTokens>(job.tokens,
                            [&]<int T>(int64_t token) { tiles_direct<DN, T>(job, token); });
}

void tile_gemm(const TileJob& job) {
  if constexpr (MatrixUnit::kFromTokens > 0) {
    if (job.tokens >= MatrixUnit::kFromTokens) return tiles_matrix<MatrixUnit>(job);
  }
  any_tile_gemm<TwoBit, TwoBit, TwoBitPlain>(job);
}
void trit_tile_gemm(const TileJob& job) { any_tile_gemm<Base3, Base3Digits, Base3Digits>(job); }
