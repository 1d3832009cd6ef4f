// The checks of state_checks.h.
#include "ops/state_checks.h"

#include <algorithm>
#include <cstring>

namespace bitnet::ops {
namespace {

// Rows, if there are any, one behind the other, and the same of what a row is made of.
void check_together(const Check& check, const Tensor& t, const char* argument) {
  int64_t expected = 1;
  for (int64_t d = t.dim() - 1; d >= 2; --d) {
    if (t.size(d) != 1 && t.stride(d) != expected)
      check.fail(argument, "contiguous in each layer of a slot",
                 "stride " + std::to_string(t.stride(d)) + " in dimension " + std::to_string(d));
    expected *= t.size(d);
  }
}

}  // namespace

StatePool::StatePool(const Check& check, std::vector<engine::KeptBuffer> buffers,
                     std::vector<const Tensor*> tensors, std::vector<std::string> names)
    : tensors_(std::move(tensors)), names_(std::move(names)) {
  int64_t fewest = -1;  // rows of a buffer, which tells how many drafts there is room for
  drafts = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Tensor& t = *tensors_[i];
    const int64_t rows = buffers[i].rows;
    check.dtype(t, names_[i].c_str(), ScalarType::Float);
    check.dim(t, names_[i].c_str(),
              2 + static_cast<int64_t>(rows >= 0) + static_cast<int64_t>(buffers[i].shape.size()));
    if (t.numel() != 0) check_together(check, t, names_[i].c_str());
    check_rows(check, t, names_[i].c_str());
    if (rows < 0 || (fewest >= 0 && rows >= fewest)) continue;
    fewest = rows;
    drafts = std::max(t.size(2) - rows, int64_t{0});
  }
  slots = tensors_[0]->size(0);
  layers = buffers[0].layers == 0 ? tensors_[0]->size(1) : buffers[0].layers;
  for (size_t i = 0; i < buffers.size(); ++i) {
    engine::KeptBuffer& buffer = buffers[i];
    if (buffer.layers == 0) buffer.layers = layers;
    Shape expected{slots, buffer.layers};
    if (buffer.rows >= 0) expected.push_back(buffer.rows + drafts);
    for (const int64_t size : buffer.shape) expected.push_back(size);
    const Tensor& t = *tensors_[i];
    check.shape(t, names_[i].c_str(), expected);
    float* floats = t.numel() == 0 ? nullptr : static_cast<float*>(t.mutable_data_ptr());
    memory_.push_back({floats, t.stride(0), t.stride(1)});
  }
}

void StatePool::add_to(const Check& check, Mutated& mutated) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    mutated.keep_apart(check, *tensors_[i], names_[i].c_str());
    mutated.add(*tensors_[i], names_[i].c_str());
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
