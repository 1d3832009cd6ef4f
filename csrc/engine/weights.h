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

// A run of row blocks x some tokens, all of K or a range of it: of tiles any multiple of 64 that
// begins at one, of canonical rows one block of 128.
struct SumsJob {
  int64_t block_begin, block_end;
  int64_t k_begin = 0, k_count = 0;  // 0: all of K
  // Token m from k_begin on at x + m * x_stride, its next 64 k at x_step_stride.
  const int8_t* x;
  int64_t x_stride, x_step_stride;
  const int32_t* x_sum;  // of the codes that are multiplied
  int64_t tokens;
  int32_t* out;  // row i of the run and token m at out[m * out_stride + i]
  int64_t out_stride;
  void* scratch = nullptr;  // TileJob::scratch
};

// The exact sums of the job.  Zeros stand in x from k to the next multiple of 128.  Writes whole
// row blocks, rows past n_rows included, except in the canonical layout.
void multiply_sums(const KernelTable& table, const Weight& weight, const SumsJob& job);
// Then store_block of them; job.out is where they may be on the way.
void multiply_and_store(const KernelTable& table, const Weight& weight, const SumsJob& job,
                        const EpilogueJob& epilogue);

}  // namespace bitnet::engine
