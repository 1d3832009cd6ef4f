// Products that leave out inputs which are 0: what a block asks for, and what a token becomes.
//
// A code 0 multiplies nothing, so its column of a matrix need not be read. The matrix lies a second
// time as columns (format/layout.h), which one token's product reads where enough codes are 0. Sums
// of integers do not depend on their order: the result is that of the tiles, bit for bit.
#pragma once

#include <vector>

#include "engine/program/listing.h"
#include "engine/quantized_tokens.h"

namespace bitnet::engine {

struct Linear;

// The cut of a token: codes below it in magnitude become 0. Without a rule none do.
struct ActivationSparsity {
  bool skips = false;   // whether columns are read where it pays
  bool always = false;  // or whatever it costs
  // Codes below so much of 127.
  float threshold = 0;
  // Or the cut is the lowest that leaves at most ceil(ratio * k) codes, and the largest at least.
  // ratio = min_ratio + (max_ratio - min_ratio) * entropy(p) / log(k), p = |code| / sum of |code|.
  float min_ratio = 0, max_ratio = 0;

  bool drops() const { return threshold > 0 || max_ratio > 0; }
  // Of token m; its sum follows.
  void drop(const QuantizedTokens& x, int64_t m) const;
};

// The keys of a line that say it: sparsity (auto or exact), threshold, top_k, min_ratio, max_ratio.
ActivationSparsity read_sparsity(Keys& keys);

// The codes of one token that are not 0, as KernelTable::list_nonzero writes them.
struct CodeList {
  int32_t* at;     // [k + kRoom]
  int8_t* codes;   // likewise
  int64_t* count;  // one number

  static constexpr int64_t kRoom = 64;
};

// How many codes of each projection may be listed so that its columns are no slower than its tiles:
// measured on these weights by one thread, in about 10 ms.
void tune_columns(const KernelTable& kernels, const std::vector<Linear*>& linears);

}  // namespace bitnet::engine
