// Many tokens x tiles: a block of k-steps is decoded to memory once, then meets every token.  Over
// tiles.inl.  Included inside an ISA's anonymous namespace; never mentions an ISA.

template <class D>
struct Panel {
  alignas(64) uint8_t codes[D::kFields][D::kPanelSteps][kStepBytes];
  alignas(64) int32_t sums[kPanelTokens][D::kFields][kTileLanes];
};

template <class D, int F = 0>
[[gnu::always_inline]] inline void store_fields(const typename D::Prepared& prepared, int64_t step,
                                                Panel<D>& panel) {
  if constexpr (F < D::kFields) {
    store_step(panel.codes[F][step], D::template codes<F>(prepared));
    store_fields<D, F + 1>(prepared, step, panel);
  }
}

template <class D>
void fill_panel(const uint8_t* w, int64_t count, int64_t ahead, Panel<D>& panel) {
  for (int64_t s = 0; s < count; ++s) {
    if (s * kStepBytes % 64 == 0) prefetch(w + s * kStepBytes + ahead);
    store_fields<D>(D::prepare(load_step(w + s * kStepBytes)), s, panel);
  }
}

// tile_dot keeps its part in place by itself.  Not inlined: in one large function g++ 12 gives up
// on keeping parts in registers.
template <class D, int F0, int FN, int T>
[[gnu::noinline]] void add_panel(const Panel<D>& panel, int64_t count, bool first, const int8_t* x,
                                 int64_t x_stride, int32_t (*sums)[D::kFields][kTileLanes]) {
  TileAcc acc[FN][T];
  clear_accs(acc);
  for (int64_t s = 0; s < count; ++s) {
    TileCodes c[FN];
    repeat<FN>([&]<int f>() BITNET_INLINE_LAMBDA { c[f] = load_step(panel.codes[F0 + f][s]); });
    add_token<0>(c, x + s * layout::kTileStepK, x_stride, acc);
  }
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA {
    int32_t* to = sums[I % T][F0 + I / T];
    const TileSum sum = tile_acc_sum(acc[I / T][I % T]);
    store_sum(to, first ? sum : add_sum(sum, load_sum(to)));
  });
}

// D: a decoder whose codes carry no factor, so that its dots are its fields.
template <class D>
void tile_panel(const TileJob& job, int64_t tile, int64_t token, int64_t tokens, Panel<D>& panel) {
  constexpr int kHalf = (D::kFields + 1) / 2;
  constexpr int kTokens = kPanelAccs / kHalf < kMostTokens ? kPanelAccs / kHalf : kMostTokens;
  const uint8_t* w = job.tiles + tile * job.k_steps * kStepBytes;
  const int8_t* x = job.x + token * job.x_stride;
  for (int64_t s = 0; s < job.k_steps; s += D::kPanelSteps) {
    const int64_t count = job.k_steps - s < D::kPanelSteps ? job.k_steps - s : D::kPanelSteps;
    fill_panel<D>(w + s * kStepBytes, count, job.prefetch_bytes, panel);
    for_token_groups<kTokens>(tokens, [&]<int T>(int64_t t) {
      const int8_t* xs = x + t * job.x_stride + s * layout::kTileStepK;
      add_panel<D, 0, kHalf, T>(panel, count, s == 0, xs, job.x_stride, panel.sums + t);
      add_panel<D, kHalf, D::kFields - kHalf, T>(panel, count, s == 0, xs, job.x_stride,
                                                 panel.sums + t);
    });
  }
  int32_t* out = job.out + token * job.out_stride + tile * D::kFields * kTileLanes;
  for (int64_t t = 0; t < tokens; ++t) {
    const TileSum zeros = set1_sum(job.x_sum[token + t] * D::kZeroCode);
#pragma GCC unroll 8
    for (int f = 0; f < D::kFields; ++f) {
      store_sum(out + t * job.out_stride + f * kTileLanes,
                sub_sum(load_sum(panel.sums[t][f]), zeros));
    }
  }
}

template <class D>
void tiles_panel(const TileJob& job) {
  Panel<D> panel;
  for (int64_t i = 0; i < job.tile_count; ++i) {
    for (int64_t t = 0; t < job.tokens; t += kPanelTokens) {
      tile_panel<D>(job, i, t, job.tokens - t < kPanelTokens ? job.tokens - t : kPanelTokens,
                    panel);
    }
  }
}
