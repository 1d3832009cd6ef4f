// What every op that takes a KV cache checks of it: types, memory, scales.  A cache that
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

// Which dimensions of a cache's tensors are its blocks, positions and heads; the last one is a row.
// `layer`: the dimension of layers, or -1.
struct CacheDims {
  int block, position, head, layer = -1;
};
inline constexpr CacheDims kPaged{0, 1, 2}, kPagedLayers{1, 2, 3, 0};

// Any strides, as long as no two elements share a byte.
void check_rows(const Check& check, const Tensor& t, const char* argument);
// Whether two tensors touch a common byte, as far as the first and the last byte of each tell.
bool overlap(const Tensor& a, const Tensor& b);
// Bytes from the first to the last of what lies at one place of dimension d.
int64_t part_bytes(const Tensor& t, int64_t d);
// A pool of blocks that is read, and maybe written, where it lies: any strides of all dimensions
// but the last, as long as no two rows share a byte. key_ and value_ are of one dtype and shape;
// their rows may alternate in one block of memory, as some engines keep them.
void check_pool(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                const CacheDims& dims);
// "rows" or "panels", as a pool that has passed check_pool can be; panels need bfloat16 or int8,
// blocks and rows of whole panels, and the positions of a block side by side.
CacheLayout check_layout(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                         const std::string& layout, const CacheDims& dims);
// Of sliding-window attention, not negative; 0: none.
void check_window(const Check& check, int64_t window, const char* argument);
// float32, of the pool's shape but for its last dimension and with rows of their own; given if and
// only if the pool is int8.
void check_pool_scales(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                       const std::optional<Tensor>& key_scale,
                       const std::optional<Tensor>& value_scale);

// bfloat16, of the pool's shape but for pages of 64 positions where positions are, and rows of
// twice the length, contiguous and in memory of their own; blocks are whole pages.
void check_bounds(const Check& check, const Tensor& bounds, const Tensor& key_pool,
                  const Tensor& value_pool, const CacheDims& dims);
engine::PoolView bounds_view(const Tensor& bounds, const CacheDims& dims);

// One layer of checked tensors as the engine takes it.
engine::CachePool pool_view(const Tensor& keys, const Tensor& values,
                            const std::optional<Tensor>& key_scale,
                            const std::optional<Tensor>& value_scale, const CacheDims& dims,
                            int64_t layer = 0, CacheLayout layout = CacheLayout::kRows);

// The memory that an op writes to beside its results: both caches and, of int8 caches, their
// scales.  What the op only reads must lie elsewhere, for it is read while they are written.
class Mutated {
 public:
  Mutated() = default;
  // Of tensors that have passed the checks above, and so do not overlap each other.
  Mutated(const Tensor& key_cache, const Tensor& value_cache,
          const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale,
          const char* key_name, const char* value_name);
  // One more tensor that is written.
  void add(const Tensor& t, const char* argument);
  void keep_apart(const Check& check, const Tensor& t, const char* argument) const;
  // The same for `bytes` bytes of memory, without a call into torch.
  void keep_apart(const Check& check, const void* data, int64_t bytes, const char* argument) const;

 private:
  struct Span {
    const char *begin, *end;
    const char* argument;
  };
  Span spans_[16];
  int count_ = 0;
};

}  // namespace bitnet::ops
