// Products by tables of sums, on every kernel table that has them, against plain int64 sums:
// all numbers of tokens around the blocks, rows that fill no block, K from 1 to 32768 with the
// inputs that overflow first, every epilogue, every buffer against a guard page.
#include <algorithm>
#include <vector>

#include "tests/check.h"
#include "tests/contract.h"
#include "tests/guarded.h"
#include "tests/random.h"
#include "tests/tables.h"
#include "tests/tile_problem.h"

namespace bitnet::test {
namespace {

constexpr int64_t kMaxRows = 2560;

struct Stored {
  StoreKind kind = StoreKind::kSums;
  DType type = DType::kF32;
  bool row_scales = false, bias = false;
  int64_t rows_missing = 0;  // of the last tile
  bool damaged = false;      // sums mean nothing
  bool scratch = true;       // else there was no memory
};

class TableTest {
 public:
  void run(const KernelTable& kernels, const Problem& p, int64_t tokens, int64_t slack,
           const Stored& as = {}) {
    begin_case("%s %s K=%lld %lld tiles, tokens=%lld slack=%lld kind %d type %d", kernels.name,
               p.fields == 5 ? "base-3" : "2 bit", static_cast<long long>(p.k),
               static_cast<long long>(p.tiles), static_cast<long long>(tokens),
               static_cast<long long>(slack), static_cast<int>(as.kind), static_cast<int>(as.type));
    const Placement where = kPlacements[tally.cases % kPlacementCount];
    const int64_t kp = 4 * p.k_steps, rows = p.rows() - as.rows_missing;
    const int64_t x_stride = kp + slack, out_stride = rows + slack;
    const uint8_t* w =
        weight_.place_copy(p.packed.data(), p.tiles * p.k_steps * p.lanes * 4, where);
    int8_t* x = x_.place<int8_t>((tokens - 1) * x_stride + kp, where);
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(&p.x[at(t * kp)], kp, x + t * x_stride);
    Random random(7);
    const std::vector<float> scales = random_floats(random, Flavour::kUnit, rows);
    const std::vector<float> x_scales = random_floats(random, Flavour::kUnit, tokens);
    const float* w_scale = scales_.place_copy(scales.data(), as.row_scales ? rows : 1, where);
    const float* x_scale = x_scales_.place_copy(x_scales.data(), tokens, where);
    // as much as a call of so many tokens gets, or of many
    const ProductAlgorithm& by_tables = *engine::tables_of(kernels);
    const ProductShape some = shape_for_tables(tokens, kMaxRows);
    const ProductBlocking blocking =
        by_tables.blocking(by_tables.usual(some) ? some : shape_for_tables(1 << 20, kMaxRows));
    // flush against the page behind it, and aligned as its contract has it
    void* scratch = scratch_.place<char>(blocking.scratch_bytes, {true, 0});
    const int64_t element = as.kind == StoreKind::kStore && as.type != DType::kF32 ? 2 : 4;
    const int64_t bytes = ((tokens - 1) * out_stride + rows) * element;
    char* out = out_.place<char>(bytes, {where.at_end, 0});
    for (int64_t i = 0; i < bytes; ++i) out[i] = static_cast<char>(i / 4 % 3 == 0 ? 0 : 60);
    std::vector<char> want(out, out + bytes);
    const ProductJob job{
        .format = p.fields == 5 ? layout::WeightFormat::kBase3 : layout::WeightFormat::kTwoBit,
        .weights = w,
        .block_bytes = p.k_steps * p.lanes * 4,
        .k_steps = p.k_steps,
        .blocks = p.tiles,
        .x = x,
        .x_stride = x_stride,
        .tokens = tokens,
        .x_sum = p.sums.data(),
        .scratch = as.scratch ? scratch : nullptr};
    EpilogueJob epilogue{.sums = nullptr,
                         .sums_stride = 0,
                         .rows = rows,
                         .tokens = tokens,
                         .w_scale = w_scale,
                         .w_scale_step = as.row_scales ? 1 : 0,
                         .x_scale = x_scale,
                         .bias = as.bias ? scales.data() : nullptr,
                         .kind = as.kind,
                         .type = as.type,
                         .out = out,
                         .out_stride_bytes = out_stride * element};
    by_tables.run(job, &epilogue);
    CHECK(out_.intact() && scratch_.intact(), "wrote outside of a buffer");
    if (as.damaged) return;
    std::vector<int32_t> exact(at(tokens * p.rows()));
    std::copy_n(p.answer.begin(), tokens * p.rows(), exact.begin());
    epilogue.sums = exact.data();
    epilogue.sums_stride = p.rows();
    epilogue.out = want.data();
    contract::store_block(epilogue);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t n = 0; n < out_stride && t * out_stride + n < bytes / element; ++n) {
        const int64_t i = t * out_stride + n;
        if (as.kind == StoreKind::kSums) {
          const int32_t got = reinterpret_cast<const int32_t*>(out)[i];
          const int32_t sum = reinterpret_cast<const int32_t*>(want.data())[i];
          CHECK(got == sum, "token %d row %d: %d, not %d", static_cast<int>(t), static_cast<int>(n),
                got, sum);
        } else {
          CHECK(same(out, want.data(), i, element == 4, as.type), "token %d row %d",
                static_cast<int>(t), static_cast<int>(n));
        }
      }
    }
  }

