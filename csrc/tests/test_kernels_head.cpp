// The quantised heads of every kernel table against plain int64 sums: row and token counts around
// the tiles, lengths up to the largest allowed, the codes and activations that overflow first,
// planted scales, every buffer against a guard page.  The reference multiplies the codes it was
// made of and never reads the packed bytes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "engine/head.h"
#include "format/layout.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/random.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

constexpr int64_t kMaxRows = 70, kMaxTokens = 17;

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// Tokens as 16-bit integers.  What the kernels get is derived from them here, not by the kernels.
struct Tokens {
  int64_t k, padded;
  std::vector<int16_t> wide;  // [tokens, padded], zeros from k
  std::vector<int8_t> high, low;
  std::vector<int32_t> sums;  // [tokens, padded / 64]
  std::vector<int64_t> total;
  std::vector<float> scale;

  template <class X>
  Tokens(int64_t k_in, int64_t count, X x) : k(k_in), padded((k_in + 255) / 256 * 256) {
    for (int64_t t = 0; t < count; ++t) {
      int64_t sum = 0;
      for (int64_t i = 0; i < padded; ++i) {
        const int value = i < k ? x(t, i) : 0;
        const int lower = ((value + 128) & 255) - 128;
        wide.push_back(static_cast<int16_t>(value));
        low.push_back(static_cast<int8_t>(lower));
        high.push_back(static_cast<int8_t>((value - lower) / 256));
        if (i % 64 == 0) sums.push_back(0);
        sums.back() += value;
        sum += value;
      }
      total.push_back(sum);
      scale.push_back(0.001f * static_cast<float>(t + 1));
    }
  }
};

// Head codes [rows, k] as they are meant: int8, or -8..7.
template <class Code>
std::vector<int8_t> make_codes(int64_t rows, int64_t k, Code code) {
  std::vector<int8_t> codes;
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t i = 0; i < k; ++i) codes.push_back(static_cast<int8_t>(code(n, i)));
  }
  return codes;
}

class HeadTest {
 public:
  HeadTest() {
    for (int i = 0; i < 7; ++i) arenas_.push_back(std::make_unique<Arena>(std::size_t{3} << 20));
  }

  // The scale of this row, of its first group, is `planted`; -1: none.
  int64_t planted_row = -1;
  float planted = 0;

