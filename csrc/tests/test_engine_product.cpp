// The engine's product against plain int64 sums and one rounding a step: every layout and ISA,
// ragged rows and tokens, every way to store a result, units in any order, tokens in tiles as well
// as in rows, on threads.
#include <algorithm>
#include <cstring>
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

using engine::make_sums;
using engine::Product;
using engine::ProductPlan;
using engine::Projection;
using engine::QuantizedTokens;
using engine::TokenBuffer;
using engine::Weight;
using engine::WeightFormat;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// A random matrix in one layout, and the codes that it was made of.
struct Matrix {
  std::vector<int8_t> codes;  // [n, k]
  std::vector<uint8_t> canonical, tiles;
  Weight weight;

  Matrix(Random& random, const KernelTable& kernels, WeightFormat format, int64_t n, int64_t k)
      : canonical(at(n * layout::row_bytes_for(k))) {
    for (int64_t i = 0; i < n * k; ++i) codes.push_back(static_cast<int8_t>(random.next() % 3) - 1);
    engine::pack(codes.data(), n, k, canonical.data());
    weight = engine::canonical_weight(canonical.data(), n, k);
    if (format == WeightFormat::kCanonical) return;
    const int64_t lanes = kernels.tile_lanes;
    weight = engine::tile_weight(nullptr, format, n, k, lanes);
    tiles.resize(at(weight.bytes()));
    weight.data = tiles.data();
    CHECK(engine::repack(canonical.data(), weight, lanes, tiles.data()), "repack found a code 3");
  }
};

// Quantised tokens, their codes kept for the reference.
struct Tokens {
  std::vector<int8_t> codes;  // [tokens, k]
  std::vector<float> scales;
  TokenBuffer buffer;

  // row_major: canonical weights read them
  Tokens(Random& random, const KernelTable& kernels, int64_t tokens, int64_t k,
         bool row_major = false)
      : buffer(kernels, tokens, k, 0, engine::ActivationFormat::kInt8, row_major) {
    std::vector<float> x(at(tokens * k));
    for (float& v : x) v = random.unit();
    buffer.quantize(kernels, x.data(), DType::kF32);
    codes.resize(x.size());
    for (int64_t m = 0; m < tokens; ++m) {
      int32_t sum;
      scales.push_back(scalar_kernels().quantize_row(x.data() + m * k, k, k, codes.data() + m * k,
                                                     kTokenStep, &sum));
      CHECK(sum == buffer.view().sums[m], "sum of token %d", static_cast<int>(m));
    }
  }
};

int32_t dot(const Matrix& w, const Tokens& x, int64_t n, int64_t m, int64_t from, int64_t end) {
  int64_t sum = 0;
  for (int64_t i = from; i < std::min(end, w.weight.k); ++i) {
    sum += int64_t{w.codes[at(n * w.weight.k + i)]} * x.codes[at(m * w.weight.k + i)];
  }
  return static_cast<int32_t>(sum);
}

float rounded(DType type, float v) {
  char memory[4];
  scalar_kernels().store_row(type, &v, 1, memory);
  scalar_kernels().load_row(type, memory, 1, &v);
  return v;
}

// What the projection makes of row n and token m, as a float of its type.
float expected(const Matrix& w, const Tokens& x, const Projection& p, int64_t n, int64_t m) {
  const int64_t k = w.weight.k;
  const float scale = p.scale[p.scale_step * n] * x.scales[at(m)];
  float y = static_cast<float>(dot(w, x, n, m, 0, k)) * scale;
  if (p.bias != nullptr) y += p.bias[n];
  return rounded(p.out.type, y);
}

// Runs every unit once, in pieces of random size taken from either end.
void run_in_pieces(Random& random, const Product& product) {
  int64_t begin = 0, end = product.units();
  while (begin < end) {
    const auto size = static_cast<int64_t>(random.next() % 7) + 1;
    const int64_t piece = std::min(size * size, end - begin);
    if (random.next() % 2 == 0) {
      product.run(begin, begin + piece);
      begin += piece;
    } else {
      product.run(end - piece, end);
      end -= piece;
    }
  }
}

std::vector<float> random_floats(Random& random, int64_t n) {
  std::vector<float> values(at(n));
  for (float& v : values) v = random.unit() + 0.25f;
  return values;
}

