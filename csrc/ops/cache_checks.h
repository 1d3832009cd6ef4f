// What every op that takes a KV cache checks of it: types, memory, scales, positions.  A cache that
// fails has not been written to.  Must not know attention; the checks of one op's other arguments
// are its own.
#pragma once

#include <optional>

#include "kernels/kernel_table.h"
#include "ops/checks.h"

namespace bitnet::ops {

// float32, bfloat16 or int8.
void check_cache_dtype(const Check& check, const Tensor& cache, const char* argument);
// Of a tensor that has passed check_cache_dtype.
DType cache_type_of(const Tensor& cache);

// Do the two touch a common byte, whatever their strides?
bool overlap(const Tensor& a, const Tensor& b);
// Layers are dense, one after the other; gaps lie between them only.
bool dense_layers(const Tensor& t);

// int64 [batch]; `tokens` positions from each on must lie inside a cache of `length`.
const int64_t* check_positions(const Check& check, const Tensor& positions, int64_t batch,
                               int64_t length, int64_t tokens);

// The scales of an int8 cache, null with any other.
struct CacheScales {
  float* key = nullptr;
  float* value = nullptr;
};

// float32, of the cache's shape but for its last dimension; given if and only if the caches are
// int8.  `layers`: their first dimension may have gaps, else they are contiguous.
CacheScales check_cache_scales(const Check& check, const Tensor& key_cache,
                               const Tensor& value_cache, std::optional<Tensor>& key_scale,
                               std::optional<Tensor>& value_scale, bool layers);

}  // namespace bitnet::ops
