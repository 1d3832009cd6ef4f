// A ternary weight's tensor, checked, as engine/weights.h takes it. The layout is told by the
// shape.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "engine/weights.h"
#include "ops/checks.h"

namespace bitnet::ops {

// Fails unless `shape` is empty or has `count` sizes, all of them possible.
void check_sizes(const Check& check, const std::vector<int64_t>& shape, size_t count);

// Of the tiles of n x k in a CPU-specific layout: [tiles, lines, 4 L] (2 bit) or [tiles, lines, L,
// 4] (1.6 bit).
Shape tile_shape(engine::WeightFormat format, int64_t n, int64_t k, int64_t lanes);

// Fails where sums of k products, or those of its groups, could overflow in a CPU-specific layout.
void check_tile_columns(const Check& check, const char* argument, int64_t k, bool grouped);

// Checks `t` against k input features and makes the view: uint8 [N, R] is canonical, tiles are for
// the lanes of the kernels that run now and need `rows`, which canonical rows need not.
engine::Weight weight_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                           std::optional<int64_t> rows = std::nullopt);

// The N and K that a caller states of a weight, if it does.
struct MatrixShape {
  std::optional<int64_t> rows, columns;
};

// The argument `shape` of an op on kWeights weights: empty, or N and K of each, one after the
// other.
template <size_t kWeights>
std::array<MatrixShape, kWeights> matrix_shapes(const Check& check,
                                                const std::vector<int64_t>& shape) {
  check_sizes(check, shape, 2 * kWeights);
  std::array<MatrixShape, kWeights> shapes;
  for (size_t i = 0; i < kWeights && !shape.empty(); ++i)
    shapes[i] = {shape[2 * i], shape[2 * i + 1]};
  return shapes;
}

// weight_view of the K that `x_features` says; fails where the caller's is another.
engine::Weight weight_view(const Check& check, const Tensor& t, const char* argument,
                           int64_t x_features, const MatrixShape& stated);

}  // namespace bitnet::ops
