// Random test data: reproducible, and equal on every platform, which the standard library's
// distributions are not; and rows of floats of every flavour that a kernel may meet. Must not know
// kernels.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

namespace bitnet::test {

// splitmix64: one 64-bit state, any seed is good.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  // Uniform in [-1, 1).
  float unit() {
    return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * 0x1p-23f;
  }

 private:
  uint64_t state_;
};

// What a row of floats may look like.
enum class Flavour { kUnit, kWide, kTiny, kHuge, kTies, kSpecial };
inline constexpr Flavour kFlavours[] = {Flavour::kUnit, Flavour::kWide, Flavour::kTiny,
                                        Flavour::kHuge, Flavour::kTies, Flavour::kSpecial};
inline const char* name_of(Flavour flavour) {
  constexpr const char* kNames[] = {"unit", "wide", "tiny", "huge", "ties", "special"};
  return kNames[static_cast<int>(flavour)];
}

inline float special_value(Random& random) {
  using Limits = std::numeric_limits<float>;
  const float values[] = {0.0f,
                          -0.0f,
                          Limits::infinity(),
                          -Limits::infinity(),
                          Limits::max(),
                          -Limits::max(),
                          Limits::min(),
                          Limits::denorm_min(),
                          1.0f,
                          -87.5f,
                          88.5f,
                          Limits::quiet_NaN()};
  return values[random.below(sizeof values / sizeof values[0])];
}

inline float random_float(Random& random, Flavour flavour) {
  const float unit = random.unit();
  switch (flavour) {
    case Flavour::kUnit:
      return unit;
    case Flavour::kWide: {  // magnitudes from 2^-60 to 2^60, any fraction
      const auto exponent = static_cast<uint32_t>(127 - 60 + random.below(120));
      return std::bit_cast<float>((static_cast<uint32_t>(random.next()) & 0x807fffffu) | exponent
                                                                                             << 23);
    }
    case Flavour::kTiny:  // denormals and their neighbours
      return unit * 0x1p-125f;
    case Flavour::kHuge:
      return unit * 0x1.8p127f;
    case Flavour::kTies:  // halves in a range where int8 rounding meets them
      return static_cast<float>(random.below(509) - 254) * 0.5f;
    case Flavour::kSpecial:
      return random.below(4) == 0 ? special_value(random) : unit * 100.0f;
  }
  return unit;
}

inline std::vector<float> random_floats(Random& random, Flavour flavour, int64_t n) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& x : values) x = random_float(random, flavour);
  return values;
}

// What arithmetic treats specially, to be planted into an input that is otherwise ordinary.
inline constexpr float kLargest = std::numeric_limits<float>::max();
inline constexpr float kSmallest = std::numeric_limits<float>::min();
inline constexpr float kPlanted[] = {std::numeric_limits<float>::quiet_NaN(),
                                     std::numeric_limits<float>::infinity(),
                                     -std::numeric_limits<float>::infinity(),
                                     -0.0f,
                                     1e-45f,
                                     -1e-45f,
                                     1e-39f,
                                     kSmallest,
                                     -kSmallest,
                                     kLargest,
                                     -kLargest};

}  // namespace bitnet::test
