// The plan and its tasks; see attention.h. Every number that says how work is cut stands at the
// top.
#include "engine/attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "kernels/dispatch.h"
#include "kernels/pair_unit.h"
#include "kernels/tile_check.h"
#include "runtime/page_count.h"
#include "runtime/parallel.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kBlockRows = 96;       // query rows that meet a chunk while it is in cache
constexpr int64_t kFewestRows = 24;      // smaller blocks waste the loads of keys and values
constexpr int64_t kGroupsPerThread = 8;  // enough for an even split without cutting positions
constexpr int64_t kMostSplitFloats = int64_t{1} << 22;  // states of a split plan: 16 MiB
constexpr int64_t kReadingRows = 4;  // reading a chunk takes as long as so many rows' arithmetic

constexpr int64_t kMostPartitions = 256;

int64_t chunks_of(int64_t positions) { return (positions + kAttentionChunk - 1) / kAttentionChunk; }

}  // namespace

int64_t attention_work(const AttentionShape& shape, const Sequences& sequences) {
  int64_t positions = 0;
  for (int64_t s = 0; s < sequences.count; ++s) {
    const AttentionPolicy& p = shape.policy;
    int64_t seen = sequences.lengths[s];
    if (p.window != 0)  // not p.window + p.sinks, which could overflow
      seen = std::min(seen, std::min(p.window, seen) + std::min(p.sinks, seen) +
                                (p.stride == 0 ? 0 : seen / p.stride));
    positions += seen * sequences.tokens(s);
  }
  return positions * shape.heads * shape.dim;
}

void AttentionPlan::build(const AttentionShape& shape, const Sequences& sequences,
                          int64_t threads) {
  shape_ = shape;
  sequences_ = sequences;
  rows_per_token_ = shape.heads / shape.kv_heads;
  const auto block_size = static_cast<uint64_t>(shape.pool.block_size);
  block_bits_ = std::has_single_bit(block_size) ? std::countr_zero(block_size) : -1;
  const bool pairs = shape.pool.type == DType::kBF16;
  pair_unit_ = pairs && tuning().fast_pairs && pair_unit_in_order();
  matrix_unit_ = pairs && tile_unit_in_order();
  choose_block_tokens(threads);
  make_groups();
  make_tasks(threads);
}

void AttentionPlan::choose_block_tokens(int64_t threads) {
  int64_t longest = 1;
  for (int64_t s = 0; s < sequences_.count; ++s) longest = std::max(longest, sequences_.tokens(s));
  block_tokens_ = std::clamp<int64_t>(kBlockRows / rows_per_token_, 1, longest);
  const auto groups = [&] {
    int64_t blocks = 0;
    for (int64_t s = 0; s < sequences_.count; ++s) {
      blocks += (sequences_.tokens(s) + block_tokens_ - 1) / block_tokens_;
    }
    return blocks * shape_.kv_heads;
  };
  while (block_tokens_ > 1 && block_tokens_ * rows_per_token_ / 2 >= kFewestRows &&
         groups() < kGroupsPerThread * threads) {
    block_tokens_ = (block_tokens_ + 1) / 2;
  }
}

void AttentionPlan::make_groups() {
  groups_.clear();
  pieces_.clear();
  choosing_.clear();
  pages_read_.assign(static_cast<size_t>(shape_.policy.chooses() ? sequences_.count : 0), 0);
  chosen_pieces_ = most_pages_ = most_choosing_ = 0;
  reads_by_token_ = false;
  most_rows_ = 0;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences_.count; ++s) {
    const int64_t tokens = sequences_.tokens(s), start = sequences_.start(s);
    if (tokens > 0) longest = std::max(longest, sequences_.lengths[s]);
    for (int64_t t = 0, count = 0; t < tokens; t += count) {
      const int64_t position = start + t;
      count = std::min(block_tokens_, tokens - t);
      // tokens that see all and those that do not read other pieces
      for (int64_t i = 1; shape_.policy.sinks > 0 && i < count; ++i) {
        if (sees_all(position + i) != sees_all(position)) count = i;
      }
      const bool choice = chooses_pages(shape_.policy, position);
      if (choice) count = std::min(count, kChoosingTokens);
      for (int64_t i = 1; shape_.policy.chooses() && i < count; ++i) {
        if (chooses_pages(shape_.policy, position + i) != choice) count = i;
      }
      const auto first_piece = static_cast<int64_t>(pieces_.size());
      if (!choice) add_pieces(position, count);
      const int64_t pieces = static_cast<int64_t>(pieces_.size()) - first_piece;
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        groups_.push_back({s, h, sequences_.query_start[s] + t, count, position, first_piece,
                           pieces, count * rows_per_token_ * pieces});
        if (choice) add_choice(groups_.back());
      }
      most_rows_ = std::max(most_rows_, count * rows_per_token_);
    }
  }
  const CachePool& pool = shape_.pool;
  const bool whole_chunks = pool.block_size % kAttentionChunk == 0 || longest <= pool.block_size;
  const bool in_place = pool.in_panels() && !pool.scaled();  // panels are, but not their scales
  evenly_strided_ = pool.keys.position_bytes == pool.values.position_bytes &&
                    (!pool.scaled() || (pool.key_scales.position_bytes == sizeof(float) &&
                                        pool.value_scales.position_bytes == sizeof(float)));
  gathers_ = !in_place && (!whole_chunks || !evenly_strided_);
}

