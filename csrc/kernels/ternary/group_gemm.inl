// The ternary product with group scales, over tiles. Contract: ProductJob
// in products.h. Uses tiles.inl, direct.inl, panel.inl and
// matrix.inl.

constexpr int64_t kMaxGroupSteps = 32;

// A tile and the tokens from `token` on.
template <class S, int kPlanes>
struct GroupTile {
  const ProductJob& job;
  const uint8_t* w;
  const S* scale;
  const int8_t* x;
  int64_t token;
  float* out;
};

template <class D, class S>
[[gnu::always_inline]] inline void load_scales(const S* scale, TileFloats (&to)[D::kFields]) {
  repeat<D::kFields>([&]<int f>()
                         BITNET_INLINE_LAMBDA { to[f] = load_floats(scale + f * kTileLanes); });
}

// Adds the sums of codes of group g, scaled, to the floats of token t.
template <class D, class S, int kPlanes>
[[gnu::always_inline]] inline void add_scaled(const GroupTile<S, kPlanes>& tile, int64_t g,
                                              int64_t t, const TileSum (&sums)[D::kFields],
                                              const TileFloats (&scale)[D::kFields]) {
  const ProductJob& job = tile.job;
  const int64_t at = g * job.x_group_stride + tile.token + t;
  const TileSum zeros = set1_sum(job.x_sum[at] * D::kZeroCode);
  float* y = tile.out + t * job.out_stride;
  // times 1 is exact
  const TileFloats x_scale = set1_floats(job.x_scale == nullptr ? 1.0f : job.x_scale[at]);
  repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
    const TileFloats factor = mul_floats(scale[f], x_scale);
    const TileFloats v = floats_of(sub_sum(sums[f], zeros));
    store_floats(y + f * kTileLanes, fma_floats(v, factor, load_floats(y + f * kTileLanes)));
  });
}

// The same of a decoder's dots.
template <class D, class S, int kPlanes>
[[gnu::always_inline]] inline void add_dots(const GroupTile<S, kPlanes>& tile, int64_t g, int64_t t,
                                            TileSum (&dots)[D::kDots],
                                            const TileFloats (&scale)[D::kFields]) {
  D::finish(dots);
  TileSum sums[D::kFields];
  repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA { sums[f] = dots[f]; });
  add_scaled<D>(tile, g, t, sums, scale);
}

// 256 * high + low of two planes, or the one plane.
template <int kPlanes>
[[gnu::always_inline]] inline TileSum join_planes(TileSum high, TileSum low) {
  if constexpr (kPlanes == 1) return high;
  return add_sum(times_256(high), low);
}

// T tokens x a group, sums in registers up to D::kFlush steps at a time.
template <class D, int T, int kPlanes, class S>
[[gnu::always_inline]] inline void group_in_registers(const GroupTile<S, kPlanes>& tile, int64_t g,
                                                      const uint8_t* w, int64_t steps,
                                                      const int8_t* x,
                                                      const TileFloats (&scales)[D::kFields]) {
  constexpr int kRows = T * kPlanes;
  constexpr int kUnroll = kRows == 1 ? D::kUnroll : 1;
  constexpr bool kWhole = D::kFlush >= kMaxGroupSteps;
  const int64_t stride = tile.job.x_stride, ahead = tile.job.prefetch_bytes;
  TileSum total[D::kDots][kRows];
  if constexpr (!kWhole) {
    repeat<D::kDots * kRows>(
        [&]<int i>() BITNET_INLINE_LAMBDA { total[i / kRows][i % kRows] = set1_sum(0); });
  }
  int64_t s = 0;
  do {  // a group has at least one step
    const int64_t count = kWhole || steps - s < D::kFlush ? steps - s : D::kFlush;
    TileAcc acc[kUnroll][D::kDots][kRows];
    repeat<kUnroll>([&]<int u>() BITNET_INLINE_LAMBDA { clear_accs(acc[u]); });
    add_steps<D, 0, D::kDots, kRows, kUnroll, true>(w + s * kStepBytes, count,
                                                    x + s * layout::kTileStepK, stride, ahead, acc);
    repeat<D::kDots * kRows>([&]<int i>() BITNET_INLINE_LAMBDA {
      constexpr int f = i / kRows, r = i % kRows;
      TileSum sum = tile_acc_sum(acc[0][f][r]);
      repeat<kUnroll - 1>([&]<int u>() BITNET_INLINE_LAMBDA {
        sum = add_sum(sum, tile_acc_sum(acc[u + 1][f][r]));
      });
      if constexpr (kWhole) {
        total[f][r] = sum;
      } else {
        total[f][r] = add_sum(total[f][r], sum);
      }
    });
    s += D::kFlush;
  } while (!kWhole && s < steps);
  repeat<T>([&]<int t>() BITNET_INLINE_LAMBDA {
    TileSum dots[D::kDots];
    repeat<D::kDots>([&]<int f>() BITNET_INLINE_LAMBDA {
      dots[f] = join_planes<kPlanes>(total[f][t * kPlanes], total[f][t * kPlanes + kPlanes - 1]);
    });
    add_dots<D>(tile, g, t, dots, scales);
  });
}

