// The tiles of the CPU-specific layouts, on every kernel table, against plain int64 sums: all token
// counts around the groups, K from 1 to 32768 with the inputs that overflow first, all 243 bytes of
// the 1.6 bit layout, every buffer against a guard page.  The tiles are written here from the words
// of FORMAT.md; the reference multiplies the codes they were made of.  Must not know repack or
// torch.
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

constexpr int64_t kLargestK = 32768, kMaxTokens = 70;
constexpr int kPanel = 32;  // tokens for which every ISA that decodes to memory does so

// All tiles of a problem, without a result.
ProductJob tile_job(const Problem& p) {
  return {.format = p.fields == 5 ? layout::WeightFormat::kBase3 : layout::WeightFormat::kTwoBit,
          .weights = p.packed.data(),
          .block_bytes = p.k_steps * p.lanes * 4,
          .k_steps = p.k_steps,
          .blocks = p.tiles,
          .x = p.x.data(),
          .x_stride = 4 * p.k_steps,
          .tokens = p.tokens,
          .x_sum = p.sums.data()};
}

class TileTest {
 public:
  // Tiles from `begin` x the first `tokens` tokens of p, strides wider by `slack`.
  void run(const KernelTable& kernels, const Problem& p, int64_t begin, int64_t tokens,
           int64_t slack) {
    begin_case("%s %s K=%lld tiles %lld..%lld tokens=%lld slack=%lld", kernels.name,
               p.fields == 5 ? "base-3" : "2 bit", static_cast<long long>(p.k),
               static_cast<long long>(begin), static_cast<long long>(p.tiles),
               static_cast<long long>(tokens), static_cast<long long>(slack));
    const Placement where = kPlacements[tally.cases % kPlacementCount];
    const int64_t tile_bytes = p.k_steps * p.lanes * 4, kp = 4 * p.k_steps;
    const int64_t rows = p.rows() - begin * p.lanes * p.fields;
    const int64_t x_stride = kp + slack, out_stride = rows + slack;
    const uint8_t* w = weight_.place_copy(p.packed.data() + begin * tile_bytes,
                                          (p.tiles - begin) * tile_bytes, where);
    int8_t* x = x_.place<int8_t>((tokens - 1) * x_stride + kp, where);
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(&p.x[at(t * kp)], kp, x + t * x_stride);
    const int32_t* sums = sums_.place_copy(p.sums.data(), tokens, where);
    int32_t* out = out_.place<int32_t>((tokens - 1) * out_stride + rows, where);
    ProductJob job = tile_job(p);
    job.weights = w;
    job.blocks = p.tiles - begin;
    job.x = x;
    job.x_stride = x_stride;
    job.tokens = tokens;
    job.x_sum = sums;
    job.sums = out;
    job.out_stride = out_stride;
    job.prefetch_bytes = tokens % 2 * 6144;
    for (const ProductAlgorithm* row : products_of(kernels)) {
      ProductShape shape = engine::shape_of(job);
      shape.scratch = true;
      if (!row->takes(shape)) continue;  // every row that takes the job gives the same sums
      const int64_t bytes = row->blocking(shape).scratch_bytes;
      job.scratch = bytes == 0 ? nullptr : scratch_.place<char>(bytes, {true, 0});
      std::fill_n(out, (tokens - 1) * out_stride + rows, 77);
      row->run(job, nullptr);
      check(p, job, rows, row->name);
      CHECK(out_.intact() && scratch_.intact(), "%s wrote outside of a buffer", row->name);
    }
  }

 private:
  static void check(const Problem& p, const ProductJob& job, int64_t rows, const char* row) {
    for (int64_t t = 0; t < job.tokens; ++t) {
      for (int64_t n = 0; n < rows; ++n) {
        const int64_t want = p.answer[at((t + 1) * p.rows() - rows + n)];
        const int32_t got = job.sums[t * job.out_stride + n];
        CHECK(got == want, "%s, token %d row %d: %d, not %lld", row, static_cast<int>(t),
              static_cast<int>(n), got, static_cast<long long>(want));
      }
    }
  }

  Arena weight_{3 * kLargestK * 16}, x_{kMaxTokens * (kLargestK + 64)}, sums_{4096},
      out_{kMaxTokens * 1024}, scratch_{8 << 20};
};

