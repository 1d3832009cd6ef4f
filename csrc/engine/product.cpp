// Products cut into units; see product.h. A claimed run of units is multiplied in calls whose sums
// stay in L1.
#include "engine/product.h"

#include <algorithm>

#include "format/layout.h"

namespace bitnet::engine {
namespace {

int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Tokens with groups are rows as they lie, and the values of a call stay in L1 as its sums would.
ProductBlocking blocking_of(const KernelTable& table, const QuantizedTokens& x, bool grouped) {
  const ProductBlocking blocking = table.product_blocking(x.tokens, x.k);
  return grouped ? ProductBlocking{.claim_parts = blocking.claim_parts} : blocking;
}

}  // namespace

Projection make_projection(const Weight& weight, const float* scale, int64_t scale_count,
                           DType type, void* out) {
  return {&weight,
          scale,
          scale_count == 1 ? 0 : 1,
          nullptr,
          {StoreKind::kStore, type, out, weight.n_rows * element_size(type)}};
}

Projection make_sums(const Weight& weight, int32_t* out) {
  const auto stride_bytes = weight.n_rows * static_cast<int64_t>(sizeof(int32_t));
  return {&weight, nullptr, 0, nullptr, {StoreKind::kSums, DType::kF32, out, stride_bytes}};
}

Product::Product(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
                 int64_t count)
    : table_(table),
      x_(x),
      projections_(projections),
      count_(count),
      blocking_(blocking_of(table, x, projections[0].grouped())),
      token_blocks_(ceil_div(x.tokens, blocking_.tokens)),
      block_tokens_(token_blocks_ == 0 ? 1 : ceil_div(x.tokens, token_blocks_)) {
  if (x.tile != 0) block_tokens_ = ceil_div(block_tokens_, x.tile) * x.tile;
  for (int64_t i = 0; i < count; ++i) {
    row_blocks_ += projections[i].weight->row_blocks;
    most_block_rows_ = std::max(most_block_rows_, projections[i].weight->block_rows);
    all_finished_ = all_finished_ && finishes(*projections[i].weight);
  }
}

ClaimRule Product::claim() const {
  const int64_t across = blocking_.tokens_outermost ? 1 : token_blocks_;
  const int64_t most = blocks_at_once(most_block_rows_, all_finished_) * across;
  const int64_t least = std::min(blocking_.least_rows / most_block_rows_, row_blocks_) * across;
  return {std::max<int64_t>(least, 1), std::max(least, most), blocking_.claim_parts};
}

bool Product::finishes(const Weight& weight) const {
  return blocking_.finishes_sums && weight.format != WeightFormat::kCanonical;
}

int64_t Product::blocks_at_once(int64_t block_rows, bool finished) const {
  const int64_t rows =
      finished ? blocking_.rows : std::min(blocking_.rows, blocking_.sums / block_tokens_);
  return std::max<int64_t>(1, rows / block_rows);
}

int64_t Product::row_blocks_at_once(const Weight& weight) const {
  return blocks_at_once(weight.block_rows, finishes(weight));
}

void Product::run(int64_t begin, int64_t end) const {
  if (blocking_.tokens_outermost) return run_tokens_outermost(begin, end);
  int64_t offset = 0;  // of the matrix's units among all
  for (int64_t i = 0; i < count_; ++i) {
    const int64_t units = projections_[i].weight->row_blocks * token_blocks_;
    const int64_t first = std::max(begin - offset, int64_t{0});
    const int64_t last = std::min(end - offset, units);
    if (first < last) run_rows_outermost(projections_[i], first, last);
    offset += units;
  }
}

// A run of consecutive units reads consecutive weights: whole row blocks, each for all tokens, as
// far as they go.
void Product::run_rows_outermost(const Projection& p, int64_t begin, int64_t end) const {
  const int64_t most = row_blocks_at_once(*p.weight);
  while (begin < end) {
    const int64_t block = begin / token_blocks_, token_block = begin % token_blocks_;
    const int64_t whole = token_block == 0 ? std::min((end - begin) / token_blocks_, most) : 0;
    if (whole == 0) {
      multiply(p, block, 1, token_block);
      ++begin;
      continue;
    }
    for (int64_t t = 0; t < token_blocks_; ++t) multiply(p, block, whole, t);
    begin += whole * token_blocks_;
  }
}

void Product::run_tokens_outermost(int64_t begin, int64_t end) const {
  while (begin < end) {
    const int64_t token_block = begin / row_blocks_;
    int64_t block = begin % row_blocks_;  // among those of all matrices
    const Projection* p = projections_;
    while (block >= p->weight->row_blocks) block -= p++->weight->row_blocks;
    const int64_t count =
        std::min({end - begin, p->weight->row_blocks - block, row_blocks_at_once(*p->weight)});
    multiply(*p, block, count, token_block);
    begin += count;
  }
}

void Product::multiply(const Projection& p, int64_t block, int64_t blocks,
                       int64_t token_block) const {
  alignas(64) int32_t sums[kMaxProductSums];
  const int64_t token = token_block * block_tokens_;
  if (token >= x_.tokens) return;  // blocks of whole tiles may be fewer
  const SumsJob job{
      .block_begin = block,
      .block_end = block + blocks,
      .x = x_.token(token),
      .x_stride = x_.stride(),
      .x_step_stride = x_.step_stride(token),
      .x_sum = x_.sums + token,
      .tokens = std::min(block_tokens_, x_.tokens - token),
      .out = sums,
      .out_stride = blocks * p.weight->block_rows,
  };
  if (p.grouped()) return multiply_grouped(p, job, token);
  multiply_and_store(table_, *p.weight, job, epilogue_of(p, job, token));
}

EpilogueJob Product::epilogue_of(const Projection& p, const SumsJob& job, int64_t token) const {
  const int64_t row = job.block_begin * p.weight->block_rows;
  EpilogueJob out{
      .sums = job.out,
      .sums_stride = job.out_stride,
      .rows = std::min(job.out_stride, p.weight->n_rows - row),
      .tokens = job.tokens,
      .w_scale = p.scale + p.scale_step * row,
      .w_scale_step = p.scale_step,
      .x_scale = x_.scales + token,
      .bias = p.bias == nullptr ? nullptr : p.bias + row,
      .kind = p.out.kind,
      .type = p.out.type,
      .out = nullptr,
      .out_stride_bytes = p.out.stride_bytes,
  };
  const int64_t column = row * (p.out.kind == StoreKind::kStore ? element_size(p.out.type) : 4);
  out.out = offset_bytes(p.out.data, token * p.out.stride_bytes + column);
  return out;
}

void Product::multiply_grouped(const Projection& p, const SumsJob& job, int64_t token) const {
  alignas(64) float values[kMaxProductSums];
  multiply_groups(table_, *p.weight, p.groups, x_,
                  {.block_begin = job.block_begin,
                   .block_end = job.block_end,
                   .token = token,
                   .tokens = job.tokens,
                   .out = values,
                   .out_stride = job.out_stride});
  const int64_t row = job.block_begin * p.weight->block_rows;
  const int64_t n = std::min(job.out_stride, p.weight->n_rows - row);
  for (int64_t m = 0; m < job.tokens; ++m) {
    float* y = values + m * job.out_stride;
    if (p.bias != nullptr) table_.add_row(y, p.bias + row, n, y);
    store_values(p.out, y, n, token + m, row);
  }
}

// Finished values of one token, rows [row, row + n), where the epilogue would put them.
void Product::store_values(const Output& out, float* y, int64_t n, int64_t token,
                           int64_t row) const {
  const int64_t element = out.kind == StoreKind::kStore ? element_size(out.type) : 4;
  void* to = offset_bytes(out.data, token * out.stride_bytes + row * element);
  if (out.kind == StoreKind::kStore) return table_.store_row(out.type, y, n, to);
  table_.round_row(out.type, y, n);
  auto* floats = static_cast<float*>(to);
  if (out.kind == StoreKind::kAdd) return table_.add_row(floats, y, n, floats);
  std::copy(y, y + n, floats);
}

const void* Product::weights_of(int64_t unit) const {
  int64_t block = blocking_.tokens_outermost ? unit % row_blocks_ : unit / token_blocks_;
  const Projection* p = projections_;
  while (block >= p->weight->row_blocks && p + 1 < projections_ + count_)
    block -= p++->weight->row_blocks;
  return p->weight->data + block * p->weight->block_bytes;
}

namespace {

struct OneStage {
  const Product& product;
  int64_t stages() const { return 1; }
  int64_t units(int64_t) const { return product.units(); }
  ClaimRule claim(int64_t) const { return product.claim(); }
  void prepare(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t) const { product.run(begin, end); }
  void prefetch_next(int64_t, int64_t) const {}
};

}  // namespace

void multiply(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
              int64_t count) {
  const Product product(table, x, projections, count);
  if (product.units() == 0) return;
  int64_t macs = 0;
  for (int64_t i = 0; i < count; ++i) macs += projections[i].weight->n_rows * x.k * x.tokens;
  const int64_t most = std::min(product.units(), StagedExecutor::kMaxPartitions);
  const int64_t partitions = partitions_for(most, macs, kMinMacs);
  if (partitions == 1) return product.run(0, product.units());  // nobody to share claims with
  thread_local StagedExecutor executor;
  executor.run(partitions, OneStage{product});
}

}  // namespace bitnet::engine
