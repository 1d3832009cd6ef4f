// Where selection cuts a row, against a stable sort and sums of integers: every ISA, rows of many
// shapes, some of them made to mislead the sample that its bracket comes from.  All values are
// multiples of 2^-40 with a sum of about 1, so that sums of float64 are exact and one cut is right.
#include "engine/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/random.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

using engine::Cut;
using engine::kSelectionBlock;
using engine::SelectionMemory;
using engine::Values;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kScale = 0.5f;  // of Values: exact

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

constexpr const char* kShapes[] = {"flat",   "wide",      "heavy tail", "one large",
                                   "equal",  "two",       "few",        "zeros",
                                   "sorted", "ascending", "hidden",     "hidden large"};

// The shape's weight of element i of n.  Hidden: where a sample looks (16 elements of every so
// many), values are others than elsewhere.
double weight_of(const std::string& shape, int64_t i, int64_t n, Random& random) {
  const double unit = random.unit(), rank = static_cast<double>(random.below(n) + 1);
  const int64_t step = (n / 16 + 255) / 256;
  const bool seen = i / 16 % std::max<int64_t>(step, 1) == 0;
  if (shape == "flat") return std::exp(unit);
  if (shape == "wide") return std::exp(8 * unit);
  if (shape == "heavy tail") return std::pow(rank, -1.1);
  if (shape == "one large") return i == n / 2 ? 3.0 * static_cast<double>(n) : std::exp(unit);
  if (shape == "equal") return 1.0;
  if (shape == "two") return unit > 0.2 ? 3.0 : 1.0;
  if (shape == "few") return std::exp(std::round(3 * unit));
  if (shape == "zeros") return unit > 0.9 || i == 0 ? 2.0 + unit : 0.0;
  if (shape == "sorted") return std::exp(-4.0 * static_cast<double>(i) / static_cast<double>(n));
  if (shape == "ascending") return std::exp(4.0 * static_cast<double>(i) / static_cast<double>(n));
  if (shape == "hidden") return seen ? 1.0 : 5.0 + unit;
  return seen ? 5.0 + unit : 1.0 + unit * 0x1p-12;  // hidden large
}

struct Row {
  std::vector<float> data;     // values / kScale
  std::vector<int64_t> units;  // values * 2^40
  std::vector<int64_t> order;  // descending, of equals the lower first
  std::vector<int64_t> sums;   // of units in that order
  std::vector<float> bounds;   // of blocks of data
  SelectionMemory memory;
  std::vector<char> block;

  Row(const std::string& shape, int64_t n, Random& random) : order(at(n)), bounds(at(n), 0.0f) {
    std::vector<double> weights;
    for (int64_t i = 0; i < n; ++i) weights.push_back(weight_of(shape, i, n, random));
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (int64_t i = 0; i < n; ++i) {
      const auto value = static_cast<float>(std::round(weights[at(i)] / all * 0x1p40) * 0x1p-40);
      data.push_back(value / kScale);
      units.push_back(static_cast<int64_t>(static_cast<double>(value) * 0x1p40));
      float& bound = bounds[at(i / kSelectionBlock)];
      bound = std::max(bound, data.back());
    }
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return units[at(a)] > units[at(b)]; });
    for (const int64_t i : order) sums.push_back((sums.empty() ? 0 : sums.back()) + units[at(i)]);
    BumpAllocator size(nullptr);
    SelectionMemory::take(size, n);
    block.resize(static_cast<std::size_t>(size.used()));
    BumpAllocator own(block.data());
    memory = SelectionMemory::take(own, n);
  }

  int64_t n() const { return static_cast<int64_t>(data.size()); }
  Values values(bool bounded) const {
    if (!bounded) return {data.data(), n(), kScale};
    return {data.data(), n(), kScale, bounds.data(), *std::max_element(data.begin(), data.end())};
  }
};

// The first `kept` of the row's order, as the cut and what it keeps say.
void check_kept(const Row& row, const Cut& cut, int64_t kept, const char* what) {
  const int64_t last = row.order[at(kept - 1)];
  CHECK(cut.index == last, "%s: index %lld, expected %lld", what, static_cast<long long>(cut.index),
        static_cast<long long>(last));
  CHECK(cut.value == row.data[at(last)] * kScale, "%s: value %g", what,
        static_cast<double>(cut.value));
  std::vector<int64_t> expected(row.order.begin(), row.order.begin() + kept);
  std::sort(expected.begin(), expected.end());
  std::vector<int32_t> ids(at(row.n()));
  std::vector<float> values(row.data);  // in place
  const int64_t count = engine::kept_ids(row.values(false), cut, ids.data());
  CHECK(count == kept, "%s: %lld ids", what, static_cast<long long>(count));
  engine::kept_values({values.data(), row.n(), 1.0f}, {cut.value / kScale, cut.index},
                      values.data());
  bool same = count == kept;
  for (int64_t i = 0; same && i < kept; ++i) {
    same = ids[at(i)] == expected[at(i)] && values[at(i)] == row.data[at(expected[at(i)])];
  }
  CHECK(same, "%s: ids or values", what);
}

