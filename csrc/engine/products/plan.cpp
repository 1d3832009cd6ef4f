// The choice and the cut; see plan.h.
#include "engine/products/plan.h"

#include <algorithm>
#include <stdexcept>

#include "engine/products/tune.h"
#include "engine/weights.h"
#include "kernels/dispatch.h"
#include "runtime/parallel.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How often every thread takes a unit until all are done; units are equal work.
int64_t rounds(int64_t units, int64_t threads) { return ceil_div(units, threads); }

// Whether threads are busy for at least 7/8 of the time until the last unit is done.
bool end_together(int64_t units, int64_t threads) {
  return 7 * rounds(units, threads) * threads <= 8 * units;
}

// The same for blocks of `each` tokens (the last one may have fewer), each cut into `parts` of
// rows. Every thread starts with the same number of units, but units of full token blocks take
// longer. Each block is split into enough row parts for idle threads to steal the rest.
bool blocks_end_together(int64_t tokens, int64_t each, int64_t parts, int64_t threads) {
  const int64_t longest = rounds(ceil_div(tokens, each) * parts, threads) * each;
  return 7 * longest * threads <= 8 * tokens * parts || 7 * each * (threads - 1) <= tokens * parts;
}

// The cut of an algorithm that wants equal parts of all rows; false if its calls would have too few
// rows to be worth its memory. If there are too few rows for all threads, blocks get fewer tokens:
// that is cheaper than building the same tables once for every thread.
bool cut_rows(const ProductAlgorithm& algorithm, const ProductShape& s, int64_t threads,
              ProductPlan& plan) {
  constexpr int64_t kMinTokens = 32;  // of a block that was halved for that reason
  const int64_t rows = s.rows(), multiple = plan.blocking.token_multiple;
  for (int64_t at_once = plan.blocking.tokens;; at_once /= 2) {
    plan.token_blocks = ceil_div(s.tokens, at_once);
    plan.row_parts = ceil_div(rows, plan.blocking.rows);
    const int64_t each = std::min(s.tokens, tokens_of_block(s.tokens, plan.token_blocks, multiple));
    while (!blocks_end_together(s.tokens, each, plan.row_parts, threads)) ++plan.row_parts;
    ProductShape part = s;
    part.row_blocks = rows / plan.row_parts;
    part.block_rows = 1;
    if (algorithm.usual(part)) return true;
    if (at_once < 2 * kMinTokens || at_once % (2 * multiple) != 0) return false;
  }
}

// First blocks get fewer tokens: each block decodes the weights again, which shows below 16 tokens.
// Then K is cut: no part decodes what another does, but the sums of every part go through memory,
// so a part needs enough work, and the sums of 32 tokens are as much as stays in L1. A matrix unit
// multiplies about four times as much in the same time, and reads tiles of tokens.
void cut_for_threads(const ProductShape& s, int64_t threads, ProductPlan& best) {
  constexpr int64_t kMinTokens = 16, kMaxParts = 8, kUnitsPerThread = 8;
  if (threads == 1) return;
  const ProductBlocking blocking = best.blocking;
  best.token_blocks = ceil_div(s.tokens, blocking.tokens);
  int64_t best_units = best.token_blocks * s.row_blocks;
  if (best_units == 0 || end_together(best_units, threads)) return;
  const int64_t min_macs = blocking.kernel_stores ? 4 * kMinMacs : kMinMacs;
  const int64_t min_tokens = std::max(kMinTokens, blocking.token_tile);
  const auto found = [&](const ProductPlan& cut) {
    const int64_t units = cut.token_blocks * cut.k_parts * s.row_blocks;
    if (rounds(units, threads) * best_units >= rounds(best_units, threads) * units) return false;
    best = cut;
    best_units = units;
    return end_together(units, threads);
  };
  const auto fits = [&](int64_t tokens, int64_t k) {
    return tokens * k * s.block_rows >= min_macs;
  };
  ProductPlan cut = best;
  for (int64_t n = cut.token_blocks + 1; n <= ceil_div(s.tokens, min_tokens); ++n) {
    const int64_t tokens = tokens_of_block(s.tokens, n, blocking.token_tile);
    if (ceil_div(s.tokens, tokens) != n || !fits(tokens, s.k)) continue;
    cut.token_blocks = n;
    if (found(cut)) return;
  }
  const int64_t tokens = tokens_of_block(s.tokens, cut.token_blocks, blocking.token_tile);
  if (!s.splits_k || tokens > kMaxPartTokens) return;
  for (cut.k_parts = 2; cut.k_parts <= kMaxParts; ++cut.k_parts) {
    if (!fits(tokens, s.k / cut.k_parts)) break;
    if (cut.token_blocks * cut.k_parts * s.row_blocks > kUnitsPerThread * threads) break;
    if (found(cut)) break;
  }
  if (best.k_parts != 1) {
    best.cells = best.token_blocks * s.row_blocks;
    best.sums = best.cells * best.k_parts * s.block_rows * tokens;
  }
}

}  // namespace

