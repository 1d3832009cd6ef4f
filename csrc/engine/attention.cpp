// The plan and its tasks; see attention.h. Every number that says how work is cut stands at the
// top.
#include "engine/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
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

// ceil(ratio * pages); a ratio is a rounded number.
int64_t share_of(double ratio, int64_t pages) {
  return static_cast<int64_t>(std::ceil(ratio * static_cast<double>(pages) * (1 - 1e-6)));
}

// Those that are read whatever their scores.
int64_t fewest_pages(const AttentionPolicy& policy, int64_t pages) {
  return std::min(policy.sinks / kAttentionChunk + (policy.sinks % kAttentionChunk != 0) + 1,
                  pages);
}

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
  choice_ints_ = most_pages_ = 0;
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
      const bool choice = chooses(position);
      if (choice) count = 1;
      for (int64_t i = 1; shape_.policy.chooses() && i < count; ++i) {
        if (chooses(position + i)) count = i;
      }
      const auto first_piece = static_cast<int64_t>(pieces_.size());
      if (!choice) add_pieces(position, count);
      const int64_t pieces = static_cast<int64_t>(pieces_.size()) - first_piece;
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        groups_.push_back(
            {s, h, sequences_.query_start[s] + t, count, position, first_piece, pieces});
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

// Whether a token reads some pages of many.
bool AttentionPlan::chooses(int64_t position) const {
  const int64_t pages = position / kAttentionChunk + 1;
  const AttentionPolicy& policy = shape_.policy;
  const bool fixed = policy.threshold == 0 && policy.min_ratio == policy.max_ratio;
  return policy.chooses() && position >= policy.dense_below && pages > 2 &&
         !(fixed && most_pages(pages) == pages);
}

// How many a token reads at most, its own page included.
int64_t AttentionPlan::most_pages(int64_t pages) const {
  const AttentionPolicy& policy = shape_.policy;
  if (policy.threshold > 0) return pages;
  return std::clamp(share_of(policy.max_ratio, pages), fewest_pages(policy, pages), pages);
}

