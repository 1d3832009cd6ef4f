// Attention against int8 caches in panels. A load holds four numbers
// each of 16 positions (keys) or 16 features (values), so that every
// lane is a sum of its own. Integers and floats are those of
// int8_rows.inl.

constexpr int64_t kQuadBytes = 64;  // four numbers of 16 lanes

// How many panels of keys, or steps of values, meet R rows at once.
constexpr int quad_tiles(int rows) {
  return kQuadTiles >= 4 * rows ? 4 : kQuadTiles >= 2 * rows ? 2 : 1;
}

// 16-bit numbers as quad_add takes them, two words for each four: [first words][second words].
struct QuadFactors {
  const int32_t* words;
  int64_t quads;   // fours of a row
  int64_t stride;  // words from one row to the next
};

// Two halves of each number as bytes, whole = 256 * high + low; or the numbers of even and of odd
// places as they are.  Returns what the sums of products with them are too large by.
int32_t quad_factors(const int16_t* x, int64_t n, int32_t* words) {
  int32_t sum = 0;
  if constexpr (kQuadHalves) {
    auto* low = reinterpret_cast<int8_t*>(words);
    int8_t* high = low + n;
    for (int64_t i = 0; i < n; ++i) {
      low[i] = static_cast<int8_t>(x[i]);
      high[i] = static_cast<int8_t>((x[i] + 128) >> 8);
      sum += x[i];  // 512 * 32512 * kQuadOffset < 2^31
    }
  } else {
    // By whole words, which compilers do with vectors.
    int32_t* odd = words + n / 4;
    for (int64_t i = 0; i < n / 4; ++i) {
      uint64_t four;
      __builtin_memcpy(&four, x + 4 * i, sizeof four);
      const auto low = static_cast<uint32_t>(four), middle = static_cast<uint32_t>(four >> 16);
      const auto high = static_cast<uint32_t>(four >> 32);
      words[i] = static_cast<int32_t>((low & 0xffffu) | (middle & 0xffff0000u));
      odd[i] = static_cast<int32_t>((middle & 0xffffu) | (high & 0xffff0000u));
    }
  }
  return sum * kQuadOffset;
}

// acc[r * J + j] += the products of J words' numbers with the k-th four factors of R rows.
template <int R, int J>
[[gnu::always_inline]] inline void quad_step(const QuadFactors& f, int64_t k,
                                             const QuadWords (&words)[J], QuadSums (&acc)[R * J]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const int32_t* at = f.words + r * f.stride + k;
    const QuadFactor first = quad_factor(at), second = quad_factor(at + f.quads);
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) quad_add(acc[r * J + j], words[j], first, second);
  }
}

// dots[r * kAttentionChunk + 16 j ..] of R queries and J panels of keys.
template <int R, int J>
[[gnu::noinline]] void dot_quads(QuadFactors query, const int32_t* excess, const char* const* keys,
                                 const char* const* hints, int32_t* dots) {
  QuadSums acc[R * J];
#pragma GCC unroll 16
  for (int i = 0; i < R * J; ++i) acc[i] = QuadSums{};
  for (int64_t k = 0; k < query.quads; ++k) {
    QuadWords words[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      prefetch_l2(hints[j] + k * kQuadBytes);
      words[j] = quad_words(keys[j] + k * kQuadBytes);
    }
    quad_step<R, J>(query, k, words, acc);
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * J; ++i) {
    store_quads(acc[i], excess[i / J], dots + i / J * kAttentionChunk + 16 * (i % J));
  }
}

// out[r][16 step ..] of B steps: sums of the values at positions 4 * from .. 4 * fours, times the
// row's factor.
template <int R, int B>
[[gnu::noinline]] void sum_quads(QuadFactors weights, const int32_t* excess, const float* factors,
                                 const char* const* values, const char* const* hints, int64_t dim,
                                 int64_t from, int64_t fours, int64_t step, float* out,
                                 int64_t out_stride) {
  constexpr int64_t kFours = kPanelPositions / 4;
  QuadSums acc[R * B];
#pragma GCC unroll 16
  for (int i = 0; i < R * B; ++i) acc[i] = QuadSums{};
  for (int64_t k = from; k < fours; ++k) {
    const int64_t at = k % kFours * 4 * dim + step * kQuadBytes;
    const char *line = values[k / kFours] + at, *hint = hints[k / kFours] + at;
    QuadWords words[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      prefetch_l2(hint + b * kQuadBytes);
      words[b] = quad_words(line + b * kQuadBytes);
    }
    quad_step<R, B>(weights, k, words, acc);
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * B; ++i) {
    int32_t sums[16];
    store_quads(acc[i], excess[i / B], sums);
    store_n(out + i / B * out_stride + 16 * (step + i % B),
            mul(from_i32_n(sums, 16), set1(factors[i / B])), 16);
  }
}

