// Parallel regions on threads that belong to somebody else: how work is cut into partitions, and
// the pool that runs them. A region keeps the float state (float_state.h) and a fork's one thread
// (regions.h) whatever the pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/memory.h"

namespace bitnet {

// torch's threads behind the ops, std::thread in tests and benchmarks.
struct ThreadPool {
  int64_t (*thread_count)();
  // Calls body(begin, end, context) for ranges that make up [0, partitions); returns when all have.
  void (*run)(int64_t partitions, void (*body)(int64_t begin, int64_t end, void* context),
              void* context);
};

// For the whole process, before the first region. Without one, the calling thread does everything.
void set_thread_pool(const ThreadPool& pool);

// The threads that a region opened now would have.
int64_t thread_count();

// How many partitions to cut `work` into: at most one for each thread, each at least `min_work`, at
// least one, and no more than `items`.
int64_t partitions_for(int64_t items, int64_t work, int64_t min_work);

// First item of partition p when `items` are dealt out contiguously to `partitions`. Those that
// have one more are spread evenly: what is too little for all threads is work for some of every
// socket and every group of cores, so that all of the memory's channels read.
constexpr int64_t partition_begin(int64_t items, int64_t partitions, int64_t p) {
  return items / partitions * p + (items % partitions * p + partitions - 1) / partitions;
}

// Work below which a second thread costs more than it saves (a region is about 1 microsecond).
inline constexpr int64_t kMinElements = 1 << 14;  // element-wise float work
inline constexpr int64_t kMinMacs = 1 << 18;      // ternary multiply-adds

void run_region(int64_t partitions, void (*body)(int64_t begin, int64_t end, void* context),
                void* context);

// f(partition) for every partition. f must not throw or allocate.
template <class F>
void run_partitions(int64_t partitions, const F& f) {
  if (partitions == 1) return f(0);
  run_region(
      partitions,
      [](int64_t begin, int64_t end, void* context) {
        for (int64_t p = begin; p < end; ++p) (*static_cast<const F*>(context))(p);
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// f(begin, end) over contiguous parts of [0, items); cost_per_item and min_work in the same unit.
template <class F>
void parallel_ranges(int64_t items, int64_t cost_per_item, int64_t min_work, const F& f) {
  if (items <= 0) return;
  const int64_t cost = std::max<int64_t>(cost_per_item, 1);
  const int64_t partitions = partitions_for(items, items * cost, min_work);
  run_partitions(partitions, [&](int64_t p) {
    f(partition_begin(items, partitions, p), partition_begin(items, partitions, p + 1));
  });
}

// f(row, scratch) for every row of `elements` elements; scratch: `count` T of the partition's own.
template <class T = float, class F>
void parallel_rows(int64_t rows, int64_t elements, int64_t count, const F& f) {
  if (rows <= 0) return;
  const int64_t partitions = partitions_for(rows, rows * elements, kMinElements);
  Scratch<T> scratch(partitions * count);
  run_partitions(partitions, [&](int64_t p) {
    T* own = scratch.get() + p * count;
    const int64_t end = partition_begin(rows, partitions, p + 1);
    for (int64_t row = partition_begin(rows, partitions, p); row < end; ++row) f(row, own);
  });
}

}  // namespace bitnet
