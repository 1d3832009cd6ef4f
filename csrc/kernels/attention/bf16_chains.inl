// Attention over bfloat16 caches in the order of the matrix instruction TDPBF16PS: two chains of
// fused multiply-adds, over the even and the odd ones of 32 elements (scores) or positions
// (values). Keys are read in panels, so that a lane is a position and no sum crosses lanes. If the
// cache holds rows, they are laid out once for all queries. Definition: kernel_table.h,
// attend_chunk.

constexpr int64_t kPairBytes = 64;  // of 16 positions or features

// Panels of 16 positions, [pair of elements][16 positions][2] each.
using PairKeys = const char* const*;

// What is read next is prefetched a line at a time, between the sums, since many lines at once
// would wait for each other. While scores read keys they prefetch the values at the same places;
// while weighted sums read values they prefetch the next keys. If there is nothing to prefetch, the
// hint is the memory that is read anyway.

// Values of 16 features at a time, by pairs of positions.  Of rows: 16 features of a position side
// by side.
struct RowValues {
  const char *data, *next;
  int64_t position_bytes, step_bytes;  // from a position, or 16 features, to the next

  // Of the position 2 * pair + P.
  template <int P>
  [[gnu::always_inline]] F32x16 load(int64_t pair, int64_t step) const {
    return load_mixed<DType::kBF16>(data + (2 * pair + P) * position_bytes + step * step_bytes);
  }
  // What to prefetch at four positions at a time, from a pair on: a panel's worth.
  struct Fours {
    const char *at, *hint;
  };
  Fours fours(int64_t pair, int64_t step) const {
    const int64_t offset = 2 * pair * position_bytes + step * step_bytes;
    return {data + offset, next + offset};
  }
  template <class Unit, int B>
  [[gnu::always_inline]] void take(Fours& from, typename Unit::Chains (&to)[B]) const {
    for (int i = 0; i < 4; ++i) {
      for (int b = 0; b < (B + 1) / 2; ++b) prefetch_l2(from.hint + i * position_bytes + 64 * b);
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      to[b] = Unit::chains_of_rows(from.at + b * step_bytes, position_bytes);
    }
    from = {from.at + 4 * position_bytes, from.hint + 4 * position_bytes};
  }
  template <int B>
  [[gnu::always_inline]] void ask(int64_t pair, int64_t step) const {
    const char* at = next + 2 * pair * position_bytes + step * step_bytes;
    for (int b = 0; b < (B + 1) / 2; ++b) {  // a line is two steps
      prefetch_l2(at + 64 * b);
      prefetch_l2(at + 64 * b + position_bytes);
    }
  }
  void ask_no_more() { next = data; }
  static F32x16 in_order(F32x16 sum) { return unmix<DType::kBF16>(sum); }
};
// Of panels: [pair of positions][dim][2] each.
struct PanelValues {
  const char *panels[kChunkPanels], *next[kChunkPanels];
  int64_t pair_bytes;  // of all dim

  static constexpr uint64_t kPanelPairs = kPanelPositions / 2;
  [[gnu::always_inline]] int64_t offset(int64_t pair, int64_t step) const {
    const auto in_panel = static_cast<int64_t>(static_cast<uint64_t>(pair) % kPanelPairs);
    return in_panel * pair_bytes + step * kPairBytes;
  }
  static uint64_t panel(int64_t pair) { return static_cast<uint64_t>(pair) / kPanelPairs; }
  template <int P>
  [[gnu::always_inline]] F32x16 load(int64_t pair, int64_t step) const {
    const void* words = panels[panel(pair)] + offset(pair, step);
    return load_of_pairs<P>(words);
  }
  // As of RowValues.
  struct Fours {
    const char *at, *hint;
  };
  Fours fours(int64_t pair, int64_t step) const {
    return {panels[panel(pair)] + offset(pair, step), next[panel(pair)] + offset(pair, step)};
  }
  template <class Unit, int B>
  [[gnu::always_inline]] void take(Fours& from, typename Unit::Chains (&to)[B]) const {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      prefetch_l2(from.hint + kPairBytes * b);
      prefetch_l2(from.hint + pair_bytes + kPairBytes * b);
      to[b] = Unit::chains_of(from.at + kPairBytes * b, from.at + pair_bytes + kPairBytes * b);
    }
    from = {from.at + 2 * pair_bytes, from.hint + 2 * pair_bytes};
  }
  template <int B>
  [[gnu::always_inline]] void ask(int64_t pair, int64_t step) const {
    const char* at = next[panel(pair)] + offset(pair, step);
    for (int b = 0; b < B; ++b) prefetch_l2(at + kPairBytes * b);
  }
  void ask_no_more() {
    for (int64_t i = 0; i < kChunkPanels; ++i) next[i] = panels[i];
  }
  static F32x16 in_order(F32x16 sum) { return sum; }
};

