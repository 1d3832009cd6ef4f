// Priors and the measurement; see tune.h.
#include "engine/products/tune.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <string_view>

#include "engine/products/plan.h"
#include "engine/products/product.h"
#include "runtime/memory.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

using Clock = std::chrono::steady_clock;

// A row that is slow on a CPU that was timed, against the usual order of the ISA's list: it is not
// taken there.
struct Prior {
  const char* cpu;  // of runtime/tuning.cpp
  const char* isa;  // empty: of any list
  const char* row;
  WeightFormat format;
};
constexpr Prior kPriors[] = {
    // other ports do the decoding, so a panel saves nothing
    {"AMD Zen 3 or 4", "avx512_vnni", "panel", WeightFormat::kTwoBit},
    // all 512-bit instructions share two ports, so fewer instructions win
    {"Intel Sapphire or Emerald Rapids", "", "wide", WeightFormat::kBase3},
};

bool passed_over(const KernelTable& kernels, const ProductAlgorithm& row, WeightFormat format) {
  const std::string_view cpu = tuning().cpu, isa = kernels.name, name = row.name;
  return std::ranges::any_of(kPriors, [&](const Prior& p) {
    return cpu == p.cpu && isa.starts_with(p.isa) && name == p.row && format == p.format;
  });
}

// Weights, tokens and results of a sample stay in L2, so that times do not depend on other cores.
constexpr int64_t kRows = 1024, kK = 1024;
constexpr double kLost = 1e9;  // seconds of what cannot be measured

// A product of the shape's kind, with the fewest tokens that share its place.
ProductShape sample_of(const KernelTable& kernels, const ProductShape& shape) {
  const int64_t from = ProductChoices::kFrom[ProductChoices::place_of(shape)];
  const layout::WeightLayout& layout = layout::layout_of(shape.format);
  return {.format = shape.format,
          .tokens = (from + shape.planes - 1) / shape.planes,
          .k = kK,
          .row_blocks = layout.row_blocks(kRows, kernels.tile_lanes),
          .block_rows = layout.block_rows(kernels.tile_lanes),
          .planes = shape.planes,
          .grouped = shape.grouped};
}

bool needs_scratch(const ProductAlgorithm& row, ProductShape sample) {
  sample.scratch = true;
  return row.blocking(sample).scratch_bytes != 0;
}

// The first row that is usual for the sample and that no prior of this CPU rejects.
const ProductAlgorithm* known_row(const KernelTable& kernels, const ProductShape& sample) {
  const ProductAlgorithm* row = kernels.products;
  while (!row->usual(sample) || passed_over(kernels, *row, sample.format)) ++row;
  return row;
}

// The usual row without scratch, then the others. There are no others if that row wants its tokens
// in tiles, since all products of the same tokens share their order; nor for one token, because its
// weights come from memory and those of a sample from L2.
std::vector<const ProductAlgorithm*> candidates(const KernelTable& kernels,
                                                const ProductShape& sample) {
  std::vector<const ProductAlgorithm*> rows = {known_row(kernels, sample)};
  if (rows[0]->blocking(sample).token_tile != 0 || sample.tokens * sample.planes == 1) return rows;
  ProductShape with = sample;
  with.scratch = true;
  for (int64_t i = 0; i < kMaxProducts && kernels.products[i].name != nullptr; ++i) {
    const ProductAlgorithm& row = kernels.products[i];
    if (&row == rows[0] || !row.takes(with)) continue;
    const bool scratch = needs_scratch(row, sample);
    if (scratch && (!tuning().sum_tables || !row.usual(with))) continue;
    if (!scratch && row.blocking(sample).token_tile != 0) continue;
    rows.push_back(&row);
  }
  return rows;
}

// Uniform numbers below 2^16, because tables gain less if rows share their lines.
class Numbers {
 public:
  uint32_t next() { return (state_ = state_ * 1664525 + 1013904223) >> 16; }

 private:
  uint32_t state_ = 1;
};

// The data of a sample. Nobody reads the result.
class Sample {
 public:
  Sample(const KernelTable& kernels, const ProductShape& shape)
      : shape_(shape),
        weight_(tile_weight(nullptr, shape.format, kRows, kK, kernels.tile_lanes)),
        tiles_(weight_.bytes()),
        scales_(weight_.row_blocks * weight_.block_rows * groups_for(kK, kGroupWeights)),
        x_(kernels, shape.tokens, kK, shape.grouped ? kGroupWeights : 0,
           !shape.grouped      ? ActivationFormat::kInt8
           : shape.planes == 2 ? ActivationFormat::kInt16Group
                               : ActivationFormat::kInt8Group),
        out_(shape.tokens * kRows) {
    Numbers numbers;
    const auto code = [](uint32_t n) { return n % 3 | n / 3 % 3 << 2; };
    for (int64_t i = 0; i < weight_.bytes(); ++i) {
      const uint32_t four = numbers.next() % 81;
      tiles_.get()[i] = static_cast<uint8_t>(code(four) | code(four / 9) << 4);
    }
    weight_.data = tiles_.get();
    const int64_t scales = weight_.row_blocks * weight_.block_rows * groups_for(kK, kGroupWeights);
    std::fill_n(scales_.get(), scales, 1.0f);
    Scratch<float> values(kK);
    for (int64_t m = 0; m < shape.tokens; ++m) {
      for (int64_t i = 0; i < kK; ++i)
        values.get()[i] = static_cast<float>(static_cast<int>(numbers.next() % 255) - 127);
      x_.view().quantize(kernels, values.get(), m);
    }
  }

