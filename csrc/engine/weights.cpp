// Views of ternary weights; see weights.h.
#include "engine/weights.h"

#include <algorithm>

#include "format/layout.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kCanonicalBlockRows = 16;

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

ProductJob job_of(const Weight& w, int64_t begin, int64_t end) {
  const bool rows = w.reads_rows();  // a job has single ones, the last row block may lack some
  return {
      .format = w.format,
      .weights = w.data + begin * w.block_bytes,
      .block_bytes = rows ? w.block_bytes / w.block_rows : w.block_bytes,
      .k_steps = rows ? layout::row_bytes_for(w.k) : w.k_steps,
      .blocks = rows ? std::min(end * w.block_rows, w.n_rows) - begin * w.block_rows : end - begin,
      .prefetch_bytes = tuning().prefetch_bytes};
}

}  // namespace bitnet::engine
