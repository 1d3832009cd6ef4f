// Dense weights times a few tokens: rows of heads, and the tiles that LoRA's B lies in. And how
// every head reads its weights. Contracts: head_dense, score_rows and dense_tiles in
// kernel_table.h.

// Rows that stay in cache while every token of a batch meets them.
constexpr int64_t kHeadRowChunk = 32;

// R rows or tiles at once come from R equal parts of a range, so that they are R sequential
// streams: some CPUs read several streams faster than one (kHeadStreams).

// Prefetches what a stream of weights reads `bytes` later; the hint is part of the instruction.
template <bool kIntoL2>
struct Ahead {
  int64_t bytes;
  [[gnu::always_inline]] void operator()(const void* p) const {
    const void* line = static_cast<const char*>(p) + bytes;
    if constexpr (kIntoL2) {
      prefetch_l2(line);
    } else {
      prefetch(line);
    }
  }
};

// rows(ahead) by the hint that is wanted.
template <class F>
[[gnu::always_inline]] inline void with_ahead(const Prefetch& wanted, int64_t tokens,
                                              const F& rows) {
  const int64_t bytes = head_distance(wanted.bytes(tokens));
  if (wanted.into_l2) {
    rows(Ahead<true>{bytes});
  } else {
    rows(Ahead<false>{bytes});
  }
}

// ---- rows ---------------------------------------------------------------------------------------

// The primitives of a type. An ISA may choose the order of bfloat16's lanes until they are added
// up.
template <DType kType>
[[gnu::always_inline]] inline F32x16 dense_x(const float* p, int64_t count) {
  return kType == DType::kBF16 ? head_bf16_x(p, count) : load_n(p, count);
}
template <DType kType>
[[gnu::always_inline]] inline F32x16 dense_weights(const void* row, int64_t i, int64_t count) {
  if constexpr (kType == DType::kBF16) {
    return head_bf16_weights(static_cast<const uint16_t*>(row) + i, count);
  } else {
    return load_as<kType>(row, i, count);
  }
}
template <DType kType>
[[gnu::always_inline]] inline float dense_sum(F32x16 acc) {
  return reduce_add(kType == DType::kBF16 ? head_bf16_ordered(acc) : acc);
}

// Sixteen features, or the last `count`, of R rows x T tokens.
template <DType kType, int R, int T>
[[gnu::always_inline]] inline void dense_step(const float* x, int64_t k, const void* rows,
                                              int64_t step_bytes, int64_t i, int64_t count,
                                              F32x16 (&acc)[R][T]) {
  F32x16 v[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) v[t] = dense_x<kType>(x + t * k + i, count);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const F32x16 w = dense_weights<kType>(row_at(rows, step_bytes, r), i, count);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = fma(v[t], w, acc[r][t]);
  }
}

// R rows, step_bytes apart, x T tokens; a dot product keeps its own 16 lanes, ascending, then the
// tree, so the grouping changes nothing.
template <DType kType, int R, int T, class A>
[[gnu::always_inline]] inline void dense_tile(const float* x, int64_t k, const void* rows,
                                              int64_t step_bytes, A ahead, float (&y)[R][T]) {
  F32x16 acc[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      ahead(row_at(row_at(rows, step_bytes, r), element_size(kType), i));
    }
    dense_step<kType>(x, k, rows, step_bytes, i, 16, acc);
  }
  if (i < k) dense_step<kType>(x, k, rows, step_bytes, i, k - i, acc);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) y[r][t] = dense_sum<kType>(acc[r][t]);
  }
}

// T tokens against `count` rows, in R streams.
template <DType kType, int R, int T, class A>
void dense_rows(const float* x, int64_t k, const void* rows, int64_t count, A ahead, float* out,
                int64_t out_stride) {
  const int64_t row_bytes = k * element_size(kType), part = count / R;
  for (int64_t n = 0; n < part; ++n) {
    float y[R][T];
    dense_tile<kType, R, T>(x, k, row_at(rows, row_bytes, n), part * row_bytes, ahead, y);
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) out[t * out_stride + n + r * part] = y[r][t];
    }
  }
  for (int64_t n = R * part; n < count; ++n) {
    float y[1][T];
    dense_tile<kType, 1, T>(x, k, row_at(rows, row_bytes, n), 0, ahead, y);
    for (int t = 0; t < T; ++t) out[t * out_stride + n] = y[0][t];
  }
}

