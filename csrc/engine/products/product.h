// Ternary weights times quantised tokens. A product is cut into blocks of rows x tokens; each block
// is multiplied, and one call of the epilogue scales and stores it. Every linear of every op and of
// the model step uses this.
#pragma once

#include "engine/products/group_product.h"
#include "engine/products/plan.h"
#include "engine/quantized_tokens.h"
#include "engine/weights.h"
#include "runtime/staged_executor.h"

namespace bitnet::engine {

// Where a projection stores its rows: that of token m at data + m * stride_bytes.
struct Output {
  StoreKind kind;
  DType type;  // stored as (kStore) or rounded to (kRound, kAdd)
  void* data;
  int64_t stride_bytes;
};

// One linear: float(sum) * (scale[n] * x_scale[m]) + bias[n]. With group scales: the sum over
// groups that engine/products/group_product.h defines, + bias[n].
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

// This thread's memory for products by tables, made at its first one, because a plan does not know
// how many threads will run it. Null if there is none: a product does without.
void* thread_scratch(int64_t bytes);

// The shape of `count` projections of the same tokens, which have `planes` planes.
ProductShape shape_of(const Projection* projections, int64_t count, int64_t tokens, int64_t planes);

// Sums of the parts of K. A cell is a row block x a block of tokens.
struct PartSums {
  int32_t* sums = nullptr;  // [cells, k_parts, block_rows * block_tokens]
  int32_t* done = nullptr;  // [cells], finished parts; all 0 before and after a stage
};

// The matrix of a projection as columns (format/layout.h), and which codes of a token are not 0.
struct ColumnsRead {
  const uint8_t* columns;
  int64_t count;
  const int32_t* at;    // [count rounded up to 4]
  const int8_t* codes;  // likewise
};

// All projections of the same tokens as one stage of a plan (runtime/staged_executor.h). A unit is
// one part of K of one cell. The thread that finishes the last part of a cell adds the parts; they
// are integers, so the order does not matter.
class Product {
 public:
  Product(const KernelTable& kernels, const QuantizedTokens& x, const Projection* projections,
          int64_t count, const ProductPlan& plan = {}, const PartSums& parts = {});

  int64_t units() const { return row_blocks_ * token_blocks_ * k_parts_; }

  ClaimRule claim() const;
  void run(int64_t begin, int64_t end) const;
  // The same for one projection of one token, by columns: these units' share of the panels.
  void run_columns(const ColumnsRead& read, int64_t begin, int64_t end) const;
  // The weights of a unit.
  const void* weights_of(int64_t unit) const;

 private:
  int64_t blocks_at_once(int64_t block_rows) const;
  int64_t row_blocks_at_once(const Weight& weight) const;
  void run_rows_outermost(const Projection& p, int64_t begin, int64_t end) const;
  void run_tokens_outermost(int64_t begin, int64_t end) const;
  void run_parts(int64_t begin, int64_t end) const;
  // The projection that has row block `block` of all; `block` becomes its number in it.
  const Projection& find(int64_t& block) const;
  int64_t sums_of_part() const { return max_block_rows_ * block_tokens_; }
  int64_t part_begin(const Weight& weight, int64_t part) const;
  ProductPart part_of(const Projection& p, int64_t block, int64_t blocks,
                      int64_t token_block) const;
  // By the plan's algorithm if it makes all calls, else by the usual one for the job.
  void run_job(const ProductJob& job, const EpilogueJob* epilogue) const;
  void multiply(const Projection& p, int64_t block, int64_t blocks, int64_t token_block) const;
  void multiply_part(const Projection& p, int64_t block, int64_t cell, int64_t part) const;
  void multiply_grouped(const Projection& p, const ProductPart& part) const;
  void store_groups(const Projection& p, const ProductPart& part, float* values,
                    int64_t stride) const;
  EpilogueJob epilogue_of(const Projection& p, const ProductJob& job,
                          const ProductPart& part) const;
  EpilogueJob epilogue_at(const Projection& p, int64_t row, int64_t token) const;
  void store_values(const Output& out, float* y, int64_t n, int64_t token, int64_t row) const;

  const KernelTable& kernels_;
  const QuantizedTokens& x_;
  const Projection* projections_;
  int64_t count_;
  const ProductAlgorithm* algorithm_;  // null: each call chooses one
  ProductBlocking blocking_;
  PartSums parts_;
  int64_t row_blocks_ = 0, max_block_rows_ = 1;
  bool is_split_;                        // cut into smaller units, which are claimed one by one
  int64_t token_blocks_, block_tokens_;  // nearly equal, so that more tokens never cost less
  int64_t k_parts_;
};

// All projections of the same tokens in one parallel region.
void multiply(const KernelTable& kernels, const QuantizedTokens& x, const Projection* projections,
              int64_t count);

}  // namespace bitnet::engine
