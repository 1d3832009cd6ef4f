// The checks of state_checks.h.
#include "ops/state_checks.h"

#include <algorithm>
#include <cstring>

namespace bitnet::ops {

StatePool::StatePool(const Check& check, const Tensor& recurrent, const Tensor& inputs,
                     const Tensor& kept, const engine::DeltaShape& shape, int64_t expected_layers)
    : recurrent_(recurrent), inputs_(inputs), kept_(kept) {
  for (const auto& [t, name, dims] :
       {std::tuple(&recurrent, "states[0] (recurrent)", 6),
        std::tuple(&inputs, "states[1] (inputs)", 4), std::tuple(&kept, "states[2] (kept)", 6)}) {
    check.dtype(*t, name, ScalarType::Float);
    check.dim(*t, name, dims);
    check.contiguous(*t, name);
  }
  slots = recurrent.size(0);
  layers = expected_layers < 0 ? recurrent.size(1) : expected_layers;
  drafts = kept.size(2);
  const int64_t heads = shape.value_heads, slabs = shape.slabs();
  check.shape(recurrent, "states[0] (recurrent)",
              {slots, layers, heads, slabs, shape.key_dim, kStateColumns});
  check.shape(inputs, "states[1] (inputs)",
              {slots, layers, shape.taps - 1 + drafts, shape.channels()});
  check.shape(kept, "states[2] (kept)", {slots, layers, drafts, heads, slabs, shape.kept_floats()});
  const auto floats = [](const Tensor& t) {
    return t.numel() == 0 ? nullptr : static_cast<float*>(t.mutable_data_ptr());
  };
  first_ = engine::DeltaStates::strides(shape, layers, drafts);
  first_.recurrent = floats(recurrent);
  first_.inputs = floats(inputs);
  first_.kept = floats(kept);
}

void StatePool::add_to(const Check& check, Mutated& mutated) const {
  for (const auto& [t, name] :
       {std::pair(&recurrent_, "states[0] (recurrent)"), std::pair(&inputs_, "states[1] (inputs)"),
        std::pair(&kept_, "states[2] (kept)")}) {
    mutated.keep_apart(check, *t, name);
    mutated.add(*t, name);
  }
}

void copy_state_steps(const Check& check, const Tensor& steps, const engine::Sequences& sequences,
                      const StatePool& pool, std::vector<engine::StateStep>& copy) {
  check.dtype(steps, "state_steps", ScalarType::Long);
  check.shape(steps, "state_steps", {sequences.count, 3});
  check.contiguous(steps, "state_steps");
  static_assert(sizeof(engine::StateStep) == 3 * sizeof(int64_t));
  copy.resize(static_cast<size_t>(sequences.count));
  if (copy.empty()) return;
  std::memcpy(copy.data(), data<int64_t>(steps), copy.size() * sizeof(engine::StateStep));
  std::vector<int64_t> slots;
  for (int64_t s = 0; s < sequences.count; ++s) {
    const engine::StateStep& step = copy[static_cast<size_t>(s)];
    const auto fail = [&](const std::string& constraint, int64_t got) {
      check.fail("state_steps", constraint,
                 std::to_string(got) + " for sequence " + std::to_string(s));
    };
    if (!(step.slot >= 0 && step.slot < pool.slots))
      fail("with slots in [0, " + std::to_string(pool.slots) + ")", step.slot);
    const int64_t replays = sequences.start(s) == 0 ? 0 : pool.drafts;
    if (!(step.replays >= 0 && step.replays <= replays))
      fail("with replays from 0 to " + std::to_string(replays), step.replays);
    const int64_t drafts = std::min(pool.drafts, sequences.tokens(s));
    if (!(step.drafts >= 0 && step.drafts <= drafts))
      fail("with drafts from 0 to " + std::to_string(drafts), step.drafts);
    slots.push_back(step.slot);
  }
  std::ranges::sort(slots);
  const auto twice = std::ranges::adjacent_find(slots);
  if (twice != slots.end())
    check.fail("state_steps", "with different slots", std::to_string(*twice) + " twice");
}

}  // namespace bitnet::ops
