// What every op that takes a KV cache checks of it: types, memory, scales, positions.  A cache that
// fails has not been written to.  Must not know attention; the checks of one op's other arguments
// are its own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/kv_cache.h"
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

// float32, of the cache's shape but for its last dimension; given if and only if the caches are
// int8.  `layers`: their first dimension may have gaps, else they are contiguous.
void check_cache_scales(const Check& check, const Tensor& key_cache, const Tensor& value_cache,
                        const std::optional<Tensor>& key_scale,
                        const std::optional<Tensor>& value_scale, bool layers);

// Which dimensions of a cache's tensors are its blocks, positions and heads; the last one is a row.
// `layer`: the dimension of layers, or -1.
struct CacheDims {
  int block, position, head, layer = -1;
};
inline constexpr CacheDims kRectangularLayers{1, 3, 2, 0};
inline constexpr CacheDims kPaged{0, 1, 2}, kPagedLayers{1, 2, 3, 0};

// A pool of blocks that is read, and maybe written, where it lies: any strides of all dimensions
// but the last, as long as no two rows share a byte. key_ and value_ are of one dtype and shape;
// their rows may alternate in one block of memory, as some engines keep them.
void check_pool(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                const CacheDims& dims);
// "rows" or "panels", as a pool that has passed check_pool can be; panels need bfloat16 or int8,
// blocks and rows of whole panels, and the positions of a block side by side.
CacheLayout check_layout(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                         const std::string& layout, const CacheDims& dims);
// Of sliding-window attention, not negative; 0: none. `windows`: one for each layer, or empty.
void check_window(const Check& check, int64_t window, const char* argument);
void check_windows(const Check& check, const std::vector<int64_t>& windows, int64_t layers);
// float32, of the pool's shape but for its last dimension and with rows of their own; given if and
// only if the pool is int8.
void check_pool_scales(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                       const std::optional<Tensor>& key_scale,
                       const std::optional<Tensor>& value_scale);

// One layer of checked tensors as the engine takes it.
engine::CachePool pool_view(const Tensor& keys, const Tensor& values,
                            const std::optional<Tensor>& key_scale,
                            const std::optional<Tensor>& value_scale, const CacheDims& dims,
                            int64_t layer = 0, CacheLayout layout = CacheLayout::kRows);

// The memory that an op writes to beside its results: both caches and, of int8 caches, their
// scales.  What the op only reads must lie elsewhere, for it is read while they are written.
class Mutated {
 public:
  // Of tensors that have passed the checks above, and so do not overlap each other.
  Mutated(const Tensor& key_cache, const Tensor& value_cache,
          const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale,
          const char* key_name = "key_cache", const char* value_name = "value_cache");
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
