// The output head: dense, int8 and int4 weights times a few
// tokens, and the quantisation of both. Contracts:
// kernel_table.h.

// Rows that stay in cache while every token of a batch meets them.
constexpr int64_t kHeadRowChunk = 32;

// R rows or tiles at once are taken from R equal parts of a range, so that each is a sequential
// stream of its own: some CPUs read several of them faster than one (kHeadStreams).

// ---- dense --------------------------------------------------------------------------------------

// Asks for what a stream of weights reads `bytes` later; the hint is part of the instruction.
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
[[gnu::always_inline]] inline void with_ahead(const Prefetch& wanted, const F& rows) {
  const int64_t bytes = head_distance(wanted.bytes);
  if (wanted.into_l2) {
    rows(Ahead<true>{bytes});
  } else {
    rows(Ahead<false>{bytes});
  }
}

// The primitives of a type: bfloat16 may have its lanes in an order of the ISA's own until they are
// added up.
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
  with_ahead(wanted, [&]<class A>(A ahead) {
    const auto rows = type == DType::kBF16  ? dense_as<DType::kBF16, A>
                      : type == DType::kF16 ? dense_as<DType::kF16, A>
                                            : dense_as<DType::kF32, A>;
    rows(x, tokens, row_at(weight, k * element_size(type), row_begin), k, row_end - row_begin,
         ahead, out, out_stride);
  });
}

// ---- int8 ---------------------------------------------------------------------------------------

// acc += the products of weights [i, stop) of R rows, `step` bytes apart; a multiple of U steps.
template <int R, int T, int U, class A>
[[gnu::always_inline]] inline int64_t head8_steps(const int8_t* w, int64_t step, const HeadToken* x,
                                                  A ahead, int64_t i, int64_t stop,
                                                  Head8Acc (&acc)[R][T][U]) {
  for (; i + U * kHead8Step <= stop; i += U * kHead8Step) {
#pragma GCC unroll 8
    for (int64_t line = 0; line < U * kHead8Step; line += 64) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) ahead(w + r * step + i + line);
    }
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      Head8Weights v[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) v[r] = head8_weights(w + r * step + i + u * kHead8Step);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const auto v_x = head8_token(x[t], i + u * kHead8Step);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r][t][u] = head8_dot(acc[r][t][u], v[r], v_x);
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
      for (int u = 0; u < U; ++u) acc[r][t][u] = Head8Acc{};
    }
  }
}

template <int R, int T, int U>
[[gnu::always_inline]] inline void head8_fold(const Head8Acc (&acc)[R][T][U],
                                              int64_t (&sums)[R][T]) {
  Head8Acc all[R * T];
#pragma GCC unroll 8
  for (int i = 0; i < R * T; ++i) {
    all[i] = acc[i / T][i % T][0];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) all[i] = head8_add(all[i], acc[i / T][i % T][u]);
  }
  static_assert(R * T <= 8);
  if constexpr (R * T == 1) {  // eight at once would add up seven of nothing for every row
    sums[0][0] += head8_sum(all[0]);
    return;
  }
  alignas(64) int64_t more[8];
  head8_sums(all, more);
#pragma GCC unroll 8
  for (int i = 0; i < R * T; ++i) sums[i / T][i % T] += more[i];
}

// The last weights of a row, fewer than a step: nothing behind the row is read.
template <int R, int T>
[[gnu::noinline]] void head8_tail(const int8_t* w, int64_t step, int64_t k, const HeadToken* x,
                                  int64_t i, int64_t (&sums)[R][T]) {
  for (int r = 0; r < R; ++r) {
    int8_t last[kHead8Step] = {};
    for (int64_t j = i; j < k; ++j) last[j - i] = w[r * step + j];
    const Head8Weights v = head8_weights(last);
    for (int t = 0; t < T; ++t)
      sums[r][t] += head8_sum(head8_dot(Head8Acc{}, v, head8_token(x[t], i)));
  }
}

// R rows, `step` bytes apart, x T tokens, U accumulators each.
template <int R, int T, int U, class A>
[[gnu::always_inline]] inline void head8_tile(const int8_t* w, int64_t step, int64_t k,
                                              const HeadToken* x, A ahead, int64_t (&sums)[R][T]) {
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
    i = head8_steps(w, step, x, ahead, i, stop, acc);
    head8_fold(acc, sums);
    if (U > 1 && i < stop) {
      Head8Acc rest[R][T][1];
      head8_clear(rest);
      i = head8_steps(w, step, x, ahead, i, stop, rest);
      head8_fold(rest, sums);
    }
  }
  if (i < k) head8_tail(w, step, k, x, i, sums);
}