int64_t tokens_of_block(int64_t tokens, int64_t blocks, int64_t tile) {
  const int64_t each = ceil_div(tokens, blocks);
  return tile == 0 ? each : ceil_div(each, tile) * tile;
}

ProductShape shape_of(const ProductJob& job) {
  return {.format = job.format,
          .tokens = job.tokens,
          .k = job.k_steps * layout::kTileStepK,
          .row_blocks = job.blocks,
          .block_rows = 1,
          .planes = job.planes,
          .grouped = job.grouped()};
}

namespace {

// Whether a row may be forced on a product of tokens whose order `token_tile` has chosen, by a
// shape of another format, which the row may not take.
bool fits_order(const KernelTable& kernels, const ProductAlgorithm& row,
                const ProductShape& shape) {
  if (shape.grouped || !shape.tiles()) return true;
  ProductShape other = shape;
  other.format = layout::WeightFormat::kTwoBit;
  return row.takes(other) ||
         chosen(kernels.products, kernels.choices, other).blocking(other).token_tile ==
             row.blocking(shape).token_tile;
}

}  // namespace

const ProductAlgorithm& algorithm_for(const KernelTable& kernels, const ProductShape& shape) {
  if (!forced_product().empty()) {
    const ProductAlgorithm* forced = find_algorithm(kernels, forced_product());
    if (forced != nullptr && forced->takes(shape) && fits_order(kernels, *forced, shape))
      return *forced;
  }
  return chosen(kernels.products, kernels.choices, shape);
}

ProductPlan plan_product(const KernelTable& kernels, const ProductShape& shape, int64_t threads) {
  ProductShape s = shape;
  const ProductAlgorithm* tables = tables_of(kernels);
  s.scratch = tuning().sum_tables || (tables != nullptr && tables->name == forced_product());
  tune(kernels, s);
  ProductPlan plan{.algorithm = &algorithm_for(kernels, s)};
  plan.blocking = plan.algorithm->blocking(s);
  if (plan.by_tables()) {
    if (cut_rows(*plan.algorithm, s, threads, plan)) return plan;
    s.scratch = false;
    plan = {.algorithm = &algorithm_for(kernels, s)};
    plan.blocking = plan.algorithm->blocking(s);
  }
  cut_for_threads(s, threads, plan);
  if (!plan.blocking.is_special()) {  // each call chooses its algorithm
    const int64_t blocks = std::max(plan.token_blocks, ceil_div(s.tokens, plan.blocking.tokens));
    s.tokens =
        tokens_of_block(s.tokens, std::max<int64_t>(blocks, 1), plan.blocking.token_multiple);
    tune(kernels, s);
  }
  return plan;
}

ProductPlan plan_matrix(const KernelTable& kernels, layout::WeightFormat format, int64_t n_rows,
                        int64_t k, bool grouped, int64_t tokens, int64_t threads) {
  const Weight weight = format == layout::WeightFormat::kCanonical
                            ? canonical_weight(nullptr, n_rows, k)
                            : tile_weight(nullptr, format, n_rows, k, kernels.tile_lanes);
  return plan_product(kernels,
                      {.format = format,
                       .tokens = tokens,
                       .k = k,
                       .row_blocks = weight.row_blocks,
                       .block_rows = weight.block_rows,
                       .grouped = grouped,
                       .splits_k = !grouped && !weight.reads_rows()},
                      threads);
}

int64_t token_tile(const KernelTable& kernels, int64_t tokens, int64_t k) {
  const ProductShape shape{.format = layout::WeightFormat::kTwoBit,
                           .tokens = tokens,
                           .k = k,
                           .row_blocks = 1,
                           .block_rows = 1};
  return algorithm_for(kernels, shape).blocking(shape).token_tile;
}

const ProductAlgorithm* find_algorithm(const KernelTable& kernels, std::string_view name) {
  for (int64_t i = 0; i < kMaxProducts && kernels.products[i].name != nullptr; ++i) {
    if (name == kernels.products[i].name) return kernels.products + i;
  }
  return nullptr;
}

std::vector<std::string> product_names() {
  std::vector<std::string> names;
  for (const KernelTable* kernels : all_tables()) {
    for (int64_t i = 0; i < kMaxProducts && kernels->products[i].name != nullptr; ++i) {
      if (std::ranges::find(names, kernels->products[i].name) == names.end())
        names.emplace_back(kernels->products[i].name);
    }
  }
  return names;
}

const std::string& forced_product() {
  static const std::string checked = [] {
    const std::string& name = tuning().product;
    const std::vector<std::string> names = product_names();
    if (name.empty() || std::ranges::find(names, name) != names.end()) return name;
    std::string known;
    for (const std::string& other : names) known += (known.empty() ? "" : ", ") + other;
    throw std::runtime_error(
        "BITNET_OPS_TUNING: expected product=a name of the list of products (" + known +
        "), got 'product=" + name + "'; without it shapes decide");
  }();
  return checked;
}

const ProductAlgorithm* tables_of(const KernelTable& kernels) {
  const ProductAlgorithm* tables = find_algorithm(kernels, "tables");
  return tables != nullptr ? tables : find_algorithm(kernels, "tables_with_dot");
}

}  // namespace bitnet::engine
