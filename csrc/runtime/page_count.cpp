// Two numbers of the process; see page_count.h.
#include "runtime/page_count.h"

#include <atomic>

namespace bitnet {
namespace {

std::atomic<int64_t> g_read{0}, g_all{0};

}  // namespace

void count_pages(int64_t read, int64_t all) {
  g_read.fetch_add(read, std::memory_order_relaxed);
  g_all.fetch_add(all, std::memory_order_relaxed);
}

std::pair<int64_t, int64_t> page_count() {
  return {g_read.load(std::memory_order_relaxed), g_all.load(std::memory_order_relaxed)};
}

}  // namespace bitnet
