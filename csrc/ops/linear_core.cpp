// See linear_core.h.
#include "ops/linear_core.h"

#include <cstring>

#include "format/layout.h"

namespace bitnet::ops {
namespace {

// A task is a few units of weight rows x kTokenChunk tokens: its int32 sums stay in L1.
constexpr int64_t kTokenChunk = 64;
constexpr int64_t kTaskRows = 80;  // at most

int64_t chunks(int64_t n, int64_t chunk) { return (n + chunk - 1) / chunk; }

int64_t units_per_task(const Weight& w) { return std::max<int64_t>(1, 64 / w.unit_rows); }
int64_t row_tasks(const Weight& w) { return chunks(w.units, units_per_task(w)); }

// Which projection, units and tokens a task index stands for.  Rows run outermost, so that a share
// with consecutive tasks reads consecutive weights.
struct Task {
  const Projection* projection;
  int64_t unit_begin, unit_end, token_begin, token_end;
};

Task find_task(int64_t index, const Projection* projections, int64_t tokens) {
  const int64_t token_chunks = chunks(tokens, kTokenChunk);
  const Projection* p = projections;
  while (index >= row_tasks(p->weight) * token_chunks) {
    index -= row_tasks(p->weight) * token_chunks;
    ++p;
  }
  const int64_t per_task = units_per_task(p->weight);
  const int64_t unit = index / token_chunks * per_task;
  const int64_t token = index % token_chunks * kTokenChunk;
  return {p, unit, std::min(unit + per_task, p->weight.units), token,
          std::min(token + kTokenChunk, tokens)};
}

void run_task(const KernelTable& table, const QuantizedRows& rows, const Task& task) {
  static_assert(kTaskRows >= kMaxUnitRows);
  int32_t sums[kTokenChunk * kTaskRows];
  float values[kTaskRows];
  const Projection& p = *task.projection;
  const int64_t row = task.unit_begin * p.weight.unit_rows;
  const int64_t n = std::min(task.unit_end * p.weight.unit_rows, p.weight.n_rows) - row;
  multiply_units(table, p.weight, task.unit_begin, task.unit_end,
                 rows.codes.get() + task.token_begin * rows.stride, rows.stride,
                 rows.sums.get() + task.token_begin, task.token_end - task.token_begin, sums,
                 kTaskRows);
  for (int64_t m = task.token_begin; m < task.token_end; ++m) {
    table.scale_row(sums + (m - task.token_begin) * kTaskRows, n, p.scale + p.scale_step * row,
                    p.scale_step, rows.scales.get()[m], p.bias == nullptr ? nullptr : p.bias + row,
                    values);
    const int64_t at = (m * p.weight.n_rows + row) * element_size(p.type);
    table.store_row(p.type, values, n, offset_bytes(p.out, at));
  }
}

void run_task_i32(const KernelTable& table, const QuantizedRows& rows, const Task& task) {
  int32_t sums[kTokenChunk * kTaskRows];
  const Weight& w = task.projection->weight;
  const int64_t row = task.unit_begin * w.unit_rows;
  const int64_t n = std::min(task.unit_end * w.unit_rows, w.n_rows) - row;
  multiply_units(table, w, task.unit_begin, task.unit_end,
                 rows.codes.get() + task.token_begin * rows.stride, rows.stride,
                 rows.sums.get() + task.token_begin, task.token_end - task.token_begin, sums,
                 kTaskRows);
  for (int64_t m = task.token_begin; m < task.token_end; ++m) {
    std::memcpy(static_cast<int32_t*>(task.projection->out) + m * w.n_rows + row,
                sums + (m - task.token_begin) * kTaskRows,
                static_cast<size_t>(n) * sizeof(int32_t));
  }
}

template <class Run>
void run_tasks(const QuantizedRows& rows, const Projection* projections, int64_t count, Run run) {
  if (rows.tokens == 0) return;
  const KernelTable& table = kernels();
  int64_t tasks = 0, macs = 0;
  for (int64_t i = 0; i < count; ++i) {
    tasks += row_tasks(projections[i].weight) * chunks(rows.tokens, kTokenChunk);
    macs += projections[i].weight.n_rows * rows.k * rows.tokens;
  }
  if (tasks == 0) return;
  const int64_t shares = shares_for(tasks, macs, kMinMacs);
  run_shares(shares, [&](int64_t s) {
    const int64_t end = share_begin(tasks, shares, s + 1);
    for (int64_t i = share_begin(tasks, shares, s); i < end; ++i) {
      run(table, rows, find_task(i, projections, rows.tokens));
    }
  });
}

}  // namespace

QuantizedRows::QuantizedRows(int64_t tokens_in, int64_t k_in)
    : tokens(tokens_in),
      k(k_in),
      stride(layout::padded_k(k_in)),
      codes(tokens * stride),
      sums(tokens),
      scales(tokens) {}

void quantize_token(const float* x, int64_t m, QuantizedRows& rows) {
  rows.scales.get()[m] =
      kernels().quantize_row(x, rows.k, rows.stride, rows.row(m), rows.sums.get() + m);
}

void quantize_tokens(const void* x, DType type, QuantizedRows& rows) {
  const KernelTable& table = kernels();
  const int64_t row_bytes = rows.k * element_size(type);
  const int64_t shares = shares_for(rows.tokens, rows.tokens * rows.k, kMinElements);
  Scratch<float> scratch(shares * rows.k);
  run_shares(shares, [&](int64_t s) {
    float* buffer = scratch.get() + s * rows.k;
    const int64_t end = share_begin(rows.tokens, shares, s + 1);
    for (int64_t m = share_begin(rows.tokens, shares, s); m < end; ++m) {
      const void* source = offset_bytes(x, m * row_bytes);
      const float* values = static_cast<const float*>(source);
      if (type != DType::kF32) {
        table.load_row(type, source, rows.k, buffer);
        values = buffer;
      }
      quantize_token(values, m, rows);
    }
  });
}

void adopt_tokens(const int8_t* x, QuantizedRows& rows) {
  for (int64_t m = 0; m < rows.tokens; ++m) {
    std::memcpy(rows.row(m), x + m * rows.k, static_cast<size_t>(rows.k));
    std::memset(rows.row(m) + rows.k, 0, static_cast<size_t>(rows.stride - rows.k));
    rows.sums.get()[m] = kernels().sum_i8(rows.row(m), rows.k);
  }
}

Projection make_projection(const Weight& weight, const Tensor& scale, DType type, void* out) {
  return {weight,
          static_cast<const float*>(scale.const_data_ptr()),
          scale.numel() == 1 ? 0 : 1,
          nullptr,
          type,
          out};
}

void project(const QuantizedRows& rows, const Projection* projections, int64_t count) {
  run_tasks(rows, projections, count, run_task);
}

void project_i32(const QuantizedRows& rows, const Weight& weight, int32_t* out) {
  const Projection projection{weight, nullptr, 0, nullptr, DType::kF32, out};
  run_tasks(rows, &projection, 1, run_task_i32);
}

}  // namespace bitnet::ops
