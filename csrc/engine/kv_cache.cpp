// Cache writes; see kv_cache.h.
#include "engine/kv_cache.h"

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

void store_row(const KernelTable& table, const CachePool& pool, const PoolView& rows,
               const PoolView& scales, int64_t slot, int64_t head, const float* row) {
  const int64_t block = slot / pool.block_size, position = slot % pool.block_size;
  char* to = rows.at(block, position, head);
  if (!pool.scaled()) return table.store_cache_row(pool.type, row, pool.dim, to);
  *reinterpret_cast<float*>(scales.at(block, position, head)) =
      table.head_quantize_int8(row, pool.dim, reinterpret_cast<int8_t*>(to));
}

}  // namespace

void store_cache_rows(const KernelTable& table, const CachePool& pool, int64_t slot, int64_t head,
                      const float* key, const float* value) {
  store_row(table, pool, pool.keys, pool.key_scales, slot, head, key);
  store_row(table, pool, pool.values, pool.value_scales, slot, head, value);
}

void write_cache(const Rows& keys, const Rows& values, const int64_t* slots, int64_t heads,
                 const CachePool& pool) {
  const KernelTable& table = kernels();
  const int64_t dim = pool.dim;
  parallel_rows(keys.count, 2 * dim, 2 * dim, [&](int64_t i, float* row) {
    table.load_row(keys.type, keys.at(i), dim, row);
    table.load_row(values.type, values.at(i), dim, row + dim);
    store_cache_rows(table, pool, slots[i / heads], i % heads, row, row + dim);
  });
}

}  // namespace bitnet::engine
