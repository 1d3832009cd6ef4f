// What an op with recurrent states checks of them, and of what a step does to each sequence's.
#pragma once

#include <vector>

#include "engine/delta_net.h"
#include "ops/cache_checks.h"

namespace bitnet::ops {

// The states of all slots and layers, float32 and contiguous (engine/delta_net.h, DeltaStates):
// recurrent [slots, layers, value_heads, slabs, key_dim, 32], inputs [slots, layers, taps - 1 +
// drafts, channels], kept [slots, layers, drafts, value_heads, slabs, kept_floats]. In memory of
// their own.
class StatePool {
 public:
  // Three tensors that stay; `layers` of them, -1: as many as there are.
  StatePool(const Check& check, const Tensor& recurrent, const Tensor& inputs, const Tensor& kept,
            const engine::DeltaShape& shape, int64_t layers);

  // Of the first layer.
  engine::DeltaStates first() const { return first_; }
  int64_t layers, slots, drafts;

  // Each of the three apart from what is written besides it.
  void add_to(const Check& check, Mutated& mutated) const;

 private:
  const Tensor &recurrent_, &inputs_, &kept_;
  engine::DeltaStates first_{};
};

// int64 [sequences, 3]: slot, replays, drafts of each (engine::StateStep), copied, then checked.
void copy_state_steps(const Check& check, const Tensor& steps, const engine::Sequences& sequences,
                      const StatePool& pool, std::vector<engine::StateStep>& copy);

}  // namespace bitnet::ops
