// The screen of an int8 head: its upper six bits against one token, and from them the largest that
// each logit can be. Contract: head_screen in kernel_table.h. Uses dense.inl and int8.inl.

// Sums of the codes of R rows, `step` bytes apart.
template <int R, class A>
[[gnu::always_inline]] inline void screen_tile(const uint8_t* w, int64_t step, int64_t blocks,
                                               const HeadToken& x, A ahead, int64_t (&sums)[R][1]) {
  constexpr int64_t kFeatures = layout::kScreenFeatures, kBytes = layout::kScreenBytes;
  constexpr int64_t kFlush = kHead8FlushSteps * kHead8Step / kFeatures;
  static_assert(kFlush > 0);
  for (int r = 0; r < R; ++r) sums[r][0] = 0;
  for (int64_t begin = 0; begin < blocks; begin += kFlush) {
    const int64_t end = blocks - begin < kFlush ? blocks : begin + kFlush;
    Head8Acc acc[R][1][1];
    head8_clear(acc);
    for (int64_t block = begin; block < end; ++block) {
      repeat<4>([&]<int kLine>() BITNET_INLINE_LAMBDA {
        const int64_t i = block * kFeatures + 64 * kLine;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const uint8_t* p = w + r * step + block * kBytes;
          if constexpr (kLine < 3) ahead(p + 64 * kLine);
          acc[r][0][0] = screen_dot<kLine>(acc[r][0][0], p, x, i);
        }
      });
    }
    head8_fold(acc, sums);
  }
}

void head_screen(const uint8_t* screen, const int32_t* far, const float* scale, int64_t k,
                 int64_t row_begin, int64_t row_end, const HeadToken& x, ScreenBound bound,
                 Prefetch wanted, float* out) {
  const int64_t row_bytes = layout::screen_row_bytes(k), blocks = row_bytes / layout::kScreenBytes;
  const int64_t count = row_end - row_begin, part = count / kHeadStreams;
  const uint8_t* w = screen + row_begin * row_bytes;
  with_ahead(wanted, 1, [&](auto ahead) {
    const auto tile = [&]<int R>(int64_t n) __attribute__((always_inline)) {
      int64_t sums[R][1];
      screen_tile<R>(w + n * row_bytes, part * row_bytes, blocks, x, ahead, sums);
      for (int r = 0; r < R; ++r) {
        // 2 w = 8 code - 253 + d, d one of -3, -1, 1, 3. Each rounding below is monotone and is
        // one of head_int8, so that a bound of the sum becomes one of the logit.
        const int64_t at = n + r * part, row = row_begin + at;
        const int64_t twice = 8 * sums[r][0] - 253 * x.sum;
        const int64_t most = bound.all + bound.far * far[row];
        const float factor = scale[row] * x.scale;
        const int64_t sum = factor < 0.0f ? (twice - most + 1) >> 1 : (twice + most) >> 1;
        out[at] = static_cast<float>(sum) * factor;
      }
    };
    for (int64_t n = 0; n < part; ++n) tile.template operator()<kHeadStreams>(n);
    for (int64_t n = kHeadStreams * part; n < count; ++n) tile.template operator()<1>(n);
  });
}
