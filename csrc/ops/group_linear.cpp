// group_linear: a ternary linear with one scale for every 128 weights of a row. The sum of a group
// is exact, so kernels take a slice of K at a time; groups are added in float32 in ascending order,
// which makes the result the same on every ISA, for every split and number of threads.
// Must not know: how a layout places its codes inside a line or a block.
#include <cstring>

#include "format/layout.h"
#include "ops/checks.h"
#include "ops/linear_core.h"
#include "ops/ops.h"
#include "runtime/tuning.h"

namespace bitnet::ops {
namespace {

constexpr int64_t kGroup = layout::kBlockWeights;
constexpr int64_t kGroupLines = kGroup / layout::kTileStepK;
// A task is a few units of rows x kTokens tokens: its sums and its two rows of results stay in L1.
constexpr int64_t kTokens = 32;
constexpr int64_t kRows = 80;  // at most

struct Call {
  Weight weight;
  const QuantizedRows* rows;
  const int32_t* group_sums;  // [groups, tokens], of the quantised tokens
  const float* scales;        // [n_rows, groups]
  const float* bias;          // may be null
  int64_t groups;
  DType type;
  void* out;
};

struct Task {
  int64_t unit_begin, unit_end, token_begin, token_end;
};

// Exact sums of one group: out[m * kRows + i] for the rows of the task's units.
void multiply_group(const KernelTable& table, const Call& call, const Task& task, int64_t group,
                    int32_t* out) {
  const Weight& w = call.weight;
  const QuantizedRows& rows = *call.rows;
  const int8_t* x = rows.codes.get() + task.token_begin * rows.stride + group * kGroup;
  const int32_t* sums = call.group_sums + group * rows.tokens + task.token_begin;
  const int64_t tokens = task.token_end - task.token_begin, ahead = tuning().prefetch_bytes;
  if (w.format == WeightFormat::kCanonical) {
    uint8_t block[kRows * layout::kBlockBytes];
    const int64_t row_bytes = layout::row_bytes_for(w.k);
    const int64_t begin = task.unit_begin * w.unit_rows;
    const int64_t n = std::min(task.unit_end * w.unit_rows, w.n_rows) - begin;
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(block + i * layout::kBlockBytes,
                  w.data + (begin + i) * row_bytes + group * layout::kBlockBytes,
                  static_cast<size_t>(layout::kBlockBytes));
    }
    table.ternary_gemm(block, layout::kBlockBytes, 0, n, x, rows.stride, sums, tokens, out, kRows,
                       ahead);
    return;
  }
  const int64_t line_bytes = w.unit_bytes / w.lines, first = group * kGroupLines;
  for (int64_t unit = task.unit_begin; unit < task.unit_end; ++unit) {
    const TileJob job{w.data + unit * w.unit_bytes + first * line_bytes,
                      std::min(kGroupLines, w.lines - first),
                      1,
                      x,
                      rows.stride,
                      sums,
                      tokens,
                      out + (unit - task.unit_begin) * w.unit_rows,
                      kRows,
                      ahead};
    (w.format == WeightFormat::kTwoBit ? table.tile_gemm : table.trit_tile_gemm)(job);
  }
}

void run_task(const KernelTable& table, const Call& call, const Task& task) {
  static_assert(kRows >= kMaxUnitRows);
  int32_t sums[kTokens * kRows];
  float buffers[2][kTokens * kRows], scales[kRows];
  const int64_t row = task.unit_begin * call.weight.unit_rows;
  const int64_t n = std::min(task.unit_end * call.weight.unit_rows, call.weight.n_rows) - row;
  const int64_t tokens = task.token_end - task.token_begin;
  for (int64_t g = 0; g < call.groups; ++g) {
    multiply_group(table, call, task, g, sums);
    for (int64_t i = 0; i < n; ++i) scales[i] = call.scales[(row + i) * call.groups + g];
    const float* before = g == 0 ? nullptr : buffers[(g + 1) % 2];
    for (int64_t m = 0; m < tokens; ++m) {
      table.scale_row(sums + m * kRows, n, scales, 1, 1.0F,
                      before == nullptr ? nullptr : before + m * kRows, buffers[g % 2] + m * kRows);
    }
  }
  for (int64_t m = 0; m < tokens; ++m) {
    float* y = buffers[(call.groups + 1) % 2] + m * kRows;
    const float x_scale = call.rows->scales.get()[task.token_begin + m];
    for (int64_t i = 0; i < n; ++i) y[i] *= x_scale;
    if (call.bias != nullptr) table.add_row(y, call.bias + row, n, y);
    const int64_t at = (task.token_begin + m) * call.weight.n_rows + row;
    table.store_row(call.type, y, n, offset_bytes(call.out, at * element_size(call.type)));
  }
}

void run(const Call& call) {
  const KernelTable& table = kernels();
  const int64_t tokens = call.rows->tokens, units = call.weight.units;
  const int64_t per_task = std::max<int64_t>(1, 64 / call.weight.unit_rows);
  const int64_t token_tasks = (tokens + kTokens - 1) / kTokens;
  const int64_t tasks = (units + per_task - 1) / per_task * token_tasks;
  if (tasks == 0) return;
  const int64_t macs = call.weight.n_rows * call.weight.k * tokens;
  const int64_t shares = shares_for(tasks, macs, kMinMacs);
  run_shares(shares, [&](int64_t s) {
    const int64_t end = share_begin(tasks, shares, s + 1);
    for (int64_t i = share_begin(tasks, shares, s); i < end; ++i) {
      const int64_t unit = i / token_tasks * per_task, token = i % token_tasks * kTokens;
      run_task(table, call,
               {unit, std::min(unit + per_task, units), token, std::min(token + kTokens, tokens)});
    }
  });
}

// Sums of the quantised tokens over each group: [groups, tokens].
Scratch<int32_t> sums_of_groups(QuantizedRows& rows, int64_t groups) {
  Scratch<int32_t> sums(groups * rows.tokens);
  for (int64_t m = 0; m < rows.tokens; ++m) {
    for (int64_t g = 0; g < groups; ++g)
      sums.get()[g * rows.tokens + m] = kernels().sum_i8(rows.row(m) + g * kGroup, kGroup);
  }
  return sums;
}

}  // namespace

