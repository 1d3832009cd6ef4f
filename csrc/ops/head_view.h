// A head's tensors, checked, as engine/head.h takes them: what lm_head, embedding and programs
// have in common.
#pragma once

#include <optional>

#include "engine/head.h"
#include "ops/checks.h"

namespace bitnet::ops {

// Whether these are a ternary matrix and its scales; those of int4 tiles are bfloat16.
bool is_ternary_head(const Tensor& weight, const std::optional<Tensor>& scale);

// weight F [V, k], int8 [V, k] with scale float32 [V], uint8 tiles with their bfloat16 scales, or a
// ternary matrix with scales of groups (ops/group_scales.h).
// k < 0: as many features as the weight has.
engine::HeadView head_view(const Check& check, const Tensor& weight,
                           const std::optional<Tensor>& scale, int64_t k,
                           std::optional<int64_t> rows);

}  // namespace bitnet::ops
