// Where pages lie: the policy that the system then tells of, memory that has no whole page, and
// what an unset BITNET_OPS_MEMORY means. Machines with one memory node take part: it is a list of
// one.
#include "runtime/pages.h"

#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <initializer_list>

#include "tests/check.h"

namespace bitnet::test {
namespace {

TEST(unset_is_first_touch) {
  begin_case("BITNET_OPS_MEMORY unset");
  CHECK(placement() == Placement::kFirstTouch, "another placement");
}

#if defined(__linux__) && defined(SYS_get_mempolicy)
// -1 where the system does not tell.
int policy_at(const void* address) {
  int policy = -1;
  const long failed = syscall(SYS_get_mempolicy, &policy, nullptr, 0, address, MPOL_F_ADDR);
  return failed != 0 ? -1 : policy;
}

TEST(pages_are_dealt_out) {
  constexpr std::size_t kPage = 65536;  // a multiple of every page size
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  char* memory =
      static_cast<char*>(mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, kFlags, -1, 0));
  begin_case("policy of pages");
  CHECK(memory != MAP_FAILED, "no memory");
  const int before = policy_at(memory);
  if (before < 0 || interleave_pages(memory, 1, 1) == 0) {
    std::printf("  memory policies: not in this system\n");
    munmap(memory, 4 * kPage);
    return;
  }
  CHECK(policy_at(memory) == before, "a byte is no page");
  // the first and the last page are not whole
  CHECK(interleave_pages(memory + 1, 4 * kPage - 2, 1) >= 1, "rejected");
  CHECK(policy_at(memory) == before, "a page that begins before the memory");
  CHECK(policy_at(memory + kPage) == MPOL_INTERLEAVE, "policy %d", policy_at(memory + kPage));
  CHECK(policy_at(memory + 3 * kPage) == MPOL_INTERLEAVE || sysconf(_SC_PAGESIZE) == kPage,
        "policy %d", policy_at(memory + 3 * kPage));
  memory[kPage] = 1;  // whatever the policy, it is memory
  CHECK(memory[kPage] == 1 && memory[2 * kPage] == 0, "not zeros");
  munmap(memory, 4 * kPage);
  begin_case("no memory at all");
  CHECK(interleave_pages(nullptr, 4096, 1) >= 0, "it failed");
  CHECK(prepare_pages(nullptr, 4096) == 0, "huge pages of nothing");
}
#else
TEST(pages_are_dealt_out) {
  begin_case("a system without policies");
  char memory[16];
  CHECK(interleave_pages(memory, 16) == 0, "nodes");
}
#endif

}  // namespace
}  // namespace bitnet::test
