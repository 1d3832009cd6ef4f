// rms_norm, add_rms_norm, gated, relu2_mul, silu_and_mul, gelu_tanh_and_mul, hadamard, rope: checks
// and results; engine/row_ops.h does the rest.
#include "engine/row_ops.h"

#include <cmath>
#include <vector>

#include "ops/checks.h"
#include "ops/register.h"

namespace bitnet::ops {
namespace {

void check_norm(const Check& check, const Tensor& x, const Tensor& weight, double eps) {
  check.float_dtype(x, "x");
  check.min_dim(x, "x", 1);
  if (x.size(x.dim() - 1) < 1)
    check.fail("x", "with at least one feature in the last dimension", "0");
  check.vector(weight, "weight", x.size(x.dim() - 1));
  if (!(eps >= 0.0 && std::isfinite(eps)))
    check.fail("eps", "finite and not negative", std::to_string(eps));
}

// gate and up of one type and shape.
Tensor gated_of(const Check& check, const Tensor& gate_in, const Tensor& up_in,
                engine::GatedRow activation) {
  check.float_dtype(gate_in, "gate");
  if (activation == active_kernels().relu2_mul_row && gate_in.scalar_type() == ScalarType::Half)
    check.fail("gate",
               "of dtype float32 or bfloat16 (relu(gate)^2 * up passes 65504 in healthy models)",
               "float16");
  check.min_dim(gate_in, "gate", 1);
  check.dtype(up_in, "up", gate_in.scalar_type());
  check.same_shape(up_in, "up", gate_in, "gate");
  const Tensor gate = as_contiguous(gate_in), up = as_contiguous(up_in);
  Tensor y = empty(shape_of(gate), gate.scalar_type());
  const engine::Rows rows = rows_view(gate);
  engine::gated(rows, rows_view(up), activation, rows_like(rows, y));
  return y;
}

}  // namespace

Tensor rms_norm(const Tensor& x_in, const Tensor& weight, double eps) {
  const Check check("rms_norm");
  check_norm(check, x_in, weight, eps);
  const Tensor x = as_contiguous(x_in);
  Tensor y = empty(shape_of(x), x.scalar_type());
  const FloatVector values(weight);
  const engine::Rows rows = rows_view(x);
  engine::rms_norm(rows, values.get(), static_cast<float>(eps), rows_like(rows, y));
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x_in, const Tensor& residual_in,
                                        const Tensor& weight, double eps) {
  const Check check("add_rms_norm");
  check_norm(check, x_in, weight, eps);
  check.dtype(residual_in, "residual", x_in.scalar_type());
  check.same_shape(residual_in, "residual", x_in, "x");
  const Tensor x = as_contiguous(x_in), residual = as_contiguous(residual_in);
  Tensor y = empty(shape_of(x), x.scalar_type()), sum = empty(shape_of(x), x.scalar_type());
  const FloatVector values(weight);
  const engine::Rows rows = rows_view(x);
  engine::add_rms_norm(rows, rows_view(residual), values.get(), static_cast<float>(eps),
                       rows_like(rows, y), rows_like(rows, sum));
  return {std::move(y), std::move(sum)};
}

Tensor relu2_mul(const Tensor& gate_in, const Tensor& up_in) {
  return gated_of(Check("relu2_mul"), gate_in, up_in, active_kernels().relu2_mul_row);
}

namespace {

// x [..., 2 d], gate then up, under one activation.
Tensor gated_halves(const Check& check, const Tensor& x_in, engine::GatedRow activation) {
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  Shape shape = shape_of(x_in);
  if (shape.back() % 2 != 0)
    check.fail("x", "with an even last dimension (gate, then up)", std::to_string(shape.back()));
  const Tensor x = as_contiguous(x_in);
  shape.back() /= 2;
  Tensor y = empty(shape, x.scalar_type());
  engine::gated(rows_view(x), activation, rows_view(y));
  return y;
}

}  // namespace

Tensor silu_and_mul(const Tensor& x) {
  return gated_halves(Check("silu_and_mul"), x, active_kernels().silu_mul_row);
}

Tensor gelu_tanh_and_mul(const Tensor& x) {
  return gated_halves(Check("gelu_tanh_and_mul"), x, active_kernels().gelu_mul_row);
}

Tensor gated(const Tensor& gate, const Tensor& up, std::string activation) {
  const Check check("gated");
  const engine::GatedRow row = activation == "sigmoid"
                                   ? active_kernels().sigmoid_mul_row
                                   : engine::gated_row(active_kernels(), activation);
  if (row == nullptr)
    check.fail("activation", "relu2, silu, gelu_pytorch_tanh or sigmoid", activation);
  return gated_of(check, gate, up, row);
}

Tensor hadamard(const Tensor& x_in, const Tensor& signs, bool inverse) {
  const Check check("hadamard");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  check.dtype(signs, "signs", ScalarType::Float);
  check.dim(signs, "signs", 2);
  check.contiguous(signs, "signs");
  const int64_t k = x_in.size(x_in.dim() - 1), block = signs.size(1);
  check_block(check, "signs", block, k);
  check.shape(signs, "signs", {k / block, block});
  const Tensor x = as_contiguous(x_in);
  Tensor y = empty(shape_of(x), x.scalar_type());
  const engine::Rows rows = rows_view(x);
  engine::hadamard(rows, data<float>(signs), block, inverse, rows_like(rows, y));
  return y;
}

Tensor rope(const Tensor& x_in, const Tensor& positions_in, const Tensor& inv_freq_in,
            double attention_factor, OptionalInts sections) {
  const Check check("rope");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 2);
  const Shape shape = shape_of(x_in);
  const int64_t dim = shape.back(), heads = shape[shape.size() - 2];
  constexpr int64_t kLargestHead = 65536;
  if (!(dim % 2 == 0 && dim >= 2 && dim <= kLargestHead))
    check.fail("x", "with an even head dimension from 2 to " + std::to_string(kLargestHead),
               std::to_string(dim));
  check.dtype(positions_in, "positions", ScalarType::Long);
  Shape placed = sections.empty() ? Shape{} : Shape{3};
  for (size_t i = 0; i + 2 < shape.size(); ++i) placed.push_back(shape[i]);
  engine::Rope rope{nullptr, static_cast<float>(attention_factor)};
  if (!sections.empty()) {
    if (!engine::set_sections(sections, dim / 2, rope))
      check.fail("sections",
                 "of pairs that turn by time, height and width, " + std::to_string(dim / 2) +
                     " together, at most a third of them by height and by width",
                 shape_text(sections));
  }
  check.shape(positions_in, "positions", placed);
  check.dtype(inv_freq_in, "inv_freq", ScalarType::Float);
  check.shape(inv_freq_in, "inv_freq", {dim / 2});
  if (!(attention_factor > 0.0 && std::isfinite(attention_factor)))
    check.fail("attention_factor", "finite and positive", std::to_string(attention_factor));
  const Tensor x = as_contiguous(x_in), positions = as_contiguous(positions_in);
  const Tensor inv_freq = as_contiguous(inv_freq_in);
  Tensor y = empty(shape, x.scalar_type());
  const engine::Rows rows = rows_view(x);
  rope.inv_freq = data<float>(inv_freq);
  const int64_t axis_stride = sections.empty() ? 0 : positions.numel() / 3;
  engine::rope(rows, {data<int64_t>(positions), axis_stride}, heads, rope, rows_like(rows, y));
  return y;
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, rms_norm);
  BITNET_OP(m, add_rms_norm);
  BITNET_OP(m, relu2_mul);
  BITNET_OP(m, silu_and_mul);
  BITNET_OP(m, gelu_tanh_and_mul);
  BITNET_OP(m, gated);
  BITNET_OP(m, hadamard);
  BITNET_OP(m, rope);
}

}  // namespace bitnet::ops
