// The checks of state_checks.h.
#include "ops/state_checks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

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

// Buffers of a slot may alternate with others, as long as they are not the same bytes of it.
void StatePool::check_apart(const Check& check) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Tensor *a = tensors_[j], *b = tensors_[i];
      if (!overlap(*a, *b)) continue;
      auto between = static_cast<const char*>(b->const_data_ptr()) -
                     static_cast<const char*>(a->const_data_ptr());
      if (between < 0) std::swap(a, b);
      const int64_t slot = a->stride(0) * static_cast<int64_t>(sizeof(float));
      between = std::abs(between);
      if (a->stride(0) != b->stride(0) || between < part_bytes(*a, 0) ||
          between + part_bytes(*b, 0) > slot)
        check.fail(names_[i].c_str(), "in its own memory",
                   "memory shared with " + names_[j] + "; pass a copy (clone)");
    }
  }
}

void StatePool::add_to(const Check& check, Mutated& mutated) const {
  check_apart(check);
  for (size_t i = 0; i < tensors_.size(); ++i)
    mutated.keep_apart(check, *tensors_[i], names_[i].c_str());
  for (size_t i = 0; i < tensors_.size(); ++i) mutated.add(*tensors_[i], names_[i].c_str());
}

bool StatePool::add_beside(const Check& check, const Tensor& keys, const Tensor& values,
                           Mutated& mutated) const {
  const auto shared = std::ranges::find_if(
      tensors_, [&](const Tensor* t) { return overlap(*t, keys) || overlap(*t, values); });
  if (shared == tensors_.end()) {
    add_to(check, mutated);
    return false;
  }
  check_apart(check);
  const auto data = [](const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); };
  const auto step = [](const Tensor& t, int64_t d) {
    return t.stride(d) * static_cast<int64_t>(t.element_size());
  };
  const char* first = std::min(data(keys), data(values));
  for (const Tensor* t : tensors_) {
    if (t->numel() != 0) first = std::min(first, data(*t));
  }
  const int64_t page = step(keys, kPagedLayers.block);
  const auto in_pages = [&](const Tensor& t, int64_t d) {
    return t.numel() == 0 || (step(t, d) == page && data(t) - first + part_bytes(t, d) <= page);
  };
  const bool pages =
      in_pages(keys, kPagedLayers.block) && in_pages(values, kPagedLayers.block) &&
      std::ranges::all_of(tensors_, [&](const Tensor* t) { return in_pages(*t, 0); });
  if (!pages)
    check.fail(names_[static_cast<size_t>(shared - tensors_.begin())].c_str(),
               "in its own memory, or slot n within block n of key_pool",
               "memory shared otherwise; pass a copy (clone)");
  for (size_t i = 0; i < tensors_.size(); ++i) mutated.add(*tensors_[i], names_[i].c_str());
  return true;
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

void check_pages(const Check& check, const std::vector<engine::StateStep>& steps,
                 const engine::Sequences& sequences, const std::vector<int64_t>& cache_slots,
                 int64_t block_size) {
  std::vector<int64_t> slots;
  for (const engine::StateStep& step : steps) slots.push_back(step.slot);
  std::ranges::sort(slots);
  const auto check_block = [&](int64_t block) {
    if (std::ranges::binary_search(slots, block))
      check.fail("state_steps", "with slots that hold no keys and values of this step",
                 std::to_string(block) + ", a block of one of its sequences");
  };
  for (int64_t s = 0; s < sequences.count; ++s) {
    const int64_t length = sequences.lengths[s];
    const int64_t count = length / block_size + static_cast<int64_t>(length % block_size != 0);
    for (int64_t i = 0; i < count; ++i) check_block(sequences.blocks(s)[i]);
  }
  for (const int64_t slot : cache_slots) {
    if (slot >= 0) check_block(slot / block_size);
  }
}

}  // namespace bitnet::ops
