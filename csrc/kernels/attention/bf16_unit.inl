// Attention over bfloat16 caches by an instruction that adds two products to every sum (PairUnit).
// Sums are those of bf16_chains.inl, bit for bit, for whole groups of kPairGroup. A word holds
// two numbers of one chain. The earlier number is in the upper half, because the unit adds that
// first.

// The words that the unit takes of n numbers, a multiple of 16; nothing without a unit.
template <class Unit>
void store_words(int64_t n, const float* x, float* words) {
  if constexpr (Unit::kHere) {
    for (int64_t i = 0; i < n; i += 16) Unit::store_words(x + i, words + i / 2);
  }
}

// Four numbers of both chains: words[0] and words[1] of R rows times J vectors of words.
template <class Unit, int R, int J>
[[gnu::always_inline]] inline void unit_step(const float* words, int64_t words_stride,
                                             const typename Unit::Chains (&v)[J],
                                             F32x16 (&even)[R * J], F32x16 (&odd)[R * J]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const float* word = words + r * words_stride;
    if constexpr (J == 1) {
      Unit::add(even[r], v[0].even, word);
      Unit::add(odd[r], v[0].odd, word + 1);
    } else {
      const auto first = Unit::broadcast(word), second = Unit::broadcast(word + 1);
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) Unit::add(even[r * J + j], v[j].even, first);
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) Unit::add(odd[r * J + j], v[j].odd, second);
    }
  }
}

// sums[i] += first[i] + second[i] in registers.
template <int N>
[[gnu::always_inline]] inline void keep_chains(const F32x16 (&first)[N], const F32x16 (&second)[N],
                                               F32x16 (&sums)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) sums[i] = add(sums[i], add(first[i], second[i]));
}

// Scores of R queries and J panels by the unit, whose words meet those of the keys: `groups` whole
// groups of elements.
template <class Unit, int R, int J>
[[gnu::noinline]] void unit_scores(const float* words, int64_t words_stride, PairKeys keys,
                                   int64_t groups, float scale, PairKeys hints, float* scores) {
  constexpr int64_t kPairs = kPairGroup / 2;
  F32x16 sums[R * J];
  clear(sums);
#pragma GCC unroll 1
  for (int64_t k = 0; k < groups * kPairs; k += kPairs) {
    F32x16 even[R * J], odd[R * J];
    clear(even), clear(odd);
#pragma GCC unroll 1
    for (int64_t i = k; i < k + kPairs; i += 2) {
      ask_panels<J>(hints, i);
      ask_panels<J>(hints, i + 1);
      typename Unit::Chains key[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) {
        key[j] = Unit::chains_of(keys[j] + i * kPairBytes, keys[j] + (i + 1) * kPairBytes);
      }
      unit_step<Unit, R, J>(words + i, words_stride, key, even, odd);
    }
    keep_chains(even, odd, sums);
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * J; ++i) {
    store_n(scores + i / J * kAttentionChunk + 16 * (i % J), mul(set1(scale), sums[i]), 16);
  }
}

// One group of kPairGroup positions from j on, which all rows see: weights of R rows times B steps.
template <class Unit, int R, int B, class Values>
[[gnu::always_inline]] inline void unit_group(const float* words, const Values& values,
                                              int64_t step, int64_t j, F32x16 (&sums)[R * B]) {
  F32x16 even[R * B], odd[R * B];
  clear(even), clear(odd);
  // Bounds stand outside the loops: with a sum in the condition GCC loses the pragma where it is
  // sanitized.
  const int64_t group_end = (j + kPairGroup) / 2;
#pragma GCC unroll 1
  for (int64_t p = j / 2; p < group_end; p += kPanelPositions / 2) {
    auto from = values.fours(p, step);
    const int64_t panel_end = p + kPanelPositions / 2;
#pragma GCC unroll 1
    for (int64_t i = p; i < panel_end; i += 2) {
      typename Unit::Chains value[B];
      values.template take<Unit, B>(from, value);
      unit_step<Unit, R, B>(words + i, kAttentionChunk / 2, value, even, odd);
    }
  }
  keep_chains(even, odd, sums);
}

// weigh_pairs, of whole groups by the unit: words of the weights meet those of the values.
template <class Unit, int R, int B, class Values>
[[gnu::noinline]] void unit_weighs(const float* weights, const float* words, Values values,
                                   int64_t step, int64_t begin, int64_t count, float* out,
                                   int64_t out_stride) {
  if (begin == 0 && count == kAttentionChunk) {
    F32x16 sums[R * B];
    clear(sums);
#pragma GCC unroll 1
    for (int64_t j = 0; j < kAttentionChunk; j += kPairGroup) {
      unit_group<Unit, R, B>(words, values, step, j, sums);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * B; ++i) {
      store_n(out + i / B * out_stride + 16 * (step + i % B), Values::in_order(sums[i]), 16);
    }
    return;
  }
  alignas(64) float sums[R * B * 16];
  for (int i = 0; i < R * B; ++i) store_n(sums + 16 * i, zero(), 16);
  for (int64_t j = begin / kPairGroup * kPairGroup; j < count; j += kPairGroup) {
    if (j < begin || j + kPairGroup > count) {
      weigh_group<R, B>(weights, values, step, j, begin, count, sums);
      continue;
    }
    F32x16 group[R * B];
#pragma GCC unroll 16
    for (int i = 0; i < R * B; ++i) group[i] = load_n(sums + 16 * i, 16);
    unit_group<Unit, R, B>(words, values, step, j, group);
#pragma GCC unroll 16
    for (int i = 0; i < R * B; ++i) store_n(sums + 16 * i, group[i], 16);
  }
  store_sums<R, B, Values>(sums, step, out, out_stride);
}

template <class Unit>
bool add_pairs_by(const float* a, const float* b, int64_t steps, float* sums) {
  if constexpr (Unit::kHere) {
    F32x16 sum = load_n(sums, 16);
    for (int64_t i = 0; i < 16 * steps; i += 16)
      Unit::add(sum, Unit::load(a + i), Unit::load(b + i));
    store_n(sums, sum, 16);
  }
  return Unit::kHere;
}

bool add_pairs(const float* a, const float* b, int64_t steps, float* sums) {
  return add_pairs_by<PairUnit>(a, b, steps, sums);
}