 private:
  Arena weight_{64 * 32768 * 16}, x_{300 * 2600 + 64 * 33000}, scales_{4096 * 4}, x_scales_{4096},
      scratch_{8 << 20}, out_{300 * 1300 * 4};
};

// Tiles of at least `rows` rows.
int64_t tiles_for(const KernelTable& kernels, int64_t fields, int64_t rows) {
  const int64_t each = fields * kernels.tile_lanes;
  return (rows + each - 1) / each;
}

// As few rows as a call uses tables for.
int64_t min_rows(const KernelTable& kernels) {
  int64_t rows = 1;
  while (!engine::tables_of(kernels)->usual(shape_for_tables(1 << 20, rows))) rows *= 2;
  return rows / 2;
}

template <class F>
void for_each_table(const F& f) {
  int64_t count = 0;
  for (const KernelTable* kernels : tables_under_test()) {
    if (!has_tables(*kernels)) continue;
    f(*kernels);
    ++count;
  }
  if (count == 0) not_here("an ISA with tables of sums");
}
template <class F>
void for_each_form(const F& f) {
  for_each_table([&](const KernelTable& kernels) {
    for (const int64_t fields : {4, 5}) f(kernels, fields);
  });
}

TEST(all_counts) {
  TableTest test;
  for_each_form([&](const KernelTable& kernels, int64_t fields) {
    const int64_t step = thinning(kernels) > 1 ? 23 : 1;
    for (const int64_t k : {1, 63, 64, 65, 300}) {
      const Problem p =
          random_problem(kernels, fields, k, tiles_for(kernels, fields, min_rows(kernels)), 140);
      for (int64_t tokens = 1; tokens <= p.tokens; tokens += k == 300 ? step : 2 * step + 5)
        test.run(kernels, p, tokens, tokens % 3);
    }
    // fewer rows than tables are built for, and numbers of rows that are no multiple of 16
    for (const int64_t rows : {16, 200, 300, 333, 600}) {
      const Problem p = random_problem(kernels, fields, 128, tiles_for(kernels, fields, rows), 70);
      for (const int64_t tokens : {1, 16, 33, 70}) test.run(kernels, p, tokens, 1);
    }
  });
}

// Few tokens share the rows with the multipliers, many are shared themselves: around every number
// of blocks, with rows enough that the building of tables pays.
TEST(every_cut) {
  TableTest test;
  for_each_form([&](const KernelTable& kernels, int64_t fields) {
    const int64_t step = thinning(kernels) > 1 ? 13 : 1;
    const Problem p = random_problem(kernels, fields, 190, tiles_for(kernels, fields, 1200), 290);
    for (int64_t tokens = 8; tokens <= 72; tokens += step)
      test.run(kernels, p, tokens, tokens % 3, {.rows_missing = tokens % 40});
    for (const int64_t blocks : {3, 4, 5, 6, 7, 8}) {
      if (left_to_the_night(kernels) && blocks % 2 == 0) continue;
      for (const int64_t more : {-1, 0, 1, 18}) test.run(kernels, p, 32 * blocks + more, 1);
    }
    test.run(kernels, p, 290, 0);
    for (const StoreKind kind : {StoreKind::kStore, StoreKind::kAdd}) {
      const Stored as{kind, DType::kBF16, true, true, 5};
      for (const int64_t tokens : {13, 18, 31, 50, 130}) test.run(kernels, p, tokens, 2, as);
    }
  });
}

