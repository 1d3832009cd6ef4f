// GMAC/s of the engine's product without torch: bench_engine [threads] [seconds for each shape].
// Every ISA that runs here x a few shapes, 2 bit weights, float32 results; the best of several
// runs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "engine/pack.h"
#include "engine/products/product.h"
#include "format/layout.h"
#include "tests/random.h"
#include "tests/tables.h"
#include "tests/threads.h"

namespace bitnet::test {
namespace {

using Clock = std::chrono::steady_clock;

double gmacs_per_second(const KernelTable& kernels, int64_t n, int64_t k, int64_t tokens,
                        double seconds) {
  Random random(1);
  std::vector<int8_t> codes(static_cast<std::size_t>(n * k));
  for (int8_t& code : codes) code = static_cast<int8_t>(random.next() % 3) - 1;
  std::vector<uint8_t> canonical(static_cast<std::size_t>(n * layout::row_bytes_for(k)));
  engine::pack(codes.data(), n, k, canonical.data());
  engine::Weight weight =
      engine::tile_weight(nullptr, engine::WeightFormat::kTwoBit, n, k, kernels.tile_lanes);
  std::vector<uint8_t> tiles(static_cast<std::size_t>(weight.bytes()));
  weight.data = tiles.data();
  engine::repack(canonical.data(), weight, kernels.tile_lanes, tiles.data());

  std::vector<float> x(static_cast<std::size_t>(tokens * k)),
      out(static_cast<std::size_t>(tokens * n));
  for (float& v : x) v = random.unit();
  engine::TokenBuffer rows(kernels, tokens, k);
  rows.quantize(kernels, x.data(), DType::kF32);
  const float scale = 0.5f;
  const engine::Projection p = engine::make_projection(weight, &scale, 1, DType::kF32, out.data());
  double best = 0, spent = 0;
  while (spent < seconds) {
    const auto start = Clock::now();
    engine::multiply(kernels, rows.view(), &p, 1);
    const double took = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(n * k * tokens) / took * 1e-9);
    spent += took;
  }
  return best;
}

}  // namespace
}  // namespace bitnet::test

int main(int argc, char** argv) {
  using namespace bitnet::test;
  use_plain_threads();
  pool_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.5;
  std::printf("GMAC/s, %d thread(s)\n%-14s", static_cast<int>(pool_threads), "N x K");
  constexpr int64_t kTokens[] = {1, 8, 64, 512}, kShapes[][2] = {{2560, 2560}, {6912, 2560}};
  for (const int64_t m : kTokens) std::printf("   M = %-4d", static_cast<int>(m));
  std::printf("\n");
  std::vector<const bitnet::KernelTable*> tables = bitnet::available_tables();
  if (tables.size() > 1) tables.pop_back();  // plain C++ takes minutes
  for (const bitnet::KernelTable* kernels : tables) {
    if (!bitnet::make_ready(*kernels)) continue;
    for (const auto& [n, k] : kShapes) {
      std::printf("%4d x %-7d", static_cast<int>(n), static_cast<int>(k));
      for (const int64_t m : kTokens)
        std::printf("%11.1f", gmacs_per_second(*kernels, n, k, m, seconds));
      std::printf("  %s\n", kernels->name);
      std::fflush(stdout);
    }
  }
  return 0;
}
