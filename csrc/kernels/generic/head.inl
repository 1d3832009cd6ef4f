// The output head: dense, int8 and int4 weights against a few tokens, and what quantises both.
// Included inside an ISA's anonymous namespace; never mentions an ISA.  Contracts: kernel_table.h.

// Rows that stay in cache while every token of a batch meets them.
constexpr int64_t kHeadRowChunk = 32;

// ---- dense --------------------------------------------------------------------------------------

// R rows x T tokens; a dot product keeps its own 16 lanes, ascending, then the tree, so the
// grouping changes nothing.  The rows of a group are one stretch of memory and are fetched as such.
template <DType kType, int R, int T>
[[gnu::always_inline]] inline void dense_tile(const float* x, int64_t k, const void* rows,
                                              float* out, int64_t out_stride) {
  const int64_t stride_bytes = k * element_size(kType);
  constexpr int64_t kLines = R * 16 * element_size(kType) / 64;
  F32x16 acc[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  const auto step = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    F32x16 v[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) v[t] = load_n(x + t * k + i, count);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const F32x16 w = load_as<kType>(row_at(rows, stride_bytes, r), i, count);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = fma(v[t], w, acc[r][t]);
    }
  };
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    const char* ahead =
        static_cast<const char*>(rows) + i * R * element_size(kType) + kHeadPrefetch;
#pragma GCC unroll 4
    for (int64_t j = 0; j < kLines; ++j) prefetch(ahead + 64 * j);
    step(i, 16);
  }
  if (i < k) step(i, k - i);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) out[t * out_stride + r] = reduce_add(acc[r][t]);
  }
}

// T tokens against `count` rows.
template <DType kType, int R, int T>
void dense_rows(const float* x, int64_t k, const void* rows, int64_t count, float* out,
                int64_t out_stride) {
  const int64_t stride_bytes = k * element_size(kType);
  int64_t n = 0;
  for (; n + R <= count; n += R) {
    dense_tile<kType, R, T>(x, k, row_at(rows, stride_bytes, n), out + n, out_stride);
  }
  for (; n < count; ++n) {
    dense_tile<kType, 1, T>(x, k, row_at(rows, stride_bytes, n), out + n, out_stride);
  }
}

template <DType kType>
void dense_as(const float* x, int64_t tokens, const void* rows, int64_t k, int64_t count,
              float* out, int64_t out_stride) {
  const int64_t chunk = tokens == 1 ? count : kHeadRowChunk;
  for (int64_t n = 0; n < count; n += chunk) {
    const int64_t part = count - n < chunk ? count - n : chunk;
    const void* w = row_at(rows, k * element_size(kType), n);
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2) {
      dense_rows<kType, kHeadPairRows, 2>(x + t * k, k, w, part, out + t * out_stride + n,
                                          out_stride);
    }
    if (t < tokens) {
      dense_rows<kType, 4, 1>(x + t * k, k, w, part, out + t * out_stride + n, out_stride);
    }
  }
}

void head_dense(const float* x, int64_t tokens, DType type, const void* weight, int64_t k,
                int64_t row_begin, int64_t row_end, float* out, int64_t out_stride) {
  const auto rows = type == DType::kBF16  ? dense_as<DType::kBF16>
                    : type == DType::kF16 ? dense_as<DType::kF16>
                                          : dense_as<DType::kF32>;
  rows(x, tokens, row_at(weight, k * element_size(type), row_begin), k, row_end - row_begin, out,
       out_stride);
}

// ---- int8 ---------------------------------------------------------------------------------------

// acc += the products of weights [i, stop) of R rows, a multiple of U steps.
template <int R, int T, int U>
[[gnu::always_inline]] inline int64_t head8_steps(const int8_t* w, int64_t k, const HeadToken* x,
                                                  int64_t i, int64_t stop,
                                                  Head8Acc (&acc)[R][T][U]) {
  for (; i + U * kHead8Step <= stop; i += U * kHead8Step) {
#pragma GCC unroll 8
    for (int64_t line = 0; line < U * kHead8Step; line += 64) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) prefetch(w + r * k + i + line + kHeadPrefetch);
    }
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Head8Weights v = head8_weights(w + r * k + i + u * kHead8Step);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          acc[r][t][u] = head8_dot(acc[r][t][u], v, x[t], i + u * kHead8Step);
        }
      }
    }
  }
  return i;
}

