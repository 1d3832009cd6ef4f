// Pages of large memory: huge pages, for fewer address translations while hundreds of megabytes are
// read, and the memory node that a page lies on. All of it is advice, which the system may reject;
// the functions return whether it did.
#pragma once

#include <cstdint>

namespace bitnet {

// Asks the kernel to back the whole pages inside [data, data + n_bytes) with huge pages; returns
// the bytes it accepted, 0 where the system has none or rejects.  A hint: contents never change.
int64_t advise_huge_pages(const void* data, int64_t n_bytes);

// The memory node of a page: that of the thread that writes it first (the system's default), or
// each node in turn.
enum class Placement { kFirstTouch, kInterleave };

// By BITNET_OPS_MEMORY: "first_touch" (default) or "interleave". Read once; every call throws
// std::runtime_error if it has another value.
Placement placement();

// Asks for the whole pages inside [data, data + n_bytes), which must not have been written yet, to
// be dealt out in turn to all memory nodes that the process may use. Returns the number of nodes; 1
// means that nothing was done, 0 that the system rejected it or knows no nodes. Does nothing on
// fewer than `min_nodes`.
int64_t interleave_pages(const void* data, int64_t n_bytes, int64_t min_nodes = 2);

// For memory that is not written yet: interleave_pages if placement() says so, and
// advise_huge_pages, whose result it returns.
int64_t prepare_pages(const void* data, int64_t n_bytes);

}  // namespace bitnet
