// Keys and values in a pool of blocks: the address of a position of a head, and writing rows there.
// A rectangular cache is a pool with one long block for each sequence.
#pragma once

#include <vector>

#include "engine/row_ops.h"

namespace bitnet::engine {

// Rows of one kind (keys, values, or their scales): one for each head of each position of each
// block, with any strides.
struct PoolView {
  char* data = nullptr;
  int64_t block_bytes = 0, position_bytes = 0, head_bytes = 0;

  char* at(int64_t block, int64_t position, int64_t head) const {
    return data + block * block_bytes + position * position_bytes + head * head_bytes;
  }
};

// The pool of one layer. In kRows the `dim` elements of a row are contiguous. In kPanels 16
// positions form a panel, ordered as kernel_table.h says, which begins where the row of its first
// position would; block_size is a multiple of 16.
struct CachePool {
  DType type = DType::kF32;
  int64_t block_size = 1;  // positions of a block
  int64_t dim = 0;
  PoolView keys, values;
  PoolView key_scales, value_scales;  // float32, for int8 pools
  CacheLayout layout = CacheLayout::kRows;
  // Of each page of kAttentionChunk positions, numbered in its block, and head: bfloat16 [2 * dim],
  // the largest of every feature of its keys, then the smallest, rounded away from them. They are
  // there once the page's last position has been written. No data: there are none.
  PoolView bounds{};

  int64_t row_bytes() const { return dim * element_size(type); }
  bool scaled() const { return type == DType::kInt8; }
  bool in_panels() const { return layout == CacheLayout::kPanels; }
};

// Sequences: their new tokens, one sequence after the other, and the blocks with their keys and
// values. Borrowed memory.
struct Sequences {
  int64_t count = 0;
  const int64_t* query_start = nullptr;  // [count + 1]: first new token of each, and the end
  const int64_t* lengths = nullptr;      // [count], new tokens included
  const int64_t* block_table = nullptr;  // [count, table_stride]
  int64_t table_stride = 0;

  int64_t tokens(int64_t s) const { return query_start[s + 1] - query_start[s]; }
  // Position of the first new token.
  int64_t start(int64_t s) const { return lengths[s] - tokens(s); }
  const int64_t* blocks(int64_t s) const { return block_table + s * table_stride; }
};

// Writes one head's key and value to slot = block * block_size + position.
void store_cache_rows(const KernelTable& kernels, const CachePool& pool, int64_t slot, int64_t head,
                      const float* key, const float* value);

// Bounds of the keys of page slot / kAttentionChunk; row: 3 * dim floats.
void bound_page(const KernelTable& kernels, const CachePool& pool, int64_t page, int64_t head,
                float* row);
// The pages whose last position is among `slots`, whose bounds are therefore to be made.
void find_filled_pages(const int64_t* slots, int64_t count, std::vector<int64_t>& pages);

// Writes keys and values [tokens, heads, dim] to the slots of their tokens.
void write_cache(const Rows& keys, const Rows& values, const int64_t* slots, int64_t heads,
                 const CachePool& pool);
// The bounds of the pages that such slots fill.
void bound_pages(const int64_t* slots, int64_t count, int64_t heads, const CachePool& pool);

}  // namespace bitnet::engine