template <int R, int T, int U>
[[gnu::always_inline]] inline void head8_clear(Head8Acc (&acc)[R][T][U]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) acc[r][t][u] = head8_zero();
    }
  }
}

template <int R, int T, int U>
[[gnu::always_inline]] inline void head8_fold(const Head8Acc (&acc)[R][T][U],
                                              int64_t (&sums)[R][T]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      Head8Acc all = acc[r][t][0];
#pragma GCC unroll 8
      for (int u = 1; u < U; ++u) all = head8_add(all, acc[r][t][u]);
      sums[r][t] += head8_sum(all);
    }
  }
}

// The last weights of a row, fewer than a step: nothing behind the row is read.
template <int R, int T>
[[gnu::noinline]] void head8_tail(const int8_t* w, int64_t k, const HeadToken* x, int64_t i,
                                  int64_t (&sums)[R][T]) {
  for (int r = 0; r < R; ++r) {
    int8_t last[kHead8Step] = {};
    for (int64_t j = i; j < k; ++j) last[j - i] = w[r * k + j];
    const Head8Weights v = head8_weights(last);
    for (int t = 0; t < T; ++t) sums[r][t] += head8_sum(head8_dot(head8_zero(), v, x[t], i));
  }
}

// R rows x T tokens, U accumulators each.
template <int R, int T, int U>
[[gnu::always_inline]] inline void head8_tile(const int8_t* w, int64_t k, const HeadToken* x,
                                              int64_t (&sums)[R][T]) {
  constexpr int64_t kFlush = kHead8FlushSteps * kHead8Step;
  const int64_t whole = k / kHead8Step * kHead8Step;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[r][t] = 0;
  }
  int64_t i = 0;
  while (i < whole) {
    const int64_t stop = whole - i < kFlush ? whole : i + kFlush;
    Head8Acc acc[R][T][U];
    head8_clear(acc);
    i = head8_steps(w, k, x, i, stop, acc);
    head8_fold(acc, sums);
    if (U > 1 && i < stop) {
      Head8Acc rest[R][T][1];
      head8_clear(rest);
      i = head8_steps(w, k, x, i, stop, rest);
      head8_fold(rest, sums);
    }
  }
  if (i < k) head8_tail(w, k, x, i, sums);
}

// T tokens against `count` rows.
template <int R, int T, int U>
void head8_rows(const int8_t* w, const float* scale, int64_t k, int64_t count, const HeadToken* x,
                float* out, int64_t out_stride) {
  const auto tile = [&]<int kRows>(int64_t n) __attribute__((always_inline)) {
    int64_t sums[kRows][T];
    head8_tile<kRows, T, U>(w + n * k, k, x, sums);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const int64_t sum = sums[r][t] - kHead8Offset * x[t].sum;
        out[t * out_stride + n + r] = static_cast<float>(sum) * (scale[n + r] * x[t].scale);
      }
    }
  };
  int64_t n = 0;
  for (; n + R <= count; n += R) tile.template operator()<R>(n);
  if constexpr (R > 1) {
    for (; n < count; ++n) tile.template operator()<1>(n);
  }
}

void head_int8(const int8_t* weight, const float* scale, int64_t k, int64_t row_begin,
               int64_t row_end, const HeadToken* x, int64_t tokens, float* out,
               int64_t out_stride) {
  const int64_t count = row_end - row_begin;
  const int8_t* w = weight + row_begin * k;
  const float* s = scale + row_begin;
  const int64_t chunk = tokens == 1 ? count : kHeadRowChunk;
  for (int64_t n = 0; n < count; n += chunk) {
    const int64_t part = count - n < chunk ? count - n : chunk;
    int64_t t = 0;
    for (; t + kHead8Tokens <= tokens; t += kHead8Tokens) {
      head8_rows<kHead8Rows, kHead8Tokens, 1>(w + n * k, s + n, k, part, x + t,
                                              out + t * out_stride + n, out_stride);
    }
    for (; t < tokens; ++t) {
      head8_rows<1, 1, kHead8Unroll>(w + n * k, s + n, k, part, x + t, out + t * out_stride + n,
                                     out_stride);
    }
  }
}

// ---- int4 ---------------------------------------------------------------------------------------

