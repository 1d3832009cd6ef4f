// The measured choice of products: which ask for it, that it is made once for a kind, also where
// threads come at once, and that products follow it and stay equal.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "engine/pack.h"
#include "engine/products/product.h"
#include "engine/products/tune.h"
#include "runtime/tuning.h"
#include "tests/check.h"
#include "tests/random.h"
#include "tests/system.h"
#include "tests/tables.h"
#include "tests/threads.h"

namespace bitnet::test {
namespace {

using engine::ProductPlan, engine::Projection;

constexpr int64_t kK = 256;

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// Of the suite's own process, before anything reads the tuning row.
void use_measured() {
  use_plain_threads();
  set_variable("BITNET_OPS_TUNING", "measure=1");
  CHECK(tuning().products == ProductChoice::kMeasured, "the row was read before");
}

// What was measured for products of so many tokens, by row of the list; 0: nothing was.
const float* seconds_of(const KernelTable& kernels, int64_t tokens) {
  return kernels.choices
      ->of({.format = layout::WeightFormat::kTwoBit,
            .tokens = tokens,
            .k = kK,
            .row_blocks = 1,
            .block_rows = 1})
      .seconds;
}

bool is_measured(const KernelTable& kernels, int64_t tokens) {
  const float* seconds = seconds_of(kernels, tokens);
  return std::any_of(seconds, seconds + kMaxProducts, [](float s) { return s > 0; });
}

ProductPlan plan_of(const KernelTable& kernels, int64_t tokens, int64_t rows, bool tables = true,
                    int64_t threads = 1) {
  const int64_t block_rows = 4 * kernels.tile_lanes;
  return engine::plan_product(kernels,
                              {.format = layout::WeightFormat::kTwoBit,
                               .tokens = tokens,
                               .k = kK,
                               .row_blocks = rows / block_rows,
                               .block_rows = block_rows,
                               .planes = tables ? 1 : 2},
                              threads);
}

// One token's weights come from memory, and a matrix unit wants its own order of tokens.
TEST(one_token_measures_nothing) {
  use_measured();
  for (const KernelTable* kernels : tables_under_test()) {
    begin_case("%s", kernels->name);
    plan_of(*kernels, 1, 1 << 16);
    CHECK(!is_measured(*kernels, 1), "measured");
    const bool matrix = engine::find_algorithm(*kernels, "matrix") != nullptr;
    plan_of(*kernels, 64, 1 << 14);
    if (matrix) CHECK(!is_measured(*kernels, 64), "measured beside a matrix unit");
  }
}

// A matrix of 2 bit weights, tokens, and what their product has to be.
class Sample {
 public:
  Sample(const KernelTable& kernels, int64_t rows, int64_t tokens)
      : kernels_(kernels),
        weight_(engine::tile_weight(nullptr, engine::WeightFormat::kTwoBit, rows, kK,
                                    kernels.tile_lanes)),
        tiles_(at(weight_.bytes())),
        codes_(at(rows * kK)),
        x_(at(tokens * kK)),
        buffer_(kernels, tokens, kK) {
    Random random(3);
    for (int8_t& code : codes_) code = static_cast<int8_t>(random.next() % 3) - 1;
    for (int8_t& x : x_) x = static_cast<int8_t>(random.next());
    std::vector<uint8_t> canonical(at(rows * layout::row_bytes_for(kK)));
    engine::pack(codes_.data(), rows, kK, canonical.data());
    weight_.data = tiles_.data();
    engine::repack(canonical.data(), weight_, kernels.tile_lanes, tiles_.data());
    buffer_.copy_quantized(kernels, x_.data(), nullptr);
  }

  std::vector<int32_t> product() const {
    std::vector<int32_t> sums(at(buffer_.view().tokens * weight_.n_rows), 77);
    const Projection p = engine::make_sums(weight_, sums.data());
    engine::multiply(kernels_, buffer_.view(), &p, 1);
    return sums;
  }
  int32_t sum(int64_t row, int64_t token) const {
    int32_t sum = 0;
    for (int64_t k = 0; k < kK; ++k) sum += codes_[at(row * kK + k)] * x_[at(token * kK + k)];
    return sum;
  }
  void check(const std::vector<int32_t>& sums) const {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const auto row = static_cast<int64_t>(i) % weight_.n_rows;
      const auto token = static_cast<int64_t>(i) / weight_.n_rows;
      CHECK(sums[i] == sum(row, token), "row %d token %d: %d", static_cast<int>(row),
            static_cast<int>(token), sums[i]);
    }
  }