void AttentionPlan::add_choice(Group& group) {
  const int64_t pages = (group.position + group.tokens - 1) / kAttentionChunk + 1;
  const int64_t most = group.tokens * most_pages_read(shape_.policy, pages);
  group.pieces = std::min(pages, most);
  group.row_pieces = most * rows_per_token_;
  group.choice = chosen_pieces_;
  chosen_pieces_ += 1 + group.pieces;
  most_pages_ = std::max(most_pages_, pages);
  most_choosing_ = std::max(most_choosing_, group.tokens);
  reads_by_token_ = reads_by_token_ || reads_by_token(group);
  choosing_.push_back(static_cast<int32_t>(groups_.size() - 1));
}

// What `tokens` tokens from `position` on read; with sinks either all of them see all, or none
// does.
void AttentionPlan::add_pieces(int64_t position, int64_t tokens) {
  const AttentionPolicy& policy = shape_.policy;
  const bool all = sees_all(position + tokens - 1);
  const int64_t end = chunks_of(position + tokens);
  const int64_t window = all ? 0 : first_seen(position) / kAttentionChunk;
  const auto add = [this](int64_t chunk, Piece::Kind kind) {
    pieces_.push_back({static_cast<int32_t>(chunk), kind});
  };
  const auto whole = [&](int64_t chunk) {
    return all || (policy.stride != 0 && chunk % policy.stride == 0);
  };
  const bool skips = policy.sinks == 0 && policy.stride == 0;
  for (int64_t c = skips ? window : 0; c < end; ++c) {
    if (whole(c)) {
      add(c, Piece::kAll);
      continue;
    }
    if (c * kAttentionChunk < policy.sinks) add(c, Piece::kSinks);
    if (c >= window) add(c, Piece::kWindow);
  }
}

int64_t AttentionPlan::cost_of(const Group& group) const {
  return group.row_pieces + group.pieces * kReadingRows;
}

void AttentionPlan::make_tasks(int64_t threads) {
  tasks_.clear();
  split_groups_ = states_floats_ = 0;
  int64_t cost = 0;
  for (const Group& group : groups_) cost += cost_of(group);
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int64_t floats = group.pieces * rows_of(group) * state_floats();
    if (group.pieces == 1 || cost_of(group) * kGroupsPerThread * threads <= cost ||
        states_floats_ + floats > kMostSplitFloats) {
      continue;
    }
    group.counter = split_groups_++;
    group.states = states_floats_;
    states_floats_ += floats;
    for (int64_t i = 0; i < group.pieces; ++i) {
      tasks_.push_back({static_cast<int32_t>(g), static_cast<int32_t>(i)});
    }
  }
  split_tasks_ = tasks();
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].counter < 0) tasks_.push_back({static_cast<int32_t>(g), -1});
  }
  // not stable_sort, which allocates
  std::sort(tasks_.begin() + split_tasks_, tasks_.end(), [this](const Task& a, const Task& b) {
    const int64_t left = cost_of(groups_[static_cast<size_t>(a.group)]);
    const int64_t right = cost_of(groups_[static_cast<size_t>(b.group)]);
    return left != right ? left > right : a.group < b.group;
  });
}

// A counter for each split group, before the states; whole cache lines.
int64_t AttentionPlan::counter_floats() const { return whole_lines(split_groups_); }

// A group's query rows, those of some of its tokens, a row of output, a chunk's rows put together,
// the kernel's scratch, and the states of a group so far and of a chunk.
int64_t AttentionPlan::thread_floats() const {
  const int64_t queries = query_floats() * (reads_by_token_ ? 2 : 1);
  return std::max(choosing_floats(), queries + attention_padded(shape_.dim) + gathered_floats() +
                                         attention_scratch_floats(most_rows_, shape_.dim) +
                                         2 * most_rows_ * state_floats());
}

