// madvise for huge pages; see pages.h. A system that has
// none, or rejects, costs time and nothing else. Must not
// know tensors or what the memory is for.
#include "runtime/pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace bitnet {

int64_t advise_huge_pages(const void* data, int64_t n_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uint64_t>(data);
  if (data == nullptr || n_bytes <= 0) return 0;
  const uint64_t begin = (address + page - 1) / page * page;
  const uint64_t end = (address + static_cast<uint64_t>(n_bytes)) / page * page;
  if (begin >= end) return 0;
  const int rejected = madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  return rejected ? 0 : static_cast<int64_t>(end - begin);
#else
  (void)data;
  (void)n_bytes;
  return 0;
#endif
}

}  // namespace bitnet
