// Scores of a chunk -> weights: the softmax of one row, or of several side by side.

// scores [begin, count) -> exp(scores - max), rounded as caches of that type want it, zeros before
// them and up to the next multiple of 16.  state gets the maximum and the sum.
template <DType kWeights = DType::kF32>
void softmax_scores(float* scores, int64_t begin, int64_t count, float* state) {
  const float infinity = __builtin_inff();
  const int64_t whole = (count + 15) / 16 * 16;
  for (int64_t j = 0; j < begin; ++j) scores[j] = -infinity;
  for (int64_t j = count; j < whole; ++j) scores[j] = -infinity;
  F32x16 best = set1(-infinity);
  for (int64_t j = 0; j < whole; j += 16) best = max(best, load_n(scores + j, 16));
  const float top = reduce_max(best);
  // If every score is -inf or NaN, the chunk has no weight; inf - inf would be NaN.
  const bool weightless = top == -infinity;
  const F32x16 shift = set1(weightless ? 0.0f : top);
  for (int64_t j = 0; j < whole; j += 16) {
    const F32x16 w = exp_f32(sub(load_n(scores + j, 16), shift));
    store_n(scores + j, kWeights == DType::kBF16 ? cached_bf16(w) : w, 16);
  }
  for (int64_t j = begin; weightless && j < count; ++j)
    scores[j] = scores[j] == scores[j] ? 0 : scores[j];
  for (int64_t j = 0; j < begin; ++j) scores[j] = 0.0f;
  for (int64_t j = count; j < whole; ++j) scores[j] = 0.0f;
  F32x16 sum = zero();
  for (int64_t j = 0; j < whole; j += 16) sum = add(sum, load_n(scores + j, 16));
  store_n(state, zero(), 16);
  state[0] = top;
  state[1] = reduce_add(sum);
}

// softmax_scores of R rows, of which row r sees the positions [hidden[r], seen[r]), `whole` a
// multiple of 16 that none goes beyond; each step for all rows before the next, so that their
// chains of dependent instructions overlap: the same bits. kAll: every row sees the whole chunk.
template <int R, DType kWeights, bool kAll>
void softmax_together(float* scores, const int64_t* hidden, const int64_t* seen, int64_t whole,
                      float* state, int64_t state_stride) {
  const float infinity = __builtin_inff();
  if constexpr (kAll) whole = kAttentionChunk;
  const auto fill_unseen = [&](float value) BITNET_INLINE_LAMBDA {
    for (int r = 0; !kAll && r < R; ++r) {
      float* row = scores + r * kAttentionChunk;
      for (int64_t j = 0; j < hidden[r]; ++j) row[j] = value;
      for (int64_t j = seen[r]; j < whole; ++j) row[j] = value;
    }
  };
  fill_unseen(-infinity);
  F32x16 best[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) best[r] = set1(-infinity);
#pragma GCC unroll 4
  for (int64_t j = 0; j < whole; j += 16) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (!kAll && j >= seen[r]) continue;  // max(NaN, -inf) would lose a NaN
      best[r] = max(best[r], load_n(scores + r * kAttentionChunk + j, 16));
    }
  }
  float top[R];
  bool weightless = false;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    top[r] = reduce_max(best[r]);
    weightless = weightless || top[r] == -infinity;
  }
  if (weightless) {  // rare
    for (int r = 0; r < R; ++r) {
      softmax_scores<kWeights>(scores + r * kAttentionChunk, hidden[r], seen[r],
                               state + r * state_stride);
    }
    return;
  }
  F32x16 sum[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum[r] = zero();
#pragma GCC unroll 1
  for (int64_t j = 0; j < whole; j += 16) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* at = scores + r * kAttentionChunk + j;
      const F32x16 e = exp_f32(sub(load_n(at, 16), set1(top[r])));
      const F32x16 w = kWeights == DType::kBF16 ? cached_bf16(e) : e;
      store_n(at, w, 16);
      if constexpr (kAll) sum[r] = add(sum[r], w);
    }
  }
  if constexpr (!kAll) {
    fill_unseen(0.0f);  // to a sum they add nothing
#pragma GCC unroll 1
    for (int64_t j = 0; j < whole; j += 16) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        sum[r] = add(sum[r], load_n(scores + r * kAttentionChunk + j, 16));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* own = state + r * state_stride;
    store_n(own, zero(), 16);
    own[0] = top[r];
    own[1] = reduce_add(sum[r]);
  }
}

// softmax_scores of R rows, of which row r sees the positions [hidden[r], seen[r]); both ascend.
template <DType kWeights = DType::kF32, int R>
void softmax_rows(float* scores, const int64_t (&hidden)[R], const int64_t (&seen)[R], float* state,
                  int64_t state_stride) {
  constexpr int kTogether = R < kSoftmaxRows ? R : kSoftmaxRows;
  const bool all = hidden[R - 1] == 0 && seen[0] == kAttentionChunk;
  int r = 0;
  for (; r + kTogether <= R; r += kTogether) {
    float *at = scores + r * kAttentionChunk, *own = state + r * state_stride;
    if (all) {
      softmax_together<kTogether, kWeights, true>(at, hidden + r, seen + r, kAttentionChunk, own,
                                                  state_stride);
    } else {
      softmax_together<kTogether, kWeights, false>(
          at, hidden + r, seen + r, (seen[r + kTogether - 1] + 15) / 16 * 16, own, state_stride);
    }
  }
  for (; r < R; ++r) {
    softmax_scores<kWeights>(scores + r * kAttentionChunk, hidden[r], seen[r],
                             state + r * state_stride);
  }
}
