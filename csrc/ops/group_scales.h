// The scale of a projection as a tensor: one, one a row, or one for every group of 128 or 64
// weights; and the names of ActivationFormat.
#pragma once

#include <string>

#include "engine/products/product.h"
#include "ops/checks.h"

namespace bitnet::ops {

// "int8", "int8_group" or "int16_group".
engine::ActivationFormat activation_format(const Check& check, const std::string& name);

// A projection of `w` with the scales `t`: float32 [1] or [N]; or of groups float32 [N, groups], or
// float32 or float16 [row blocks, groups, rows of a block] beside a CPU-specific layout.
engine::Projection scaled_projection(const Check& check, const engine::Weight& w, const Tensor& t,
                                     const char* argument, DType type, void* out);

// The same of groups alone.
engine::GroupScales group_scales(const Check& check, const engine::Weight& w, const Tensor& t,
                                 const char* argument);

// Fails unless all of `projections`, which read the same tokens, have scales of groups, or none has
// and the format is int8.
void check_activations(const Check& check, const engine::Projection* projections, int64_t count,
                       engine::ActivationFormat format, const char* const* arguments);

}  // namespace bitnet::ops
