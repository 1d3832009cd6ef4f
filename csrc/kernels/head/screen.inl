// The screen of an int8 head: its upper six bits against one token, and from them the largest that
// each logit can be. Contract: head_screen in kernel_table.h. Uses dense.inl and int8.inl.

// The codes of a step of features, 0..63, of the kLine-th 64 of a block. Three lines hold those of
// 64 features each in their lower six bits and, in the upper two bits of all three, those of the
// last 64.  p: the block's byte of the step's first feature in a line.
template <int kLine>
[[gnu::always_inline]] inline Head8Weights screen_codes(const uint8_t* p) {
  using Bytes [[gnu::vector_size(kHead8Step)]] = uint8_t;
  using Words [[gnu::vector_size(kHead8Step)]] = uint16_t;
  Bytes codes;
  if constexpr (kLine < 3) {
    __builtin_memcpy(&codes, p + 64 * kLine, sizeof codes);
    codes &= 63;
  } else {
    Words a, b, c;
    __builtin_memcpy(&a, p, sizeof a);
    __builtin_memcpy(&b, p + 64, sizeof b);
    __builtin_memcpy(&c, p + 128, sizeof c);
    a = ((a >> 6) & 0x0303) | ((b >> 4) & 0x0c0c) | ((c >> 2) & 0x3030);
    codes = __builtin_bit_cast(Bytes, a);
  }
  alignas(64) int8_t bytes[kHead8Step];  // which most compilers keep in a register
  __builtin_memcpy(bytes, &codes, sizeof codes);
  return head8_weights(bytes);
}

// Sums of the codes of R rows, `step` bytes apart.
template <int R, class A>
[[gnu::always_inline]] inline void screen_tile(const uint8_t* w, int64_t step, int64_t blocks,
                                               const HeadToken& x, A ahead, int64_t (&sums)[R][1]) {
  constexpr int64_t kFeatures = layout::kScreenFeatures, kBytes = layout::kScreenBytes;
  constexpr int64_t kFlush = kHead8FlushSteps * kHead8Step / kFeatures;
  static_assert(kFlush > 0 && kFeatures % kHead8Step == 0);
  for (int r = 0; r < R; ++r) sums[r][0] = 0;
  for (int64_t begin = 0; begin < blocks; begin += kFlush) {
    const int64_t end = blocks - begin < kFlush ? blocks : begin + kFlush;
    Head8Acc acc[R][1][1];
    head8_clear(acc);
    for (int64_t block = begin; block < end; ++block) {
      repeat<4>([&]<int kLine>() BITNET_INLINE_LAMBDA {
#pragma GCC unroll 4
        for (int64_t i = 0; i < 64; i += kHead8Step) {
          const auto v_x = head8_token(x, block * kFeatures + 64 * kLine + i);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const uint8_t* p = w + r * step + block * kBytes;
            if (kLine < 3 && i == 0) ahead(p + 64 * kLine);
            acc[r][0][0] = head8_dot(acc[r][0][0], screen_codes<kLine>(p + i), v_x);
          }
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
        const int64_t twice = 8 * (sums[r][0] - kHead8Offset * x.sum) - 253 * x.sum;
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
