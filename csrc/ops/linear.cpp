// quantize_activations, gemv, gemm, linear: checks and results; engine/products/product.h does the
// rest.
#include "engine/products/product.h"

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
  if (weight.format != engine::WeightFormat::kCanonical)
    check_tile_columns(check, "in_features", weight.k, false);
  const bool scaled = wants_float(check, x_scale, weight_scale, tokens, weight.n_rows);
  const Tensor x = as_contiguous(x_in);
  const KernelTable& kernels = active_kernels();
  TokenBuffer buffer(kernels, tokens, weight.k, 0, engine::ActivationFormat::kInt8,
                     weight.reads_rows());
  buffer.copy_quantized(kernels, data<int8_t>(x), scaled ? data<float>(*x_scale) : nullptr);
  Tensor out = empty(out_shape, scaled ? ScalarType::Float : ScalarType::Int);
  void* memory = out.mutable_data_ptr();
  const Projection projection =
      scaled ? engine::make_projection(weight, data<float>(*weight_scale), weight_scale->numel(),
                                       DType::kF32, memory)
             : engine::make_sums(weight, static_cast<int32_t*>(memory));
  engine::multiply(kernels, buffer.view(), &projection, 1);
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_activations(const Tensor& x_in, std::string activation_format,
                                                int64_t group_size) {
  const Check check("quantize_activations");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  const Shape shape = shape_of(x_in);
  const int64_t k = shape.back();
  if (k < 1) check.fail("x", "with at least one feature in the last dimension", "0");
  const engine::ActivationFormat format = ops::activation_format(check, activation_format);
  if (group_size != engine::kGroupWeights && group_size != engine::kSmallGroup)
    check.fail("group_size", "128 or 64", std::to_string(group_size));
  const bool wide = format == engine::ActivationFormat::kInt16Group;
  const Tensor x = as_contiguous(x_in);
  Tensor q = empty(shape, wide ? ScalarType::Short : ScalarType::Char);
  if (format == engine::ActivationFormat::kInt8) {
    Tensor scale = empty(Shape(shape.begin(), shape.end() - 1), ScalarType::Float);
    engine::quantize_rows(rows_view(x), mutable_data<int8_t>(q), mutable_data<float>(scale));
    return {std::move(q), std::move(scale)};
  }
  Shape scales = shape;
  scales.back() = engine::groups_for(k, group_size);
  Tensor scale = empty(scales, ScalarType::Float);
  TokenBuffer tokens(active_kernels(), rows_of(shape), k, group_size, format);
  tokens.quantize(active_kernels(), x.const_data_ptr(), dtype_of(x));
  const engine::QuantizedTokens& from = tokens.view();
  if (wide) {
    from.copy_codes(mutable_data<int16_t>(q), mutable_data<float>(scale));
  } else {
    from.copy_codes(mutable_data<int8_t>(q), mutable_data<float>(scale));
  }
  return {std::move(q), std::move(scale)};
}

Tensor gemv(const Tensor& weight, const Tensor& x, const std::optional<Tensor>& x_scale,
            const std::optional<Tensor>& weight_scale, OptionalInts shape) {
  const Check check("gemv");
  const auto [stated] = matrix_shapes<1>(check, shape);
  check.dtype(x, "x", ScalarType::Char);
  check.dim(x, "x", 1);
  const Weight w = weight_view(check, weight, "weight", x.size(0), stated);
  return ternary_matmul(check, w, x, x_scale, weight_scale, 1, {w.n_rows});
}

Tensor gemm(const Tensor& weight, const Tensor& x, const std::optional<Tensor>& x_scale,
            const std::optional<Tensor>& weight_scale, OptionalInts shape) {
  const Check check("gemm");
  const auto [stated] = matrix_shapes<1>(check, shape);
  check.dtype(x, "x", ScalarType::Char);
  check.dim(x, "x", 2);
  const Weight w = weight_view(check, weight, "weight", x.size(1), stated);
  return ternary_matmul(check, w, x, x_scale, weight_scale, x.size(0), {x.size(0), w.n_rows});
}

Tensor linear(const Tensor& x_in, const Tensor& weight, const Tensor& weight_scale,
              const std::optional<Tensor>& bias, OptionalInts weight_shape,
              std::string activation_format) {
  const Check check("linear");
  const auto [stated] = matrix_shapes<1>(check, weight_shape);
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  Shape shape = shape_of(x_in);
  const Weight w = weight_view(check, weight, "weight", shape.back(), stated);
  Projection projection =
      scaled_projection(check, w, weight_scale, "weight_scale", dtype_of(x_in), nullptr);
  if (bias.has_value()) check.vector(*bias, "bias", w.n_rows);
  const engine::ActivationFormat format = ops::activation_format(check, activation_format);
  static constexpr const char* kScale[] = {"weight_scale"};
  check_activations(check, &projection, 1, format, kScale);

  const Tensor x = as_contiguous(x_in);
  const KernelTable& kernels = active_kernels();
  TokenBuffer tokens(kernels, rows_of(shape), w.k, projection.group(), format, w.reads_rows());
  tokens.quantize(kernels, x.const_data_ptr(), dtype_of(x));
  shape.back() = w.n_rows;
  Tensor out = empty(shape, x.scalar_type());
  projection.out.data = out.mutable_data_ptr();
  std::optional<FloatVector> bias_values;
  if (bias.has_value()) projection.bias = bias_values.emplace(*bias).get();
  engine::multiply(kernels, tokens.view(), &projection, 1);
  return out;
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, quantize_activations);
  BITNET_OP(m, gemv);
  BITNET_OP(m, gemm);
  BITNET_OP(m, linear);
}

}  // namespace bitnet::ops