AttentionPlan::ChoosingMemory AttentionPlan::choosing_memory(BumpAllocator& memory) const {
  const int64_t tokens = std::max(most_choosing_, shape_.kv_heads);
  return {.queries = memory.take<float>(rows_per_token_ * shape_.dim),
          .sums = memory.take<float>(tokens * 2 * shape_.dim),
          .scores = memory.take<float>(tokens * attention_padded(most_pages_)),
          .tokens = memory.take<uint64_t>(most_pages_),
          .ids = memory.take<int32_t>(most_pages_),
          .pages = PageMemory::take(memory, most_pages_)};
}

int64_t AttentionPlan::choosing_floats() const {
  BumpAllocator memory(nullptr);
  if (!choosing_.empty()) choosing_memory(memory);
  return memory.used() / static_cast<int64_t>(sizeof(float));
}

int64_t AttentionPlan::query_floats() const {
  if (!shape_.pool.scaled()) return attention_padded(most_rows_ * shape_.dim);
  return attention_padded(most_rows_) + most_rows_ * wide_padded(shape_.dim) / 2;
}

int64_t AttentionPlan::gathered_floats() const {
  if (!gathers_) return 0;
  if (shape_.pool.in_panels()) return 2 * kAttentionChunk;  // scales
  const int64_t bytes = kAttentionChunk * shape_.pool.row_bytes();
  return 2 * kAttentionChunk + 2 * attention_padded((bytes + 3) / 4);
}

AttentionPlan::Query AttentionPlan::query_at(float* memory) const {
  if (!shape_.pool.scaled()) return {memory, nullptr, nullptr};
  return {nullptr, reinterpret_cast<int16_t*>(memory + attention_padded(most_rows_)), memory};
}

// `row`: a row's memory for what comes between.
void AttentionPlan::load_query(const KernelTable& table, const AttentionBuffers& buffers,
                               const Group& group, const Query& query, float* row) const {
  const int64_t n = rows_per_token_ * shape_.dim;  // the heads of a group lie side by side
  const int64_t dim = shape_.dim, padded = wide_padded(dim);
  const bool rounds = shape_.pool.type == DType::kBF16;  // attend_chunk takes such numbers
  for (int64_t t = 0; t < group.tokens; ++t) {
    const int64_t first = ((group.token + t) * shape_.kv_heads + group.kv_head) * n;
    const void* from = offset_bytes(buffers.query, first * element_size(shape_.query_type));
    if (query.rows != nullptr) {
      const bool floats = shape_.query_type == DType::kF32;
      if (!rounds || !floats) table.load_row(shape_.query_type, from, n, query.rows + t * n);
      const float* loaded = floats ? static_cast<const float*>(from) : query.rows + t * n;
      for (int64_t h = 0; rounds && h < rows_per_token_; ++h) {
        float* q = query.rows + t * n + h * dim;
        table.store_cache_row(shape_.pool.type, loaded + h * dim, dim, row);
        table.load_row(shape_.pool.type, row, dim, q);
      }
      continue;
    }
    for (int64_t h = 0; h < rows_per_token_; ++h) {
      const int64_t r = t * rows_per_token_ + h;
      table.load_row(shape_.query_type,
                     offset_bytes(from, h * dim * element_size(shape_.query_type)), dim, row);
      query.scale[r] = table.quantize_query(row, dim, padded, query.wide + r * padded);
    }
  }
}

void AttentionPlan::store_out(const KernelTable& table, const AttentionBuffers& buffers,
                              const Group& group, const float* states, float* row) const {
  for (int64_t r = 0; r < rows_of(group); ++r) {
    const int64_t token = group.token + r / rows_per_token_;
    const int64_t head = group.kv_head * rows_per_token_ + r % rows_per_token_;
    const int64_t at = (token * shape_.heads + head) * shape_.dim;
    void* to = offset_bytes(buffers.out, at * element_size(shape_.query_type));
    const bool floats = shape_.query_type == DType::kF32;
    float* finished = floats ? static_cast<float*>(to) : row;
    table.finish_attention(shape_.dim, states + r * state_floats(), finished);
    if (!floats) table.store_row(shape_.query_type, finished, shape_.dim, to);
  }
}

// A chunk asks for several places, and a division takes as long as ten other instructions.
AttentionPlan::Place AttentionPlan::place_of(const Group& group, int64_t position) const {
  const int64_t* blocks = sequences_.blocks(group.sequence);
  const int64_t block_size = shape_.pool.block_size;
  if (block_bits_ >= 0) return {blocks[position >> block_bits_], position & (block_size - 1)};
  return {blocks[position / block_size], position % block_size};
}

