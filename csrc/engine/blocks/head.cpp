// The block `head`, the last one: norm, then the logits of the rows that are wanted. Without a
// matrix the result is what the norm gives.
//
//   norm weight            names: the last norm; the matrix, which may be the embedding
//   vocab                  rows of the matrix
//
// Of an int8 matrix that has a screen, a step that wants one best token reads the screen first and
// then the rows that can be the best.
#include <bit>

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
  }
  void prepare(int64_t slot) const override {
    if (step_.splits_norms) return;
    StageInput& own = step_.own[slot];
    for (int64_t j = 0; j < rows_.count; ++j) enter(j, own.row, own);
    if (!step_.screens) return;
    const auto row = static_cast<int64_t>(step_.best & 0xffffffff);
    head_rows(*step_.table, head_, row, row + 1, own.head, 1, &own.least, 0);
  }
  int64_t units() const override {
    return rows_.count == 0 ? 0 : (head_.rows + unit_rows(head_) - 1) / unit_rows(head_);
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const StageInput& from = step_.splits_norms ? step_.shared : step_.own[slot];
    const int64_t unit = unit_rows(head_), first = begin * unit;
    const int64_t last = std::min(end * unit, head_.rows);
    float* const out = step_.batch.out + first;
    if (step_.screens) {
      step_.remaining +=
          reaching_rows(*step_.table, head_, first, last, from.head, from.least, out);
    } else {
      head_rows(*step_.table, head_, first, last, from.head, rows_.count, out, head_.rows);
    }
  }
  const void* weights_of(int64_t unit) const override {
    return offset_bytes(head_.weight, unit * unit_rows(head_) * head_.row_bytes());
  }
  const Step& step() const { return step_; }
  const HeadView& head() const { return head_; }

 private:
  const Step& step_;
  StepRows rows_;
  HeadView head_;
  Norm norm_;
  Signs signs_;
};

// Bounds of the logits of the only row, in their place, and the largest of them.
class Screen final : public StageWork {
 public:
  explicit Screen(const Logits* logits) : logits_(*logits) {}

  void prepare(int64_t slot) const override {
    StageInput& own = logits_.step().own[slot];
    logits_.enter(0, own.row, own);
    own.bound = bound_of(own.head.tokens[0], logits_.head().k);
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const Step& step = logits_.step();
    const HeadView& head = logits_.head();
    const int64_t unit = unit_rows(head), first = begin * unit;
    const int64_t last = std::min(end * unit, head.rows);
    float* const out = step.batch.out;
    const StageInput& own = step.own[slot];
    screen_rows(*step.table, head, first, last, own.head.tokens[0], own.bound, out + first);
    const float largest = step.table->max_row(out + first, last - first);
    // A larger float is a larger number, if the bits of negative ones are turned over.
    const auto bits = std::bit_cast<uint32_t>(largest);
    const uint64_t sorts = bits >> 31 != 0 ? ~bits : bits | uint32_t{1} << 31;
    if (step.best >> 32 >= sorts) return;
    int64_t best = first;
    while (best < last && out[best] != largest) ++best;
    if (best == last) return;  // a NaN, which says nothing of other rows
    const uint64_t mine = sorts << 32 | static_cast<uint64_t>(best);
    uint64_t before = step.best;
    while (before < mine && !step.best.compare_exchange_weak(before, mine)) {
    }
  }
  const void* weights_of(int64_t unit) const override {
    return logits_.head().screen_row(unit * unit_rows(logits_.head()));
  }

 private:
  const Logits& logits_;
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
  if (step.screens) plan.add({"screen", plan.make<Screen>(logits), logits->units(), {1, 64}, true});
  plan.add({"head", logits, logits->units(), {1, 64}, !step.screens});
}

}  // namespace

std::unique_ptr<Block> make_head(Binding& binding) { return std::make_unique<HeadBlock>(binding); }

}  // namespace bitnet::engine