// T tokens against `count` rows, in R streams.
template <int R, int T, int U, class A>
[[gnu::noinline]] void head8_rows(const int8_t* w, const float* scale, int64_t k, int64_t count,
                                  const HeadToken* x, A ahead, float* out, int64_t out_stride) {
  const int64_t part = count / R;
  const auto tile = [&]<int kRows>(int64_t n) __attribute__((always_inline)) {
    int64_t sums[kRows][T];
    head8_tile<kRows, T, U>(w + n * k, part * k, k, x, ahead, sums);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = n + r * part, sum = sums[r][t] - kHead8Offset * x[t].sum;
        out[t * out_stride + at] = static_cast<float>(sum) * (scale[at] * x[t].scale);
      }
    }
  };
  for (int64_t n = 0; n < part; ++n) tile.template operator()<R>(n);
  if constexpr (R > 1) {
    for (int64_t n = R * part; n < count; ++n) tile.template operator()<1>(n);
  }
}

void head_int8(const int8_t* weight, const float* scale, int64_t k, int64_t row_begin,
               int64_t row_end, const HeadToken* x, int64_t tokens, Prefetch wanted, float* out,
               int64_t out_stride) {
  if constexpr (MatrixUnit::kFromTokens > 0) {
    if (tokens >= MatrixUnit::kFromTokens) {
      const int64_t done =
          matrix_head8<MatrixUnit>(weight + row_begin * k, scale + row_begin, k,
                                   row_end - row_begin, x, tokens, out, out_stride);
      row_begin += done;
      out += done;
    }
  }
  const int64_t count = row_end - row_begin;
  const int8_t* w = weight + row_begin * k;
  const float* s = scale + row_begin;
  const int64_t chunk = tokens <= kHead8Tokens ? count : kHeadRowChunk;
  with_ahead(wanted, [&](auto ahead) {
    for (int64_t n = 0; n < count; n += chunk) {
      const int64_t part = count - n < chunk ? count - n : chunk;
      for_token_groups<kHead8Tokens>(tokens, [&]<int T>(int64_t t) {
        constexpr int R = T == 1 ? kHeadStreams : kHead8Rows, U = T == 1 ? kHead8Unroll : 1;
        head8_rows<R, T, U>(w + n * k, s + n, k, part, x + t, ahead, out + t * out_stride + n,
                            out_stride);
      });
    }
  });
}

// ---- int4 ---------------------------------------------------------------------------------------

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
  if constexpr (MatrixUnit::kFromTokens > 0) {
    if (tokens >= MatrixUnit::kFromTokens) {
      const int64_t tile = row_begin / layout::kHeadTileRows;
      const Head4<Ahead<false>> whole{weight, scale, groups, group, {}};  // for the sizes alone
      const int64_t done = matrix_head4<MatrixUnit>(
          weight + tile * whole.tile_bytes(), scale + tile * whole.tile_scales(), groups, group,
          row_end - row_begin, x, tokens, out, out_stride);
      row_begin += done;
      out += done;
    }
  }
  // In several streams it is bound by arithmetic, which wants its lines in L1.
  wanted.into_l2 = wanted.into_l2 && kHead4Streams == 1;
  with_ahead(wanted, [&]<class A>(A ahead) {
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

float head_quantize_token(const float* x, int64_t n, int64_t n_padded, int16_t* wide, int8_t* high,
                          int8_t* low, int32_t* sums) {
  const float factor = quantize_query(x, n, n_padded, wide);
  for (int64_t i = 0; i < n_padded; ++i) {
    low[i] = static_cast<int8_t>(wide[i]);
    high[i] = static_cast<int8_t>((wide[i] - low[i]) >> 8);
  }
  for (int64_t i = 0; i < n_padded; i += 64) {
    int32_t sum = 0;
    for (int j = 0; j < 64; ++j) sum += wide[i + j];
    sums[i / 64] = sum;
  }
  return factor;
}

float head_quantize_int8(const float* w, int64_t n, int8_t* q) {
  const uint32_t bits = absmax_bits(w, n);
  if (bits >= kInfinityBits) {
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return __builtin_nanf("");
  }
  const float absmax = absmax_of(bits);
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
    const bool bad = bits >= kInfinityBits;
    head_quantize_group(w + i, bad ? 0 : count, group, bad ? 1.0f : absmax_of(bits), codes + i,
                        scale + i / group);
    poisoned = poisoned || bad;
  }
  return poisoned ? __builtin_nanf("") : 0.0f;
}
