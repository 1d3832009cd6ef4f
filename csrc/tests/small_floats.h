// The small floats by the value of each code: a number is rounded by searching the nearest one, so
// that no bit trick is shared with the kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/kernel_table.h"

namespace bitnet::test {

// A format of `width` bits: `fraction` bits below the exponent, `bias` of the exponent.
struct Format {
  DType type;
  const char* name;
  int width, fraction, bias;
  bool infinite, saturates;  // has infinities; finite numbers beyond the largest become it

  int patterns() const { return 1 << width; }
  int sign() const { return patterns() / 2; }
  // Finite and positive ones; without infinities, only the last pattern is none of them.
  int codes() const {
    return infinite ? ((1 << (width - 1 - fraction)) - 1) << fraction : sign() - 1;
  }
  // The value of a positive code; codes() stands for the first value out of range.
  double value(int code) const {
    const int exponent = code >> fraction, below = code & ((1 << fraction) - 1);
    if (exponent == 0) return std::ldexp(below, 1 - bias - fraction);
    return std::ldexp(below + (1 << fraction), exponent - bias - fraction);
  }
  // Nearest code; a tie goes to the even one.  From half way to the first value out of range:
  // infinity, whose code is that value's, unless the format saturates.
  uint16_t nearest(float x) const {
    const double magnitude = std::fabs(static_cast<double>(x));
    int low = 0, high = codes();
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (value(middle) <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - value(low), above = value(high) - magnitude;
    int code = below < above ? low : above < below ? high : low % 2 == 0 ? low : high;
    const bool stays = saturates && (std::isfinite(x) || !infinite);
    if (stays && code == codes()) code = codes() - 1;
    return static_cast<uint16_t>(code | (std::signbit(x) ? sign() : 0));
  }
};

inline constexpr Format kFormats[] = {{DType::kBF16, "bf16", 16, 7, 127, true, false},
                                      {DType::kF16, "f16", 16, 10, 15, true, false},
                                      {DType::kF8E4M3, "e4m3", 8, 3, 7, false, true},
                                      {DType::kF8E5M2, "e5m2", 8, 2, 15, true, true}};

inline double round_half_even(double x) {
  const double low = std::floor(x), rest = x - low;
  if (rest != 0.5) return rest < 0.5 ? low : low + 1;
  return std::fmod(low, 2) == 0 ? low : low + 1;
}

}  // namespace bitnet::test
