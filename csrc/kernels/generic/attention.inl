// Attention of one query head, and dot products with the rows of a floating-point matrix, over the
// float words.  Included inside an ISA's anonymous namespace; never mentions an ISA.

// dot(a, b): 16 lanes, ascending, then the tree.
inline float dot_typed(const float* a, DType type, const void* b, int64_t n) {
  F32x16 acc = zero();
  for (int64_t i = 0; i < n; i += 16) {
    acc = fma(load_n(a + i, n - i), load_typed(type, b, i, n - i), acc);
  }
  return reduce_add(acc);
}

inline const void* row_at(const void* base, int64_t stride_bytes, int64_t row) {
  return static_cast<const char*>(base) + row * stride_bytes;
}

// scores[j] = exp(scale * query . key j - max); returns their sum.
float softmax_numerators(const float* query, DType type, const void* keys, int64_t stride_bytes,
                         int64_t length, int64_t dim, float scale, float* scores) {
  for (int64_t j = 0; j < length; ++j) {
    scores[j] = scale * dot_typed(query, type, row_at(keys, stride_bytes, j), dim);
  }
  // Padding lanes must not win: start from the first score, not from zero.
  F32x16 best = set1(scores[0]);
  for (int64_t j = 0; j < length; j += 16) {
    const int64_t count = length - j;
    F32x16 v = load_n(scores + j, count);
    if (count < 16) {
      float filled[16];
      for (int i = 0; i < 16; ++i) filled[i] = i < count ? scores[j + i] : scores[0];
      v = load_n(filled, 16);
    }
    best = max(best, v);
  }
  const F32x16 shift = set1(reduce_max(best));
  F32x16 sum = zero();
  for (int64_t j = 0; j < length; j += 16) {
    store_n(scores + j, exp_f32(sub(load_n(scores + j, length - j), shift)), length - j);
    sum = add(sum, load_n(scores + j, length - j));
  }
  return reduce_add(sum);
}

// out[i .. i + 16 * B) = sum_j scores[j] * values[j][i ..] / sum, j ascending in every lane.
template <int B>
void weighted_values(const float* scores, DType type, const void* values, int64_t stride_bytes,
                     int64_t length, int64_t i, int64_t count, float sum, float* out) {
  F32x16 acc[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) acc[b] = zero();
  for (int64_t j = 0; j < length; ++j) {
    const F32x16 p = set1(scores[j]);
    const void* row = row_at(values, stride_bytes, j);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      acc[b] = fma(p, load_typed(type, row, i + 16 * b, count - 16 * b), acc[b]);
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) store_n(out + i + 16 * b, div(acc[b], set1(sum)), count - 16 * b);
}

void attend_head(const float* query, DType type, const void* keys, const void* values,
                 int64_t stride_bytes, int64_t length, int64_t dim, float scale, float* scores,
                 float* out) {
  const float sum = softmax_numerators(query, type, keys, stride_bytes, length, dim, scale, scores);
  int64_t i = 0;
  for (; i + 64 <= dim; i += 64) {
    weighted_values<4>(scores, type, values, stride_bytes, length, i, dim - i, sum, out);
  }
  for (; i < dim; i += 16) {
    weighted_values<1>(scores, type, values, stride_bytes, length, i, dim - i, sum, out);
  }
}

// Four rows share each load of x; every row keeps its own 16 lanes, so the grouping changes
// nothing.
template <int R>
void dot_row_group(const float* x, DType type, const void* weight, int64_t stride_bytes, int64_t k,
                   float* out) {
  F32x16 acc[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int64_t i = 0; i < k; i += 16) {
    const F32x16 v = load_n(x + i, k - i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      acc[r] = fma(v, load_typed(type, row_at(weight, stride_bytes, r), i, k - i), acc[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r] = reduce_add(acc[r]);
}

void dot_rows(const float* x, DType type, const void* weight, int64_t k, int64_t row_begin,
              int64_t row_end, float* out) {
  const int64_t stride_bytes = k * element_size(type);
  int64_t n = row_begin;
  for (; n + 4 <= row_end; n += 4, out += 4) {
    dot_row_group<4>(x, type, row_at(weight, stride_bytes, n), stride_bytes, k, out);
  }
  for (; n < row_end; ++n, ++out) {
    dot_row_group<1>(x, type, row_at(weight, stride_bytes, n), stride_bytes, k, out);
  }
}