// A chunk's panels, and what is prefetched while they are read: the panels of the next chunk, a
// whole chunk ahead, because nothing is prefetched during the softmax in between. If there is no
// next chunk, the panels themselves.
struct QuadPanels {
  const char *keys[kChunkPanels], *values[kChunkPanels];
  const char *next_keys[kChunkPanels], *next_values[kChunkPanels];

  void ask_no_more() {
    for (int64_t i = 0; i < kChunkPanels; ++i) next_keys[i] = keys[i], next_values[i] = values[i];
  }
};

// The dot products of R queries with the keys of a chunk at positions [from, end).
template <int R>
void dot_panels(const AttentionChunk& c, const QuadPanels& panels, const int16_t* wide,
                int64_t from, int64_t end, int32_t* dots) {
  constexpr int J = quad_tiles(R);
  alignas(64) int32_t words[R * kMaxInt8Dim / 2];
  int32_t excess[R];
  const int64_t stride = c.dim / 2;
  for (int r = 0; r < R; ++r) {
    excess[r] = quad_factors(wide + r * wide_padded(c.dim), c.dim, words + r * stride);
  }
  const QuadFactors query = {words, c.dim / 4, stride};
  int64_t i = from / 16;
  for (; J > 1 && 16 * (i + J - 1) < end; i += J) {
    dot_quads<R, J>(query, excess, panels.keys + i, panels.next_keys + i, dots + 16 * i);
  }
  for (; 16 * i < end; ++i) {
    dot_quads<R, 1>(query, excess, panels.keys + i, panels.next_keys + i, dots + 16 * i);
  }
}

// R rows from `row` on.
template <int R>
void attend_quad_rows(const AttentionChunk& c, const QuadPanels& panels, int64_t row,
                      float* states) {
  constexpr int B = quad_tiles(R);
  const int64_t stride = attention_state_floats(c.dim), padded = attention_padded(c.dim);
  float* state = states + row * stride;
  alignas(64) int32_t dots[R * kAttentionChunk], words[R * kAttentionChunk / 2];
  alignas(64) int16_t weights[R * kAttentionChunk];
  int32_t excess[R];
  float factors[R];
  const int64_t from = positions_hidden(c, row), end = positions_seen(c, row + R - 1);
  dot_panels<R>(c, panels, c.int8.query + row * wide_padded(c.dim), from, end, dots);
  weigh_positions<R>(c, row, dots, weights, factors, state + padded, stride);
  for (int r = 0; r < R; ++r) {
    excess[r] = quad_factors(weights + r * kAttentionChunk, kAttentionChunk,
                             words + r * (kAttentionChunk / 2));
  }
  const QuadFactors rows = {words, kAttentionChunk / 4, kAttentionChunk / 2};
  const int64_t fours = (end + 3) / 4, first = from / 4, steps = c.dim / 16;
  int64_t b = 0;
  for (; B > 1 && b + B <= steps; b += B) {
    sum_quads<R, B>(rows, excess, factors, panels.values, panels.next_values, c.dim, first, fours,
                    b, state, stride);
  }
  for (; b < steps; ++b) {
    sum_quads<R, 1>(rows, excess, factors, panels.values, panels.next_values, c.dim, first, fours,
                    b, state, stride);
  }
}

void attend_int8_panels(const AttentionChunk& c, float* states) {
  QuadPanels panels;
  for (int64_t i = 0; i < kChunkPanels; ++i) {
    panels.keys[i] = static_cast<const char*>(c.panels.keys[i]);
    panels.values[i] = static_cast<const char*>(c.panels.values[i]);
    panels.next_keys[i] = ask_first(c.panels.next_keys[i], panels.values[i]);
    panels.next_values[i] = ask_first(c.panels.next_values[i], panels.values[i]);
  }
  ask_for_scales(c.int8);
  attend_in_groups(0, c.rows, [&]<int R>(int64_t row) {
    attend_quad_rows<R>(c, panels, row, states);
    panels.ask_no_more();
  });
}
