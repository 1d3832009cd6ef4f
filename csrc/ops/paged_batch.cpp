// The checks of paged_batch.h.
#include "ops/paged_batch.h"

#include <algorithm>

namespace bitnet::ops {
namespace {

// Copies `count` indices, `step` apart.
template <class T>
void copy_strided(const void* from, int64_t count, int64_t step, int64_t* to) {
  const auto* p = static_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int64_t>(p[i * step]);
}

void copy_row(const Tensor& t, int64_t offset, int64_t count, int64_t step, int64_t* to) {
  const void* from =
      offset_bytes(t.const_data_ptr(), offset * static_cast<int64_t>(t.element_size()));
  if (t.scalar_type() == ScalarType::Int) return copy_strided<int32_t>(from, count, step, to);
  copy_strided<int64_t>(from, count, step, to);
}

void check_index_type(const Check& check, const Tensor& t, const char* argument) {
  if (!t.defined()) check.dtype(t, argument, ScalarType::Long);  // it says so
  const ScalarType type = t.scalar_type();
  if (type != ScalarType::Long && type != ScalarType::Int)
    check.fail(argument, "of dtype int64 or int32", dtype_name(type));
}

// Not (positions + block_size - 1) / block_size, which could overflow.
int64_t blocks_for(int64_t positions, int64_t block_size) {
  return positions / block_size + static_cast<int64_t>(positions % block_size != 0);
}

std::string of_sequence(int64_t value, size_t s) {
  return std::to_string(value) + " for sequence " + std::to_string(s);
}

}  // namespace

void copy_indices(const Check& check, const Tensor& t, const char* argument, const Shape& shape,
                  std::vector<int64_t>& copy) {
  check_index_type(check, t, argument);
  check.shape(t, argument, shape);
  const bool rows = t.dim() == 2;
  const int64_t n = t.size(rows ? 1 : 0), count = rows ? t.size(0) : 1;
  copy.resize(static_cast<size_t>(count * n));
  for (int64_t r = 0; n > 0 && r < count; ++r)
    copy_row(t, rows ? r * t.stride(0) : 0, n, t.stride(rows ? 1 : 0), copy.data() + r * n);
}

void PagedBatch::set(const Check& check, const Tensor& query_start_loc, const Tensor& seq_lens,
                     const Tensor& block_table, int64_t tokens, int64_t blocks,
                     int64_t block_size) {
  set_lengths(check, query_start_loc, seq_lens, tokens);
  copy_table(check, block_table, blocks, block_size);
}

void PagedBatch::set_lengths(const Check& check, const Tensor& query_start_loc,
                             const Tensor& seq_lens, int64_t tokens) {
  check_index_type(check, seq_lens, "seq_lens");
  check.dim(seq_lens, "seq_lens", 1);
  const int64_t count = seq_lens.size(0);
  copy_indices(check, seq_lens, "seq_lens", {count}, lengths_);
  copy_indices(check, query_start_loc, "query_start_loc", {count + 1}, query_start_);
  if (query_start_.front() != 0 || query_start_.back() != tokens)
    check.fail("query_start_loc", "from 0 to the number of tokens " + std::to_string(tokens),
               std::to_string(query_start_.front()) + " to " + std::to_string(query_start_.back()));
  for (size_t s = 0; s < lengths_.size(); ++s) {
    const int64_t own = query_start_[s + 1] - query_start_[s];
    if (own < 0) check.fail("query_start_loc", "ascending", of_sequence(own, s) + " tokens");
    if (lengths_[s] < own)
      check.fail("seq_lens", "at least the " + std::to_string(own) + " new tokens",
                 of_sequence(lengths_[s], s));
  }
  table_.clear();
  table_stride_ = 0;
}

// Only what is needed: an engine's table has columns for the longest context.
void PagedBatch::copy_table(const Check& check, const Tensor& block_table, int64_t blocks,
                            int64_t block_size) {
  check_index_type(check, block_table, "block_table");
  check.dim(block_table, "block_table", 2);
  const auto count = static_cast<int64_t>(lengths_.size());
  if (block_table.size(0) != count)
    check.fail("block_table", "with the " + std::to_string(count) + " sequences of seq_lens",
               std::to_string(block_table.size(0)) + " rows");
  table_stride_ = 0;
  for (size_t s = 0; s < lengths_.size(); ++s) {
    const int64_t needed = blocks_for(lengths_[s], block_size);
    if (needed > block_table.size(1))
      check.fail("block_table",
                 "with at least " + std::to_string(needed) + " blocks of " +
                     std::to_string(block_size) + " positions for sequence " + std::to_string(s) +
                     " of length " + std::to_string(lengths_[s]),
                 std::to_string(block_table.size(1)) + " columns");
    table_stride_ = std::max(table_stride_, needed);
  }
  table_.resize(static_cast<size_t>(count * table_stride_));
  for (int64_t s = 0; s < count; ++s) {
    const int64_t length = lengths_[static_cast<size_t>(s)];
    const int64_t needed = blocks_for(length, block_size);
    int64_t* row = table_.data() + s * table_stride_;
    if (needed > 0)
      copy_row(block_table, s * block_table.stride(0), needed, block_table.stride(1), row);
    for (int64_t i = 0; i < needed; ++i) {
      if (!(row[i] >= 0 && row[i] < blocks))
        check.fail("block_table", "of blocks in [0, " + std::to_string(blocks) + ")",
                   of_sequence(row[i], static_cast<size_t>(s)));
    }
  }
}

engine::Sequences PagedBatch::view() const {
  return {static_cast<int64_t>(lengths_.size()), query_start_.data(), lengths_.data(),
          table_.data(), table_stride_};
}

void copy_slots(const Check& check, const Tensor& slot_mapping, int64_t tokens, int64_t slots,
                std::vector<int64_t>& copy) {
  copy_indices(check, slot_mapping, "slot_mapping", {tokens}, copy);
  std::vector<int64_t> sorted = copy;
  std::sort(sorted.begin(), sorted.end());
  if (tokens > 0 && !(sorted.front() >= 0 && sorted.back() < slots))
    check.fail("slot_mapping", "of slots in [0, " + std::to_string(slots) + ")",
               std::to_string(sorted.front() < 0 ? sorted.front() : sorted.back()));
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    check.fail("slot_mapping", "of different slots", std::to_string(*twice) + " twice");
}

}  // namespace bitnet::ops
