// The block `head`, the last one: norm, then the logits of the rows that are wanted. Without a
// matrix the result is what the norm gives.
//
//   norm weight            names: the last norm; the matrix, which may be the embedding
//   vocab                  rows of the matrix
//
// A step of several tokens that wants only the largest logits of an int8 matrix, or those that win
// with their noise, bounds all logits first, by the tokens' high bytes.

#include "engine/blocks/blocks.h"
#include "engine/program/plan.h"

namespace bitnet::engine {
namespace {

class HeadBlock final : public Block {
 public:
  explicit HeadBlock(Binding& b)
      : norm_(b.norm("norm", b.settings.hidden, b.settings.eps)),
        has_matrix_(b.keys.has("weight")) {
    view_.ahead = head_prefetch();  // what LoRA's factors are read with
    if (has_matrix_) {
      const std::string name = b.keys.word("weight");
      view_ = b.source.head(name, b.keys.integer("vocab", 1, kMostRows), b.settings.hidden);
      signs_ = b.source.signs(name, b.settings.hidden);
    }
    b.program.set_head(view_, has_matrix_ ? view_.rows : b.settings.hidden);
  }
  void append(PlanBuilder& plan) const override;

 private:
  Norm norm_;
  bool has_matrix_;
  HeadView view_{};
  Signs signs_;
};

// The last norm's rows as the result.
class States final : public StageWork {
 public:
  States(const Step& step, const StepRows& rows, const Norm& norm)
      : step_(step), rows_(rows), norm_(norm) {}

  void run(int64_t begin, int64_t end, int64_t /*slot*/) const override {
    const int64_t n = step_.settings().hidden;
    for (int64_t j = begin; j < end; ++j)
      step_.table->rms_norm_row(rows_.residual + j * n, norm_.weight, n, norm_.eps, DType::kF32,
                                step_.batch.out + j * n);
  }

 private:
  const Step& step_;
  StepRows rows_;
  Norm norm_;
};

// Rows of a unit: they stay in cache while every token meets them.
int64_t unit_rows(const HeadView& head) {
  constexpr int64_t kRows = 32;
  static_assert(kRows % layout::kHeadTileRows == 0);
  return head.format == HeadFormat::kTernary ? head.unit_rows() : kRows;
}

class Logits final : public StageWork {
 public:
  Logits(const Step& step, const StepRows& rows, const HeadView& head, const Norm& norm,
         const Signs& signs)
      : step_(step), rows_(rows), head_(head), norm_(norm), signs_(signs) {}

  // Row j as the head reads it.
  void enter(int64_t j, float* row, const StageInput& to) const {
    const int64_t n = step_.settings().hidden;
    step_.table->rms_norm_row(rows_.residual + j * n, norm_.weight, n, norm_.eps, DType::kF32, row);
    signs_.turn(*step_.table, DType::kF32, n, row);
    prepare_head_token(*step_.table, head_, row, j, to.head);
    if (step_.reading == HeadReading::kBounds) measure_bytes(head_, j, to.head);
  }
  void prepare(int64_t slot) const override {
    if (step_.splits_norms) return;
    StageInput& own = step_.own[slot];
    for (int64_t j = 0; j < rows_.count; ++j) enter(j, own.row, own);
  }
  int64_t units() const override {
    return rows_.count == 0 ? 0 : (head_.rows + unit_rows(head_) - 1) / unit_rows(head_);
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const StageInput& from = step_.splits_norms ? step_.shared : step_.own[slot];
    const int64_t unit = unit_rows(head_), first = begin * unit;
    const int64_t last = std::min(end * unit, head_.rows);
    if (step_.reading == HeadReading::kWhole)
      return head_rows(*step_.table, head_, first, last, from.head, rows_.count,
                       step_.batch.out + first, head_.rows);
    const int64_t wanted = step_.batch.largest;
    Largest found{wanted, step_.batch.noise, step_.best.data(), nullptr};
    if (wanted > 1) found.heaps = step_.heaps.data() + slot * rows_.count * wanted;
    for (int64_t n = first; n < last; n += unit)  // what one has found bounds the next
      step_.remaining += largest_rows(*step_.table, head_, n, std::min(n + unit, last), from.head,
                                      rows_.count, found, step_.batch.out + n, head_.rows);
  }
  const void* weights_of(int64_t unit) const override {
    return offset_bytes(head_.weight, unit * unit_rows(head_) * head_.row_bytes());
  }
  const Step& step() const { return step_; }

 private:
  const Step& step_;
  StepRows rows_;
  HeadView head_;
  Norm norm_;
  Signs signs_;
};

class LogitNorms final : public StageWork {
 public:
  explicit LogitNorms(const Logits* logits) : logits_(*logits) {}
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const Step& step = logits_.step();
    for (int64_t j = begin; j < end; ++j) logits_.enter(j, step.own[slot].row, step.shared);
  }

 private:
  const Logits& logits_;
};

void HeadBlock::append(PlanBuilder& plan) const {
  const Step& step = plan.step();
  if (!has_matrix_) {
    plan.add({"states", plan.make<States>(step, plan.rows(), norm_), plan.rows().count, {1, 64}});
    return;
  }
  const auto* logits = plan.make<Logits>(step, plan.rows(), view_, norm_, signs_);
  if (step.splits_norms)
    plan.add({"norm head", plan.make<LogitNorms>(logits), plan.rows().count, {1, 64}});
  plan.add({"head", logits, logits->units(), {1, 64}, true});
}

}  // namespace

std::unique_ptr<Block> make_head(Binding& binding) { return std::make_unique<HeadBlock>(binding); }

}  // namespace bitnet::engine
