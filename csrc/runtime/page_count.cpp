// Numbers of a thread; see page_count.h.
#include "runtime/page_count.h"

namespace bitnet {

std::vector<std::pair<int64_t, int64_t>>& page_counts() {
  thread_local std::vector<std::pair<int64_t, int64_t>> counts;
  return counts;
}

std::pair<int64_t, int64_t>& zero_counts() {
  thread_local std::pair<int64_t, int64_t> counts;
  return counts;
}

}  // namespace bitnet