// One tile of 16 rows, of which `count` are wanted, x T tokens.
template <int T>
[[gnu::always_inline]] inline void head4_tile(const uint8_t* w, const uint16_t* scale,
                                              int64_t groups, int64_t group, const HeadToken* x,
                                              int64_t count, float* out, int64_t out_stride) {
  const int64_t lines = group / layout::kHeadLineFeatures;
  F32x16 acc[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) acc[t] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    Head4Sums sums[T];
    head4_group<T>(w + g * lines * layout::kHeadLineBytes, lines, x, g * group, sums);
    const F32x16 s = load_bf16_n(scale + g * layout::kHeadTileRows, 16);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int32_t* part = x[t].sums + g * (group / 64);
      const int32_t sum = group == 64 ? part[0] : part[0] + part[1];
      acc[t] = fma(head4_float(sums[t], 8 * sum), s, acc[t]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    store_n(out + t * out_stride, mul(acc[t], set1(x[t].scale)), count);
  }
}

void head_int4(const uint8_t* weight, const uint16_t* scale, int64_t groups, int64_t group,
               int64_t row_begin, int64_t row_end, const HeadToken* x, int64_t tokens, float* out,
               int64_t out_stride) {
  const int64_t tile_bytes = groups * group / layout::kHeadLineFeatures * layout::kHeadLineBytes;
  const int64_t tile_scales = groups * layout::kHeadTileRows;
  for (int64_t n = row_begin; n < row_end; n += layout::kHeadTileRows) {
    const int64_t tile = n / layout::kHeadTileRows;
    const uint8_t* w = weight + tile * tile_bytes;
    const uint16_t* s = scale + tile * tile_scales;
    const int64_t count = row_end - n;
    float* y = out + n - row_begin;
    int64_t t = 0;
    for (; t + kHead4Tokens <= tokens; t += kHead4Tokens) {
      head4_tile<kHead4Tokens>(w, s, groups, group, x + t, count, y + t * out_stride, out_stride);
    }
    for (; t < tokens; ++t) {
      head4_tile<1>(w, s, groups, group, x + t, count, y + t * out_stride, out_stride);
    }
  }
}

// ---- quantisation -------------------------------------------------------------------------------

constexpr uint32_t kHeadInfinityBits = 0x7f800000u;

// The largest magnitude, at least 1e-30 so that its reciprocal and its 1 / 32512 stay normal.
inline float head_absmax(uint32_t bits) {
  const float absmax = __builtin_bit_cast(float, bits);
  return absmax > 1e-30f ? absmax : 1e-30f;
}

float head_quantize_token(const float* x, int64_t n, int64_t n_padded, int16_t* wide, int8_t* high,
                          int8_t* low, int32_t* sums) {
  const uint32_t bits = absmax_bits(x, n);
  const bool poisoned = bits >= kHeadInfinityBits;
  const float absmax = head_absmax(bits);
  const F32x16 s = set1(32512.0f / absmax);
  int64_t i = 0;
  for (; !poisoned && i < n; i += 16) store_i16(wide + i, mul(load_n(x + i, n - i), s));
  for (; i < n_padded; ++i) wide[i] = 0;
  for (i = 0; i < n_padded; ++i) {
    low[i] = static_cast<int8_t>(wide[i]);
    high[i] = static_cast<int8_t>((wide[i] - low[i]) >> 8);
  }
  for (i = 0; i < n_padded; i += 64) {
    int32_t sum = 0;
    for (int j = 0; j < 64; ++j) sum += wide[i + j];
    sums[i / 64] = sum;
  }
  return poisoned ? __builtin_nanf("") : absmax / 32512.0f;
}

float head_quantize_int8(const float* w, int64_t n, int8_t* q) {
  const uint32_t bits = absmax_bits(w, n);
  if (bits >= kHeadInfinityBits) {
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return __builtin_nanf("");
  }
  const float absmax = head_absmax(bits);
  const F32x16 s = set1(127.0f / absmax);
  for (int64_t i = 0; i < n; i += 16) to_i8_n(q + i, mul(load_n(w + i, n - i), s), n - i);
  return absmax / 127.0f;
}

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
    const bool bad = bits >= kHeadInfinityBits;
    head_quantize_group(w + i, bad ? 0 : count, group, bad ? 1.0f : head_absmax(bits), codes + i,
                        scale + i / group);
    poisoned = poisoned || bad;
  }
  return poisoned ? __builtin_nanf("") : 0.0f;
}
