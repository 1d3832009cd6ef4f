// Plans of attention and their use in one region; see attention.h.
#include "engine/attention.h"

#include <algorithm>
#include <atomic>

#include "engine/attention_pages.h"
#include "kernels/dispatch.h"
#include "runtime/page_count.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kMaxPartitions = 256;

}  // namespace

void AttentionPlan::build(const AttentionShape& shape, const Sequences& sequences,
                          int64_t threads) {
  cut_.build(shape, sequences, threads);
  access_ = PoolAccess::of(shape.pool, sequences);
  pages_read_.assign(static_cast<size_t>(shape.policy.chooses() ? sequences.count : 0), 0);
}

int64_t AttentionPlan::thread_floats() const {
  return std::max(PageChooser::floats(cut_), AttentionRun::floats(cut_, access_));
}

void AttentionPlan::prepare(float* shared) const {
  auto* left = reinterpret_cast<int32_t*>(shared);
  for (const AttentionCut::Group& group : cut_.groups()) {
    if (group.counter >= 0) left[group.counter] = static_cast<int32_t>(group.pieces);
  }
}

void AttentionPlan::add_page_counts(int64_t layers) const {
  if (cut_.shape().policy == AttentionPolicy{}) return;
  auto& counts = page_counts();
  counts.resize(static_cast<size_t>(cut_.sequences().count));
  for (const AttentionCut::Group& group : cut_.groups()) {
    const int64_t pages = AttentionCut::chunks_of(group.position + group.tokens);
    auto& [read, all] = counts[static_cast<size_t>(group.sequence)];
    if (group.choice < 0) {
      all += layers * group.tokens * pages;
      read += layers * group.tokens * std::min(group.pieces, pages);
      continue;
    }
    for (int64_t t = 1; t <= group.tokens; ++t)
      all += layers * AttentionCut::chunks_of(group.position + t);
  }
  for (size_t s = 0; s < pages_read_.size(); ++s) counts[s].first += pages_read_[s];
}

void AttentionPlan::choose(const KernelTable& kernels, const AttentionBuffers& buffers,
                           int64_t begin, int64_t end, float* shared, float* thread_memory) const {
  PageChooser(cut_, kernels, buffers.pool, buffers.query, shared, pages_read_.data(), thread_memory)
      .choose(begin, end);
}

void AttentionPlan::run(const KernelTable& kernels, const AttentionBuffers& buffers, int64_t begin,
                        int64_t end, float* shared, float* thread_memory) const {
  AttentionRun(cut_, access_, kernels, buffers, shared, thread_memory).run(begin, end);
}

void AttentionPlans::add(const AttentionShape& shape, const Sequences& sequences, int64_t threads) {
  if (used_ == plans_.size()) plans_.emplace_back();
  plans_[used_++].build(shape, sequences, threads);
}

int64_t AttentionPlans::shared_before(size_t plan) const {
  int64_t floats = 0;
  for (size_t i = 0; i < plan; ++i) floats += plans_[i].shared_floats();
  return floats;
}

int64_t AttentionPlans::thread_floats() const {
  int64_t max = 0;
  for (size_t i = 0; i < used_; ++i) max = std::max(max, plans_[i].thread_floats());
  return max;
}

void AttentionPlans::prepare(float* shared) const {
  for (size_t i = 0; i < used_; ++i) plans_[i].prepare(shared + shared_before(i));
}

void attend(const AttentionShape& shape, const Sequences& sequences,
            const AttentionBuffers& buffers) {
  const KernelTable& kernels = active_kernels();
  thread_local AttentionPlan plan;  // for its memory
  const int64_t max_partitions =
      partitions_for(kMaxPartitions, attention_work(shape, sequences), kMinElements);
  plan.build(shape, sequences, max_partitions);
  const int64_t partitions = std::min(max_partitions, plan.tasks()), floats = plan.thread_floats();
  if (partitions == 0) return;
  Scratch<float> shared(plan.shared_floats()), threads(partitions * floats);
  plan.prepare(shared.get());
  const AttentionPlan& tasks = plan;  // the threads of the regions have one of their own
  if (const int64_t choices = plan.choices(); choices > 0) {
    const int64_t parts = std::min(partitions, choices);
    run_partitions(parts, [&](int64_t p) {
      tasks.choose(kernels, buffers, partition_begin(choices, parts, p),
                   partition_begin(choices, parts, p + 1), shared.get(),
                   threads.get() + p * floats);
    });
  }
  std::atomic<int64_t> next{plan.split_tasks()};
  run_partitions(partitions, [&](int64_t p) {
    float* mine = threads.get() + p * floats;
    // equal tasks: a sequential stream for each thread; then the dear ones first
    const int64_t split = tasks.split_tasks();
    tasks.run(kernels, buffers, partition_begin(split, partitions, p),
              partition_begin(split, partitions, p + 1), shared.get(), mine);
    for (int64_t i = next++; i < tasks.tasks(); i = next++)
      tasks.run(kernels, buffers, i, i + 1, shared.get(), mine);
  });
  page_counts().clear();
  plan.add_page_counts(1);
}

}  // namespace bitnet::engine
