// AMX tiles as plain C++, for the tests: every kernel of amx_int8 on a CPU without a matrix unit.
// By the operation sections of LDTILECFG, TILELOADD, TILESTORED, TDPBSUD and TDPBSSD.  What the
// processor answers with a fault ends the program: a tile used without a configuration, shapes that
// differ. Must not know the vector instructions: those may be native or emulated (immintrin.h).
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

}  // namespace emulated
}  // namespace