// T tokens x one tile, group by group.
template <class D, int T, int kPlanes, class S>
[[gnu::noinline]] void tile_groups(const GroupTile<S, kPlanes>& tile) {
  constexpr int kRows = T * kPlanes, kParts = D::kDots * kRows;
  // sums of several blocks need as many registers again
  constexpr bool kInRegisters =
      !TakesPairs<D> && (D::kFlush >= kMaxGroupSteps ? 1 : 2) * kParts <= kTileAccs;
  const ProductJob& job = tile.job;
  const int64_t group_steps = job.group_steps, ahead = job.prefetch_bytes;
  for (int64_t g = 0, s = 0; s < job.k_steps; ++g, s += group_steps) {
    const int64_t left = job.k_steps - s, steps = left < group_steps ? left : group_steps;
    const uint8_t* w = tile.w + s * kStepBytes;
    const int8_t* x = tile.x + s * layout::kTileStepK;
    const S* scale = tile.scale + g * D::kFields * kTileLanes;
    prefetch(scale + ahead / 16);
    TileFloats scales[D::kFields];
    if constexpr (kInRegisters) {
      load_scales<D>(scale, scales);
      group_in_registers<D, T, kPlanes>(tile, g, w, steps, x, scales);
    } else {
      TileSums<D> sums;
      tile_direct<D, kRows>(w, steps, x, job.x_stride, ahead, sums);
      load_scales<D>(scale, scales);
      for (int t = 0; t < T; ++t) {
        TileSum dots[D::kDots];
        repeat<D::kDots>([&]<int f>() BITNET_INLINE_LAMBDA {
          dots[f] = join_planes<kPlanes>(load_sum(sums.at[t * kPlanes][f]),
                                         load_sum(sums.at[t * kPlanes + kPlanes - 1][f]));
        });
        add_dots<D>(tile, g, t, dots, scales);
      }
    }
  }
}

// Many tokens x one tile: a group is decoded to memory once, then meets every token.  D: a decoder
// that has one dot for a field.
template <class D, int kPlanes, class S>
void tile_groups_panel(const GroupTile<S, kPlanes>& tile, int64_t tokens, Panel<D>& panel) {
  static_assert(D::kPanelSteps >= kMaxGroupSteps);
  const ProductJob& job = tile.job;
  for (int64_t g = 0, s = 0; s < job.k_steps; ++g, s += job.group_steps) {
    const int64_t left = job.k_steps - s, count = left < job.group_steps ? left : job.group_steps;
    fill_panel<D>(tile.w + s * kStepBytes, count, job.prefetch_bytes, panel);
    add_panel_rows(panel, count, true, tile.x + s * layout::kTileStepK, job.x_stride,
                   tokens * kPlanes);
    TileFloats scales[D::kFields];
    load_scales<D>(tile.scale + g * D::kFields * kTileLanes, scales);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto* high = panel.sums[t * kPlanes];
      const auto* low = panel.sums[t * kPlanes + kPlanes - 1];
      TileSum dots[D::kFields];
      repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
        dots[f] = join_planes<kPlanes>(load_sum(high[f]), load_sum(low[f]));
      });
      add_dots<D>(tile, g, t, dots, scales);
    }
  }
}