// Sums of N vectors in chain P, or in both if there are registers for them.
template <int N>
constexpr bool kBothChains = 2 * N <= kPairTiles;

// sums[i] += first[i] + second[i], for N vectors.
template <int N>
[[gnu::always_inline]] inline void add_chains(const float* first, const F32x16 (&second)[N],
                                              float* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    const F32x16 both = add(load_n(first + 16 * i, 16), second[i]);
    store_n(sums + 16 * i, add(load_n(sums + 16 * i, 16), both), 16);
  }
}
template <int N>
[[gnu::always_inline]] inline void add_chains(const F32x16 (&first)[N], const F32x16 (&second)[N],
                                              float* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    store_n(sums + 16 * i, add(load_n(sums + 16 * i, 16), add(first[i], second[i])), 16);
  }
}

template <int N>
[[gnu::always_inline]] inline void store_chain(const F32x16 (&chain)[N], float* first) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) store_n(first + 16 * i, chain[i], 16);
}

template <int N>
[[gnu::always_inline]] inline void clear(F32x16 (&acc)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) acc[i] = zero();
}

template <int R, int J>
[[gnu::always_inline]] inline void store_scores(const float* sums, float scale, float* scores) {
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) {
      const F32x16 dots = load_n(sums + 16 * (r * J + j), 16);
      store_n(scores + r * kAttentionChunk + 16 * j, mul(set1(scale), dots), 16);
    }
  }
}

// One pair's elements P of J panels times those of R queries.
template <int P, int R, int J>
[[gnu::always_inline]] inline void score_pair_step(const float* query, int64_t query_stride,
                                                   PairKeys keys, int64_t k, F32x16 (&acc)[R * J]) {
  F32x16 key[J];
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) {
    const void* words = keys[j] + k * kPairBytes;
    key[j] = load_of_pairs<P>(words);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F32x16 q = set1(query[r * query_stride + 2 * k + P]);
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) acc[r * J + j] = fma(q, key[j], acc[r * J + j]);
  }
}

template <int J>
[[gnu::always_inline]] inline void ask_panels(PairKeys hints, int64_t line) {
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) prefetch_l2(hints[j] + line * kPairBytes);
}

// Scores of R queries and J panels.
template <int R, int J>
[[gnu::noinline]] void score_pairs(const float* query, int64_t query_stride, PairKeys keys,
                                   int64_t pairs, float scale, PairKeys hints, float* scores) {
  constexpr int64_t kPairs = kPairGroup / 2;
  alignas(64) float first[R * J * 16], sums[R * J * 16];
  for (int i = 0; i < R * J; ++i) store_n(sums + 16 * i, zero(), 16);
  for (int64_t k = 0; k < pairs; k += kPairs) {
    const int64_t end = k + kPairs < pairs ? k + kPairs : pairs;
    F32x16 acc[R * J];
    clear(acc);
    if constexpr (kBothChains<R * J>) {
      F32x16 odd[R * J];
      clear(odd);
#pragma GCC unroll 4
      for (int64_t i = k; i < end; ++i) {
        ask_panels<J>(hints, i);
        score_pair_step<0, R, J>(query, query_stride, keys, i, acc);
        score_pair_step<1, R, J>(query, query_stride, keys, i, odd);
      }
      add_chains(acc, odd, sums);
    } else {
#pragma GCC unroll 4
      for (int64_t i = k; i < end; ++i) {
        ask_panels<J>(hints, i);
        score_pair_step<0, R, J>(query, query_stride, keys, i, acc);
      }
      store_chain(acc, first);
      clear(acc);
#pragma GCC unroll 4
      for (int64_t i = k; i < end; ++i) {
        score_pair_step<1, R, J>(query, query_stride, keys, i, acc);
      }
      add_chains(first, acc, sums);
    }
  }
  store_scores<R, J>(sums, scale, scores);
}

