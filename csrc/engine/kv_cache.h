// Writing keys and values into a cache of floating-point rows, or of int8 ones with a scale for
// every position.
#pragma once

#include "engine/row_ops.h"

namespace bitnet::engine {

// A cache [batch, kv_heads, length, dim] of one layer.
struct CacheShape {
  DType type;
  int64_t batch, kv_heads, length, dim;
  // Row of a position of head `h` of sequence `b`.
  int64_t row_at(int64_t b, int64_t h, int64_t position) const {
    return (b * kv_heads + h) * length + position;
  }
};

// Writes `row` as row `at` of a cache of that type, and of an int8 cache's scales.
void store_cache_row(const KernelTable& table, DType type, const float* row, int64_t dim,
                     int64_t at, void* cache, float* scales);

// Rows [batch, tokens, kv_heads, dim] to positions start[b] + t.
void write_cache(const Rows& rows, int64_t tokens, const CacheShape& shape, const int64_t* start,
                 void* cache, float* scales);

}  // namespace bitnet::engine
