// Products of ternary weights with quantised tokens: the one job, and what a row of the list of
// algorithms says about itself. An ISA's list is ternary/algorithms.inl; which row a product takes
// is decided in engine/products/plan.cpp. Every row that takes a shape gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/layout.h"
#include "kernels/dtype.h"

namespace bitnet {

// Codes of a token that always lie together.
inline constexpr int64_t kTokenStep = 64;
// Sums of a call at most, unless its algorithm finishes them itself.
inline constexpr int64_t kMaxProductSums = 128 * 64;

// The properties of a product that the choice of its algorithm and its cut depend on.
struct ProductShape {
  layout::WeightFormat format;  // kCanonical if any of the matrices is
  int64_t tokens, k;
  int64_t row_blocks, block_rows;  // of all matrices that share the tokens
  int64_t planes = 1;
  bool grouped = false;   // has scales of groups
  bool blocked = true;    // and they lie beside the tiles
  bool scratch = false;   // a call may get memory
  bool splits_k = false;  // K may be cut: the caller has a place for the sums of the parts

  bool tiles() const { return format != layout::WeightFormat::kCanonical; }
  // Tokens in row-major order alone: sums over groups are taken of rows as they lie.
  bool row_major() const { return grouped || !tiles(); }
  int64_t rows() const { return row_blocks * block_rows; }
};

// How an algorithm wants a product cut into calls.
struct ProductBlocking {
  int64_t tokens = 64;            // that one call multiplies at most
  int64_t rows = 512;             // likewise, rounded to whole row blocks, at least one
  int64_t sums = 64 * 80;         // likewise: tokens * rows, so that they stay in L1
  int64_t min_rows = 0;           // that a thread claims, as far as there are so many
  int64_t claim_fraction = 8;     // a claim takes one in so many of the units that are left
  int64_t token_tile = 0;         // 0: row-major; else tokens of a tile, 64 codes of each in turn
  int64_t token_multiple = 1;     // tokens of a block are a multiple of so many, but for the last
  bool tokens_outermost = false;  // all rows for a block of tokens before the next, or the reverse
  bool kernel_stores = false;     // sums are not stored, so `sums` does not bound the rows
  bool equal_row_parts = false;   // calls and claims of equal parts of all rows, of at most `rows`
  int64_t scratch_bytes = 0;      // ProductJob::scratch, of a call of at most `rows` rows

  // Whether all calls of a product take the algorithm that asks for this.
  bool is_special() const { return token_tile != 0 || scratch_bytes != 0; }
};

// Some row blocks x some tokens: sums[m * out_stride + i] = sum_k (code[i][k] - 1) * x[m][k] of row
// i of the job and token m; or values with scales of groups. Bounds for tiles of K <= 32768: sums
// of raw and scaled bytes stay below 255 * 128 * K < 2^30; base-3 sums, before they are divided by
// 256, within 256 * 2 * 128 * K <= 2^31. For canonical rows |sum of code * x| <= 3 * 128 * K < 2^31
// for K <= 5.5e6 whatever the bytes are.
struct ProductJob {
  layout::WeightFormat format;
  const uint8_t* weights;  // the first tile or canonical row, at the first k
  int64_t block_bytes;     // from one tile or row to the next
  int64_t k_steps;         // to be multiplied, 4 k each: of tiles a multiple of 16
  int64_t blocks;          // tiles or canonical rows
  // Plane p of token m at x + (m * planes + p) * x_stride, readable for 4 * k_steps, zeros from K.
  // x_stride kTokenStep, which no row has, says that tokens are in tiles of blocking.token_tile.
  const int8_t* x = nullptr;
  int64_t x_stride = 0;
  int64_t tokens = 0;
  int64_t planes = 1;              // 2: planes high and low of codes of 16 bits, 256 * high + low,
                                   // at most 32512 in magnitude; with scales of groups alone
  const int32_t* x_sum = nullptr;  // [tokens], of the codes that are multiplied
  // Scales of groups, 32 or 16 k-steps each, the last may be shorter; 0: none. Then x_sum is of
  // group g and token m at [g * x_group_stride + m], and
  //   values[m * out_stride + i] = fma(float(sum of a group), scale * x_scale, values[...]),
  // groups ascending, from 0 on. Each sum is an exact integer, below 2^23 whatever the planes, so
  // its float is exact; the product of the scales is rounded, and is `scale` where there is no
  // x_scale. Bounds: a group of two planes is 128 codes up to 32512; times a byte of 255 below
  // 2^31, and base-3 sums before they are divided, 256 * 2 * 128 * 32512, too.
  int64_t group_steps = 0;
  const float* x_scale = nullptr;  // as x_sum, what a code is worth; null: 1
  int64_t x_group_stride = 0;
  DType scale_type = DType::kF32;  // kF32 or kF16
  const void* scale = nullptr;  // row i of tile t, group g: [t * scale_stride + g * block rows + i]
  int64_t scale_stride = 0;
  bool add = false;  // to the values that are there
  int32_t* sums = nullptr;
  float* values = nullptr;
  int64_t out_stride = 0;      // at least the rows of all blocks
  int64_t prefetch_bytes = 0;  // how far ahead of the weight stream to prefetch
  void* scratch = nullptr;     // ProductBlocking::scratch_bytes, aligned to 64; null: does without

