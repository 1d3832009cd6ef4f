// One parallel region that runs a whole program of stages: dynamic shares of work and a barrier
// that waits for work, not for threads.  Threads are the caller's (torch's pool, std::thread in
// tests). Must not know torch, kernels or what a unit of work is.
//
// A stage is `units` equal pieces of work, dealt out contiguously to the shares, so that each share
// reads one sequential stream.  A thread takes chunks from the front of its own shares, then helps
// the slowest share from the back of its range.  A stage ends when all of its units are done and
// the threads that entered it have left.  A thread that arrives late, brings several shares or
// never comes at all delays nobody: any one thread can finish the program alone, whatever way the
// runtime deals shares to threads, and threads that find nothing to do sleep.
#pragma once

#include <atomic>
#include <cstdint>

namespace bitnet {

// Half-open range of unit numbers.
struct Chunk {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

class Team {
 public:
  static constexpr int64_t kMaxShares = 256;
  static constexpr int64_t kMaxUnits = int64_t{1} << 31;  // of one stage

  // `shares` in [1, kMaxShares].  A team runs one program, then start() makes it ready for another.
  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Before the region, by one thread.  units(stage) gives each stage's number of units.
  template <class Program>
  void start(int64_t shares, const Program& program) {
    shares_ = shares;
    stages_ = program.stages();
    spin_ns_ = spin_budget(shares);
    open(0, program);
  }

  // In the region: the part of the thread that was given shares [begin, end).  Returns when the
  // whole program is done.  Program (const, shared by all threads; must not throw):
  //   int64_t stages(); int64_t units(stage)
  //   int64_t max_chunk(stage)                most units that run() takes at once, at least 1
  //   void prepare(stage, slot)               once per thread and stage, before its first run()
  //   void run(stage, unit_begin, unit_end, slot)
  //   void look_ahead(stage, slot)            work on `stage` is over for this thread; prefetch
  // slot = begin: no two threads have the same.
  template <class Program>
  void work(int64_t begin, int64_t end, const Program& program) {
    for (int64_t stage = 0; (stage = wait_for(stage)) < stages_; ++stage) {
      if (!enter(stage)) continue;
      const int64_t limit = program.max_chunk(stage);
      int64_t done = 0;
      Chunk chunk;
      while (claim(begin, end, limit, chunk)) {
        if (done == 0) program.prepare(stage, begin);
        program.run(stage, chunk.begin, chunk.end, begin);
        done += chunk.size();
      }
      if (done != 0) program.look_ahead(stage, begin);
      if (leave(done)) open(stage + 1, program);
    }
  }

 private:
  // stage (20 bits) | threads inside (12 bits) | units not done (32 bits)
  static constexpr int kStageShift = 44, kInsideShift = 32;
  static constexpr uint64_t kUnitsMask = (uint64_t{1} << 32) - 1;
  static constexpr uint64_t kOneInside = uint64_t{1} << kInsideShift;
  static int64_t stage_of(uint64_t state) { return static_cast<int64_t>(state >> kStageShift); }

  // A share's range of unclaimed units: begin | end, 32 bits each.
  struct alignas(64) Range {
    std::atomic<uint64_t> value{0};
  };

  // Deals out the units of `stage`, or of the first stage behind it that has any, and opens it.
  // By the one thread that no other thread is inside with.
  template <class Program>
  void open(int64_t stage, const Program& program) {
    int64_t units = 0;
    while (stage < stages_ && (units = program.units(stage)) == 0) ++stage;
    deal(stage < stages_ ? units : 0);
    publish(stage, stage < stages_ ? units : 0);
  }

  static int64_t spin_budget(int64_t shares);
  void deal(int64_t units);
  void publish(int64_t stage, int64_t units);
  // Blocks until stage `stage` or a later one is open; which one.
  int64_t wait_for(int64_t stage);
  // False when the stage has no unit left that is not done.
  bool enter(int64_t stage);
  // True for the thread that has to open the next stage.
  bool leave(int64_t done);
  bool claim(int64_t begin, int64_t end, int64_t limit, Chunk& chunk);
  bool claim_front(Range& range, int64_t limit, Chunk& chunk);
  bool claim_back(int64_t limit, Chunk& chunk);

  int64_t shares_ = 1, stages_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  // Sleepers watch opened_, which changes with every publish; nobody else touches this line often.
  alignas(64) std::atomic<uint32_t> opened_{0};
  std::atomic<uint32_t> sleepers_{0};
  int64_t spin_ns_ = 0;
  Range ranges_[kMaxShares];
};

}  // namespace bitnet
