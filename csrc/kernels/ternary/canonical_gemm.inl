// The product over canonical rows: which algorithm is used for how many tokens. Contract:
// ternary_gemm in kernel_table.h. Uses canonical.inl, canonical_panel.inl and
// canonical_matrix.inl.

void ternary_gemm(const uint8_t* weight, int64_t row_bytes, int64_t row_begin, int64_t row_end,
                  const int8_t* x, int64_t x_stride, const int32_t* x_sum, int64_t tokens,
                  int32_t* out, int64_t out_stride, int64_t prefetch_bytes) {
  const uint8_t* w = weight + row_begin * row_bytes;
  const int64_t rows = row_end - row_begin;
  if constexpr (MatrixUnit::kFromTokens > 0) {
    if (takes_rows<MatrixUnit>(row_bytes, x_stride, tokens))
      return rows_matrix<MatrixUnit>(w, row_bytes, rows, x, x_stride, x_sum, tokens, out,
                                     out_stride);
  }
  if (tokens == 1) {
    if constexpr (kGemvStreams) {
      rows_in_streams<kGemvRows>(w, row_bytes, rows, x, *x_sum, prefetch_bytes, out);
    } else {
      rows_at_tokens<true, kGemvRows, 1>(w, row_bytes, rows, x, x_stride, x_sum, prefetch_bytes,
                                         out, out_stride);
    }
    return;
  }
  int64_t n = 0;  // rows that are done
  if constexpr (kRowPanelFrom > 0) {
    if (tokens >= kRowPanelFrom && row_bytes >= kUnitBytes) {
      n = rows / kPanelRows * kPanelRows;
      rows_panel<CanonicalRows>(w, row_bytes, n, x, x_stride, x_sum, tokens, out, out_stride);
    }
  }
  if (n == rows) return;
  for (int64_t t = 0; t < tokens; t += kTokenBlock) {
    const int64_t count = tokens - t < kTokenBlock ? tokens - t : kTokenBlock;
    token_block(w + n * row_bytes, row_bytes, rows - n, x + t * x_stride, x_stride, x_sum + t,
                count, prefetch_bytes, out + t * out_stride + n, out_stride);
  }
}