// The job's tile i from token `token` on.
template <class D, int kPlanes, class S>
GroupTile<S, kPlanes> group_tile(const ProductJob& job, int64_t i, int64_t token) {
  return {job,
          job.weights + i * job.block_bytes,
          static_cast<const S*>(job.scale) + i * job.scale_stride,
          job.x + token * kPlanes * job.x_stride,
          token,
          job.values + token * job.out_stride + i * D::kFields * kTileLanes};
}

template <class D, int T, int kPlanes, class S>
void tiles_groups(const ProductJob& job, int64_t token) {
  for (int64_t i = 0; i < job.blocks; ++i) {
    tile_groups<D, T, kPlanes, S>(group_tile<D, kPlanes, S>(job, i, token));
  }
}

template <class D, int kPlanes, class S>
void tiles_groups_panel(const ProductJob& job) {
  constexpr int64_t kTokens = kPanelTokens / kPlanes;
  Panel<D> panel;
  for (int64_t i = 0; i < job.blocks; ++i) {
    for (int64_t m = 0; m < job.tokens; m += kTokens) {
      const int64_t tokens = job.tokens - m < kTokens ? job.tokens - m : kTokens;
      tile_groups_panel<D, kPlanes, S>(group_tile<D, kPlanes, S>(job, i, m), tokens, panel);
    }
  }
}

// Rows of codes x one tile by a matrix unit: the sums of a group leave it before the next begins.
template <class U, class D, int kPlanes, class S>
void tile_groups_matrix(const GroupTile<S, kPlanes>& tile, int64_t tokens,
                        MatrixScratch<D>& scratch) {
  constexpr int N = D::kDots, kOperandTiles = 7 - N;
  const ProductJob& job = tile.job;
  uint32_t slot = 0;
  for (int64_t g = 0, s = 0; s < job.k_steps; ++g, s += job.group_steps) {
    const int64_t end = job.k_steps - s < job.group_steps ? job.k_steps : s + job.group_steps;
    repeat<N>([&]<int d>() BITNET_INLINE_LAMBDA { U::template zero<d>(); });
    for (int64_t at = s; at < end; at += kOperandSteps, ++slot) {
      const uint8_t* w = tile.w + at * kStepBytes;
      uint8_t (*operands)[kOperandBytes] = scratch.ring[slot % kRingSlots];
      for (int64_t i = 0; i < kOperandBytes; i += 64) prefetch(w + job.prefetch_bytes + i);
      decode_lines<U, D, 0, N, 0, 16>(w, operands);
      U::template load_once<N>(tile.x + at * layout::kTileStepK, job.x_stride);
      repeat<N>([&]<int d>() BITNET_INLINE_LAMBDA {
        constexpr int b = N + 1 + d % kOperandTiles;
        U::template load<b>(operand_of<D, N, d>(w, operands), 64);
        U::template multiply<d, N, b>();
      });
    }
    repeat<N>([&]<int d>() BITNET_INLINE_LAMBDA { U::template store<d>(scratch.sums[d][0], 64); });
    TileFloats scales[D::kFields];
    load_scales<D>(tile.scale + g * D::kFields * kTileLanes, scales);
    for (int64_t t = 0; t < tokens; ++t) {
      TileSum dots[N];
      repeat<N>([&]<int d>() BITNET_INLINE_LAMBDA {
        const auto& sums = scratch.sums[d];
        dots[d] = join_planes<kPlanes>(load_sum(sums[t * kPlanes]),
                                       load_sum(sums[t * kPlanes + kPlanes - 1]));
      });
      add_dots<D>(tile, g, t, dots, scales);
    }
  }
}

template <class U, class D, int kPlanes, class S>
void tiles_groups_matrix(const ProductJob& job) {
  constexpr int64_t kTokens = 16 / kPlanes;
  MatrixScratch<D> scratch;
  for (int64_t m = 0; m < job.tokens; m += kTokens) {
    const int64_t tokens = job.tokens - m < kTokens ? job.tokens - m : kTokens;
    configure_for<U>(tokens * kPlanes, D::kDots);
    for (int64_t i = 0; i < job.blocks; ++i) {
      tile_groups_matrix<U, D, kPlanes, S>(group_tile<D, kPlanes, S>(job, i, m), tokens, scratch);
    }
  }
  U::release();
}

// Sums of tables.inl as those of groups.
template <class U, class S, int64_t kTileRows>
struct GroupSums {
  const ProductJob& job;

