// madvise for huge pages, mbind for memory nodes; see pages.h. A system that has none, or rejects,
// costs time and nothing else. Must not know tensors or what the memory is for.
#include "runtime/pages.h"

#include <bit>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bitnet {
namespace {

Placement choose() {
  const char* text = std::getenv("BITNET_OPS_MEMORY");
  const std::string value = text == nullptr || *text == '\0' ? "first_touch" : text;
  if (value == "first_touch") return Placement::kFirstTouch;
  if (value == "interleave") return Placement::kInterleave;
  throw std::runtime_error("BITNET_OPS_MEMORY: expected first_touch or interleave, got '" + value +
                           "'");
}

#if defined(__linux__)
// The whole pages inside of some memory.
struct Pages {
  uint64_t begin = 0, end = 0;

  Pages(const void* data, int64_t n_bytes) {
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<uint64_t>(data);
    if (data == nullptr || n_bytes <= 0) return;
    begin = (address + page - 1) / page * page;
    end = (address + static_cast<uint64_t>(n_bytes)) / page * page;
  }
  bool empty() const { return begin >= end; }
};
#endif

}  // namespace

int64_t advise_huge_pages([[maybe_unused]] const void* data, [[maybe_unused]] int64_t n_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const Pages pages(data, n_bytes);
  if (pages.empty()) return 0;
  const uint64_t size = pages.end - pages.begin;
  const int rejected = madvise(reinterpret_cast<void*>(pages.begin), size, MADV_HUGEPAGE);
  return rejected ? 0 : static_cast<int64_t>(size);
#else
  return 0;
#endif
}

Placement placement() {
  static const Placement chosen = choose();
  return chosen;
}

int64_t interleave_pages([[maybe_unused]] const void* data, [[maybe_unused]] int64_t n_bytes,
                         [[maybe_unused]] int64_t min_nodes) {
#if defined(__linux__) && defined(SYS_mbind) && defined(SYS_get_mempolicy)
  constexpr unsigned long kMaxNodes = 1024, kWordBits = 8 * sizeof(unsigned long);
  unsigned long nodes[kMaxNodes / kWordBits] = {};
  if (syscall(SYS_get_mempolicy, nullptr, nodes, kMaxNodes, nullptr, MPOL_F_MEMS_ALLOWED) != 0)
    return 0;
  int64_t count = 0;
  for (const unsigned long word : nodes) count += std::popcount(word);
  const Pages pages(data, n_bytes);
  if (count < min_nodes || pages.empty()) return count;
  const long rejected = syscall(SYS_mbind, pages.begin, pages.end - pages.begin, MPOL_INTERLEAVE,
                                nodes, kMaxNodes, 0);
  return rejected != 0 ? 0 : count;
#else
  return 0;
#endif
}

int64_t prepare_pages(const void* data, int64_t n_bytes) {
  const Placement chosen = placement();
  const int64_t huge = advise_huge_pages(data, n_bytes);
  if (chosen == Placement::kInterleave) static_cast<void>(interleave_pages(data, n_bytes));
  return huge;
}

}  // namespace bitnet
