// See linear_core.h.
#include "ops/linear_core.h"

#include <cstring>

#include "format/layout.h"

namespace bitnet::ops {
namespace {

// A task is kRowChunk weight rows x kTokenChunk tokens: its int32 sums stay in L1.
constexpr int64_t kRowChunk = 64;
constexpr int64_t kTokenChunk = 64;

int64_t chunks(int64_t n, int64_t chunk) { return (n + chunk - 1) / chunk; }

// Which projection, rows and tokens a task index stands for.  Rows run outermost, so that a share
// with consecutive tasks reads consecutive weights.
struct Task {
  const Projection* projection;
  int64_t row_begin, row_end, token_begin, token_end;
};

Task find_task(int64_t index, const Projection* projections, int64_t tokens) {
  const int64_t token_chunks = chunks(tokens, kTokenChunk);
  const Projection* p = projections;
  while (index >= chunks(p->n_rows, kRowChunk) * token_chunks) {
    index -= chunks(p->n_rows, kRowChunk) * token_chunks;
    ++p;
  }
  const int64_t row = index / token_chunks * kRowChunk;
  const int64_t token = index % token_chunks * kTokenChunk;
  return {p, row, std::min(row + kRowChunk, p->n_rows), token,
          std::min(token + kTokenChunk, tokens)};
}

void run_task(const KernelTable& table, const QuantizedRows& rows, const Task& task) {
  int32_t sums[kTokenChunk * kRowChunk];
  float values[kRowChunk];
  const Projection& p = *task.projection;
  const int64_t n = task.row_end - task.row_begin;
  table.ternary_gemm(p.weight, p.row_bytes, task.row_begin, task.row_end,
                     rows.codes.get() + task.token_begin * rows.stride, rows.stride,
                     rows.sums.get() + task.token_begin, task.token_end - task.token_begin, sums,
                     kRowChunk);
  for (int64_t m = task.token_begin; m < task.token_end; ++m) {
    table.scale_row(sums + (m - task.token_begin) * kRowChunk, n,
                    p.scale + p.scale_step * task.row_begin, p.scale_step, rows.scales.get()[m],
                    p.bias == nullptr ? nullptr : p.bias + task.row_begin, values);
    const int64_t at = (m * p.n_rows + task.row_begin) * element_size(p.type);
    table.store_row(p.type, values, n, offset_bytes(p.out, at));
  }
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

Projection make_projection(const Tensor& weight, const Tensor& scale, DType type, void* out) {
  return {static_cast<const uint8_t*>(weight.const_data_ptr()),
          weight.size(0),
          weight.size(1),
          static_cast<const float*>(scale.const_data_ptr()),
          scale.numel() == 1 ? 0 : 1,
          nullptr,
          type,
          out};
}

void project(const QuantizedRows& rows, const Projection* projections, int64_t count) {
  if (rows.tokens == 0) return;
  const KernelTable& table = kernels();
  int64_t tasks = 0, macs = 0;
  for (int64_t i = 0; i < count; ++i) {
    tasks += chunks(projections[i].n_rows, kRowChunk) * chunks(rows.tokens, kTokenChunk);
    macs += projections[i].n_rows * rows.k * rows.tokens;
  }
  if (tasks == 0) return;
  const int64_t shares = shares_for(tasks, macs, kMinMacs);
  run_shares(shares, [&](int64_t s) {
    const int64_t end = share_begin(tasks, shares, s + 1);
    for (int64_t i = share_begin(tasks, shares, s); i < end; ++i) {
      run_task(table, rows, find_task(i, projections, rows.tokens));
    }
  });
}

void project_i32(const QuantizedRows& rows, const uint8_t* weight, int64_t n_rows,
                 int64_t row_bytes, int32_t* out) {
  const KernelTable& table = kernels();
  if (rows.tokens == 0) return;
  const int64_t groups = chunks(n_rows, 16);
  parallel_ranges(groups, 16 * rows.k * rows.tokens, kMinMacs, [&](int64_t begin, int64_t end) {
    table.ternary_gemm(weight, row_bytes, begin * 16, std::min(end * 16, n_rows), rows.codes.get(),
                       rows.stride, rows.sums.get(), rows.tokens, out + begin * 16, n_rows);
  });
}

}  // namespace bitnet::ops
