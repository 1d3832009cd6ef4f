// Projections with what surrounds them in a layer: norm and q, k, v; norm and the whole MLP. Row
// functions and roundings are those of the unfused ops in the same order, so results are equal bit
// for bit.
#pragma once

#include "engine/products/product.h"
#include "engine/row_ops.h"

namespace bitnet::engine {

struct Norm {
  const float* weight;  // [K]; null: no norm
  float eps;
};

// row -> rms_norm(row), in place, rounded as a stored tensor of `type` would be; unchanged where
// there is no norm.
void apply_norm(const KernelTable& kernels, const Norm& norm, DType type, int64_t n, float* row);

// Every token of x normalised, quantised, and multiplied by all projections.
void norm_and_multiply(const Rows& x, const Norm& norm, const Projection* projections,
                       int64_t count, ActivationFormat activations = ActivationFormat::kInt8);

// y = down(sub_norm(activation(gate(norm(x)), up(norm(x))))) without the residual.
struct Mlp {
  Norm norm, sub_norm;
  Projection gate_up[2], down;   // where they go is set here
  ActivationFormat activations;  // where projections have scales of groups
  GatedRow activation;
};
void mlp(const Rows& x, const Mlp& m, const Rows& y);

}  // namespace bitnet::engine
