// Parallel regions: how work is cut into partitions, and the pool of threads that runs them. The
// pool belongs to the host (torch). Every region runs in the default float state (float_state.h),
// and on one thread in a forked process (regions.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/memory.h"

namespace bitnet {

// torch's threads behind the ops, std::thread in tests and benchmarks.
struct ThreadPool {
  int64_t (*thread_count)();
  // Calls body(begin, end, context) for ranges that cover [0, partitions) once; returns when all
  // calls have returned.
  void (*run)(int64_t partitions, void (*body)(int64_t begin, int64_t end, void* context),
              void* context);
};

// For the whole process, before the first region. Without a pool the calling thread does all work.
void set_thread_pool(const ThreadPool& pool);

// How many threads a region would have now.
int64_t thread_count();

// How many partitions to cut `work` into: at least one, at most one for each thread and each item,
// and each of at least `min_work`.
int64_t partitions_for(int64_t items, int64_t work, int64_t min_work);

// First item of partition p when `items` are assigned contiguously to `partitions`. Partitions with
// one item more are spread evenly, so that work which is too little for all threads still uses
// every socket, every group of cores and every memory channel.
constexpr int64_t partition_begin(int64_t items, int64_t partitions, int64_t p) {
  return items / partitions * p + (items % partitions * p + partitions - 1) / partitions;
}

// Work below which a second thread costs more than it saves (a region is about 1 microsecond).
inline constexpr int64_t kMinElements = 1 << 14;  // element-wise float work
inline constexpr int64_t kMinMacs = 1 << 18;      // ternary multiply-adds

void run_region(int64_t partitions, void (*body)(int64_t begin, int64_t end, void* context),
                void* context);

// Calls f(partition) for every partition. f must not throw or allocate.
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

// Calls f(begin, end) for contiguous parts of [0, items). cost_per_item and min_work have one unit.
template <class F>
void parallel_ranges(int64_t items, int64_t cost_per_item, int64_t min_work, const F& f) {
  if (items <= 0) return;
  const int64_t cost = std::max<int64_t>(cost_per_item, 1);
  const int64_t partitions = partitions_for(items, items * cost, min_work);
  run_partitions(partitions, [&](int64_t p) {
    f(partition_begin(items, partitions, p), partition_begin(items, partitions, p + 1));
  });
}

// Calls f(row, scratch) for every row of `elements` elements. scratch: `count` T, one array for
// each partition.
template <class T = float, class F>
void parallel_rows(int64_t rows, int64_t elements, int64_t count, const F& f) {
  if (rows <= 0) return;
  const int64_t partitions = partitions_for(rows, rows * elements, kMinElements);
  Scratch<T> scratch(partitions * count);
  run_partitions(partitions, [&](int64_t p) {
    T* memory = scratch.get() + p * count;
    const int64_t end = partition_begin(rows, partitions, p + 1);
    for (int64_t row = partition_begin(rows, partitions, p); row < end; ++row) f(row, memory);
  });
}

}  // namespace bitnet
