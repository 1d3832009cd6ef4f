// The instruction for pairs of bfloat16, of this CPU and emulated, against its model; and the check
// itself, which must see sums in another order or rounded elsewhere.
#include "kernels/pair_unit.h"

#include <bit>
#include <cmath>
#include <initializer_list>

#include "kernels/features.h"
#include "tests/check.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

struct Pair {
  float upper, lower;
};

Pair numbers_of(float word) {
  const auto bits = std::bit_cast<uint32_t>(word);
  return {std::bit_cast<float>(bits & 0xffff0000u), std::bit_cast<float>(bits << 16)};
}

template <class Step>
bool each_step(const float* a, const float* b, int64_t steps, float* sums, const Step& step) {
  for (int64_t i = 0; i < 16 * steps; ++i) {
    sums[i % 16] = step(sums[i % 16], numbers_of(a[i]), numbers_of(b[i]));
  }
  return true;
}

bool lower_first(const float* a, const float* b, int64_t steps, float* sums) {
  return each_step(a, b, steps, sums, [](float sum, Pair x, Pair y) {
    return std::fmaf(x.upper, y.upper, std::fmaf(x.lower, y.lower, sum));
  });
}

bool products_first(const float* a, const float* b, int64_t steps, float* sums) {
  return each_step(a, b, steps, sums, [](float sum, Pair x, Pair y) {
    return sum + std::fmaf(x.upper, y.upper, x.lower * y.lower);
  });
}

bool rounded_once(const float* a, const float* b, int64_t steps, float* sums) {
  return each_step(a, b, steps, sums, [](float sum, Pair x, Pair y) {
    const auto wide = [](float v) { return static_cast<double>(v); };
    return static_cast<float>(wide(sum) + wide(x.upper) * wide(y.upper) +
                              wide(x.lower) * wide(y.lower));
  });
}

bool nothing(const float*, const float*, int64_t, float*) { return false; }

TEST(check_sees) {
  struct Wrong {
    const char* name;
    AddPairs add_pairs;
  };
  constexpr Wrong kWrong[] = {{"lower halves first", lower_first},
                              {"products first", products_first},
                              {"rounded once", rounded_once}};
  for (const auto& [name, add_pairs] : kWrong) {
    begin_case("%s", name);
    const PairCheck check = check_pairs(add_pairs, 40, 1);  // as many as are asked on first use
    CHECK(check.available && check.different > check.outputs / 10, "%d of %d differ",
          int(check.different), int(check.outputs));
  }
  begin_case("no instruction");
  CHECK(!check_pairs(nothing, 3, 1).available, "found");
}

TEST(tables) {
  bool any = false;
  for (const KernelTable* kernels : tables_under_test()) {
    if (!may_use_pair_unit(*kernels)) continue;
    any = true;
    begin_case("%s", kernels->name);
    const PairCheck check = check_pairs(kernels->add_pairs, 2000 / thinning(*kernels), 2);
    CHECK(check.available && check.different == 0, "%d of %d differ", int(check.different),
          int(check.outputs));
  }
  if (!any) not_here("products of pairs of bfloat16");
}

// Asked of this CPU: if it has the bit, the tables that the instruction belongs to run here.
TEST(this_cpu) {
  begin_case("this CPU");
  const bool has = (cpu_features() & kAvx512Bf16) != 0;
  const PairCheck check = check_pair_unit(100, 3);
  CHECK(check.available ? has && check.outputs > 0 : check.outputs == 0, "available %d, bit %d",
        int(check.available), int(has));
  CHECK(pair_unit_in_order() == (check.available && check.different == 0), "%d",
        int(pair_unit_in_order()));
}

}  // namespace
}  // namespace bitnet::test