void all_counts(TileTest& test, const KernelTable& kernels, int64_t fields) {
  for (const int64_t k : {1, 63, 64, 65, 128, 300, 576}) {
    const Problem p = random_problem(kernels, fields, k, 3, kMaxTokens);
    const int64_t step = thinning(kernels) > 1 ? 9 : 1;
    for (int64_t tokens = 1; tokens <= kMaxTokens; tokens += tokens < 12 ? 1 : step) {
      test.run(kernels, p, 0, tokens, tokens % 3);
    }
    test.run(kernels, p, 2, 1, 0);
    test.run(kernels, p, 1, 5, 2);
  }
}

void all_lengths(TileTest& test, const KernelTable& kernels, int64_t fields) {
  for (const int64_t k : {640, 1000, 2560, 6912, 8640, 32768}) {
    const bool thin = thinning(kernels) > 1;
    const Problem p = random_problem(kernels, fields, k, 1, thin ? 5 : 9);
    for (int64_t tokens = 1; tokens <= p.tokens; tokens += thin ? 2 : 1) {
      test.run(kernels, p, 0, tokens, 0);
    }
  }
}

// The sums that overflow first: the largest and smallest everything, and signs that swing with the
// blocks in which partial sums are kept.
void worst_cases(TileTest& test, const KernelTable& kernels, int64_t fields) {
  for (const int64_t k : {int64_t{2048}, kLargestK}) {
    for (const int code : {0, 1, 2}) {
      for (const int activation : {127, -128}) {
        const Problem p = make_problem(
            kernels, fields, k, 1, kPanel, [&](int64_t, int64_t) { return code; },
            [&](int64_t, int64_t) { return static_cast<int8_t>(activation); });
        CHECK(p.answer[0] == k * (int64_t{code} - 1) * activation, "the reference is wrong");
        for (const int64_t tokens : {1, 3, 6, kPanel}) test.run(kernels, p, 0, tokens, 0);
      }
    }
    const Problem swing = make_problem(
        kernels, fields, k, 1, kPanel, [](int64_t, int64_t i) { return i / 256 % 2 == 0 ? 2 : 0; },
        [](int64_t, int64_t i) { return static_cast<int8_t>(i / 64 % 3 == 0 ? 127 : -128); });
    for (const int64_t tokens : {1, 6, kPanel}) test.run(kernels, swing, 0, tokens, 0);
  }
}

// Every value that five weights can have, in every lane and byte, against single activations.
void all_base3_bytes(TileTest& test, const KernelTable& kernels) {
  constexpr int64_t kPowers[] = {81, 27, 9, 3, 1};
  const int64_t lanes = kernels.tile_lanes;
  for (const int64_t tokens : {1, 2, 4, kPanel}) {
    const Problem p = make_problem(
        kernels, 5, 256, 1, tokens,
        [&](int64_t n, int64_t i) {
          return static_cast<int>((i + n % lanes * 31) % 243 / kPowers[n / lanes] % 3);
        },
        [](int64_t t, int64_t i) { return static_cast<int8_t>((i * 7 + t * 3) % 5 == 0 ? 1 : 0); });
    test.run(kernels, p, 0, tokens, 0);
  }
}