  // A group of 128 k is at most 16,384 in magnitude: nothing overflows inside one.
  bool fold(TableBlock<U>& block, typename U::Sums, int64_t rows, int64_t done) const {
    if (done < job.k_steps && done % job.group_steps != 0) return false;
    const int64_t g = (done - 1) / job.group_steps;
    alignas(64) float x_scale[U::kTokens] = {}, w_scale[kTileRows];
    for (int64_t t = 0; t < block.tokens; ++t) {
      x_scale[t] =
          job.x_scale == nullptr ? 1.0f : job.x_scale[g * job.x_group_stride + block.token + t];
    }
    const auto factors = U::factors(x_scale);
    auto* values = static_cast<float*>(block.totals);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const S* scale = static_cast<const S*>(job.scale) + row / kTileRows * job.scale_stride;
      for (int64_t i = 0; i < kTileRows; i += kTileLanes)
        store_floats(w_scale + i, load_floats(scale + g * kTileRows + i));
      for_placed_rows<U>(kTileRows, [&](int64_t place, int64_t i) BITNET_INLINE_LAMBDA {
        U::add_scaled(block.sums + (row + place) * U::kTokens, w_scale[i], factors, block.first,
                      values + (row + i) * U::kTokens);
      });
    }
    return true;
  }
  void store(const TableBlock<U>& block, int64_t rows) const {
    alignas(64) float part[U::kTokens][64];
    for (int64_t row = 0; row < rows; row += 64) {
      const int64_t count = rows - row < 64 ? rows - row : 64;
      for (int64_t i = 0; i < count; i += 16) {
        transpose_rows<U>(static_cast<const float*>(block.totals) + (row + i) * U::kTokens, i,
                          part);
      }
      for (int64_t t = 0; t < block.tokens; ++t) {
        float* to = job.values + (block.token + t) * job.out_stride + row;
        __builtin_memcpy(to, part[t], static_cast<size_t>(count) * sizeof(float));
      }
    }
  }

  int64_t run_steps() const { return job.group_steps; }
  template <class D>
  void take(const TileSums<D>& sums, int64_t tile, int64_t token, int64_t tokens,
            int64_t step) const {
    const auto at = group_tile<D, 1, S>(job, tile, token);
    const int64_t g = step / job.group_steps;
    TileFloats scales[D::kFields];
    load_scales<D>(at.scale + g * kTileRows, scales);
    for (int64_t t = 0; t < tokens; ++t) {
      if (step == 0) __builtin_memset(at.out + t * job.out_stride, 0, kTileRows * sizeof(float));
      TileSum dots[D::kDots];
      repeat<D::kDots>([&]<int f>() BITNET_INLINE_LAMBDA { dots[f] = load_sum(sums.at[t][f]); });
      add_dots<D>(at, g, t, dots, scales);
    }
  }
};

// By tables of sums, as far as tokens fill their blocks; returns how many.
template <class U, class S>
int64_t group_tables(const ProductJob& job) {
  const bool base3 = job.format == layout::WeightFormat::kBase3;
  const TableInput all{job.weights, job.block_bytes, job.k_steps, job.x, job.x_stride, 0, {},
                       {},          job.scratch};
  return for_table_parts<U>(
      all, job.tokens, job.blocks, (base3 ? 5 : 4) * kTileLanes,
      [&]<class V>(const TableInput& in) {
        if (base3) {
          table_blocks<V, LinesOfFive<V>, StepsOfFive<V>>(in, GroupSums<V, S, 5 * kTileLanes>{job});
        } else {
          table_blocks<V, LinesOfFour<V>, StepsOfFour<V>>(in, GroupSums<V, S, 4 * kTileLanes>{job});
        }
      });
}

// What fills the blocks of tables; returns the rest of the job.
template <class U>
ProductJob groups_by_tables(const ProductJob& job) {
  const bool half = job.scale_type == DType::kF16;
  const int64_t done = half ? group_tables<U, uint16_t>(job) : group_tables<U, float>(job);
  ProductJob rest = job;
  rest.x += done * job.x_stride;
  rest.x_sum += done;
  if (job.x_scale != nullptr) rest.x_scale += done;
  rest.values += done * job.out_stride;
  rest.tokens -= done;
  return rest;
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
