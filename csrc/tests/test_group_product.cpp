// Products with scales of groups against int64 sums and one std::fma a group: every layout, ISA and
// ActivationFormat, scales of rows and beside row blocks, ragged rows, tokens and K, every way to
// store a result, and the sums that overflow first.  The reference quantises by itself.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/pack.h"
#include "engine/products/product.h"
#include "format/layout.h"
#include "tests/check.h"
#include "tests/random.h"
#include "tests/tables.h"
#include "tests/threads.h"

namespace bitnet::test {
namespace {

using engine::ActivationFormat;
using engine::Product;
using engine::Projection;
using engine::TokenBuffer;
using engine::Weight;
using engine::WeightFormat;

constexpr ActivationFormat kActivations[] = {ActivationFormat::kInt8, ActivationFormat::kInt8Group,
                                             ActivationFormat::kInt16Group};

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// A matrix in one layout, the codes it was made of, and its scales in both forms.
struct Matrix {
  int64_t n, k, group, groups;  // weights of a group, and how many of them a row has
  std::vector<int8_t> codes;    // [n, k]
  std::vector<float> scales;    // [n, groups], all of them float16 numbers
  std::vector<uint8_t> canonical, tiles;
  std::vector<float> blocked;       // [row_blocks, groups, block_rows]
  std::vector<uint16_t> blocked16;  // the same
  Weight weight;

  template <class Code>
  Matrix(Random& random, const KernelTable& kernels, WeightFormat format, int64_t n_rows,
         int64_t columns, int64_t group_weights, Code code)
      : n(n_rows),
        k(columns),
        group(group_weights),
        groups((k + group - 1) / group),
        canonical(at(n * layout::row_bytes_for(k))) {
    for (int64_t i = 0; i < n * k; ++i) codes.push_back(static_cast<int8_t>(code(i / k, i % k)));
    for (int64_t i = 0; i < n * groups; ++i) {
      // ten bits of fraction, the smallest normal numbers of float16 and subnormal ones among them
      const auto bits = static_cast<float>(1 + random.next() % 1023);
      scales.push_back(std::ldexp(bits, -static_cast<int>(random.next() % 25)));
    }
    engine::pack(codes.data(), n, k, canonical.data());
    weight = engine::canonical_weight(canonical.data(), n, k);
    if (format == WeightFormat::kCanonical) return;
    weight = engine::tile_weight(nullptr, format, n, k, kernels.tile_lanes);
    tiles.resize(at(weight.bytes()));
    weight.data = tiles.data();
    CHECK(engine::repack(canonical.data(), weight, kernels.tile_lanes, tiles.data()), "code 3");
    const int64_t rows = weight.block_rows;
    for (int64_t i = 0; i < weight.row_blocks * groups * rows; ++i) {
      const int64_t row = i / (groups * rows) * rows + i % rows, g = i / rows % groups;
      blocked.push_back(row < n ? scales[at(row * groups + g)] : 0.0f);
      uint16_t half = 0;
      scalar_kernels().store_row(DType::kF16, &blocked.back(), 1, &half);
      blocked16.push_back(half);
    }
  }