// The epilogues that products bring along, those of sums and of groups, with a value planted
// into the scale of a row and of a token, the bias and what is added to.
void planted_epilogues(const KernelTable& kernels, int64_t fields) {
  const int64_t k = 576;
  const Problem p = random_problem(kernels, fields, k, 2, 33);
  const int64_t rows = p.rows();
  const std::vector<int32_t> exact(p.answer.begin(), p.answer.end());
  for (const int64_t tokens : {1, 6, 33}) {
    for (const float value : kPlanted) {
      Random random(5);
      std::vector<float> w_scale = random_floats(random, Flavour::kUnit, rows), bias = w_scale,
                         x_scale = random_floats(random, Flavour::kUnit, tokens),
                         start = random_floats(random, Flavour::kUnit, tokens * rows);
      w_scale[at(rows - 1)] = bias[17] = x_scale[at(tokens - 1)] = start[5] = value;
      std::vector<int32_t> sums(at(tokens * rows));
      ProductJob job = tile_job(p);
      job.tokens = tokens;
      job.sums = sums.data();
      job.out_stride = rows;
      for (const StoreKind kind : {StoreKind::kStore, StoreKind::kRound, StoreKind::kAdd}) {
        for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
          begin_case("%s product fields=%d tokens=%d %g kind %d type %d", kernels.name,
                     static_cast<int>(fields), static_cast<int>(tokens), static_cast<double>(value),
                     static_cast<int>(kind), static_cast<int>(type));
          const bool floats = kind != StoreKind::kStore || type == DType::kF32;
          std::vector<float> got = start, want = start;
          EpilogueJob epilogue{.sums = sums.data(),
                               .sums_stride = rows,
                               .rows = rows,
                               .tokens = tokens,
                               .w_scale = w_scale.data(),
                               .w_scale_step = 1,
                               .x_scale = x_scale.data(),
                               .bias = bias.data(),
                               .kind = kind,
                               .type = type,
                               .out = got.data(),
                               .out_stride_bytes = rows * (floats ? 4 : 2)};
          run_usual(kernels, job, &epilogue);
          epilogue.sums = exact.data();
          epilogue.out = want.data();
          contract::store_block(epilogue);
          for (int64_t i = 0; i < tokens * rows; ++i) {
            CHECK(same(got.data(), want.data(), i, floats, type), "token %d row %d",
                  static_cast<int>(i / rows), static_cast<int>(i % rows));
          }
        }
      }
      // One group is the first 32 k-steps; sums of the others have been tested elsewhere.
      begin_case("%s groups fields=%d tokens=%d %g", kernels.name, static_cast<int>(fields),
                 static_cast<int>(tokens), static_cast<double>(value));
      const int64_t tile_rows = rows / p.tiles;
      std::vector<int32_t> x_sum(at(tokens));
      for (int64_t i = 0; i < tokens * 128; ++i)
        x_sum[at(i / 128)] += p.x[at(i / 128 * 4 * p.k_steps + i % 128)];
      for (const bool add : {false, true}) {
        std::vector<float> got = start;
        ProductJob groups = job;
        groups.k_steps = groups.group_steps = 32;
        groups.x_sum = x_sum.data();
        groups.x_scale = x_scale.data();
        groups.x_group_stride = tokens;
        groups.scale = w_scale.data();
        groups.scale_stride = tile_rows;
        groups.add = add;
        groups.values = got.data();
        run_usual(kernels, groups);
        for (int64_t i = 0; i < tokens * rows; ++i) {
          const int64_t t = i / rows, n = i % rows;
          int64_t dot = 0;
          for (int64_t j = 0; j < 128; ++j)
            dot += (p.code(n, j) - 1) * int64_t{p.x[at(t * 4 * p.k_steps + j)]};
          const float want = std::fma(static_cast<float>(dot), w_scale[at(n)] * x_scale[at(t)],
                                      add ? start[at(i)] : 0.0f);
          CHECK(same(&got[at(i)], &want, 0, true, DType::kF32), "add %d token %d row %d", add,
                static_cast<int>(t), static_cast<int>(n));
        }
      }
    }
  }
}

TEST(all_counts) {
  TileTest test;
  for (const KernelTable* kernels : tables_under_test()) {
    for (const int64_t fields : {4, 5}) all_counts(test, *kernels, fields);
  }
}

TEST(all_lengths) {
  TileTest test;
  for (const KernelTable* kernels : tables_under_test()) {
    for (const int64_t fields : {4, 5}) all_lengths(test, *kernels, fields);
  }
}

TEST(worst_cases) {
  TileTest test;
  for (const KernelTable* kernels : tables_under_test()) {
    for (const int64_t fields : {4, 5}) worst_cases(test, *kernels, fields);
  }
}

TEST(planted_epilogues) {
  for (const KernelTable* kernels : tables_under_test()) {
    for (const int64_t fields : {4, 5}) planted_epilogues(*kernels, fields);
  }
}

TEST(all_base3_bytes) {
  TileTest test;
  for (const KernelTable* kernels : tables_under_test()) all_base3_bytes(test, *kernels);
}

}  // namespace
}  // namespace bitnet::test