bool AttentionPlan::lies_in_place(int64_t begin, int64_t positions) const {
  const int64_t block_size = shape_.pool.block_size;
  const int64_t first = block_bits_ >= 0 ? begin & (block_size - 1) : begin % block_size;
  return evenly_strided_ && first + positions <= block_size;
}

// A hint for prefetching: rows that have to be put together first are fetched by that copy.
const void* AttentionPlan::keys_in_place(const CachePool& pool, const Next& next) const {
  const int64_t begin = next.piece.begin();
  if (next.group == nullptr || !lies_in_place(begin, positions_of(*next.group, next.piece))) {
    return nullptr;
  }
  const Place at = place_of(*next.group, begin);
  return pool.keys.at(at.block, at.position, next.group->kv_head);
}

int64_t AttentionPlan::positions_of(const Group& group, const Piece& piece) const {
  const int64_t end =
      piece.kind == Piece::kSinks ? shape_.policy.sinks : group.position + group.tokens;
  return std::min(kAttentionChunk, end - piece.begin());
}

// Those behind the last position stay null, and so do those that the group sees nothing of.
void AttentionPlan::find_panels(const CachePool& pool, const Group& group, const Piece& piece,
                                Panels& keys, Panels& values) const {
  const int64_t begin = piece.begin(), positions = positions_of(group, piece);
  Place at{};
  for (int64_t i = hidden_in(group, piece) / kPanelPositions, first = i;
       i * kPanelPositions < positions; ++i) {
    at.position += kPanelPositions;
    if (i == first || at.position == pool.block_size) {
      at = place_of(group, begin + i * kPanelPositions);
    }
    keys[i] = pool.keys.at(at.block, at.position, group.kv_head);
    values[i] = pool.values.at(at.block, at.position, group.kv_head);
  }
}

Int8Attention AttentionPlan::int8_of(const CachePool& pool, const Query& query,
                                     const ChunkRows& rows, const Next& next) const {
  if (!pool.scaled()) return {};
  Int8Attention taken{query.wide, query.scale, rows.key_scale, rows.value_scale};
  if (next.group != nullptr && !gathers_) {
    const auto [block, position] = place_of(*next.group, next.piece.begin());
    const auto scales = [&, at = block, first = position](const PoolView& view) {
      return reinterpret_cast<const float*>(view.at(at, first, next.group->kv_head));
    };
    taken.next_key_scale = scales(pool.key_scales);
    taken.next_value_scale = scales(pool.value_scales);
  }
  return taken;
}

// The rows where they are if they follow each other at equal distances, else copies in `memory`.
AttentionPlan::ChunkRows AttentionPlan::rows_of_piece(const CachePool& pool, const Group& group,
                                                      const Piece& piece, float* memory) const {
  const int64_t begin = piece.begin(), positions = positions_of(group, piece);
  const int64_t head = group.kv_head, row_bytes = pool.row_bytes();
  const auto floats = [](const char* p) { return reinterpret_cast<const float*>(p); };
  if (lies_in_place(begin, positions)) {
    const auto [block, first] = place_of(group, begin);
    return {pool.keys.at(block, first, head), pool.values.at(block, first, head),
            pool.keys.position_bytes,
            pool.scaled() ? floats(pool.key_scales.at(block, first, head)) : nullptr,
            pool.scaled() ? floats(pool.value_scales.at(block, first, head)) : nullptr};
  }
  float* key_scale = memory;
  float* value_scale = key_scale + kAttentionChunk;
  auto* keys = reinterpret_cast<char*>(value_scale + kAttentionChunk);
  char* values = keys + 4 * attention_padded((kAttentionChunk * row_bytes + 3) / 4);
  const bool rows = !pool.in_panels();
  for (int64_t i = hidden_in(group, piece); i < positions && (rows || pool.scaled()); ++i) {
    const auto [block, at] = place_of(group, begin + i);
    if (rows) {
      std::memcpy(keys + i * row_bytes, pool.keys.at(block, at, head),
                  static_cast<size_t>(row_bytes));
      std::memcpy(values + i * row_bytes, pool.values.at(block, at, head),
                  static_cast<size_t>(row_bytes));
    }
    if (!pool.scaled()) continue;
    key_scale[i] = *floats(pool.key_scales.at(block, at, head));
    value_scale[i] = *floats(pool.value_scales.at(block, at, head));
  }
  return {keys, values, row_bytes, key_scale, value_scale};
}

