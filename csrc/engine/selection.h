// Where a row of values must be cut so that the largest ones reach a target, without sorting the
// row: the rank of top-k, the mass of top-p, the point of a draw. Must not know what is sampled.
#pragma once

#include <cstdint>
#include <limits>

#include "runtime/memory.h"

namespace bitnet::engine {

// A row is gone through in parts of so many elements.
constexpr int64_t kSelectionBlock = 1024;

// Element i is data[i] * scale, rounded to float32.  No NaN; count at least 1, below 2^31.
struct Values {
  const float* data;
  int64_t count;
  float scale;
  // Of each block a bound that no element of `data` exceeds; null: none is known.
  const float* block_bounds = nullptr;
  // No element of `data` exceeds it.
  float bound = std::numeric_limits<float>::infinity();
  float at(int64_t i) const { return data[i] * scale; }
};

// Values are in order by size, descending, and of equals the lower index comes first.  A cut is the
// last one that stays.
struct Cut {
  float value;
  int64_t index;
  bool keeps(float other, int64_t at) const {
    return other > value || (other == value && at <= index);
  }
};

// Memory for rows of up to `count` elements.
struct SelectionMemory {
  float* values;         // a list
  int32_t* starts;       // where the blocks' parts of it begin, and its end
  float* narrow_values;  // what it is narrowed to
  int32_t* narrow_ids;
  int32_t* found;
  static SelectionMemory take(BumpAllocator& memory, int64_t count) {
    const int64_t blocks = (count + kSelectionBlock - 1) / kSelectionBlock;
    return {memory.take<float>(count), memory.take<int32_t>(blocks + 1), memory.take<float>(count),
            memory.take<int32_t>(count), memory.take<int32_t>(count)};
  }
};

// The element with which there are `count`, 1 to all of them.
Cut cut_at_count(const Values& values, int64_t count, const SelectionMemory& memory);
// The first element with which the sum reaches `target`, or the last one if it never does.  Values
// are at least 0; their sum is 1, roughly.  Sums are float64, in an order that depends on the
// values alone.  block_sums, if not null: [blocks], becomes what the cut keeps of each, equal to
// kept_sum where sums_exactly holds.
Cut cut_at_sum(const Values& values, double target, const SelectionMemory& memory,
               double* block_sums = nullptr);

// Whether no sum of cut_at_sum and of what its cut keeps rounds, whatever the order, for a total of
// 1 and the rounding of float32.
bool sums_exactly(int64_t count, double target);

// The sum of what a cut keeps, from `begin` to `end`.
double kept_sum(const Values& values, const Cut& cut, int64_t begin, int64_t end);
// The indices, ascending, of what a cut keeps, ids [count]; how many.
int64_t kept_ids(const Values& values, const Cut& cut, int32_t* ids);
// What a cut keeps, in its order, to [count]; may be values.data.
void kept_values(const Values& values, const Cut& cut, float* to);

}  // namespace bitnet::engine