 private:
  const KernelTable& kernels_;
  engine::Weight weight_;
  std::vector<uint8_t> tiles_;
  std::vector<int8_t> codes_, x_;
  engine::TokenBuffer buffer_;
};

TEST(threads_come_at_once) {
  use_measured();
  constexpr int kThreads = 7;
  for (const KernelTable* kernels : tables_under_test()) {
    begin_case("%s", kernels->name);
    const Sample sample(*kernels, 1100, 33);
    std::vector<std::vector<int32_t>> sums(kThreads);
    std::vector<std::thread> threads;
    for (std::vector<int32_t>& of_thread : sums)
      threads.emplace_back([&] { of_thread = sample.product(); });
    for (std::thread& thread : threads) thread.join();
    sample.check(sums[0]);
    for (const std::vector<int32_t>& others : sums) CHECK(others == sums[0], "other sums");
    CHECK(!has_tables(*kernels) || is_measured(*kernels, 33), "not measured");
  }
}

TEST(what_was_measured_decides) {
  use_measured();
  for (const KernelTable* kernels : tables_under_test()) {
    begin_case("%s", kernels->name);
    const ProductPlan cut = plan_of(*kernels, 64, 2048);
    if (!is_measured(*kernels, 64)) continue;
    const float* seconds = seconds_of(*kernels, 64);
    const std::vector<float> before(seconds, seconds + kMaxProducts);
    const float taken = seconds[cut.algorithm - kernels->products];
    CHECK(taken > 0, "%s was not measured", cut.algorithm->name);
    for (int64_t i = 0; i < kMaxProducts; ++i) {
      if (seconds[i] == 0) continue;
      std::printf("%s: %s %.0f us%s\n", kernels->name, kernels->products[i].name,
                  static_cast<double>(seconds[i]) * 1e6,
                  kernels->products + i == cut.algorithm ? ", taken" : "");
    }
    plan_of(*kernels, 128, 4096);
    CHECK(std::equal(before.begin(), before.end(), seconds), "measured again");
  }
}

// Kernels that compute nothing and take their time, on any CPU. Their lists live as long as the
// process.
KernelTable sleeping(const char* name, void (*run)(const ProductJob&, const EpilogueJob*)) {
  KernelTable kernels = scalar_kernels();
  kernels.name = name;
  static std::deque<std::array<ProductAlgorithm, kMaxProducts>> lists;
  static std::deque<ProductChoices> choices;
  auto& list = lists.emplace_back();
  list[0] = {"tables", [](const ProductShape& s) { return s.scratch && s.planes == 1; },
             [](const ProductShape& s) {
               return s.scratch && s.planes == 1 && s.tokens >= 16 && s.rows() >= 256;
             },
             [](const ProductShape&) {
               return ProductBlocking{.tokens = 64,
                                      .rows = 1024,
                                      .token_multiple = 16,
                                      .equal_row_parts = true,
                                      .scratch_bytes = 4096};
             },
             run};
  list[1] = *engine::find_algorithm(kernels, "direct");
  list[1].run = run;
  kernels.products = list.data();
  kernels.choices = &choices.emplace_back();
  return kernels;
}

template <int kByTables, int kMultiplied>
void sleep_for(const ProductJob& job, const EpilogueJob*) {
  std::this_thread::sleep_for(
      std::chrono::milliseconds(job.scratch != nullptr ? kByTables : kMultiplied));
}

TEST(the_faster_way_is_taken) {
  use_measured();
  begin_case("tables take half of the time, as much, or three times as much");
  const KernelTable fast = sleeping("fast tables", sleep_for<3, 6>);
  const KernelTable equal = sleeping("equal tables", sleep_for<5, 5>);
  const KernelTable slow = sleeping("slow tables", sleep_for<6, 2>);
  CHECK(plan_of(fast, 64, 2048).by_tables(), "multiplied");
  CHECK(!plan_of(equal, 64, 2048).by_tables(), "by tables that gain nothing");
  CHECK(!plan_of(slow, 64, 2048).by_tables(), "by tables");
}

// Of times by hand: the margin, and what one of the two series says.
TEST(the_fastest_needs_a_margin_in_both_series) {
  begin_case("times by hand");
  const ProductAlgorithm* rows = scalar_kernels().products;
  const auto taken = [&](engine::RowTime usual, engine::RowTime other) {
    return engine::fastest({usual, other}) - rows;
  };
  CHECK(taken({rows, {1.0, 1.0}}, {rows + 1, {0.90, 0.90}}) == 1, "a tenth is not enough");
  CHECK(taken({rows, {1.0, 1.0}}, {rows + 1, {0.97, 0.97}}) == 0, "three hundredths are enough");
  CHECK(taken({rows, {1.0, 1.0}}, {rows + 1, {0.50, 1.01}}) == 0, "one series is enough");
  CHECK(taken({rows, {1.0, 1.2}}, {rows + 1, {0.99, 0.90}}) == 1,
        "both are faster, the best a tenth");
  CHECK(engine::fastest({{rows, {1.0, 1.0}}}) == rows, "nothing else was timed");
}

// Each place of numbers of tokens has a choice of its own.
TEST(few_tokens_are_measured_by_themselves) {
  use_measured();
  begin_case("tables that gain from 64 tokens on");
  const KernelTable kernels = sleeping("many alone", [](const ProductJob& job, const EpilogueJob*) {
    const bool gain = job.scratch != nullptr && job.tokens == 64;
    std::this_thread::sleep_for(std::chrono::milliseconds(gain ? 2 : 4));
  });
  CHECK(!plan_of(kernels, 32, 2048).by_tables(), "few tokens by tables");
  CHECK(plan_of(kernels, 64, 2048).by_tables(), "multiplied");
}

// Rows that are too few for the threads are not cut further than tables are worth; tokens are.
TEST(many_threads_take_fewer_tokens) {
  use_measured();
  const KernelTable kernels = sleeping("many threads", sleep_for<3, 6>);
  struct Case {
    int64_t threads, tokens, rows, blocks, parts;  // 0 blocks: multiplied
  };
  for (const Case& c : {
           Case{1, 64, 2048, 1, 2},   // calls of at most 1024 rows
           Case{16, 512, 512, 8, 2},  // as many units as threads
           Case{16, 512, 256, 16, 1},
           Case{2, 72, 2048, 2, 5},  // of 48 and 24 tokens: in parts that threads can share
           Case{2, 72, 1024, 3, 4},
           Case{64, 64, 2048, 0, 0},
       }) {
    begin_case("%d threads, %d tokens, %d rows", static_cast<int>(c.threads),
               static_cast<int>(c.tokens), static_cast<int>(c.rows));
    const ProductPlan cut = plan_of(kernels, c.tokens, c.rows, true, c.threads);
    CHECK(cut.by_tables() == (c.blocks != 0), "by %s", cut.algorithm->name);
    if (!cut.by_tables()) continue;
    CHECK(cut.token_blocks == c.blocks && cut.row_parts == c.parts, "%d blocks, %d parts",
          static_cast<int>(cut.token_blocks), static_cast<int>(cut.row_parts));
  }
}

TEST(one_of_many_threads_measures) {
  use_measured();
  begin_case("threads that ask at once");
  static std::atomic<int> products{0};
  const KernelTable kernels = sleeping("counted", [](const ProductJob&, const EpilogueJob*) {
    ++products;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < 7; ++i) threads.emplace_back([&] { plan_of(kernels, 64, 2048); });
  for (std::thread& thread : threads) thread.join();
  const int once = products;
  plan_of(kernels, 64, 2048);
  CHECK(once > 0 && products == once, "measured again");
}

// A failure to get memory counts as a loss, and is no error.
TEST(without_memory_products_are_multiplied) {
  if (kSanitized) return not_here("an allocator that may fail");
  use_measured();
  for (const KernelTable* kernels : tables_under_test()) {
    const std::string name = std::string("starved ") + kernels->name;
    KernelTable starved = without_scratch(*kernels);
    starved.name = name.c_str();
    ProductChoices choices;
    starved.choices = &choices;
    begin_case("%s", starved.name);
    CHECK(!plan_of(starved, 64, 2048).by_tables(), "tables without memory");
  }
}

}  // namespace
}  // namespace bitnet::test
