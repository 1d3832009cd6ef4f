// Runs a plan of stages in one parallel region. Threads claim work as they go, and the barrier
// between stages waits for work, not for threads.
//
// A stage is a number of equal units of work. Units are assigned to partitions in contiguous
// ranges, so that each partition reads one sequential stream. A thread claims units from the front
// of its own partitions. Then it helps, from the back of their ranges, first the slowest partition
// of its group of cores, then the partitions of other groups. A stage ends when all of its units
// are done. No thread is waited for: any one thread can finish the plan alone, and threads without
// work sleep.
//
// The barrier counts finished units in a tree. A thread adds the units that it finished, once, to
// the counter of their group (core_groups.h). The thread that completes a group adds the group to
// the root. The thread that completes the root opens the next stage: it publishes the stage number
// in one word, and waiting threads poll that word. The units of a stage need no dealing out: the
// word of a range contains its stage, and a word of an earlier stage means that nothing is claimed
// yet.
//
// Two threads on one CPU only take time from each other. A thread that finds a thread of a lower
// partition on its CPU backs off: it claims nothing and sleeps. A thread that waits for another one
// on its own CPU does not spin.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/core_groups.h"
#include "runtime/oversubscription.h"
#include "runtime/parallel.h"

namespace bitnet {

// Half-open range of unit numbers.
struct UnitRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// A claim takes 1 / parts of the units that a partition has left, at least `min` and at most
// `max`. Large claims cost little time for claiming; small claims let all threads end together.
struct ClaimRule {
  int64_t min = 1, max = 1, parts = 8;
};

class StagedExecutor {
 public:
  static constexpr int64_t kMaxPartitions = 256;
  static constexpr int64_t kMaxStages = (int64_t{1} << 16) - 2;  // of one plan
  // A stage with more units is run by one thread.
  static constexpr int64_t kMaxUnits = (int64_t{1} << 24) - 1;

  // Runs one plan; start() prepares it for another.
  StagedExecutor() = default;
  StagedExecutor(const StagedExecutor&) = delete;
  StagedExecutor& operator=(const StagedExecutor&) = delete;

  // Runs the whole plan in one region of the process's thread pool. `partitions` is in
  // [1, kMaxPartitions]. All threads share the plan, which must not throw or allocate:
  //   int64_t stages(); int64_t units(stage)
  //   ClaimRule claim(stage)                  how many units run() takes at once
  //   void prepare(stage, slot)               once per thread and stage, before its first run()
  //   void run(stage, unit_begin, unit_end, slot)
  //   void prefetch_next(stage, slot)         this thread has no more work on `stage`
  // slot: the thread's first partition, different for every thread.
  template <class StagePlan>
  void run(int64_t partitions, const StagePlan& plan) {
    struct Context {
      StagedExecutor& executor;
      const StagePlan& plan;
    } context{*this, plan};
    start(partitions, plan);
    if (partitions == 1) return work(0, 1, plan);
    const int64_t begin = steady_ns();
    sampled_ = oversubscription().wants_sample(begin);
    alone_ns_ = busy_ns_ = 0;
    caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
    run_region(
        partitions,
        [](int64_t begin, int64_t end, void* raw) {
          auto* c = static_cast<Context*>(raw);
          c->executor.work(begin, end, c->plan);
        },
        &context);
    // if other threads did everything, nothing is known unless one was on the caller's CPU
    if (!sampled_ || (alone_ns_ == 0 && !met_)) return;
    const int64_t now = steady_ns();
    oversubscription().sample(now, now - begin, met_ ? busy_ns_ : alone_ns_);
  }

  // run() in two parts. start() is called by one thread before the region.
  template <class StagePlan>
  void start(int64_t partitions, const StagePlan& plan) {
    reset(partitions);
    stages_ = plan.stages();
    open(0, plan, 0);
  }

  // Called in the region by the thread that has partitions [begin, end). Returns when the whole
  // plan is done.
  template <class StagePlan>
  void work(int64_t begin, int64_t end, const StagePlan& plan) {
    Shift shift(*this, begin);
    for (int64_t next = 0;;) {
      const OpenStage open = wait_for(next, shift);
      if (open.stage >= stages_) return;
      next = open.stage;  // still open, perhaps, when this thread returns from backing off
      if (backs_off(shift)) continue;
      ++next;
      Turn turn{begin, end, open, plan.claim(open.stage)};
      int64_t done = 0, group = 0, done_of_group = 0;
      shift.begin_stage();
      while (claim(turn)) {
        if (done == 0) plan.prepare(open.stage, begin);
        if (turn.group != group) {  // the stage stays open: the new claim is not done yet
          if (done_of_group != 0) arrive(open, group, done_of_group);
          group = turn.group;
          done_of_group = 0;
        }
        plan.run(open.stage, turn.claimed.begin, turn.claimed.end, begin);
        done += turn.claimed.size();
        done_of_group += turn.claimed.size();
      }
      shift.end_stage(done, open.units);
      if (done == 0) continue;
      plan.prefetch_next(open.stage, begin);
      if (arrive(open, group, done_of_group)) this->open(open.stage + 1, plan, begin);
    }
  }

 private:
  // The word that waiting threads poll: stage (32 bits) | its units (32 bits).
  struct OpenStage {
    int64_t stage = 0, units = 0;
  };
  // A thread's part in a stage.
  struct Turn {
    int64_t begin, end;  // its partitions that may have units left
    OpenStage open;
    ClaimRule rule;
    UnitRange claimed = {};
    int64_t group = 0;  // of the claimed units
  };

