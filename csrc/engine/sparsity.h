// Products that leave out inputs which are 0: the options of a block, and the dropping of codes.
//
// A code 0 multiplies nothing, so its column of a matrix need not be read. The matrix is stored a
// second time as columns (format/layout.h). The product of one token reads these if enough of its
// codes are 0. Sums of integers do not depend on their order, so the result is that of the tiles.
#pragma once

#include <vector>

#include "engine/program/listing.h"
#include "engine/quantized_tokens.h"

namespace bitnet::engine {

struct Linear;

// How the cut of a token is found: codes below it in magnitude become 0. Without a rule none do.
struct ActivationSparsity {
  bool skips = false;   // columns are read where that is faster
  bool always = false;  // columns are read always
  // The cut is this share of 127.
  float threshold = 0;
  // Or it is the lowest one that leaves at most ceil(ratio * k) codes; the largest codes stay
  // anyhow. ratio = min_ratio + (max_ratio - min_ratio) * entropy(p) / log(k), p = |code| / sum of
  // |code|.
  float min_ratio = 0, max_ratio = 0;

  bool drops() const { return threshold > 0 || max_ratio > 0; }
  // Drops codes of token m and updates its sum.
  void drop(const QuantizedTokens& x, int64_t m) const;
};

// From the keys of a line: sparsity (auto or exact), threshold, top_k, min_ratio, max_ratio.
ActivationSparsity read_sparsity(Keys& keys);

// The codes of one token that are not 0, as KernelTable::list_nonzero writes them.
struct CodeList {
  int32_t* at;     // [k + kRoom]
  int8_t* codes;   // likewise
  int64_t* count;  // one number

  static constexpr int64_t kRoom = 64;
};

// Measures on these weights, by one thread in about 10 ms, up to how many codes that are not 0 a
// projection's columns are no slower than its tiles: Linear::max_listed.
void tune_columns(const KernelTable& kernels, const std::vector<Linear*>& linears);

}  // namespace bitnet::engine
