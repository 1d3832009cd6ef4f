// The measured choice of tables of sums: which products ask for it, that it is made once for an
// ISA, also where threads come at once, and that products follow it and stay equal.
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
#include "engine/product.h"
#include "engine/table_probe.h"
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
  set_variable("BITNET_OPS_TUNING", "tables=measure");
  CHECK(tuning().sum_tables == TableUse::kMeasured, "the row was read before");
}

ProductPlan plan_of(const KernelTable& table, int64_t tokens, int64_t rows, bool tables = true,
                    int64_t threads = 1) {
  const int64_t block_rows = 4 * table.tile_lanes;
  return engine::plan_product(table,
                              {.format = layout::WeightFormat::kTwoBit,
                               .tokens = tokens,
                               .k = kK,
                               .row_blocks = rows / block_rows,
                               .block_rows = block_rows,
                               .planes = tables ? 1 : 2},
                              threads);
}

// The first test, so nothing else has measured.
TEST(a_few_tokens_or_rows_measure_nothing) {
  use_measured();
  for (const KernelTable* table : tables_under_test()) {
    begin_case("%s", table->name);
    plan_of(*table, 1, 1 << 16);
    plan_of(*table, 4, 1 << 16);
    plan_of(*table, 512, 128);
    plan_of(*table, 512, 1 << 14, false);
    CHECK(!engine::table_probe(*table), "measured");
  }
}

// A matrix of 2 bit weights, tokens, and what their product has to be.
class Sample {
 public:
  Sample(const KernelTable& table, int64_t rows, int64_t tokens)
      : table_(table),
        weight_(engine::tile_weight(nullptr, engine::WeightFormat::kTwoBit, rows, kK,
                                    table.tile_lanes)),
        tiles_(at(weight_.bytes())),
        codes_(at(rows * kK)),
        x_(at(tokens * kK)),
        buffer_(table, tokens, kK) {
    Random random(3);
    for (int8_t& code : codes_) code = static_cast<int8_t>(random.next() % 3) - 1;
    for (int8_t& x : x_) x = static_cast<int8_t>(random.next());
    std::vector<uint8_t> canonical(at(rows * layout::row_bytes_for(kK)));
    engine::pack(codes_.data(), rows, kK, canonical.data());
    weight_.data = tiles_.data();
    engine::repack(canonical.data(), weight_, table.tile_lanes, tiles_.data());
    buffer_.copy_quantized(table, x_.data(), nullptr);
  }

