// Many tokens x canonical rows by a matrix unit U. A byte of a row holds the weights i, 32 +
// i, 64 + i and 96 + i of a block. So 16 rows x 32 bytes, transposed in words of 4, are
// eight lines; masked with one field they are half an operand, with the next field the other
// half. That gives two operands a block, in the order of the tokens. Shifting the fields
// down costs less than an accumulator for each of them. Uses canonical_panel.inl and
// matrix.inl.

constexpr int64_t kUnitOperands = 4;  // that they make for 16 rows
constexpr int64_t kRowsAtOnce = 2 * kGroupRows;

struct alignas(4096) RowScratch {
  uint8_t operands[2][kUnitOperands][2][kOperandBytes];  // of this unit and the next
  Columns columns;
  int32_t sums[2][kMatrixTokens][16];
};

// Sixteen rows, of which some may be missing, and the operands of a unit for them.
struct RowGroup {
  const uint8_t* w;
  int64_t row_bytes, rows;

  void transpose(int64_t unit, Columns& columns) const {
    columns.transpose(w, row_bytes, rows, unit);
  }
};

template <int G>
[[gnu::always_inline]] inline void mask_fields(RowScratch& scratch,
                                               uint8_t (*to)[2][kOperandBytes]) {
  repeat<16>([&]<int c>() BITNET_INLINE_LAMBDA {
    const Raw raw = scratch.columns.raw(c, 0);
    repeat<4>([&]<int f>() BITNET_INLINE_LAMBDA {
      constexpr int64_t operand = c / 8 * 2 + f / 2, line = f % 2 * 8 + c % 8;
      store_step(to[operand][G] + line * 64, codes<f>(raw));
    });
  });
}

// A quarter of the work of making a unit's operands, to stand between products.
template <int Q>
[[gnu::always_inline]] inline void decode_quarter(const RowGroup (&groups)[2], int64_t unit,
                                                  RowScratch& scratch) {
  constexpr int G = Q / 2;
  if (groups[G].rows <= 0) return;
  if constexpr (Q % 2 == 0) {
    groups[G].transpose(unit, scratch.columns);
  } else {
    mask_fields<G>(scratch, scratch.operands[unit % 2]);
  }
}

// Up to 32 rows x up to 32 tokens; kTwo: more than 16 tokens.
template <class U, bool kTwo>
[[gnu::noinline]] void rows_x_tokens(const RowGroup (&groups)[2], const MatrixTokens& t,
                                     int64_t ahead, RowScratch& scratch) {
  const int64_t row_bytes = groups[0].row_bytes;
  const int64_t operands = row_bytes / (kUnitBytes / kUnitOperands);
  const int64_t units = (row_bytes + kUnitBytes - 1) / kUnitBytes;
  const int64_t rows = groups[0].rows < kRowsAtOnce ? groups[0].rows : kRowsAtOnce;
  constexpr int kTokens = kTwo ? 4 : 2;  // the tile of the first tokens, behind the accumulators
  U::template zero<0>();
  U::template zero<1>();
  if constexpr (kTwo) {
    U::template zero<2>();
    U::template zero<3>();
  }
  repeat<4>([&]<int q>() BITNET_INLINE_LAMBDA { decode_quarter<q>(groups, 0, scratch); });
  const int8_t* a = t.x;
  for (int64_t u = 0; u < units; ++u) {
    for (int64_t r = 0; ahead != 0 && r < rows; ++r)
      prefetch_l2(groups[0].w + r * row_bytes + u * kUnitBytes + ahead);
    repeat<kUnitOperands>([&]<int q>() BITNET_INLINE_LAMBDA {
      if (u * kUnitOperands + q >= operands) return;
      uint8_t (*operand)[kOperandBytes] = scratch.operands[u % 2][q];
      U::template load_once<kTokens>(a, t.row);
      U::template load<6>(operand[0], 64);
      U::template multiply<0, kTokens, 6>();
      if (u + 1 < units) decode_quarter<q>(groups, u + 1, scratch);
      U::template load<7>(operand[1], 64);
      U::template multiply<1, kTokens, 7>();
      if constexpr (kTwo) {
        U::template load_once<5>(a + 16 * t.row, t.row);
        U::template multiply<2, 5, 6>();
        U::template multiply<3, 5, 7>();
      }
      a += t.step;
    });
  }
  U::template store<0>(scratch.sums[0][0], 64);
  U::template store<1>(scratch.sums[1][0], 64);
  if constexpr (kTwo) {
    U::template store<2>(scratch.sums[0][16], 64);
    U::template store<3>(scratch.sums[1][16], 64);
  }
}

// Whether a product of rows is one for the unit: tokens in tiles always are.
template <class U>
inline bool takes_rows(int64_t row_bytes, int64_t x_stride, int64_t tokens) {
  return x_stride == kTokenStep || (tokens >= U::kFromTokens && row_bytes >= kUnitBytes);
}

// Rows outermost: a group of them meets every token while its bytes are in L1.
template <class U>
void rows_matrix(const uint8_t* w, int64_t row_bytes, int64_t rows, const int8_t* x,
                 int64_t x_stride, const int32_t* x_sum, int64_t tokens, int32_t* out,
                 int64_t out_stride) {
  RowScratch scratch;
  int64_t configured = 0;
  for (int64_t n = 0; n < rows; n += kRowsAtOnce) {
    const uint8_t* wn = w + n * row_bytes;
    const RowGroup groups[2] = {{wn, row_bytes, rows - n},
                                {wn + kGroupRows * row_bytes, row_bytes, rows - n - kGroupRows}};
    for (int64_t m = 0; m < tokens; m += kMatrixTokens) {
      const int64_t count = tokens - m < kMatrixTokens ? tokens - m : kMatrixTokens;
      if (count != configured) configure_for<U>(count, 2);
      configured = count;
      const MatrixTokens t = matrix_tokens_at(x, x_stride, 4 * row_bytes, m, count);
      const int64_t ahead = m == 0 ? kRowsAtOnce * row_bytes : 0;
      (count > 16 ? rows_x_tokens<U, true> : rows_x_tokens<U, false>)(groups, t, ahead, scratch);
      for (int64_t i = 0; i < count; ++i) {
        int32_t* to = out + (m + i) * out_stride + n;
        for (int64_t g = 0; g < 2; ++g) {
          const int64_t left = rows - n - g * kGroupRows;
          const int32_t* sums = scratch.sums[g][i];
          for (int64_t r = 0; r < kGroupRows && r < left; ++r)
            to[g * kGroupRows + r] = sums[r] - x_sum[m + i];
        }
      }
    }
  }
  U::release();
}
