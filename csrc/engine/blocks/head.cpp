// The block `head`, the last one: norm, then the logits of the rows that are wanted. Without a
// matrix the result is what the norm gives, and without a norm the residual stream itself.
//
//   norm weight            names: the last norm; the matrix, which may be the embedding
//   vocab                  rows of the matrix
//
// If a step of several tokens wants only the largest logits of an int8 matrix, or the winners of a
// draw with noise, all logits are bounded first by the tokens' high bytes; see head_bound.

#include <array>
#include <atomic>
#include <limits>
#include <vector>

#include "engine/blocks/blocks.h"
#include "engine/head.h"
#include "engine/program/plan.h"

namespace bitnet::engine {
namespace {

// Whether it is worth bounding logits. If the bounds of late steps left more than `max` rows on
// average, the next kWait steps read the whole head, and after each further failure twice as many.
class BoundsUse {
 public:
  bool next() { return whole_ == 0 || --whole_ == 0; }
  void learn(int64_t remaining, int64_t max) {
    average_ = (7 * average_ + remaining) / 8;
    if (average_ <= max) {
      wait_ = kWait;
      return;
    }
    average_ = 0;
    whole_ = wait_;
    wait_ = std::min(2 * wait_, 32 * kWait);
  }

 private:
  static constexpr int64_t kWait = 100;
  int64_t average_ = 0, whole_ = 0, wait_ = kWait;
};

// How the logits of a step are found: all of them; or, if only the largest are wanted, only those
// whose bound, by the high bytes of the tokens, allows them to be among these.
enum class HeadReading : int32_t { kWhole, kBounds };

class HeadState final : public BlockState {
 public:
  explicit HeadState(const HeadView& head) : head_(head) {}
  void begin(const Step& step) override;
  void end(const Step& step) override;

  HeadReading reading = HeadReading::kWhole;
  // The rest is for kBounds. How many logits were computed in spite of their bounds.
  std::atomic<int64_t> remaining{0};
  // The largest logits so far, as a thread sees them.
  Largest largest(const Batch& batch, int64_t slot) {
    Largest found{batch.largest, batch.noise, best_.data(), nullptr};
    if (batch.largest > 1) found.heaps = heaps_.data() + slot * batch.logit_count * batch.largest;
    return found;
  }

 private:
  static constexpr int64_t kMaxBest = 64;     // tokens of a step with bounds
  static constexpr int64_t kMaxLargest = 64;  // logits of each that are wanted

  const HeadView& head_;
  BoundsUse bounds_;
  // Each token's best logit so far, noise included, with its row (largest_rows).
  std::array<std::atomic<uint64_t>, kMaxBest> best_{};
  // If more than the best are wanted, the largest so far of each thread:
  // [partitions][logit_count][largest], every row a heap with the smallest in front.
  std::vector<float> heaps_;
};

void HeadState::begin(const Step& step) {
  const Batch& batch = step.batch;
  reading = HeadReading::kWhole;
  if (batch.largest == 0 || batch.largest > kMaxLargest || batch.logit_count > kMaxBest) return;
  if (!has_bounds(*step.kernels, head_, batch.logit_count) || !bounds_.next()) return;
  reading = HeadReading::kBounds;
  for (auto& best : best_) best.store(0, std::memory_order_relaxed);
  remaining = 0;
  if (batch.largest > 1)
    heaps_.assign(static_cast<size_t>(step.partitions * batch.logit_count * batch.largest),
                  -std::numeric_limits<float>::infinity());
}

// Bounds gain if less than a 32nd of the rows remains: these cost as much as the low bytes saved.
void HeadState::end(const Step& step) {
  if (reading == HeadReading::kBounds)
    bounds_.learn(remaining / step.batch.logit_count, head_.rows / 32);
}

class HeadBlock final : public Block {
 public:
  explicit HeadBlock(Binding& b)
      : norm_(b.keys.has("weight") ? b.norm("norm", b.settings.hidden, b.settings.eps)
                                   : b.optional_norm("norm", b.settings.hidden, b.settings.eps)),
        has_matrix_(b.keys.has("weight")) {
    if (has_matrix_) {
      const std::string name = b.keys.word("weight");
      view_ = b.source.head(name, b.keys.integer("vocab", 1, kMaxRows), b.settings.hidden);
      signs_ = b.source.signs(name, b.settings.hidden);
    }
    b.program.set_result(has_matrix_ ? view_.rows : b.settings.hidden, has_matrix_);
  }
  void append(PlanBuilder& plan) const override;
  std::unique_ptr<BlockState> make_state() const override {
    return has_matrix_ ? std::make_unique<HeadState>(view_) : nullptr;
  }

