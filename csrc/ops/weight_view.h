// A ternary weight's tensor, checked, as engine/weights.h takes it. The layout is told by the
// shape.
#pragma once

#include <optional>

#include "engine/weights.h"
#include "ops/checks.h"

namespace bitnet::ops {

// Of the tiles of n x k in a CPU-specific layout: [tiles, lines, 4 L] (2 bit) or [tiles, lines, L,
// 4] (1.6 bit).
Shape tile_shape(engine::WeightFormat format, int64_t n, int64_t k, int64_t lanes);

// Checks `t` against k input features and makes the view: uint8 [N, R] is canonical, tiles are for
// the lanes of the kernels that run now and need out_features. A canonical tensor takes
// out_features or leaves it.
engine::Weight weight_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                           std::optional<int64_t> out_features = std::nullopt);

// The same, with out_features[index] or, where the list is empty, none.
engine::Weight weight_view_at(const Check& check, const Tensor& t, const char* argument, int64_t k,
                              const std::vector<int64_t>& out_features, size_t index);

}  // namespace bitnet::ops
