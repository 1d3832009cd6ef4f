// Two tokens and more x canonical rows where one instruction multiplies two rows with two tokens at
// eight k. Uses canonical.inl and pairs.inl.

constexpr int kPairRows = 8, kPairTokens = 8;  // 16 sums, 4 raw, 4 token vectors of 32 registers

// kPairRows rows x T tokens.
template <class U, int T>
[[gnu::noinline]] void rows_x_pairs(const uint8_t* w, int64_t row_bytes, const int8_t* x,
                                    int64_t x_stride, const int32_t* x_sum, int64_t ahead,
                                    int32_t* out, int64_t out_stride) {
  constexpr int P = pairs_of(T), kBytes = 8;
  TileAcc acc[kPairRows / 2][P];
  clear_accs(acc);
#pragma GCC unroll 1
  for (int64_t b = 0; b < row_bytes; b += kBytes) {
    prefetch(w + ahead + kPairRows * b);  // in memory the rows are one stream
    TileStep raw[kPairRows / 2];
    repeat<kPairRows / 2>([&]<int r>() BITNET_INLINE_LAMBDA {
      const uint8_t* at = w + 2 * r * row_bytes + b;
      raw[r] = U::load_rows(at, at + row_bytes);
    });
    const int64_t in_block = b % layout::kBlockBytes;
    const int8_t* xb = x + (b - in_block) * 4 + in_block;
    repeat<4>([&]<int f>() BITNET_INLINE_LAMBDA {
      typename U::X a[P];
      load_pairs<U, T>(xb + f * layout::kBlockBytes, x_stride, a);
      repeat<kPairRows / 2>([&]<int r>() BITNET_INLINE_LAMBDA {
        add_pairs<U>(U::template row_codes<f>(raw[r]), a, acc[r]);
      });
    });
  }
  repeat<T * kPairRows / kTileLanes>([&]<int I>() BITNET_INLINE_LAMBDA {
    constexpr int t = I % T, r = I / T * 2;
    const TileSum sum = U::template sum<t % 2>(acc[r][t / 2], acc[r + 1][t / 2]);
    store_sum(out + t * out_stride + 2 * r, sub_sum(sum, set1_sum(x_sum[t])));
  });
}

// rows: a multiple of kPairRows.
template <class U>
void rows_pairs(const uint8_t* w, int64_t row_bytes, int64_t rows, const int8_t* x,
                int64_t x_stride, const int32_t* x_sum, int64_t tokens, int64_t ahead, int32_t* out,
                int64_t out_stride) {
  static_assert(!U::kHere || kTileLanes == 4);  // those of two sums
  for (int64_t m = 0; m < tokens; m += kTokenBlock) {
    const int64_t count = tokens - m < kTokenBlock ? tokens - m : kTokenBlock;
    for (int64_t n = 0; n < rows; n += kPairRows) {
      for_token_groups<kPairTokens, 2>(count, [&]<int T>(int64_t t) {
        rows_x_pairs<U, T>(w + n * row_bytes, row_bytes, x + (m + t) * x_stride, x_stride,
                           x_sum + m + t, t == 0 ? ahead : 0, out + (m + t) * out_stride + n,
                           out_stride);
      });
    }
  }
}
