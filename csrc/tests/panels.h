// Keys and values of a chunk in panels, as kernel_table.h defines them, for tests of attention:
// number by number from rows, and what no position has written full of another value.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/kernel_table.h"

namespace bitnet::test {

template <class T>
class Panels {
 public:
  // rows [positions, dim] of at most a chunk; dim is a multiple of kPanelPositions. gap: elements
  // between two panels, which otherwise follow each other.
  Panels(const T* keys, const T* values, int64_t positions, int64_t dim, T unwritten,
         int64_t gap = 0)
      : distance_(kPanelPositions * dim + gap) {
    const int64_t word = 4 / static_cast<int64_t>(sizeof(T));
    panels_ = (positions + kPanelPositions - 1) / kPanelPositions;
    keys_.assign(static_cast<std::size_t>(panels_ * distance_), unwritten);
    values_ = keys_;
    for (int64_t j = 0; j < positions; ++j) {
      const int64_t p = j % kPanelPositions, panel = j / kPanelPositions * distance_;
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t key = (i / word * kPanelPositions + p) * word + i % word;
        const int64_t value = (p / word * dim + i) * word + p % word;
        keys_[static_cast<std::size_t>(panel + key)] = keys[j * dim + i];
        values_[static_cast<std::size_t>(panel + value)] = values[j * dim + i];
      }
    }
  }
  // The same chunk over these instead of its rows.
  AttentionChunk instead_of(AttentionChunk rows) const {
    rows.layout = CacheLayout::kPanels;
    rows.keys = rows.values = rows.next = nullptr;
    for (int64_t i = 0; i < panels_; ++i) {
      rows.panels.keys[i] = keys_.data() + i * distance_;
      rows.panels.values[i] = values_.data() + i * distance_;
    }
    return rows;
  }

 private:
  int64_t distance_, panels_ = 0;
  std::vector<T> keys_, values_;
};

// Attends over the rows of `chunk` and, if dim allows, over the same numbers in panels: returns
// whether the states are those of the rows, bit for bit.
template <class T>
bool equal_in_panels(const KernelTable& kernels, const AttentionChunk& chunk, T unwritten,
                     std::vector<float>& scratch, const float* states) {
  if (chunk.dim % kPanelPositions != 0) return true;
  for (const int64_t gap : {0, 32}) {
    const Panels<T> panels(static_cast<const T*>(chunk.keys), static_cast<const T*>(chunk.values),
                           chunk.positions, chunk.dim, unwritten, gap);
    std::vector<float> found(
        static_cast<std::size_t>(chunk.rows * attention_state_floats(chunk.dim)));
    kernels.attend_chunk(panels.instead_of(chunk), scratch.data(), found.data());
    if (std::memcmp(found.data(), states, found.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace bitnet::test