// All rows of `out` that the projection should have written, and that nothing else was.
void check_stored(const Matrix& w, const Tokens& x, const Projection& p,
                  const std::vector<float>& before, const std::vector<float>& out) {
  const int64_t n_rows = w.weight.n_rows;
  std::vector<float> want = before;
  for (std::size_t i = 0; i < x.scales.size(); ++i) {
    const auto m = static_cast<int64_t>(i);
    for (int64_t n = 0; n < n_rows; ++n) {
      float& y = want[at(m * n_rows + n)];
      const float v = expected(w, x, p, n, m);
      y = p.out.kind == StoreKind::kAdd ? y + v : v;
    }
  }
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    CHECK(out[at(i)] == want[at(i)], "row %d token %d: %a, expected %a",
          static_cast<int>(i % n_rows), static_cast<int>(i / n_rows),
          static_cast<double>(out[at(i)]), static_cast<double>(want[at(i)]));
  }
}

void check_sums(const Matrix& w, const Tokens& x, const KernelTable& kernels, Random& random) {
  const int64_t n_rows = w.weight.n_rows, tokens = x.buffer.view().tokens;
  std::vector<int32_t> sums(at(tokens * n_rows), 77);
  const Projection p = make_sums(w.weight, sums.data());
  run_in_pieces(random, Product(kernels, x.buffer.view(), &p, 1));
  for (int64_t i = 0; i < tokens * n_rows; ++i) {
    CHECK(sums[at(i)] == dot(w, x, i % n_rows, i / n_rows, 0, w.weight.k), "sum %d",
          static_cast<int>(i));
  }
}

// Stored as a type of two bytes, and read back.
void check_typed(const Matrix& w, const Tokens& x, const KernelTable& kernels, Projection p,
                 Random& random) {
  const int64_t n_rows = w.weight.n_rows, tokens = x.buffer.view().tokens;
  for (const DType type : kTypes) {
    std::vector<char> memory(at(tokens * n_rows * element_size(type)));
    std::vector<float> out(at(tokens * n_rows));
    p.out = {StoreKind::kStore, type, memory.data(), n_rows * element_size(type)};
    run_in_pieces(random, Product(kernels, x.buffer.view(), &p, 1));
    scalar_kernels().load_row(type, memory.data(), tokens * n_rows, out.data());
    check_stored(w, x, p, out, out);
  }
}

// Rounded floats stored, or added to what is there.
void check_floats(const Matrix& w, const Tokens& x, const KernelTable& kernels, Projection p,
                  Random& random) {
  const int64_t n_rows = w.weight.n_rows, tokens = x.buffer.view().tokens;
  const auto stride_bytes = n_rows * static_cast<int64_t>(sizeof(float));
  for (const StoreKind kind : {StoreKind::kRound, StoreKind::kAdd}) {
    const std::vector<float> before = random_floats(random, tokens * n_rows);
    std::vector<float> out = before;
    p.out = {kind, DType::kBF16, out.data(), stride_bytes};
    run_in_pieces(random, Product(kernels, x.buffer.view(), &p, 1));
    check_stored(w, x, p, before, out);
  }
}

// Two matrices in more blocks of tokens and parts of K than one thread would cut them into, twice
// over the same memory for parts.
void check_cuts(const KernelTable& kernels, int64_t k, int64_t tokens) {
  constexpr int64_t kMaxTokens = 64;
  Random random(static_cast<uint64_t>(k + tokens));
  const float scale = 0.5f;
  const Matrix q(random, kernels, WeightFormat::kTwoBit, 150, k);
  const Matrix v(random, kernels, WeightFormat::kBase3, 170, k);
  const Tokens x(random, kernels, tokens, k);
  const int64_t row_blocks = q.weight.row_blocks + v.weight.row_blocks;
  for (const auto& [blocks, parts] : {std::pair{2, 1}, {1, 2}, {2, 3}, {3, 2}}) {
    const ProductPlan cut{.token_blocks = blocks, .k_parts = parts};
    const int64_t each = (tokens + cut.token_blocks - 1) / cut.token_blocks;
    if (each > 32) continue;
    begin_case("%s, K=%d, %d tokens in %d blocks, %d parts", kernels.name, static_cast<int>(k),
               static_cast<int>(tokens), static_cast<int>(cut.token_blocks),
               static_cast<int>(cut.k_parts));
    const int64_t cells = row_blocks * cut.token_blocks;
    std::vector<int32_t> sums(at(cells * cut.k_parts * kMaxTokens * v.weight.block_rows), 77);
    std::vector<int32_t> done(at(cells), 0);
    std::vector<float> of_q(at(tokens * q.weight.n_rows)), of_v(at(tokens * v.weight.n_rows));
    const Projection both[] = {
        engine::make_projection(q.weight, &scale, 1, DType::kF32, of_q.data()),
        engine::make_projection(v.weight, &scale, 1, DType::kF32, of_v.data())};
    const Product product(kernels, x.buffer.view(), both, 2, cut, {sums.data(), done.data()});
    CHECK(product.units() == cells * cut.k_parts, "%d units", static_cast<int>(product.units()));
    for (int i = 0; i < 2; ++i) {
      std::ranges::fill(of_q, -1.0f);
      std::ranges::fill(of_v, -1.0f);
      run_in_pieces(random, product);
      check_stored(q, x, both[0], of_q, of_q);
      check_stored(v, x, both[1], of_v, of_v);
      for (const int32_t count : done) CHECK(count == 0, "%d parts are said to be there", count);
    }
  }
}

