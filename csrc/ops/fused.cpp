// qkv_forward and mlp_forward: checks and results; engine/fused.h does the rest.
#include "engine/fused.h"

#include <cmath>

#include "ops/checks.h"
#include "ops/group_scales.h"
#include "ops/register.h"
#include "ops/weight_view.h"

namespace bitnet::ops {
namespace {

using engine::Projection;
using engine::Weight;

void check_input(const Check& check, const Tensor& x, const Tensor& norm_weight, double eps) {
  check.float_dtype(x, "x");
  check.min_dim(x, "x", 1);
  check.vector(norm_weight, "norm_weight", x.size(x.dim() - 1));
  if (!(eps >= 0.0 && std::isfinite(eps)))
    check.fail("eps", "finite and not negative", std::to_string(eps));
}

Shape with_last(Shape shape, int64_t last) {
  shape.back() = last;
  return shape;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> qkv_forward(const Tensor& x_in, const Tensor& norm_weight,
                                               const Tensor& q_weight, const Tensor& q_scale,
                                               const Tensor& k_weight, const Tensor& k_scale,
                                               const Tensor& v_weight, const Tensor& v_scale,
                                               double eps, OptionalInts shapes,
                                               std::string activation_format) {
  const Check check("qkv_forward");
  check_input(check, x_in, norm_weight, eps);
  const auto [q_shape, k_shape, v_shape] = matrix_shapes<3>(check, shapes);
  const Shape shape = shape_of(x_in);
  const Weight wq = weight_view(check, q_weight, "q_weight", shape.back(), q_shape);
  const Weight wk = weight_view(check, k_weight, "k_weight", shape.back(), k_shape);
  const Weight wv = weight_view(check, v_weight, "v_weight", shape.back(), v_shape);
  const engine::ActivationFormat format = ops::activation_format(check, activation_format);
  const Tensor x = as_contiguous(x_in);
  const FloatVector norm(norm_weight);
  Tensor q = empty(with_last(shape, wq.n_rows), x.scalar_type());
  Tensor k = empty(with_last(shape, wk.n_rows), x.scalar_type());
  Tensor v = empty(with_last(shape, wv.n_rows), x.scalar_type());
  static constexpr const char* kScales[] = {"q_scale", "k_scale", "v_scale"};
  const auto projection = [&](const Weight& w, const Tensor& scale, int i, Tensor& out) {
    return scaled_projection(check, w, scale, kScales[i], dtype_of(x), out.mutable_data_ptr());
  };
  const Projection projections[] = {projection(wq, q_scale, 0, q), projection(wk, k_scale, 1, k),
                                    projection(wv, v_scale, 2, v)};
  check_activations(check, projections, 3, format, kScales);
  engine::norm_and_multiply(rows_view(x), {norm.get(), static_cast<float>(eps)}, projections, 3,
                            format);
  return {std::move(q), std::move(k), std::move(v)};
}

Tensor mlp_forward(const Tensor& x_in, const Tensor& norm_weight, const Tensor& gate_weight,
                   const Tensor& gate_scale, const Tensor& up_weight, const Tensor& up_scale,
                   std::optional<Tensor> sub_norm_weight, const Tensor& down_weight,
                   const Tensor& down_scale, double eps, std::string activation,
                   OptionalInts shapes, std::string activation_format) {
  const Check check("mlp_forward");
  check_input(check, x_in, norm_weight, eps);
  const auto [gate_shape, up_shape, down_shape] = matrix_shapes<3>(check, shapes);
  const Shape shape = shape_of(x_in);
  const Weight gate = weight_view(check, gate_weight, "gate_weight", shape.back(), gate_shape);
  const Weight up = weight_view(check, up_weight, "up_weight", shape.back(), up_shape);
  static constexpr const char* kScales[] = {"gate_scale", "up_scale", "down_scale"};
  const Projection gate_up[] = {
      scaled_projection(check, gate, gate_scale, kScales[0], DType::kF32, nullptr),
      scaled_projection(check, up, up_scale, kScales[1], DType::kF32, nullptr)};
  const engine::ActivationFormat format = ops::activation_format(check, activation_format);
  check_activations(check, gate_up, 2, format, kScales);
  const int64_t inner = gate.n_rows;
  if (up.n_rows != inner)
    check.fail("up_weight", "with the rows of gate_weight (" + std::to_string(inner) + ")",
               std::to_string(up.n_rows));
  if (down_shape.columns.value_or(inner) != inner)
    check.fail("gate_weight",
               "with the " + std::to_string(*down_shape.columns) +
                   " input features of down_weight (shape) as rows",
               std::to_string(inner));
  const Weight down = weight_view(check, down_weight, "down_weight", inner, down_shape.rows);
  const Projection down_projection =
      scaled_projection(check, down, down_scale, kScales[2], dtype_of(x_in), nullptr);
  check_activations(check, &down_projection, 1, format, kScales + 2);
  if (sub_norm_weight.has_value()) check.vector(*sub_norm_weight, "sub_norm_weight", inner);
  const engine::GatedRow gated = activation_row(check, activation);

  const Tensor x = as_contiguous(x_in);
  const FloatVector norm(norm_weight);
  std::optional<FloatVector> sub_norm;
  if (sub_norm_weight.has_value()) sub_norm.emplace(*sub_norm_weight);
  Tensor out = empty(with_last(shape, down.n_rows), x.scalar_type());
  const engine::Mlp m{
      .norm = {norm.get(), static_cast<float>(eps)},
      .sub_norm = {sub_norm.has_value() ? sub_norm->get() : nullptr, static_cast<float>(eps)},
      .gate_up = {gate_up[0], gate_up[1]},
      .down = down_projection,
      .activations = format,
      .activation = gated,
  };
  engine::mlp(rows_view(x), m, rows_view(out));
  return out;
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, qkv_forward);
  BITNET_OP(m, mlp_forward);
}

}  // namespace bitnet::ops
