// Whole products on every table against plain int64 sums: every layout, scales of rows and of
// groups, all small numbers of tokens, odd numbers of rows, the widths of models, and data whose
// sums are as large as they can be. Every result is an integer that a float holds, so that "equal"
// is all there is to say. BITNET_TEST_SWEEP=all, or the name of one table, takes every size
// (minutes) where the suite takes samples (seconds).
#include <algorithm>
#include <cstdlib>
#include <string>
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

using engine::Product;
using engine::Projection;
using engine::TokenBuffer;
using engine::Weight;
using engine::WeightFormat;

constexpr int64_t kMaxRows = 131;
constexpr int64_t kGroups[] = {64, 128};
// How many kinds of weight rows and of tokens there are; prime to each other and to the rows of any
// tile, so that every kind meets every other one and every lane.
constexpr int64_t kRowKinds = 11, kTokenKinds = 9;

// The environment names the table that takes every size, or all of them.
bool sweeping(const KernelTable& kernels) {
  const char* name = std::getenv("BITNET_TEST_SWEEP");
  return name != nullptr && (std::string(name) == "all" || std::string(name) == kernels.name);
}

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// +1 or -1, changing sign every `run` features.
int64_t sign(int64_t i, int64_t run) { return i / run % 2 == 0 ? 1 : -1; }

// Weight i of row n: all of one sign, signs in runs of a word, a field, a group, a block, a flush
// of partial sums, and anything.
int8_t code_of(int64_t n, int64_t i, Random& random) {
  constexpr int64_t kRuns[] = {1, 4, 32, 64, 128, 2048};
  const int64_t kind = n % kRowKinds;
  if (kind < 3) return static_cast<int8_t>(1 - kind);
  if (kind < 9) return static_cast<int8_t>(sign(i, kRuns[kind - 3]));
  return static_cast<int8_t>(random.below(3) - 1);
}

// Likewise feature i of token m, as far as int8 goes on either side.
int8_t feature_of(int64_t m, int64_t i, Random& random) {
  constexpr int64_t kRuns[] = {1, 32, 64, 128};
  const int64_t kind = m % kTokenKinds;
  if (kind == 0) return 127;
  if (kind == 1) return -128;
  if (kind == 2) return -127;
  if (kind < 7) return sign(i, kRuns[kind - 3]) > 0 ? int8_t{127} : int8_t{-128};
  return static_cast<int8_t>(random.below(256) - 128);
}

// The scale of a group: 1 or 2, so that sums of scaled groups are integers of at most 24 bits.
int64_t scale_of(int64_t n, int64_t g) { return 1 + (n * 7 + g * 5 + n * g) % 3 % 2; }

// Weights and tokens of one width, and what every product of them is.
struct Data {
  int64_t k, tokens;
  std::vector<int8_t> codes, x;                             // [kMaxRows, k], [tokens, k]
  std::vector<int64_t> plain, grouped[std::size(kGroups)];  // [tokens, kMaxRows]

  Data(int64_t features, int64_t max_tokens) : k(features), tokens(max_tokens) {
    Random random(static_cast<uint64_t>(k));
    for (int64_t n = 0; n < kMaxRows; ++n) {
      for (int64_t i = 0; i < k; ++i) codes.push_back(code_of(n, i, random));
    }
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t i = 0; i < k; ++i) x.push_back(feature_of(m, i, random));
    }
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t n = 0; n < kMaxRows; ++n) add_up(m, n);
    }
    CHECK(plain[0] == 127 * k && plain[2] == -127 * k && plain[kMaxRows] == -128 * k,
          "the reference itself is wrong");
  }

 private:
  void add_up(int64_t m, int64_t n) {
    int64_t sum = 0, scaled[2] = {};
    for (int64_t from = 0; from < k; from += 64) {
      int64_t part = 0;
      for (int64_t i = from; i < std::min(from + 64, k); ++i) {
        part += int64_t{codes[at(n * k + i)]} * x[at(m * k + i)];
      }
      sum += part;
      for (int s = 0; s < 2; ++s) scaled[s] += scale_of(n, from / kGroups[s]) * part;
    }
    plain.push_back(sum);
    for (int s = 0; s < 2; ++s) grouped[s].push_back(scaled[s]);
  }
};

// The first n rows in one layout, with their scales of groups as the kernels of that layout read
// them.
struct Matrix {
  int64_t n;
  std::vector<uint8_t> canonical, tiles;
  Weight weight;
  std::vector<float> scales[std::size(kGroups)];