// Of the window.
int64_t AttentionPlan::first_seen(int64_t position) const {
  return shape_.policy.window == 0 ? 0 : std::max<int64_t>(0, position - shape_.policy.window + 1);
}

// Whether nothing lies between sinks and window. Such tokens read whole chunks, as without a
// policy.
bool AttentionPlan::sees_all(int64_t position) const {
  return first_seen(position) <= shape_.policy.sinks;
}

// Positions of the chunk that no row of the group sees, since they lie before all windows.
int64_t AttentionPlan::hidden_in(const Group& group, const Piece& piece) const {
  if (piece.kind != Piece::kWindow) return 0;
  return std::max<int64_t>(0, first_seen(group.position) - piece.begin());
}

// Rows whose token stands before the chunk: it shows them nothing.
int64_t AttentionPlan::rows_before(const Group& group, const Piece& piece) const {
  return std::max<int64_t>(0, piece.begin() - group.position) * rows_per_token_;
}

// Rows whose window does not begin behind the chunk.
int64_t AttentionPlan::rows_up_to(const Group& group, const Piece& piece) const {
  const int64_t window = shape_.policy.window;
  if (piece.kind != Piece::kWindow || window >= group.position + group.tokens)
    return rows_of(group);
  const int64_t last = piece.begin() + kAttentionChunk + window - 2;  // a token that sees it
  return std::min(group.tokens, last - group.position + 1) * rows_per_token_;
}

// States of the rows that see any of the piece: [rows_before, rows_up_to), or of one that was
// chosen by tokens those of its tokens, from the first state on.
void AttentionPlan::attend(const KernelTable& table, const AttentionBuffers& buffers,
                           const Group& group, const Piece& piece, const Next& next,
                           const Query& query, bool same_queries, float* own, float* states) const {
  const int64_t begin = piece.begin();
  Query read = query;
  int64_t first = rows_before(group, piece), count = rows_up_to(group, piece) - first;
  if (reads_by_token(group)) {
    read = rows_of_tokens(query, piece.tokens, tokens_at(own));
    // Whoever stands in the page reads it: the tokens up to its end are neighbours, and behind it
    // everything is visible. So what a row sees follows from its place.
    first = std::countr_zero(piece.tokens) * rows_per_token_;
    count = std::popcount(piece.tokens) * rows_per_token_;
  } else if (read.rows != nullptr) {
    read.rows += first * shape_.dim;
  } else {
    read.wide += first * wide_padded(shape_.dim);
    read.scale += first;
  }
  const int64_t positions = positions_of(group, piece);
  const ChunkRows rows = rows_of_piece(buffers.pool, group, piece, gathered_at(own));
  AttentionChunk chunk = {
      .query = read.rows,
      .rows = count,
      .dim = shape_.dim,
      .rows_per_token = rows_per_token_,
      .type = shape_.pool.type,
      .keys = rows.keys,
      .values = rows.values,
      .stride_bytes = rows.stride_bytes,
      .positions = positions,
      .first_visible = group.position + 1 + first / rows_per_token_ - begin,
      .scale = shape_.scale,
      .next = shape_.pool.in_panels() ? nullptr : keys_in_place(buffers.pool, next),
      .pair_unit = pair_unit_,
      .matrix_unit = matrix_unit_,
      .int8 = int8_of(buffers.pool, read, rows, next),
      .layout = shape_.pool.layout,
  };
  chunk.same_queries = same_queries;
  if (piece.kind == Piece::kWindow) chunk.first_hidden = chunk.first_visible - shape_.policy.window;
  if (shape_.pool.in_panels()) {
    const CachePool& pool = buffers.pool;
    find_panels(pool, group, piece, chunk.panels.keys, chunk.panels.values);
    if (next.group != nullptr) {
      find_panels(pool, *next.group, next.piece, chunk.panels.next_keys, chunk.panels.next_values);
    }
  }
  if (!reads_by_token(group)) states += first * state_floats();
  table.attend_chunk(chunk, scratch_at(own), states);
}

AttentionPlan::Query AttentionPlan::rows_of_tokens(const Query& query, uint64_t tokens,
                                                   float* memory) const {
  const int64_t n = rows_per_token_, dim = shape_.dim, wide = wide_padded(dim);
  const int first = std::countr_zero(tokens), count = std::popcount(tokens);
  const auto from = [&](int64_t token) -> Query {
    if (query.rows != nullptr) return {query.rows + token * n * dim, nullptr, nullptr};
    return {nullptr, query.wide + token * n * wide, query.scale + token * n};
  };
  if (std::countr_one(tokens >> first) == count) return from(first);
  const Query to = query_at(memory);
  for (int64_t i = 0; tokens != 0; tokens &= tokens - 1, ++i) {
    const Query row = from(std::countr_zero(tokens));
    if (row.rows != nullptr) {
      std::copy_n(row.rows, n * dim, to.rows + i * n * dim);
    } else {
      std::copy_n(row.wide, n * wide, to.wide + i * n * wide);
      std::copy_n(row.scale, n, to.scale + i * n);
    }
  }
  return to;
}

