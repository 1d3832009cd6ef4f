// rms_norm, add_rms_norm, relu2_mul, silu_and_mul, rope_table, rope:
// one row at a time, rows shared out. The arithmetic of a row is the
// kernel table's. Must not know weights of linears.
#include <cmath>

#include "ops/checks.h"
#include "ops/ops.h"
#include "ops/rope_core.h"

namespace bitnet::ops {
namespace {

// Runs body(row, scratch of `floats` floats) for every row.
template <class F>
void for_rows(int64_t rows, int64_t width, int64_t floats, const F& body) {
  if (rows == 0 || width == 0) return;  // rows of no features may be very many
  const int64_t shares = shares_for(rows, rows * width, kMinElements);
  Scratch<float> scratch(shares * floats);
  run_shares(shares, [&](int64_t s) {
    for (int64_t r = share_begin(rows, shares, s); r < share_begin(rows, shares, s + 1); ++r) {
      body(r, scratch.get() + s * floats);
    }
  });
}

struct RowView {
  explicit RowView(const Tensor& t)
      : type(dtype_of(t)),
        width(t.size(t.dim() - 1)),
        data(const_cast<void*>(t.const_data_ptr())) {}
  DType type;
  int64_t width;
  void* data;
  void* at(int64_t row) const { return offset_bytes(data, row * width * element_size(type)); }
  void load(int64_t row, float* dst) const { kernels().load_row(type, at(row), width, dst); }
  void store(int64_t row, const float* src) const {
    kernels().store_row(type, src, width, at(row));
  }
};

int64_t rows_of(const Tensor& t) {
  const Shape shape = shape_of(t);
  return product(shape, 0, shape.size() - 1);
}

void check_norm(const Check& check, const Tensor& x, const Tensor& weight, double eps) {
  check.float_dtype(x, "x");
  check.min_dim(x, "x", 1);
  if (x.size(x.dim() - 1) < 1)
    check.fail("x", "with at least one feature in the last dimension", "0");
  check.vector(weight, "weight", x.size(x.dim() - 1));
  if (!(eps >= 0.0 && std::isfinite(eps)))
    check.fail("eps", "finite and not negative", std::to_string(eps));
}

}  // namespace

Tensor rms_norm(const Tensor& x_in, const Tensor& weight, double eps) {
  const Check check("rms_norm");
  check_norm(check, x_in, weight, eps);
  const Tensor x = as_contiguous(x_in);
  Tensor y = empty(shape_of(x), x.scalar_type());
  const Scratch<float> gain = float_vector(weight);
  const RowView from(x), to(y);
  for_rows(rows_of(x), from.width, from.width, [&](int64_t r, float* row) {
    from.load(r, row);
    kernels().rms_norm_row(row, gain.get(), from.width, static_cast<float>(eps), from.type, row);
    to.store(r, row);
  });
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
  const Scratch<float> gain = float_vector(weight);
  const RowView from(x), with(residual), to(y), sum_to(sum);
  const int64_t k = from.width;
  for_rows(rows_of(x), k, 2 * k, [&](int64_t r, float* row) {
    const KernelTable& table = kernels();
    from.load(r, row);
    with.load(r, row + k);
    table.add_row(row, row + k, k, row);
    table.round_row(from.type, row, k);
    sum_to.store(r, row);
    table.rms_norm_row(row, gain.get(), k, static_cast<float>(eps), from.type, row);
    to.store(r, row);
  });
  return {y, sum};
}

Tensor relu2_mul(const Tensor& gate_in, const Tensor& up_in) {
  const Check check("relu2_mul");
  check.float_dtype(gate_in, "gate");
  if (gate_in.scalar_type() == ScalarType::Half)
    check.fail("gate",
               "of dtype float32 or bfloat16 (relu(gate)^2 * up passes 65504 in healthy models)",
               "float16");
  check.min_dim(gate_in, "gate", 1);
  check.dtype(up_in, "up", gate_in.scalar_type());
  check.same_shape(up_in, "up", gate_in, "gate");
  const Tensor gate = as_contiguous(gate_in), up = as_contiguous(up_in);
  Tensor y = empty(shape_of(gate), gate.scalar_type());
  const RowView g(gate), u(up), to(y);
  for_rows(rows_of(gate), g.width, 2 * g.width, [&](int64_t r, float* row) {
    g.load(r, row);
    u.load(r, row + g.width);
    kernels().relu2_mul_row(row, row + g.width, g.width, row);
    to.store(r, row);
  });
  return y;
}

Tensor silu_and_mul(const Tensor& x_in) {
  const Check check("silu_and_mul");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  Shape shape = shape_of(x_in);
  if (shape.back() % 2 != 0)
    check.fail("x", "with an even last dimension (gate, then up)", std::to_string(shape.back()));
  const Tensor x = as_contiguous(x_in);
  const int64_t d = shape.back() / 2;
  shape.back() = d;
  Tensor y = empty(shape, x.scalar_type());
  const RowView from(x), to(y);
  for_rows(rows_of(x), 2 * d, 2 * d, [&](int64_t r, float* row) {
    from.load(r, row);
    kernels().silu_mul_row(row, row + d, d, row);
    to.store(r, row);
  });
  return y;
}

Tensor rope_table(const Tensor& positions_in, int64_t head_dim, double theta) {
  const Check check("rope_table");
  check.dtype(positions_in, "positions", ScalarType::Long);
  if (!(head_dim >= 2 && head_dim % 2 == 0))
    check.fail("head_dim", "even and positive", std::to_string(head_dim));
  constexpr int64_t kMostHeadDim = 65536;
  if (head_dim > kMostHeadDim)
    check.fail("head_dim", "at most " + std::to_string(kMostHeadDim), std::to_string(head_dim));
  if (!(theta > 0.0 && std::isfinite(theta)))
    check.fail("theta", "finite and positive", std::to_string(theta));
  const Tensor positions = as_contiguous(positions_in);
  Shape shape = shape_of(positions);
  shape.push_back(head_dim);
  Tensor table = empty(shape, ScalarType::Float);
  const auto* p = static_cast<const int64_t*>(positions.const_data_ptr());
  auto* out = static_cast<float*>(table.mutable_data_ptr());
  const int64_t half = head_dim / 2, count = positions.numel();
  if (count == 0) return table;
  Scratch<float> inv_freq(half);
  rope_frequencies(head_dim, theta, inv_freq.get());
  parallel_ranges(count, head_dim * 16, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      rope_angles(p[t], inv_freq.get(), half, out + t * head_dim);
    }
  });
  return table;
}

Tensor rope(const Tensor& x_in, const Tensor& cos_sin_in) {
  const Check check("rope");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 2);
  check.dtype(cos_sin_in, "cos_sin", ScalarType::Float);
  const Shape shape = shape_of(x_in);
  const int64_t dim = shape.back(), heads = shape[shape.size() - 2];
  if (!(dim % 2 == 0 && dim >= 2))
    check.fail("x", "with an even head dimension", std::to_string(dim));
  Shape expected(shape.begin(), shape.end() - 2);
  expected.push_back(dim);
  check.shape(cos_sin_in, "cos_sin", expected);
  const Tensor x = as_contiguous(x_in), cos_sin = as_contiguous(cos_sin_in);
  Tensor y = empty(shape, x.scalar_type());
  const RowView from(x), to(y);
  const auto* table = static_cast<const float*>(cos_sin.const_data_ptr());
  for_rows(rows_of(x), dim, 2 * dim, [&](int64_t r, float* row) {
    from.load(r, row);
    kernels().rope_head(row, table + r / heads * dim, dim, row + dim);
    to.store(r, row + dim);
  });
  return y;
}

}  // namespace bitnet::ops
