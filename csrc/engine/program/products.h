// Ternary products as stages of a plan: tokens are normalised and quantised, multiplied by one to
// three projections, and adapters add their products. Every block with projections uses these.
#pragma once

#include <initializer_list>

#include "engine/program/plan.h"
#include "engine/program/zeros.h"

namespace bitnet::engine {

// Makes the rows that products multiply. Several threads may each make the same row.
class RowSource {
 public:
  // The norm that makes row j: x, n, weight and eps. x is made in `row` if it is not in memory yet.
  // job.y is `row`.
  virtual NormJob job(int64_t j, float* row) const = 0;
  // The same if only the codes of the row are wanted: the kernel may make x itself.
  virtual NormJob codes_job(int64_t j, float* row) const {
    NormJob made = job(j, row);
    made.codes_only = true;
    return made;
  }

 protected:
  ~RowSource() = default;
};

// Rows of float32 [count, n] with a norm. tokens: the row of x for each; null: row j is row j of x.
class NormedRows final : public RowSource {
 public:
  NormedRows(const float* x, int64_t n, const Norm& norm, DType type,
             const int64_t* const* tokens = nullptr)
      : x_(x), n_(n), norm_(norm), type_(type), tokens_(tokens) {}
  NormJob job(int64_t j, float* row) const override {
    const int64_t at = tokens_ == nullptr ? j : (*tokens_)[j];
    return {x_ + at * n_, n_, type_, norm_.weight, norm_.eps, row};
  }

 private:
  const float* x_;
  int64_t n_;
  Norm norm_;
  DType type_;
  const int64_t* const* tokens_;  // read at every step
};

struct StageNames {
  const char *norm, *product, *expand;
};

struct Target {
  const Linear* linear;
  void* out;  // [rows of the stage, linear's rows] of Settings::type
};

// Every target gets the results of its projection.
void append_products(PlanBuilder& plan, const StageNames& names, const RowSource* source,
                     ActivationFormat format, std::initializer_list<Target> targets);

// One projection whose results, normalised if `post` has a weight, are added to the residual.
// sparsity: of its input, may be null. zeros: null unless the projection has columns.
void append_added(PlanBuilder& plan, const StageNames& names, const char* post_name,
                  const RowSource* source, ActivationFormat format, const Linear& linear,
                  const Norm& post, const ActivationSparsity* sparsity = nullptr,
                  ZeroCounts* zeros = nullptr);

// Values [from, from + n) of a buffer of `type` as float32.
inline void load_values(const KernelTable& kernels, DType type, const void* buffer, int64_t from,
                        int64_t n, float* row) {
  kernels.load_row(type, offset_bytes(buffer, from * element_size(type)), n, row);
}

}  // namespace bitnet::engine
