// Clocks, the CPU of a thread, and when to back off; see oversubscription.h.
#include "runtime/oversubscription.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>
#include <numeric>
#include <thread>

#include "runtime/tuning.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

namespace bitnet {
namespace {

std::vector<int32_t> list_allowed_cpus() {
  std::vector<int32_t> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
#endif
  if (cpus.empty()) {
    cpus.resize(std::max(1u, std::thread::hardware_concurrency()));
    std::iota(cpus.begin(), cpus.end(), 0);
  }
  return cpus;
}

// Read when the library is loaded: later, the thread that asks may be bound to one CPU.
const std::vector<int32_t> g_allowed_cpus = list_allowed_cpus();

}  // namespace

int32_t current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

const std::vector<int32_t>& allowed_cpu_list() { return g_allowed_cpus; }

int64_t allowed_cpus() { return static_cast<int64_t>(g_allowed_cpus.size()); }

int64_t thread_cpu_ns() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

int64_t steady_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

bool may_spread() {
  static const bool allowed = setting("spread") == "1";
  return allowed;
}

bool may_back_off() {
  static const bool allowed = setting("back_off") != "0";
  return allowed;
}

bool leave_cpu([[maybe_unused]] int32_t cpu) {
#if defined(__linux__)
  cpu_set_t before, without;
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof before, &before) != 0)
    return false;
  without = before;
  CPU_CLR(cpu, &without);
  if (CPU_COUNT(&without) == 0 || sched_setaffinity(0, sizeof without, &without) != 0) return false;
  sched_setaffinity(0, sizeof before, &before);
  return true;
#else
  return false;
#endif
}

// On Windows libstdc++ 12 waits for a condition variable without holding its lock while it looks,
// and sleeps through what it is told meanwhile.
void wait_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(_WIN32)
  WaitOnAddress(&word, &value, sizeof value, INFINITE);
#else
  word.wait(value, std::memory_order_seq_cst);
#endif
}

void wake_waiting(std::atomic<uint32_t>& word) {
#if defined(_WIN32)
  WakeByAddressAll(&word);
#else
  word.notify_all();
#endif
}

void wait_at_most(std::atomic<uint32_t>& word, uint32_t value, int64_t ns) {
#if defined(__linux__)
  static_assert(sizeof word == sizeof(uint32_t));  // a futex
  const timespec time{static_cast<time_t>(ns / 1'000'000'000),
                      static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &time, nullptr, 0);
#else
  if (word == value) std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// A region gains if one thread alone would have taken longer. While backed off, nothing shows
// whether more threads would help again, so each back-off ends with a trial. A woken thread often
// starts on the CPU of the thread that woke it, and the system takes tens of milliseconds to move
// it. A trial is therefore 50 ms long, and back-offs grow to twenty times that.
void Oversubscription::sample(int64_t now, int64_t wall, int64_t alone) {
  last_sample_ = now;
  wall_ += wall;
  alone_ += alone;
  if (wall_ < kWindowNs) return;
  const bool gained = alone_ > wall_ + wall_ / 20;
  bad_ns_ = gained ? 0 : bad_ns_ + wall_;
  if (gained) back_offs_ = 0;
  wall_ = alone_ = 0;
  if (bad_ns_ < kTrialNs || !may_back_off()) return;
  constexpr int kMaxDoublings = 3;
  alone_until_ = now + std::min((4 * bad_ns_) << back_offs_, kLongestBackOffNs);
  back_offs_ = std::min(back_offs_ + 1, kMaxDoublings);
  bad_ns_ = 0;
}

Oversubscription& oversubscription() {
  thread_local Oversubscription mine;
  return mine;
}

}  // namespace bitnet
