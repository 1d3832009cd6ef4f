// Problems of tiles: weights written into the layouts from the words of FORMAT.md, tokens, and the
// exact answer, from plain int64 sums of the codes they were made of. Must not know repack or
// torch.
#pragma once

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/contract.h"
#include "tests/random.h"

namespace bitnet::test {
namespace {

inline std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// The byte whose digits in base 3, taken off the top by multiplying with 3, are c[0] .. c[4]:
// found by trying all, so that no formula is shared with the packer.
inline uint8_t base3_byte(const int (&c)[5]) {
  for (int q = 0; q < 256; ++q) {
    int rest = q, f = 0;
    while (f < 5 && rest * 3 / 256 == c[f]) rest = rest * 3 % 256, ++f;
    if (f == 5) return static_cast<uint8_t>(q);
  }
  std::fprintf(stderr, "no byte for %d%d%d%d%d\n", c[0], c[1], c[2], c[3], c[4]);
  std::exit(1);
}

struct Problem {
  int64_t k, k_steps, lanes, fields, tiles, tokens;
  std::vector<uint8_t> packed;
  std::vector<int8_t> x;        // [tokens, 4 k_steps], zeros from k
  std::vector<int32_t> sums;    // [tokens]
  std::vector<int64_t> answer;  // [tokens, rows]
  std::function<int(int64_t, int64_t)> code;
  int64_t rows() const { return tiles * lanes * fields; }
};

// code(row, k) in 0..2 and x(token, k) make the data; behind k the code is 1.
template <class Code, class X>
Problem make_problem(const KernelTable& kernels, int64_t fields, int64_t k, int64_t tiles,
                     int64_t tokens, Code code, X x) {
  Problem p{k, (k + 63) / 64 * 16, kernels.tile_lanes, fields, tiles, tokens, {}, {}, {}, {}, code};
  const auto value = [&](int64_t row, int64_t i) { return i < k ? int{code(row, i)} : 1; };
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t byte = 0; byte < p.k_steps * p.lanes * 4; ++byte) {
      const int64_t lane = byte / 4 % p.lanes, i = byte / (4 * p.lanes) * 4 + byte % 4;
      int c[5] = {};
      for (int64_t f = 0; f < fields; ++f) {
        c[f] = value((tile * fields + f) * p.lanes + lane, i);
      }
      p.packed.push_back(fields == 5
                             ? base3_byte(c)
                             : static_cast<uint8_t>(c[0] + 4 * c[1] + 16 * c[2] + 64 * c[3]));
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t sum = 0;
    for (int64_t i = 0; i < 4 * p.k_steps; ++i) {
      p.x.push_back(i < k ? x(t, i) : int8_t{0});
      sum += p.x.back();
    }
    p.sums.push_back(static_cast<int32_t>(sum));
    for (int64_t n = 0; n < p.rows(); ++n) {
      int64_t dot = 0;
      for (int64_t i = 0; i < k; ++i)
        dot += (value(n, i) - 1) * int64_t{p.x[at(t * 4 * p.k_steps + i)]};
      p.answer.push_back(dot);
    }
  }
  return p;
}

inline Problem random_problem(const KernelTable& kernels, int64_t fields, int64_t k, int64_t tiles,
                              int64_t tokens) {
  Random random(static_cast<uint64_t>(k * 8 + fields));
  return make_problem(
      kernels, fields, k, tiles, tokens,
      // the same answer for the same question: the reference asks again
      [seed = random.next()](int64_t n, int64_t i) {
        return static_cast<int>(Random(seed + static_cast<uint64_t>(n * 100003 + i)).below(3));
      },
      [&](int64_t, int64_t) { return static_cast<int8_t>(random.below(256) - 128); });
}

// Whether two stored values are the same bits, or both NaN.
inline bool same(const void* got, const void* want, int64_t i, bool floats, DType type) {
  if (floats) {
    const float a = static_cast<const float*>(got)[i], b = static_cast<const float*>(want)[i];
    return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
  }
  const float a = contract::decode(type, got, i), b = contract::decode(type, want, i);
  return std::isnan(a)
             ? std::isnan(b)
             : static_cast<const uint16_t*>(got)[i] == static_cast<const uint16_t*>(want)[i];
}

}  // namespace
}  // namespace bitnet::test
