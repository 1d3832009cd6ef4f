// One token x tiles: several tiles side by side, as separate streams of reading. Uses
// tiles.inl.

// One token x S tiles, `apart` bytes from one to the next, two k-steps of each in turn: as many
// streams of reading, which some CPUs serve faster than one.  Sums stay in registers where they
// fit.
template <class D, int S>
[[gnu::noinline]] void token_streams(const uint8_t* w, int64_t apart, int64_t k_steps,
                                     const int8_t* x, int64_t ahead, TileSums<D>* sums) {
  constexpr int kParts = S * D::kDots;
  constexpr bool kInRegisters = 2 * kParts <= kTileAccs;
  TileSum total[kParts];
  repeat<kParts>([&]<int i>() BITNET_INLINE_LAMBDA { total[i] = set1_sum(0); });
  for (int64_t b = 0; b < k_steps; b += kStepMultiple) {
    TileAcc acc[S][D::kDots][1];
    repeat<S>([&]<int s>() BITNET_INLINE_LAMBDA { clear_accs(acc[s]); });
    const uint8_t* wb = w + b * kStepBytes;
    const int8_t* xb = x + b * layout::kTileStepK;
#pragma GCC unroll 1
    for (int64_t l = 0; l < kStepMultiple; l += 2) {
      repeat<S>([&]<int s>() BITNET_INLINE_LAMBDA {
        const uint8_t* ws = wb + s * apart + l * kStepBytes;
        for (int64_t at = 0; at < 2 * kStepBytes; at += 64) prefetch(ws + ahead + at);
        repeat<2>([&]<int k>() BITNET_INLINE_LAMBDA {
          const auto prepared = D::prepare(load_step(ws + k * kStepBytes));
          add_step<D, 0, D::kDots, 1>(prepared, xb + (l + k) * layout::kTileStepK, 0, acc[s]);
        });
      });
    }
    repeat<kParts>([&]<int i>() BITNET_INLINE_LAMBDA {
      const TileSum sum = tile_acc_sum(acc[i / D::kDots][i % D::kDots][0]);
      if constexpr (kInRegisters) {
        total[i] = add_sum(total[i], sum);
      } else {
        int32_t* to = sums[i / D::kDots].at[0][i % D::kDots];
        store_sum(to, b == 0 ? sum : add_sum(sum, load_sum(to)));
      }
    });
  }
  if constexpr (kInRegisters) {
    repeat<kParts>([&]<int i>() BITNET_INLINE_LAMBDA {
      store_sum(sums[i / D::kDots].at[0][i % D::kDots], total[i]);
    });
  }
}

// One token x every tile, in S streams of equally many consecutive tiles, then what is left over.
template <class D, int S>
void tiles_in_streams(const ProductJob& job) {
  TileSums<D> sums[S];
  const int64_t each = job.blocks / S;
  const auto finish = [&](const TileSums<D>& tile, int64_t i) {
    finish_tile<D, 1>(tile, job.x_sum, job.sums + i * D::kFields * kTileLanes, job.out_stride);
  };
  for (int64_t i = 0; i < each; ++i) {
    token_streams<D, S>(job.weights + i * job.block_bytes, each * job.block_bytes, job.k_steps,
                        job.x, job.prefetch_bytes / S,
                        sums);  // as much in flight as from one stream
    for (int s = 0; s < S; ++s) finish(sums[s], i + s * each);
  }
  for (int64_t i = each * S; i < job.blocks; ++i) {
    token_streams<D, 1>(job.weights + i * job.block_bytes, 0, job.k_steps, job.x,
                        job.prefetch_bytes, sums);
    finish(sums[0], i);
  }
}