// B steps of the values at a pair's position P, times the weights of R rows.
template <int P, int R, int B, class Values>
[[gnu::always_inline]] inline void weigh_pair_step(const float* weights, const Values& values,
                                                   int64_t step, int64_t pair,
                                                   F32x16 (&acc)[R * B]) {
  F32x16 v[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) v[b] = values.template load<P>(pair, step + b);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F32x16 w = set1(weights[r * kAttentionChunk + 2 * pair + P]);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) acc[r * B + b] = fma(w, v[b], acc[r * B + b]);
  }
}

// sums[r][b] of B steps += the weighted positions of [begin, count) in the group that begins at j.
template <int R, int B, class Values>
[[gnu::always_inline]] inline void weigh_group(const float* weights, const Values& values,
                                               int64_t step, int64_t j, int64_t begin,
                                               int64_t count, float* sums) {
  const int64_t end = j + kPairGroup < count ? j + kPairGroup : count;
  const int64_t start = j < begin ? begin : j;
  // the last pair may lack its odd position, the first one its even position
  const int64_t from = (start + 1) / 2, both = end / 2;
  F32x16 acc[R * B];
  clear(acc);
  if constexpr (kBothChains<R * B>) {
    F32x16 odd[R * B];
    clear(odd);
    if (start % 2 != 0) weigh_pair_step<1, R, B>(weights, values, step, start / 2, odd);
#pragma GCC unroll 4
    for (int64_t i = from; i < both; ++i) {
      values.template ask<B>(i, step);
      weigh_pair_step<0, R, B>(weights, values, step, i, acc);
      weigh_pair_step<1, R, B>(weights, values, step, i, odd);
    }
    if (end % 2 != 0) weigh_pair_step<0, R, B>(weights, values, step, both, acc);
    add_chains(acc, odd, sums);
  } else {
    alignas(64) float first[R * B * 16];
#pragma GCC unroll 4
    for (int64_t i = from; i < both; ++i) {
      values.template ask<B>(i, step);
      weigh_pair_step<0, R, B>(weights, values, step, i, acc);
    }
    if (end % 2 != 0) weigh_pair_step<0, R, B>(weights, values, step, both, acc);
    store_chain(acc, first);
    clear(acc);
#pragma GCC unroll 4
    for (int64_t i = start / 2; i < both; ++i) {
      weigh_pair_step<1, R, B>(weights, values, step, i, acc);
    }
    add_chains(first, acc, sums);
  }
}

template <int R, int B, class Values>
[[gnu::always_inline]] inline void store_sums(const float* sums, int64_t step, float* out,
                                              int64_t out_stride) {
  for (int i = 0; i < R * B; ++i) {
    store_n(out + i / B * out_stride + 16 * (step + i % B),
            Values::in_order(load_n(sums + 16 * i, 16)), 16);
  }
}

// out[r][16 step ..] of B steps: sums over positions [begin, count).
template <int R, int B, class Values>
[[gnu::noinline]] void weigh_pairs(const float* weights, Values values, int64_t step, int64_t begin,
                                   int64_t count, float* out, int64_t out_stride) {
  alignas(64) float sums[R * B * 16];
  for (int i = 0; i < R * B; ++i) store_n(sums + 16 * i, zero(), 16);
  for (int64_t j = begin / kPairGroup * kPairGroup; j < count; j += kPairGroup) {
    weigh_group<R, B>(weights, values, step, j, begin, count, sums);
  }
  store_sums<R, B, Values>(sums, step, out, out_stride);
}
