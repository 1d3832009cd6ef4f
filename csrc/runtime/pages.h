// Pages of memory that a step reads over and over: huge ones, for fewer address translations on a
// stream of hundreds of megabytes, and on which memory node they lie. All of it is advice that the
// system may reject; who asks can see whether it did. Must not know tensors.
#pragma once

#include <cstdint>

namespace bitnet {

// Asks the kernel to back the whole pages inside [data, data + n_bytes) with huge pages; returns
// the bytes it accepted, 0 where the system has none or rejects.  A hint: contents never change.
int64_t advise_huge_pages(const void* data, int64_t n_bytes);

// Which memory node a page lies on: that of the thread which writes it first, as the system has it,
// or each in turn.
enum class Placement { kFirstTouch, kInterleave };

// BITNET_OPS_MEMORY, "first_touch" (also where it is unset) or "interleave", read once. Throws
// std::runtime_error on any other value, whenever it is asked.
Placement placement();

// Asks for the whole pages inside [data, data + n_bytes), which nobody has written yet, to be dealt
// out in turn to all memory nodes that the process may use.  Returns how many these are; 1: nothing
// was done, 0: the system tells of none or rejects.  least_nodes: of fewer, nothing is done.
int64_t interleave_pages(const void* data, int64_t n_bytes, int64_t least_nodes = 2);

// For fresh memory: advise_huge_pages, whose bytes it returns, and where placement() says so
// interleave_pages.
int64_t prepare_pages(const void* data, int64_t n_bytes);

}  // namespace bitnet