// Two matrices by tables of sums, cut for many threads: in more blocks of tokens and parts of rows
// than one thread would cut them into.
void check_table_cuts(const KernelTable& kernels) {
  constexpr int64_t kRows = 1300, kTokens = 150, kWide = 256;
  const ProductAlgorithm* tables = engine::tables_of(kernels);
  const ProductShape shape = shape_for_tables(kTokens, kRows);
  if (tables == nullptr || !tables->usual(shape)) return;
  Random random(7);
  const float scale = 0.5f;
  const Matrix q(random, kernels, WeightFormat::kTwoBit, 620, kWide);
  const Matrix v(random, kernels, WeightFormat::kBase3, kRows - 620, kWide);
  const Tokens x(random, kernels, kTokens, kWide);
  const int64_t row_blocks = q.weight.row_blocks + v.weight.row_blocks;
  for (const auto& [blocks, parts] : {std::pair{1, 1}, {2, 2}, {5, 3}}) {
    const ProductPlan cut{.algorithm = tables,
                          .blocking = tables->blocking(shape),
                          .token_blocks = blocks,
                          .row_parts = parts};
    begin_case("%s, %d blocks, %d parts by tables", kernels.name,
               static_cast<int>(cut.token_blocks), static_cast<int>(cut.row_parts));
    std::vector<float> of_q(at(kTokens * q.weight.n_rows)), of_v(at(kTokens * v.weight.n_rows));
    const Projection both[] = {
        engine::make_projection(q.weight, &scale, 1, DType::kF32, of_q.data()),
        engine::make_projection(v.weight, &scale, 1, DType::kF32, of_v.data())};
    const Product product(kernels, x.buffer.view(), both, 2, cut);
    CHECK(product.units() == row_blocks * cut.token_blocks, "%d units",
          static_cast<int>(product.units()));
    const ClaimRule rule = product.claim();
    CHECK(rule.min == rule.max && rule.max <= (row_blocks + 1) / cut.row_parts + 1, "claims of %d",
          static_cast<int>(rule.max));
    run_in_pieces(random, product);
    check_stored(q, x, both[0], of_q, of_q);
    check_stored(v, x, both[1], of_v, of_v);
  }
}

// What is cut for many threads makes them end together; one and two threads keep what is best for
// one.
void cuts_for_threads(const KernelTable& kernels) {
  constexpr int64_t kRows = 2560, kWide = 6912;
  const layout::WeightLayout& layout = layout::layout_of(WeightFormat::kTwoBit);
  const int64_t row_blocks = layout.row_blocks(kRows, kernels.tile_lanes);
  const auto cut_of = [&](int64_t tokens, bool splits_k, int64_t threads) {
    const int64_t rows = layout.block_rows(kernels.tile_lanes);
    return engine::plan_product(kernels,
                                {.format = WeightFormat::kTwoBit,
                                 .tokens = tokens,
                                 .k = kWide,
                                 .row_blocks = row_blocks,
                                 .block_rows = rows,
                                 .planes = 2,  // not by tables
                                 .splits_k = splits_k},
                                threads);
  };
  for (const int64_t tokens : {1, 16, 128, 512}) {
    const int64_t max_tokens = cut_of(tokens, false, 1).blocking.tokens;
    for (const int64_t threads : {1, 2, 8, 16, 32, 64}) {
      begin_case("%s, %d tokens for %d threads", kernels.name, static_cast<int>(tokens),
                 static_cast<int>(threads));
      const ProductPlan cut = cut_of(tokens, true, threads), plain = cut_of(tokens, false, threads);
      CHECK(plain.k_parts == 1 && plain.sums == 0, "%d parts", static_cast<int>(plain.k_parts));
      const int64_t blocks = (tokens + max_tokens - 1) / max_tokens;
      if (threads < 3)
        CHECK(cut.token_blocks == (threads == 1 ? 0 : blocks) && cut.k_parts == 1, "another cut");
      if (threads < 3 || tokens == 1) continue;
      const int64_t units = cut.token_blocks * cut.k_parts * row_blocks;
      const int64_t rounds = (units + threads - 1) / threads;
      CHECK(7 * rounds * threads <= 8 * units, "%d units", static_cast<int>(units));
    }
  }
}

