// The integer core of every kernel table against plain int64 sums: all row and token counts around
// the tiles, K from 1 to 32768 with the inputs that overflow first, every buffer against a guard
// page. The reference multiplies the codes it was made of and never reads the packed bytes.
#include <algorithm>
#include <vector>

#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/random.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

constexpr int64_t kRows = 70, kTokens = 64, kLargestK = 32768;
constexpr int64_t kTokenCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64};

int64_t padded(int64_t k) { return (k + 127) / 128 * 128; }

// One matrix product with its answer.  Codes and activations are padded to blocks of 128.
struct Problem {
  int64_t k, kp, rows, tokens;
  std::vector<uint8_t> packed;  // [rows, kp / 4]
  std::vector<int8_t> x;        // [tokens, kp], zeros from k
  std::vector<int32_t> sums;    // [tokens]
  std::vector<int64_t> answer;  // [tokens, rows]
};

// Byte j of a block of 32 bytes holds the codes of weights j, j + 32, j + 64, j + 96, high bits
// first.
std::vector<uint8_t> pack(const std::vector<uint8_t>& codes) {
  std::vector<uint8_t> bytes(codes.size() / 4);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const uint8_t* c = &codes[i / 32 * 128 + i % 32];
    bytes[i] = static_cast<uint8_t>(c[0] * 64 + c[32] * 16 + c[64] * 4 + c[96]);
  }
  return bytes;
}

// code(row, k) and x(token, k) make the data; codes may be 0..3.
template <class Code, class X>
Problem make_problem(int64_t k, int64_t rows, int64_t tokens, Code code, X x) {
  Problem p{k, padded(k), rows, tokens, {}, {}, {}, {}};
  std::vector<uint8_t> codes;
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t i = 0; i < p.kp; ++i) codes.push_back(code(n, i));
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < p.kp; ++i) p.x.push_back(i < k ? x(t, i) : int8_t{0});
  }
  p.packed = pack(codes);
  for (int64_t t = 0; t < tokens; ++t) {
    const int8_t* xt = &p.x[static_cast<std::size_t>(t * p.kp)];
    int64_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += xt[i];
    p.sums.push_back(static_cast<int32_t>(sum));
    for (int64_t n = 0; n < rows; ++n) {
      const uint8_t* cn = &codes[static_cast<std::size_t>(n * p.kp)];
      int64_t dot = 0;
      for (int64_t i = 0; i < k; ++i) dot += (int32_t{cn[i]} - 1) * int32_t{xt[i]};
      p.answer.push_back(dot);
    }
  }
  return p;
}

// codes_below 3: valid weights; 4: any byte, the padding behind k included.
Problem random_problem(int64_t k, int64_t rows, int64_t tokens, int64_t codes_below) {
  Random random(static_cast<uint64_t>(k * 4 + codes_below));
  return make_problem(
      k, rows, tokens,
      [&](int64_t, int64_t) { return static_cast<uint8_t>(random.below(codes_below)); },
      [&](int64_t, int64_t) { return static_cast<int8_t>(random.below(256) - 128); });
}

class GemmTest {
 public:
  // Runs rows [row_begin, row_end) x the first `tokens` tokens of p, strides wider by `slack`.
  void run(const KernelTable& kernels, const Problem& p, int64_t row_begin, int64_t row_end,
           int64_t tokens, int64_t slack) {
    begin_case("%s canonical K=%lld rows %lld..%lld tokens=%lld slack=%lld", kernels.name,
               static_cast<long long>(p.k), static_cast<long long>(row_begin),
               static_cast<long long>(row_end), static_cast<long long>(tokens),
               static_cast<long long>(slack));
    const Placement where = kPlacements[tally.cases % kPlacementCount];
    const int64_t row_bytes = p.kp / 4, rows = row_end - row_begin;
    const int64_t x_stride = p.kp + slack, out_stride = rows + slack;
    const uint8_t* w = weight_.place_copy(p.packed.data(), row_end * row_bytes, where);
    // The last token's row ends where the contract says, whatever the stride.
    int8_t* x = x_.place<int8_t>((tokens - 1) * x_stride + p.kp, where);
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(&p.x[at(t * p.kp)], p.kp, x + t * x_stride);
    const int32_t* sums = sums_.place_copy(p.sums.data(), tokens, where);
    int32_t* out = out_.place<int32_t>((tokens - 1) * out_stride + rows, where);
    run_usual(kernels, {.format = layout::WeightFormat::kCanonical,
                        .weights = w + row_begin * row_bytes,
                        .block_bytes = row_bytes,
                        .k_steps = row_bytes,
                        .blocks = rows,
                        .x = x,
                        .x_stride = x_stride,
                        .tokens = tokens,
                        .x_sum = sums,
                        .sums = out,
                        .out_stride = out_stride,
                        .prefetch_bytes = 6144});
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t n = 0; n < rows; ++n) {
        const int64_t want = p.answer[at(t * p.rows + row_begin + n)];
        CHECK(out[t * out_stride + n] == want, "token %d row %d: %d, not %lld", static_cast<int>(t),
              static_cast<int>(n), out[t * out_stride + n], static_cast<long long>(want));
      }
    }
    CHECK(out_.intact(), "wrote outside of out");
  }

 private:
  static std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

  Arena weight_{kRows * kLargestK / 4}, x_{kTokens * (kLargestK + 64)}, sums_{4096}, out_{65536};
};

