// quantize_activations, gemv, gemm, linear: checks and
// results; what they compute is linear_core.h's matter.
// Must not know layouts (weights.h) or SIMD.
#include "format/layout.h"
#include "ops/checks.h"
#include "ops/linear_core.h"
#include "ops/ops.h"

namespace bitnet::ops {
namespace {

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
  QuantizedRows rows(tokens, weight.k);
  adopt_tokens(static_cast<const int8_t*>(x.const_data_ptr()), rows);
  Tensor out = empty(out_shape, scaled ? ScalarType::Float : ScalarType::Int);
  if (!scaled) {
    project_i32(rows, weight, static_cast<int32_t*>(out.mutable_data_ptr()));
    return out;
  }
  const auto* scales = static_cast<const float*>(x_scale->const_data_ptr());
  std::copy(scales, scales + tokens, rows.scales.get());
  const Projection projection =
      make_projection(weight, *weight_scale, DType::kF32, out.mutable_data_ptr());
  project(rows, &projection, 1);
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_activations(const Tensor& x_in) {
  const Check check("quantize_activations");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  const Shape shape = shape_of(x_in);
  const int64_t k = shape.back();
  if (k < 1) check.fail("x", "with at least one feature in the last dimension", "0");
  const int64_t tokens = product(shape, 0, shape.size() - 1);
  const Tensor x = as_contiguous(x_in);
  const DType type = dtype_of(x);
  Tensor q = empty(shape, ScalarType::Char);
  Tensor scale = empty(Shape(shape.begin(), shape.end() - 1), ScalarType::Float);
  const void* source = x.const_data_ptr();
  auto* codes = static_cast<int8_t*>(q.mutable_data_ptr());
  auto* scales = static_cast<float*>(scale.mutable_data_ptr());
  const KernelTable& table = kernels();
  const int64_t shares = shares_for(tokens, tokens * k, kMinElements);
  Scratch<float> scratch(shares * k);
  run_shares(shares, [&](int64_t s) {
    float* buffer = scratch.get() + s * k;
    for (int64_t m = share_begin(tokens, shares, s); m < share_begin(tokens, shares, s + 1); ++m) {
      int32_t sum;
      table.load_row(type, offset_bytes(source, m * k * element_size(type)), k, buffer);
      scales[m] = table.quantize_row(buffer, k, k, codes + m * k, &sum);
    }
  });
  return {q, scale};
}

Tensor gemv(const Tensor& weight, const Tensor& x, std::optional<Tensor> x_scale,
            std::optional<Tensor> weight_scale, std::optional<int64_t> out_features,
            std::optional<int64_t> in_features) {
  const Check check("gemv");
  check.dtype(x, "x", ScalarType::Char);
  check.dim(x, "x", 1);
  check.in_features(in_features, x.size(0));
  const Weight w = weight_view(check, weight, "weight", x.size(0), out_features);
  return ternary_matmul(check, w, x, x_scale, weight_scale, 1, {w.n_rows});
}

Tensor gemm(const Tensor& weight, const Tensor& x, std::optional<Tensor> x_scale,
            std::optional<Tensor> weight_scale, std::optional<int64_t> out_features,
            std::optional<int64_t> in_features) {
  const Check check("gemm");
  check.dtype(x, "x", ScalarType::Char);
  check.dim(x, "x", 2);
  check.in_features(in_features, x.size(1));
  const Weight w = weight_view(check, weight, "weight", x.size(1), out_features);
  return ternary_matmul(check, w, x, x_scale, weight_scale, x.size(0), {x.size(0), w.n_rows});
}

Tensor linear(const Tensor& x_in, const Tensor& weight, const Tensor& weight_scale,
              std::optional<Tensor> bias, std::optional<int64_t> out_features,
              std::optional<int64_t> in_features) {
  const Check check("linear");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  Shape shape = shape_of(x_in);
  const int64_t k = shape.back();
  check.in_features(in_features, k);
  const Weight w = weight_view(check, weight, "weight", k, out_features);
  const int64_t n = w.n_rows;
  check.weight_scale(weight_scale, "weight_scale", n);
  if (bias.has_value()) check.vector(*bias, "bias", n);
  const int64_t tokens = product(shape, 0, shape.size() - 1);
  const Tensor x = as_contiguous(x_in);
  const DType type = dtype_of(x);
  QuantizedRows rows(tokens, k);
  quantize_tokens(x.const_data_ptr(), type, rows);
  shape.back() = n;
  Tensor out = empty(shape, x.scalar_type());
  Projection projection = make_projection(w, weight_scale, type, out.mutable_data_ptr());
  const Scratch<float> bias_values = bias.has_value() ? float_vector(*bias) : Scratch<float>(0);
  if (bias.has_value()) projection.bias = bias_values.get();
  project(rows, &projection, 1);
  return out;
}

}  // namespace bitnet::ops
