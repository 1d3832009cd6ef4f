// Many tokens x canonical rows. A block of 16 rows is transposed into k-steps of a panel, which
// every token is multiplied with, as in panel.inl. A byte of a row holds the weights i, 32 + i,
// 64 + i and 96 + i of a block, so a transposed line of 4 bytes a row holds four k-steps;
// groups of kTileLanes rows take the place of a tile's fields. Uses canonical.inl and
// panel.inl.

constexpr int64_t kUnitBlocks = 2;                                 // blocks transposed at once
constexpr int64_t kUnitBytes = kUnitBlocks * layout::kBlockBytes;  // of a row
constexpr int64_t kGroupRows = 16;

// A unit of up to 16 rows, transposed: columns[c] holds the bytes 4 c ... 4 c + 3 of every row.
struct alignas(64) Columns {
  float columns[16][16];
  uint8_t edge[kGroupRows][kUnitBytes];

  [[gnu::always_inline]] void transpose(const uint8_t* w, int64_t row_bytes, int64_t rows,
                                        int64_t unit) {
    const uint8_t* from = w + unit * kUnitBytes;
    const int64_t left = row_bytes - unit * kUnitBytes;
    if (rows < kGroupRows || left < kUnitBytes) return transpose_edge(from, row_bytes, rows, left);
    transpose_16(from, row_bytes, columns[0], 16);
  }

  // What is not there becomes zeros: it meets sums that nobody reads.
  [[gnu::noinline]] void transpose_edge(const uint8_t* from, int64_t row_bytes, int64_t rows,
                                        int64_t left) {
    const int64_t bytes = left < kUnitBytes ? left : kUnitBytes;
    __builtin_memset(edge, 0, sizeof edge);
    for (int64_t r = 0; r < rows && r < kGroupRows; ++r) {
      for (int64_t i = 0; i < bytes; ++i) edge[r][i] = from[r * row_bytes + i];
    }
    transpose_16(edge, kUnitBytes, columns[0], 16);
  }

  Raw raw(int c, int64_t row) const {
    return load_raw(reinterpret_cast<const uint8_t*>(columns[c] + row));
  }
};

// Stands for a decoder: groups of rows are the fields, a unit is what a panel holds.
struct CanonicalRows {
  static constexpr int kFields = 4, kDots = 4, kZeroCode = 1;
  static constexpr int64_t kPanelSteps = kUnitBlocks * layout::kBlockWeights / layout::kTileStepK;
  static void finish(TileSum (&)[4]) {}
};

constexpr int64_t kPanelRows = CanonicalRows::kFields * kTileLanes;

// A unit of kPanelRows rows as k-steps.
template <class D>
void fill_row_panel(const uint8_t* w, int64_t row_bytes, int64_t unit, Columns& columns,
                    Panel<D>& panel) {
  constexpr int kSteps = layout::kBlockBytes / layout::kTileStepK;  // of a field of a block
  for (int64_t n = 0; n < kPanelRows; n += kGroupRows) {
    columns.transpose(w + n * row_bytes, row_bytes, kGroupRows, unit);
    for (int64_t lane = 0; lane < kGroupRows; lane += kTileLanes) {
      const int64_t group = (n + lane) / kTileLanes;
      repeat<16>([&]<int c>() BITNET_INLINE_LAMBDA {
        const Raw raw = columns.raw(c, lane);
        repeat<4>([&]<int f>() BITNET_INLINE_LAMBDA {
          constexpr int64_t step = (c / kSteps * 4 + f) * kSteps + c % kSteps;
          store_step(panel.codes[step][group], codes<f>(raw));
        });
      });
    }
  }
}

// kPanelRows rows x up to kPanelTokens tokens.  ahead: from a row to the one that is met next in
// its place, 0 where this pass is not the first.
template <class D>
void rows_x_panel(const uint8_t* w, int64_t row_bytes, const int8_t* x, int64_t x_stride,
                  int64_t tokens, int64_t ahead, Columns& columns, Panel<D>& panel) {
  const int64_t units = (row_bytes + kUnitBytes - 1) / kUnitBytes;
  for (int64_t u = 0; u < units; ++u) {
    fill_row_panel<D>(w, row_bytes, u, columns, panel);
    if (ahead != 0) {
      const uint8_t* next = w + (u + 1 < units ? (u + 1) * kUnitBytes : ahead);
      for (int64_t r = 0; r < kPanelRows; ++r) prefetch(next + r * row_bytes);
    }
    const int64_t left = row_bytes - u * kUnitBytes;
    const int64_t steps = left < kUnitBytes ? left : kUnitBytes;  // a byte is a step of 4 weights
    for (int64_t from = 0; from < steps; from += kRowPanelFlush) {
      const int64_t count = steps - from < kRowPanelFlush ? steps - from : kRowPanelFlush;
      add_panel_rows(panel, from, count, u + from == 0,
                     x + (u * kUnitBytes + from) * layout::kTileStepK, x_stride, tokens);
    }
  }
}

// rows: a multiple of kPanelRows.
template <class D>
void rows_panel(const uint8_t* w, int64_t row_bytes, int64_t rows, const int8_t* x,
                int64_t x_stride, const int32_t* x_sum, int64_t tokens, int32_t* out,
                int64_t out_stride) {
  Columns columns;
  Panel<D> panel;
  for (int64_t n = 0; n < rows; n += kPanelRows) {
    for (int64_t m = 0; m < tokens; m += kPanelTokens) {
      const int64_t count = tokens - m < kPanelTokens ? tokens - m : kPanelTokens;
      const int64_t ahead = m == 0 ? kPanelRows * row_bytes : 0;
      rows_x_panel<D>(w + n * row_bytes, row_bytes, x + m * x_stride, x_stride, count, ahead,
                      columns, panel);
      for (int64_t t = 0; t < count; ++t)
        finish_panel(panel, t, x_sum[m + t], out + (m + t) * out_stride + n);
    }
  }
}
