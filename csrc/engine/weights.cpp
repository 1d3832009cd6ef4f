// Views of ternary weights and the sums of a run of row blocks; see weights.h. Which kernel of the
// table a product takes is decided here, by layout.
#include "engine/weights.h"

#include <algorithm>
#include <cstring>

#include "format/layout.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kCanonicalBlockRows = 16;

TileJob tile_job(const Weight& w, const SumsJob& job) {
  return {w.format,
          w.data + job.block_begin * w.block_bytes,
          w.k_steps,
          job.block_end - job.block_begin,
          job.x,
          job.x_stride,
          job.x_sum,
          job.tokens,
          job.out,
          job.out_stride,
          tuning().prefetch_bytes,
          job.x_step_stride,
          tuning().shared_ports,
          job.scratch};
}

void multiply_tiles(const KernelTable& table, const Weight& w, const SumsJob& job) {
  TileJob tiles = tile_job(w, job);
  if (job.k_count == 0) return table.tile_gemm(tiles);
  // a range's k-steps of one tile are consecutive, those of the next tile are not
  tiles.tiles += job.k_begin / layout::kTileStepK * (w.block_bytes / w.k_steps);
  tiles.k_steps = job.k_count / layout::kTileStepK;
  tiles.tile_count = 1;
  for (int64_t block = job.block_begin; block < job.block_end; ++block) {
    table.tile_gemm(tiles);
    tiles.tiles += w.block_bytes;
    tiles.out += w.block_rows;
  }
}

void multiply_canonical(const KernelTable& table, const Weight& w, const SumsJob& job) {
  const int64_t row_bytes = layout::row_bytes_for(w.k), begin = job.block_begin * w.block_rows;
  const int64_t end = std::min(job.block_end * w.block_rows, w.n_rows);
  if (job.k_count == 0)
    return table.ternary_gemm(w.data, row_bytes, begin, end, job.x, job.x_stride, job.x_sum,
                              job.tokens, job.out, job.out_stride, tuning().prefetch_bytes);
  uint8_t rows[layout::kMostBlockRows * layout::kBlockBytes];
  for (int64_t from = begin; from < end; from += layout::kMostBlockRows) {
    const int64_t n = std::min(layout::kMostBlockRows, end - from);
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(rows + i * layout::kBlockBytes,
                  w.data + (from + i) * row_bytes + layout::row_bytes_for(job.k_begin),
                  static_cast<size_t>(layout::kBlockBytes));
    }
    table.ternary_gemm(rows, layout::kBlockBytes, 0, n, job.x, job.x_stride, job.x_sum, job.tokens,
                       job.out + (from - begin), job.out_stride, tuning().prefetch_bytes);
  }
}

}  // namespace

Weight canonical_weight(const void* data, int64_t n_rows, int64_t k) {
  return {static_cast<const uint8_t*>(data),
          WeightFormat::kCanonical,
          n_rows,
          k,
          kCanonicalBlockRows,
          (n_rows + kCanonicalBlockRows - 1) / kCanonicalBlockRows,
          kCanonicalBlockRows * layout::row_bytes_for(k),
          0};
}

Weight tile_weight(const void* data, WeightFormat format, int64_t n_rows, int64_t k,
                   int64_t lanes) {
  const layout::WeightLayout& layout = layout::layout_of(format);
  return {static_cast<const uint8_t*>(data),
          format,
          n_rows,
          k,
          layout.block_rows(lanes),
          layout.row_blocks(n_rows, lanes),
          layout.block_bytes(k, lanes),
          layout.k_steps(k)};
}

void multiply_sums(const KernelTable& table, const Weight& weight, const SumsJob& job) {
  const bool canonical = weight.format == WeightFormat::kCanonical;
  (canonical ? multiply_canonical : multiply_tiles)(table, weight, job);
}

void multiply_and_store(const KernelTable& table, const Weight& weight, const SumsJob& job,
                        const EpilogueJob& epilogue) {
  if (weight.format != WeightFormat::kCanonical)
    return table.tile_product(tile_job(weight, job), epilogue);
  multiply_canonical(table, weight, job);
  table.store_block(epilogue);
}

}  // namespace bitnet::engine
