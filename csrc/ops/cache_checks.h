// What every op that takes a KV cache checks of it: types, memory, scales, positions.  A cache that
// fails has not been written to.  Must not know attention; the checks of one op's other arguments
// are its own.
#pragma once

#include <optional>
#include <vector>

#include "kernels/kernel_table.h"
#include "ops/checks.h"

namespace bitnet::ops {

// float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
void check_cache_dtype(const Check& check, const Tensor& cache, const char* argument);
// Of a tensor that has passed check_cache_dtype.
DType cache_type_of(const Tensor& cache);

// Do the two touch a common byte, whatever their strides?
bool overlap(const Tensor& a, const Tensor& b);
// Layers are dense, one after the other; gaps lie between them only.
bool dense_layers(const Tensor& t);

// int64 [batch]; `tokens` positions from each on must lie inside a cache of `length`.  They are
// copied into `copy` first, and the copy is what is checked and what an op may use: nobody who
// shares the tensor's memory (a cache that is being written, another thread) can change it later.
void check_positions(const Check& check, const Tensor& positions, int64_t batch, int64_t length,
                     int64_t tokens, std::vector<int64_t>& copy);

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

// The memory that an op writes to beside its results: both caches and, of int8 caches, their
// scales.  What the op only reads must lie elsewhere, for it is read while they are written.
class Mutated {
 public:
  // Of tensors that have passed the checks above, and so do not overlap each other.
  Mutated(const Tensor& key_cache, const Tensor& value_cache,
          const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale);
  void keep_apart(const Check& check, const Tensor& t, const char* argument) const;
  // The same for `bytes` bytes of memory, without a call into torch.
  void keep_apart(const Check& check, const void* data, int64_t bytes, const char* argument) const;

 private:
  struct Span {
    const char *begin, *end;
    const char* argument;
  };
  void add(const Tensor& t, const char* argument);
  Span spans_[4];
  int count_ = 0;
};

}  // namespace bitnet::ops
