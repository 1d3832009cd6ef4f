// Whether an instruction for pairs of bfloat16 (vdpbf16ps) adds as attention over bfloat16 caches
// needs it: KernelTable::add_pairs.  Its definition says so, but no result may hang on that, so the
// CPU at hand is asked, once; where the answer differs, multiply-adds do the work.  Must not know
// what attention computes.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace bitnet {

struct PairCheck {
  bool available = false;  // the CPU has the instruction, and a table that uses it
  int64_t outputs = 0, different = 0;
};

using AddPairs = bool (*)(const float* a, const float* b, int64_t steps, float* sums);

// `products` times each kind of random operands, 16 steps in 16 lanes, by add_pairs and in plain
// C++.  No operand or sum is denormal, as in caches.
PairCheck check_pairs(AddPairs add_pairs, int64_t products, uint64_t seed);

// The same with this CPU's instruction, if it has one.
PairCheck check_pair_unit(int64_t products, uint64_t seed);

// What AttentionChunk::pair_unit may be; asks the CPU on the first call, in about a millisecond.
bool pair_unit_in_order();

}  // namespace bitnet
