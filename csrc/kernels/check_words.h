// Random words and their halves, for checks that hold an instruction of the CPU at hand against its
// model in plain C++ (tile_check.cpp, pair_unit.cpp): the same numbers on every machine.
#pragma once

#include <bit>
#include <cstdint>

namespace bitnet {

// splitmix64: one 64-bit state, any seed is good.
class RandomWords {
 public:
  explicit RandomWords(uint64_t seed) : state_(seed) {}
  uint32_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
  }
  uint32_t below(uint32_t n) { return bits() % n; }

 private:
  uint64_t state_;
};

// The bfloat16 in the lower (0) or upper (1) half of a word.
inline float bf16_half(uint32_t word, int half) {
  return std::bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000u);
}

}  // namespace bitnet
