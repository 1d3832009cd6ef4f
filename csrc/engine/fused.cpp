// Norm, projections and activation; see fused.h.
#include "engine/fused.h"

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {

void apply_norm(const KernelTable& table, const Norm& norm, DType type, int64_t n, float* row) {
  if (norm.weight == nullptr) return;
  table.rms_norm_row(row, norm.weight, n, norm.eps, type, row);
  table.round_row(type, row, n);
}

namespace {

// x normalised and quantised.
void quantize_normed(const KernelTable& table, const Rows& x, const Norm& norm,
                     const QuantizedTokens& tokens) {
  parallel_rows(x.count, x.width, x.width, [&](int64_t m, float* row) {
    table.load_row(x.type, x.at(m), x.width, row);
    apply_norm(table, norm, x.type, x.width, row);
    tokens.quantize(table, row, m);
  });
}

}  // namespace

void norm_and_multiply(const Rows& x, const Norm& norm, const Projection* projections,
                       int64_t count) {
  const KernelTable& table = kernels();
  const TokenBuffer tokens(table, x.count, x.width);
  quantize_normed(table, x, norm, tokens.view());
  multiply(table, tokens.view(), projections, count);
}

void mlp(const Rows& x, const Mlp& m, const Rows& y) {
  const KernelTable& table = kernels();
  // relu(gate)^2 * up passes the range of float16 in healthy models: float32 in between.
  const DType type = x.type == DType::kF16 ? DType::kF32 : x.type;
  const int64_t tokens = x.count, n = m.gate.n_rows, half = tokens * n;
  Scratch<float> gate_up(2 * half);
  Projection both[] = {
      make_projection(m.gate, m.gate_scale, m.gate_scales, DType::kF32, gate_up.get()),
      make_projection(m.up, m.up_scale, m.up_scales, DType::kF32, gate_up.get() + half)};
  for (Projection& p : both) p.out.kind = StoreKind::kRound, p.out.type = type;
  norm_and_multiply(x, m.norm, both, 2);

  const TokenBuffer inner(table, tokens, n);
  parallel_rows(tokens, n, n, [&](int64_t t, float* row) {
    m.activation(gate_up.get() + t * n, gate_up.get() + half + t * n, n, row);
    table.round_row(type, row, n);
    apply_norm(table, m.sub_norm, type, n, row);
    inner.view().quantize(table, row, t);
  });
  const Projection last = make_projection(m.down, m.down_scale, m.down_scales, y.type, y.data);
  multiply(table, inner.view(), &last, 1);
}

}  // namespace bitnet::engine
