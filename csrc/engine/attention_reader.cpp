// Reading pages of a KV cache for attention; see attention_reader.h.
#include "engine/attention_reader.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/pair_unit.h"
#include "kernels/tile_check.h"
#include "runtime/tuning.h"

namespace bitnet::engine {

PoolAccess PoolAccess::of(const CachePool& pool, const Sequences& sequences) {
  PoolAccess access;
  const auto block_size = static_cast<uint64_t>(pool.block_size);
  if (std::has_single_bit(block_size)) access.block_bits = std::countr_zero(block_size);
  const bool pairs = pool.type == DType::kBF16;
  access.pair_unit = pairs && tuning().fast_pairs && pair_unit_in_order();
  access.matrix_unit = pairs && tile_unit_in_order();
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences.count; ++s) {
    if (sequences.tokens(s) > 0) longest = std::max(longest, sequences.lengths[s]);
  }
  const bool whole_chunks = pool.block_size % kAttentionChunk == 0 || longest <= pool.block_size;
  const bool in_place = pool.in_panels() && !pool.scaled();  // scales of panels are not
  access.evenly_strided = pool.keys.position_bytes == pool.values.position_bytes &&
                          (!pool.scaled() || (pool.key_scales.position_bytes == sizeof(float) &&
                                              pool.value_scales.position_bytes == sizeof(float)));
  access.gathers = !in_place && (!whole_chunks || !access.evenly_strided);
  return access;
}

int64_t PoolAccess::floats(const CachePool& pool) const {
  if (!gathers) return 0;
  if (pool.in_panels()) return 2 * kAttentionChunk;  // scales
  const int64_t bytes = kAttentionChunk * pool.row_bytes();
  return 2 * kAttentionChunk + 2 * attention_padded((bytes + 3) / 4);
}

// By shifts where possible: a chunk looks several places up, and a division takes as long as ten
// other instructions.
AttentionReader::Place AttentionReader::place_of(const Group& group, int64_t position) const {
  const int64_t* blocks = cut_.sequences().blocks(group.sequence);
  const int64_t block_size = pool_.block_size;
  if (access_.block_bits >= 0)
    return {blocks[position >> access_.block_bits], position & (block_size - 1)};
  return {blocks[position / block_size], position % block_size};
}

bool AttentionReader::lies_in_place(int64_t begin, int64_t positions) const {
  const int64_t block_size = pool_.block_size;
  const int64_t first = access_.block_bits >= 0 ? begin & (block_size - 1) : begin % block_size;
  return access_.evenly_strided && first + positions <= block_size;
}

// What to prefetch. Null for rows that are copied together first: the copy fetches them.
const void* AttentionReader::keys_in_place(const Next& next) const {
  const int64_t begin = next.piece.begin();
  if (next.group == nullptr || !lies_in_place(begin, cut_.positions_of(*next.group, next.piece))) {
    return nullptr;
  }
  const Place at = place_of(*next.group, begin);
  return pool_.keys.at(at.block, at.position, next.group->kv_head);
}

// Panels behind the last position, and panels of which the group sees nothing, stay null.
void AttentionReader::find_panels(const Group& group, const Piece& piece, Panels& keys,
                                  Panels& values) const {
  const int64_t begin = piece.begin(), positions = cut_.positions_of(group, piece);
  Place at{};
  for (int64_t i = cut_.hidden_in(group, piece) / kPanelPositions, first = i;
       i * kPanelPositions < positions; ++i) {
    at.position += kPanelPositions;
    if (i == first || at.position == pool_.block_size) {
      at = place_of(group, begin + i * kPanelPositions);
    }
    keys[i] = pool_.keys.at(at.block, at.position, group.kv_head);
    values[i] = pool_.values.at(at.block, at.position, group.kv_head);
  }
}

Int8Attention AttentionReader::int8_of(const AttentionQuery& query, const ChunkRows& rows,
                                       const Next& next) const {
  if (!pool_.scaled()) return {};
  Int8Attention taken{query.wide, query.scale, rows.key_scale, rows.value_scale};
  if (next.group != nullptr && !access_.gathers) {
    const auto [block, position] = place_of(*next.group, next.piece.begin());
    const auto scales = [&, at = block, first = position](const PoolView& view) {
      return reinterpret_cast<const float*>(view.at(at, first, next.group->kv_head));
    };
    taken.next_key_scale = scales(pool_.key_scales);
    taken.next_value_scale = scales(pool_.value_scales);
  }
  return taken;
}

// The rows in place if they lie at equal distances, else copies of them in the thread's memory.
AttentionReader::ChunkRows AttentionReader::rows_of_piece(const Group& group,
                                                          const Piece& piece) const {
  const int64_t begin = piece.begin(), positions = cut_.positions_of(group, piece);
  const int64_t head = group.kv_head, row_bytes = pool_.row_bytes();
  const auto floats = [](const char* p) { return reinterpret_cast<const float*>(p); };
  if (lies_in_place(begin, positions)) {
    const auto [block, first] = place_of(group, begin);
    return {pool_.keys.at(block, first, head), pool_.values.at(block, first, head),
            pool_.keys.position_bytes,
            pool_.scaled() ? floats(pool_.key_scales.at(block, first, head)) : nullptr,
            pool_.scaled() ? floats(pool_.value_scales.at(block, first, head)) : nullptr};
  }
  float* key_scale = memory_;
  float* value_scale = key_scale + kAttentionChunk;
  auto* keys = reinterpret_cast<char*>(value_scale + kAttentionChunk);
  char* values = keys + 4 * attention_padded((kAttentionChunk * row_bytes + 3) / 4);
  const bool rows = !pool_.in_panels();
  for (int64_t i = cut_.hidden_in(group, piece); i < positions && (rows || pool_.scaled()); ++i) {
    const auto [block, at] = place_of(group, begin + i);
    if (rows) {
      std::memcpy(keys + i * row_bytes, pool_.keys.at(block, at, head),
                  static_cast<size_t>(row_bytes));
      std::memcpy(values + i * row_bytes, pool_.values.at(block, at, head),
                  static_cast<size_t>(row_bytes));
    }
    if (!pool_.scaled()) continue;
    key_scale[i] = *floats(pool_.key_scales.at(block, at, head));
    value_scale[i] = *floats(pool_.value_scales.at(block, at, head));
  }
  return {keys, values, row_bytes, key_scale, value_scale};
}

void AttentionReader::fill(const Group& group, const Piece& piece, const Next& next,
                           const AttentionQuery& query, AttentionChunk& chunk) const {
  const ChunkRows rows = rows_of_piece(group, piece);
  chunk.keys = rows.keys;
  chunk.values = rows.values;
  chunk.stride_bytes = rows.stride_bytes;
  chunk.next = pool_.in_panels() ? nullptr : keys_in_place(next);
  chunk.pair_unit = access_.pair_unit;
  chunk.matrix_unit = access_.matrix_unit;
  chunk.int8 = int8_of(query, rows, next);
  chunk.layout = pool_.layout;
  if (!pool_.in_panels()) return;
  find_panels(group, piece, chunk.panels.keys, chunk.panels.values);
  if (next.group != nullptr)
    find_panels(*next.group, next.piece, chunk.panels.next_keys, chunk.panels.next_values);
}

}  // namespace bitnet::engine
