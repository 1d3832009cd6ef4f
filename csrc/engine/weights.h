// A ternary weight matrix as the engine sees it: a view that knows its layout (format/layout.h),
// cut into row blocks that a part of the work may take.
#pragma once

#include <cstdint>

#include "format/layout.h"
#include "kernels/kernel_table.h"

namespace bitnet::engine {

using layout::WeightFormat;

// Row blocks are consecutive in memory.  A CPU-specific layout's last one may reach past n_rows:
// its rows there are computed like the others, and their sums mean nothing.
struct Weight {
  const uint8_t* data;
  WeightFormat format;
  int64_t n_rows;
  int64_t k;            // as the activations have it, before padding
  int64_t block_rows;   // rows of a row block
  int64_t row_blocks;   // of the whole matrix
  int64_t block_bytes;  // of a whole row block
  int64_t k_steps;      // CPU-specific layouts: k-steps of a row block

  // Whether products read tokens in row-major order alone.
  bool reads_rows() const { return format == WeightFormat::kCanonical; }

  // Of the whole matrix: a CPU-specific layout has whole row blocks, canonical rows end with the
  // last.
  int64_t bytes() const {
    return format == WeightFormat::kCanonical ? n_rows * (block_bytes / block_rows)
                                              : row_blocks * block_bytes;
  }
};

// Views of memory whose size has been checked: uint8 [n_rows, row bytes], or whole tiles for
// `lanes` lanes.
Weight canonical_weight(const void* data, int64_t n_rows, int64_t k);
Weight tile_weight(const void* data, WeightFormat format, int64_t n_rows, int64_t k, int64_t lanes);

// A run of row blocks x some tokens.
struct ProductPart {
  int64_t block_begin, block_end;
  int64_t token, tokens;
};

// A job of the row blocks [begin, end), all of K, but for its tokens and its result.
ProductJob job_of(const Weight& weight, int64_t begin, int64_t end);

}  // namespace bitnet::engine
