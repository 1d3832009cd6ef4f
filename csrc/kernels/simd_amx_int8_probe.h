// The peak of the matrix unit for benchmarks: what a product of tiles can reach at best.  Operands
// come from L1, one tile load a product as in any 2 x 2 blocking, for a loop on registers alone is
// 20 % above everything that multiplies different data; and they are no zeros, on which the clock
// is higher.  Must not know threads or a kernel.
#pragma once

#include "kernels/simd_amx_int8.h"

#define BITNET_MATRIX_PEAK

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kPeakSteps = 4;  // 16 KiB of operands: a third of L1

// Byte i of the signed operands is i * 167 + i / 256 * 29, of the unsigned ones a code of a 2-bit
// field as the kernels mask it: (i * 73 / 16 % 3) * 4^(i / 2048), all modulo 256.
struct alignas(64) PeakData {
  uint8_t a[kPeakSteps * 2 * kStepBytes], b[kPeakSteps * 2 * kStepBytes];
};

constexpr PeakData peak_data() {
  PeakData d{};
  for (int64_t i = 0; i < kPeakSteps * 2 * kStepBytes; ++i) {
    d.a[i] = static_cast<uint8_t>(i * 167 + i / 256 * 29);
    d.b[i] = static_cast<uint8_t>((i * 73 / 16 % 3) << (2 * (i / 2048)));
  }
  return d;
}
constexpr PeakData kPeakData = peak_data();

// The sum of all elements of four accumulator tiles, modulo 2^32.
int32_t sum_of_tiles(const int32_t (&tiles)[4][256]) {
  uint32_t sum = 0;
  for (const auto& tile : tiles) {
    for (const int32_t value : tile) sum += static_cast<uint32_t>(value);
  }
  return static_cast<int32_t>(sum);
}

// An iteration multiplies every step once: tiles 2 s and 2 s + 1 of a by those of b.  *sink is the
// sum of all results, modulo 2^32.
int64_t probe_matrix_peak(int64_t iterations, int32_t* sink) {
  configure_tiles(TileConfig{});
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int64_t i = 0; i < iterations; ++i) {
    for (int64_t s = 0; s < kPeakSteps; ++s) {
      const uint8_t* a = kPeakData.a + s * 2 * kStepBytes;
      const uint8_t* b = kPeakData.b + s * 2 * kStepBytes;
      load_tile<4>(a, 64);
      load_tile<6>(b, 64);
      multiply_tiles<0, 4, 6>();
      load_tile<7>(b + kStepBytes, 64);
      multiply_tiles<1, 4, 7>();
      load_tile<5>(a + kStepBytes, 64);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  }
  alignas(64) int32_t sums[4][256];
  store_tile<0>(sums[0], 64);
  store_tile<1>(sums[1], 64);
  store_tile<2>(sums[2], 64);
  store_tile<3>(sums[3], 64);
  release_tiles();
  *sink = sum_of_tiles(sums);
  return iterations * kPeakSteps * 4 * 16 * 16 * 64;
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
