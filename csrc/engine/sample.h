// Sampling: from rows of logits to token ids, probabilities, or the most probable tokens. Threads
// share the rows; the result of a row depends on the row and its options alone.
#pragma once

#include <cstdint>

namespace bitnet::engine {

// float32 [count, vocab], rows `stride` elements apart; vocab from 1 to 2^31 - 1.
struct LogitRows {
  const float* data;
  int64_t count, vocab, stride;
  const float* row(int64_t r) const { return data + r * stride; }
};

// How a row is sampled; ranges as in SamplingParams (generate/sampling.py).
struct SamplingOptions {
  double temperature, top_p, min_p;
  int64_t top_k;
  double uniform;  // the random number, in [0, 1); not used at temperature 0

  bool draws_of_all(int64_t vocab) const {  // without filters
    return temperature > 0 && top_p == 1 && min_p == 0 && (top_k == 0 || top_k >= vocab);
  }
};

// A change of one logit, applied first: y = x + bias; y > 0 ? y / repetition : y * repetition; then
// - subtracted. Each operation is rounded to float32.
struct LogitEdit {
  float bias, repetition, subtracted;
};

// The edits of row r are [begin[r], begin[r + 1]). An id occurs once in a row. begin null: none.
struct LogitEdits {
  const int64_t* begin;
  const int64_t* ids;
  const LogitEdit* edits;
};

// What a draw without filters adds to logits: temperature times the Gumbel noise of (key, id)
// (kernels/rows/noise.inl). Then the largest one wins, as at temperature 0, with the probability
// that softmax(logit / temperature) gives it.
struct Noise {
  float temperature = 0;  // 0: none
  uint64_t key = 0;
};
// Of a row's uniform number, whose 53 bits are mixed to a key. The temperature stays between 2^-100
// and 2^96: so no finite logit becomes infinite.
Noise noise_of(double temperature, double uniform);

// The token of each row, or -1 where a logit is a NaN or the largest one is infinite.
//
// After the edits: at temperature 0 the largest logit, the lowest id among equals. Without filters
// the largest of fma(temperature, noise, logit), the lowest id among equals. Otherwise
//   1. keep the top_k largest logits, the lower ids among equals;
//   2. p = exp((x - largest) / temperature) over their sum;
//   3. keep the fewest most probable tokens whose p reach top_p, of those p >= min_p * the largest;
//   4. draw at uniform * their sum, in the order of ids, or with top_k in that of probability.
void sample_tokens(const LogitRows& logits, const SamplingOptions* options, const LogitEdits& edits,
                   int64_t* tokens);

// The distribution that sample_tokens draws from, [count, vocab]; NaN where it gives -1.
void token_probabilities(const LogitRows& logits, const SamplingOptions* options,
                         const LogitEdits& edits, float* probabilities);

// log softmax of the unedited logits: of tokens [count], and of the `top` most probable tokens of
// each row, descending, ids and values [count, top]. NaN and ids of -1 for a row without a
// distribution, and for a token of -1.
void top_logprobs(const LogitRows& logits, const int64_t* tokens, int64_t top, float* of_tokens,
                  int64_t* ids, float* of_ids);

}  // namespace bitnet::engine
