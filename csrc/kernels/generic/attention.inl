// Attention of one query head over the float words.  Included inside an ISA's anonymous namespace;
// never mentions an ISA.

// The element type is a template parameter, so that no loop asks for it.

inline const void* row_at(const void* base, int64_t stride_bytes, int64_t row) {
  return static_cast<const char*>(base) + row * stride_bytes;
}

// R dot products of x with consecutive rows, which share each load of x: every row keeps its own 16
// lanes, ascending, then the tree, so the grouping changes nothing.
template <DType kType, int R>
[[gnu::always_inline]] inline void dot_group(const float* x, const void* rows, int64_t stride_bytes,
                                             int64_t n, float* out) {
  F32x16 acc[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r] = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F32x16 v = load_n(x + i, 16);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      acc[r] = fma(v, load_as<kType>(row_at(rows, stride_bytes, r), i, 16), acc[r]);
    }
  }
  if (i < n) {
    const F32x16 v = load_n(x + i, n - i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      acc[r] = fma(v, load_as<kType>(row_at(rows, stride_bytes, r), i, n - i), acc[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r] = reduce_add(acc[r]);
}

// out[j] = dot(x, row j) for j in [0, count).
template <DType kType>
void dot_many(const float* x, const void* rows, int64_t stride_bytes, int64_t n, int64_t count,
              float* out) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    // The rows form one stream; the hardware prefetcher stops at every 4 KiB page, this does not.
    for (int64_t ahead = 0; ahead < 4 * stride_bytes; ahead += 64) {
      prefetch(static_cast<const char*>(row_at(rows, stride_bytes, j + 4)) + ahead);
    }
    dot_group<kType, 4>(x, row_at(rows, stride_bytes, j), stride_bytes, n, out + j);
  }
  for (; j < count; ++j) {
    dot_group<kType, 1>(x, row_at(rows, stride_bytes, j), stride_bytes, n, out + j);
  }
}

// scores = exp(scores - max); returns their sum.
float softmax_numerators(int64_t length, float* scores) {
  // Padding lanes must not win: they repeat what is in the maximum already.
  F32x16 best = set1(scores[0]);
  int64_t j = 0;
  for (; j + 16 <= length; j += 16) best = max(best, load_n(scores + j, 16));
  if (j < length) {
    float filled[16];
    store_n(filled, best, 16);
    for (int i = 0; j + i < length; ++i) filled[i] = scores[j + i];
    best = max(best, load_n(filled, 16));
  }
  const F32x16 shift = set1(reduce_max(best));
  F32x16 sum = zero();
  for (j = 0; j < length; j += 16) {
    store_n(scores + j, exp_f32(sub(load_n(scores + j, length - j), shift)), length - j);
    sum = add(sum, load_n(scores + j, length - j));
  }
  return reduce_add(sum);
}

// out[i .. i + 16 * B) = sum_j scores[j] * values[j][i ..] / sum, j ascending in every lane.  All
// of the lanes exist unless B is 1, where `count` says how many do.
template <DType kType, int B>
void weighted_values(const float* scores, const void* values, int64_t stride_bytes, int64_t length,
                     int64_t i, int64_t count, float sum, float* out) {
  F32x16 acc[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) acc[b] = zero();
  for (int64_t j = 0; j < length; ++j) {
    const F32x16 p = set1(scores[j]);
    const void* row = row_at(values, stride_bytes, j);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      acc[b] = fma(p, load_as<kType>(row, i + 16 * b, B == 1 ? count : 16), acc[b]);
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
    store_n(out + i + 16 * b, div(acc[b], set1(sum)), B == 1 ? count : 16);
  }
}

template <DType kType>
void attend_as(const float* query, const void* keys, const void* values, int64_t stride_bytes,
               int64_t length, int64_t dim, float scale, float* scores, float* out) {
  dot_many<kType>(query, keys, stride_bytes, dim, length, scores);
  for (int64_t j = 0; j < length; j += 16) {
    store_n(scores + j, mul(set1(scale), load_n(scores + j, length - j)), length - j);
  }
  const float sum = softmax_numerators(length, scores);
  int64_t i = 0;
  for (; i + 64 <= dim; i += 64) {
    weighted_values<kType, 4>(scores, values, stride_bytes, length, i, dim - i, sum, out);
  }
  for (; i < dim; i += 16) {
    weighted_values<kType, 1>(scores, values, stride_bytes, length, i, dim - i, sum, out);
  }
}

void attend_head(const float* query, DType type, const void* keys, const void* values,
                 int64_t stride_bytes, int64_t length, int64_t dim, float scale, float* scores,
                 float* out) {
  const auto attend = type == DType::kBF16 ? attend_as<DType::kBF16> : attend_as<DType::kF32>;
  attend(query, keys, values, stride_bytes, length, dim, scale, scores, out);
}