  std::vector<int32_t> product() const {
    std::vector<int32_t> sums(at(buffer_.view().tokens * weight_.n_rows), 77);
    const Projection p = engine::make_sums(weight_, sums.data());
    engine::multiply(table_, buffer_.view(), &p, 1);
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
  const KernelTable& table_;
  engine::Weight weight_;
  std::vector<uint8_t> tiles_;
  std::vector<int8_t> codes_, x_;
  engine::TokenBuffer buffer_;
};

TEST(threads_come_at_once) {
  use_measured();
  constexpr int kThreads = 7;
  for (const KernelTable* table : tables_under_test()) {
    begin_case("%s", table->name);
    const Sample sample(*table, 1100, 33);
    std::vector<std::vector<int32_t>> sums(kThreads);
    std::vector<std::thread> threads;
    for (std::vector<int32_t>& of_thread : sums)
      threads.emplace_back([&] { of_thread = sample.product(); });
    for (std::thread& thread : threads) thread.join();
    sample.check(sums[0]);
    for (const std::vector<int32_t>& others : sums) CHECK(others == sums[0], "other sums");
    CHECK(engine::table_probe(*table).has_value() == has_tables(*table),
          "not measured, or in vain");
  }
}

TEST(what_was_measured_decides) {
  use_measured();
  for (const KernelTable* table : tables_under_test()) {
    begin_case("%s", table->name);
    const ProductPlan cut = plan_of(*table, 64, 2048);
    const auto probe = engine::table_probe(*table);
    CHECK(probe.has_value() == has_tables(*table), "measured where there are no tables");
    CHECK(cut.by_tables() == (probe && probe->gain >= 1.05), "by %s", cut.algorithm->name);
    if (!probe) continue;
    CHECK(probe->gain > 0 && probe->seconds > 0, "%g in %g s", probe->gain, probe->seconds);
    plan_of(*table, 128, 4096);
    CHECK(engine::table_probe(*table)->seconds == probe->seconds, "measured again");
    std::printf("%s: %.2f times in %.1f ms\n", table->name, probe->gain, 1000 * probe->seconds);
  }
}

// Kernels that compute nothing and take their time, on any CPU. Their list lives as long as the
// process.
KernelTable sleeping(const char* name, void (*run)(const ProductJob&, const EpilogueJob*)) {
  KernelTable table = scalar_table();
  table.name = name;
  static std::deque<std::array<ProductAlgorithm, kMostProducts>> lists;
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
  list[1] = *engine::find_algorithm(table, "direct");
  list[1].run = run;
  table.products = list.data();
  return table;
}

template <int kByTables, int kMultiplied>
void sleep_for(const ProductJob& job, const EpilogueJob*) {
  std::this_thread::sleep_for(
      std::chrono::milliseconds(job.scratch != nullptr ? kByTables : kMultiplied));
}

TEST(the_faster_way_is_taken) {
  use_measured();
  begin_case("tables take half of the time, or three times as much");
  const KernelTable fast = sleeping("fast tables", sleep_for<3, 6>);
  const KernelTable slow = sleeping("slow tables", sleep_for<6, 2>);
  CHECK(plan_of(fast, 64, 2048).by_tables(), "multiplied");
  CHECK(!plan_of(slow, 64, 2048).by_tables(), "by tables");
  const double gain = engine::table_probe(fast)->gain, loss = engine::table_probe(slow)->gain;
  CHECK(gain > 1.05 && loss < 1, "%g and %g", gain, loss);
}

TEST(few_tokens_need_a_larger_gain) {
  use_measured();
  begin_case("twice as fast, and a sixth faster");
  const KernelTable fast = sleeping("twice", sleep_for<3, 6>);
  const KernelTable little = sleeping("a sixth", sleep_for<90, 105>);
  CHECK(plan_of(fast, 32, 2048).by_tables(), "multiplied");
  CHECK(!plan_of(little, 32, 2048).by_tables(), "few tokens by tables");
  CHECK(plan_of(little, 64, 2048).by_tables(), "multiplied");
  const double gain = engine::table_probe(little)->gain;
  CHECK(gain > 1.05 && gain < 1.33, "%g", gain);
}

// Rows that are too few for the threads are not cut further than tables are worth; tokens are.
TEST(many_threads_take_fewer_tokens) {
  use_measured();
  const KernelTable table = sleeping("many threads", sleep_for<3, 6>);
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
    const ProductPlan cut = plan_of(table, c.tokens, c.rows, true, c.threads);
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
  const KernelTable table = sleeping("counted", [](const ProductJob&, const EpilogueJob*) {
    ++products;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < 7; ++i) threads.emplace_back([&] { plan_of(table, 64, 2048); });
  for (std::thread& thread : threads) thread.join();
  const int once = products;
  CHECK(once >= 6 && once <= 16, "%d products", once);  // three to eight turns of two
  plan_of(table, 64, 2048);
  CHECK(products == once, "measured again");
}

// A failure to get memory counts as a loss, and is no error.
TEST(without_memory_products_are_multiplied) {
  if (kSanitized) return not_here("an allocator that may fail");
  use_measured();
  for (const KernelTable* table : tables_under_test()) {
    const std::string name = std::string("starved ") + table->name;
    KernelTable starved = without_scratch(*table);
    starved.name = name.c_str();
    begin_case("%s", starved.name);
    CHECK(!plan_of(starved, 64, 2048).by_tables(), "tables without memory");
    if (has_tables(*table)) CHECK(engine::table_probe(starved)->gain == 0, "a gain");
  }
}

}  // namespace
}  // namespace bitnet::test