void check_sum(const Row& row, double target, bool bounded) {
  const auto units = static_cast<int64_t>(std::ceil(target * 0x1p40));
  const auto reached = std::lower_bound(row.sums.begin(), row.sums.end(), units);
  const int64_t kept = std::min<int64_t>(reached - row.sums.begin() + 1, row.n());
  double sum_kept = -1.0;
  const Cut cut = engine::cut_at_sum(row.values(bounded), target, row.memory, &sum_kept);
  check_kept(row, cut, kept, "cut_at_sum");
  CHECK(sum_kept * 0x1p40 == static_cast<double>(row.sums[at(kept - 1)]), "sum of what is kept");
  if (!bounded) return;
  std::vector<int64_t> expected(row.bounds.size());
  for (int64_t i = 0; i < kept; ++i) {
    expected[at(row.order[at(i)] / kSelectionBlock)] += row.units[at(row.order[at(i)])];
  }
  for (int64_t b = 0; b < (row.n() + kSelectionBlock - 1) / kSelectionBlock; ++b) {
    const int64_t end = std::min((b + 1) * kSelectionBlock, row.n());
    const double sum = engine::kept_sum(row.values(false), cut, b * kSelectionBlock, end);
    CHECK(sum * 0x1p40 == static_cast<double>(expected[at(b)]), "kept_sum of block %lld",
          static_cast<long long>(b));
  }
}

void check_row(const char* isa, const char* shape, int64_t n, Random& random) {
  begin_case("%s %s %lld", isa, shape, static_cast<long long>(n));
  const Row row(shape, n, random);
  for (const int64_t count : {int64_t{1}, int64_t{2}, n / 50, n / 3, n - 1, n}) {
    if (count < 1 || count > n) continue;
    check_kept(row, engine::cut_at_count(row.values(false), count, row.memory), count,
               "cut_at_count");
  }
  const auto all = static_cast<double>(row.sums.back()) * 0x1p-40;
  // what some elements make, and a little more; the last is never reached
  const auto exact = static_cast<double>(row.sums[at(n / 5)]) * 0x1p-40;
  for (const double target : {1e-9, 0.003, 0.3, 0.9, 0.9995, exact, exact + 0x1p-41, all, 1.1}) {
    for (const bool bounded : {false, true}) check_sum(row, target, bounded);
  }
}

// Rows of logits: of any sign, infinite ones among them.
void check_logits(const char* isa, int64_t n, Random& random) {
  begin_case("%s logits %lld", isa, static_cast<long long>(n));
  Row row("flat", n, random);
  for (float& x : row.data) {
    const float unit = random.unit();
    x = unit > 0.4f ? -kInfinity : unit > 0.2f ? 0.0f : unit > 0.0f ? -0.0f : random.unit();
  }
  std::iota(row.order.begin(), row.order.end(), int64_t{0});
  std::stable_sort(row.order.begin(), row.order.end(),
                   [&](int64_t a, int64_t b) { return row.data[at(a)] > row.data[at(b)]; });
  for (int64_t count = n; count > 0; count -= 1 + n / 13) {
    check_kept(row, engine::cut_at_count(row.values(false), count, row.memory), count, "logits");
  }
}

TEST(every_shape) {
  Random random(12);
  for (const KernelTable* kernels : available_tables()) {
    force_isa(kernels->name);
    for (const int64_t n : {1, 2, 127, 129, 3000, 8193, 20011, 40000}) {
      if (thinning(*kernels) > 1 && n > 8193) continue;
      for (const char* shape : kShapes) check_row(kernels->name, shape, n, random);
      check_logits(kernels->name, n, random);
    }
  }
  force_isa("");
}

// Of an even row each list holds well below half of the values before it: a sample of 64 or more
// tells the cut's place within 2.5 deviations, at most 2.5 / 16 of the row to each side.
TEST(lists_become_short) {
  Random random(3);
  for (const int64_t n : {3000, 40000}) {
    const Row row("flat", n, random);
    float* const list = row.memory.values;
    for (const double target : {0.1, 0.5, 0.9}) {
      begin_case("%lld %g", static_cast<long long>(n), target);
      std::fill_n(list, n, -1.0f);
      engine::cut_at_sum(row.values(false), target, row.memory);
      const int64_t copied = std::find(list, list + n, -1.0f) - list;
      CHECK(copied > 0 && copied < n / 2, "%lld copied", static_cast<long long>(copied));
    }
  }
}

}  // namespace
}  // namespace bitnet::test
