// The plan and its tasks; see attention.h. Every number that says how work is cut stands at the
// top.
#include "engine/attention.h"

#include <algorithm>
#include <atomic>

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kBlockRows = 96;       // query rows that meet a chunk while it is in cache
constexpr int64_t kFewestRows = 24;      // smaller blocks waste the loads of keys and values
constexpr int64_t kGroupsPerThread = 8;  // enough for an even split without cutting positions
constexpr int64_t kMostSplitFloats = int64_t{1} << 22;  // states of a split plan: 16 MiB

int64_t chunks_of(int64_t positions) { return (positions + kAttentionChunk - 1) / kAttentionChunk; }

// A counter per group, before the states; whole cache lines.
int64_t counter_floats(int64_t groups) { return (groups + 15) / 16 * 16; }

// Multiply-adds of one half of attention, about.
int64_t work_of(const AttentionShape& shape, const int64_t* start) {
  int64_t positions = 0;
  for (int64_t b = 0; b < shape.batch; ++b) positions += start[b] + shape.tokens;
  return positions * shape.tokens * shape.heads * shape.dim;
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, const int64_t* start, int64_t threads)
    : shape_(shape), start_(start), rows_per_token_(shape.heads / shape.kv_heads) {
  const int64_t pairs = shape.batch * shape.kv_heads, enough = kGroupsPerThread * threads;
  block_tokens_ =
      std::clamp<int64_t>(kBlockRows / rows_per_token_, 1, std::max<int64_t>(shape.tokens, 1));
  const auto blocks = [&] { return (shape.tokens + block_tokens_ - 1) / block_tokens_; };
  while (pairs * blocks() < enough && block_tokens_ > 1 && block_rows() / 2 >= kFewestRows) {
    block_tokens_ = (block_tokens_ + 1) / 2;
  }
  blocks_ = blocks();
  groups_ = tasks_ = pairs * blocks_;
  int64_t pieces = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t i = 0; i < blocks_; ++i) pieces += shape.kv_heads * chunks_of_block(b, i);
  }
  split_ = groups_ < enough && pieces * states_floats() <= kMostSplitFloats;
  if (split_) tasks_ = pieces;
}

int64_t AttentionPlan::shared_floats() const {
  return split_ ? counter_floats(groups_) + tasks_ * states_floats() : 0;
}

// A group's query rows, a row of output, the kernel's scratch, and the states of a group so far and
// of a chunk.
int64_t AttentionPlan::thread_floats() const {
  return query_floats() + attention_padded(shape_.dim) +
         attention_scratch_floats(block_rows(), shape_.dim) + (split_ ? 0 : 2 * states_floats());
}

int64_t AttentionPlan::query_floats() const {
  if (shape_.cache_type != DType::kInt8) return attention_padded(block_rows() * shape_.dim);
  return attention_padded(block_rows()) + block_rows() * wide_padded(shape_.dim) / 2;
}

AttentionPlan::Query AttentionPlan::query_at(float* memory) const {
  if (shape_.cache_type != DType::kInt8) return {memory, nullptr, nullptr};
  return {nullptr, reinterpret_cast<int16_t*>(memory + attention_padded(block_rows())), memory};
}

int64_t AttentionPlan::chunks_of_block(int64_t sequence, int64_t block) const {
  const int64_t end = std::min((block + 1) * block_tokens_, shape_.tokens);
  return chunks_of(start_[sequence] + end);
}

AttentionPlan::Group AttentionPlan::group_at(int64_t sequence, int64_t kv_head,
                                             int64_t block) const {
  const int64_t token = block * block_tokens_;
  return {sequence,
          kv_head,
          token,
          std::min(block_tokens_, shape_.tokens - token),
          chunks_of_block(sequence, block),
          0};
}

int64_t AttentionPlan::group_index(const Group& group) const {
  return (group.sequence * shape_.kv_heads + group.kv_head) * blocks_ + group.token / block_tokens_;
}

// Order of a split plan's tasks: sequence, KV head, block, chunk.
AttentionPlan::Group AttentionPlan::group_of_task(int64_t task) const {
  int64_t first = 0;
  for (int64_t b = 0; b < shape_.batch; ++b) {
    int64_t per_head = 0;
    for (int64_t i = 0; i < blocks_; ++i) per_head += chunks_of_block(b, i);
    if (task >= first + per_head * shape_.kv_heads) {
      first += per_head * shape_.kv_heads;
      continue;
    }
    const int64_t kv_head = (task - first) / per_head;
    first += kv_head * per_head;
    int64_t block = 0;
    while (task >= first + chunks_of_block(b, block)) first += chunks_of_block(b, block++);
    Group group = group_at(b, kv_head, block);
    group.first_task = first;
    return group;
  }
  return {};  // not reached: task < tasks_
}

