// Whether a second thread pays: which CPU a thread is on, and how long the regions of a calling
// thread do without others after those only stood in its way (both on one CPU, beside a busy
// neighbour). Results do not depend on it. Must not know who runs the regions or what they compute.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace bitnet {

// The CPU that the calling thread runs on, -1 where the system does not tell.
int32_t current_cpu();
// The CPUs of the affinity mask when the library was loaded, at least one.
const std::vector<int32_t>& allowed_cpu_list();
int64_t allowed_cpus();
// Processor time of the calling thread.
int64_t thread_cpu_ns();
int64_t steady_ns();

// BITNET_OPS_SPREAD=1, which our own commands set and a host process may: threads that meet on one
// CPU may be moved to another one.  Their affinity masks are afterwards what they were before.
bool may_spread();
// BITNET_OPS_REST=0, for tests that count regions: no thread ever rests.
bool may_rest();
// Moves the calling thread off CPU `cpu` where its mask has others; false where it was not moved.
bool leave_cpu(int32_t cpu);

// Sleeps while `word` is `value`, but no longer than that, or for no reason; wakes who sleeps so.
void wait_at_most(std::atomic<uint32_t>& word, uint32_t value, int64_t ns);
void wake_all(std::atomic<uint32_t>& word);

// The regions of one calling thread. What a region was worth is estimated from the caller's own
// processor time and its share of the work: alone it would have taken time / share.
class Crowding {
 public:
  static constexpr int64_t kSampleEveryNs = 250'000;  // the estimate costs two system calls
  static constexpr int64_t kWindowNs = 2'000'000;     // regions are judged by so much time at once
  static constexpr int64_t kTrialNs = 50'000'000;     // bad for so long, and others rest
  static constexpr int64_t kMostRestNs = 1'000'000'000;

  // Threads that a region opened at `now` should have of `threads`: 1 while others rest.
  int64_t threads(int64_t threads, int64_t now) const { return now < rest_until_ ? 1 : threads; }
  bool wants_sample(int64_t now) const { return now - last_sample_ >= kSampleEveryNs; }
  // A region that ended at `now` took `wall` and would have taken `alone` on one thread.
  void sample(int64_t now, int64_t wall, int64_t alone);

 private:
  int64_t rest_until_ = 0, last_sample_ = 0;
  int64_t wall_ = 0, alone_ = 0;  // of this window
  int64_t bad_ns_ = 0;            // of bad windows in a row
  int rests_ = 0;                 // in a row
};

// The calling thread's.
Crowding& crowding();

}  // namespace bitnet