  Matrix(const KernelTable& kernels, WeightFormat format, const Data& data, int64_t rows)
      : n(rows), canonical(at(n * layout::row_bytes_for(data.k))) {
    engine::pack(data.codes.data(), n, data.k, canonical.data());
    weight = engine::canonical_weight(canonical.data(), n, data.k);
    if (format != WeightFormat::kCanonical) {
      weight = engine::tile_weight(nullptr, format, n, data.k, kernels.tile_lanes);
      tiles.resize(at(weight.bytes()));
      weight.data = tiles.data();
      CHECK(engine::repack(canonical.data(), weight, kernels.tile_lanes, tiles.data()), "code 3");
    }
    for (std::size_t s = 0; s < std::size(kGroups); ++s) {
      const int64_t groups = engine::groups_for(data.k, kGroups[s]);
      const int64_t block = blocked() ? weight.block_rows : n;
      const int64_t blocks = blocked() ? weight.row_blocks : 1;
      for (int64_t i = 0; i < blocks * groups * block; ++i) {
        const int64_t row = blocked() ? i / (groups * block) * block + i % block : i / groups;
        const int64_t g = blocked() ? i / block % groups : i % groups;
        scales[s].push_back(row < n ? static_cast<float>(scale_of(row, g)) : 0.0f);
      }
    }
  }
  bool blocked() const { return weight.format != WeightFormat::kCanonical; }
};

// Runs every unit once, in pieces of many sizes taken from either end.
void run_in_pieces(const Product& product) {
  int64_t begin = 0, end = product.units();
  for (int64_t turn = tally.cases; begin < end; ++turn) {
    const int64_t piece = std::min(1 + turn % 5 * (turn % 5), end - begin);
    if (turn % 2 == 0) {
      product.run(begin, begin + piece);
      begin += piece;
    } else {
      product.run(end - piece, end);
      end -= piece;
    }
  }
}

// What is made of the sums: stored, finished as floats, likewise from three parts of K, of groups.
enum class Kind { kSums, kFloats, kParts, kGroups64, kGroups128 };
constexpr Kind kKinds[] = {Kind::kSums, Kind::kFloats, Kind::kParts, Kind::kGroups64,
                           Kind::kGroups128};

// Parts of K are those of tiles, and at least 192 features on a matrix unit.
bool has_kind(const Matrix& w, Kind kind) {
  return kind != Kind::kParts || (w.blocked() && w.weight.k >= 3 * 192);
}

// The product cut for many threads, a part of K at a time.
void run_in_parts(const KernelTable& kernels, const TokenBuffer& buffer, const Projection& p) {
  constexpr int64_t kParts = 3, kTokens = 32;
  const int64_t token_blocks = (buffer.view().tokens + kTokens - 1) / kTokens;
  const int64_t cells = p.weight->row_blocks * token_blocks;
  std::vector<int32_t> sums(at(cells * kParts * kTokens * p.weight->block_rows), 77);
  std::vector<int32_t> done(at(cells), 0);
  run_in_pieces(Product(kernels, buffer.view(), &p, 1,
                        {.token_blocks = token_blocks, .k_parts = kParts},
                        {sums.data(), done.data()}));
}

template <class T>
void compare(const std::vector<T>& out, const std::vector<int64_t>& want, int64_t n,
             int64_t first) {
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    const int64_t m = first + i / n, expected = want[at(m * kMaxRows + i % n)];
    CHECK(out[at(i)] == static_cast<T>(expected), "token %d row %d: %lld, not %lld",
          static_cast<int>(m), static_cast<int>(i % n), static_cast<long long>(out[at(i)]),
          static_cast<long long>(expected));
  }
}

// The tokens [first, first + tokens) of the data.
void check(const KernelTable& kernels, const Data& data, const Matrix& w, Kind kind, int64_t first,
           int64_t tokens) {
  begin_case("%s format %d kind %d, %dx%d, %d tokens from %d", kernels.name,
             static_cast<int>(w.weight.format), static_cast<int>(kind), static_cast<int>(w.n),
             static_cast<int>(data.k), static_cast<int>(tokens), static_cast<int>(first));
  const bool grouped = kind == Kind::kGroups64 || kind == Kind::kGroups128;
  const std::size_t size = kind == Kind::kGroups128 ? 1 : 0;
  TokenBuffer buffer(kernels, tokens, data.k, grouped ? kGroups[size] : 0,
                     engine::ActivationFormat::kInt8, w.weight.reads_rows());
  const std::vector<float> ones(at(tokens), 1.0f);
  buffer.copy_quantized(kernels, data.x.data() + first * data.k, ones.data());
  if (grouped) {
    for (int64_t m = 0; m < tokens; ++m) buffer.view().sum_groups(kernels, m);
  }
  if (kind == Kind::kSums) {
    std::vector<int32_t> out(at(tokens * w.n), 77);
    const Projection p = engine::make_sums(w.weight, out.data());
    run_in_pieces(Product(kernels, buffer.view(), &p, 1));
    return compare(out, data.plain, w.n, first);
  }
  std::vector<float> out(at(tokens * w.n), -0.5f);
  Projection p = engine::make_projection(w.weight, ones.data(), 1, DType::kF32, out.data());
  if (grouped) p.scale = nullptr;
  if (grouped) p.groups = {w.scales[size].data(), DType::kF32, w.blocked(), kGroups[size]};
  if (kind == Kind::kParts) {
    run_in_parts(kernels, buffer, p);
  } else {
    run_in_pieces(Product(kernels, buffer.view(), &p, 1));
  }
  compare(out, grouped ? data.grouped[size] : data.plain, w.n, first);
}