  double seconds(const KernelTable& kernels) const {
    Projection p =
        make_projection(weight_, scales_.get(), 1, DType::kBF16, const_cast<uint16_t*>(out_.get()));
    if (shape_.grouped) p.groups = {.data = scales_.get(), .blocked = true};
    const ProductPlan plan = plan_product(kernels, shape_, 1);
    if (plan.by_tables() && thread_scratch(plan.blocking.scratch_bytes) == nullptr)
      return kLost;  // it would be multiplied otherwise, as fast as the others
    const Product product(kernels, x_.view(), &p, 1, plan);
    const Clock::time_point start = Clock::now();
    product.run(0, product.units());
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  ProductShape shape_;
  Weight weight_;
  Scratch<uint8_t> tiles_;
  Scratch<float> scales_;
  TokenBuffer x_;
  Scratch<uint16_t> out_;
};

// The same kernels, whose products are all made by one row.
class Only {
 public:
  Only(const KernelTable& kernels, const ProductAlgorithm& row) : kernels_(kernels) {
    rows_[0] = row;
    rows_[0].usual = [](const ProductShape&) { return true; };
    kernels_.products = rows_;
    kernels_.choices = nullptr;
  }
  Only(const Only&) = delete;
  const KernelTable& kernels() const { return kernels_; }

 private:
  ProductAlgorithm rows_[kMaxProducts] = {};
  KernelTable kernels_;
};

enum State { kEmpty, kBusy, kDone };

}  // namespace

std::vector<RowTime> time_products(const KernelTable& kernels, const ProductShape& shape) {
  // A disturbed turn does not count, so few suffice; a slow CPU has fewer.
  constexpr int kMaxTurns = 6, kMinTurns = 3;
  constexpr double kEnough = 0.003;
  const ProductShape sample = sample_of(kernels, shape);
  const auto rows = candidates(kernels, sample);
  if (rows.size() == 1) return {};
  std::vector<RowTime> times;
  try {
    const Sample product(kernels, sample);
    for (const ProductAlgorithm* row : rows) {
      times.push_back({row, {kLost, kLost}});
      product.seconds(Only(kernels, *row).kernels());  // code and memory for the first time
    }
    for (int series = 0; series < 2; ++series) {
      const Clock::time_point start = Clock::now();
      const auto left = [&](int turn) {
        if (turn < kMinTurns) return true;
        return turn < kMaxTurns &&
               std::chrono::duration<double>(Clock::now() - start).count() < kEnough;
      };
      for (int turn = 0; left(turn); ++turn) {
        for (RowTime& time : times) {
          double& best = time.seconds[series];
          best = std::min(best, product.seconds(Only(kernels, *time.row).kernels()));
        }
      }
    }
  } catch (const std::exception&) {  // no memory
    return {};
  }
  return times;
}

const ProductAlgorithm* fastest(const std::vector<RowTime>& times) {
  constexpr double kMargin = 1.05;
  const auto best = [](const RowTime& t) { return std::min(t.seconds[0], t.seconds[1]); };
  const RowTime& usual = times[0];
  const RowTime& found = *std::ranges::min_element(times, {}, best);
  const bool sure = best(usual) >= kMargin * best(found) && usual.seconds[0] > found.seconds[0] &&
                    usual.seconds[1] > found.seconds[1];
  return sure ? found.row : usual.row;
}

void tune(const KernelTable& kernels, const ProductShape& shape) {
  if (!shape.tiles() || kernels.choices == nullptr) return;
  ProductChoices::Choice& choice = kernels.choices->of(shape);
  const std::atomic_ref<int> state(choice.state);
  const std::atomic_ref<const ProductAlgorithm*> without(choice.row[0]), with(choice.row[1]);
  int expected = kEmpty;
  if (state.load(std::memory_order_acquire) != kEmpty) return;
  // A forked child of a process that measures takes the usual row for good.
  if (!state.compare_exchange_strong(expected, kBusy)) return;
  const ProductShape sample = sample_of(kernels, shape);
  if (tuning().products == ProductChoice::kPrior) {
    ProductShape scratch = sample;
    scratch.scratch = true;
    without = known_row(kernels, sample);
    with = known_row(kernels, scratch);
  } else if (tuning().products == ProductChoice::kMeasured) {
    without = with = known_row(kernels, sample);
    std::vector<RowTime> times = time_products(kernels, sample);
    if (!times.empty()) {
      for (const RowTime& time : times) {
        choice.seconds[time.row - kernels.products] =
            static_cast<float>(std::min(time.seconds[0], time.seconds[1]));
      }
      with = fastest(times);
      std::erase_if(times, [&](const RowTime& t) { return needs_scratch(*t.row, sample); });
      without = fastest(times);
    }
  }
  state.store(kDone, std::memory_order_release);
}

}  // namespace bitnet::engine
