// Products of one token with the columns of its codes that are not 0, on every kernel table,
// against plain int64 sums over all codes; every buffer against a guard page. Columns are written
// here from the words of docs/reference/layouts.md.
#include <algorithm>
#include <functional>
#include <vector>

#include "format/layout.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/random.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

constexpr int64_t kRows = 256, kLine = 64, kRoom = 64, kMaxK = 32768;

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// w[n][k] from -1 to 1 as columns.
std::vector<uint8_t> columns_of(const std::vector<int8_t>& w, int64_t n, int64_t k) {
  const int64_t panels = (n + kRows - 1) / kRows;
  std::vector<uint8_t> columns(at(panels * k * kLine), 0x55);  // code 1 behind N
  for (int64_t row = 0; row < n; ++row) {
    const int64_t field = row % kRows / kLine;
    for (int64_t i = 0; i < k; ++i) {
      uint8_t& byte = columns[at((row / kRows * k + i) * kLine + row % kLine)];
      byte = static_cast<uint8_t>(byte & ~(3 << (2 * field)));
      byte = static_cast<uint8_t>(byte | (w[at(row * k + i)] + 1) << (2 * field));
    }
  }
  return columns;
}

struct ColumnTest {
  Arena columns{2 * kMaxK * kLine}, where{(kMaxK + kRoom) * 4}, codes{kMaxK + kRoom};
  Arena x{kMaxK}, sums{12 * kRows * 4};

  // Panels from `first` on of w [n, k], and the token q.
  void run(const KernelTable& kernels, const std::vector<int8_t>& w,
           const std::vector<uint8_t>& packed, const std::vector<int8_t>& q, int64_t n,
           int64_t first) {
    const auto k = static_cast<int64_t>(q.size());
    const Placement place = kPlacements[tally.cases % kPlacementCount];
    const int8_t* token = x.place_copy(q.data(), k, place);
    int32_t* list = where.place<int32_t>(k + kRoom, place);
    int8_t* listed = codes.place<int8_t>(k + kRoom, place);
    const int64_t count = kernels.list_nonzero(token, k, list, listed);
    int64_t found = 0, sum = 0;
    bool right = true;
    for (int64_t i = 0; i < k; ++i) {
      sum += q[at(i)];
      if (q[at(i)] == 0) continue;
      right = right && found < count && list[found] == i && listed[found] == q[at(i)];
      ++found;
    }
    for (int64_t pad = count; pad % 4 != 0; ++pad)
      right = right && list[pad] >= 0 && list[pad] < k && listed[pad] == 0;
    CHECK(right && found == count, "a wrong list, of %d", static_cast<int>(count));
    CHECK(where.intact() && codes.intact(), "wrote outside of the list");

    const int64_t panels = (n + kRows - 1) / kRows - first, bytes = k * kLine;
    const uint8_t* lines = columns.place_copy(packed.data() + first * bytes, panels * bytes, place);
    int32_t* out = sums.place<int32_t>(panels * kRows, place);
    kernels.column_product({lines, k, panels, list, listed, count, static_cast<int32_t>(sum), out});
    CHECK(sums.intact(), "wrote outside of out");
    int64_t wrong = 0;
    for (int64_t row = first * kRows; row < n; ++row) {
      int64_t dot = 0;
      for (int64_t i = 0; i < k; ++i) dot += int64_t{w[at(row * k + i)]} * q[at(i)];
      wrong += out[row - first * kRows] != dot;
    }
    CHECK(wrong == 0, "%d wrong sums", static_cast<int>(wrong));
  }
};

void random_products(ColumnTest& test, const KernelTable& kernels) {
  Random random(5);
  for (const int64_t n : {1, 47, 256, 300, 2560}) {
    for (const int64_t k : {1, 4, 130, 1029, 6912}) {
      if (n * k > 1300 * 1000 && (thinning(kernels) != 1 || k != 1029)) continue;
      std::vector<int8_t> w(at(n * k)), q(at(k));
      for (int8_t& code : w) code = static_cast<int8_t>(random.below(3) - 1);
      const std::vector<uint8_t> packed = columns_of(w, n, k);
      for (const int64_t percent : {0, 30, 90, 100}) {
        begin_case("%s N=%d K=%d %d %% zeros", kernels.name, static_cast<int>(n),
                   static_cast<int>(k), static_cast<int>(percent));
        for (int8_t& code : q) {
          code = static_cast<int8_t>(random.below(256) - 128);
          if (random.below(100) < percent) code = 0;
        }
        test.run(kernels, w, packed, q, n, n > 300 ? 3 : 0);
      }
    }
  }
}

// Where sums are largest, and lists of every length around a group.
void worst_cases(ColumnTest& test, const KernelTable& kernels) {
  for (const int64_t k : {int64_t{64}, int64_t{260}, kMaxK}) {
    if (k == kMaxK && thinning(kernels) != 1) continue;
    for (const int weight : {-1, 1}) {
      for (const int code : {-128, 127}) {
        begin_case("%s K=%d, all %d x %d", kernels.name, static_cast<int>(k), weight, code);
        const std::vector<int8_t> w(at(47 * k), static_cast<int8_t>(weight));
        const std::vector<int8_t> q(at(k), static_cast<int8_t>(code));
        test.run(kernels, w, columns_of(w, 47, k), q, 47, 0);
      }
    }
  }
  constexpr int64_t kN = 70, kK = 200;
  Random random(6);
  std::vector<int8_t> w(at(kN * kK));
  for (int8_t& code : w) code = static_cast<int8_t>(random.below(3) - 1);
  const std::vector<uint8_t> packed = columns_of(w, kN, kK);
  for (int64_t length = 0; length <= 70; ++length) {
    begin_case("%s, a list of %d", kernels.name, static_cast<int>(length));
    std::vector<int8_t> q(at(kK));
    for (int64_t i = 0; i < length; ++i) q[at(i * 37 % kK)] = static_cast<int8_t>(i + 1);
    test.run(kernels, w, packed, q, kN, 0);
  }
}

TEST(random_products) {
  ColumnTest test;
  for (const KernelTable* kernels : tables_under_test()) random_products(test, *kernels);
}

TEST(worst_cases) {
  ColumnTest test;
  for (const KernelTable* kernels : tables_under_test()) worst_cases(test, *kernels);
}

}  // namespace
}  // namespace bitnet::test
