// The process's thread pool, and the float state and counting of every region.
#include "runtime/parallel.h"

#include "runtime/float_state.h"
#include "runtime/oversubscription.h"
#include "runtime/regions.h"

namespace bitnet {
namespace {

ThreadPool g_pool = {
    [] { return int64_t{1}; },
    [](int64_t partitions, void (*body)(int64_t, int64_t, void*), void* context) {
      body(0, partitions, context);
    },
};

}  // namespace

void set_thread_pool(const ThreadPool& pool) { g_pool = pool; }

int64_t thread_count() { return usable_threads(g_pool.thread_count()); }

int64_t partitions_for(int64_t items, int64_t work, int64_t min_work) {
  const int64_t worthwhile = work / min_work;
  if (items <= 1 || worthwhile <= 1) return 1;  // no call into the pool for small work
  const int64_t threads = thread_count();
  if (threads <= 1) return 1;
  return std::min({items, worthwhile, oversubscription().threads(threads, steady_ns())});
}

void run_region(int64_t partitions, void (*body)(int64_t, int64_t, void*), void* context) {
  struct Region {
    void (*body)(int64_t, int64_t, void*);
    void* context;
  } region{body, context};
  const auto run = [](int64_t begin, int64_t end, void* raw) {
    const DefaultFloatState floats;  // each thread of a pool has a state of its own
    const auto* r = static_cast<const Region*>(raw);
    r->body(begin, end, r->context);
  };
  count_region();
  g_pool.run(partitions, run, &region);
}

}  // namespace bitnet