Tensor group_linear(const Tensor& x_in, const Tensor& weight, const Tensor& weight_scale,
                    std::optional<Tensor> bias, std::optional<int64_t> out_features,
                    std::optional<int64_t> in_features) {
  const Check check("group_linear");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  Shape shape = shape_of(x_in);
  const int64_t k = shape.back(), groups = layout::blocks_for(k);
  check.in_features(in_features, k);
  const Weight w = weight_view(check, weight, "weight", k, out_features);
  const int64_t n = w.n_rows;
  check.dtype(weight_scale, "weight_scale", ScalarType::Float);
  check.shape(weight_scale, "weight_scale", {n, groups});
  check.contiguous(weight_scale, "weight_scale");
  if (bias.has_value()) check.vector(*bias, "bias", n);
  const int64_t tokens = product(shape, 0, shape.size() - 1);
  const Tensor x = as_contiguous(x_in);
  const DType type = dtype_of(x);
  QuantizedRows rows(tokens, k);
  quantize_tokens(x.const_data_ptr(), type, rows);
  const Scratch<int32_t> sums = sums_of_groups(rows, groups);
  const Scratch<float> bias_values = bias.has_value() ? float_vector(*bias) : Scratch<float>(0);
  shape.back() = n;
  Tensor out = empty(shape, x.scalar_type());
  run({w, &rows, sums.get(), static_cast<const float*>(weight_scale.const_data_ptr()),
       bias.has_value() ? bias_values.get() : nullptr, groups, type, out.mutable_data_ptr()});
  return out;
}

}  // namespace bitnet::ops