void check_table(const KernelTable& kernels, int64_t n, int64_t k, int64_t tokens) {
  Random random(static_cast<uint64_t>(n * 1000 + k + tokens));
  const std::vector<float> scales = random_floats(random, n), bias = random_floats(random, n);
  for (const WeightFormat format : layout::kWeightFormats) {
    begin_case("%s format %d, %dx%d, %d tokens", kernels.name, static_cast<int>(format),
               static_cast<int>(n), static_cast<int>(k), static_cast<int>(tokens));
    const Matrix w(random, kernels, format, n, k);
    const Tokens x(random, kernels, tokens, k, w.weight.reads_rows());
    check_sums(w, x, kernels, random);
    for (const int64_t step : {0, 1}) {
      const Projection p{&w.weight, scales.data(), step, step == 0 ? nullptr : bias.data(), {}};
      check_typed(w, x, kernels, p, random);
      check_floats(w, x, kernels, p, random);
    }
  }
}

// ---- tables that want tiles of tokens, and all rows of some tokens first ------------------------

constexpr int64_t kTile = 32;
int64_t tiled_k = 0;

// Reads the tiles back into rows; tile i begins i * kTile * padded k further on.
void run_tiled(const ProductJob& job, const EpilogueJob* epilogue) {
  const int64_t padded = layout::padded_k(tiled_k);
  const int64_t k = job.k_steps * layout::kTileStepK;  // all of it or a part
  CHECK(job.x_stride == kTokenStep, "tokens in rows");
  std::vector<int8_t> rows(at(job.tokens * k));
  for (int64_t m = 0; m < job.tokens; ++m) {
    const int64_t tile = m / kTile, left = job.tokens - tile * kTile;
    const bool last = left < kTile;  // a tile that is not full has shorter steps
    const int64_t step_stride = last ? left * kTokenStep : kTile * kTokenStep;
    const int8_t* x = job.x + tile * kTile * padded + m % kTile * job.x_stride;
    for (int64_t s = 0; s < k / kTokenStep; ++s)
      std::memcpy(rows.data() + m * k + s * kTokenStep, x + s * step_stride, kTokenStep);
  }
  ProductJob plain = job;
  plain.x = rows.data();
  plain.x_stride = k;
  run_usual(scalar_kernels(), plain, epilogue);
}

void tokens_in_tiles() {
  KernelTable kernels = scalar_kernels();
  kernels.name = "tiled";
  ProductAlgorithm list[kMaxProducts] = {
      {"tiled", [](const ProductShape& s) { return !s.row_major(); },
       [](const ProductShape& s) { return !s.row_major(); },
       [](const ProductShape&) {
         return ProductBlocking{.tokens = 64,
                                .rows = 64,
                                .sums = 64 * 64,
                                .min_rows = 64,
                                .claim_fraction = 3,
                                .token_tile = kTile,
                                .tokens_outermost = true};
       },
       run_tiled},
      *engine::find_algorithm(kernels, "canonical")};
  kernels.products = list;
  for (const int64_t tokens : {1, 31, 32, 33, 64, 65, 100}) {
    tiled_k = 300;
    check_table(kernels, 70, tiled_k, tokens);
    check_cuts(kernels, tiled_k, tokens);
  }
  begin_case("claims of a tiled product");
  Random random(5);
  const Matrix w(random, kernels, WeightFormat::kTwoBit, 320, 64);
  const Tokens x(random, kernels, 100, 64);
  const Projection p = make_sums(w.weight, nullptr);
  const ClaimRule rule = Product(kernels, x.buffer.view(), &p, 1).claim();
  CHECK(rule.min * w.weight.block_rows == 64 && rule.parts == 3, "min %d, parts %d",
        static_cast<int>(rule.min), static_cast<int>(rule.parts));
}

// ---- several matrices of the same tokens, on threads --------------------------------------------

