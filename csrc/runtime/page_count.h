// How many pages attention has read where a policy leaves some out, of how many there were: of all
// tokens, layers and KV heads since the library was loaded.
#pragma once

#include <cstdint>
#include <utility>

namespace bitnet {

void count_pages(int64_t read, int64_t all);
// (read, all)
std::pair<int64_t, int64_t> page_count();

}  // namespace bitnet