// All that is added has one sign and the largest magnitude, or swings with the parts of K after
// which sums are widened.
TEST(worst_cases) {
  TableTest test;
  for_each_form([&](const KernelTable& kernels, int64_t fields) {
    const int64_t tiles = tiles_for(kernels, fields, min_rows(kernels)), tokens = 33;
    for (const int64_t k : {2048, 32768}) {
      if (k > 2048 && thinning(kernels) > 1) continue;
      for (const int code : {0, 2}) {
        for (const int activation : {127, -128}) {
          const Problem p = make_problem(
              kernels, fields, k, tiles, tokens, [&](int64_t, int64_t) { return code; },
              [&](int64_t t, int64_t) {
                return static_cast<int8_t>(t % 16 == 5 ? 1 : activation);
              });
          test.run(kernels, p, tokens, 0);
        }
      }
      // rows are shared, so the multipliers' sums are these as well
      const Problem many = make_problem(
          kernels, fields, 2048, tiles_for(kernels, fields, 1200), 24,
          [](int64_t n, int64_t) { return n < 600 ? 0 : 2; },
          [](int64_t t, int64_t) { return static_cast<int8_t>(t % 2 == 0 ? 127 : -128); });
      for (const int64_t few : {16, 24}) test.run(kernels, many, few, 0);
      const Problem swing = make_problem(
          kernels, fields, k, tiles, tokens,
          [](int64_t, int64_t i) { return i / 256 % 2 == 0 ? 2 : 0; },
          [](int64_t, int64_t i) { return static_cast<int8_t>(i / 64 % 3 == 0 ? 127 : -128); });
      test.run(kernels, swing, tokens, 0);
    }
  });
}

TEST(long_rows) {
  TableTest test;
  for_each_form([&](const KernelTable& kernels, int64_t fields) {
    for (const int64_t k : {1000, 2560}) {
      const Problem p =
          random_problem(kernels, fields, k, tiles_for(kernels, fields, min_rows(kernels)), 40);
      for (const int64_t tokens : {17, 32, 40}) test.run(kernels, p, tokens, 0);
    }
  });
}

TEST(epilogues) {
  TableTest test;
  for_each_form([&](const KernelTable& kernels, int64_t fields) {
    const Problem p = random_problem(kernels, fields, 100,
                                     tiles_for(kernels, fields, min_rows(kernels) + 44), 75);
    for (const StoreKind kind : {StoreKind::kStore, StoreKind::kRound, StoreKind::kAdd}) {
      for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const int64_t missing : {0, 1, 15, 17}) {
          if (left_to_the_night(kernels) && (missing == 1 || missing == 15)) continue;
          Stored as{kind, type, missing % 2 == 1, missing > 1, missing};
          for (const int64_t tokens : {16, 75}) test.run(kernels, p, tokens, missing % 3, as);
          as.scratch = false;  // many more sums than have room on the way
          test.run(kernels, p, 75, missing % 3, as);
        }
      }
    }
  });
}

// A 2-bit field may hold a fourth value in a damaged file that nobody has checked: its sums mean
// nothing, and nothing is read or written outside of the buffers.
TEST(fourth_values) {
  TableTest test;
  for_each_table([&](const KernelTable& kernels) {
    Problem p = random_problem(kernels, 4, 128, tiles_for(kernels, 4, 1024), 40);
    std::ranges::fill(p.packed, uint8_t{0xff});
    for (const int64_t tokens : {16, 40}) test.run(kernels, p, tokens, 0, {.damaged = true});
  });
}

}  // namespace
}  // namespace bitnet::test
