// Packed layouts of ternary weights and of heads: constants and sizes, mirrored line by line in
// FORMAT.md, which explains them. Kernels, ops and the reader all include this one. Knows bytes
// only: no torch, no SIMD, no allocation.
#pragma once

#include <cstdint>

namespace bitnet::layout {

// Canonical layout (SGLBITNT rows, GGUF I2_S layout a).  A row of K weights is a sequence of blocks
// of 128 weights in 32 bytes.  Byte j of a block holds, from the high bits down, the codes of
// weights j, j + 32, j + 64 and j + 96.  Code = weight + 1, so 0, 1, 2; code 3 is invalid.  Where K
// is not a multiple of 128 the codes past K are 1 (weight 0).
inline constexpr int64_t kBlockWeights = 128;
inline constexpr int64_t kBlockBytes = 32;
inline constexpr int64_t kFields = 4;                              // codes in a byte
inline constexpr int64_t kFieldWeights = kBlockWeights / kFields;  // distance between them
inline constexpr uint8_t kZeroByte = 0x55;                         // four codes of weight 0

constexpr int64_t blocks_for(int64_t k) { return (k + kBlockWeights - 1) / kBlockWeights; }
constexpr int64_t row_bytes_for(int64_t k) { return blocks_for(k) * kBlockBytes; }
constexpr int64_t padded_k(int64_t k) { return blocks_for(k) * kBlockWeights; }

// Bit position of the code of weight `w` (0..127) inside byte w % 32 of its block.
constexpr int shift_of(int64_t w) { return static_cast<int>(6 - 2 * (w / kFieldWeights)); }

// Head formats in memory (never in files); docs/reference/layouts.md, "Output heads".
// int8: int8 [V, K] row-major and one float32 scale a row.
// int4: tiles of 16 rows; groups of 64 or 128 features, the last one padded; a group of a tile is
// group / 8 lines of 64 bytes.  Line s: bytes 4 r .. 4 r + 3 belong to row r of the tile; byte 4 r
// + j holds the code of feature 8 s + j in its low half and of 8 s + 4 + j in its high half.  Code
// = weight + 8; padding, rows and features, has code 8.  Scales: bfloat16 [tiles, groups, 16].
inline constexpr int64_t kHeadTileRows = 16;
inline constexpr int64_t kHeadStepFeatures = 8;
inline constexpr int64_t kHeadStepBytes = 64;
// Features of a quantised head: 255 * 128 * kHeadMaxK < 2^31 keeps every partial sum in int32.
inline constexpr int64_t kHeadMaxK = 65536;
// A token's buffers are padded with zeros to a multiple of this (the larger group).
inline constexpr int64_t kHeadPadding = 128;

constexpr int64_t head_padded_k(int64_t k) {
  return (k + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}
constexpr int64_t head_tiles(int64_t rows) { return (rows + kHeadTileRows - 1) / kHeadTileRows; }

// CPU-specific layouts, made when a model is loaded and never written to a model file.  L lanes of
// 32 bits are what the kernel's registers hold: 4 (NEON), 8 (AVX2, AVX-VNNI, scalar), 16 (AVX-512,
// AMX).  A matrix is a sequence of row blocks (tiles) of fields * L rows; a row block is a sequence
// of k-steps, one sequential stream; a k-step is 4 * L bytes: byte j of lane l stands for
// k = 4 * step + j and holds the codes of `fields` rows, row L * f + l in field f:
//   2 bit   bits 2f+1..2f of the byte are the code of field f < 4
//   base-3  byte = ceil(256 * v / 243), v = sum over f < 5 of code(f) * 3^(4-f): a fraction in base
//           3, whose digits come off the top by multiplying with 3; 1.6 bits a weight
// N is padded to whole row blocks and K to a multiple of 64, both with code 1 (weight 0).
inline constexpr int64_t kTileStepK = 4;  // consecutive k in a lane
inline constexpr int64_t kTilePadK = 64;  // an AMX tile of k
// Bounds of the sums (kernels/products.h): of all K, and where every group has a sum of its own.
inline constexpr int64_t kTileMaxK = int64_t{1} << 15, kGroupedTileMaxK = int64_t{1} << 16;

// The base-3 byte of v = 81 * c0 + 27 * c1 + 9 * c2 + 3 * c3 + c4.
constexpr int base3_byte(int v) { return (256 * v + 242) / 243; }

// Columns, a second copy of a matrix in memory, for products that leave zeros of a token out.  A
// panel is 256 rows, a sequence of K lines of 64 bytes, one for each k.  Byte r of a line holds the
// codes of rows r, 64 + r, 128 + r and 192 + r of the panel, from the low bits up.  N is padded to
// whole panels with code 1 (weight 0).  Not a layout of PackedWeight.
inline constexpr int64_t kColumnRows = 256, kColumnBytes = 64;
constexpr int64_t column_panels(int64_t n) { return (n + kColumnRows - 1) / kColumnRows; }

// ---- every layout of ternary weights ------------------------------------------------------------

enum class WeightFormat : int32_t { kCanonical = 0, kTwoBit = 1, kBase3 = 2 };
constexpr WeightFormat kWeightFormats[] = {WeightFormat::kCanonical, WeightFormat::kTwoBit,
                                           WeightFormat::kBase3};

struct TensorShape {
  int64_t dimensions, size[4];
};

struct WeightLayout {
  const char* name;    // what ops and users call it
  bool cpu_specific;   // row blocks for the lanes of the kernels in use; else rows, of any lanes
  int64_t fields;      // codes in a byte
  int64_t k_step;      // consecutive k of a k-step; canonical: of a block
  int64_t k_multiple;  // K is padded to a multiple of it
  int64_t max_k;
  // Of its uint8 tensor, which tells the layouts apart: [N, row bytes], [row blocks, k-steps, 4 *
  // L] and [row blocks, k-steps, L, 4].
  int64_t dimensions;

  constexpr int64_t padded_k(int64_t k) const {
    return (k + k_multiple - 1) / k_multiple * k_multiple;
  }
  constexpr int64_t k_steps(int64_t k) const { return padded_k(k) / k_step; }
  // Rows that are stored together, how many times `n` rows take so many, and their bytes.
  constexpr int64_t block_rows(int64_t lanes) const { return cpu_specific ? fields * lanes : 1; }
  constexpr int64_t row_blocks(int64_t n, int64_t lanes) const {
    return (n + block_rows(lanes) - 1) / block_rows(lanes);
  }
  constexpr int64_t block_bytes(int64_t k, int64_t lanes) const {
    return padded_k(k) * block_rows(lanes) / fields;
  }
  constexpr TensorShape shape(int64_t n, int64_t k, int64_t lanes) const {
    const int64_t blocks = row_blocks(n, lanes);
    if (!cpu_specific) return {2, {n, block_bytes(k, lanes)}};
    if (dimensions == 3) return {3, {blocks, k_steps(k), k_step * lanes}};
    return {4, {blocks, k_steps(k), lanes, k_step}};
  }
};

// By WeightFormat.
inline constexpr WeightLayout kWeightLayouts[] = {
    {"canonical", false, kFields, kBlockWeights, kBlockWeights, INT64_MAX, 2},
    {"2bit", true, 4, kTileStepK, kTilePadK, kTileMaxK, 3},
    {"1.6bit", true, 5, kTileStepK, kTilePadK, kTileMaxK, 4},
};
constexpr const WeightLayout& layout_of(WeightFormat format) {
  return kWeightLayouts[static_cast<int>(format)];
}
inline constexpr int64_t kMaxLanes = 16;
inline constexpr int64_t kMaxBlockRows = 5 * kMaxLanes;

}  // namespace bitnet::layout
