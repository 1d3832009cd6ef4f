// Quantised tokens and projections; see linear_core.h. How rows
// and tokens are cut into the shares of a region is decided
// here. Must not know tensors' names or an op.
#include "ops/linear_core.h"

#include <cstring>

#include "format/layout.h"
#include "ops/team_region.h"

namespace bitnet::ops {
namespace {

// What a chunk multiplies at once: its int32 sums stay in L1.
constexpr int64_t kBlockTokens = 64;
constexpr int64_t kChunkRows = 512;
constexpr int64_t kChunkSums = kBlockTokens * kMaxUnitRows;

int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// A run of one matrix's rows with a block of tokens.
struct Piece {
  const Projection* projection;
  int64_t row, rows;      // rows of the matrix
  int64_t token, tokens;  // tokens
  const int32_t* sums;    // row i, token m at sums[m * stride + i]
  int64_t stride;
};

void store_scaled(const KernelTable& table, const QuantizedRows& rows, const Piece& piece) {
  float values[kChunkRows];
  const Projection& p = *piece.projection;
  const float* bias = p.bias == nullptr ? nullptr : p.bias + piece.row;
  for (int64_t m = 0; m < piece.tokens; ++m) {
    const int64_t token = piece.token + m;
    table.scale_row(piece.sums + m * piece.stride, piece.rows, p.scale + p.scale_step * piece.row,
                    p.scale_step, rows.scales.get()[token], bias, values);
    const int64_t at = (token * p.weight.n_rows + piece.row) * element_size(p.type);
    table.store_row(p.type, values, piece.rows, offset_bytes(p.out, at));
  }
}

void store_sums(const KernelTable&, const QuantizedRows&, const Piece& piece) {
  const Projection& p = *piece.projection;
  for (int64_t m = 0; m < piece.tokens; ++m) {
    std::memcpy(static_cast<int32_t*>(p.out) + (piece.token + m) * p.weight.n_rows + piece.row,
                piece.sums + m * piece.stride, static_cast<size_t>(piece.rows) * sizeof(int32_t));
  }
}

using Store = void (*)(const KernelTable&, const QuantizedRows&, const Piece&);

// The Program of runtime/team.h for all projections of the same tokens: one stage, whose units are
// the matrices' units times blocks of tokens.  Rows run outermost, so that a share with consecutive
// units reads consecutive weights.
class LinearProgram {
 public:
  LinearProgram(const QuantizedRows& rows, const Projection* projections, int64_t count,
                Store store)
      : table_(kernels()),
        rows_(rows),
        projections_(projections),
        count_(count),
        store_(store),
        blocks_(ceil_div(rows.tokens, kBlockTokens)),
        block_(ceil_div(rows.tokens, blocks_)) {
    for (int64_t i = 0; i < count; ++i) {
      units_ += projections[i].weight.units * blocks_;
      unit_rows_ = std::max(unit_rows_, projections[i].weight.unit_rows);
    }
  }

  int64_t stages() const { return 1; }
  int64_t units(int64_t = 0) const { return units_; }
  int64_t max_chunk(int64_t) const { return units_at_once(unit_rows_) * blocks_; }
  void prepare(int64_t, int64_t) const {}
  void look_ahead(int64_t, int64_t) const {}

  void run(int64_t, int64_t begin, int64_t end, int64_t) const {
    int64_t offset = 0;  // of the matrix's units among all
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t units = projections_[i].weight.units * blocks_;
      const int64_t first = std::max(begin - offset, int64_t{0});
      const int64_t last = std::min(end - offset, units);
      if (first < last) run_range(projections_[i], first, last);
      offset += units;
    }
  }

 private:
  int64_t units_at_once(int64_t unit_rows) const {
    return std::max<int64_t>(1, std::min(kChunkRows, kChunkSums / block_) / unit_rows);
  }

  // Units [begin, end) of one projection: runs of whole rows of blocks as far as they go.
  void run_range(const Projection& p, int64_t begin, int64_t end) const {
    const int64_t most = units_at_once(p.weight.unit_rows);
    while (begin < end) {
      const int64_t unit = begin / blocks_, block = begin % blocks_;
      const int64_t whole = block == 0 ? std::min((end - begin) / blocks_, most) : 0;
      if (whole == 0) {
        multiply(p, unit, 1, block);
        ++begin;
        continue;
      }
      for (int64_t b = 0; b < blocks_; ++b) multiply(p, unit, whole, b);
      begin += whole * blocks_;
    }
  }

  void multiply(const Projection& p, int64_t unit, int64_t units, int64_t block) const {
    int32_t sums[kChunkSums];
    const Weight& w = p.weight;
    const int64_t stride = units * w.unit_rows, row = unit * w.unit_rows;
    const int64_t token = block * block_, tokens = std::min(block_, rows_.tokens - token);
    multiply_units(table_, w, unit, unit + units, rows_.codes.get() + token * rows_.stride,
                   rows_.stride, rows_.sums.get() + token, tokens, sums, stride);
    store_(table_, rows_, {&p, row, std::min(stride, w.n_rows - row), token, tokens, sums, stride});
  }

  const KernelTable& table_;
  const QuantizedRows& rows_;
  const Projection* projections_;
  int64_t count_;
  Store store_;
  int64_t blocks_, block_;  // of tokens, as equal as can be
  int64_t units_ = 0, unit_rows_ = 1;
};

void run_projections(const QuantizedRows& rows, const Projection* projections, int64_t count,
                     Store store) {
  if (rows.tokens == 0) return;
  int64_t macs = 0;
  for (int64_t i = 0; i < count; ++i) macs += projections[i].weight.n_rows * rows.k * rows.tokens;
  const LinearProgram program(rows, projections, count, store);
  if (program.units() == 0) return;
  thread_local Team team;
  const int64_t most = std::min(program.units(), Team::kMaxShares);
  run_program(team, program, shares_for(most, macs, kMinMacs));
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
  run_projections(rows, projections, count, store_scaled);
}

void project_i32(const QuantizedRows& rows, const Weight& weight, int32_t* out) {
  const Projection projection{weight, nullptr, 0, nullptr, DType::kF32, out};
  run_projections(rows, &projection, 1, store_sums);
}

}  // namespace bitnet::ops
