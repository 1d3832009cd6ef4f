// How much work a thread's last step left out where a policy or a zero allows it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace bitnet {

// Of each sequence of this thread's last step, or last call of attention, (read, all): of all its
// tokens, layers and KV heads under policies. Empty where no layer had one.
std::vector<std::pair<int64_t, int64_t>>& page_counts();

// Of the last step of this thread, (skipped, all): inputs of products whose columns were not read,
// of those of blocks with `sparsity`; 0 of 0 where there were none.
std::pair<int64_t, int64_t>& zero_counts();

}  // namespace bitnet
