// Many tokens x tiles: a block of k-steps is decoded to memory once and multiplied with every
// token. Uses tiles.inl.

// Decoders that decode to memory, usually from D::kPanelFrom tokens on (0: never), D::kPanelSteps
// k-steps at a time.
template <class D>
concept HasPanel = requires { requires D::kPanelFrom > 0; };

template <class D>
struct Panel {
  alignas(64) uint8_t codes[D::kPanelSteps][D::kFields][kStepBytes];
  alignas(64) int32_t sums[kPanelTokens][D::kFields][kTileLanes];
};

template <class D, int F = 0>
[[gnu::always_inline]] inline void store_fields(const typename D::Prepared& prepared, int64_t step,
                                                Panel<D>& panel) {
  if constexpr (F < D::kFields) {
    store_step(panel.codes[step][F], D::template codes<F>(prepared));
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
  requires(!TakesPairs<D>)
[[gnu::noinline]] void add_panel(const uint8_t (*codes)[D::kFields][kStepBytes], int64_t count,
                                 bool first, const int8_t* x, int64_t x_stride,
                                 int32_t (*sums)[D::kFields][kTileLanes]) {
  TileAcc acc[FN][T];
  clear_accs(acc);
  for (int64_t s = 0; s < count; ++s) {
    TileCodes c[FN];
    repeat<FN>([&]<int f>() BITNET_INLINE_LAMBDA { c[f] = load_step(codes[s][F0 + f]); });
    add_token<0>(c, x + s * layout::kTileStepK, x_stride, acc);
  }
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA {
    int32_t* to = sums[I % T][F0 + I / T];
    const TileSum sum = tile_acc_sum(acc[I / T][I % T]);
    store_sum(to, first ? sum : add_sum(sum, load_sum(to)));
  });
}

// Rows of x that share a load of the codes, and how many fields they meet at once: all where enough
// rows fit the registers beside them, else half.
template <class D>
struct PanelPass {
  static constexpr int kHalf = (D::kFields + 1) / 2;
  static constexpr int kFields = kPanelAccs / D::kFields >= 4 ? D::kFields : kHalf;
  static constexpr int kRows =
      kPanelAccs / kFields < kMaxTokens ? kPanelAccs / kFields : kMaxTokens;
};

// Sums of `rows` rows of x and the first `count` k-steps of the panel, with which x begins.
template <class D>
void add_panel_rows(Panel<D>& panel, int64_t count, bool first, const int8_t* x, int64_t x_stride,
                    int64_t rows) {
  constexpr int kOnce = PanelPass<D>::kFields;
  for_token_groups<PanelPass<D>::kRows, kTokensTogether<D>>(rows, [&]<int R>(int64_t row) {
    const int8_t* at = x + row * x_stride;
    add_panel<D, 0, kOnce, R>(panel.codes, count, first, at, x_stride, panel.sums + row);
    if constexpr (kOnce < D::kFields) {
      add_panel<D, kOnce, D::kFields - kOnce, R>(panel.codes, count, first, at, x_stride,
                                                 panel.sums + row);
    }
  });
}

// Token t's sums of codes as those of weights.  D: a decoder that has one dot for a field.
template <class D>
[[gnu::always_inline]] inline void finish_panel(const Panel<D>& panel, int64_t t, int32_t x_sum,
                                                int32_t* out) {
  const TileSum zeros = set1_sum(x_sum * D::kZeroCode);
  TileSum sums[D::kFields];
#pragma GCC unroll 8
  for (int f = 0; f < D::kFields; ++f) sums[f] = load_sum(panel.sums[t][f]);
  D::finish(sums);
#pragma GCC unroll 8
  for (int f = 0; f < D::kFields; ++f) store_sum(out + f * kTileLanes, sub_sum(sums[f], zeros));
}

template <class D>
void tile_panel(const ProductJob& job, int64_t tile, int64_t token, int64_t tokens,
                Panel<D>& panel) {
  const uint8_t* w = job.weights + tile * job.block_bytes;
  const int8_t* x = job.x + token * job.x_stride;
  for (int64_t s = 0; s < job.k_steps; s += D::kPanelSteps) {
    const int64_t count = job.k_steps - s < D::kPanelSteps ? job.k_steps - s : D::kPanelSteps;
    fill_panel<D>(w + s * kStepBytes, count, job.prefetch_bytes, panel);
    add_panel_rows(panel, count, s == 0, x + s * layout::kTileStepK, job.x_stride, tokens);
  }
  int32_t* out = job.sums + token * job.out_stride + tile * D::kFields * kTileLanes;
  for (int64_t t = 0; t < tokens; ++t) {
    finish_panel(panel, t, job.x_sum[token + t], out + t * job.out_stride);
  }
}

template <class D>
void tiles_panel(const ProductJob& job) {
  Panel<D> panel;
  for (int64_t i = 0; i < job.blocks; ++i) {
    for (int64_t t = 0; t < job.tokens; t += kPanelTokens) {
      tile_panel<D>(job, i, t, job.tokens - t < kPanelTokens ? job.tokens - t : kPanelTokens,
                    panel);
    }
  }
}