void AttentionPlan::add_choice(Group& group) {
  const int64_t pages = group.position / kAttentionChunk + 1;
  group.pieces = most_pages(pages);
  group.choice = choice_ints_;
  choice_ints_ += 1 + group.pieces;
  most_pages_ = std::max(most_pages_, pages);
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
  return group.pieces * (rows_of(group) + kReadingRows);
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
int64_t AttentionPlan::counter_floats() const { return (split_groups_ + 15) / 16 * 16; }

// A group's query rows, a row of output, a chunk's rows put together, the kernel's scratch, and the
// states of a group so far and of a chunk.
int64_t AttentionPlan::thread_floats() const {
  return std::max(choosing_floats(), query_floats() + attention_padded(shape_.dim) +
                                         gathered_floats() +
                                         attention_scratch_floats(most_rows_, shape_.dim) +
                                         2 * most_rows_ * state_floats());
}

// Of choose(): the sums over queries, the queries, scores, weights and an order of pages.
int64_t AttentionPlan::choosing_floats() const {
  return attention_padded(2 * shape_.dim) + attention_padded(rows_per_token_ * shape_.dim) +
         3 * attention_padded(most_pages_);
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
      table.load_row(shape_.query_type, from, n, query.rows + t * n);
      for (int64_t h = 0; rounds && h < rows_per_token_; ++h) {
        float* q = query.rows + t * n + h * dim;
        table.store_cache_row(shape_.pool.type, q, dim, row);
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
    const int64_t to = (token * shape_.heads + head) * shape_.dim;
    table.finish_attention(shape_.dim, states + r * state_floats(), row);
    table.store_row(shape_.query_type, row, shape_.dim,
                    offset_bytes(buffers.out, to * element_size(shape_.query_type)));
  }
}

bool AttentionPlan::lies_in_place(int64_t begin, int64_t positions) const {
  const int64_t block_size = shape_.pool.block_size;
  return evenly_strided_ && begin % block_size + positions <= block_size;
}

// A hint for prefetching: rows that have to be put together first are fetched by that copy.
const void* AttentionPlan::keys_in_place(const CachePool& pool, const Next& next) const {
  const int64_t begin = next.piece.begin();
  if (next.group == nullptr || !lies_in_place(begin, positions_of(*next.group, next.piece))) {
    return nullptr;
  }
  const int64_t block = sequences_.blocks(next.group->sequence)[begin / pool.block_size];
  return pool.keys.at(block, begin % pool.block_size, next.group->kv_head);
}

int64_t AttentionPlan::positions_of(const Group& group, const Piece& piece) const {
  const int64_t end =
      piece.kind == Piece::kSinks ? shape_.policy.sinks : group.position + group.tokens;
  return std::min(kAttentionChunk, end - piece.begin());
}

// Those behind the last position stay null, and so do those that the group sees nothing of.
void AttentionPlan::find_panels(const CachePool& pool, const PoolView& view, const Group& group,
                                const Piece& piece, const void* (&panels)[kChunkPanels]) const {
  const int64_t* blocks = sequences_.blocks(group.sequence);
  const int64_t begin = piece.begin(), positions = positions_of(group, piece);
  for (int64_t i = hidden_in(group, piece) / kPanelPositions; i * kPanelPositions < positions;
       ++i) {
    const int64_t at = begin + i * kPanelPositions;
    panels[i] = view.at(blocks[at / pool.block_size], at % pool.block_size, group.kv_head);
  }
}

// The rows where they are if they follow each other at equal distances, else copies in `memory`.
AttentionPlan::ChunkRows AttentionPlan::rows_of_piece(const CachePool& pool, const Group& group,
                                                      const Piece& piece, float* memory) const {
  const int64_t begin = piece.begin(), positions = positions_of(group, piece);
  const int64_t* blocks = sequences_.blocks(group.sequence);
  const int64_t head = group.kv_head, row_bytes = pool.row_bytes();
  const auto floats = [](const char* p) { return reinterpret_cast<const float*>(p); };
  if (lies_in_place(begin, positions)) {
    const int64_t block = blocks[begin / pool.block_size], first = begin % pool.block_size;
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
    const int64_t block = blocks[(begin + i) / pool.block_size];
    const int64_t at = (begin + i) % pool.block_size;
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

// States of the rows that see any of the piece: [rows_before, rows_up_to).
void AttentionPlan::attend(const KernelTable& table, const AttentionBuffers& buffers,
                           const Group& group, const Piece& piece, const Next& next,
                           const Query& query, float* own, float* states) const {
  const int64_t begin = piece.begin();
  const int64_t skipped = rows_before(group, piece);
  const int64_t positions = positions_of(group, piece);
  const ChunkRows rows = rows_of_piece(buffers.pool, group, piece, gathered_at(own));
  const bool int8 = shape_.pool.scaled();
  AttentionChunk chunk = {
      .query = int8 ? nullptr : query.rows + skipped * shape_.dim,
      .rows = rows_up_to(group, piece) - skipped,
      .dim = shape_.dim,
      .rows_per_token = rows_per_token_,
      .type = shape_.pool.type,
      .keys = rows.keys,
      .values = rows.values,
      .stride_bytes = rows.stride_bytes,
      .positions = positions,
      .first_visible = group.position + 1 + skipped / rows_per_token_ - begin,
      .scale = shape_.scale,
      .next = keys_in_place(buffers.pool, next),
      .pair_unit = pair_unit_,
      .matrix_unit = matrix_unit_,
      .int8 = int8 ? Int8Attention{query.wide + skipped * wide_padded(shape_.dim),
                                   query.scale + skipped, rows.key_scale, rows.value_scale}
                   : Int8Attention{},
      .layout = shape_.pool.layout,
  };
  if (piece.kind == Piece::kWindow) chunk.first_hidden = chunk.first_visible - shape_.policy.window;
  if (shape_.pool.in_panels()) {
    const CachePool& pool = buffers.pool;
    find_panels(pool, pool.keys, group, piece, chunk.panels.keys);
    find_panels(pool, pool.values, group, piece, chunk.panels.values);
    if (next.group != nullptr) {
      find_panels(pool, pool.keys, *next.group, next.piece, chunk.panels.next_keys);
      find_panels(pool, pool.values, *next.group, next.piece, chunk.panels.next_values);
    }
  }
  table.attend_chunk(chunk, scratch_at(own), states + skipped * state_floats());
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
    all += layers * group.tokens * pages;
    if (group.choice < 0) read += layers * group.tokens * std::min(group.pieces, pages);
  }
  for (size_t s = 0; s < pages_read_.size(); ++s) counts[s].first += pages_read_[s];
}

void AttentionPlan::choose(const KernelTable& table, const AttentionBuffers& buffers, int64_t begin,
                           int64_t end, float* shared, float* own) const {
  for (int64_t i = begin; i < end; ++i) {
    const Group& group = groups_[static_cast<size_t>(choosing_[static_cast<size_t>(i)])];
    choose(table, buffers, group, choice_of(group, shared), own);
  }
}

// max(q * most, q * least) added over the queries is Q+ * most + Q- * least, Q+ the sum of positive
// queries and Q- that of the others: one dot product a page, in the lane order of head_dense.
void AttentionPlan::choose(const KernelTable& table, const AttentionBuffers& buffers,
                           const Group& group, int32_t* choice, float* own) const {
  const AttentionPolicy& policy = shape_.policy;
  const CachePool& pool = buffers.pool;
  const int64_t dim = shape_.dim, per_block = pool.block_size / kAttentionChunk;
  const int64_t pages = group.position / kAttentionChunk + 1, others = pages - 1;
  float *sums = own, *queries = sums + attention_padded(2 * dim),
        *scores = queries + attention_padded(rows_per_token_ * dim),
        *weights = scores + attention_padded(most_pages_);
  auto* order = reinterpret_cast<int32_t*>(weights + attention_padded(most_pages_));
  const int64_t first = (group.token * shape_.kv_heads + group.kv_head) * rows_per_token_ * dim;
  table.load_row(shape_.query_type,
                 offset_bytes(buffers.query, first * element_size(shape_.query_type)),
                 rows_per_token_ * dim, queries);
  std::fill_n(sums, 2 * dim, 0.0f);
  for (int64_t i = 0; i < rows_per_token_ * dim; ++i) {
    const float q = queries[i] * shape_.scale;
    sums[(q > 0 ? 0 : dim) + i % dim] += q;
  }
  const int64_t* blocks = sequences_.blocks(group.sequence);
  const auto bounds_of = [&](int64_t page) {
    return pool.bounds.at(blocks[page / per_block], page % per_block, group.kv_head);
  };
  constexpr int64_t kAhead = 4;
  for (int64_t page = 0; page < others; ++page) {
    for (int64_t i = 0; page + kAhead < others && i < 4 * dim; i += 64)
      __builtin_prefetch(bounds_of(page + kAhead) + i);
    float& score = scores[page];
    table.head_dense(sums, 1, DType::kBF16, bounds_of(page), 2 * dim, 0, 1, {0}, &score, 1);
    if (score != score) score = INFINITY;  // to be read, so that it is seen
    order[page] = static_cast<int32_t>(page);
  }
  const int64_t fewest = fewest_pages(policy, pages), sinks = fewest - 1;
  int64_t count = share_of(policy.max_ratio, pages);
  const bool weighs = policy.threshold > 0 || policy.min_ratio != policy.max_ratio;
  const float top = table.max_row(scores, others);
  if (weighs && std::isfinite(top)) {
    const float inv = 1.0f / static_cast<float>(rows_per_token_);
    const double sum = table.exp_row(scores, others, top, inv, weights);
    if (policy.threshold > 0) {
      count = fewest;
      for (int64_t page = sinks; page < others; ++page) count += weights[page] >= policy.threshold;
    } else {
      double entropy = std::log(sum);
      for (int64_t page = 0; page < others; ++page)
        entropy += static_cast<double>(weights[page]) / sum * inv *
                   (static_cast<double>(top) - static_cast<double>(scores[page]));
      const double spread = std::clamp(entropy / std::log(static_cast<double>(others)), 0.0, 1.0);
      count = share_of(policy.min_ratio + (policy.max_ratio - policy.min_ratio) * spread, pages);
    }
  } else if (weighs) {
    count = pages;
  }
  count = std::clamp(count, fewest, most_pages(pages));
  const int64_t best = count - 1 - sinks;  // by their scores
  std::nth_element(order + sinks, order + sinks + best, order + others, [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  std::sort(order + sinks, order + sinks + best);
  choice[0] = static_cast<int32_t>(count);
  std::copy_n(order, sinks + best, choice + 1);
  choice[count] = static_cast<int32_t>(others);
  std::atomic_ref<int64_t>(pages_read_[static_cast<size_t>(group.sequence)])
      .fetch_add(count, std::memory_order_relaxed);
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
    attend(table, buffers, group, piece_of(group, piece, shared), next, query, own,
           states_of(piece));
  // acq_rel: the last one sees what the others wrote.
  std::atomic_ref<int32_t> left(reinterpret_cast<int32_t*>(shared)[group.counter]);
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  left.store(static_cast<int32_t>(group.pieces), std::memory_order_relaxed);
  for (int64_t i = 1; i < pieces; ++i) merge(table, group, i, states_of(i), states, shared);
  store_out(table, buffers, group, states, row_at(own));
}

void AttentionPlan::run_group(const KernelTable& table, const AttentionBuffers& buffers,
                              const Group& group, const Query& query, float* shared,
                              float* own) const {
  float* states = scratch_at(own) + attention_scratch_floats(most_rows_, shape_.dim);
  float* later = states + rows_of(group) * state_floats();
  const int64_t pieces = pieces_of(group, shared);
  for (int64_t i = 0; i < pieces; ++i) {
    const Next next = i + 1 == pieces ? Next{} : Next{&group, piece_of(group, i + 1, shared)};
    attend(table, buffers, group, piece_of(group, i, shared), next, query, own,
           i == 0 ? states : later);
    if (i > 0) merge(table, group, i, later, states, shared);
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
