// What an op with states of sequences checks of them, and of what a step does to each sequence's.
#pragma once

#include <string>
#include <vector>

#include "engine/kept.h"
#include "engine/kv_cache.h"
#include "ops/cache_checks.h"

namespace bitnet::ops {

// The buffers of all slots, float32, [slots, layers, ...] as engine::KeptBuffer says, in memory of
// their own: a layer of a slot lies together, slots and layers any distance apart, for an engine
// may keep one tensor for all slots of a layer.
class StatePool {
 public:
  // Tensors that stay, one for each buffer, and how messages call them. A buffer of 0 layers has as
  // many as the first tensor.
  StatePool(const Check& check, std::vector<engine::KeptBuffer> buffers,
            std::vector<const Tensor*> tensors, std::vector<std::string> names);

  const engine::KeptMemory* memory() const { return memory_.data(); }
  int64_t slots, layers, drafts;

  // Each of them apart from what is written besides it.
  void add_to(const Check& check, Mutated& mutated) const;

 private:
  std::vector<const Tensor*> tensors_;
  std::vector<std::string> names_;
  std::vector<engine::KeptMemory> memory_;
};

// int64 [sequences, 3]: slot, replays, drafts of each (engine::StateStep), copied, then checked.
void copy_state_steps(const Check& check, const Tensor& steps, const engine::Sequences& sequences,
                      const StatePool& pool, std::vector<engine::StateStep>& copy);

}  // namespace bitnet::ops
