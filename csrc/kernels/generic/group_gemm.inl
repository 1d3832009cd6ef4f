// The ternary product of rows that have a scale for every group of weights, over tiles.  Over
// tiles.inl and direct.inl.  Included inside an ISA's anonymous namespace; never mentions an ISA.
// See group_gemm in kernel_table.h for the contract.

constexpr int64_t kMostGroupSteps = 32;

template <class S, int kPlanes>
struct GroupTile {
  const GroupJob& job;
  const uint8_t* w;
  const S* scale;
  const int8_t* x;
  int64_t token;
  float* out;
};

// The exact sums of a group, `dots`, finished, scaled and added to the floats of one token.
template <class D, class S, int kPlanes>
[[gnu::always_inline]] inline void add_group_of(const GroupTile<S, kPlanes>& tile, int64_t g, int t,
                                                TileSum (&dots)[D::kDots],
                                                const TileFloats (&scale)[D::kFields]) {
  const GroupJob& job = tile.job;
  D::finish(dots);
  const int64_t at = g * job.x_group_stride + tile.token + t;
  const TileSum zeros = set1_sum(job.x_sum[at] * D::kZeroCode);
  float* y = tile.out + t * job.out_stride;
  const bool scaled = job.x_scale != nullptr;
  const TileFloats x_scale = set1_floats(scaled ? job.x_scale[at] : 1.0f);
  repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
    // times 1 is exact
    const TileFloats factor = mul_floats(scale[f], x_scale);
    const TileFloats v = floats_of(sub_sum(dots[f], zeros));
    store_floats(y + f * kTileLanes, fma_floats(v, factor, load_floats(y + f * kTileLanes)));
  });
}

// T tokens x one tile, group by group.
template <class D, int T, int kPlanes, class S>
[[gnu::noinline]] void tile_groups(const GroupTile<S, kPlanes>& tile) {
  constexpr int kRows = T * kPlanes;
  constexpr int kUnroll = kRows == 1 ? D::kUnroll : 1;
  constexpr bool kInRegisters = D::kDots * kRows <= kTileAccs && D::kFlush >= kMostGroupSteps;
  const GroupJob& job = tile.job;
  const int64_t group_steps = job.group_steps, ahead = job.prefetch_bytes;
  for (int64_t g = 0, s = 0; s < job.k_steps; ++g, s += group_steps) {
    const int64_t left = job.k_steps - s, steps = left < group_steps ? left : group_steps;
    const uint8_t* w = tile.w + s * kStepBytes;
    const int8_t* x = tile.x + s * layout::kTileStepK;
    const S* scale = tile.scale + g * D::kFields * kTileLanes;
    prefetch(scale + ahead / 16);
    TileFloats scales[D::kFields];
    if constexpr (kInRegisters) {
      TileAcc acc[kUnroll][D::kDots][kRows];
      repeat<kUnroll>([&]<int u>() BITNET_INLINE_LAMBDA { clear_accs(acc[u]); });
      add_steps<D, 0, D::kDots, kRows, kUnroll, true>(w, steps, x, job.x_stride, ahead, acc);
      repeat<D::kFields>(
          [&]<int f>() BITNET_INLINE_LAMBDA { scales[f] = load_floats(scale + f * kTileLanes); });
      repeat<T>([&]<int t>() BITNET_INLINE_LAMBDA {
        TileSum dots[D::kDots];
        repeat<D::kDots>([&]<int f>() BITNET_INLINE_LAMBDA {
          dots[f] = tile_acc_sum(acc[0][f][t * kPlanes]);
          repeat<kUnroll - 1>([&]<int u>() BITNET_INLINE_LAMBDA {
            dots[f] = add_sum(dots[f], tile_acc_sum(acc[u + 1][f][t]));
          });
          if constexpr (kPlanes == 2) {
            dots[f] = add_sum(times_256(dots[f]), tile_acc_sum(acc[0][f][t * 2 + 1]));
          }
        });
        add_group_of<D>(tile, g, t, dots, scales);
      });
    } else {
      TileSums<D> sums;
      tile_direct<D, kRows>(w, steps, x, job.x_stride, ahead, sums);
      repeat<D::kFields>(
          [&]<int f>() BITNET_INLINE_LAMBDA { scales[f] = load_floats(scale + f * kTileLanes); });
      for (int t = 0; t < T; ++t) {
        TileSum dots[D::kDots];
        repeat<D::kDots>([&]<int f>() BITNET_INLINE_LAMBDA {
          dots[f] = load_sum(sums.at[t * kPlanes][f]);
          if constexpr (kPlanes == 2) {
            dots[f] = add_sum(times_256(dots[f]), load_sum(sums.at[t * 2 + 1][f]));
          }
        });
        add_group_of<D>(tile, g, t, dots, scales);
      }
    }
  }
}

template <class D, int T, int kPlanes, class S>
void tiles_groups(const GroupJob& job, int64_t token) {
  constexpr int64_t kRows = D::kFields * kTileLanes;
  for (int64_t i = 0; i < job.tile_count; ++i) {
    GroupTile<S, kPlanes> tile{job,
                               job.tiles + i * job.tile_stride,
                               static_cast<const S*>(job.scale) + i * job.scale_stride,
                               job.x + token * kPlanes * job.x_stride,
                               token,
                               job.out + token * job.out_stride + i * kRows};
    tile_groups<D, T, kPlanes, S>(tile);
  }
}

// D1 decodes for one row of codes, DN for several.
template <class D1, class DN, int kPlanes, class S>
void any_group_gemm(const GroupJob& job) {
  constexpr int64_t kRows = D1::kFields * kTileLanes;
  for (int64_t m = 0; m < job.tokens && !job.add; ++m) {
    for (int64_t i = 0; i < job.tile_count * kRows; ++i) job.out[m * job.out_stride + i] = 0.0f;
  }
  constexpr int kTokens = DN::kTokens < kPlanes ? 1 : DN::kTokens / kPlanes;
  if (job.tokens * kPlanes == 1) return tiles_groups<D1, 1, kPlanes, S>(job, 0);
  for_token_groups<kTokens>(
      job.tokens, [&]<int T>(int64_t token) { tiles_groups<DN, T, kPlanes, S>(job, token); });
}

template <int kPlanes, class S>
void group_gemm_as(const GroupJob& job) {
  if (job.format == layout::WeightFormat::kBase3)
    return any_group_gemm<Base3, Base3Digits, kPlanes, S>(job);
  any_group_gemm<TwoBit, TwoBit, kPlanes, S>(job);
}

void group_gemm(const GroupJob& job) {
  if (job.scale_type == DType::kF16) {
    if (job.planes == 2) return group_gemm_as<2, uint16_t>(job);
    return group_gemm_as<1, uint16_t>(job);
  }
  if (job.planes == 2) return group_gemm_as<2, float>(job);
  group_gemm_as<1, float>(job);
}

void add_group(const int32_t* sums, int64_t sums_stride, int64_t rows, int64_t tokens,
               const float* w_scale, const float* x_scale, float* out, int64_t out_stride) {
  for (int64_t m = 0; m < tokens; ++m) {
    const F32x16 xs = set1(x_scale == nullptr ? 1.0f : x_scale[m]);
    float* y = out + m * out_stride;
    for (int64_t i = 0; i < rows; i += 16) {
      const int64_t count = rows - i < 16 ? rows - i : 16;
      const F32x16 factor = mul(load_n(w_scale + i, count), xs);
      const F32x16 v = from_i32_n(sums + m * sums_stride + i, count);
      store_n(y + i, fma(v, factor, load_n(y + i, count)), count);
    }
  }
}
