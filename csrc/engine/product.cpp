// Products cut into units; see product.h. A claimed run of units is multiplied in calls whose sums
// stay in L1.
#include "engine/product.h"

#include <algorithm>
#include <atomic>
#include <exception>

#include "engine/table_probe.h"
#include "format/layout.h"
#include "runtime/memory.h"

namespace bitnet::engine {
namespace {

int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Of products that read rows, the values of a call stay in L1 as its sums would.
ProductBlocking blocking_of(const KernelTable& table, const ProductShape& s, int64_t table_rows) {
  if (table_rows != 0) return table.table_blocking(s.tokens, table_rows, s.grouped);
  const ProductBlocking blocking = table.product_blocking(s.tokens, s.k);
  return s.row_major ? ProductBlocking{.claim_parts = blocking.claim_parts} : blocking;
}

// Tokens of a block when they are cut into about so many, in whole tiles.
int64_t tokens_of_block(int64_t tokens, int64_t blocks, int64_t tile) {
  const int64_t each = ceil_div(tokens, blocks);
  return tile == 0 ? each : ceil_div(each, tile) * tile;
}

// A total in the fewest parts of at most so many, as equal as can be.
int64_t even_part(int64_t total, int64_t most) {
  return total <= most ? std::max<int64_t>(total, 1) : ceil_div(total, ceil_div(total, most));
}

// Units of equal work that so many threads take at once, one each, again and again.
int64_t rounds(int64_t units, int64_t threads) { return ceil_div(units, threads); }

// Whether threads work for at least 7/8 of the time until the last of the units is done.
bool end_together(int64_t units, int64_t threads) {
  return 7 * rounds(units, threads) * threads <= 8 * units;
}

// The same of so many parts of each block of `each` tokens, of which the last may have fewer.
// Threads begin with equally many units, those of the first blocks the longest; or, with more
// parts, the others take from these until less than a unit is left.
bool blocks_end_together(int64_t tokens, int64_t each, int64_t parts, int64_t threads) {
  const int64_t longest = rounds(ceil_div(tokens, each) * parts, threads) * each;
  return 7 * longest * threads <= 8 * tokens * parts || 7 * each * (threads - 1) <= tokens * parts;
}

// The cut of a product that is made by tables of sums, if its calls have as many rows as are worth
// the building, and tables gain on this CPU. Else table_rows is 0. Where rows are too few for the
// threads, these get fewer tokens: a building costs more than what blocks of tokens share.
ProductCut table_cut_of(const KernelTable& table, const ProductShape& s, int64_t threads) {
  constexpr int64_t kLeastTokens = 32;  // of a block for that reason
  if (!s.tables) return {};
  const int64_t rows = s.row_blocks * s.block_rows;
  const ProductBlocking most = table.table_blocking(s.tokens, rows, s.grouped);
  if (most.scratch_bytes == 0) return {};
  ProductCut cut{.table_rows = rows};
  for (int64_t at_once = most.tokens;; at_once /= 2) {
    cut.token_blocks = ceil_div(s.tokens, at_once);
    cut.row_parts = ceil_div(rows, most.rows);
    const int64_t each =
        std::min(s.tokens, tokens_of_block(s.tokens, cut.token_blocks, most.token_multiple));
    while (!blocks_end_together(s.tokens, each, cut.row_parts, threads)) ++cut.row_parts;
    if (table.table_blocking(s.tokens, rows / cut.row_parts, s.grouped).scratch_bytes != 0) break;
    if (at_once < 2 * kLeastTokens || at_once % (2 * most.token_multiple) != 0) return {};
  }
  return tables_gain(table, s.tokens) ? cut : ProductCut{};  // asked last: it may take milliseconds
}

// Memory of this thread for the kernels, made at its first product by tables: a plan does not know
// how many threads will come. A call that gets none does without.
void* thread_scratch(int64_t bytes) {
  thread_local Workspace workspace;
  try {
    return workspace.reserve(bytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

constexpr int64_t kMostPartTokens = 32;

}  // namespace

// Blocks of fewer tokens decode the same weights more often, and below 16 that shows. Parts of K
// decode nothing twice, but their sums go through memory, once for each part: they have to be
// worth it, and 32 tokens' sums of a row block are as much as stays in L1 beside the rest.  A
// matrix unit multiplies about four times as much in the same time, and reads tiles of tokens.
ProductCut cut_for(const KernelTable& table, const ProductShape& s, int64_t threads) {
  constexpr int64_t kLeastTokens = 16, kMostParts = 8, kUnitsPerThread = 8;
  const ProductCut by_tables = table_cut_of(table, s, threads);
  if (by_tables.table_rows != 0) return by_tables;
  if (threads == 1) return {};
  const ProductBlocking blocking = blocking_of(table, s, 0);
  ProductCut best{ceil_div(s.tokens, blocking.tokens), 1};
  int64_t most = best.token_blocks * s.row_blocks;  // units of the best
  if (most == 0 || end_together(most, threads)) return best;
  const int64_t least_macs = blocking.finishes_sums ? 4 * kMinMacs : kMinMacs;
  const int64_t least_tokens = std::max(kLeastTokens, blocking.token_tile);
  const auto found = [&](const ProductCut& cut) {
    const int64_t units = cut.token_blocks * cut.k_parts * s.row_blocks;
    if (rounds(units, threads) * most >= rounds(most, threads) * units) return false;
    best = cut;
    most = units;
    return end_together(units, threads);
  };
  const auto fits = [&](int64_t tokens, int64_t k) {
    return tokens * k * s.block_rows >= least_macs;
  };
  ProductCut cut = best;
  for (int64_t n = cut.token_blocks + 1; n <= ceil_div(s.tokens, least_tokens); ++n) {
    const int64_t tokens = tokens_of_block(s.tokens, n, blocking.token_tile);
    if (ceil_div(s.tokens, tokens) != n || !fits(tokens, s.k)) continue;
    cut.token_blocks = n;
    if (found(cut)) return best;
  }
  const int64_t tokens = tokens_of_block(s.tokens, cut.token_blocks, blocking.token_tile);
  if (!s.splits_k || tokens > kMostPartTokens) return best;
  for (cut.k_parts = 2; cut.k_parts <= kMostParts; ++cut.k_parts) {
    if (!fits(tokens, s.k / cut.k_parts)) break;
    if (cut.token_blocks * cut.k_parts * s.row_blocks > kUnitsPerThread * threads) break;
    if (found(cut)) break;
  }
  if (best.k_parts != 1) {
    best.cells = best.token_blocks * s.row_blocks;
    best.sums = best.cells * best.k_parts * s.block_rows * tokens;
  }
  return best;
}

bool Projection::takes_tables() const {
  return weight->format != WeightFormat::kCanonical && (!grouped() || groups.blocked);
}

bool reads_rows(const Projection* projections, int64_t count) {
  return std::any_of(projections, projections + count,
                     [](const Projection& p) { return p.grouped() || p.weight->reads_rows(); });
}

ProductShape shape_of(const Projection* projections, int64_t count, int64_t tokens,
                      int64_t planes) {
  ProductShape shape{tokens,     projections[0].weight->k, 0,
                     1,          projections[0].grouped(), reads_rows(projections, count),
                     planes == 1};
  for (int64_t i = 0; i < count; ++i) {
    const Weight& w = *projections[i].weight;
    shape.row_blocks += w.row_blocks;
    shape.block_rows = std::max(shape.block_rows, w.block_rows);
    if (!projections[i].takes_tables()) shape.tables = false;
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

Product::Product(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
                 int64_t count, const ProductCut& cut, const PartSums& parts)
    : table_(table),
      x_(x),
      projections_(projections),
      count_(count),
      blocking_(
          blocking_of(table, shape_of(projections, count, x.tokens, x.planes()), cut.table_rows)),
      parts_(parts),
      token_blocks_(ceil_div(x.tokens, blocking_.tokens)),
      k_parts_(cut.k_parts) {
  finer_ = cut.table_rows == 0 && (cut.token_blocks > token_blocks_ || k_parts_ > 1);
  if (cut.token_blocks != 0) token_blocks_ = cut.token_blocks;
  block_tokens_ = token_blocks_ == 0 ? 1
                                     : tokens_of_block(x.tokens, token_blocks_,
                                                       std::max(x.tile, blocking_.token_multiple));
  for (int64_t i = 0; i < count; ++i) {
    row_blocks_ += projections[i].weight->row_blocks;
    most_block_rows_ = std::max(most_block_rows_, projections[i].weight->block_rows);
  }
  if (blocking_.even_rows)
    blocking_.rows =
        std::min(blocking_.rows,
                 even_part(row_blocks_, ceil_div(row_blocks_, cut.row_parts)) * most_block_rows_);
}

ClaimRule Product::claim() const {
  if (finer_) return {1, std::max(k_parts_, token_blocks_), blocking_.claim_parts};
  if (blocking_.even_rows) {
    const int64_t part = even_part(row_blocks_, blocks_at_once(most_block_rows_));
    return {part, part, blocking_.claim_parts};
  }
  const int64_t across = blocking_.tokens_outermost ? 1 : token_blocks_;
  const int64_t most = blocks_at_once(most_block_rows_) * across;
  const int64_t least = std::min(blocking_.least_rows / most_block_rows_, row_blocks_) * across;
  return {std::max<int64_t>(least, 1), std::max(least, most), blocking_.claim_parts};
}

int64_t Product::blocks_at_once(int64_t block_rows) const {
  const int64_t rows = blocking_.finishes_sums
                           ? blocking_.rows
                           : std::min(blocking_.rows, blocking_.sums / block_tokens_);
  return std::max<int64_t>(1, rows / block_rows);
}

int64_t Product::row_blocks_at_once(const Weight& weight) const {
  const int64_t most = blocks_at_once(weight.block_rows);
  return blocking_.even_rows ? even_part(weight.row_blocks, most) : most;
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

// The first part has the tokens' sums, which are to be taken off once.
void Product::multiply_part(const Projection& p, int64_t block, int64_t cell, int64_t part) const {
  static constexpr int32_t kNoSums[kMostPartTokens] = {};
  const int64_t size = sums_of_part(), token = cell % token_blocks_ * block_tokens_;
  int32_t* sums = parts_.sums + cell * k_parts_ * size;
  if (token >= x_.tokens) return;
  SumsJob job = job_of(p, block, 1, token, sums + part * size);
  job.k_begin = part_begin(*p.weight, part);
  job.k_count = part_begin(*p.weight, part + 1) - job.k_begin;
  job.x += job.k_begin / kTokenStep * job.x_step_stride;
  if (part != 0) job.x_sum = kNoSums;
  multiply_sums(table_, *p.weight, job);
  std::atomic_ref<int32_t> done(parts_.done[cell]);
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != k_parts_) return;
  done.store(0, std::memory_order_relaxed);  // the end of the stage tells the others
  const int64_t count = job.tokens * job.out_stride;
  for (int64_t other = 1; other < k_parts_; ++other) {
    const int32_t* from = sums + other * size;
    for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
  }
  job.out = sums;
  table_.store_block(epilogue_of(p, job, token));
}

void Product::multiply(const Projection& p, int64_t block, int64_t blocks,
                       int64_t token_block) const {
  alignas(64) int32_t sums[kMaxProductSums];
  const int64_t token = token_block * block_tokens_;
  if (token >= x_.tokens) return;  // blocks of whole tiles may be fewer
  SumsJob job = job_of(p, block, blocks, token, sums);
  if (p.grouped()) return multiply_grouped(p, job, token);
  if (blocking_.scratch_bytes != 0) job.scratch = thread_scratch(blocking_.scratch_bytes);
  multiply_and_store(table_, *p.weight, job, epilogue_of(p, job, token));
}

SumsJob Product::job_of(const Projection& p, int64_t block, int64_t blocks, int64_t token,
                        int32_t* sums) const {
  return {
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
}

EpilogueJob Product::epilogue_of(const Projection& p, const SumsJob& job, int64_t token) const {
  const int64_t row = job.block_begin * p.weight->block_rows;
  EpilogueJob out = epilogue_at(p, row, token);
  out.sums = job.out;
  out.sums_stride = job.out_stride;
  out.rows = std::min(job.out_stride, p.weight->n_rows - row);
  out.tokens = job.tokens;
  return out;
}

// From `row` on; which sums, and how many, the caller adds.
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

// Panels are more rows than row blocks, so of several units one has the work.
void Product::run_columns(const ColumnsRead& read, int64_t begin, int64_t end) const {
  constexpr int64_t kRows = layout::kColumnRows, kAtOnce = 16;
  const Projection& p = projections_[0];
  const int64_t panels = layout::column_panels(p.weight->n_rows), all = units();
  const int64_t last = ceil_div(end * panels, all);
  alignas(64) int32_t sums[kAtOnce * kRows];
  for (int64_t panel = ceil_div(begin * panels, all); panel < last; panel += kAtOnce) {
    const int64_t count = std::min(kAtOnce, last - panel), row = panel * kRows;
    table_.column_product({.columns = read.columns + panel * x_.k * layout::kColumnBytes,
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
    table_.store_block(out);
  }
}

// Values of a call stay in L1; those of tables of sums lie behind their scratch, or without scratch
// are made in pieces.
void Product::multiply_grouped(const Projection& p, const SumsJob& job, int64_t token) const {
  constexpr int64_t kPieceTokens = 64;
  alignas(64) float few[kMaxProductSums];
  float* values = few;
  char* scratch = nullptr;
  int64_t blocks = job.block_end - job.block_begin, tokens = job.tokens;
  if (blocking_.scratch_bytes != 0) {
    const int64_t count = block_tokens_ * (blocking_.rows + most_block_rows_);
    scratch = static_cast<char*>(thread_scratch(blocking_.scratch_bytes + 4 * count));
    if (scratch != nullptr) {
      values = reinterpret_cast<float*>(scratch + blocking_.scratch_bytes);
    } else {
      tokens = kPieceTokens;
      blocks = kMaxProductSums / (kPieceTokens * p.weight->block_rows);
    }
  }
  for (int64_t m = 0; m < job.tokens; m += tokens) {
    for (int64_t block = job.block_begin; block < job.block_end; block += blocks) {
      const int64_t end = std::min(block + blocks, job.block_end);
      const GroupsJob part{.block_begin = block,
                           .block_end = end,
                           .token = token + m,
                           .tokens = std::min(tokens, job.tokens - m),
                           .out = values,
                           .out_stride = (end - block) * p.weight->block_rows,
                           .scratch = scratch};
      multiply_groups(table_, *p.weight, p.groups, x_, part);
      store_groups(p, part);
    }
  }
}

void Product::store_groups(const Projection& p, const GroupsJob& job) const {
  const int64_t row = job.block_begin * p.weight->block_rows;
  const int64_t n = std::min(job.out_stride, p.weight->n_rows - row);
  for (int64_t m = 0; m < job.tokens; ++m) {
    float* y = job.out + m * job.out_stride;
    if (p.bias != nullptr) table_.add_row(y, p.bias + row, n, y);
    store_values(p.out, y, n, job.token + m, row);
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

void multiply(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
              int64_t count) {
  const ProductShape shape = shape_of(projections, count, x.tokens, x.planes());
  int64_t macs = 0;
  for (int64_t i = 0; i < count; ++i) macs += projections[i].weight->n_rows * x.k * x.tokens;
  const int64_t threads = partitions_for(StagedExecutor::kMaxPartitions, macs, kMinMacs);
  const Product product(table, x, projections, count, cut_for(table, shape, threads));
  if (product.units() == 0) return;
  const int64_t partitions = std::min(product.units(), threads);
  if (partitions == 1) return product.run(0, product.units());  // nobody to share claims with
  thread_local StagedExecutor executor;
  executor.run(partitions, OneStage{product});
}

}  // namespace bitnet::engine