template <DType kType, class A>
void dense_as(const float* x, int64_t tokens, const void* rows, int64_t k, int64_t count, A ahead,
              float* out, int64_t out_stride) {
  const int64_t chunk = tokens <= 2 ? count : kHeadRowChunk;
  for (int64_t n = 0; n < count; n += chunk) {
    const int64_t part = count - n < chunk ? count - n : chunk;
    const void* w = row_at(rows, k * element_size(kType), n);
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2) {
      dense_rows<kType, kHeadPairRows, 2>(x + t * k, k, w, part, ahead, out + t * out_stride + n,
                                          out_stride);
    }
    if (t < tokens) {
      dense_rows<kType, 4, 1>(x + t * k, k, w, part, ahead, out + t * out_stride + n, out_stride);
    }
  }
}

void head_dense(const float* x, int64_t tokens, DType type, const void* weight, int64_t k,
                int64_t row_begin, int64_t row_end, Prefetch wanted, float* out,
                int64_t out_stride) {
  with_ahead(wanted, tokens, [&]<class A>(A ahead) {
    const auto rows = type == DType::kBF16  ? dense_as<DType::kBF16, A>
                      : type == DType::kF16 ? dense_as<DType::kF16, A>
                                            : dense_as<DType::kF32, A>;
    rows(x, tokens, row_at(weight, k * element_size(type), row_begin), k, row_end - row_begin,
         ahead, out, out_stride);
  });
}

// ---- rows that lie anywhere ---------------------------------------------------------------------

// R rows of bfloat16 at once, so that no row waits for another one's sums.
template <int R>
[[gnu::always_inline]] inline void score_tile(const float* x, const void* const* rows, int64_t k,
                                              float* out) {
  F32x16 acc[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r] = zero();
  const auto step = [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 v = dense_x<DType::kBF16>(x + i, count);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      acc[r] = fma(v, dense_weights<DType::kBF16>(rows[r], i, count), acc[r]);
  };
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) step(i, 16);
  if (i < k) step(i, k - i);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r] = dense_sum<DType::kBF16>(acc[r]);
}

void score_rows(const float* x, int64_t tokens, const void* const* rows, int64_t count, int64_t k,
                float* out, int64_t out_stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t n = 0;
    for (; n + 4 <= count; n += 4) score_tile<4>(x + t * k, rows + n, k, out + t * out_stride + n);
    for (; n < count; ++n) score_tile<1>(x + t * k, rows + n, k, out + t * out_stride + n);
  }
}

// ---- tiles of 16 rows ---------------------------------------------------------------------------

// One lane a row: the products with LoRA's B, whose rows are short. Summed as head_dense sums rows;
// the tree that adds 16 lanes runs across 16 vectors and needs no shuffle.

// For every row of the tile the sum in one lane of head_dense: j = lane, lane + 16, ... ascending.
template <DType kType>
[[gnu::always_inline]] inline F32x16 tile_lane(const float* x, const void* tile, int64_t rank,
                                               int64_t lane) {
  F32x16 acc = zero();
  int64_t j = lane;
  for (; j < rank; j += 16) acc = fma(set1(x[j]), load_as<kType>(tile, 16 * j, 16), acc);
  // the last 16 of a row are filled up with zeros there, which turns -0 into 0
  return j - lane < rank ? add(acc, zero()) : acc;
}

// The tree of reduce_add: lanes 8 apart first, then 4, 2 and 1.
template <DType kType, int kApart>
[[gnu::always_inline]] inline F32x16 tile_sum(const float* x, const void* tile, int64_t rank,
                                              int64_t lane) {
  if constexpr (kApart == 16) {
    return tile_lane<kType>(x, tile, rank, lane);
  } else {
    return add(tile_sum<kType, 2 * kApart>(x, tile, rank, lane),
               tile_sum<kType, 2 * kApart>(x, tile, rank, lane + kApart));
  }
}

template <DType kType>
void tiles_as(const float* x, int64_t tokens, const void* tiles, int64_t rank, float scale,
              int64_t row_begin, int64_t row_end, float* out, int64_t out_stride) {
  for (int64_t n = row_begin; n < row_end; n += 16) {
    const void* tile = row_at(tiles, 16 * rank * element_size(kType), n / 16);
    for (int64_t m = 0; m < tokens; ++m) {
      const F32x16 sum = tile_sum<kType, 1>(x + m * rank, tile, rank, 0);
      store_n(out + m * out_stride + n - row_begin, mul(sum, set1(scale)), row_end - n);
    }
  }
}

void dense_tiles(const float* x, int64_t tokens, DType type, const void* tiles, int64_t rank,
                 float scale, int64_t row_begin, int64_t row_end, float* out, int64_t out_stride) {
  const auto run = type == DType::kBF16  ? tiles_as<DType::kBF16>
                   : type == DType::kF16 ? tiles_as<DType::kF16>
                                         : tiles_as<DType::kF32>;
  run(x, tokens, tiles, rank, scale, row_begin, row_end, out, out_stride);
}
