// How many pages attention has read where a policy leaves some out, of how many there were.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace bitnet {

// Of each sequence of this thread's last step, or last call of attention, (read, all): of all its
// tokens, layers and KV heads under policies. Empty where no layer had one.
std::vector<std::pair<int64_t, int64_t>>& page_counts();

}  // namespace bitnet
