// One parallel region that runs a plan of stages: dynamic claims of work, and a barrier that waits
// for work, not for threads.
//
// A stage is `units` equal pieces of work, dealt out contiguously to the partitions, so that each
// partition reads one sequential stream.  A thread claims units from the front of its own
// partitions, then helps the slowest partition from the back of its range.  A stage ends when all
// of its units are done and the threads that entered it have left.  A thread that arrives late,
// brings several partitions or never comes at all delays nobody: any one thread can finish the plan
// alone, however the pool deals partitions to threads, and threads that find nothing to do sleep.
//
// Threads that share a CPU only take it from each other: one that finds a thread of a lower
// partition on its CPU stands aside, claims nothing and sleeps, and nobody
// spins for work that waits for the spinner's own CPU.
#pragma once

#include <atomic>
#include <cstdint>

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
    open(0, plan);
  }

  // In the region: the part of the thread that was given partitions [begin, end).  Returns when the
  // whole plan is done.
  template <class StagePlan>
  void work(int64_t begin, int64_t end, const StagePlan& plan) {
    Shift shift(*this, begin);
    for (int64_t stage = 0; (stage = wait_for(stage, shift)) < stages_; ++stage) {
      if (stands_aside(shift)) {
        --stage;  // it may be open still when the thread comes back
        continue;
      }
      if (!enter(stage)) continue;
      const ClaimRule rule = plan.claim(stage);
      int64_t done = 0;
      UnitRange claimed;
      shift.begin_stage();
      while (claim(begin, end, rule, claimed)) {
        if (done == 0) plan.prepare(stage, begin);
        plan.run(stage, claimed.begin, claimed.end, begin);
        done += claimed.size();
      }
      shift.end_stage(done, units_);
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
    units_ = stage < stages_ ? units : 0;
    deal(units_);
    publish(stage, units_);
  }

  void reset(int64_t partitions);
  void deal(int64_t units);
  void publish(int64_t stage, int64_t units);
  // Blocks until stage `stage` or a later one is open; which one.
  int64_t wait_for(int64_t stage, Shift& shift);
  void spin_for(int64_t stage, Shift& shift);
  int64_t open_stage() const { return opened_.load(std::memory_order_acquire); }
  // Notes the thread's CPU. Where a thread of a lower partition is on it and gets on with the work,
  // sleeps for a while, but not longer than the plan lasts, and returns true.
  bool stands_aside(Shift& shift);
  // Which of the threads of partitions [0, slots) other than `own` was last seen on `cpu`; -1:
  // none.
  int64_t slot_on(int32_t cpu, int64_t slots, int64_t own) const;
  // False when the stage has no unit left that is not done.
  bool enter(int64_t stage);
  // True for the thread that has to open the next stage.
  bool leave(int64_t done);
  bool claim(int64_t begin, int64_t end, const ClaimRule& rule, UnitRange& claimed);
  bool claim_front(Range& range, const ClaimRule& rule, UnitRange& claimed);
  bool claim_back(const ClaimRule& rule, UnitRange& claimed);

  int64_t partitions_ = 1, stages_ = 0, units_ = 0;
  int64_t spin_ns_ = 0;
  bool sampled_ = false;
  // What the region would have taken its caller alone, 0: unknown: by the clock, which counts the
  // time that other processes took from it, and by its processor time, for it may be another thread
  // of the region that took it: one that met the caller on its CPU.
  int64_t alone_ns_ = 0, busy_ns_ = 0;
  std::atomic<int32_t> caller_cpu_{-1};
  std::atomic<bool> met_{false};
  alignas(64) std::atomic<uint64_t> state_{0};
  // The open stage. Waiting threads read this line, which is written once a stage, and sleepers
  // watch it; state_ changes with every thread that enters or leaves.
  alignas(64) std::atomic<uint32_t> opened_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> asides_{0}, ended_{0};  // who stand aside, and what they watch
  Range ranges_[kMaxPartitions];
  // Of each thread, by its first partition, the CPU it was last seen on; -1: not there or aside.
  // Written when a thread has moved, so that reading all of them costs little.
  alignas(64) std::atomic<int32_t> cpus_[kMaxPartitions];
};

}  // namespace bitnet
