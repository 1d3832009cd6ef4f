// The measurement and its memory; see table_probe.h. One product is made with and without memory
// for tables: without, the same kernel multiplies.
#include "engine/table_probe.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/product_plan.h"
#include "engine/weights.h"
#include "runtime/memory.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Weights, inputs and sums stay in L2, so that the gain does not depend on other cores.
constexpr int64_t kTokens = kProbeTokens, kRows = 1024, kK = 1024;
// Turns of both ways. A disturbed turn does not count, so few suffice; a slow CPU has fewer.
constexpr int kMaxTurns = 8, kMinTurns = 3;
constexpr Seconds kEnough{0.008};
// Less may be noise, and the costs by which kernels divide a product are those of other CPUs.
constexpr double kMinGain = 1.05;
// For fewer tokens: on Zen 4 16 to 32 of them have at least .79 of the gain of 64.
constexpr double kMinGainOfFew = 1.33;

// Uniform numbers below 2^16: tables gain less where rows share their lines.
class Numbers {
 public:
  uint32_t next() { return (state_ = state_ * 1664525 + 1013904223) >> 16; }

 private:
  uint32_t state_ = 1;
};

constexpr ProductShape kShape{.format = WeightFormat::kTwoBit,
                              .tokens = kTokens,
                              .k = kK,
                              .row_blocks = kRows,
                              .block_rows = 1,
                              .scratch = true};

int64_t scratch_bytes(const KernelTable& table) {
  const ProductAlgorithm* tables = tables_of(table);
  return tables == nullptr ? 0 : tables->blocking(kShape).scratch_bytes;
}

class SampleProduct {
 public:
  explicit SampleProduct(const KernelTable& table)
      : table_(table),
        weight_(tile_weight(nullptr, WeightFormat::kTwoBit, kRows, kK, table.tile_lanes)),
        tiles_(weight_.bytes()),
        x_(kTokens * kK),
        scratch_(scratch_bytes(table)),
        sums_(kTokens, 0),
        scales_(kTokens, 1.0f),
        out_(static_cast<size_t>(kTokens * kRows)) {
    Numbers numbers;
    const auto code = [](uint32_t n) { return n % 3 | n / 3 % 3 << 2; };
    for (int64_t i = 0; i < weight_.bytes(); ++i) {
      const uint32_t four = numbers.next() % 81;
      tiles_.get()[i] = static_cast<uint8_t>(code(four) | code(four / 9) << 4);
    }
    for (int64_t i = 0; i < kTokens * kK; ++i)
      x_.get()[i] = static_cast<int8_t>(static_cast<int>(numbers.next() % 127) - 63);
    weight_.data = tiles_.get();
  }

  Seconds time(bool tables) {
    ProductJob job = job_of(weight_, 0, weight_.row_blocks);
    job.x = x_.get();
    job.x_stride = kK;
    job.x_sum = sums_.data();
    job.tokens = kTokens;
    job.scratch = tables ? scratch_.get() : nullptr;
    const EpilogueJob epilogue{.sums = nullptr,
                               .sums_stride = 0,
                               .rows = kRows,
                               .tokens = kTokens,
                               .w_scale = scales_.data(),
                               .w_scale_step = 0,
                               .x_scale = scales_.data(),
                               .bias = nullptr,
                               .kind = StoreKind::kStore,
                               .type = DType::kBF16,
                               .out = out_.data(),
                               .out_stride_bytes = kRows * element_size(DType::kBF16)};
    const Clock::time_point start = Clock::now();
    tables_of(table_)->run(job, &epilogue);
    return Clock::now() - start;
  }

 private:
  const KernelTable& table_;
  Weight weight_;
  Scratch<uint8_t> tiles_;
  Scratch<int8_t> x_;
  Scratch<char> scratch_;
  std::vector<int32_t> sums_;  // of the tokens; nobody reads the result
  std::vector<float> scales_;
  std::vector<uint16_t> out_;
};

TableProbe measure(const KernelTable& table) {
  const Clock::time_point start = Clock::now();
  Seconds multiplied = Seconds::max(), by_tables = Seconds::max();
  TableProbe probe;
  try {
    SampleProduct product(table);
    for (int i = 0; i < kMaxTurns && (i < kMinTurns || Clock::now() - start < kEnough); ++i) {
      multiplied = std::min(multiplied, product.time(false));
      by_tables = std::min(by_tables, product.time(true));
    }
    probe.gain = multiplied / by_tables;
  } catch (const std::exception&) {  // no memory
  }
  probe.seconds = Seconds(Clock::now() - start).count();
  return probe;
}

// By the names of ISAs, which a test may force one after the other; 0 while one is measured. The
// mutex is not held meanwhile, so that nobody waits, nor a forked process for ever.
struct Measurements {
  std::mutex mutex;
  std::map<std::string, TableProbe> of;
};

Measurements& measurements() {
  static Measurements all;
  return all;
}

}  // namespace

std::optional<TableProbe> table_probe(const KernelTable& table) {
  Measurements& all = measurements();
  const std::lock_guard lock(all.mutex);
  const auto found = all.of.find(table.name);
  if (found == all.of.end() || found->second.seconds == 0) return std::nullopt;
  return found->second;
}

bool tables_gain(const KernelTable& table, int64_t tokens) {
  const TableUse use = tuning().sum_tables;
  if (use == TableUse::kOff || scratch_bytes(table) == 0) return false;
  if (use == TableUse::kOn) return true;
  const double least = tokens < kProbeTokens ? kMinGainOfFew : kMinGain;
  Measurements& all = measurements();
  {
    const std::lock_guard lock(all.mutex);
    const auto [found, fresh] = all.of.try_emplace(table.name);
    if (!fresh) return found->second.gain >= least;
  }
  const TableProbe probe = measure(table);
  const std::lock_guard lock(all.mutex);
  all.of[table.name] = probe;
  return probe.gain >= least;
}

}  // namespace bitnet::engine
