// The model of tile products, random operands, and the hardware; see tile_check.h.
#include "kernels/tile_check.h"

#include <bit>
#include <cmath>
#include <cstdio>

#include "kernels/check_words.h"
#include "kernels/features.h"

namespace bitnet {
namespace {

// ---- the model ----------------------------------------------------------------------------------

float without_denormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// a * b + c rounded once to float, denormals flushed before and after.  The product of two bfloat16
// is exact in float64; their sum is rounded to odd there, so that the second rounding is the only
// one that counts.  Whether a result is denormal is decided after rounding it to 24 bits.
float flushed_fma(float a, float b, float c) {
  const double product =
      static_cast<double>(without_denormal(a)) * static_cast<double>(without_denormal(b));
  const auto addend = static_cast<double>(without_denormal(c));
  const double sum = product + addend;
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  auto bits = std::bit_cast<uint64_t>(sum);
  // towards the exact sum, whose last bit is then odd
  if (error != 0 && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : uint64_t(-1);
  constexpr uint64_t kCut = (uint64_t{1} << 29) - 1;  // float64 has 29 bits more
  const uint64_t to_24_bits = (bits + (kCut >> 1) + (bits >> 29 & 1)) & ~kCut;
  const auto rounded = std::bit_cast<double>(to_24_bits);
  if (std::fabs(rounded) < 0x1p-126) return std::copysign(0.0f, static_cast<float>(sum));
  return static_cast<float>(rounded);
}

float flushed_add(float a, float b) { return flushed_fma(a, 1.0f, b); }

uint32_t bf16_output(const TileOperands& t, int m, int n) {
  float even = 0, odd = 0;
  for (int k = 0; k < t.depth; ++k) {
    even = flushed_fma(bf16_half(t.a[m][k], 0), bf16_half(t.b[k][n], 0), even);
    odd = flushed_fma(bf16_half(t.a[m][k], 1), bf16_half(t.b[k][n], 1), odd);
  }
  return std::bit_cast<uint32_t>(
      flushed_add(std::bit_cast<float>(t.c[m][n]), flushed_add(even, odd)));
}

int32_t byte_of(uint32_t word, int i, bool is_signed) {
  const auto byte = static_cast<uint8_t>(word >> (8 * i));
  return is_signed ? static_cast<int8_t>(byte) : byte;
}

uint32_t int8_output(const TileOperands& t, int m, int n, bool signed_a, bool signed_b) {
  uint32_t sum = t.c[m][n];
  for (int k = 0; k < t.depth; ++k) {
    for (int i = 0; i < 4; ++i) {
      sum +=
          static_cast<uint32_t>(byte_of(t.a[m][k], i, signed_a) * byte_of(t.b[k][n], i, signed_b));
    }
  }
  return sum;
}

// ---- operands -----------------------------------------------------------------------------------

// Floats whose exponent is in [min, min + range), some of them special.
struct Kind {
  uint32_t min, range;      // of a and b
  uint32_t c_min, c_range;  // of c
  uint32_t fraction;        // the bits that may be set
  uint32_t special_in;      // one in so many is zero, denormal, infinite or NaN; 0: none
};
constexpr Kind kKinds[] = {
    {0, 256, 0, 256, 0x7fffff, 16},   // anything
    {123, 8, 120, 14, 0x7fffff, 0},   // of a size
    {107, 40, 90, 75, 0x7fffff, 0},   // of many sizes
    {60, 9, 0, 16, 0x7fffff, 0},      // products about the smallest normal number
    {186, 8, 240, 14, 0x7fffff, 0},   // products about the largest
    {126, 3, 124, 12, 0x700000, 0},   // ties
    {0, 3, 1, 250, 0x7fffff, 4},      // denormal operands
    {72, 100, 26, 200, 0x7fffff, 9},  // as caches hold them, and specials
};

uint32_t float_bits(RandomWords& numbers, uint32_t min, uint32_t range, const Kind& kind) {
  const uint32_t sign = numbers.bits() & 0x80000000u;
  const uint32_t fraction = numbers.bits() & kind.fraction;
  if (kind.special_in != 0 && numbers.below(kind.special_in) == 0) {
    constexpr uint32_t kSpecial[] = {0, 1u << 16, 0x7f0000, 0x7f800000, 0x7fc00000, 0x7f7f0000};
    return sign | kSpecial[numbers.below(6)];
  }
  return sign | (min + numbers.below(range)) << 23 | fraction;
}

TileOperands random_operands(TileInstruction instruction, const Kind& kind, RandomWords& numbers) {
  TileOperands t;
  t.rows = static_cast<int32_t>(1 + numbers.below(16));
  t.depth = static_cast<int32_t>(1 + numbers.below(16));
  const auto word = [&] {
    if (instruction != TileInstruction::kBf16) return numbers.bits();
    const uint32_t low = float_bits(numbers, kind.min, kind.range, kind) >> 16;
    return low | (float_bits(numbers, kind.min, kind.range, kind) & 0xffff0000u);
  };
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      t.a[i][j] = word();
      t.b[i][j] = word();
      t.c[i][j] = instruction == TileInstruction::kBf16
                      ? float_bits(numbers, kind.c_min, kind.c_range, kind)
                      : numbers.bits();
    }
  }
  if (instruction == TileInstruction::kBf16 && numbers.below(3) == 0) {
    // every other pair takes back the pair before it, but for a last bit here and there
    for (int k = 0; k + 1 < t.depth; k += 2) {
      for (int i = 0; i < 16; ++i) {
        t.a[i][k + 1] = t.a[i][k] ^ 0x80008000u ^ (numbers.below(8) == 0 ? 1u : 0u);
        t.b[k + 1][i] = t.b[k][i] ^ (numbers.below(8) == 0 ? 0x10000u : 0u);
      }
    }
  }
  return t;
}

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

const char* name_of(TileInstruction instruction) {
  constexpr const char* kNames[] = {"tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd"};
  return kNames[static_cast<int>(instruction)];
}

void describe(const TileOperands& t, int m, int n, uint32_t got, uint32_t want, TileCheck& check) {
  std::snprintf(check.first, sizeof check.first,
                "%d words of K, row %d, column %d: c %08x, first words %08x x %08x gave %08x, "
                "expected %08x",
                t.depth, m, n, t.c[m][n], t.a[m][0], t.b[0][n], got, want);
}

// ---- the hardware -------------------------------------------------------------------------------

#if defined(__x86_64__)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void hardware_product(TileInstruction instruction, TileOperands& t) {
  TileConfig config;
  config.rows[0] = config.rows[1] = static_cast<uint8_t>(t.rows);
  config.rows[2] = static_cast<uint8_t>(t.depth);
  config.row_bytes[0] = config.row_bytes[2] = 64;
  config.row_bytes[1] = static_cast<uint16_t>(4 * t.depth);
  const int64_t stride = 64;
  __asm__ volatile(
      "ldtilecfg %0\n\t"
      "tileloadd (%1,%4,1), %%tmm0\n\t"
      "tileloadd (%2,%4,1), %%tmm1\n\t"
      "tileloadd (%3,%4,1), %%tmm2\n\t"
      :
      : "m"(config), "r"(t.c), "r"(t.a), "r"(t.b), "r"(stride)
      : "memory");
  switch (instruction) {
    case TileInstruction::kBf16:
      __asm__ volatile("tdpbf16ps %%tmm2, %%tmm1, %%tmm0" : :);
      break;
    case TileInstruction::kSignedSigned:
      __asm__ volatile("tdpbssd %%tmm2, %%tmm1, %%tmm0" : :);
      break;
    case TileInstruction::kSignedUnsigned:
      __asm__ volatile("tdpbsud %%tmm2, %%tmm1, %%tmm0" : :);
      break;
    case TileInstruction::kUnsignedSigned:
      __asm__ volatile("tdpbusd %%tmm2, %%tmm1, %%tmm0" : :);
      break;
  }
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)\n\ttilerelease"
                   :
                   : "r"(t.c), "r"(stride)
                   : "memory");
}

