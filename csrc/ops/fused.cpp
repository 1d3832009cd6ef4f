// qkv_forward and mlp_forward: the unfused ops' own row functions in the same order with the same
// roundings, so that fused and composed results are equal bit for bit, in a handful of regions.
// Must not know SIMD: rows come from the kernel table.
#include <cmath>

#include "ops/checks.h"
#include "ops/linear_core.h"
#include "ops/ops.h"

namespace bitnet::ops {
namespace {

struct Norm {
  const float* gain;  // null: no norm
  float eps;
  DType type;  // the roundings that the unfused ops would make
};

// row -> rms_norm(row), in place, rounded as a stored tensor of norm.type would be.
void apply_norm(const KernelTable& table, const Norm& norm, int64_t n, float* row) {
  if (norm.gain == nullptr) return;
  table.rms_norm_row(row, norm.gain, n, norm.eps, norm.type, row);
  table.round_row(norm.type, row, n);
}

// Loads every token of x, normalises and quantises it.
void norm_and_quantize(const Tensor& x, const Norm& norm, QuantizedRows& rows) {
  const KernelTable& table = kernels();
  const DType type = dtype_of(x);
  const void* source = x.const_data_ptr();
  const int64_t k = rows.k;
  const int64_t shares = shares_for(rows.tokens, rows.tokens * k, kMinElements);
  Scratch<float> scratch(shares * k);
  run_shares(shares, [&](int64_t s) {
    float* row = scratch.get() + s * k;
    for (int64_t m = share_begin(rows.tokens, shares, s);
         m < share_begin(rows.tokens, shares, s + 1); ++m) {
      table.load_row(type, offset_bytes(source, m * k * element_size(type)), k, row);
      apply_norm(table, norm, k, row);
      quantize_token(row, m, rows);
    }
  });
}

void check_input(const Check& check, const Tensor& x, const Tensor& norm_weight, double eps) {
  check.float_dtype(x, "x");
  check.min_dim(x, "x", 1);
  check.vector(norm_weight, "norm_weight", x.size(x.dim() - 1));
  if (!(eps >= 0.0 && std::isfinite(eps)))
    check.fail("eps", "finite and not negative", std::to_string(eps));
}

// out_features, in_features: empty, or one per weight; private layouts need out_features.
void check_features(const Check& check, const std::vector<int64_t>& features, const char* argument,
                    size_t count) {
  if (features.empty() || features.size() == count) return;
  check.fail(argument, "empty or with " + std::to_string(count) + " elements",
             std::to_string(features.size()));
}

Shape with_last(Shape shape, int64_t last) {
  shape.back() = last;
  return shape;
}

// Activation, sub-norm and quantisation of every token.  gate_up: [tokens, 2, width] float32.
void activate_and_quantize(const float* gate_up, bool relu2, const Norm& sub_norm,
                           QuantizedRows& rows) {
  const KernelTable& table = kernels();
  const int64_t n = rows.k;
  const int64_t shares = shares_for(rows.tokens, rows.tokens * n, kMinElements);
  Scratch<float> scratch(shares * n);
  run_shares(shares, [&](int64_t s) {
    float* row = scratch.get() + s * n;
    for (int64_t m = share_begin(rows.tokens, shares, s);
         m < share_begin(rows.tokens, shares, s + 1); ++m) {
      const float* gate = gate_up + m * n;
      const float* up = gate_up + (rows.tokens + m) * n;
      (relu2 ? table.relu2_mul_row : table.silu_mul_row)(gate, up, n, row);
      table.round_row(sub_norm.type, row, n);
      apply_norm(table, sub_norm, n, row);
      quantize_token(row, m, rows);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> qkv_forward(const Tensor& x_in, const Tensor& norm_weight,
                                               const Tensor& q_weight, const Tensor& q_scale,
                                               const Tensor& k_weight, const Tensor& k_scale,
                                               const Tensor& v_weight, const Tensor& v_scale,
                                               double eps, std::vector<int64_t> out_features,
                                               std::optional<int64_t> in_features) {
  const Check check("qkv_forward");
  check_input(check, x_in, norm_weight, eps);
  check_features(check, out_features, "out_features", 3);
  const Shape shape = shape_of(x_in);
  check.in_features(in_features, shape.back());
  const Weight wq = weight_view_at(check, q_weight, "q_weight", shape.back(), out_features, 0);
  const Weight wk = weight_view_at(check, k_weight, "k_weight", shape.back(), out_features, 1);
  const Weight wv = weight_view_at(check, v_weight, "v_weight", shape.back(), out_features, 2);
  check.weight_scale(q_scale, "q_scale", wq.n_rows);
  check.weight_scale(k_scale, "k_scale", wk.n_rows);
  check.weight_scale(v_scale, "v_scale", wv.n_rows);
  const Tensor x = as_contiguous(x_in);
  const DType type = dtype_of(x);
  const Scratch<float> gain = float_vector(norm_weight);
  QuantizedRows rows(product(shape, 0, shape.size() - 1), shape.back());
  norm_and_quantize(x, {gain.get(), static_cast<float>(eps), type}, rows);
  Tensor q = empty(with_last(shape, wq.n_rows), x.scalar_type());
  Tensor k = empty(with_last(shape, wk.n_rows), x.scalar_type());
  Tensor v = empty(with_last(shape, wv.n_rows), x.scalar_type());
  const Projection projections[] = {make_projection(wq, q_scale, type, q.mutable_data_ptr()),
                                    make_projection(wk, k_scale, type, k.mutable_data_ptr()),
                                    make_projection(wv, v_scale, type, v.mutable_data_ptr())};
  project(rows, projections, 3);
  return {q, k, v};
}

Tensor mlp_forward(const Tensor& x_in, const Tensor& norm_weight, const Tensor& gate_weight,
                   const Tensor& gate_scale, const Tensor& up_weight, const Tensor& up_scale,
                   std::optional<Tensor> sub_norm_weight, const Tensor& down_weight,
                   const Tensor& down_scale, double eps, std::string activation,
                   std::vector<int64_t> out_features, std::vector<int64_t> in_features) {
  const Check check("mlp_forward");
  check_input(check, x_in, norm_weight, eps);
  check_features(check, out_features, "out_features", 2);
  check_features(check, in_features, "in_features", 2);
  const Shape shape = shape_of(x_in);
  if (!in_features.empty()) check.in_features(in_features[0], shape.back());
  const Weight gate =
      weight_view_at(check, gate_weight, "gate_weight", shape.back(), out_features, 0);
  const Weight up = weight_view_at(check, up_weight, "up_weight", shape.back(), out_features, 0);
  check.weight_scale(gate_scale, "gate_scale", gate.n_rows);
  check.weight_scale(up_scale, "up_scale", up.n_rows);
  const int64_t inner = gate.n_rows;
  if (up.n_rows != inner)
    check.fail("up_weight", "with the rows of gate_weight (" + std::to_string(inner) + ")",
               std::to_string(up.n_rows));
  if (!in_features.empty() && in_features[1] != inner)
    check.fail("gate_weight",
               "with the " + std::to_string(in_features[1]) +
                   " input features of down_weight (in_features) as rows",
               std::to_string(inner));
  const Weight down = weight_view_at(check, down_weight, "down_weight", inner, out_features, 1);
  check.weight_scale(down_scale, "down_scale", down.n_rows);
  if (sub_norm_weight.has_value()) check.vector(*sub_norm_weight, "sub_norm_weight", inner);
  const bool relu2 = activation == "relu2";
  if (!(relu2 || activation == "silu"))
    check.fail("activation", "'relu2' or 'silu'", "'" + activation + "'");

  const Tensor x = as_contiguous(x_in);
  const DType type = dtype_of(x);
  // relu(gate)^2 * up passes the range of float16 in healthy models: float32 in between.
  const DType inner_type = type == DType::kF16 ? DType::kF32 : type;
  const int64_t tokens = product(shape, 0, shape.size() - 1);
  const Scratch<float> gain = float_vector(norm_weight);
  const Scratch<float> sub_gain =
      sub_norm_weight.has_value() ? float_vector(*sub_norm_weight) : Scratch<float>(0);
  QuantizedRows rows(tokens, shape.back());
  norm_and_quantize(x, {gain.get(), static_cast<float>(eps), type}, rows);

  Scratch<float> gate_up(2 * tokens * inner);
  const Projection both[] = {
      make_projection(gate, gate_scale, DType::kF32, gate_up.get()),
      make_projection(up, up_scale, DType::kF32, gate_up.get() + tokens * inner)};
  project(rows, both, 2);
  kernels().round_row(inner_type, gate_up.get(), 2 * tokens * inner);

  QuantizedRows inner_rows(tokens, inner);
  const float* sub = sub_norm_weight.has_value() ? sub_gain.get() : nullptr;
  activate_and_quantize(gate_up.get(), relu2, {sub, static_cast<float>(eps), inner_type},
                        inner_rows);
  Tensor out = empty(with_last(shape, down.n_rows), x.scalar_type());
  const Projection last = make_projection(down, down_scale, type, out.mutable_data_ptr());
  project(inner_rows, &last, 1);
  return out;
}

}  // namespace bitnet::ops
