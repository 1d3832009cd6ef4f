// A step of a program as an op is given it: the new tokens of any sequences, where their keys and
// values go, which logits are wanted, and what becomes of states. Copied first, then checked, so
// that nobody who shares a tensor's memory can change it later.
#pragma once

#include <vector>

#include "engine/program/plan.h"
#include "ops/named.h"
#include "ops/paged_batch.h"
#include "ops/state_checks.h"

namespace bitnet::ops {

class StepRequest {
 public:
  // Of `step`: positions, slot_mapping, query_start_loc, seq_lens, block_table, logit_rows, and
  // maybe adapters, state_steps (of a program with states) and draws. states: null without.
  void set(const Check& check, const Named& step, const engine::Program& program, int64_t tokens,
           int64_t blocks, int64_t block_size, const StatePool* states);
  // That no state lies in a block of the step, where slots of states are blocks of the pool.
  void check_pages(const Check& check, int64_t block_size) const;
  int64_t rows() const { return static_cast<int64_t>(logit_rows_.size()); }
  void fill(engine::Batch& batch) const;

 private:
  std::vector<int64_t> positions_, slots_, logit_rows_, of_sequences_, adapters_;
  PagedBatch sequences_;
  std::vector<engine::StateStep> state_steps_;
  std::vector<engine::Noise> noise_;
  bool has_axes_ = false, adapted_ = false, noisy_ = false;
};

}  // namespace bitnet::ops
