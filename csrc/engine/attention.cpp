// The plan and its tasks; see attention.h. Every number that says how work is cut stands at the
// top.
#include "engine/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/dispatch.h"
#include "kernels/pair_unit.h"
#include "kernels/tile_check.h"
#include "runtime/tuning.h"
#include "runtime/parallel.h"

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
    const int64_t length = sequences.lengths[s];
    positions +=
        (shape.window == 0 ? length : std::min(length, shape.window)) * sequences.tokens(s);
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
  most_rows_ = 0;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences_.count; ++s) {
    const int64_t tokens = sequences_.tokens(s), first = sequences_.query_start[s];
    const int64_t start = sequences_.start(s);
    if (tokens > 0) longest = std::max(longest, sequences_.lengths[s]);
    for (int64_t h = 0; h < shape_.kv_heads; ++h) {
      for (int64_t t = 0; t < tokens; t += block_tokens_) {
        const int64_t count = std::min(block_tokens_, tokens - t), position = start + t;
        const int64_t chunk = first_seen(position) / kAttentionChunk;
        groups_.push_back(
            {s, h, first + t, count, position, chunk, chunks_of(position + count) - chunk});
        most_rows_ = std::max(most_rows_, count * rows_per_token_);
      }
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

int64_t AttentionPlan::cost_of(const Group& group) const {
  return group.chunks * (rows_of(group) + kReadingRows);
}

void AttentionPlan::make_tasks(int64_t threads) {
  tasks_.clear();
  split_groups_ = states_floats_ = 0;
  int64_t cost = 0;
  for (const Group& group : groups_) cost += cost_of(group);
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int64_t floats = group.chunks * rows_of(group) * state_floats();
    if (group.chunks == 1 || cost_of(group) * kGroupsPerThread * threads <= cost ||
        states_floats_ + floats > kMostSplitFloats) {
      continue;
    }
    group.counter = split_groups_++;
    group.states = states_floats_;
    states_floats_ += floats;
    for (int64_t c = group.first_chunk; c < group.end_chunk(); ++c) {
      tasks_.push_back({static_cast<int32_t>(g), static_cast<int32_t>(c)});
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
  return query_floats() + attention_padded(shape_.dim) + gathered_floats() +
         attention_scratch_floats(most_rows_, shape_.dim) + 2 * most_rows_ * state_floats();
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
  const int64_t begin = next.chunk * kAttentionChunk;
  if (next.group == nullptr || !lies_in_place(begin, positions_of(*next.group, next.chunk))) {
    return nullptr;
  }
  const int64_t block = sequences_.blocks(next.group->sequence)[begin / pool.block_size];
  return pool.keys.at(block, begin % pool.block_size, next.group->kv_head);
}

int64_t AttentionPlan::positions_of(const Group& group, int64_t chunk) const {
  return std::min(kAttentionChunk, group.position + group.tokens - chunk * kAttentionChunk);
}

// Those behind the last position stay null, and so do those that the group sees nothing of.
void AttentionPlan::find_panels(const CachePool& pool, const PoolView& view, const Group& group,
                                int64_t chunk, const void* (&panels)[kChunkPanels]) const {
  const int64_t* blocks = sequences_.blocks(group.sequence);
  const int64_t begin = chunk * kAttentionChunk, positions = positions_of(group, chunk);
  for (int64_t i = hidden_in(group, chunk) / kPanelPositions; i * kPanelPositions < positions;
       ++i) {
    const int64_t at = begin + i * kPanelPositions;
    panels[i] = view.at(blocks[at / pool.block_size], at % pool.block_size, group.kv_head);
  }
}

// The rows where they are if they follow each other at equal distances, else copies in `memory`.
AttentionPlan::ChunkRows AttentionPlan::rows_of_chunk(const CachePool& pool, const Group& group,
                                                      int64_t begin, int64_t positions,
                                                      float* memory) const {
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
  const int64_t hidden = hidden_in(group, begin / kAttentionChunk);
  for (int64_t i = hidden; i < positions && (rows || pool.scaled()); ++i) {
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

int64_t AttentionPlan::first_seen(int64_t position) const {
  return shape_.window == 0 ? 0 : std::max<int64_t>(0, position - shape_.window + 1);
}

// Positions of the chunk that no row of the group sees, since they lie before all windows.
int64_t AttentionPlan::hidden_in(const Group& group, int64_t chunk) const {
  return std::max<int64_t>(0, first_seen(group.position) - chunk * kAttentionChunk);
}

// Rows whose token stands before the chunk: it shows them nothing.
int64_t AttentionPlan::rows_before(const Group& group, int64_t chunk) const {
  return std::max<int64_t>(0, chunk * kAttentionChunk - group.position) * rows_per_token_;
}

// Rows whose window does not begin behind the chunk.
int64_t AttentionPlan::rows_up_to(const Group& group, int64_t chunk) const {
  if (shape_.window == 0 || shape_.window >= group.position + group.tokens) return rows_of(group);
  const int64_t last = (chunk + 1) * kAttentionChunk + shape_.window - 2;  // a token that sees it
  return std::min(group.tokens, last - group.position + 1) * rows_per_token_;
}

// States of the rows that see any of the chunk: [rows_before, rows_up_to).
void AttentionPlan::attend(const KernelTable& table, const AttentionBuffers& buffers,
                           const Group& group, int64_t chunk, const Next& next, const Query& query,
                           float* own, float* states) const {
  const int64_t begin = chunk * kAttentionChunk;
  const int64_t skipped = rows_before(group, chunk);
  const int64_t positions = positions_of(group, chunk);
  const ChunkRows rows = rows_of_chunk(buffers.pool, group, begin, positions, gathered_at(own));
  const bool int8 = shape_.pool.scaled();
  AttentionChunk piece = {
      .query = int8 ? nullptr : query.rows + skipped * shape_.dim,
      .rows = rows_up_to(group, chunk) - skipped,
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
  if (shape_.window != 0) piece.first_hidden = piece.first_visible - shape_.window;
  if (shape_.pool.in_panels()) {
    const CachePool& pool = buffers.pool;
    find_panels(pool, pool.keys, group, chunk, piece.panels.keys);
    find_panels(pool, pool.values, group, chunk, piece.panels.values);
    if (next.group != nullptr) {
      find_panels(pool, pool.keys, *next.group, next.chunk, piece.panels.next_keys);
      find_panels(pool, pool.values, *next.group, next.chunk, piece.panels.next_values);
    }
  }
  table.attend_chunk(piece, scratch_at(own), states + skipped * state_floats());
}

// The states of a chunk into those of all chunks before it; of rows that see none of these, the
// last ones, they are the first.
void AttentionPlan::merge(const KernelTable& table, const Group& group, int64_t chunk,
                          const float* later, float* states) const {
  const int64_t begin = rows_before(group, chunk), end = rows_up_to(group, chunk);
  const int64_t others = std::clamp(rows_up_to(group, chunk - 1), begin, end);
  const int64_t at = begin * state_floats(), first = others * state_floats();
  table.merge_attention(others - begin, shape_.dim, later + at, states + at);
  std::copy(later + first, later + end * state_floats(), states + first);
}

void AttentionPlan::prepare(float* shared) const {
  auto* left = reinterpret_cast<int32_t*>(shared);
  for (const Group& group : groups_) {
    if (group.counter >= 0) left[group.counter] = static_cast<int32_t>(group.chunks);
  }
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
      run_group(table, buffers, group, query, own);
    }
  }
}

void AttentionPlan::run_chunk(const KernelTable& table, const AttentionBuffers& buffers,
                              int64_t task, const Query& query, float* shared, float* own) const {
  const auto [g, chunk] = tasks_[static_cast<size_t>(task)];
  const Group& group = groups_[static_cast<size_t>(g)];
  Next next;
  if (task + 1 < split_tasks_) {
    const Task after = tasks_[static_cast<size_t>(task + 1)];
    next = {&groups_[static_cast<size_t>(after.group)], after.chunk};
  }
  const int64_t chunk_floats = rows_of(group) * state_floats();
  float* states = shared + counter_floats() + group.states;
  const auto states_of = [&](int64_t c) { return states + (c - group.first_chunk) * chunk_floats; };
  attend(table, buffers, group, chunk, next, query, own, states_of(chunk));
  // acq_rel: the last one sees what the others wrote.
  std::atomic_ref<int32_t> left(reinterpret_cast<int32_t*>(shared)[group.counter]);
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  left.store(static_cast<int32_t>(group.chunks), std::memory_order_relaxed);
  for (int64_t c = group.first_chunk + 1; c < group.end_chunk(); ++c) {
    merge(table, group, c, states_of(c), states);
  }
  store_out(table, buffers, group, states, row_at(own));
}

void AttentionPlan::run_group(const KernelTable& table, const AttentionBuffers& buffers,
                              const Group& group, const Query& query, float* own) const {
  float* states = scratch_at(own) + attention_scratch_floats(most_rows_, shape_.dim);
  float* later = states + rows_of(group) * state_floats();
  for (int64_t c = group.first_chunk; c < group.end_chunk(); ++c) {
    const Next next = c + 1 == group.end_chunk() ? Next{} : Next{&group, c + 1};
    attend(table, buffers, group, c, next, query, own, c == group.first_chunk ? states : later);
    if (c > group.first_chunk) merge(table, group, c, later, states);
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
  std::atomic<int64_t> next{plan.split_tasks()};
  const AttentionPlan& tasks = plan;  // the threads of the region have one of their own
  run_partitions(partitions, [&](int64_t p) {
    float* mine = threads.get() + p * own;
    // equal tasks: a sequential stream for each thread; then the dear ones first
    const int64_t split = tasks.split_tasks();
    tasks.run(table, buffers, partition_begin(split, partitions, p),
              partition_begin(split, partitions, p + 1), shared.get(), mine);
    for (int64_t i = next++; i < tasks.tasks(); i = next++)
      tasks.run(table, buffers, i, i + 1, shared.get(), mine);
  });
}

}  // namespace bitnet::engine
