// A ternary weight matrix as the ops see it: a view that knows its layout, cut into units of rows
// that a share of the work may take. A layout is told by the tensor's shape. Must not know
// activations' types, scales or threads.
#pragma once

#include <optional>

#include "ops/checks.h"

namespace bitnet::ops {

enum class WeightFormat : int32_t { kCanonical = 0, kTwoBit = 1, kTrits = 2 };

// Units are consecutive in memory.  A private layout's last unit may reach past n_rows: its rows
// there are computed like the others, and their sums mean nothing.
struct Weight {
  const uint8_t* data;
  WeightFormat format;
  int64_t n_rows;
  int64_t k;           // as the activations have it, before padding
  int64_t unit_rows;   // rows of a unit
  int64_t units;       // of the whole matrix
  int64_t unit_bytes;  // of a whole unit
  int64_t lines;       // private layouts: lines of a tile

  // Of the whole tensor: a private layout has whole units, canonical rows end with the last.
  int64_t bytes() const {
    return format == WeightFormat::kCanonical ? n_rows * (unit_bytes / unit_rows)
                                              : units * unit_bytes;
  }
};

inline constexpr int64_t kMaxUnitRows = 80;  // 1.6 bit, 16 lanes

// Checks `t` against k input features and makes the view.  uint8 [N, R] is canonical; [tiles,
// lines, 4 L] is 2 bit and [tiles, lines, L, 4] is 1.6 bit, both for the lanes of the kernels that
// run now, both with out_features given.  A canonical tensor takes out_features or leaves it.
Weight weight_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                   std::optional<int64_t> out_features = std::nullopt);

// The same, with out_features[index] or, where the list is empty, none.
Weight weight_view_at(const Check& check, const Tensor& t, const char* argument, int64_t k,
                      const std::vector<int64_t>& out_features, size_t index);

// out[m * out_stride + i] = the exact sum of row unit_begin * unit_rows + i and token m, for the
// rows of units [unit_begin, unit_end).  x: int8 rows of x_stride elements with zeros from k to the
// next multiple of 128.  Writes whole units, rows past n_rows included, except in the canonical
// layout.  No allocation, no torch: callable inside a parallel region.
void multiply_units(const KernelTable& table, const Weight& weight, int64_t unit_begin,
                    int64_t unit_end, const int8_t* x, int64_t x_stride, const int32_t* x_sum,
                    int64_t tokens, int32_t* out, int64_t out_stride);

}  // namespace bitnet::ops
