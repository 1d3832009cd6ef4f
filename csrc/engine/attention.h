// Attention of new tokens over paged caches, cut into tasks. AttentionPlan is for callers that have
// threads of their own; attend() does everything in one region. How work is cut: attention_cut.h;
// how a task runs: attention_run.h; the arithmetic: the kernels (kernel_table.h, attend_chunk).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/attention_cut.h"
#include "engine/attention_reader.h"
#include "engine/attention_run.h"

namespace bitnet::engine {

// Use, with threads that the caller owns:
//   plan.build(shape, sequences, threads);     // once a step, not once a layer
//   `shared` has plan.shared_floats() floats, `memory`, one for each thread, plan.thread_floats()
//   plan.prepare(shared);                      // one thread, before the first task
//   plan.run(kernels, buffers, begin, end, shared, memory);
//                                              // any thread, any order, each task once
// When all tasks are done and the threads have synchronised, `out` is complete and `shared` is
// ready for the next layer. A thread should take neighbouring tasks together: they read
// neighbouring memory, and the chunks of a group share its query.
class AttentionPlan {
 public:
  // As AttentionCut::build.
  void build(const AttentionShape& shape, const Sequences& sequences, int64_t threads);

  int64_t tasks() const { return cut_.tasks(); }
  int64_t split_tasks() const { return cut_.split_tasks(); }
  int64_t shared_floats() const { return cut_.shared_floats(); }
  // Groups that choose what they read: choose() of each before the first task of a layer.
  int64_t choices() const { return cut_.choices(); }
  int64_t thread_floats() const;

  void prepare(float* shared) const;
  // When so many layers are done: adds what was read to page_counts() (runtime/page_count.h).
  void add_page_counts(int64_t layers) const;
  // Choices [begin, end).
  void choose(const KernelTable& kernels, const AttentionBuffers& buffers, int64_t begin,
              int64_t end, float* shared, float* thread_memory) const;
  // Tasks [begin, end).
  void run(const KernelTable& kernels, const AttentionBuffers& buffers, int64_t begin, int64_t end,
           float* shared, float* thread_memory) const;

 private:
  AttentionCut cut_;
  PoolAccess access_;
  mutable std::vector<int64_t> pages_read_;  // by sequence, of groups that choose, in all layers
};

// A step's plans: one for each kind of attention in its layers, over the same sequences.
class AttentionPlans {
 public:
  // Removes all plans and keeps their memory.
  void clear() { used_ = 0; }
  // Builds one more.
  void add(const AttentionShape& shape, const Sequences& sequences, int64_t threads);
  const AttentionPlan& at(int64_t plan) const { return plans_[static_cast<size_t>(plan)]; }

  // `shared` has room for all plans, one after the other; a thread's own memory serves all.
  int64_t shared_floats() const { return shared_before(used_); }
  int64_t thread_floats() const;
  float* shared_of(int64_t plan, float* shared) const {
    return shared + shared_before(static_cast<size_t>(plan));
  }
  void prepare(float* shared) const;

 private:
  int64_t shared_before(size_t plan) const;

  std::vector<AttentionPlan> plans_;
  size_t used_ = 0;
};

// Attention of all sequences in one parallel region.
void attend(const AttentionShape& shape, const Sequences& sequences,
            const AttentionBuffers& buffers);

}  // namespace bitnet::engine
