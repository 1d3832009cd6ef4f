// Sampling: rows of logits to token ids, to probabilities, to the most probable tokens. Rows are
// dealt out to the threads; a row's result depends on nothing but the row and its options.
#pragma once

#include <cstdint>

namespace bitnet::engine {

// float32 [count, vocab], rows `stride` elements apart; vocab from 1 to 2^31 - 1.
struct LogitRows {
  const float* data;
  int64_t count, vocab, stride;
  const float* row(int64_t r) const { return data + r * stride; }
};

// How a row is sampled; the ranges are those of SamplingParams (generate/sampling.py).
struct SamplingOptions {
  double temperature, top_p, min_p;
  int64_t top_k;
  double uniform;  // in [0, 1): where the draw falls; not used at temperature 0
};

// What is done to one logit before anything else: y = x + bias; y > 0 ? y / repetition : y *
// repetition; then - subtracted.  Each operation is rounded to float32.
struct LogitEdit {
  float bias, repetition, subtracted;
};

// Those of row r: from begin[r] to begin[r + 1].  An id stands once in a row.  begin null: none.
struct LogitEdits {
  const int64_t* begin;
  const int64_t* ids;
  const LogitEdit* edits;
};

// The token of each row, or -1 where a logit is a NaN or the largest one is infinite.
//
// Edits; then at temperature 0 the largest logit, of equals the lowest id.  Else the top_k largest
// logits stay, of equals the lower ids; p = exp((x - largest) / temperature) over their sum; the
// fewest most probable stay whose p reach top_p, and of those the ones with p >= min_p * the
// largest p.  The draw falls at uniform * their sum, in the order of ids, or with top_k of
// probability.
void sample_tokens(const LogitRows& logits, const SamplingOptions* options, const LogitEdits& edits,
                   int64_t* tokens);

// The distribution that sample_tokens draws from, [count, vocab]; NaN where it gives -1.
void token_probabilities(const LogitRows& logits, const SamplingOptions* options,
                         const LogitEdits& edits, float* probabilities);

// log softmax of the logits themselves: of tokens [count], and of the `top` most probable tokens of
// each row, descending, ids and values [count, top].  NaN, and ids of -1, for a row without a
// distribution and for a token of -1.
void top_logprobs(const LogitRows& logits, const int64_t* tokens, int64_t top, float* of_tokens,
                  int64_t* ids, float* of_ids);

}  // namespace bitnet::engine
