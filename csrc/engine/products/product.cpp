// Products cut into units; see product.h. A claimed run of units is multiplied in calls whose sums
// stay in L1.
#include "engine/products/product.h"

#include <algorithm>
#include <atomic>
#include <exception>

#include "format/layout.h"
#include "runtime/memory.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// The size of a part if `total` is cut into the fewest equal parts of at most `max`.
int64_t even_part(int64_t total, int64_t max) {
  return total <= max ? std::max<int64_t>(total, 1) : ceil_div(total, ceil_div(total, max));
}

}  // namespace

void* thread_scratch(int64_t bytes) {
  thread_local Workspace workspace;
  try {
    return workspace.reserve(bytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

ProductShape shape_of(const Projection* projections, int64_t count, int64_t tokens,
                      int64_t planes) {
  ProductShape shape{.format = projections[0].weight->format,
                     .tokens = tokens,
                     .k = projections[0].weight->k,
                     .row_blocks = 0,
                     .block_rows = 1,
                     .planes = planes};
  for (int64_t i = 0; i < count; ++i) {
    const Projection& p = projections[i];
    shape.row_blocks += p.weight->row_blocks;
    shape.block_rows = std::max(shape.block_rows, p.weight->block_rows);
    shape.grouped = shape.grouped || p.grouped();
    shape.blocked = shape.blocked && (!p.grouped() || p.groups.blocked);
    if (p.weight->reads_rows()) shape.format = WeightFormat::kCanonical;
  }
  return shape;
}

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

Product::Product(const KernelTable& kernels, const QuantizedTokens& x,
                 const Projection* projections, int64_t count, const ProductPlan& plan,
                 const PartSums& parts)
    : kernels_(kernels),
      x_(x),
      projections_(projections),
      count_(count),
      algorithm_(plan.algorithm),
      blocking_(plan.blocking),
      parts_(parts),
      k_parts_(plan.k_parts) {
  if (algorithm_ == nullptr) {
    const ProductShape shape = shape_of(projections, count, x.tokens, x.planes());
    algorithm_ = &algorithm_for(kernels, shape);
    blocking_ = algorithm_->blocking(shape);
  }
  if (!blocking_.is_special()) algorithm_ = nullptr;
  token_blocks_ = ceil_div(x.tokens, blocking_.tokens);
  is_split_ = blocking_.scratch_bytes == 0 && (plan.token_blocks > token_blocks_ || k_parts_ > 1);
  if (plan.token_blocks != 0) token_blocks_ = plan.token_blocks;
  block_tokens_ = token_blocks_ == 0 ? 1
                                     : tokens_of_block(x.tokens, token_blocks_,
                                                       std::max(x.tile, blocking_.token_multiple));
  for (int64_t i = 0; i < count; ++i) {
    row_blocks_ += projections[i].weight->row_blocks;
    max_block_rows_ = std::max(max_block_rows_, projections[i].weight->block_rows);
  }
  if (blocking_.equal_row_parts)
    blocking_.rows =
        std::min(blocking_.rows,
                 even_part(row_blocks_, ceil_div(row_blocks_, plan.row_parts)) * max_block_rows_);
}

ClaimRule Product::claim() const {
  if (is_split_) return {1, std::max(k_parts_, token_blocks_), blocking_.claim_fraction};
  if (blocking_.equal_row_parts) {
    const int64_t part = even_part(row_blocks_, blocks_at_once(max_block_rows_));
    return {part, part, blocking_.claim_fraction};
  }
  const int64_t across = blocking_.tokens_outermost ? 1 : token_blocks_;
  const int64_t max = blocks_at_once(max_block_rows_) * across;
  const int64_t min = std::min(blocking_.min_rows / max_block_rows_, row_blocks_) * across;
  return {std::max<int64_t>(min, 1), std::max(min, max), blocking_.claim_fraction};
}

int64_t Product::blocks_at_once(int64_t block_rows) const {
  const int64_t rows = blocking_.kernel_stores
                           ? blocking_.rows
                           : std::min(blocking_.rows, blocking_.sums / block_tokens_);
  return std::max<int64_t>(1, rows / block_rows);
}

int64_t Product::row_blocks_at_once(const Weight& weight) const {
  const int64_t max = blocks_at_once(weight.block_rows);
  return blocking_.equal_row_parts ? even_part(weight.row_blocks, max) : max;
}

void Product::run(int64_t begin, int64_t end) const {
  if (k_parts_ != 1) return run_parts(begin, end);
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

// Consecutive units read consecutive weights: whole row blocks, as many as there are, each for all
// tokens.
void Product::run_rows_outermost(const Projection& p, int64_t begin, int64_t end) const {
  const int64_t max = row_blocks_at_once(*p.weight);
  while (begin < end) {
    const int64_t block = begin / token_blocks_, token_block = begin % token_blocks_;
    const int64_t whole = token_block == 0 ? std::min((end - begin) / token_blocks_, max) : 0;
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
    int64_t block = begin % row_blocks_;
    const Projection& p = find(block);
    const int64_t count =
        std::min({end - begin, p.weight->row_blocks - block, row_blocks_at_once(*p.weight)});
    multiply(p, block, count, token_block);
    begin += count;
  }
}

const Projection& Product::find(int64_t& block) const {
  const Projection* p = projections_;
  while (block >= p->weight->row_blocks && p + 1 < projections_ + count_)
    block -= p++->weight->row_blocks;
  return *p;
}

// The parts of a cell follow each other, so a run of units reads consecutive weights here, too.
void Product::run_parts(int64_t begin, int64_t end) const {
  for (; begin < end; ++begin) {
    const int64_t cell = begin / k_parts_;
    int64_t block = cell / token_blocks_;
    const Projection& p = find(block);
    multiply_part(p, block, cell, begin % k_parts_);
  }
}

// Where a part of K begins, a multiple of the codes of a token that always lie together.
int64_t Product::part_begin(const Weight& weight, int64_t part) const {
  const int64_t steps = weight.k_steps * layout::kTileStepK / kTokenStep;
  return steps * part / k_parts_ * kTokenStep;
}

// The tokens' sums are subtracted once, so only the first part gets them.
void Product::multiply_part(const Projection& p, int64_t block, int64_t cell, int64_t part) const {
  static constexpr int32_t kNoSums[kMaxPartTokens] = {};
  const int64_t size = sums_of_part();
  int32_t* sums = parts_.sums + cell * k_parts_ * size;
  const ProductPart all = part_of(p, block, 1, cell % token_blocks_);
  if (all.tokens <= 0) return;
  const Weight& w = *p.weight;
  const int64_t begin = part_begin(w, part), end = part_begin(w, part + 1);
  ProductJob job = job_of(w, x_, all);
  job.sums = sums + part * size;
  job.out_stride = w.block_rows;
  job.weights += begin / layout::kTileStepK * (w.block_bytes / w.k_steps);
  job.k_steps = (end - begin) / layout::kTileStepK;
  job.x += begin / kTokenStep * x_.step_stride(all.token);
  if (part != 0) job.x_sum = kNoSums;
  run_job(job, nullptr);
  std::atomic_ref<int32_t> done(parts_.done[cell]);
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != k_parts_) return;
  done.store(0, std::memory_order_relaxed);  // others read it after the stage
  const int64_t count = job.tokens * job.out_stride;
  for (int64_t other = 1; other < k_parts_; ++other) {
    const int32_t* from = sums + other * size;
    for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
  }
  job.sums = sums;
  kernels_.store_block(epilogue_of(p, job, all));
}

void Product::multiply(const Projection& p, int64_t block, int64_t blocks,
                       int64_t token_block) const {
  alignas(64) int32_t sums[kMaxProductSums];
  const ProductPart part = part_of(p, block, blocks, token_block);
  if (part.tokens <= 0) return;  // blocks of whole tiles may leave none for the last ones
  if (p.grouped()) return multiply_grouped(p, part);
  ProductJob job = job_of(*p.weight, x_, part);
  job.sums = sums;
  job.out_stride = blocks * p.weight->block_rows;
  if (blocking_.scratch_bytes != 0) job.scratch = thread_scratch(blocking_.scratch_bytes);
  const EpilogueJob epilogue = epilogue_of(p, job, part);
  run_job(job, &epilogue);
}

void Product::run_job(const ProductJob& job, const EpilogueJob* epilogue) const {
  const ProductAlgorithm& algorithm =
      algorithm_ != nullptr ? *algorithm_ : algorithm_for(kernels_, shape_of(job));
  algorithm.run(job, epilogue);
}

ProductPart Product::part_of(const Projection&, int64_t block, int64_t blocks,
                             int64_t token_block) const {
  const int64_t token = token_block * block_tokens_;
  return {block, block + blocks, token, std::min(block_tokens_, x_.tokens - token)};
}

EpilogueJob Product::epilogue_of(const Projection& p, const ProductJob& job,
                                 const ProductPart& part) const {
  const int64_t row = part.block_begin * p.weight->block_rows;
  EpilogueJob out = epilogue_at(p, row, part.token);
  out.sums = job.sums;
  out.sums_stride = job.out_stride;
  out.rows = std::min(job.out_stride, p.weight->n_rows - row);
  out.tokens = job.tokens;
  return out;
}

// The epilogue of one token from `row` on; the caller fills in the sums and their number.
EpilogueJob Product::epilogue_at(const Projection& p, int64_t row, int64_t token) const {
  EpilogueJob out{
      .sums = nullptr,
      .sums_stride = 0,
      .rows = 0,
      .tokens = 1,
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

// A panel has more rows than a row block, so some units have no panel.
void Product::run_columns(const ColumnsRead& read, int64_t begin, int64_t end) const {
  constexpr int64_t kRows = layout::kColumnRows, kAtOnce = 16;
  const Projection& p = projections_[0];
  const int64_t panels = layout::column_panels(p.weight->n_rows), all = units();
  const int64_t last = ceil_div(end * panels, all);
  alignas(64) int32_t sums[kAtOnce * kRows];
  for (int64_t panel = ceil_div(begin * panels, all); panel < last; panel += kAtOnce) {
    const int64_t count = std::min(kAtOnce, last - panel), row = panel * kRows;
    kernels_.column_product({.columns = read.columns + panel * x_.k * layout::kColumnBytes,
                             .k = x_.k,
                             .panels = count,
                             .at = read.at,
                             .x = read.codes,
                             .count = read.count,
                             .x_sum = x_.sums[0],
                             .out = sums});
    EpilogueJob out = epilogue_at(p, row, 0);
    out.sums = sums;
    out.sums_stride = count * kRows;
    out.rows = std::min(count * kRows, p.weight->n_rows - row);
    kernels_.store_block(out);
  }
}

// The values of a call stay in L1. Products by tables have more of them: they lie behind the
// scratch, or are made in pieces if there is no scratch.
void Product::multiply_grouped(const Projection& p, const ProductPart& part) const {
  constexpr int64_t kPieceTokens = 64;
  alignas(64) float few[kMaxProductSums];
  float* values = few;
  char* scratch = nullptr;
  int64_t blocks = part.block_end - part.block_begin, tokens = part.tokens;
  if (blocking_.scratch_bytes != 0) {
    const int64_t count = block_tokens_ * (blocking_.rows + max_block_rows_);
    scratch = static_cast<char*>(thread_scratch(blocking_.scratch_bytes + 4 * count));
    if (scratch != nullptr) {
      values = reinterpret_cast<float*>(scratch + blocking_.scratch_bytes);
    } else {
      tokens = kPieceTokens;
      blocks = kMaxProductSums / (kPieceTokens * p.weight->block_rows);
    }
  }
  for (int64_t m = 0; m < part.tokens; m += tokens) {
    for (int64_t block = part.block_begin; block < part.block_end; block += blocks) {
      const ProductPart piece{block, std::min(block + blocks, part.block_end), part.token + m,
                              std::min(tokens, part.tokens - m)};
      const int64_t stride = (piece.block_end - block) * p.weight->block_rows;
      multiply_groups(kernels_, *p.weight, p.groups, x_, piece, values, stride, scratch);
      store_groups(p, piece, values, stride);
    }
  }
}

void Product::store_groups(const Projection& p, const ProductPart& part, float* values,
                           int64_t stride) const {
  const int64_t row = part.block_begin * p.weight->block_rows;
  const int64_t n = std::min(stride, p.weight->n_rows - row);
  for (int64_t m = 0; m < part.tokens; ++m) {
    float* y = values + m * stride;
    if (p.bias != nullptr) kernels_.add_row(y, p.bias + row, n, y);
    store_values(p.out, y, n, part.token + m, row);
  }
}

// Finished values of one token, rows [row, row + n), where the epilogue would put them.
void Product::store_values(const Output& out, float* y, int64_t n, int64_t token,
                           int64_t row) const {
  const int64_t element = out.kind == StoreKind::kStore ? element_size(out.type) : 4;
  void* to = offset_bytes(out.data, token * out.stride_bytes + row * element);
  if (out.kind == StoreKind::kStore) return kernels_.store_row(out.type, y, n, to);
  kernels_.round_row(out.type, y, n);
  auto* floats = static_cast<float*>(to);
  if (out.kind == StoreKind::kAdd) return kernels_.add_row(floats, y, n, floats);
  std::copy(y, y + n, floats);
}

const void* Product::weights_of(int64_t unit) const {
  const int64_t cell = unit / k_parts_;
  const bool tokens_outermost = blocking_.tokens_outermost && k_parts_ == 1;
  int64_t block = tokens_outermost ? cell % row_blocks_ : cell / token_blocks_;
  const Weight& w = *find(block).weight;
  const int64_t steps = k_parts_ == 1 ? 0 : part_begin(w, unit % k_parts_) / layout::kTileStepK;
  return w.data + block * w.block_bytes + steps * (k_parts_ == 1 ? 0 : w.block_bytes / w.k_steps);
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

void multiply(const KernelTable& kernels, const QuantizedTokens& x, const Projection* projections,
              int64_t count) {
  const ProductShape shape = shape_of(projections, count, x.tokens, x.planes());
  int64_t macs = 0;
  for (int64_t i = 0; i < count; ++i) macs += projections[i].weight->n_rows * x.k * x.tokens;
  const int64_t threads = partitions_for(StagedExecutor::kMaxPartitions, macs, kMinMacs);
  const Product product(kernels, x, projections, count, plan_product(kernels, shape, threads));
  if (product.units() == 0) return;
  const int64_t partitions = std::min(product.units(), threads);
  if (partitions == 1) return product.run(0, product.units());  // nobody to share claims with
  thread_local StagedExecutor executor;
  executor.run(partitions, OneStage{product});
}

}  // namespace bitnet::engine
