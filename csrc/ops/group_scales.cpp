// The checks of group_scales.h.
#include "ops/group_scales.h"

#include "format/layout.h"
#include "ops/weight_view.h"

namespace bitnet::ops {

using engine::ActivationFormat;
using engine::GroupScales;
using engine::Projection;
using engine::Weight;

engine::ActivationFormat activation_format(const Check& check, const std::string& name) {
  if (name == "int8") return ActivationFormat::kInt8;
  if (name == "int8_group") return ActivationFormat::kInt8Group;
  if (name == "int16_group") return ActivationFormat::kInt16Group;
  check.fail("activation_format", "int8, int8_group or int16_group", name);
}

GroupScales group_scales(const Check& check, const Weight& w, const Tensor& t,
                         const char* argument) {
  const int64_t small = engine::groups_for(w.k, engine::kSmallGroup);
  const bool blocked = t.dim() == 3;
  const bool half = blocked && t.scalar_type() == ScalarType::Half;
  if (!half) check.dtype(t, argument, ScalarType::Float);
  if (blocked && w.format == engine::WeightFormat::kCanonical)
    check.fail(argument, "of shape [N, groups] beside canonical rows", "3 dimensions");
  // K up to 64 is one group either way
  const bool halves = t.dim() > 1 && t.size(1) == small && small > layout::blocks_for(w.k);
  const int64_t group = halves ? engine::kSmallGroup : engine::kGroupWeights;
  const int64_t groups = engine::groups_for(w.k, group);
  const Shape expected =
      blocked ? Shape{w.row_blocks, groups, w.block_rows} : Shape{w.n_rows, groups};
  check.shape(t, argument, expected);
  check.contiguous(t, argument);
  return {t.const_data_ptr(), half ? DType::kF16 : DType::kF32, blocked, group};
}

Projection scaled_projection(const Check& check, const Weight& w, const Tensor& t,
                             const char* argument, DType type, void* out) {
  if (t.dim() < 2) {
    if (w.format != engine::WeightFormat::kCanonical)
      check_tile_columns(check, "in_features", w.k, false);
    check.weight_scale(t, argument, w.n_rows);
    return engine::make_projection(w, data<float>(t), t.numel(), type, out);
  }
  Projection p = engine::make_projection(w, nullptr, 1, type, out);
  p.groups = group_scales(check, w, t, argument);
  return p;
}

void check_activations(const Check& check, const Projection* projections, int64_t count,
                       ActivationFormat format, const char* const* arguments) {
  for (int64_t i = 0; i < count; ++i) {
    if (projections[i].group() != projections[0].group()) {
      const int64_t size = projections[i].group();
      check.fail(arguments[i], std::string("of groups like ") + arguments[0] + ", or neither",
                 size == 0 ? "none" : "groups of " + std::to_string(size));
    }
  }
  if (format != ActivationFormat::kInt8 && !projections[0].grouped())
    check.fail("activation_format",
               std::string("int8 for weights without scales of groups (") + arguments[0] + ")",
               format == ActivationFormat::kInt8Group ? "int8_group" : "int16_group");
}

}  // namespace bitnet::ops
