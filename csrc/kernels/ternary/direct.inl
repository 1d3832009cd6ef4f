// A few tokens x tiles: weights are decoded in registers for every group of tokens. Uses
// tiles.inl.

// acc += k-steps [0, count) of dots F0 .. F0 + FN - 1 x T tokens; U k-steps at a time, each with
// parts of its own so that one sum need not wait for the last.  kPrefetch: this pass meets the
// weights first.
template <class D, int F0, int FN, int T, int U, bool kPrefetch>
[[gnu::always_inline]] inline void add_steps(const uint8_t* w, int64_t count, const int8_t* x,
                                             int64_t x_stride, int64_t ahead,
                                             TileAcc (&acc)[U][FN][T]) {
#pragma GCC unroll 1
  for (int64_t s = 0; s < count; s += U) {
    if constexpr (kPrefetch) {
      // one request per cache line of 64 bytes
      if (U * kStepBytes >= 64 || s * kStepBytes % 64 == 0) {
#pragma GCC unroll 4
        for (int64_t b = 0; b < U * kStepBytes; b += 64) prefetch(w + s * kStepBytes + ahead + b);
      }
    }
    repeat<U>([&]<int u>() BITNET_INLINE_LAMBDA {
      const auto prepared = D::prepare(load_step(w + (s + u) * kStepBytes));
      add_step<D, F0, FN, T>(prepared, x + (s + u) * layout::kTileStepK, x_stride, acc[u]);
    });
  }
}

template <class D, int F0, int FN, int T, int U, bool kPrefetch>
[[gnu::always_inline]] inline void add_block(const uint8_t* w, int64_t count, bool first,
                                             const int8_t* x, int64_t x_stride, int64_t ahead,
                                             TileSums<D>& sums) {
  TileAcc acc[U][FN][T];
  repeat<U>([&]<int u>() BITNET_INLINE_LAMBDA { clear_accs(acc[u]); });
  add_steps<D, F0, FN, T, U, kPrefetch>(w, count, x, x_stride, ahead, acc);
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA {
    constexpr int f = I / T, t = I % T;
    TileSum sum = tile_acc_sum(acc[0][f][t]);
    repeat<U - 1>([&]<int u>()
                      BITNET_INLINE_LAMBDA { sum = add_sum(sum, tile_acc_sum(acc[u + 1][f][t])); });
    int32_t* to = sums.at[t][F0 + f];
    store_sum(to, first ? sum : add_sum(sum, load_sum(to)));
  });
}

// Decoding on the fly: all dots in one pass where the parts fit the registers, else two passes over
// a block that is then in L1.
template <class D, int T>
[[gnu::noinline]] void tile_direct(const uint8_t* w, int64_t k_steps, const int8_t* x,
                                   int64_t x_stride, int64_t ahead, TileSums<D>& sums) {
  constexpr bool kOnePass = D::kDots * T <= kTileAccs;
  constexpr int kHalf = kOnePass ? D::kDots : (D::kDots + 1) / 2;
  // a second set of sums where one is too small to hide the latency of the dot, and room for it
  constexpr bool kTwoSets = !kOnePass && T <= kTokensOfTwoSets && 2 * kHalf * T <= kPanelAccs;
  constexpr int U = T == 1 ? D::kUnroll : kTwoSets ? 2 : 1;
  constexpr int64_t kBlock = kOnePass ? D::kFlush : (D::kFlush < 128 ? D::kFlush : 128);
  int64_t s = 0;
  do {  // k-steps > 0
    const int64_t left = k_steps - s < kBlock ? k_steps - s : kBlock;
    const int64_t count = kBlock == kStepMultiple ? kStepMultiple : left;
    const uint8_t* ws = w + s * kStepBytes;
    const int8_t* xs = x + s * layout::kTileStepK;
    add_block<D, 0, kHalf, T, U, true>(ws, count, s == 0, xs, x_stride, ahead, sums);
    if constexpr (!kOnePass) {
      add_block<D, kHalf, D::kDots - kHalf, T, U, false>(ws, count, s == 0, xs, x_stride, 0, sums);
    }
    s += kBlock;
  } while (s < k_steps);
}

// T tokens x every tile.
template <class D, int T>
void tiles_direct(const ProductJob& job, int64_t token) {
  TileSums<D> sums;
  for (int64_t i = 0; i < job.blocks; ++i) {
    tile_direct<D, T>(job.weights + i * job.block_bytes, job.k_steps, job.x + token * job.x_stride,
                      job.x_stride, job.prefetch_bytes, sums);
    finish_tile<D, T>(sums, job.x_sum + token,
                      job.sums + token * job.out_stride + i * D::kFields * kTileLanes,
                      job.out_stride);
  }
}
