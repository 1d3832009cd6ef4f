// Operations on rows; see row_ops.h.
#include "engine/row_ops.h"

#include <cmath>

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

void load(const Rows& rows, int64_t row, float* dst) {
  active_kernels().load_row(rows.type, rows.at(row), rows.width, dst);
}
void store(const Rows& rows, int64_t row, const float* src) {
  active_kernels().store_row(rows.type, src, rows.width, rows.at(row));
}

// f(row, scratch of `floats` floats) for every row; rows of no features may be very many.
template <class F>
void for_rows(const Rows& rows, int64_t floats, const F& f) {
  if (rows.width != 0) parallel_rows(rows.count, rows.width, floats, f);
}

}  // namespace

void quantize_rows(const Rows& x, int8_t* codes, float* scales) {
  const int64_t k = x.width;
  for_rows(x, k, [&](int64_t m, float* row) {
    int32_t sum;
    load(x, m, row);
    scales[m] = active_kernels().quantize_row(row, k, k, codes + m * k, kTokenStep, &sum);
  });
}

void rms_norm(const Rows& x, const float* norm_weight, float eps, const Rows& y) {
  for_rows(x, x.width, [&](int64_t r, float* row) {
    load(x, r, row);
    active_kernels().rms_norm_row(row, norm_weight, x.width, eps, x.type, row);
    store(y, r, row);
  });
}

void add_rms_norm(const Rows& x, const Rows& residual, const float* norm_weight, float eps,
                  const Rows& y, const Rows& sum) {
  const int64_t k = x.width;
  for_rows(x, 2 * k, [&](int64_t r, float* row) {
    const KernelTable& kernels = active_kernels();
    load(x, r, row);
    load(residual, r, row + k);
    kernels.add_row(row, row + k, k, row);
    kernels.round_row(x.type, row, k);
    store(sum, r, row);
    kernels.rms_norm_row(row, norm_weight, k, eps, x.type, row);
    store(y, r, row);
  });
}

GatedRow gated_row(const KernelTable& kernels, std::string_view hidden_act) {
  if (hidden_act == "relu2") return kernels.relu2_mul_row;
  if (hidden_act == "silu") return kernels.silu_mul_row;
  if (hidden_act == "gelu_pytorch_tanh") return kernels.gelu_mul_row;
  return nullptr;
}

void gated(const Rows& gate, const Rows& up, GatedRow activation, const Rows& y) {
  const int64_t k = gate.width;
  for_rows(gate, 2 * k, [&](int64_t r, float* row) {
    load(gate, r, row);
    load(up, r, row + k);
    activation(row, row + k, k, row);
    store(y, r, row);
  });
}

void hadamard(const Rows& x, const float* signs, int64_t block, bool signs_last, const Rows& y) {
  const int64_t k = x.width;
  for_rows(x, k, [&](int64_t r, float* row) {
    load(x, r, row);
    active_kernels().hadamard_row(row, signs, k, block, signs_last, row);
    store(y, r, row);
  });
}

void gated(const Rows& x, GatedRow activation, const Rows& y) {
  const int64_t d = y.width;
  for_rows(x, 2 * d, [&](int64_t r, float* row) {
    load(x, r, row);
    activation(row, row + d, d, row);
    store(y, r, row);
  });
}

bool set_sections(std::span<const int64_t> sections, int64_t pairs, Rope& rope) {
  if (sections.size() != 3) return false;
  int64_t sum = 0;
  for (const int64_t count : sections) {
    if (count < 0 || count > pairs) return false;
    sum += count;
  }
  const int64_t height = sections[1], width = sections[2];
  // The last pairs of the two are 3 * height - 2 and 3 * width - 1.
  if (sum != pairs || 3 * height - 2 >= pairs || 3 * width - 1 >= pairs) return false;
  rope.height_pairs = height, rope.width_pairs = width;
  return true;
}

void rope(const Rows& x, const Positions& positions, int64_t heads, const Rope& rope,
          const Rows& y) {
  if (x.count == 0) return;
  const int64_t dim = x.width, tokens = x.count / heads;
  Scratch<float> angles(tokens * dim);
  parallel_ranges(tokens, dim * 16, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      rope_angles(positions, t, rope, dim / 2, angles.get() + t * dim);
  });
  for_rows(x, 2 * dim, [&](int64_t r, float* row) {
    load(x, r, row);
    active_kernels().rope_head(row, angles.get() + r / heads * dim, dim, row + dim);
    store(y, r, row + dim);
  });
}

void rope_angles(const Positions& positions, int64_t token, const Rope& rope, int64_t half,
                 float* row) {
  for (int64_t i = 0; i < half; ++i) {
    const int64_t position = positions.of(token, rope.axis_of(i));
    const double angle = static_cast<float>(position) * rope.inv_freq[i];
    row[i] = static_cast<float>(std::cos(angle)) * rope.attention_factor;
    row[half + i] = static_cast<float>(std::sin(angle)) * rope.attention_factor;
  }
}

}  // namespace bitnet::engine
