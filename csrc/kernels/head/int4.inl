// The int4 head times a few tokens, and the quantisation of its rows. Contracts: head_int4 and
// head_quantize_int4 in kernel_table.h. Uses dense.inl and matrix.inl.

// One group of S tiles, `step` bytes apart, x T tokens from feature k on.
template <int S, int T, class A>
[[gnu::always_inline]] inline void head4_group(const uint8_t* w, int64_t step, int64_t lines,
                                               const HeadToken* x, int64_t k, A ahead,
                                               Head4Acc (&acc)[S][T]) {
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[s][t] = Head4Acc{};
  }
  for (int64_t line = 0; line < lines; line += 4) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const uint8_t* p = w + s * step + line * layout::kHeadStepBytes;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) ahead(p + j * layout::kHeadStepBytes);
      head4_block(p, x, k + line * layout::kHeadStepFeatures, acc[s]);
    }
  }
}

// What head_int4 is given, and the sizes of a tile in it.
template <class A>
struct Head4 {
  const uint8_t* weight;
  const uint16_t* scale;
  int64_t groups, group;
  A ahead;
  int64_t lines() const { return group / layout::kHeadStepFeatures; }
  int64_t tile_bytes() const { return groups * lines() * layout::kHeadStepBytes; }
  int64_t tile_scales() const { return groups * layout::kHeadTileRows; }
};

// Tiles tile, tile + step, ... (S of them) x T tokens.
template <int S, int T, class A>
[[gnu::always_inline]] inline void head4_tiles(const Head4<A>& head, int64_t tile, int64_t step,
                                               const HeadToken* x, F32x16 (&acc)[S][T]) {
  const uint8_t* w = head.weight + tile * head.tile_bytes();
  const uint16_t* scale = head.scale + tile * head.tile_scales();
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[s][t] = zero();
  }
  for (int64_t g = 0; g < head.groups; ++g) {
    Head4Acc sums[S][T];
    head4_group(w + g * head.lines() * layout::kHeadStepBytes, step * head.tile_bytes(),
                head.lines(), x, g * head.group, head.ahead, sums);
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const uint16_t* from = scale + s * step * head.tile_scales();
      const F32x16 factor = load_bf16_n(from + g * layout::kHeadTileRows, 16);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const int32_t* part = x[t].sums + g * (head.group / 64);
        const int32_t sum = head.group == 64 ? part[0] : part[0] + part[1];
        acc[s][t] = fma(head4_float(sums[s][t], 8 * sum), factor, acc[s][t]);
      }
    }
  }
}

// T tokens against the tiles of [row_begin, row_end), in S streams.
template <int S, int T, class A>
[[gnu::noinline]] void head4_rows(const Head4<A>& head, int64_t row_begin, int64_t row_end,
                                  const HeadToken* x, float* out, int64_t out_stride) {
  constexpr int64_t kRows = layout::kHeadTileRows;
  const int64_t first = row_begin / kRows, tiles = (row_end - row_begin + kRows - 1) / kRows;
  const int64_t part = tiles / S;
  const auto run = [&]<int kTiles>(int64_t n) __attribute__((always_inline)) {
    F32x16 acc[kTiles][T];
    head4_tiles(head, first + n, part, x, acc);
    for (int s = 0; s < kTiles; ++s) {
      const int64_t at = (n + s * part) * kRows;
      for (int t = 0; t < T; ++t) {
        store_n(out + t * out_stride + at, mul(acc[s][t], set1(x[t].scale)),
                row_end - row_begin - at);
      }
    }
  };
  for (int64_t n = 0; n < part; ++n) run.template operator()<S>(n);
  if constexpr (S > 1) {
    for (int64_t n = S * part; n < tiles; ++n) run.template operator()<1>(n);
  }
}

void head_int4(const uint8_t* weight, const uint16_t* scale, int64_t groups, int64_t group,
               int64_t row_begin, int64_t row_end, const HeadToken* x, int64_t tokens,
               Prefetch wanted, float* out, int64_t out_stride) {
  with_matrix_unit([&]<class U> {
    if (tokens < U::kFromTokens) return;
    const int64_t tile = row_begin / layout::kHeadTileRows;
    const Head4<Ahead<false>> whole{weight, scale, groups, group, {}};  // for the sizes alone
    const int64_t done =
        matrix_head4<U>(weight + tile * whole.tile_bytes(), scale + tile * whole.tile_scales(),
                        groups, group, row_end - row_begin, x, tokens, out, out_stride);
    row_begin += done;
    out += done;
  });
  // Several streams are bound by arithmetic, so their lines are prefetched into L1.
  wanted.into_l2 = wanted.into_l2 && kHead4Streams == 1;
  with_ahead(wanted, tokens, [&]<class A>(A ahead) {
    const Head4<A> head{weight, scale, groups, group, ahead};
    if (tokens == 1) {
      return head4_rows<kHead4Streams, 1>(head, row_begin, row_end, x, out, out_stride);
    }
    for (int64_t n = row_begin; n < row_end; n += kHeadRowChunk) {
      const int64_t end = row_end - n < kHeadRowChunk ? row_end : n + kHeadRowChunk;
      float* y = out + n - row_begin;
      for_token_groups<kHead4Tokens>(tokens, [&]<int T>(int64_t t) {
        head4_rows<1, T>(head, n, end, x + t, y + t * out_stride, out_stride);
      });
    }
  });
}

// ---- quantisation -------------------------------------------------------------------------------

// Up to `group` weights of one group -> codes, and the scale.
void head_quantize_group(const float* w, int64_t n, int64_t group, float absmax, uint8_t* codes,
                         uint16_t* scale) {
  // The scale is rounded first, so that the codes make up for the rounding.
  const F32x16 wanted = set1(absmax / 7.0f);
  store_bf16_n(scale, wanted, 1);
  const F32x16 inverse = div(set1(1.0f), load_bf16_n(scale, 1));
  float first[16];
  store_n(first, inverse, 16);
  const F32x16 s = set1(first[0]);
  int8_t q[16];
  for (int64_t i = 0; i < group; i += 16) {
    const F32x16 v = mul(load_n(w + i, n > i ? n - i : 0), s);
    to_i8_n(q, min(set1(7.0f), max(set1(-8.0f), v)), 16);
    for (int j = 0; j < 16; ++j) codes[i + j] = static_cast<uint8_t>(q[j] + 8);
  }
}

float head_quantize_int4(const float* w, int64_t n, int64_t group, uint8_t* codes,
                         uint16_t* scale) {
  bool poisoned = false;
  for (int64_t i = 0; i < n; i += group) {
    const int64_t count = n - i < group ? n - i : group;
    const uint32_t bits = absmax_bits(w + i, count);
    const bool bad = bits >= kInfinityBits;
    head_quantize_group(w + i, bad ? 0 : count, group, bad ? 1.0f : absmax_of(bits), codes + i,
                        scale + i / group);
    poisoned = poisoned || bad;
  }
  return poisoned ? __builtin_nanf("") : 0.0f;
}
