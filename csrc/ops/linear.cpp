// quantize_activations, quantize_activation_groups, gemv, gemm, linear, group_linear: checks and
// results; engine/product.h does the rest.
#include "engine/product.h"

#include "format/layout.h"
#include "ops/checks.h"
#include "ops/group_scales.h"
#include "ops/register.h"
#include "ops/weight_view.h"

namespace bitnet::ops {
namespace {

using engine::Projection;
using engine::TokenBuffer;
using engine::Weight;

// gemv and gemm: either no scale (int32 sums) or both.
bool wants_float(const Check& check, const std::optional<Tensor>& x_scale,
                 const std::optional<Tensor>& weight_scale, int64_t tokens, int64_t n) {
  if (x_scale.has_value() != weight_scale.has_value())
    check.fail("x_scale and weight_scale",
               "either both (float32 result) or neither (exact int32 sums)",
               x_scale.has_value() ? "only x_scale" : "only weight_scale");
  if (!x_scale.has_value()) return false;
  check.dtype(*x_scale, "x_scale", ScalarType::Float);
  check.contiguous(*x_scale, "x_scale");
  if (x_scale->numel() != tokens)
    check.fail("x_scale", "with one element per token (" + std::to_string(tokens) + ")",
               std::to_string(x_scale->numel()) + " elements");
  check.weight_scale(*weight_scale, "weight_scale", n);
  return true;
}

Tensor ternary_matmul(const Check& check, const Weight& weight, const Tensor& x_in,
                      const std::optional<Tensor>& x_scale,
                      const std::optional<Tensor>& weight_scale, int64_t tokens,
                      const Shape& out_shape) {
  const bool scaled = wants_float(check, x_scale, weight_scale, tokens, weight.n_rows);
  const Tensor x = as_contiguous(x_in);
  const KernelTable& table = kernels();
  TokenBuffer rows(table, tokens, weight.k);
  rows.copy_quantized(table, data<int8_t>(x), scaled ? data<float>(*x_scale) : nullptr);
  Tensor out = empty(out_shape, scaled ? ScalarType::Float : ScalarType::Int);
  void* memory = out.mutable_data_ptr();
  const Projection projection =
      scaled ? engine::make_projection(weight, data<float>(*weight_scale), weight_scale->numel(),
                                       DType::kF32, memory)
             : engine::make_sums(weight, static_cast<int32_t*>(memory));
  engine::multiply(table, rows.view(), &projection, 1);
  return out;
}

// x [..., K] of a float type; the shape of the result.
Shape check_x(const Check& check, const Tensor& x, std::optional<int64_t> in_features) {
  check.float_dtype(x, "x");
  check.min_dim(x, "x", 1);
  Shape shape = shape_of(x);
  check.in_features(in_features, shape.back());
  return shape;
}

// Float activations x any projection of them; `shape`: of the result.
Tensor project(const Tensor& x_in, Projection projection, const std::optional<Tensor>& bias,
               Shape shape, engine::ActivationFormat format) {
  const Weight& weight = *projection.weight;
  const int64_t tokens = rows_of(shape);
  const Tensor x = as_contiguous(x_in);
  const KernelTable& table = kernels();
  TokenBuffer rows(table, tokens, weight.k, projection.group(), format);
  rows.quantize(table, x.const_data_ptr(), dtype_of(x));
  shape.back() = weight.n_rows;
  Tensor out = empty(shape, x.scalar_type());
  projection.out.data = out.mutable_data_ptr();
  std::optional<FloatVector> bias_values;
  if (bias.has_value()) projection.bias = bias_values.emplace(*bias).get();
  engine::multiply(table, rows.view(), &projection, 1);
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_activations(const Tensor& x_in) {
  const Check check("quantize_activations");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  const Shape shape = shape_of(x_in);
  if (shape.back() < 1) check.fail("x", "with at least one feature in the last dimension", "0");
  const Tensor x = as_contiguous(x_in);
  Tensor q = empty(shape, ScalarType::Char);
  Tensor scale = empty(Shape(shape.begin(), shape.end() - 1), ScalarType::Float);
  engine::quantize_rows(rows_view(x), mutable_data<int8_t>(q), mutable_data<float>(scale));
  return {std::move(q), std::move(scale)};
}

std::tuple<Tensor, Tensor> quantize_activation_groups(const Tensor& x_in,
                                                      std::string activation_format,
                                                      int64_t group_size) {
  const Check check("quantize_activation_groups");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  const Shape shape = shape_of(x_in);
  const int64_t k = shape.back(), tokens = rows_of(shape);
  if (k < 1) check.fail("x", "with at least one feature in the last dimension", "0");
  const engine::ActivationFormat format = ops::activation_format(check, activation_format);
  if (format == engine::ActivationFormat::kInt8)
    check.fail("activation_format", "int8_group or int16_group", "int8 (quantize_activations)");
  if (group_size != engine::kGroupWeights && group_size != engine::kSmallGroup)
    check.fail("group_size", "128 or 64", std::to_string(group_size));
  const bool wide = format == engine::ActivationFormat::kInt16Group;
  Shape scales = shape;
  scales.back() = engine::groups_for(k, group_size);
  Tensor q = empty(shape, wide ? ScalarType::Short : ScalarType::Char);
  Tensor scale = empty(scales, ScalarType::Float);
  const Tensor x = as_contiguous(x_in);
  TokenBuffer rows(kernels(), tokens, k, group_size, format);
  rows.quantize(kernels(), x.const_data_ptr(), dtype_of(x));
  const engine::QuantizedTokens& from = rows.view();
  if (wide) {
    from.copy_codes(mutable_data<int16_t>(q), mutable_data<float>(scale));
  } else {
    from.copy_codes(mutable_data<int8_t>(q), mutable_data<float>(scale));
  }
  return {std::move(q), std::move(scale)};
}

Tensor gemv(const Tensor& weight, const Tensor& x, const std::optional<Tensor>& x_scale,
            const std::optional<Tensor>& weight_scale, std::optional<int64_t> out_features,
            std::optional<int64_t> in_features) {
  const Check check("gemv");
  check.dtype(x, "x", ScalarType::Char);
  check.dim(x, "x", 1);
  check.in_features(in_features, x.size(0));
  const Weight w = weight_view(check, weight, "weight", x.size(0), out_features);
  return ternary_matmul(check, w, x, x_scale, weight_scale, 1, {w.n_rows});
}

Tensor gemm(const Tensor& weight, const Tensor& x, const std::optional<Tensor>& x_scale,
            const std::optional<Tensor>& weight_scale, std::optional<int64_t> out_features,
            std::optional<int64_t> in_features) {
  const Check check("gemm");
  check.dtype(x, "x", ScalarType::Char);
  check.dim(x, "x", 2);
  check.in_features(in_features, x.size(1));
  const Weight w = weight_view(check, weight, "weight", x.size(1), out_features);
  return ternary_matmul(check, w, x, x_scale, weight_scale, x.size(0), {x.size(0), w.n_rows});
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
              const std::optional<Tensor>& bias, std::optional<int64_t> out_features,
              std::optional<int64_t> in_features) {
  const Check check("linear");
  const Shape shape = check_x(check, x, in_features);
  const Weight w = weight_view(check, weight, "weight", shape.back(), out_features);
  check.weight_scale(weight_scale, "weight_scale", w.n_rows);
  if (bias.has_value()) check.vector(*bias, "bias", w.n_rows);
  return project(x,
                 engine::make_projection(w, data<float>(weight_scale), weight_scale.numel(),
                                         dtype_of(x), nullptr),
                 bias, shape, engine::ActivationFormat::kInt8);
}

Tensor group_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                    const std::optional<Tensor>& bias, std::optional<int64_t> out_features,
                    std::optional<int64_t> in_features, const std::string& activation_format) {
  const Check check("group_linear");
  const Shape shape = check_x(check, x, in_features);
  const Weight w = weight_view(check, weight, "weight", shape.back(), out_features);
  Projection projection = engine::make_projection(w, nullptr, 1, dtype_of(x), nullptr);
  projection.groups = group_scales(check, w, weight_scale, "weight_scale");
  if (bias.has_value()) check.vector(*bias, "bias", w.n_rows);
  return project(x, projection, bias, shape, ops::activation_format(check, activation_format));
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, quantize_activations);
  BITNET_OP(m, quantize_activation_groups);
  BITNET_OP(m, gemv);
  BITNET_OP(m, gemm);
  BITNET_OP(m, linear);
  BITNET_OP(m, group_linear);
}

}  // namespace bitnet::ops
