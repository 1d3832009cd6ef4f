// The peak of the matrix unit: how many multiply-adds an iteration is, and that they are done, with
// native tiles or with emulated ones.
// Must not know how long they take.
#include <string>

#include "tests/check.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

constexpr int64_t kSteps = 4, kTile = 1024, kOperands = kSteps * 2 * kTile;

int64_t a_at(int64_t i) { return static_cast<int8_t>(i * 167 + i / 256 * 29); }
int64_t b_at(int64_t i) { return static_cast<uint8_t>((i * 73 / 16 % 3) << (2 * (i / 2048))); }

// The sum of all results of one iteration, from the definition of a product of tiles: row m of A
// is 64 bytes, k of column n of B is byte 64 * (k / 4) + 4 * n + k % 4.
int64_t sum_of_iteration() {
  int64_t sum = 0;
  for (int64_t step = 0; step < kOperands; step += 2 * kTile) {
    for (int64_t pair = 0; pair < 4; ++pair) {
      const int64_t a = step + pair / 2 * kTile, b = step + pair % 2 * kTile;
      for (int64_t i = 0; i < 16 * 16 * 64; ++i) {
        const int64_t m = i / 1024, n = i / 64 % 16, k = i % 64;
        sum += a_at(a + 64 * m + k) * b_at(b + 64 * (k / 4) + 4 * n + k % 4);
      }
    }
  }
  return sum;
}

void test_peak(const KernelTable& kernels) {
  const int64_t one = sum_of_iteration();
  CHECK(one != 0, "a sum that shows nothing");
  for (const int64_t iterations : {1, 2, 37}) {
    int32_t sink = 0;
    const int64_t macs = kernels.probe_int8_peak(iterations, &sink);
    CHECK(macs == iterations * kSteps * 4 * 16 * 16 * 64, "%s: %lld multiply-adds", kernels.name,
          static_cast<long long>(macs));
    CHECK(sink == static_cast<int32_t>(static_cast<uint64_t>(iterations * one)), "%s: sum %d",
          kernels.name, sink);
  }
}

TEST(tile_products) {
  bool any = false;
  for (const KernelTable* kernels : tables_under_test()) {
    if (!std::string(kernels->name).starts_with("amx_int8")) continue;
    begin_case("%s", kernels->name);
    test_peak(*kernels);
    any = true;
  }
  if (!any) not_here("a matrix unit, or an emulated one");
}

}  // namespace
}  // namespace bitnet::test
