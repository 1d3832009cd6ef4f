// Which algorithm of the kernels' list makes a product, and into how many units its work is cut:
// decided here alone, by the shape. Every choice gives the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel_table.h"

namespace bitnet::engine {

// How a product is made. token_blocks 0: `blocking` alone cuts the tokens, which is best for one
// thread. A part of K has at least 64 k, or as many as the matrix unit needs.
struct ProductPlan {
  const ProductAlgorithm* algorithm = nullptr;  // of the cut; calls of another shape may differ
  ProductBlocking blocking = {};
  int64_t token_blocks = 0, k_parts = 1;
  int64_t row_parts = 1;        // at least, where the algorithm wants equal parts of all rows
  int64_t cells = 0, sums = 0;  // sizes of PartSums, if there is more than one part of K

  bool by_tables() const { return blocking.scratch_bytes != 0; }
};

// The shape of one job, without scratch.
ProductShape shape_of(const ProductJob& job);

// The row of the list that this CPU takes for the shape; see tune.h.
const ProductAlgorithm& algorithm_for(const KernelTable& kernels, const ProductShape& shape);

// The algorithm, and the coarsest cut with enough units for all threads to end at the same time:
// first blocks get fewer tokens, then K is cut.
ProductPlan plan_product(const KernelTable& kernels, const ProductShape& shape, int64_t threads);

// The same for one matrix of whole rows, in any layout.
ProductPlan plan_matrix(const KernelTable& kernels, layout::WeightFormat format, int64_t n_rows,
                        int64_t k, bool grouped, int64_t tokens, int64_t threads);

// How many tokens lie together in a tile when products without scales of groups read `tokens`
// tokens; 0: tokens lie in row-major order.
int64_t token_tile(const KernelTable& kernels, int64_t tokens, int64_t k);

// The row of that name; null: the list has none.
const ProductAlgorithm* find_algorithm(const KernelTable& kernels, std::string_view name);

// The names of all rows of this build's lists.
std::vector<std::string> product_names();

// The row that BITNET_OPS_TUNING=product=NAME forces wherever it can run; empty: none. Throws
// std::runtime_error if no list has the name.
const std::string& forced_product();

// The row whose products need memory; null: the list has none.
const ProductAlgorithm* tables_of(const KernelTable& kernels);

// Tokens of a block, in whole tiles, when `tokens` are cut into about `blocks`.
int64_t tokens_of_block(int64_t tokens, int64_t blocks, int64_t tile);

// The most tokens of a part of K: their sums of a row block stay in L1 beside the rest.
inline constexpr int64_t kMaxPartTokens = 32;

}  // namespace bitnet::engine
