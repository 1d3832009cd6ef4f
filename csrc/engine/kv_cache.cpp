// Cache writes; see kv_cache.h.
#include "engine/kv_cache.h"

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {

void store_cache_row(const KernelTable& table, DType type, const float* row, int64_t dim,
                     int64_t at, void* cache, float* scales) {
  void* to = offset_bytes(cache, at * dim * element_size(type));
  if (type == DType::kInt8) {
    scales[at] = table.head_quantize_int8(row, dim, static_cast<int8_t*>(to));
  } else {
    table.store_row(type, row, dim, to);
  }
}

void write_cache(const Rows& rows, int64_t tokens, const CacheShape& shape, const int64_t* start,
                 void* cache, float* scales) {
  const KernelTable& table = kernels();
  const int64_t heads = shape.kv_heads, dim = shape.dim;
  parallel_rows(rows.count, dim, dim, [&](int64_t i, float* row) {
    const int64_t h = i % heads, t = i / heads % tokens, b = i / heads / tokens;
    table.load_row(rows.type, rows.at(i), dim, row);
    store_cache_row(table, shape.type, row, dim, shape.row_at(b, h, start[b] + t), cache, scales);
  });
}

}  // namespace bitnet::engine
