// Finds the cut of a row whose largest values, down to the cut, reach a target: a count (top-k), a
// sum (top-p), or the point of a draw. The row is not sorted.
#pragma once

#include <cstdint>
#include <limits>

#include "runtime/memory.h"

namespace bitnet::engine {

// Elements of a block; rows are processed block by block.
constexpr int64_t kSelectionBlock = 1024;

// Element i is data[i] * scale, rounded to float32. No NaN; 1 <= count < 2^31.
struct Values {
  const float* data;
  int64_t count;
  float scale;
  // For each block an upper bound of its elements of `data`; null: not known.
  const float* block_bounds = nullptr;
  // An upper bound of all elements of `data`.
  float bound = std::numeric_limits<float>::infinity();
  float at(int64_t i) const { return data[i] * scale; }
};

// Values are ordered by size, descending, and by index among equals. A cut names the last value
// that stays.
struct Cut {
  float value;
  int64_t index;
  bool keeps(float other, int64_t at) const {
    return other > value || (other == value && at <= index);
  }
};

// Scratch memory for rows of up to `count` elements.
struct SelectionMemory {
  float *values, *more_values;  // a list, and the next one
  int32_t* found;               // indices within a block
  static SelectionMemory take(BumpAllocator& memory, int64_t count) {
    return {memory.take<float>(count), memory.take<float>(count),
            memory.take<int32_t>(kSelectionBlock)};
  }
};

// The cut that keeps `count` elements, 1 <= count <= values.count.
Cut cut_at_count(const Values& values, int64_t count, const SelectionMemory& memory);
// The cut at the first element with which the sum reaches `target`, or at the last element. Values
// are at least 0 and sum to about 1. Sums are float64, in an order that depends on the values
// alone. `kept`, if not null, gets the sum that the cut keeps, which equals kept_sum if
// sums_exactly.
Cut cut_at_sum(const Values& values, double target, const SelectionMemory& memory,
               double* kept = nullptr);

// Whether the sums of cut_at_sum are exact in any order, given a total of 1 and values rounded to
// float32.
bool sums_exactly(int64_t count, double target);

// The sum of the elements of [begin, end) that a cut keeps.
double kept_sum(const Values& values, const Cut& cut, int64_t begin, int64_t end);
// Writes the indices that a cut keeps, ascending, to ids [count]; returns how many.
int64_t kept_ids(const Values& values, const Cut& cut, int32_t* ids);
// Writes the values that a cut keeps, in order, to `to` [count], which may be values.data.
void kept_values(const Values& values, const Cut& cut, float* to);

}  // namespace bitnet::engine
