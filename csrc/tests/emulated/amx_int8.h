// AMX tiles as plain C++, for the tests: every kernel of amx_int8 on a CPU without a matrix unit.
// By the operation sections of LDTILECFG, TILELOADD, TILESTORED, TDPBSUD, TDPBSSD and TDPBF16PS.
// What the processor answers with a fault ends the program: a tile used without a configuration,
// shapes that differ. Must not know the vector instructions: those may be native or emulated
// (immintrin.h).
#pragma once

#include <cstdint>

namespace {
namespace emulated {

struct TileState {
  bool configured = false;
  int rows[8] = {}, row_bytes[8] = {};
  uint8_t bytes[8][16][64] = {};
};
inline thread_local TileState g_tiles;

[[maybe_unused]] inline void tile_require(bool ok) {
  if (!ok) __builtin_trap();
}
[[maybe_unused]] inline void tile_configure(const uint8_t* rows, const uint16_t* row_bytes) {
  g_tiles = TileState{};
  g_tiles.configured = true;
  for (int i = 0; i < 8; ++i) {
    tile_require(rows[i] <= 16 && row_bytes[i] <= 64);
    g_tiles.rows[i] = rows[i];
    g_tiles.row_bytes[i] = row_bytes[i];
  }
}
[[maybe_unused]] inline void tile_release() { g_tiles = TileState{}; }
[[maybe_unused]] inline void tile_zero(int n) {
  tile_require(g_tiles.configured);
  __builtin_memset(g_tiles.bytes[n], 0, sizeof g_tiles.bytes[n]);
}
[[maybe_unused]] inline void tile_load(int n, const void* p, int64_t stride) {
  tile_zero(n);
  for (int r = 0; r < g_tiles.rows[n]; ++r) {
    __builtin_memcpy(g_tiles.bytes[n][r], static_cast<const char*>(p) + r * stride,
                     static_cast<unsigned>(g_tiles.row_bytes[n]));
  }
}
[[maybe_unused]] inline void tile_store(int n, void* p, int64_t stride) {
  tile_require(g_tiles.configured);
  for (int r = 0; r < g_tiles.rows[n]; ++r) {
    __builtin_memcpy(static_cast<char*>(p) + r * stride, g_tiles.bytes[n][r],
                     static_cast<unsigned>(g_tiles.row_bytes[n]));
  }
}
// B: the type of the right operand's bytes.
template <class B>
[[maybe_unused]] inline void tile_dpbs(int c, int a, int b) {
  TileState& s = g_tiles;
  tile_require(s.configured && s.rows[c] == s.rows[a] && s.row_bytes[c] == s.row_bytes[b] &&
               s.row_bytes[a] == 4 * s.rows[b]);
  const int columns = s.row_bytes[c] / 4;
  for (int m = 0; m < s.rows[c]; ++m) {
    uint32_t sums[16] = {};  // unsigned: the instruction wraps around
    __builtin_memcpy(sums, s.bytes[c][m], static_cast<unsigned>(s.row_bytes[c]));
    for (int k = 0; k < s.row_bytes[a]; ++k) {
      const int x = static_cast<int8_t>(s.bytes[a][m][k]);
      for (int n = 0; n < columns; ++n) {
        sums[n] += static_cast<uint32_t>(x * static_cast<B>(s.bytes[b][k / 4][4 * n + k % 4]));
      }
    }
    __builtin_memcpy(s.bytes[c][m], sums, static_cast<unsigned>(s.row_bytes[c]));
  }
}
[[maybe_unused]] inline void tile_dpbsud(int c, int a, int b) { tile_dpbs<uint8_t>(c, a, b); }
[[maybe_unused]] inline void tile_dpbssd(int c, int a, int b) { tile_dpbs<int8_t>(c, a, b); }

// Whatever the caller's rounding state: no operand of attention is denormal, no sum becomes so.
[[maybe_unused]] inline void tile_dpbf16(int c, int a, int b) {
  TileState& s = g_tiles;
  tile_require(s.configured && s.rows[c] == s.rows[a] && s.row_bytes[c] == s.row_bytes[b] &&
               s.row_bytes[a] == 4 * s.rows[b]);
  const auto number = [](const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, 2);
    const uint32_t word = static_cast<uint32_t>(half) << 16;
    float x;
    __builtin_memcpy(&x, &word, 4);
    return x;
  };
  for (int m = 0; m < s.rows[c]; ++m) {
    for (int n = 0; n < s.row_bytes[c] / 4; ++n) {
      float chains[2] = {}, sum;
      for (int k = 0; k < s.row_bytes[a] / 2; ++k) {
        chains[k % 2] =
            __builtin_fmaf(number(s.bytes[a][m] + 2 * k),
                           number(s.bytes[b][k / 2] + 4 * n + 2 * (k % 2)), chains[k % 2]);
      }
      __builtin_memcpy(&sum, s.bytes[c][m] + 4 * n, 4);
      sum += chains[0] + chains[1];
      __builtin_memcpy(s.bytes[c][m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace emulated
}  // namespace
