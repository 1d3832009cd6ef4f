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

// Into how many blocks of tokens and parts of K a product is cut. 0: as its ProductBlocking says,
// which is best for one thread. A part has at least 64 k, or what the table's matrix unit begins
// with.
struct ProductCut {
  int64_t token_blocks = 0, k_parts = 1;
  int64_t cells = 0, sums = 0;  // of PartSums, where there is more than one part
};

// What the cut of a product for many threads depends on.
struct ProductShape {
  int64_t tokens, k;
  int64_t row_blocks, block_rows;  // of all projections
  bool grouped;                    // scales of groups
  bool splits_k;                   // sums of parts of K may be added: PartSums are at hand
};

// The coarsest cut of which so many threads find units enough to end together: blocks of fewer
// tokens first, then parts of K.
ProductCut cut_for(const KernelTable& table, const ProductShape& shape, int64_t threads);

// Where K is cut: a cell is a row block x a block of tokens, whose parts meet here.
struct PartSums {
  int32_t* sums = nullptr;  // [cells, k_parts, block_rows * block_tokens]
  int32_t* done = nullptr;  // [cells], how many parts are there; 0 before and behind a stage
};

// All projections of the same tokens as one stage of a plan (runtime/staged_executor.h). How the
// work is cut follows from ProductBlocking and the cut. A unit is a part of K of a cell; the thread
// that brings the last part adds them up, in integers, so that their order says nothing.
class Product {
 public:
  Product(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
          int64_t count, const ProductCut& cut = {}, const PartSums& parts = {});

  int64_t units() const { return row_blocks_ * token_blocks_ * k_parts_; }

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
  void run_parts(int64_t begin, int64_t end) const;
  // The projection of a row block among those of all, which becomes its own.
  const Projection& find(int64_t& block) const;
  int64_t sums_of_part() const { return most_block_rows_ * block_tokens_; }
  int64_t part_begin(const Weight& weight, int64_t part) const;
  SumsJob job_of(const Projection& p, int64_t block, int64_t blocks, int64_t token,
                 int32_t* sums) const;
  void multiply(const Projection& p, int64_t block, int64_t blocks, int64_t token_block) const;
  void multiply_part(const Projection& p, int64_t block, int64_t cell, int64_t part) const;
  void multiply_grouped(const Projection& p, const SumsJob& job, int64_t token) const;
  EpilogueJob epilogue_of(const Projection& p, const SumsJob& job, int64_t token) const;
  void store_values(const Output& out, float* y, int64_t n, int64_t token, int64_t row) const;

  const KernelTable& table_;
  const QuantizedTokens& x_;
  const Projection* projections_;
  int64_t count_;
  ProductBlocking blocking_;
  PartSums parts_;
  int64_t row_blocks_ = 0, most_block_rows_ = 1;
  bool all_finished_ = true, finer_;     // than one thread likes it
  int64_t token_blocks_, block_tokens_;  // as equal as can be, so that more tokens never cost less
  int64_t k_parts_;
};

// All projections of the same tokens in one parallel region.
void multiply(const KernelTable& table, const QuantizedTokens& x, const Projection* projections,
              int64_t count);

}  // namespace bitnet::engine