  // State of one thread while it is in work(). In a sampled region the caller's Shift also measures
  // each stage and the share of its units that the caller did.
  struct Shift {
    Shift(StagedExecutor& executor, int64_t begin);
    ~Shift();
    void begin_stage() {
      if (timed) stage_began = steady_ns();
    }
    void end_stage(int64_t done, int64_t units) {
      if (!timed) return;
      const int64_t took = steady_ns() - stage_began;
      stages_ns += took;
      own_ns += static_cast<double>(took) * static_cast<double>(done) / static_cast<double>(units);
    }

    StagedExecutor& executor;
    int64_t slot;
    int32_t cpu = -1;      // its entry of executor.cpus_
    int moves = 0;         // to other CPUs
    int64_t pause_ns = 0;  // of its last back-off; 0: it works
    uint64_t left = 0;     // range of the thread on the same CPU, at the last back-off
    bool timed;
    int64_t cpu_ns_before = 0, spun_ns = 0, stage_began = 0, stages_ns = 0;
    double own_ns = 0;
  };

  // A partition's unclaimed units: stage + 1 (16 bits) | end (24 bits) | how many (24 bits). A word
  // of an earlier stage means: all of the partition's units of the open stage are unclaimed.
  struct alignas(64) Range {
    std::atomic<uint64_t> value{0};
  };

  // Of a group of cores: finished units of the open stage and, on a cache line of its own, the last
  // stage (+ 1) that has no units left to claim.
  struct Group {
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<uint32_t> drained{0};
  };

  // Opens `stage`, or the first later stage that has units. Called by the one thread for which
  // arrive() returned true.
  template <class StagePlan>
  void open(int64_t stage, const StagePlan& plan, int64_t slot) {
    int64_t units = 0;
    for (; stage < stages_; ++stage) {
      units = plan.units(stage);
      if (units > kMaxUnits) {
        run_alone(stage, plan, slot);
      } else if (units != 0) {
        break;
      }
    }
    publish({stage, stage < stages_ ? units : 0});
  }

  template <class StagePlan>
  static void run_alone(int64_t stage, const StagePlan& plan, int64_t slot) {
    const int64_t units = plan.units(stage), max = plan.claim(stage).max;
    plan.prepare(stage, slot);
    for (int64_t begin = 0; begin < units; begin += max)
      plan.run(stage, begin, begin + max < units ? begin + max : units, slot);
  }

  void reset(int64_t partitions);
  void publish(OpenStage open);
  OpenStage open_stage(std::memory_order order = std::memory_order_acquire) const {
    const uint64_t word = open_.load(order);
    return {static_cast<int64_t>(word >> 32), static_cast<int64_t>(word & 0xffffffffu)};
  }
  // Blocks until `stage` or a later stage is open; returns that one.
  OpenStage wait_for(int64_t stage, Shift& shift);
  void spin_for(int64_t stage, Shift& shift);
  // Notes the thread's CPU. If a thread of a lower partition is on the same CPU and makes progress,
  // sleeps for a while, at most until the plan ends, and returns true.
  bool backs_off(Shift& shift);
  // The thread of partitions [0, slots), other than `own`, that was last seen on `cpu`; -1: none.
  int64_t slot_on(int32_t cpu, int64_t slots, int64_t own) const;
  // Adds finished units of `group`. True for the thread that completes the stage; it opens the
  // next.
  bool arrive(OpenStage open, int64_t group, int64_t done);
  bool claim(Turn& turn);
  bool claim_from_others(Turn& turn);
  bool claim_front(Turn& turn, int64_t partition);
  // From the partition of [first, last) that has the most units left.
  bool claim_back(Turn& turn, int64_t first, int64_t last);
  // The range of a partition in the open stage, given the `word` that was read.
  uint64_t in_stage(OpenStage open, uint64_t word, int64_t partition) const;
  uint64_t whole_range(OpenStage open, int64_t partition) const;
  // partition_begin() without divisions.
  int64_t begin_of(int64_t partition, int64_t units) const;

  int64_t partitions_ = 1, stages_ = 0;
  uint64_t inverse_ = 0;  // 1 / partitions_, in fixed point
  CoreGroups groups_{1};
  int64_t spin_ns_ = 0;
  bool sampled_ = false;
  // Estimates of the region's time on the caller alone; 0: unknown. alone_ns_ is by the clock,
  // which includes time taken by other processes. busy_ns_ is by processor time, for regions in
  // which another of our threads was on the caller's CPU (met_).
  int64_t alone_ns_ = 0, busy_ns_ = 0;
  std::atomic<int32_t> caller_cpu_{-1};
  std::atomic<bool> met_{false};
  // The line that waiting threads poll. It is written once a stage.
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> done_{0};  // the root: units of completed groups
  // How many threads sleep until a stage opens, and the word they sleep on, which changes then.
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> opened_{0};
  std::atomic<uint32_t> backed_off_{0}, ended_{0};  // the same for threads that back off
  Range ranges_[kMaxPartitions];
  Group group_lines_[CoreGroups::kMaxGroups];
  // The CPU that each thread, by its first partition, was last seen on; -1: not in work(), or
  // backed off. Written only when a thread has moved, so reading all of them costs little.
  alignas(64) std::atomic<int32_t> cpus_[kMaxPartitions];
};

}  // namespace bitnet
