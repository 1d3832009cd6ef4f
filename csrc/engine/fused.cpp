// Norm, projections and activation; see fused.h.
#include "engine/fused.h"

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {

void apply_norm(const KernelTable& kernels, const Norm& norm, DType type, int64_t n, float* row) {
  if (norm.weight == nullptr) return;
  kernels.rms_norm_row(row, norm.weight, n, norm.eps, type, row);
  kernels.round_row(type, row, n);
}

namespace {

// x normalised and quantised.
void quantize_normed(const KernelTable& kernels, const Rows& x, const Norm& norm,
                     const QuantizedTokens& tokens) {
  parallel_rows(x.count, x.width, x.width, [&](int64_t m, float* row) {
    kernels.load_row(x.type, x.at(m), x.width, row);
    apply_norm(kernels, norm, x.type, x.width, row);
    tokens.quantize(kernels, row, m);
  });
}

}  // namespace

void norm_and_multiply(const Rows& x, const Norm& norm, const Projection* projections,
                       int64_t count, ActivationFormat activations) {
  const KernelTable& kernels = active_kernels();
  const TokenBuffer tokens(kernels, x.count, x.width, projections[0].group(), activations,
                           shape_of(projections, count, x.count, 1).row_major());
  quantize_normed(kernels, x, norm, tokens.view());
  multiply(kernels, tokens.view(), projections, count);
}

void mlp(const Rows& x, const Mlp& m, const Rows& y) {
  const KernelTable& kernels = active_kernels();
  // relu(gate)^2 * up passes the range of float16 in healthy models: float32 in between.
  const DType type = x.type == DType::kF16 ? DType::kF32 : x.type;
  const int64_t tokens = x.count, n = m.gate_up[0].weight->n_rows, half = tokens * n;
  Scratch<float> gate_up(2 * half);
  Projection both[] = {m.gate_up[0], m.gate_up[1]};
  for (int i = 0; i < 2; ++i) {
    both[i].out = {StoreKind::kRound, type, gate_up.get() + i * half,
                   n * static_cast<int64_t>(sizeof(float))};
  }
  norm_and_multiply(x, m.norm, both, 2, m.activations);

  const TokenBuffer inner(kernels, tokens, n, m.down.group(), m.activations,
                          m.down.weight->reads_rows());
  parallel_rows(tokens, n, n, [&](int64_t t, float* row) {
    m.activation(gate_up.get() + t * n, gate_up.get() + half + t * n, n, row);
    kernels.round_row(type, row, n);
    apply_norm(kernels, m.sub_norm, type, n, row);
    inner.view().quantize(kernels, row, t);
  });
  Projection last = m.down;
  last.out.data = y.data;
  multiply(kernels, inner.view(), &last, 1);
}

}  // namespace bitnet::engine