// Every row count 1..70 with every token count.
void all_counts(GemmTest& test, const std::vector<const KernelTable*>& tables) {
  for (const int64_t k : {1, 64, 127, 128, 129, 200, 255, 256, 257, 300, 384, 385, 576}) {
    const Problem p = random_problem(k, kRows, kTokens, 3);
    for (const KernelTable* kernels : tables) {
      const int64_t step = thinning(*kernels) > 1 ? 3 : 1;
      for (int64_t rows = 1; rows <= kRows; rows += step) {
        for (const int64_t tokens : kTokenCounts) {
          test.run(*kernels, p, 0, rows, tokens, (rows + tokens) % 3);
        }
      }
    }
  }
}

// Many K, the lattice of real models among them, with the row and token counts around the tiles.
void all_lengths(GemmTest& test, const std::vector<const KernelTable*>& tables) {
  for (const int64_t k : {2,    3,    31,   32,   33,   63,   64,   65,    96,    130,   191,
                          255,  257,  383,  384,  511,  512,  513,  576,   640,   1000,  1024,
                          1152, 2049, 3200, 6912, 8064, 8192, 8640, 14336, 23040, 27648, 32768}) {
    // The answer to a long product takes an emulator longer than the product.
    const int64_t most = k > 640 && (quick() || under_emulator()) ? 9 : kRows;
    const Problem p = random_problem(k, most, kTokens, k % 2 == 0 ? 3 : 4);
    for (const KernelTable* kernels : tables) {
      const bool thin = thinning(*kernels) > 1;
      for (const int64_t rows : {1, 2, 3, 4, 5, 9, 70}) {
        if (rows > most) continue;
        for (const int64_t tokens : {1, 2, 4, 5, 9, 33, 64}) {
          // A product of 64 tokens and 70 rows has all the tiles of a smaller one.
          if (thin && rows * tokens > 50 && (k > 640 || rows * tokens > 400)) continue;
          test.run(*kernels, p, 0, rows, tokens, tokens % 2 * 17);
        }
      }
      test.run(*kernels, p, 2, 9, 1,
               0);  // ranges that begin inside the matrix, as threads get them
      test.run(*kernels, p, 4, 9, 5, 3);
    }
  }
}

// The sums that overflow first.  Code 3 is no weight, but a corrupt byte must not make the result
// depend on the ISA: 0xff against -128 is the bound derived in isa/avx2.h, 8 units of 3 * 128 * 2
// * 4.
void worst_cases(GemmTest& test, const std::vector<const KernelTable*>& tables) {
  for (const int64_t k : {int64_t{1024}, int64_t{1152}, int64_t{14336}, kLargestK}) {
    // enough rows and tokens for the products that transpose rows
    const int64_t rows = k <= 1152 ? kRows : 5, tokens = k <= 1152 ? 33 : 5;
    for (const uint8_t code : {0, 1, 2, 3}) {
      for (const int activation : {127, -128, -127}) {
        const Problem p = make_problem(
            k, rows, tokens, [&](int64_t, int64_t) { return code; },
            [&](int64_t, int64_t) { return static_cast<int8_t>(activation); });
        const int64_t extreme = k * (int64_t{code} - 1) * activation;
        CHECK(p.answer[0] == extreme, "the reference itself is wrong");
        for (const KernelTable* kernels : tables) {
          test.run(*kernels, p, 0, 5, 1, 0);
          test.run(*kernels, p, 0, 5, 5, 0);
          if (rows > 5) test.run(*kernels, p, 0, rows, tokens, 0);
        }
      }
    }
    // Runs of equal sign that last one block of weights, so that partial sums swing.
    const Problem swing = make_problem(
        k, 5, 5, [](int64_t, int64_t i) { return static_cast<uint8_t>(i / 2048 % 2 == 0 ? 3 : 0); },
        [](int64_t, int64_t i) { return static_cast<int8_t>(i / 128 % 3 == 0 ? 127 : -128); });
    for (const KernelTable* kernels : tables) test.run(*kernels, swing, 0, 5, 5, 0);
  }
}

void check_sum_i8(const KernelTable& kernels, Arena& arena, const std::vector<int8_t>& x,
                  Placement where) {
  const auto n = static_cast<int64_t>(x.size());
  begin_case("%s sum_i8 n=%lld", kernels.name, static_cast<long long>(n));
  int64_t want = 0;
  for (const int8_t v : x) want += v;
  const int32_t got = kernels.sum_i8(arena.place_copy(x.data(), n, where), n);
  CHECK(got == want, "%d, not %lld", got, static_cast<long long>(want));
}

void sums(const std::vector<const KernelTable*>& tables) {
  Arena arena(1 << 24);
  Random random(5);
  for (const KernelTable* kernels : tables) {
    for (int64_t n = 0; n <= 300; ++n) {
      std::vector<int8_t> x(static_cast<std::size_t>(n));
      for (int8_t& v : x) v = static_cast<int8_t>(random.below(256) - 128);
      for (const Placement where : kPlacements) check_sum_i8(*kernels, arena, x, where);
      std::fill(x.begin(), x.end(), int8_t{-128});
      check_sum_i8(*kernels, arena, x, kPlacements[0]);
    }
  }
}

// The contract's bound: 2^24 times -128 is the smallest int32.
void longest_sums(const KernelTable& kernels) {
  Arena arena(1 << 24);
  for (const int8_t v : {-128, 127})
    check_sum_i8(kernels, arena, std::vector<int8_t>(1 << 24, v), kPlacements[0]);
}

TEST(all_counts) {
  GemmTest test;
  all_counts(test, tables_under_test());
}

TEST(all_lengths) {
  GemmTest test;
  all_lengths(test, tables_under_test());
}

TEST(worst_cases) {
  GemmTest test;
  worst_cases(test, tables_under_test());
}

TEST(sums) { sums(tables_under_test()); }

TEST(longest_sums) { on_every_table(longest_sums); }

}  // namespace
}  // namespace bitnet::test
