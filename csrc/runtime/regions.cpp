// The count of regions and the state after a fork; see regions.h. Atomic and without locks: a lock
// held by another thread at the fork would never be released in the child. Must not know who runs
// the regions.
#include "runtime/regions.h"

#include <atomic>
#include <cstdio>

#if defined(__unix__)
#include <pthread.h>
#endif

namespace bitnet {
namespace {

std::atomic<int64_t> g_regions{0};
std::atomic<bool> g_serial{false}, g_warned{false};

#if defined(__unix__)
// Also for a fork that nobody tells Python of, such as a server's written in C.
[[maybe_unused]] const int g_registered =
    pthread_atfork(nullptr, nullptr, [] { static_cast<void>(mark_forked()); });
#endif

}  // namespace

int64_t region_count() { return g_regions.load(std::memory_order_relaxed); }

void count_region() { g_regions.fetch_add(1, std::memory_order_relaxed); }

bool mark_forked() {
  if (region_count() > 0) g_serial = true;
  return g_serial;
}

int64_t usable_threads(int64_t threads) {
  if (!g_serial.load(std::memory_order_relaxed)) return threads;
  if (!g_warned.exchange(true)) {
    std::fputs(
        "bitnet_ops: this process was forked from one that had used its threads, which a fork does "
        "not copy; ops run on one thread here. Load the model after the fork, or start processes "
        "with the 'spawn' method.\n",
        stderr);
  }
  return 1;
}

}  // namespace bitnet