void on_threads(const KernelTable& kernels) {
  Random random(11);
  const int64_t k = 512, tokens = 70;
  const Matrix q(random, kernels, WeightFormat::kTwoBit, 500, k);
  const Matrix v(random, kernels, WeightFormat::kBase3, 130, k);
  const Matrix c(random, kernels, WeightFormat::kCanonical, 77, k);
  const Tokens x(random, kernels, tokens, k, true);
  const float scale = 0.5f;
  for (const int64_t threads : {1, 2, 3, 7}) {
    begin_case("%s, %d threads", kernels.name, static_cast<int>(threads));
    pool_threads = threads;
    std::vector<std::vector<float>> out;
    for (const Matrix* w : {&q, &v, &c}) out.emplace_back(at(tokens * w->weight.n_rows), -1.0f);
    std::vector<Projection> all;
    for (std::size_t i = 0; i < 3; ++i) {
      const Matrix& w = i == 0 ? q : i == 1 ? v : c;
      all.push_back(engine::make_projection(w.weight, &scale, 1, DType::kF32, out[i].data()));
    }
    engine::multiply(kernels, x.buffer.view(), all.data(), 3);
    for (std::size_t i = 0; i < 3; ++i) {
      check_stored(i == 0 ? q : i == 1 ? v : c, x, all[i], out[i], out[i]);
    }
  }
  pool_threads = 1;
}

// Matrices in tiles alone, of so many rows and tokens that they are multiplied by tables of sums
// where the table has them: parts of rows that meet inside a matrix and at its end, blocks of
// tokens that are not full, more threads than blocks.
void tables_on_threads(const KernelTable& kernels) {
  Random random(12);
  const int64_t k = 192;
  const Matrix q(random, kernels, WeightFormat::kTwoBit, 2300, k);
  const Matrix v(random, kernels, WeightFormat::kBase3, 333, k);
  const float scale = 0.5f;
  for (const int64_t tokens : {16, 40, 140}) {
    const Tokens x(random, kernels, tokens, k);
    for (const int64_t threads : {1, 2, 3, 7}) {
      begin_case("%s, %d tokens, %d threads", kernels.name, static_cast<int>(tokens),
                 static_cast<int>(threads));
      pool_threads = threads;
      std::vector<float> of_q(at(tokens * 2300), -1.0f), of_v(at(tokens * 333), -1.0f);
      const Projection both[] = {
          engine::make_projection(q.weight, &scale, 1, DType::kF32, of_q.data()),
          engine::make_projection(v.weight, &scale, 1, DType::kF32, of_v.data())};
      engine::multiply(kernels, x.buffer.view(), both, 2);
      check_stored(q, x, both[0], of_q, of_q);
      check_stored(v, x, both[1], of_v, of_v);
    }
  }
  pool_threads = 1;
}

// Where memory for tables cannot be had: the same results, multiplied.
TEST(tables_without_memory) {
  if (kSanitized) return not_here("an allocator that may fail");
  use_plain_threads();
  on_tables_of_sums(
      [](const KernelTable& kernels) { tables_on_threads(without_scratch(kernels)); });
}

TEST(tables_on_threads) {
  use_plain_threads();
  on_tables_of_sums(tables_on_threads);
}

TEST(on_threads) {
  use_plain_threads();
  for (const KernelTable* kernels : tables_under_test()) on_threads(*kernels);
}

TEST(every_layout) {
  use_plain_threads();
  for (const KernelTable* kernels : tables_under_test()) {
    for (const int64_t tokens : {1, 2, 3, 5, 17, 48, 65, 130}) {
      if (thinning(*kernels) > 1 && tokens > 17) continue;
      check_table(*kernels, 150, 200, tokens);
    }
    // tiles of tokens: a chunk of 128 and one token more; K of the fewest operands, and of three
    // blocks of them
    if (thinning(*kernels) == 1 || kSanitized) {
      check_table(*kernels, 70, 192, 129);
      check_table(*kernels, 90, 1900, 37);
    }
    check_table(*kernels, 1, 1, 6);
    check_table(*kernels, 700, 130, 9);
  }
}

TEST(cuts) {
  use_plain_threads();
  for (const KernelTable* kernels : tables_under_test()) {
    for (const int64_t tokens : {1, 7, 37}) check_cuts(*kernels, 700, tokens);
    cuts_for_threads(*kernels);
    check_table_cuts(*kernels);
  }
}

TEST(tokens_in_tiles) {
  use_plain_threads();
  tokens_in_tiles();
}

}  // namespace
}  // namespace bitnet::test
