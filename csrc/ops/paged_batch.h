// The tensors that say which tokens of which sequences a call computes and which blocks of a pool
// hold their keys and values, in vLLM's terms. Everything is copied first and checked then, so that
// nobody who shares a tensor's memory can change it later.
#pragma once

#include <vector>

#include "engine/kv_cache.h"
#include "ops/checks.h"

namespace bitnet::ops {

// int64 or int32 of the given shape, [n] or [rows, n], as int64.
void copy_indices(const Check& check, const Tensor& t, const char* argument, const Shape& shape,
                  std::vector<int64_t>& copy);

class PagedBatch {
 public:
  // query_start_loc [n + 1] from 0 to `tokens`, seq_lens [n], block_table [n, any]: the blocks that
  // hold positions 0 .. seq_lens[s] - 1 lie in [0, blocks).
  void set(const Check& check, const Tensor& query_start_loc, const Tensor& seq_lens,
           const Tensor& block_table, int64_t tokens, int64_t blocks, int64_t block_size);

  // The same of sequences without blocks.
  void set_lengths(const Check& check, const Tensor& query_start_loc, const Tensor& seq_lens,
                   int64_t tokens);

  engine::Sequences view() const;

 private:
  void copy_table(const Check& check, const Tensor& block_table, int64_t blocks,
                  int64_t block_size);
  std::vector<int64_t> query_start_, lengths_, table_;
  int64_t table_stride_ = 0;
};

// Slots [tokens] of a pool, all different.
void copy_slots(const Check& check, const Tensor& slot_mapping, int64_t tokens, int64_t slots,
                std::vector<int64_t>& copy);

}  // namespace bitnet::ops
