// The ternary linear in parts that several ops share: quantised
// tokens, projections, one region for all. Must not know which op
// calls, nor a private layout's bytes (weights.h).
#pragma once

#include "ops/weights.h"

namespace bitnet::ops {

// int8 tokens in rows padded with zeros to whole blocks, with their sums and dequantisation
// factors.
struct QuantizedRows {
  QuantizedRows(int64_t tokens, int64_t k);
  int64_t tokens, k, stride;
  Scratch<int8_t> codes;
  Scratch<int32_t> sums;
  Scratch<float> scales;
  int8_t* row(int64_t m) { return codes.get() + m * stride; }
};

// Quantises one token given as float32.
void quantize_token(const float* x, int64_t m, QuantizedRows& rows);
// Quantises every token of a contiguous activation tensor of `type`.
void quantize_tokens(const void* x, DType type, QuantizedRows& rows);
// Takes int8 tokens as they are (contiguous [tokens, k]) and sums them.
void adopt_tokens(const int8_t* x, QuantizedRows& rows);

// y[m, n] = float(sum) * (scale[n] * x_scale[m]) + bias[n], stored as `type` at out[m * n_rows +
// n], n_rows those of the weight.
struct Projection {
  Weight weight;
  const float* scale;
  int64_t scale_step;  // 0: one scale, 1: one per row
  const float* bias;   // may be null
  DType type;
  void* out;
};

Projection make_projection(const Weight& weight, const Tensor& scale, DType type, void* out);

// All projections of the same tokens, in one parallel region.
void project(const QuantizedRows& rows, const Projection* projections, int64_t count);

// Exact int32 sums: out [tokens, n_rows].
void project_i32(const QuantizedRows& rows, const Weight& weight, int32_t* out);

}  // namespace bitnet::ops
