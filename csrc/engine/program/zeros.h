// The memory of products that leave out inputs which are 0 (engine/sparsity.h): lists of codes, and
// how much was left out.
#pragma once

#include <vector>

#include "engine/program/plan.h"
#include "runtime/page_count.h"

namespace bitnet::engine {

// A list of codes of k inputs for each thread, in a block's scratch.
class CodeLists {
 public:
  CodeLists() = default;
  CodeLists(PlanBuilder& plan, int64_t k)
      : room_((k + CodeList::kRoom + 63) / 64 * 64),
        memory_(plan.scratch<char>(plan.step().partitions * bytes())) {}

  CodeList of(int64_t slot) const {
    char* ids = memory_ + slot * bytes();
    char* codes = ids + room_ * static_cast<int64_t>(sizeof(int32_t));
    return {reinterpret_cast<int32_t*>(ids), reinterpret_cast<int8_t*>(codes),
            reinterpret_cast<int64_t*>(codes + room_)};
  }

 private:
  // The count has a line of cache of its own.
  int64_t bytes() const { return room_ * static_cast<int64_t>(sizeof(int32_t) + 1) + 64; }

  int64_t room_ = 0;
  char* memory_ = nullptr;
};

// Inputs of a block's products in a step, and how many were left out: added to zero_counts().
class ZeroCounts final : public BlockState {
 public:
  void begin(const Step& step) override {
    threads_.assign(static_cast<size_t>(step.partitions), Count{});
  }
  void end(const Step& /*step*/) override {
    for (const Count& count : threads_) {
      zero_counts().first += count.skipped;
      zero_counts().second += count.inputs;
    }
  }
  void add(int64_t slot, int64_t inputs, int64_t skipped) {
    Count& count = threads_[static_cast<size_t>(slot)];
    count.inputs += inputs;
    count.skipped += skipped;
  }

 private:
  struct alignas(64) Count {  // two threads never write to one line of cache
    int64_t inputs = 0, skipped = 0;
  };
  std::vector<Count> threads_;
};

}  // namespace bitnet::engine
