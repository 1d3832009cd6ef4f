// Dot products of short rows over tiles of 16 rows, one lane a row: the
// products with LoRA's B. Summed as head_dense sums rows; the tree that adds
// 16 lanes runs across 16 vectors and needs no shuffle. Contracts:
// kernel_table.h.

// Of every row of the tile what one lane of head_dense holds: j = lane, lane + 16, ... ascending.
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