int64_t AttentionPlan::cache_row(int64_t sequence, int64_t kv_head, int64_t position) const {
  return (sequence * shape_.kv_heads + kv_head) * shape_.length + position;
}

const void* AttentionPlan::cache_at(const void* cache, int64_t sequence, int64_t kv_head,
                                    int64_t position) const {
  const int64_t row = cache_row(sequence, kv_head, position);
  return offset_bytes(cache, row * shape_.dim * element_size(shape_.cache_type));
}

// `row`: a row's memory for what comes between.
void AttentionPlan::load_query(const KernelTable& table, const AttentionBuffers& buffers,
                               const Group& group, const Query& query, float* row) const {
  const int64_t n = rows_per_token_ * shape_.dim;  // the heads of a group lie side by side
  const int64_t dim = shape_.dim, padded = wide_padded(dim);
  for (int64_t t = 0; t < group.tokens; ++t) {
    const int64_t token = group.sequence * shape_.tokens + group.token + t;
    const int64_t first = (token * shape_.kv_heads + group.kv_head) * n;
    const void* from = offset_bytes(buffers.query, first * element_size(shape_.query_type));
    if (query.rows != nullptr) {
      table.load_row(shape_.query_type, from, n, query.rows + t * n);
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
  const int64_t stride = attention_state_floats(shape_.dim);
  for (int64_t r = 0; r < group.tokens * rows_per_token_; ++r) {
    const int64_t t = group.token + r / rows_per_token_;
    const int64_t head = group.kv_head * rows_per_token_ + r % rows_per_token_;
    const int64_t to = ((group.sequence * shape_.tokens + t) * shape_.heads + head) * shape_.dim;
    table.finish_attention(shape_.dim, states + r * stride, row);
    table.store_row(shape_.query_type, row, shape_.dim,
                    offset_bytes(buffers.out, to * element_size(shape_.query_type)));
  }
}

// States of the rows that see any of the chunk; returns how many of the first rows do not.
int64_t AttentionPlan::attend(const KernelTable& table, const AttentionBuffers& buffers,
                              const Group& group, int64_t chunk, const void* next,
                              const Query& query, float* scratch, float* states) const {
  const int64_t begin = chunk * kAttentionChunk, first = start_[group.sequence] + group.token + 1;
  const int64_t blind = std::max<int64_t>(0, begin + 1 - first);  // tokens before the chunk
  const int64_t skipped = blind * rows_per_token_;
  const bool int8 = shape_.cache_type == DType::kInt8;
  const int64_t row = cache_row(group.sequence, group.kv_head, begin);
  const AttentionChunk piece = {
      .query = int8 ? nullptr : query.rows + skipped * shape_.dim,
      .rows = group.tokens * rows_per_token_ - skipped,
      .dim = shape_.dim,
      .rows_per_token = rows_per_token_,
      .type = shape_.cache_type,
      .keys = cache_at(buffers.keys, group.sequence, group.kv_head, begin),
      .values = cache_at(buffers.values, group.sequence, group.kv_head, begin),
      .stride_bytes = shape_.dim * element_size(shape_.cache_type),
      .positions = std::min(kAttentionChunk, first + group.tokens - 1 - begin),
      .first_visible = first + blind - begin,
      .scale = shape_.scale,
      .next = next,
      .int8 = int8 ? Int8Attention{query.wide + skipped * wide_padded(shape_.dim),
                                   query.scale + skipped, buffers.key_scale + row,
                                   buffers.value_scale + row}
                   : Int8Attention{},
  };
  table.attend_chunk(piece, scratch, states + skipped * attention_state_floats(shape_.dim));
  return skipped;
}

void AttentionPlan::prepare(float* shared) const {
  if (!split_) return;
  auto* left = reinterpret_cast<int32_t*>(shared);
  for (int64_t b = 0; b < shape_.batch; ++b) {
    for (int64_t h = 0; h < shape_.kv_heads; ++h) {
      for (int64_t i = 0; i < blocks_; ++i) *left++ = static_cast<int32_t>(chunks_of_block(b, i));
    }
  }
}

void AttentionPlan::run(const KernelTable& table, const AttentionBuffers& buffers, int64_t task,
                        float* shared, float* own) const {
  if (split_) {
    run_chunk(table, buffers, task, shared, own);
  } else {
    run_group(table, buffers, task, own);
  }
}

void AttentionPlan::run_chunk(const KernelTable& table, const AttentionBuffers& buffers,
                              int64_t task, float* shared, float* own) const {
  const Group group = group_of_task(task);
  const int64_t chunk = task - group.first_task, stride = attention_state_floats(shape_.dim);
  const void* next = nullptr;
  if (chunk + 1 < group.chunks) {
    next = cache_at(buffers.keys, group.sequence, group.kv_head, (chunk + 1) * kAttentionChunk);
  } else if (task + 1 < tasks_) {
    const Group after = group_of_task(task + 1);
    next = cache_at(buffers.keys, after.sequence, after.kv_head, 0);
  }
  float* states = shared + counter_floats(groups_) + group.first_task * states_floats();
  float* row = own + query_floats();
  const Query query = query_at(own);
  load_query(table, buffers, group, query, row);
  attend(table, buffers, group, chunk, next, query, row + attention_padded(shape_.dim),
         states + chunk * states_floats());
  // acq_rel: the last one sees what the others wrote.
  std::atomic_ref<int32_t> left(reinterpret_cast<int32_t*>(shared)[group_index(group)]);
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  left.store(static_cast<int32_t>(group.chunks), std::memory_order_relaxed);
  const int64_t rows = group.tokens * rows_per_token_;
  const int64_t first = start_[group.sequence] + group.token + 1;
  for (int64_t c = 1; c < group.chunks; ++c) {
    const int64_t skipped = std::max<int64_t>(0, c * kAttentionChunk + 1 - first) * rows_per_token_;
    table.merge_attention(rows - skipped, shape_.dim,
                          states + c * states_floats() + skipped * stride,
                          states + skipped * stride);
  }
  store_out(table, buffers, group, states, row);
}

void AttentionPlan::run_group(const KernelTable& table, const AttentionBuffers& buffers,
                              int64_t task, float* own) const {
  const int64_t pair = task / blocks_;
  const Group group = group_at(pair / shape_.kv_heads, pair % shape_.kv_heads, task % blocks_);
  const int64_t stride = attention_state_floats(shape_.dim);
  float* row = own + query_floats();
  float* states = row + attention_padded(shape_.dim);
  float* later = states + states_floats();
  float* scratch = later + states_floats();
  const Query query = query_at(own);
  load_query(table, buffers, group, query, row);
  for (int64_t c = 0; c < group.chunks; ++c) {
    const void* next = c + 1 == group.chunks ? nullptr
                                             : cache_at(buffers.keys, group.sequence, group.kv_head,
                                                        (c + 1) * kAttentionChunk);
    const int64_t skipped =
        attend(table, buffers, group, c, next, query, scratch, c == 0 ? states : later);
    if (c == 0) continue;
    table.merge_attention(group.tokens * rows_per_token_ - skipped, shape_.dim,
                          later + skipped * stride, states + skipped * stride);
  }
  store_out(table, buffers, group, states, row);
}

void attend(const AttentionShape& shape, const int64_t* start, const AttentionBuffers& buffers) {
  const KernelTable& table = kernels();
  const int64_t most = partitions_for(shape.kv_heads * shape.batch * shape.tokens * shape.length,
                                      work_of(shape, start), kMinElements);
  const AttentionPlan plan(shape, start, most);
  const int64_t partitions = std::min(most, plan.tasks()), own = plan.thread_floats();
  Scratch<float> shared(plan.shared_floats()), threads(partitions * own);
  plan.prepare(shared.get());
  std::atomic<int64_t> next{0};
  run_partitions(partitions, [&](int64_t p) {
    float* mine = threads.get() + p * own;
    if (plan.split()) {  // equal tasks: a sequential stream for each thread
      const int64_t end = partition_begin(plan.tasks(), partitions, p + 1);
      for (int64_t i = partition_begin(plan.tasks(), partitions, p); i < end; ++i)
        plan.run(table, buffers, i, shared.get(), mine);
    } else {  // later tokens see more positions: the dear ones first
      for (int64_t i = next++; i < plan.tasks(); i = next++)
        plan.run(table, buffers, plan.tasks() - 1 - i, shared.get(), mine);
    }
  });
}

}  // namespace bitnet::engine
