// The process's parallel regions: how many were opened, and whether the process is a fork whose
// parent had opened some. Worker threads do not survive a fork.
#pragma once

#include <cstdint>

namespace bitnet {

// Regions opened by ops since the library was loaded (work for one thread alone opens none).
int64_t region_count();
void count_region();

// Called in the child after every fork, and by anybody who asks. If the pool was used before the
// fork, a region in the child would wait for threads that do not exist. From then on ops run on the
// calling thread. Returns whether that is so.
bool mark_forked();

// How many of `threads` a region may use: all, or 1 in such a child, which prints one line about it
// on standard error.
int64_t usable_threads(int64_t threads);

}  // namespace bitnet