  void int8(const KernelTable& kernels, const std::vector<int8_t>& codes, const Tokens& tokens,
            int64_t row_begin, int64_t row_end, int64_t count) {
    begin_case("%s head_int8 K=%lld rows %lld..%lld tokens=%lld", kernels.name,
               static_cast<long long>(tokens.k), static_cast<long long>(row_begin),
               static_cast<long long>(row_end), static_cast<long long>(count));
    const std::vector<HeadToken> x = guarded_tokens(tokens, count);
    std::vector<float> scales;
    for (int64_t n = 0; n < row_end; ++n)
      scales.push_back(n == planted_row ? planted : 0.5f + 0.01f * static_cast<float>(n));
    const int8_t* w = arenas_[0]->place_copy(codes.data(), row_end * tokens.k, where());
    const float* s = arenas_[1]->place_copy(scales.data(), row_end, where());
    for (const bool into_l2 : {false, true}) {
      float* out = result(row_end - row_begin, count);
      kernels.head_int8(w, s, tokens.k, row_begin, row_end, x.data(), count, {512, 1024, into_l2},
                        out, stride_);
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t n = row_begin; n < row_end; ++n) {
          const int64_t sum = dot(&codes[at(n * tokens.k)], tokens, t, 0, tokens.k);
          check(out, t, n - row_begin, static_cast<float>(sum) * (scales[at(n)] * x[at(t)].scale));
        }
      }
    }
    CHECK(arenas_[2]->intact(), "wrote outside of out");
  }

  // Bounds hold for the logits, and are above what high bytes give by no more than lengths allow.
  void bound(const KernelTable& kernels, const std::vector<int8_t>& codes, const Tokens& tokens,
             int64_t row_begin, int64_t row_end, int64_t count) {
    begin_case("%s head_bound K=%lld rows %lld..%lld tokens=%lld", kernels.name,
               static_cast<long long>(tokens.k), static_cast<long long>(row_begin),
               static_cast<long long>(row_end), static_cast<long long>(count));
    std::vector<HeadToken> x = guarded_tokens(tokens, count);
    for (HeadToken& token : x) {
      double squares = 0;
      for (int64_t i = 0; i < tokens.k; ++i) {
        token.high_sum += token.high[i];
        squares += int{token.low[i]} * token.low[i];
      }
      token.low_length = static_cast<float>(std::sqrt(squares) * (1 + 1e-7));
    }
    std::vector<float> scales;
    for (int64_t n = 0; n < row_end; ++n)
      scales.push_back(n == planted_row ? planted : n % 3 == 0 ? -0.5f : 0.5f);
    const int8_t* w = arenas_[0]->place_copy(codes.data(), row_end * tokens.k, where());
    const float* s = arenas_[1]->place_copy(scales.data(), row_end, where());
    float* out = result(row_end - row_begin, count);
    kernels.head_bound(w, s, tokens.k, row_begin, row_end, x.data(), count, out, stride_);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t n = row_begin; n < row_end; ++n) {
        double sum = 0, high = 0, squares = 0;
        for (int64_t i = 0; i < tokens.k; ++i) {
          const double code = codes[at(n * tokens.k + i)];
          sum += code * tokens.wide[at(t * tokens.padded + i)];
          high += code * 256 * tokens.high[at(t * tokens.padded + i)];
          squares += code * code;
        }
        const float factor = scales[at(n)] * x[at(t)].scale;
        const float logit = static_cast<float>(sum) * factor,
                    got = out[t * stride_ + n - row_begin];
        const double rest = 1.005 * std::sqrt(squares) * x[at(t)].low_length;
        const double far = high + std::copysign(rest + 2e-6 * std::abs(high), factor);
        CHECK(!(got < logit), "token %d row %d: %a below its logit, %a", static_cast<int>(t),
              static_cast<int>(n), static_cast<double>(got), static_cast<double>(logit));
        CHECK(!(got > static_cast<float>(far * (1 + 1e-6 * (far * factor > 0 ? 1 : -1))) * factor),
              "token %d row %d: %a far above its logit, %a", static_cast<int>(t),
              static_cast<int>(n), static_cast<double>(got), static_cast<double>(logit));
        CHECK(logit == logit || got != got, "token %d row %d: no NaN", static_cast<int>(t),
              static_cast<int>(n));
      }
    }
    CHECK(arenas_[2]->intact(), "wrote outside of out");
  }

  void int4(const KernelTable& kernels, const std::vector<int8_t>& codes, const Tokens& tokens,
            int64_t group, int64_t row_begin, int64_t row_end, int64_t count) {
    begin_case("%s head_int4 K=%lld group=%lld rows %lld..%lld tokens=%lld", kernels.name,
               static_cast<long long>(tokens.k), static_cast<long long>(group),
               static_cast<long long>(row_begin), static_cast<long long>(row_end),
               static_cast<long long>(count));
    const std::vector<HeadToken> x = guarded_tokens(tokens, count);
    const int64_t groups = (tokens.k + group - 1) / group, tiles = (row_end + 15) / 16;
    const std::vector<uint8_t> bytes = pack(codes, tokens.k, row_end, groups * group);
    std::vector<uint16_t> scales;  // bfloat16 numbers between 1 and 2
    for (int64_t i = 0; i < tiles * groups * 16; ++i) {
      const bool here = i / 16 % groups == 0 && i / 16 / groups * 16 + i % 16 == planted_row;
      scales.push_back(here ? static_cast<uint16_t>(std::bit_cast<uint32_t>(planted) >> 16)
                            : static_cast<uint16_t>(0x3f80 + i * 37 % 128));
    }
    const uint8_t* w =
        arenas_[0]->place_copy(bytes.data(), static_cast<int64_t>(bytes.size()), where());
    const uint16_t* s =
        arenas_[1]->place_copy(scales.data(), static_cast<int64_t>(scales.size()), where());
    for (const bool into_l2 : {false, true}) {
      float* out = result(row_end - row_begin, count);
      kernels.head_int4(w, s, groups, group, row_begin, row_end, x.data(), count,
                        {512, 1024, into_l2}, out, stride_);
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t n = row_begin; n < row_end; ++n) {
          float acc = 0;
          for (int64_t g = 0; g < groups; ++g) {
            const int64_t end = std::min((g + 1) * group, tokens.k);
            const int64_t sum = dot(&codes[at(n * tokens.k)], tokens, t, g * group, end);
            const uint32_t scale = scales[at((n / 16 * groups + g) * 16 + n % 16)];
            acc = std::fmaf(static_cast<float>(sum), std::bit_cast<float>(scale << 16), acc);
          }
          check(out, t, n - row_begin, acc * x[at(t)].scale);
        }
      }
    }
    CHECK(arenas_[2]->intact(), "wrote outside of out");
  }

 private:
  static Placement where() { return kPlacements[tally.cases % kPlacementCount]; }

  static int64_t dot(const int8_t* codes, const Tokens& tokens, int64_t t, int64_t begin,
                     int64_t end) {
    const int16_t* x = &tokens.wide[at(t * tokens.padded)];
    int64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += int64_t{codes[i]} * x[i];
    return sum;
  }

  // Line s of a tile: byte 4 r + j is code(8 s + j) + 16 * code(8 s + 4 + j) of row r; padding 8.
  static std::vector<uint8_t> pack(const std::vector<int8_t>& codes, int64_t k, int64_t rows,
                                   int64_t padded_k) {
    std::vector<uint8_t> bytes(at((rows + 15) / 16 * padded_k / 8 * 64), 0x88);
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t i = 0; i < k; ++i) {
        uint8_t& byte = bytes[at((n / 16 * (padded_k / 8) + i / 8) * 64 + 4 * (n % 16) + i % 4)];
        const int code = codes[at(n * k + i)] + 8;
        byte = static_cast<uint8_t>(i % 8 < 4 ? (byte & 0xf0) | code : (byte & 15) | code << 4);
      }
    }
    return bytes;
  }

  // All tokens of one kind of buffer lie in one arena, the last one against its guard page.
  std::vector<HeadToken> guarded_tokens(const Tokens& tokens, int64_t count) {
    const int64_t padded = tokens.padded;
    const auto* wide = arenas_[3]->place_copy(tokens.wide.data(), count * padded, where());
    const auto* high = arenas_[4]->place_copy(tokens.high.data(), count * padded, where());
    const auto* low = arenas_[5]->place_copy(tokens.low.data(), count * padded, where());
    const auto* sums = arenas_[6]->place_copy(tokens.sums.data(), count * padded / 64, where());
    std::vector<HeadToken> x;
    for (int64_t t = 0; t < count; ++t) {
      x.push_back({wide + t * padded, high + t * padded, low + t * padded, sums + t * padded / 64,
                   tokens.total[at(t)], tokens.scale[at(t)]});
    }
    return x;
  }

  float* result(int64_t rows, int64_t count) {
    stride_ = rows + tally.cases % 3;
    const int64_t size = (count - 1) * stride_ + rows;
    float* out = arenas_[2]->place<float>(size, where());
    std::memset(out, 0xee, at(size) * sizeof(float));
    return out;
  }

  void check(const float* out, int64_t t, int64_t n, float want) {
    const float got = out[t * stride_ + n];
    CHECK(got == want || (got != got && want != want), "token %d row %d: %a, not %a",
          static_cast<int>(t), static_cast<int>(n), static_cast<double>(got),
          static_cast<double>(want));
  }

  std::vector<std::unique_ptr<Arena>> arenas_;  // weight, scale, out, wide, high, low, sums
  int64_t stride_ = 0;
};

