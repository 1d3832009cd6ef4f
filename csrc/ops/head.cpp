// quantize_head, lm_head, embedding: checks, results, and the view of a head's tensors.
#include "ops/checks.h"
#include "ops/group_scales.h"
#include "ops/head_view.h"
#include "ops/register.h"
#include "ops/weight_view.h"
#include "runtime/pages.h"

namespace bitnet::ops {
namespace {

std::string text(int64_t n) { return std::to_string(n); }

void check_in_features(const Check& check, int64_t k) {
  if (k < 1 || k > layout::kHeadMaxK)
    check.fail("weight", "with 1 to " + text(layout::kHeadMaxK) + " features for a quantised head",
               text(k));
}

// A head of float32, bfloat16 or float16 rows.
engine::HeadView dense_view(const Check& check, const Tensor& weight,
                            const std::optional<Tensor>& scale, int64_t k) {
  check.float_dtype(weight, "weight");
  check.dim(weight, "weight", 2);
  check.contiguous(weight, "weight");
  if (scale.has_value())
    check.fail("scale", "left out for a float weight",
               "a tensor of " + shape_text(shape_of(*scale)));
  check.shape(weight, "weight", {weight.size(0), k < 0 ? weight.size(1) : k});
  return {engine::HeadFormat::kDense,
          dtype_of(weight),
          weight.const_data_ptr(),
          nullptr,
          weight.size(0),
          weight.size(1),
          0,
          engine::head_prefetch()};
}

const Tensor& required_scale(const Check& check, const std::optional<Tensor>& scale) {
  if (!scale.has_value())
    check.fail("scale", "with a quantised weight (quantize_head returns both)", "none");
  check.contiguous(*scale, "scale");
  return *scale;
}

engine::HeadView int8_view(const Check& check, const Tensor& weight,
                           const std::optional<Tensor>& scale, int64_t k) {
  check.dtype(weight, "weight", ScalarType::Char);
  check.dim(weight, "weight", 2);
  check.contiguous(weight, "weight");
  check.shape(weight, "weight", {weight.size(0), k < 0 ? weight.size(1) : k});
  check_in_features(check, weight.size(1));
  const Tensor& scales = required_scale(check, scale);
  check.dtype(scales, "scale", ScalarType::Float);
  check.shape(scales, "scale", {weight.size(0)});
  return {engine::HeadFormat::kInt8,
          DType::kF32,
          weight.const_data_ptr(),
          scales.const_data_ptr(),
          weight.size(0),
          weight.size(1),
          0,
          engine::head_prefetch()};
}

// The group size follows from the shapes: lines = groups * group / 8.
engine::HeadView int4_view(const Check& check, const Tensor& weight,
                           const std::optional<Tensor>& scale, int64_t k,
                           std::optional<int64_t> rows_in) {
  check.dtype(weight, "weight", ScalarType::Byte);
  check.dim(weight, "weight", 3);
  check.contiguous(weight, "weight");
  const Tensor& scales = required_scale(check, scale);
  check.dtype(scales, "scale", ScalarType::BFloat16);
  check.dim(scales, "scale", 3);
  const int64_t tiles = weight.size(0), lines = weight.size(1), groups = scales.size(1);
  check.shape(weight, "weight", {tiles, lines, layout::kHeadStepBytes});
  check.shape(scales, "scale", {tiles, groups, layout::kHeadTileRows});
  const int64_t group = groups == 0 ? 0 : lines * layout::kHeadStepFeatures / groups;
  if ((group != 64 && group != 128) || group * groups != lines * layout::kHeadStepFeatures)
    check.fail("scale", "with one group per 8 or 16 of the weight's " + text(lines) + " lines",
               text(groups) + " groups");
  if (k < 0) k = lines * layout::kHeadStepFeatures;
  check_in_features(check, k);
  if ((k + group - 1) / group != groups)
    check.fail("weight",
               "with " + text((k + group - 1) / group) + " groups of " + text(group) +
                   " features for " + text(k) + " features",
               text(groups));
  const int64_t padded = tiles * layout::kHeadTileRows, rows = rows_in.value_or(padded);
  if (rows < 0 || rows > padded || rows <= padded - layout::kHeadTileRows)
    check.fail("shape", "with rows that fill " + text(tiles) + " tiles of 16", text(rows));
  return {engine::HeadFormat::kInt4,
          DType::kF32,
          weight.const_data_ptr(),
          scales.const_data_ptr(),
          rows,
          k,
          group,
          engine::head_prefetch()};
}

// A ternary matrix with scales of groups, in any layout of weights.
engine::HeadView ternary_view(const Check& check, const Tensor& weight, const Tensor& scale,
                              int64_t k, std::optional<int64_t> rows) {
  if (k < 0) check.fail("shape", "given for a ternary weight, whose rows are padded", "none");
  check_in_features(check, k);
  engine::HeadView view{engine::HeadFormat::kTernary,
                        DType::kF32,
                        weight.const_data_ptr(),
                        scale.const_data_ptr(),
                        0,
                        k,
                        0,
                        engine::head_prefetch()};
  view.ternary = weight_view(check, weight, "weight", k, rows);
  view.ternary_scales = group_scales(check, view.ternary, scale, "scale");
  view.group = view.ternary_scales.group;
  view.rows = view.ternary.n_rows;
  return view;
}

}  // namespace

bool is_ternary_head(const Tensor& weight, const std::optional<Tensor>& scale) {
  if (weight.scalar_type() != ScalarType::Byte || !scale.has_value() || !scale->defined())
    return false;
  return scale->scalar_type() == ScalarType::Float || scale->scalar_type() == ScalarType::Half;
}

engine::HeadView head_view(const Check& check, const Tensor& weight,
                           const std::optional<Tensor>& scale, int64_t k,
                           std::optional<int64_t> rows) {
  if (!weight.defined()) check.fail("weight", "to be a tensor", "None");
  const ScalarType type = weight.scalar_type();
  if (is_ternary_head(weight, scale)) return ternary_view(check, weight, *scale, k, rows);
  if (type == ScalarType::Byte) return int4_view(check, weight, scale, k, rows);
  const engine::HeadView view = type == ScalarType::Char ? int8_view(check, weight, scale, k)
                                                         : dense_view(check, weight, scale, k);
  if (rows.value_or(view.rows) != view.rows)
    check.fail("shape", "with the weight's rows " + text(view.rows), text(*rows));
  return view;
}

std::tuple<Tensor, Tensor> quantize_head(const Tensor& weight_in, std::string format,
                                         int64_t group_size) {
  const Check check("quantize_head");
  check.float_dtype(weight_in, "weight");
  check.dim(weight_in, "weight", 2);
  check_in_features(check, weight_in.size(1));
  if (format != "int8" && format != "int4")
    check.fail("format", "\"int8\" or \"int4\"", "\"" + format + "\"");
  if (group_size != 64 && group_size != 128)
    check.fail("group_size", "64 or 128", text(group_size));
  const Tensor weight = as_contiguous(weight_in);
  const engine::Rows rows = rows_view(weight);
  const bool int8 = format == "int8";
  const int64_t tiles = layout::head_tiles(rows.count);
  const int64_t groups = (rows.width + group_size - 1) / group_size;
  const int64_t lines = groups * group_size / layout::kHeadStepFeatures;
  Tensor packed = int8 ? empty({rows.count, rows.width}, ScalarType::Char)
                       : empty({tiles, lines, layout::kHeadStepBytes}, ScalarType::Byte);
  Tensor scale = int8 ? empty({rows.count}, ScalarType::Float)
                      : empty({tiles, groups, layout::kHeadTileRows}, ScalarType::BFloat16);
  // fresh memory that a step reads once a token; a rejection is no error
  static_cast<void>(prepare_pages(packed.const_data_ptr(), packed.numel()));
  const int64_t bad =
      int8 ? engine::quantize_head_int8(rows, mutable_data<int8_t>(packed),
                                        mutable_data<float>(scale))
           : engine::quantize_head_int4(rows, group_size, mutable_data<uint8_t>(packed),
                                        mutable_data<uint16_t>(scale));
  if (bad >= 0)
    check.fail("weight", "finite",
               "a NaN or an infinity in row" +
                   (int8 ? " " + text(bad) : "s " + text(bad) + " and the 15 behind it"));
  return {std::move(packed), std::move(scale)};
}

Tensor lm_head(const Tensor& x_in, const Tensor& weight, std::optional<Tensor> scale,
               OptionalInts weight_shape) {
  const Check check("lm_head");
  const auto [stated] = matrix_shapes<1>(check, weight_shape);
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  Shape shape = shape_of(x_in);
  check.in_features(stated.columns, shape.back());
  const engine::HeadView head = head_view(check, weight, scale, shape.back(), stated.rows);
  const int64_t tokens = rows_of(shape);
  shape.back() = head.rows;
  Tensor logits = empty(shape, ScalarType::Float);
  if (logits.numel() == 0) return logits;  // of no features and no rows there may be many tokens
  const Tensor x = as_contiguous(x_in);
  engine::lm_head(head, {dtype_of(x), tokens, head.k, const_cast<void*>(x.const_data_ptr())},
                  mutable_data<float>(logits));
  return logits;
}

Tensor embedding(const Tensor& ids_in, const Tensor& weight, std::optional<Tensor> scale,
                 OptionalInts weight_shape) {
  const Check check("embedding");
  const auto [stated] = matrix_shapes<1>(check, weight_shape);
  check.dtype(ids_in, "ids", ScalarType::Long);
  const engine::HeadView head =
      head_view(check, weight, scale, stated.columns.value_or(-1), stated.rows);
  const Tensor ids = as_contiguous(ids_in);
  const int64_t count = ids.numel();
  // Copied before they are checked, for they become addresses: another thread may write to ids.
  Scratch<int64_t> copy(count);
  std::copy_n(static_cast<const int64_t*>(ids.const_data_ptr()), count, copy.get());
  const int64_t* id = copy.get();
  for (int64_t i = 0; i < count; ++i) {
    if (id[i] < 0 || id[i] >= head.rows)
      check.fail("ids", "from 0 to " + text(head.rows - 1), text(id[i]));
  }
  Shape shape = shape_of(ids);
  shape.push_back(head.k);
  Tensor rows = empty(shape, ScalarType::Float);
  engine::embed(head, id, count, mutable_data<float>(rows));
  return rows;
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, quantize_head);
  BITNET_OP(m, lm_head);
  BITNET_OP(m, embedding);
}

}  // namespace bitnet::ops