  bool grouped() const { return group_steps != 0; }
};

// What becomes of a block of sums.
enum class StoreKind : int32_t {
  kSums,   // stored as they are, int32; the scales are not used
  kStore,  // stored as `type`
  kRound,  // rounded to `type`, stored as float32
  kAdd,    // rounded to `type`, added to the float32 values that are there
};

// y = float(sum) * (w_scale * x_scale) (+ bias), each operation rounded to float32, then stored.
struct EpilogueJob {
  const int32_t* sums;  // row i and token m at sums[m * sums_stride + i]
  int64_t sums_stride;
  int64_t rows, tokens;
  const float* w_scale;  // of row i: w_scale[i * w_scale_step], step 0 or 1
  int64_t w_scale_step;
  const float* x_scale;  // [tokens]
  const float* bias;     // [rows] or null
  StoreKind kind;
  DType type;  // kF32, kBF16 or kF16
  void* out;   // row i of token m: element i at out + m * out_stride_bytes
  int64_t out_stride_bytes;
};

// A row of the list.
struct ProductAlgorithm {
  const char* name;
  // Whether it can make products of this shape.
  bool (*takes)(const ProductShape& shape);
  // Whether it is the fastest of this row and those behind it, as far as this ISA is known;
  // ProductChoices know more of the CPU.
  bool (*usual)(const ProductShape& shape);
  ProductBlocking (*blocking)(const ProductShape& shape);
  // The sums or values of the job; of sums then store_block(*epilogue), where there is one, in one
  // go: the sums at job.sums, which are what the epilogue takes, may not be written.
  void (*run)(const ProductJob& job, const EpilogueJob* epilogue);
};

// No list has more rows.
inline constexpr int64_t kMaxProducts = 8;

// The rows of a list that this CPU takes: of tiles by format, scales of groups, planes and numbers
// of tokens, with memory for scratch and without. engine/products/tune.h fills it in; an empty
// place leaves the choice to ProductAlgorithm::usual.
struct ProductChoices {
  // Tokens, times planes, from which a place is.
  static constexpr int64_t kFrom[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 16, 24, 32, 64};
  static constexpr int64_t kPlaces = sizeof(kFrom) / sizeof(kFrom[0]);
  static constexpr int64_t kKinds = 6;  // 2 bit or base 3 x no groups, groups, groups of two planes

  struct Choice {
    const ProductAlgorithm* row[2] = {};  // without scratch, with it; read and written atomically
    int state = 0;                        // of engine/products/tune.cpp
    float seconds[kMaxProducts] = {};     // that rows took; 0: not measured
  };
  Choice places[kKinds][kPlaces];

  [[gnu::always_inline]] static int64_t kind_of(const ProductShape& s) {
    const int64_t kind = !s.grouped ? 0 : s.planes == 2 ? 2 : 1;
    return 2 * kind + (s.format == layout::WeightFormat::kBase3 ? 1 : 0);
  }
  [[gnu::always_inline]] static int64_t place_of(const ProductShape& s) {
    const int64_t rows = s.tokens * s.planes;
    int64_t place = kPlaces - 1;
    while (place > 0 && rows < kFrom[place]) --place;
    return place;
  }
  [[gnu::always_inline]] Choice& of(const ProductShape& s) {
    return places[kind_of(s)][place_of(s)];
  }
};

// The row of `list` that makes a product of this shape; null choices: the usual one.
[[gnu::always_inline]] inline const ProductAlgorithm& chosen(const ProductAlgorithm* list,
                                                             ProductChoices* choices,
                                                             const ProductShape& s) {
  if (choices != nullptr && s.tiles()) {
    const ProductAlgorithm* row =
        __atomic_load_n(&choices->of(s).row[s.scratch ? 1 : 0], __ATOMIC_RELAXED);
    if (row != nullptr && row->takes(s)) return *row;
  }
  const ProductAlgorithm* row = list;
  while (!row->usual(s)) ++row;
  return *row;
}

}  // namespace bitnet