void AttentionPlan::merge_tokens(const KernelTable& table, uint64_t tokens, const float* later,
                                 uint64_t& begun, float* states) const {
  const int64_t floats = rows_per_token_ * state_floats();
  for (uint64_t left = tokens; left != 0; left &= left - 1, later += floats) {
    float* to = states + std::countr_zero(left) * floats;
    if ((begun & left & -left) != 0) {
      table.merge_attention(rows_per_token_, shape_.dim, later, to);
    } else {
      std::copy_n(later, floats, to);
    }
  }
  begun |= tokens;
}

// The states of a piece into those of all pieces before it; of rows that see none of these, the
// last ones, they are the first. Of pieces other than those of windows all rows see the first.
void AttentionPlan::merge(const KernelTable& table, const Group& group, int64_t piece,
                          const float* later, float* states, float* shared) const {
  const Piece now = piece_of(group, piece, shared);
  const int64_t begin = rows_before(group, now), end = rows_up_to(group, now);
  int64_t others = end;
  if (piece_of(group, 0, shared).kind == Piece::kWindow)
    others = std::clamp(rows_up_to(group, piece_of(group, piece - 1, shared)), begin, end);
  const int64_t at = begin * state_floats(), first = others * state_floats();
  table.merge_attention(others - begin, shape_.dim, later + at, states + at);
  std::copy(later + first, later + end * state_floats(), states + first);
}

void AttentionPlan::prepare(float* shared) const {
  auto* left = reinterpret_cast<int32_t*>(shared);
  for (const Group& group : groups_) {
    if (group.counter >= 0) left[group.counter] = static_cast<int32_t>(group.pieces);
  }
}

void AttentionPlan::add_page_counts(int64_t layers) const {
  if (shape_.policy == AttentionPolicy{}) return;
  auto& counts = page_counts();
  counts.resize(static_cast<size_t>(sequences_.count));
  for (const Group& group : groups_) {
    const int64_t pages = chunks_of(group.position + group.tokens);
    auto& [read, all] = counts[static_cast<size_t>(group.sequence)];
    if (group.choice < 0) {
      all += layers * group.tokens * pages;
      read += layers * group.tokens * std::min(group.pieces, pages);
      continue;
    }
    for (int64_t t = 1; t <= group.tokens; ++t) all += layers * chunks_of(group.position + t);
  }
  for (size_t s = 0; s < pages_read_.size(); ++s) counts[s].first += pages_read_[s];
}

void AttentionPlan::choose(const KernelTable& table, const AttentionBuffers& buffers, int64_t begin,
                           int64_t end, float* shared, float* own) const {
  BumpAllocator allocator(reinterpret_cast<char*>(own));
  const ChoosingMemory memory = choosing_memory(allocator);
  const auto last = static_cast<size_t>(end);
  for (auto i = static_cast<size_t>(begin); i < last;) {
    size_t j = i + 1;
    while (j < last && choosing(i).tokens == 1 && choosing(j).token == choosing(i).token) ++j;
    choose(table, buffers, i, j, shared, memory);
    i = j;
  }
}