 private:
  Norm norm_;
  bool has_matrix_;
  HeadView view_{};
  Signs signs_;
};

// The result of a program without a matrix: the rows of the last norm, or those before it.
class States final : public StageWork {
 public:
  States(const Step& step, const StepRows& rows, const Norm& norm)
      : step_(step), rows_(rows), norm_(norm) {}

  void run(int64_t begin, int64_t end, int64_t /*slot*/) const override {
    const int64_t n = step_.settings().hidden;
    for (int64_t j = begin; j < end; ++j) {
      const float* from = rows_.residual + j * n;
      float* to = step_.batch.out + j * n;
      if (norm_.weight == nullptr) {
        std::copy_n(from, n, to);
      } else {
        step_.kernels->rms_norm_row(from, norm_.weight, n, norm_.eps, DType::kF32, to);
      }
    }
  }

 private:
  const Step& step_;
  StepRows rows_;
  Norm norm_;
};

// Rows of a unit: few enough to stay in cache while all tokens are multiplied with them.
int64_t unit_rows(const HeadView& head) {
  constexpr int64_t kRows = 32;
  static_assert(kRows % layout::kHeadTileRows == 0);
  return head.format == HeadFormat::kTernary ? head.unit_rows() : kRows;
}

class Logits final : public StageWork {
 public:
  Logits(PlanBuilder& plan, const HeadView& head, const Norm& norm, const Signs& signs)
      : step_(plan.step()),
        rows_(plan.rows()),
        head_(head),
        norm_(norm),
        signs_(signs),
        state_(*plan.state<HeadState>()) {
    const int64_t count = step_.splits_norms ? 1 : step_.partitions;
    inputs_ = plan.lasting<HeadInput>(count);
    for (int64_t i = 0; i < count; ++i) {
      char* piece = plan.lasting<char>(head_input_bytes(head, rows_.count));
      if (piece != nullptr) inputs_[i] = bind_head_input(head, rows_.count, piece);
    }
  }

  // Prepares row j for the head; uses the thread's row on the way.
  void load_token(int64_t j, int64_t slot) const {
    float* row = step_.thread_inputs[slot].row;
    const HeadInput& to = input(slot);
    const int64_t n = step_.settings().hidden;
    step_.kernels->rms_norm_row(rows_.residual + j * n, norm_.weight, n, norm_.eps, DType::kF32,
                                row);
    signs_.hadamard(*step_.kernels, DType::kF32, n, row);
    prepare_head_token(*step_.kernels, head_, row, j, to);
    if (state_.reading == HeadReading::kBounds) measure_bytes(head_, j, to);
  }
  void prepare(int64_t slot) const override {
    if (step_.splits_norms) return;
    for (int64_t j = 0; j < rows_.count; ++j) load_token(j, slot);
  }
  int64_t units() const override {
    return rows_.count == 0 ? 0 : (head_.rows + unit_rows(head_) - 1) / unit_rows(head_);
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const HeadInput& from = input(slot);
    const int64_t unit = unit_rows(head_), first = begin * unit;
    const int64_t last = std::min(end * unit, head_.rows);
    if (state_.reading == HeadReading::kWhole)
      return head_rows(*step_.kernels, head_, first, last, from, rows_.count,
                       step_.batch.out + first, head_.rows);
    const Largest found = state_.largest(step_.batch, slot);
    for (int64_t n = first; n < last; n += unit)  // each unit raises the threshold of the next
      state_.remaining += largest_rows(*step_.kernels, head_, n, std::min(n + unit, last), from,
                                       rows_.count, found, step_.batch.out + n, head_.rows);
  }
  const void* weights_of(int64_t unit) const override {
    return offset_bytes(head_.weight, unit * unit_rows(head_) * head_.row_bytes());
  }

 private:
  const HeadInput& input(int64_t slot) const { return inputs_[step_.splits_norms ? 0 : slot]; }

  const Step& step_;
  StepRows rows_;
  HeadView head_;
  Norm norm_;
  Signs signs_;
  HeadState& state_;
  HeadInput* inputs_;  // one for each thread, or one for all threads
};

class LogitNorms final : public StageWork {
 public:
  explicit LogitNorms(const Logits* logits) : logits_(*logits) {}
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    for (int64_t j = begin; j < end; ++j) logits_.load_token(j, slot);
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
  const auto* logits = plan.make<Logits>(plan, view_, norm_, signs_);
  if (step.splits_norms)
    plan.add({"norm head", plan.make<LogitNorms>(logits), plan.rows().count, {1, 64}});
  plan.add({"head", logits, logits->units(), {1, 64}, true});
}

}  // namespace

std::unique_ptr<Block> make_head(Binding& binding) { return std::make_unique<HeadBlock>(binding); }

}  // namespace bitnet::engine
