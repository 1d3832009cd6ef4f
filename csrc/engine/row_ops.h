// Operations on rows of activations: quantisation, norms, activations, rotary positions. Rows are
// dealt out to the threads; the arithmetic of a row is the kernel table's.
#pragma once

#include <cstdint>
#include <span>
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
// Where tokens stand, on up to three axes: time, height and width of an image's patches. The axes
// of a text agree.
struct Positions {
  const int64_t* time = nullptr;  // [tokens]; the other axes follow, [3, tokens]
  int64_t axis_stride = 0;        // from one axis to the next; 0: all agree
  int64_t of(int64_t token, int64_t axis) const { return time[axis * axis_stride + token]; }
};
// Rotary embedding: pair i of a head turns by position * inv_freq[i]; cosines and sines are
// multiplied by attention_factor, which some scalings of the context call for (1: plain).
struct Rope {
  const float* inv_freq;
  float attention_factor;
  // Pairs that turn by height and by width, interleaved: pairs 1, 4, 7, ... and 2, 5, 8, ... The
  // others turn by time.
  int64_t height_pairs = 0, width_pairs = 0;
  int64_t axis_of(int64_t pair) const {
    if (pair % 3 == 1 && pair < 3 * height_pairs) return 1;
    return pair % 3 == 2 && pair < 3 * width_pairs ? 2 : 0;
  }
};
// Whether `sections`, how many of the pairs turn by time, height and width, can be those of `rope`,
// which they then are. Height and width have at most every third pair each.
bool set_sections(std::span<const int64_t> sections, int64_t pairs, Rope& rope);
// Rows of heads, `heads` of a token, of [count / heads] tokens.
void rope(const Rows& x, const Positions& positions, int64_t heads, const Rope& rope,
          const Rows& y);
// row [2 * half]: cosines, then sines.  The angle is a float32 product of float32 factors.
void rope_angles(const Positions& positions, int64_t token, const Rope& rope, int64_t half,
                 float* row);

}  // namespace bitnet::engine