// Which sizes a run takes.
struct Sizes {
  std::vector<int64_t> k, rows, tokens;
  bool every_start = false;  // few tokens begin with each of their kinds in turn
};

std::vector<Sizes> sizes_for(const KernelTable& kernels) {
  if (sweeping(kernels)) {
    Sizes all{{192, 2560, 6912, 11008, 32768}, {1, 47, kMaxRows}, {}, true};
    for (int64_t m = 1; m <= 64; ++m) all.tokens.push_back(m);
    all.tokens.insert(all.tokens.end(), {128, 512});
    return {all};
  }
  if (thinning(kernels) > 1) return {{{192, 2560}, {33}, {1, 4, 18}}};
  return {{{192}, {5, 85, kMaxRows}, {1, 2, 3, 4, 5, 7, 9, 16, 17, 33, 64}},
          {{11008}, {85}, {1, 4, 18}}};
}

// Up to 16 tokens every kind of result has every number of rows, then one of them in turn.
void check_sizes(const KernelTable& kernels, const Data& data, const Sizes& sizes) {
  for (const WeightFormat format : layout::kWeightFormats) {
    std::vector<Matrix> matrices;
    for (const int64_t n : sizes.rows) matrices.emplace_back(kernels, format, data, n);
    for (const int64_t tokens : sizes.tokens) {
      const int64_t starts = sizes.every_start && tokens < kTokenKinds ? kTokenKinds : 1;
      for (const Kind kind : kKinds) {
        const std::size_t turn = at(tokens + static_cast<int64_t>(kind)) % matrices.size();
        for (std::size_t i = 0; i < matrices.size(); ++i) {
          if ((tokens > 16 && i != turn) || !has_kind(matrices[i], kind)) continue;
          for (int64_t first = 0; first < starts; ++first) {
            check(kernels, data, matrices[i], kind, first, tokens);
          }
        }
      }
    }
  }
}

// f(index of a table, its sizes) for all that have this width.
template <class F>
void for_sizes(const std::vector<const KernelTable*>& tables, int64_t k, const F& f) {
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const Sizes& sizes : sizes_for(*tables[i])) {
      if (std::ranges::find(sizes.k, k) != sizes.k.end()) f(i, sizes);
    }
  }
}

// Widths outermost, as their answers take longest; says at the end how much each table was asked.
void sweep(const std::vector<const KernelTable*>& tables) {
  std::vector<int64_t> widths, cases(tables.size());
  for (const KernelTable* kernels : tables) {
    for (const Sizes& sizes : sizes_for(*kernels)) {
      widths.insert(widths.end(), sizes.k.begin(), sizes.k.end());
    }
  }
  std::ranges::sort(widths);
  widths.erase(std::unique(widths.begin(), widths.end()), widths.end());
  for (const int64_t k : widths) {
    int64_t max = 0;
    for_sizes(tables, k, [&](std::size_t, const Sizes& sizes) {
      max = std::max({max, 2 * kTokenKinds, std::ranges::max(sizes.tokens)});
    });
    const Data data(k, max);
    for_sizes(tables, k, [&](std::size_t i, const Sizes& sizes) {
      const int64_t before = tally.cases;
      check_sizes(*tables[i], data, sizes);
      cases[i] += tally.cases - before;
    });
  }
  for (std::size_t i = 0; i < tables.size(); ++i) {
    std::printf("%s: %lld products%s\n", tables[i]->name, static_cast<long long>(cases[i]),
                sweeping(*tables[i]) ? ", every size" : "");
  }
}

TEST(every_kind) {
  use_plain_threads();
  sweep(tables_under_test());
}

}  // namespace
}  // namespace bitnet::test
