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
  // rows [positions, dim] of at most a chunk; dim is a multiple of kPanelPositions.
  Panels(const T* keys, const T* values, int64_t positions, int64_t dim, T unwritten) {
    const int64_t word = 4 / static_cast<int64_t>(sizeof(T));
    for (int64_t first = 0; first < positions; first += kPanelPositions) {
      keys_.emplace_back(static_cast<std::size_t>(kPanelPositions * dim), unwritten);
      values_.push_back(keys_.back());
      for (int64_t p = 0; p < kPanelPositions && first + p < positions; ++p) {
        for (int64_t i = 0; i < dim; ++i) {
          const int64_t from = (first + p) * dim + i;
          const int64_t key = (i / word * kPanelPositions + p) * word + i % word;
          const int64_t value = (p / word * dim + i) * word + p % word;
          keys_.back()[static_cast<std::size_t>(key)] = keys[from];
          values_.back()[static_cast<std::size_t>(value)] = values[from];
        }
      }
    }
  }
  // The same chunk over these instead of its rows.
  AttentionChunk instead_of(AttentionChunk rows) const {
    rows.layout = CacheLayout::kPanels;
    rows.keys = rows.values = rows.next = nullptr;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      rows.panels.keys[i] = keys_[i].data();
      rows.panels.values[i] = values_[i].data();
    }
    return rows;
  }

 private:
  std::vector<std::vector<T>> keys_, values_;
};

// Attends over the rows of `chunk` and, if dim allows, over the same numbers in panels: returns
// whether the states are those of the rows, bit for bit.
template <class T>
bool equal_in_panels(const KernelTable& table, const AttentionChunk& chunk, T unwritten,
                     std::vector<float>& scratch, const float* states) {
  if (chunk.dim % kPanelPositions != 0) return true;
  const Panels<T> panels(static_cast<const T*>(chunk.keys), static_cast<const T*>(chunk.values),
                         chunk.positions, chunk.dim, unwritten);
  std::vector<float> found(
      static_cast<std::size_t>(chunk.rows * attention_state_floats(chunk.dim)));
  table.attend_chunk(panels.instead_of(chunk), scratch.data(), found.data());
  return std::memcmp(found.data(), states, found.size() * sizeof(float)) == 0;
}

}  // namespace bitnet::test