// The bounds of a page lie side by side for all KV heads: read for several, they are a stream.
void AttentionPlan::choose(const KernelTable& table, const AttentionBuffers& buffers, size_t first,
                           size_t last, float* shared, const ChoosingMemory& memory) const {
  const CachePool& pool = buffers.pool;
  const int64_t dim = shape_.dim, per_block = pool.block_size / kAttentionChunk;
  const int64_t stride = attention_padded(most_pages_);
  const int64_t tokens = choosing(first).tokens;
  float* sums = memory.sums;
  for (size_t i = first; i < last; ++i) {
    for (int64_t t = 0; t < tokens; ++t, sums += 2 * dim) {
      const int64_t at =
          ((choosing(i).token + t) * shape_.kv_heads + choosing(i).kv_head) * rows_per_token_ * dim;
      table.load_row(shape_.query_type,
                     offset_bytes(buffers.query, at * element_size(shape_.query_type)),
                     rows_per_token_ * dim, memory.queries);
      add_queries(memory.queries, rows_per_token_, dim, shape_.scale, sums);
    }
  }
  const int64_t* blocks = sequences_.blocks(choosing(first).sequence);
  const auto bounds_of = [&](int64_t page) {  // of the first KV head
    return pool.bounds.at(blocks[page / per_block], page % per_block, choosing(first).kv_head);
  };
  constexpr int64_t kPages = 4;  // at once
  const int64_t others = (choosing(first).position + tokens - 1) / kAttentionChunk;
  const char *now[kPages], *next[kPages];
  const void* rows[kPages];
  for (int64_t p = 0; p < std::min(kPages, others); ++p) next[p] = bounds_of(p);
  for (int64_t page = 0; page < others; page += kPages) {
    const int64_t count = std::min(kPages, others - page);
    const int64_t ahead = std::min(kPages, others - page - count);
    std::copy_n(next, count, now);
    for (int64_t p = 0; p < ahead; ++p) next[p] = bounds_of(page + count + p);
    for (size_t i = first; i < last; ++i) {
      const int64_t row = static_cast<int64_t>(i - first);
      const int64_t offset = row * pool.bounds.head_bytes;
      for (int64_t p = 0; p < count; ++p) rows[p] = now[p] + offset;
      for (int64_t p = 0; p < ahead; ++p) {
        for (int64_t at = 0; at < 4 * dim; at += 64) __builtin_prefetch(next[p] + offset + at);
      }
      table.score_rows(memory.sums + row * tokens * 2 * dim, tokens, rows, count, 2 * dim,
                       memory.scores + row * tokens * stride + page, stride);
    }
  }
  for (size_t i = first; i < last; ++i) {
    float* scores = memory.scores + static_cast<int64_t>(i - first) * tokens * stride;
    list_choice(table, choosing(i), scores, choice_of(choosing(i), shared), memory);
  }
}

// scores: of the group's tokens, attention_padded(most_pages_) apart.
void AttentionPlan::list_choice(const KernelTable& table, const Group& group, float* scores,
                                Piece* choice, const ChoosingMemory& memory) const {
  const int64_t pages = (group.position + group.tokens - 1) / kAttentionChunk + 1;
  std::fill_n(memory.tokens, pages, uint64_t{0});
  int64_t read = 0;
  for (int64_t t = 0; t < group.tokens; ++t) {
    const int64_t count = choose_pages(
        table, shape_.policy, rows_per_token_, scores + t * attention_padded(most_pages_),
        (group.position + t) / kAttentionChunk + 1, memory.pages, memory.ids);
    for (int64_t i = 0; i < count; ++i) memory.tokens[memory.ids[i]] |= uint64_t{1} << t;
    read += count;
  }
  int32_t pieces = 0;
  for (int64_t page = 0; page < pages; ++page) {
    if (memory.tokens[page] == 0) continue;
    choice[++pieces] = {static_cast<int32_t>(page), Piece::kAll, memory.tokens[page]};
  }
  choice[0] = {pieces, Piece::kAll};
  std::atomic_ref<int64_t>(pages_read_[static_cast<size_t>(group.sequence)])
      .fetch_add(read, std::memory_order_relaxed);
}

void AttentionPlan::run(const KernelTable& table, const AttentionBuffers& buffers, int64_t begin,
                        int64_t end, float* shared, float* own) const {
  const Query query = query_at(own);
  int32_t loaded = -1;  // the group whose query that is
  for (int64_t i = begin; i < end; ++i) {
    const Task& task = tasks_[static_cast<size_t>(i)];
    const Group& group = groups_[static_cast<size_t>(task.group)];
    if (task.group != loaded) load_query(table, buffers, group, query, row_at(own));
    loaded = task.group;
    if (i < split_tasks_) {
      run_chunk(table, buffers, i, query, shared, own);
    } else {
      run_group(table, buffers, group, query, shared, own);
    }
  }
}

