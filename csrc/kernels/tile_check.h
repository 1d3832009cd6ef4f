// What the tile products of AMX are taken to do, as plain C++, and how a unit is held against it
// over random operands.  Results of attention over bfloat16 caches and of every product on amx_int8
// rest on it, so `bitnet-ops doctor --check-amx` asks the hardware at hand.  Must not know the
// kernels.
#pragma once

#include <cstdint>

namespace bitnet {

// TDPBF16PS; TDPBSSD, TDPBSUD, TDPBUSD: the sign of A's numbers, then of B's.
enum class TileInstruction { kBf16, kSignedSigned, kSignedUnsigned, kUnsignedSigned };

// c [rows][16] += a [rows][depth] * b [depth][16], words of 32 bits; a word of a and b holds two
// bfloat16 or four bytes along K.
struct TileOperands {
  int32_t rows = 16, depth = 16;
  alignas(64) uint32_t a[16][16] = {}, b[16][16] = {}, c[16][16] = {};
};

using TileProduct = void (*)(TileInstruction instruction, TileOperands& operands);

// Integers wrap around.  Of bfloat16, two chains of fused multiply-adds over the even and the odd
// elements, each from +0, whose sum is added to c; every step is rounded to nearest even, denormal
// operands and results become zeros of their sign.
void model_product(TileInstruction instruction, TileOperands& operands);

struct TileCheck {
  const char* instruction = "";
  bool available = false;  // the CPU has it and the system grants tiles
  int64_t outputs = 0, different = 0;
  char first[192] = {};  // the first difference, for people
};

// `products` random products of each kind of operand, by `product` and by the model.  NaNs are
// equal whatever their bits.
TileCheck check_product(TileInstruction instruction, int64_t products, uint64_t seed,
                        TileProduct product);

// What AttentionChunk::matrix_unit may be, where the system has granted tiles; asks the CPU on the
// first call, in some milliseconds.
bool tile_unit_in_order();

constexpr int kTileInstructions = 4;

// All instructions on this CPU; asks the system for tiles where there are any.
void check_tile_unit(int64_t products, uint64_t seed, TileCheck (&checks)[kTileInstructions]);

}  // namespace bitnet
