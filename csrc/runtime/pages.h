// Huge pages for weights: fewer address translations on a stream of
// hundreds of megabytes. Advice that the system may reject; who asks
// can see whether it did. Must not know tensors.
#pragma once

#include <cstdint>

namespace bitnet {

// Asks the kernel to back the whole pages inside [data, data + n_bytes) with huge pages; returns
// the bytes it accepted, 0 where the system has none or rejects.  A hint: contents never change.
int64_t advise_huge_pages(const void* data, int64_t n_bytes);

}  // namespace bitnet