#else
void hardware_product(TileInstruction, TileOperands&) {}
#endif

// A build for tests may pretend to have a unit; what it has not it cannot be asked about.
bool cpu_has(TileInstruction instruction) {
#if !defined(__x86_64__) || defined(BITNET_PRETENDED_FEATURES)
  static_cast<void>(instruction);
  return false;
#else
  const uint64_t kind = instruction == TileInstruction::kBf16 ? kAmxBf16 : kAmxInt8;
  const uint64_t needed = kAmxTile | kind;
  return (cpu_features() & needed) == needed;
#endif
}

bool has_instruction(TileInstruction instruction) {
  return cpu_has(instruction) && request_amx_permission();
}

}  // namespace

void model_product(TileInstruction instruction, TileOperands& t) {
  const bool signed_a = instruction != TileInstruction::kUnsignedSigned;
  const bool signed_b = instruction != TileInstruction::kSignedUnsigned;
  for (int m = 0; m < t.rows; ++m) {
    for (int n = 0; n < 16; ++n) {
      t.c[m][n] = instruction == TileInstruction::kBf16 ? bf16_output(t, m, n)
                                                        : int8_output(t, m, n, signed_a, signed_b);
    }
  }
}

TileCheck check_product(TileInstruction instruction, int64_t products, uint64_t seed,
                        TileProduct product) {
  TileCheck check;
  check.instruction = name_of(instruction);
  check.available = true;
  const bool floats = instruction == TileInstruction::kBf16;
  RandomWords numbers(seed);
  for (int64_t i = 0; i < products; ++i) {
    for (const Kind& kind : kKinds) {
      const TileOperands before = random_operands(instruction, kind, numbers);
      TileOperands got = before, want = before;
      product(instruction, got);
      model_product(instruction, want);
      for (int m = 0; m < before.rows; ++m) {
        for (int n = 0; n < 16; ++n) {
          const uint32_t x = got.c[m][n], y = want.c[m][n];
          ++check.outputs;
          if (x == y || (floats && is_nan(x) && is_nan(y))) continue;
          if (check.different++ == 0) describe(before, m, n, x, y, check);
        }
      }
    }
  }
  return check;
}

bool tile_unit_in_order() {
  if (!cpu_has(TileInstruction::kBf16) || amx_permission() != AmxPermission::kGranted) return false;
  static const bool in_order = [] {
    constexpr int64_t kFirstUse = 8;  // products of a kind
    return check_product(TileInstruction::kBf16, kFirstUse, 1, hardware_product).different == 0;
  }();
  return in_order;
}

void check_tile_unit(int64_t products, uint64_t seed, TileCheck (&checks)[kTileInstructions]) {
  for (int i = 0; i < kTileInstructions; ++i) {
    const auto instruction = static_cast<TileInstruction>(i);
    checks[i] = {};
    checks[i].instruction = name_of(instruction);
    if (has_instruction(instruction))
      checks[i] = check_product(instruction, products, seed, hardware_product);
  }
}

}  // namespace bitnet
