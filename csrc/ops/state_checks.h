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
// may keep one tensor for all slots of a layer, or all buffers of a slot together.
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
  // The same beside keys and values [layers, blocks, ...], which are in `mutated`. Their blocks and
  // the slots may be the same pages of memory, slot n being block n; true if they are: then no
  // page may be used as both in a step (check_pages).
  bool add_beside(const Check& check, const Tensor& keys, const Tensor& values,
                  Mutated& mutated) const;

 private:
  void check_apart(const Check& check) const;
  std::vector<const Tensor*> tensors_;
  std::vector<std::string> names_;
  std::vector<engine::KeptMemory> memory_;
};

// int64 [sequences, 3]: slot, replays, drafts of each (engine::StateStep), copied, then checked.
void copy_state_steps(const Check& check, const Tensor& steps, const engine::Sequences& sequences,
                      const StatePool& pool, std::vector<engine::StateStep>& copy);
// That no slot of these steps is a block with keys and values of the sequences, or of
// `cache_slots`.
void check_pages(const Check& check, const std::vector<engine::StateStep>& steps,
                 const engine::Sequences& sequences, const std::vector<int64_t>& cache_slots,
                 int64_t block_size);

}  // namespace bitnet::ops
