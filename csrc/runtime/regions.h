// What the process knows about its parallel regions: how many it opened, and whether it is a fork
// of a process that had opened some, whose worker threads did not come along. Must not know who
// runs the regions.
#pragma once

#include <cstdint>

namespace bitnet {

// Regions opened by ops since the library was loaded (work for one thread alone opens none).
int64_t region_count();
void count_region();

// Runs in the child after every fork, and tells whoever asks again.  If this process's pool of
// threads was used before the fork, a region in the child would wait for threads that do not exist,
// for ever: from now on ops run on the calling thread.  True if that is so.
bool mark_forked();

// How many threads a region may have, given that torch offers `threads`: all, or 1 in such a child,
// which says so once on the standard error stream.
int64_t usable_threads(int64_t threads);

}  // namespace bitnet