  std::vector<engine::GroupScales> forms() const {
    std::vector<engine::GroupScales> all = {{scales.data(), DType::kF32, false, group}};
    if (weight.format == WeightFormat::kCanonical) return all;
    all.push_back({blocked.data(), DType::kF32, true, group});
    all.push_back({blocked16.data(), DType::kF16, true, group});
    return all;
  }
};

// What a token's features become: integers and what one of them is worth.
struct Quantized {
  std::vector<int64_t> codes;
  std::vector<float> worth;  // of every group, or one for all
};

// round_half_even(v * (limit / a)), a = the largest magnitude, at least 1e-30 or 1e-5.  The order
// of the float32 operations is the definition's.
void quantize_part(const float* x, int64_t count, ActivationFormat format, Quantized& q) {
  float max = 0;
  for (int64_t i = 0; i < count; ++i) max = std::max(max, std::fabs(x[i]));
  float factor, worth;
  if (format == ActivationFormat::kInt16Group) {
    max = std::max(max, 1e-30f);
    factor = 32512.0f / max;
    worth = max / 32512.0f;
  } else {
    factor = 127.0f * (1.0f / std::max(max, 1e-5f));
    worth = 1.0f / factor;
  }
  for (int64_t i = 0; i < count; ++i) {
    q.codes.push_back(static_cast<int64_t>(std::nearbyint(x[i] * factor)));
  }
  q.worth.push_back(worth);
}

Quantized quantized(const float* x, int64_t k, int64_t group, ActivationFormat format) {
  Quantized q;
  const int64_t part = format == ActivationFormat::kInt8 ? k : group;
  for (int64_t from = 0; from < k; from += part) {
    quantize_part(x + from, std::min(part, k - from), format, q);
  }
  return q;
}

float expected(const Matrix& w, const Quantized& x, int64_t n) {
  const bool token_scale = x.worth.size() == 1 && w.groups > 1;
  float y = 0;
  for (int64_t g = 0; g < w.groups; ++g) {
    int64_t sum = 0;
    for (int64_t i = g * w.group; i < std::min((g + 1) * w.group, w.k); ++i) {
      sum += int64_t{w.codes[at(n * w.k + i)]} * x.codes[at(i)];
    }
    const float scale = w.scales[at(n * w.groups + g)];
    y = std::fma(static_cast<float>(sum), token_scale ? scale : scale * x.worth[at(g)], y);
  }
  return token_scale ? y * x.worth[0] : y;
}

float rounded(DType type, float v) {
  char memory[4];
  scalar_kernels().store_row(type, &v, 1, memory);
  scalar_kernels().load_row(type, memory, 1, &v);
  return v;
}

// One group and one scale a token are the definition of the int8 format too: there the scale comes
// last.
float answer(const Matrix& w, const Quantized& x, ActivationFormat format, int64_t n) {
  if (format != ActivationFormat::kInt8 || w.groups > 1) return expected(w, x, n);
  Quantized plain = x;
  plain.worth[0] = 1.0f;
  return expected(w, plain, n) * x.worth[0];
}

void check_product(const KernelTable& kernels, const Matrix& w, const engine::GroupScales& scales,
                   ActivationFormat format, const std::vector<float>& x, int64_t tokens,
                   Random& random) {
  TokenBuffer buffer(kernels, tokens, w.k, w.group, format);
  buffer.quantize(kernels, x.data(), DType::kF32);
  std::vector<float> bias(at(w.n));
  for (float& b : bias) b = random.unit();
  std::vector<float> before(at(tokens * w.n));
  for (float& b : before) b = random.unit();
  std::vector<float> want(before.size());
  for (int64_t m = 0; m < tokens; ++m) {
    const Quantized q = quantized(x.data() + m * w.k, w.k, w.group, format);
    for (int64_t n = 0; n < w.n; ++n) want[at(m * w.n + n)] = answer(w, q, format, n);
  }
  struct Way {
    StoreKind kind;
    DType type;
    bool biased;
  };
  for (const Way way :
       {Way{StoreKind::kStore, DType::kF32, false}, Way{StoreKind::kRound, DType::kBF16, true},
        Way{StoreKind::kAdd, DType::kF32, false}}) {
    std::vector<float> out = before;
    Projection p{&w.weight,
                 nullptr,
                 0,
                 way.biased ? bias.data() : nullptr,
                 {way.kind, way.type, out.data(), w.n * 4},
                 scales};
    // by tables of sums where rows and tokens are enough
    const ProductShape shape = engine::shape_of(&p, 1, tokens, buffer.view().planes());
    const Product product(kernels, buffer.view(), &p, 1, engine::plan_product(kernels, shape, 1));
    const int64_t middle = product.units() / 3;
    product.run(middle, product.units());
    product.run(0, middle);
    for (int64_t i = 0; i < tokens * w.n; ++i) {
      float y = way.biased ? want[at(i)] + bias[at(i % w.n)] : want[at(i)];
      y = rounded(way.type, y);
      if (way.kind == StoreKind::kAdd) y = before[at(i)] + y;
      CHECK(out[at(i)] == y, "way %d row %d token %d: %a, expected %a", static_cast<int>(way.kind),
            static_cast<int>(i % w.n), static_cast<int>(i / w.n), static_cast<double>(out[at(i)]),
            static_cast<double>(y));
    }
  }
}

void check_size(const KernelTable& kernels, int64_t n, int64_t k, int64_t tokens, int64_t group) {
  Random random(static_cast<uint64_t>(n * 1000 + k + tokens + group));
  std::vector<float> x(at(tokens * k));
  for (float& v : x) v = random.unit() * std::ldexp(1.0f, static_cast<int>(random.next() % 8));
  for (const WeightFormat format : layout::kWeightFormats) {
    const Matrix w(random, kernels, format, n, k, group,
                   [&](int64_t, int64_t) { return static_cast<int>(random.next() % 3) - 1; });
    for (const ActivationFormat activations : kActivations) {
      for (const engine::GroupScales& scales : w.forms()) {
        begin_case(
            "%s format %d, %dx%d, %d tokens, activations %d, groups of %d, blocked %d type %d",
            kernels.name, static_cast<int>(format), static_cast<int>(n), static_cast<int>(k),
            static_cast<int>(tokens), static_cast<int>(activations), static_cast<int>(group),
            scales.blocked, static_cast<int>(scales.type));
        check_product(kernels, w, scales, activations, x, tokens, random);
      }
    }
  }
}

// All weights of one sign meet the largest codes of one sign, and signs that swing.
void worst_cases(const KernelTable& kernels, int64_t group, int64_t n, int64_t tokens) {
  const int64_t k = 384;
  Random random(9);
  for (const int sign : {-1, 1}) {
    std::vector<float> x(at(tokens * k));
    for (int64_t i = 0; i < tokens * k; ++i) {
      const bool turned = i % k >= 128 && i % 64 < 32;
      x[at(i)] = static_cast<float>(turned ? -sign : sign) * 3.0f;
    }
    for (const WeightFormat format : layout::kWeightFormats) {
      const Matrix w(random, kernels, format, n, k, group, [](int64_t row, int64_t i) {
        return row % 3 == 2 && i % 64 < 32 ? -1 : row % 3 == 1 ? -1 : 1;
      });
      for (const ActivationFormat activations : kActivations) {
        begin_case("%s worst case, format %d, activations %d", kernels.name,
                   static_cast<int>(format), static_cast<int>(activations));
        check_product(kernels, w, w.forms().back(), activations, x, tokens, random);
      }
    }
  }
}

// The same table for a CPU that takes the plainest row for every product of tiles; one at a time.
KernelTable plainest(const KernelTable& kernels) {
  static ProductAlgorithm rows[kMaxProducts];
  KernelTable other = kernels;
  other.choices = nullptr;
  rows[0] = *engine::find_algorithm(kernels, "direct");
  rows[1] = *engine::find_algorithm(kernels, "canonical");
  other.products = rows;
  return other;
}

// A NaN or an infinity makes its own token NaN and no other.
void not_finite(const KernelTable& kernels) {
  const int64_t k = 300, n = 20, tokens = 3;
  Random random(4);
  const Matrix w(random, kernels, WeightFormat::kTwoBit, n, k, 128,
                 [](int64_t row, int64_t i) { return static_cast<int>((row + i) % 3) - 1; });
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(at(tokens * k), 1.0f), out(at(tokens * n));
    x[at(k + 299)] = bad;
    for (const ActivationFormat activations : kActivations) {
      begin_case("%s not finite, activations %d", kernels.name, static_cast<int>(activations));
      TokenBuffer buffer(kernels, tokens, k, w.group, activations);
      buffer.quantize(kernels, x.data(), DType::kF32);
      const Projection p{
          &w.weight,       nullptr, 0, nullptr, {StoreKind::kStore, DType::kF32, out.data(), n * 4},
          w.forms().back()};
      const Product product(kernels, buffer.view(), &p, 1);
      product.run(0, product.units());
      for (int64_t i = 0; i < tokens * n; ++i) {
        CHECK(std::isnan(out[at(i)]) == (i / n == 1), "token %d row %d", static_cast<int>(i / n),
              static_cast<int>(i % n));
      }
    }
  }
}

// Every table, and the same for CPUs that make other choices.
template <class F>
void for_tables(const F& f) {
  use_plain_threads();
  for (const KernelTable* plain : tables_under_test()) {
    const KernelTable copy = *plain, other = plainest(copy);
    f(copy);
    f(other);
  }
}

TEST(every_size) {
  for_tables([](const KernelTable& kernels) {
    for (const int64_t group : {128, 64}) {
      for (const int64_t tokens : {1, 2, 3, 5, 6, 17, 66}) {
        if (thinning(kernels) > 1 && tokens > 6) continue;
        check_size(kernels, 150, 200, tokens, group);
      }
      check_size(kernels, 1, 1, 6, group);
      check_size(kernels, 33, 128, 2, group);
      check_size(kernels, 260, 64, 9, group);
      check_size(kernels, 97, 4400, 3, group);  // more groups than are gathered at once
      // as many rows as tables of sums are built for, in two parts; blocks of tokens that are not
      // full
      if (thinning(kernels) > 1 && group != 128) continue;
      if (left_to_the_night(kernels) && !has_tables(kernels)) continue;
      check_size(kernels, 1100, 72, 33, group);
      if (thinning(kernels) == 1) {
        check_size(kernels, 1100, 140, 18, group);
        check_size(kernels, 1100, 72, 75, group);
      }
      check_size(kernels, 290, 200, 16, group);
      check_size(kernels, 270, 64, 70, group);
    }
  });
}

// Where memory for tables of sums cannot be had: the same results, multiplied.
TEST(without_memory) {
  if (kSanitized) return not_here("an allocator that may fail");
  use_plain_threads();
  on_tables_of_sums([](const KernelTable& kernels) {
    const KernelTable starved = without_scratch(kernels);
    if (thinning(kernels) == 1) check_size(starved, 1100, 72, 140, 128);
    check_size(starved, 300, 72, 40, 128);
  });
}

TEST(worst_cases) {
  for_tables([](const KernelTable& kernels) {
    for (const int64_t group : {128, 64}) {
      worst_cases(kernels, group, 90, 7);
      if (thinning(kernels) == 1 && group == 128) worst_cases(kernels, group, 1050, 32);
    }
  });
}

TEST(not_finite) { for_tables(not_finite); }

}  // namespace
}  // namespace bitnet::test
