// Operations on rows of activations: quantisation, norms, activations, rotary positions. Rows are
// dealt out to the threads; the arithmetic of a row is the kernel table's.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/kernel_table.h"
#include "runtime/memory.h"

namespace bitnet::engine {

// A contiguous [count, width] of a float type in memory of the caller.
struct Rows {
  DType type;
  int64_t count, width;
  void* data;
  void* at(int64_t row) const { return offset_bytes(data, row * width * element_size(type)); }
};

// codes [count, width], scales [count]
void quantize_rows(const Rows& x, int8_t* codes, float* scales);
void rms_norm(const Rows& x, const float* norm_weight, float eps, const Rows& y);
// sum = x + residual, y = rms_norm(sum)
void add_rms_norm(const Rows& x, const Rows& residual, const float* norm_weight, float eps,
                  const Rows& y, const Rows& sum);
// The gated product of a config's hidden_act, "relu2", "silu" or "gelu_pytorch_tanh"; null for any
// other name.
using GatedRow = void (*)(const float* gate, const float* up, int64_t n, float* y);
GatedRow gated_row(const KernelTable& kernels, std::string_view hidden_act);
// x [count, 2 d]: gate, then up; y [count, d]
void gated(const Rows& x, GatedRow activation, const Rows& y);
// y = activation(gate) * up, all of one width.
void gated(const Rows& gate, const Rows& up, GatedRow activation, const Rows& y);
// KernelTable::hadamard_row of every row.
void hadamard(const Rows& x, const float* signs, int64_t block, bool signs_last, const Rows& y);
// Rotary embedding: pair i of a head turns by position * inv_freq[i]; cosines and sines are
// multiplied by attention_factor, which some scalings of the context call for (1: plain).
struct Rope {
  const float* inv_freq;
  float attention_factor;
};
// Rows of heads, `heads` of a token, whose positions are [count / heads].
void rope(const Rows& x, const int64_t* positions, int64_t heads, const Rope& rope, const Rows& y);
// row [2 * half]: cosines, then sines.  The angle is a float32 product of float32 factors.
void rope_angles(int64_t position, const Rope& rope, int64_t half, float* row);

}  // namespace bitnet::engine
