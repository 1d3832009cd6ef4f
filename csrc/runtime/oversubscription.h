// More threads than free CPUs: which CPU a thread is on, and when a caller backs off to one thread
// because the others gained nothing (two threads on one CPU, a busy neighbour). Results do not
// depend on it. Must not know what regions compute.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace bitnet {

// The CPU that the calling thread runs on; -1 if the system does not say.
int32_t current_cpu();
// The CPUs of the affinity mask at the time the library was loaded; at least one.
const std::vector<int32_t>& allowed_cpu_list();
int64_t allowed_cpus();
// Processor time of the calling thread.
int64_t thread_cpu_ns();
int64_t steady_ns();

// BITNET_OPS_TUNING=spread=1 (our commands set it): a thread that shares its CPU with another of
// ours may be moved to another CPU. Its affinity mask is restored at once.
bool may_spread();
// False with BITNET_OPS_TUNING=back_off=0, for tests that count regions.
bool may_back_off();
// Moves the calling thread off CPU `cpu`; false if its mask has no other CPU.
bool leave_cpu(int32_t cpu);

// Sleeps while `word` is `value`; may return early.
void wait_while(std::atomic<uint32_t>& word, uint32_t value);
// Wakes all threads that sleep in wait_while on `word`.
void wake_waiting(std::atomic<uint32_t>& word);

// Sleeps while `word` is `value`, at most `ns`; may return early.
void wait_at_most(std::atomic<uint32_t>& word, uint32_t value, int64_t ns);
// Wakes all threads that sleep in wait_at_most on `word`.
void wake_all(std::atomic<uint32_t>& word);

// Decides for one calling thread whether its next region has one thread or several. The gain of a
// region is estimated from the caller's time and its share of the work: alone, the caller would
// have taken time / share.
class Oversubscription {
 public:
  static constexpr int64_t kSampleEveryNs = 250'000;  // the estimate costs two system calls
  static constexpr int64_t kWindowNs =
      2'000'000;  // regions are judged together, by windows of this length
  static constexpr int64_t kTrialNs = 50'000'000;  // no gain for so long: back off
  static constexpr int64_t kLongestBackOffNs = 1'000'000'000;

  // How many of `threads` a region that opens at `now` should have: 1 while backed off.
  int64_t threads(int64_t threads, int64_t now) const { return now < alone_until_ ? 1 : threads; }
  bool wants_sample(int64_t now) const { return now - last_sample_ >= kSampleEveryNs; }
  // Reports a region that ended at `now`: it took `wall`, and would have taken `alone` on one
  // thread.
  void sample(int64_t now, int64_t wall, int64_t alone);

 private:
  int64_t alone_until_ = 0, last_sample_ = 0;
  int64_t wall_ = 0, alone_ = 0;  // sums of the current window
  int64_t bad_ns_ = 0;            // windows without a gain, in a row
  int back_offs_ = 0;             // in a row
};

// The calling thread's own.
Oversubscription& oversubscription();

}  // namespace bitnet
