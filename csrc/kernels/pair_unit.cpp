// The model of the instruction and random operands; see pair_unit.h.
#include "kernels/pair_unit.h"

#include <bit>
#include <cmath>

#include "kernels/check_words.h"
#include "kernels/dispatch.h"
#include "kernels/features.h"

namespace bitnet {
namespace {

constexpr int kLanes = 16, kSteps = 16;
constexpr int64_t kFirstUse = 40;  // products of a kind: 60,000 pairs in all

// A bfloat16, as the upper half of a word, whose exponent is in [min, min + range).
struct Kind {
  uint32_t min, range;
  bool takes_back;  // every other step takes back the one before it, but for some last bits
};
constexpr Kind kKinds[] = {
    {120, 10, false},  // of a size
    {72, 62, false},   // as caches hold them, from 2^-55 on
    {100, 28, false}, {118, 12, true}, {72, 62, true}, {126, 2, false},  // ties
};

uint32_t bf16_bits(RandomWords& numbers, const Kind& kind) {
  const uint32_t exponent = kind.min + numbers.below(kind.range);
  return (numbers.bits() & 0x807f0000u) | exponent << 23;
}

uint32_t word(RandomWords& numbers, const Kind& kind) {
  const uint32_t upper = bf16_bits(numbers, kind);
  return upper | bf16_bits(numbers, kind) >> 16;
}

struct Operands {
  uint32_t a[kSteps * kLanes], b[kSteps * kLanes];
};

Operands random_operands(RandomWords& numbers, const Kind& kind) {
  Operands t;
  for (int i = 0; i < kSteps * kLanes; ++i) {
    t.a[i] = word(numbers, kind);
    t.b[i] = word(numbers, kind);
    if (kind.takes_back && i / kLanes % 2 != 0) {
      t.a[i] = t.a[i - kLanes] ^ 0x80008000u ^ (numbers.below(8) == 0 ? 0x10000u : 0u);
      t.b[i] = t.b[i - kLanes] ^ (numbers.below(8) == 0 ? 1u : 0u);
    }
  }
  return t;
}

}  // namespace

PairCheck check_pairs(AddPairs add_pairs, int64_t products, uint64_t seed) {
  PairCheck check;
  RandomWords numbers(seed);
  for (int64_t n = 0; n < products; ++n) {
    for (const Kind& kind : kKinds) {
      const Operands t = random_operands(numbers, kind);
      float a[kSteps * kLanes], b[kSteps * kLanes], sums[kLanes], want[kLanes];
      for (int i = 0; i < kSteps * kLanes; ++i) {
        a[i] = std::bit_cast<float>(t.a[i]);
        b[i] = std::bit_cast<float>(t.b[i]);
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        sums[lane] = want[lane] = std::bit_cast<float>(bf16_bits(numbers, kind));
      }
      check.available = add_pairs(a, b, kSteps, sums);
      if (!check.available) return check;
      for (int i = 0; i < kSteps * kLanes; ++i) {
        float& sum = want[i % kLanes];
        sum = std::fmaf(bf16_half(t.a[i], 1), bf16_half(t.b[i], 1), sum);
        sum = std::fmaf(bf16_half(t.a[i], 0), bf16_half(t.b[i], 0), sum);
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        ++check.outputs;
        if (std::bit_cast<uint32_t>(sums[lane]) != std::bit_cast<uint32_t>(want[lane])) {
          ++check.different;
        }
      }
    }
  }
  return check;
}

PairCheck check_pair_unit(int64_t products, uint64_t seed) {
  if ((cpu_features() & kAvx512Bf16) == 0) return {};
  for (const KernelTable* kernels : available_tables()) {
    const PairCheck check = check_pairs(kernels->add_pairs, products, seed);
    if (check.available) return check;
  }
  return {};
}

bool pair_unit_in_order() {
  static const bool in_order = [] {
    const PairCheck check = check_pair_unit(kFirstUse, 1);
    return check.available && check.different == 0;
  }();
  return in_order;
}

}  // namespace bitnet
