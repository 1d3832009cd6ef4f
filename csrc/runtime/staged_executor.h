// One parallel region that runs a plan of stages: dynamic claims of work, and a barrier that waits
// for work, not for threads.
//
// A stage is `units` equal pieces of work, dealt out contiguously to the partitions, so that each
// partition reads one sequential stream.  A thread claims units from the front of its own
// partitions, then helps the slowest partition of its group of cores, then those of other groups,
// from the back of their ranges.  A stage ends when all of its units are done.  A thread that
// arrives late, brings several partitions or never comes at all delays nobody: any one thread can
// finish the plan alone, however the pool deals partitions to threads, and threads that find
// nothing to do sleep.
//
// What is counted are units, not threads: a thread that did some adds them, once, to the line of
// the group (core_groups.h) whose units they are, and who completes a group adds the whole group to
// the root. So a line is changed by the threads of one group and the root by one thread of each.
// Nobody enters a stage and nobody deals out its units: the word of a partition's range carries the
// stage that it is of, and one of an earlier stage means that nothing of it is claimed.
//
// Threads that share a CPU only take it from each other: one that finds a thread of a lower
// partition on its CPU stands aside, claims nothing and sleeps, and nobody
// spins for work that waits for the spinner's own CPU.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/core_groups.h"
#include "runtime/crowding.h"
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
  static constexpr int64_t kMaxStages = (int64_t{1} << 16) - 2;  // of one plan
  // Of a stage that is shared: one with more is done by one thread.
  static constexpr int64_t kMaxUnits = (int64_t{1} << 24) - 1;

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
    const int64_t begin = steady_ns();
    sampled_ = crowding().wants_sample(begin);
    alone_ns_ = busy_ns_ = 0;
    caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
    run_region(
        partitions,
        [](int64_t begin, int64_t end, void* raw) {
          auto* c = static_cast<Context*>(raw);
          c->executor.work(begin, end, c->plan);
        },
        &context);
    // where another thread did everything, nothing is known unless that was on the caller's CPU
    if (!sampled_ || (alone_ns_ == 0 && !met_)) return;
    const int64_t now = steady_ns();
    crowding().sample(now, now - begin, met_ ? busy_ns_ : alone_ns_);
  }

  // The same in parts.  Before the region, by one thread.
  template <class StagePlan>
  void start(int64_t partitions, const StagePlan& plan) {
    reset(partitions);
    stages_ = plan.stages();
    open(0, plan, 0);
  }

  // In the region: the part of the thread that was given partitions [begin, end).  Returns when the
  // whole plan is done.
  template <class StagePlan>
  void work(int64_t begin, int64_t end, const StagePlan& plan) {
    Shift shift(*this, begin);
    for (int64_t next = 0;;) {
      const OpenStage open = wait_for(next, shift);
      if (open.stage >= stages_) return;
      next = open.stage;  // it may be open still when a thread comes back that stood aside
      if (stands_aside(shift)) continue;
      ++next;
      Turn turn{begin, end, open, plan.claim(open.stage)};
      int64_t done = 0, group = 0, done_of_group = 0;
      shift.begin_stage();
      while (claim(turn)) {
        if (done == 0) plan.prepare(open.stage, begin);
        if (turn.group != group) {  // what it has claimed is not done, so the stage goes on
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
  // What waiting threads wait for: stage (32 bits) | its units (32 bits).
  struct OpenStage {
    int64_t stage = 0, units = 0;
  };
  // A thread's part in a stage.
  struct Turn {
    int64_t begin, end;  // its partitions, of which those before `begin` have nothing left
    OpenStage open;
    ClaimRule rule;
    UnitRange claimed = {};
    int64_t group = 0;  // whose units these are
  };

  // What a thread knows of itself while it is in work(). Of a sampled region the caller's keeps the
  // time of each stage too, and what share of its units it did itself.
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
    int32_t cpu = -1;      // as executor.cpus_ has it
    int moves = 0;         // to other CPUs
    int64_t pause_ns = 0;  // the last time that it stood aside, 0: it works
    uint64_t left = 0;     // what was left to the thread that had the CPU
    bool timed;
    int64_t cpu_ns_before = 0, spun_ns = 0, stage_began = 0, stages_ns = 0;
    double own_ns = 0;
  };

  // A partition's unclaimed units: stage + 1 (16 bits) | end (24 bits) | how many (24 bits). Where
  // the stage is an earlier one, all of the partition's units of the open one are unclaimed.
  struct alignas(64) Range {
    std::atomic<uint64_t> value{0};
  };

  // A group of cores: how many units of its partitions are done in the open stage, and, on a line
  // of its own, of which stage (+ 1) nothing is left to claim.
  struct Group {
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<uint32_t> drained{0};
  };

  // Opens `stage`, or the first one behind it that has units.  By the one thread that arrive()
  // chose, when all units before are done.
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
    const int64_t units = plan.units(stage), most = plan.claim(stage).most;
    plan.prepare(stage, slot);
    for (int64_t begin = 0; begin < units; begin += most)
      plan.run(stage, begin, begin + most < units ? begin + most : units, slot);
  }

  void reset(int64_t partitions);
  void publish(OpenStage open);
  OpenStage open_stage(std::memory_order order = std::memory_order_acquire) const {
    const uint64_t word = open_.load(order);
    return {static_cast<int64_t>(word >> 32), static_cast<int64_t>(word & 0xffffffffu)};
  }
  // Blocks until stage `stage` or a later one is open; which one.
  OpenStage wait_for(int64_t stage, Shift& shift);
  void spin_for(int64_t stage, Shift& shift);
  // Notes the thread's CPU. Where a thread of a lower partition is on it and gets on with the work,
  // sleeps for a while, but not longer than the plan lasts, and returns true.
  bool stands_aside(Shift& shift);
  // Which of the threads of partitions [0, slots) other than `own` was last seen on `cpu`; -1:
  // none.
  int64_t slot_on(int32_t cpu, int64_t slots, int64_t own) const;
  // Adds units of `group` that are done. True for the thread that has to open the next stage.
  bool arrive(OpenStage open, int64_t group, int64_t done);
  bool claim(Turn& turn);
  bool claim_from_others(Turn& turn);
  bool claim_front(Turn& turn, int64_t partition);
  // From who has most left of the partitions [first, last).
  bool claim_back(Turn& turn, int64_t first, int64_t last);
  // The word of a partition's range, read as `word`, as it is in the open stage.
  uint64_t in_stage(OpenStage open, uint64_t word, int64_t partition) const;
  uint64_t whole_range(OpenStage open, int64_t partition) const;
  // partition_begin, without its divisions.
  int64_t begin_of(int64_t partition, int64_t units) const;

  int64_t partitions_ = 1, stages_ = 0;
  uint64_t inverse_ = 0;  // of the partitions
  CoreGroups groups_{1};
  int64_t spin_ns_ = 0;
  bool sampled_ = false;
  // What the region would have taken its caller alone, 0: unknown: by the clock, which counts the
  // time that other processes took from it, and by its processor time, for it may be another thread
  // of the region that took it: one that met the caller on its CPU.
  int64_t alone_ns_ = 0, busy_ns_ = 0;
  std::atomic<int32_t> caller_cpu_{-1};
  std::atomic<bool> met_{false};
  // Waiting threads read this line, which is written once a stage and by nobody else.
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> done_{0};  // units of the open stage, of whole groups
  // Who sleep until a stage opens, and what they watch: changed when one opens while some sleep.
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> opened_{0};
  std::atomic<uint32_t> asides_{0}, ended_{0};  // who stand aside, and what they watch
  Range ranges_[kMaxPartitions];
  Group group_lines_[CoreGroups::kMostGroups];
  // Of each thread, by its first partition, the CPU it was last seen on; -1: not there or aside.
  // Written when a thread has moved, so that reading all of them costs little.
  alignas(64) std::atomic<int32_t> cpus_[kMaxPartitions];
};

}  // namespace bitnet