void AttentionPlan::run_chunk(const KernelTable& table, const AttentionBuffers& buffers,
                              int64_t task, const Query& query, float* shared, float* own) const {
  const auto [g, piece] = tasks_[static_cast<size_t>(task)];
  const Group& group = groups_[static_cast<size_t>(g)];
  Next next;
  if (task + 1 < split_tasks_) {
    const Task after = tasks_[static_cast<size_t>(task + 1)];
    const Group& group_after = groups_[static_cast<size_t>(after.group)];
    if (after.piece < pieces_of(group_after, shared))
      next = {&group_after, piece_of(group_after, after.piece, shared)};
  }
  const int64_t piece_floats = rows_of(group) * state_floats();
  float* states = shared + counter_floats() + group.states;
  const auto states_of = [&](int64_t i) { return states + i * piece_floats; };
  const int64_t pieces = pieces_of(group, shared);
  if (piece < pieces)
    attend(table, buffers, group, piece_of(group, piece, shared), next, query, false, own,
           states_of(piece));
  // acq_rel: the last one sees what the others wrote.
  std::atomic_ref<int32_t> left(reinterpret_cast<int32_t*>(shared)[group.counter]);
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  left.store(static_cast<int32_t>(group.pieces), std::memory_order_relaxed);
  if (reads_by_token(group)) {
    uint64_t begun = 0;
    float* all = states_at(own);
    for (int64_t i = 0; i < pieces; ++i)
      merge_tokens(table, piece_of(group, i, shared).tokens, states_of(i), begun, all);
    states = all;
  } else {
    for (int64_t i = 1; i < pieces; ++i) merge(table, group, i, states_of(i), states, shared);
  }
  store_out(table, buffers, group, states, row_at(own));
}

void AttentionPlan::run_group(const KernelTable& table, const AttentionBuffers& buffers,
                              const Group& group, const Query& query, float* shared,
                              float* own) const {
  float* states = states_at(own);
  float* later = states + rows_of(group) * state_floats();
  const int64_t pieces = pieces_of(group, shared);
  const bool by_token = reads_by_token(group);
  uint64_t begun = 0;
  int64_t first = -1, end = -1;  // rows of the piece before
  for (int64_t i = 0; i < pieces; ++i) {
    const Next next = i + 1 == pieces ? Next{} : Next{&group, piece_of(group, i + 1, shared)};
    const Piece piece = piece_of(group, i, shared);
    const bool same =
        !by_token && first == rows_before(group, piece) && end == rows_up_to(group, piece);
    first = rows_before(group, piece), end = rows_up_to(group, piece);
    attend(table, buffers, group, piece, next, query, same, own,
           i == 0 && !by_token ? states : later);
    if (by_token) {
      merge_tokens(table, piece.tokens, later, begun, states);
    } else if (i > 0) {
      merge(table, group, i, later, states, shared);
    }
  }
  store_out(table, buffers, group, states, row_at(own));
}

void AttentionPlans::add(const AttentionShape& shape, const Sequences& sequences, int64_t threads) {
  if (used_ == plans_.size()) plans_.emplace_back();
  plans_[used_++].build(shape, sequences, threads);
}

int64_t AttentionPlans::shared_before(size_t plan) const {
  int64_t floats = 0;
  for (size_t i = 0; i < plan; ++i) floats += plans_[i].shared_floats();
  return floats;
}

int64_t AttentionPlans::thread_floats() const {
  int64_t most = 0;
  for (size_t i = 0; i < used_; ++i) most = std::max(most, plans_[i].thread_floats());
  return most;
}

void AttentionPlans::prepare(float* shared) const {
  for (size_t i = 0; i < used_; ++i) plans_[i].prepare(shared + shared_before(i));
}

void attend(const AttentionShape& shape, const Sequences& sequences,
            const AttentionBuffers& buffers) {
  const KernelTable& table = kernels();
  thread_local AttentionPlan plan;  // for its memory
  const int64_t most =
      partitions_for(kMostPartitions, attention_work(shape, sequences), kMinElements);
  plan.build(shape, sequences, most);
  const int64_t partitions = std::min(most, plan.tasks()), own = plan.thread_floats();
  if (partitions == 0) return;
  Scratch<float> shared(plan.shared_floats()), threads(partitions * own);
  plan.prepare(shared.get());
  const AttentionPlan& tasks = plan;  // the threads of the regions have one of their own
  if (const int64_t choices = plan.choices(); choices > 0) {
    const int64_t parts = std::min(partitions, choices);
    run_partitions(parts, [&](int64_t p) {
      tasks.choose(table, buffers, partition_begin(choices, parts, p),
                   partition_begin(choices, parts, p + 1), shared.get(), threads.get() + p * own);
    });
  }
  std::atomic<int64_t> next{plan.split_tasks()};
  run_partitions(partitions, [&](int64_t p) {
    float* mine = threads.get() + p * own;
    // equal tasks: a sequential stream for each thread; then the dear ones first
    const int64_t split = tasks.split_tasks();
    tasks.run(table, buffers, partition_begin(split, partitions, p),
              partition_begin(split, partitions, p + 1), shared.get(), mine);
    for (int64_t i = next++; i < tasks.tasks(); i = next++)
      tasks.run(table, buffers, i, i + 1, shared.get(), mine);
  });
  page_counts().clear();
  plan.add_page_counts(1);
}

}  // namespace bitnet::engine
