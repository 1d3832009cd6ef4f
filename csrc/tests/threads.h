// A thread pool of plain threads for the engine (runtime/parallel.h), of a size that a test
// chooses.
#pragma once

#include <thread>
#include <vector>

#include "runtime/parallel.h"

namespace bitnet::test {

inline int64_t pool_threads = 1;

inline void use_plain_threads() {
  pool_threads = 1;
  set_thread_pool({
      [] { return pool_threads; },
      [](int64_t partitions, void (*body)(int64_t, int64_t, void*), void* context) {
        std::vector<std::thread> others;
        for (int64_t p = 1; p < partitions; ++p) others.emplace_back(body, p, p + 1, context);
        body(0, 1, context);
        for (std::thread& thread : others) thread.join();
      },
  });
}

}  // namespace bitnet::test
