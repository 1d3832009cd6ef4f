// THE tiler: ternary weights x quantised tokens, cut into rows x blocks of tokens, each of which is
// multiplied and then stored by one call of the epilogue. Every linear of every op and of the model
// step goes through it.
#pragma once

#include "engine/group_product.h"
#include "engine/quantized_tokens.h"
#include "engine/weights.h"
#include "runtime/staged_executor.h"

namespace bitnet::engine {

// Where the rows of a projection go: token m's at data + m * stride_bytes.
struct Output {
  StoreKind kind;
  DType type;  // stored as (kStore) or rounded to (kRound, kAdd)
  void* data;
  int64_t stride_bytes;
};

// float(sum) * (scale[n] * x_scale[m]) + bias[n], or with scales of groups,
// engine/group_product.h's sum of them + bias[n].
struct Projection {
  const Weight* weight;
  const float* scale;
  int64_t scale_step;  // 0: one scale, 1: one per row
  const float* bias;   // may be null
  Output out;
  GroupScales groups = {};

  bool grouped() const { return groups.data != nullptr; }
  int64_t group() const { return grouped() ? groups.group : 0; }
};

// A contiguous result [tokens, n_rows] of `type`.
Projection make_projection(const Weight& weight, const float* scale, int64_t scale_count,
                           DType type, void* out);
// Exact int32 sums [tokens, n_rows].
Projection make_sums(const Weight& weight, int32_t* out);

// All projections of the same tokens as one stage of a plan (runtime/staged_executor.h). How the
// work is cut follows from ProductBlocking. A unit is a row block x a block of tokens.
class Product {
 public:
  Product(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
          int64_t count);

  int64_t units() const { return row_blocks_ * token_blocks_; }
  ClaimRule claim() const;
  void run(int64_t begin, int64_t end) const;
  // The weights of a unit.
  const void* weights_of(int64_t unit) const;

 private:
  // Whether the product with it stores no sums.
  bool finishes(const Weight& weight) const;
  int64_t blocks_at_once(int64_t block_rows, bool finished) const;
  int64_t row_blocks_at_once(const Weight& weight) const;
  void run_rows_outermost(const Projection& p, int64_t begin, int64_t end) const;
  void run_tokens_outermost(int64_t begin, int64_t end) const;
  void multiply(const Projection& p, int64_t block, int64_t blocks, int64_t token_block) const;
  void multiply_grouped(const Projection& p, const SumsJob& job, int64_t token) const;
  EpilogueJob epilogue_of(const Projection& p, const SumsJob& job, int64_t token) const;
  void store_values(const Output& out, float* y, int64_t n, int64_t token, int64_t row) const;

  const KernelTable& table_;
  const QuantizedTokens& x_;
  const Projection* projections_;
  int64_t count_;
  ProductBlocking blocking_;
  int64_t row_blocks_ = 0, most_block_rows_ = 1;
  bool all_finished_ = true;
  int64_t token_blocks_, block_tokens_;  // as equal as can be, so that more tokens never cost less
};

// All projections of the same tokens in one parallel region.
void multiply(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
              int64_t count);

}  // namespace bitnet::engine
