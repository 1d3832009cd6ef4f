// One parallel region that runs a plan of stages: dynamic claims of work, and a barrier that waits
// for work, not for threads.
//
// A stage is `units` equal pieces of work, dealt out contiguously to the partitions, so that each
// partition reads one sequential stream.  A thread claims units from the front of its own
// partitions, then helps the slowest partition from the back of its range.  A stage ends when all
// of its units are done and the threads that entered it have left.  A thread that arrives late,
// brings several partitions or never comes at all delays nobody: any one thread can finish the plan
// alone, however the pool deals partitions to threads, and threads that find nothing to do sleep.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/parallel.h"

namespace bitnet {

// Half-open range of unit numbers.
struct UnitRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// How much of what is left of a partition a claim takes: one part in `parts`, but at least `least`
// and at most `most` units. Large claims waste no time on claiming, small ones end together.
struct ClaimRule {
  int64_t least = 1, most = 1, parts = 8;
};

class StagedExecutor {
 public:
  static constexpr int64_t kMaxPartitions = 256;
  static constexpr int64_t kMaxUnits = int64_t{1} << 31;  // of one stage

  // `partitions` in [1, kMaxPartitions].  Runs one plan, then start() makes it ready for another.
  StagedExecutor() = default;
  StagedExecutor(const StagedExecutor&) = delete;
  StagedExecutor& operator=(const StagedExecutor&) = delete;

  // The whole plan in one region of the process's thread pool. A plan is const, shared by all
  // threads, and must not throw or allocate:
  //   int64_t stages(); int64_t units(stage)
  //   ClaimRule claim(stage)                  how many units run() takes at once
  //   void prepare(stage, slot)               once per thread and stage, before its first run()
  //   void run(stage, unit_begin, unit_end, slot)
  //   void prefetch_next(stage, slot)         work on `stage` is over for this thread
  // slot: the thread's first partition; no two threads have the same.
  template <class StagePlan>
  void run(int64_t partitions, const StagePlan& plan) {
    struct Context {
      StagedExecutor& executor;
      const StagePlan& plan;
    } context{*this, plan};
    start(partitions, plan);
    if (partitions == 1) return work(0, 1, plan);
    run_region(
        partitions,
        [](int64_t begin, int64_t end, void* raw) {
          auto* c = static_cast<Context*>(raw);
          c->executor.work(begin, end, c->plan);
        },
        &context);
  }

  // The same in parts.  Before the region, by one thread.
  template <class StagePlan>
  void start(int64_t partitions, const StagePlan& plan) {
    partitions_ = partitions;
    stages_ = plan.stages();
    spin_ns_ = spin_budget(partitions);
    open(0, plan);
  }

  // In the region: the part of the thread that was given partitions [begin, end).  Returns when the
  // whole plan is done.
  template <class StagePlan>
  void work(int64_t begin, int64_t end, const StagePlan& plan) {
    for (int64_t stage = 0; (stage = wait_for(stage)) < stages_; ++stage) {
      if (!enter(stage)) continue;
      const ClaimRule rule = plan.claim(stage);
      int64_t done = 0;
      UnitRange claimed;
      while (claim(begin, end, rule, claimed)) {
        if (done == 0) plan.prepare(stage, begin);
        plan.run(stage, claimed.begin, claimed.end, begin);
        done += claimed.size();
      }
      if (done != 0) plan.prefetch_next(stage, begin);
      if (leave(done)) open(stage + 1, plan);
    }
  }

 private:
  // stage (20 bits) | threads inside (12 bits) | units not done (32 bits)
  static constexpr int kStageShift = 44, kInsideShift = 32;
  static constexpr uint64_t kUnitsMask = (uint64_t{1} << 32) - 1;
  static constexpr uint64_t kOneInside = uint64_t{1} << kInsideShift;
  static int64_t stage_of(uint64_t state) { return static_cast<int64_t>(state >> kStageShift); }

  // A partition's range of unclaimed units: begin | end, 32 bits each.
  struct alignas(64) Range {
    std::atomic<uint64_t> value{0};
  };

  // Deals out the units of `stage`, or of the first stage behind it that has any, and opens it.
  // By the one thread that no other thread is inside with.
  template <class StagePlan>
  void open(int64_t stage, const StagePlan& plan) {
    int64_t units = 0;
    while (stage < stages_ && (units = plan.units(stage)) == 0) ++stage;
    deal(stage < stages_ ? units : 0);
    publish(stage, stage < stages_ ? units : 0);
  }

  static int64_t spin_budget(int64_t partitions);
  void deal(int64_t units);
  void publish(int64_t stage, int64_t units);
  // Blocks until stage `stage` or a later one is open; which one.
  int64_t wait_for(int64_t stage);
  // False when the stage has no unit left that is not done.
  bool enter(int64_t stage);
  // True for the thread that has to open the next stage.
  bool leave(int64_t done);
  bool claim(int64_t begin, int64_t end, const ClaimRule& rule, UnitRange& claimed);
  bool claim_front(Range& range, const ClaimRule& rule, UnitRange& claimed);
  bool claim_back(const ClaimRule& rule, UnitRange& claimed);

  int64_t partitions_ = 1, stages_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  // Sleepers watch opened_, which changes with every publish; nobody else touches this line often.
  alignas(64) std::atomic<uint32_t> opened_{0};
  std::atomic<uint32_t> sleepers_{0};
  int64_t spin_ns_ = 0;
  Range ranges_[kMaxPartitions];
};

}  // namespace bitnet