Tokens random_tokens(Random& random, int64_t k, int64_t count) {
  return Tokens(k, count,
                [&](int64_t, int64_t) { return static_cast<int>(random.below(65025)) - 32512; });
}

void all_counts(HeadTest& test, const KernelTable& kernels) {
  for (const int64_t k : {1, 31, 64, 100, 129, 300}) {
    Random random(static_cast<uint64_t>(k));
    const Tokens tokens = random_tokens(random, k, kMaxTokens);
    const auto bytes = make_codes(kMaxRows, k, [&](auto...) { return random.below(256) - 128; });
    const auto halves = make_codes(kMaxRows, k, [&](auto...) { return random.below(16) - 8; });
    const int64_t step = thinning(kernels) > 1 ? 7 : 1;
    for (int64_t rows = 1; rows <= kMaxRows; rows += step) {
      for (const int64_t count : {1, 2, 3, 4, 5, 9, 17}) {
        test.int8(kernels, bytes, tokens, 0, rows, count);
        test.int4(kernels, halves, tokens, rows % 2 == 0 ? 64 : 128, 0, rows, count);
        test.bound(kernels, bytes, tokens, rows / 3, rows, count);
      }
    }
    for (const int64_t begin : {1, 30, 69}) test.int8(kernels, bytes, tokens, begin, kMaxRows, 5);
    for (const int64_t begin : {16, 64}) test.int4(kernels, halves, tokens, 64, begin, kMaxRows, 5);
  }
}

void all_lengths(HeadTest& test, const KernelTable& kernels) {
  for (const int64_t k : {2,   15,  16,  17,   32,   33,   63,   65,   96,   127,  128,   191,
                          192, 255, 256, 1000, 2560, 4095, 4096, 4097, 4160, 8193, 12345, 32768}) {
    Random random(static_cast<uint64_t>(k));
    const Tokens tokens = random_tokens(random, k, 5);
    // A matrix unit takes 32 rows at once, 33 are one such block and a row; of the longest k that
    // it takes two blocks, so that the second sees whether the first has overwritten the tokens.
    const auto bytes = make_codes(65, k, [&](auto...) { return random.below(256) - 128; });
    const auto halves = make_codes(65, k, [&](auto...) { return random.below(16) - 8; });
    const int64_t few = k > 1000 && thinning(kernels) > 1 ? 2 : k > 5000 ? 17 : 33;
    const int64_t rows = k == 4096 ? 65 : few;
    for (const int64_t count : {1, 2, 5}) {
      test.int8(kernels, bytes, tokens, 0, rows, count);
      test.int4(kernels, halves, tokens, 64, 0, rows, count);
      test.int4(kernels, halves, tokens, 128, 0, rows, count);
      test.bound(kernels, bytes, tokens, 0, rows, count);
    }
  }
}

// Every product of one sign and as large as can be, up to the longest row there may be.
void worst_cases(HeadTest& test, const KernelTable& kernels) {
  for (const int64_t k : {int64_t{4096}, int64_t{32768}, layout::kHeadMaxK}) {
    // 32512 = 256 * 127; 32385 has the largest low half beside a high one of 126, 32384 the lowest.
    for (const int x : {32512, -32512, 32511, -32511, 32384, 32383, -32385, 127, -128}) {
      const Tokens tokens(k, 4, [&](int64_t, int64_t) { return x; });
      for (const int code : {127, -128}) {
        const auto codes = make_codes(2, k, [&](auto...) { return code; });
        for (const int64_t count : {1, 4}) {
          test.int8(kernels, codes, tokens, 0, 2, count);
          test.bound(kernels, codes, tokens, 0, 2, count);
        }
      }
      for (const int code : {7, -8}) {
        const auto codes = make_codes(2, k, [&](auto...) { return code; });
        for (const int64_t count : {1, 4}) test.int4(kernels, codes, tokens, 128, 0, 2, count);
      }
    }
  }
}

// Values planted into the scale of a token and of a row.
void planted_scales(HeadTest& test, const KernelTable& kernels) {
  Random random(3);
  const auto codes = make_codes(36, 200, [&](auto...) { return random.below(16) - 8; });
  for (const int64_t count : {3, 5, 17}) {  // with and without a matrix unit
    for (const float value : kPlanted) {
      Tokens tokens = random_tokens(random, 200, count);
      tokens.scale[2] = test.planted = value;
      for (const int64_t row : {1, 35}) {
        test.planted_row = row;
        test.int8(kernels, codes, tokens, 0, 36, count);
        test.bound(kernels, codes, tokens, 0, 36, count);
        for (const int64_t group : {64, 128})
          test.int4(kernels, codes, tokens, group, 0, 36, count);
      }
    }
  }
  test.planted_row = -1;
}

// A token's integers are what it is worth: wide = 256 high + low, |wide| <= 32512, x within half a
// step, and NaN for a poisoned one.
void quantised_tokens(const KernelTable& kernels) {
  for (const Flavour flavour : kFlavours) {
    for (const int64_t k : {1, 100, 2560}) {
      begin_case("%s head_quantize_token k=%d %s", kernels.name, static_cast<int>(k),
                 name_of(flavour));
      Random random(static_cast<uint64_t>(k));
      const std::vector<float> x = random_floats(random, flavour, k);
      const int64_t padded = layout::head_padded_k(k);
      std::vector<int16_t> wide(at(padded));
      std::vector<int8_t> high(at(padded)), low(at(padded));
      std::vector<int32_t> sums(at(padded / 64));
      const float scale = kernels.head_quantize_token(x.data(), k, padded, wide.data(), high.data(),
                                                      low.data(), sums.data());
      const bool finite = std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
      CHECK(finite == (scale == scale), "scale %g", static_cast<double>(scale));
      int32_t sum = 0;
      for (int64_t i = 0; i < padded; ++i) {
        const int w = wide[at(i)];
        CHECK(w == 256 * high[at(i)] + low[at(i)], "feature %d", static_cast<int>(i));
        CHECK(std::abs(w) <= 32512, "feature %d", static_cast<int>(i));
        sum += w;
        if (i % 64 == 63) {
          CHECK(sums[at(i / 64)] == sum, "sum %d", static_cast<int>(i / 64));
          sum = 0;
        }
        const double want = finite && i < k ? static_cast<double>(x[at(i)]) : 0.0;
        // Half a step, and the roundings of the factor and of the product.
        const double step = finite ? static_cast<double>(scale) : 1.0;
        CHECK(std::fabs(w * step - want) <= step * 0.51, "feature %d", static_cast<int>(i));
      }
    }
  }
}

TEST(all_counts) {
  HeadTest test;
  for (const KernelTable* kernels : tables_under_test()) all_counts(test, *kernels);
}

TEST(all_lengths) {
  HeadTest test;
  for (const KernelTable* kernels : tables_under_test()) all_lengths(test, *kernels);
}

TEST(worst_cases) {
  HeadTest test;
  for (const KernelTable* kernels : tables_under_test()) worst_cases(test, *kernels);
}

TEST(planted_scales) {
  HeadTest test;
  for (const KernelTable* kernels : tables_under_test()) planted_scales(test, *kernels);
}

TEST(quantised_tokens) { on_every_table(quantised_tokens); }

}  // namespace
}  // namespace bitnet::test
