// Attention cut into tasks: what to compute, in how many pieces, with how much scratch memory, and
// one piece at a time, for callers with threads of their own; or all at once.  The arithmetic is
// the kernels' (kernel_table.h, attend_chunk).
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace bitnet::engine {

struct AttentionShape {
  int64_t batch, tokens, heads, kv_heads;
  int64_t length, dim;  // positions that a cache holds for a sequence; size of a head
  DType query_type;     // of query and out
  DType cache_type;     // any
  float scale;
};

struct AttentionBuffers {
  const void* query;   // [batch, tokens, heads, dim]
  const void* keys;    // [batch, kv_heads, length, dim], the new tokens' keys included
  const void* values;  // likewise
  void* out;           // [batch, tokens, heads, dim]
  const float* key_scale = nullptr;  // [batch, kv_heads, length], of an int8 cache
  const float* value_scale = nullptr;
};

// How to use it, with threads that the caller owns:
//   AttentionPlan plan(shape, start_positions, threads);   // cheap; per step, not per layer
//   shared: plan.shared_floats() floats, per thread: plan.thread_floats() floats
//   plan.prepare(shared)                                   // one thread, before the first task
//   any thread, any order, each task once:  plan.run(table, buffers, task, shared, own)
// When every task has returned and the threads have synchronised, `out` is complete, and `shared`
// is prepared again for the next layer.  A thread should take neighbouring tasks, in ascending
// order: they read neighbouring memory.
//
// A task is one chunk of positions for one group of query rows ("split"), or all chunks of a group
// where there are groups enough for all threads.  A group is a block of tokens times the query
// heads of one KV head.  In a split plan whoever finishes a group's last chunk merges it, so no
// barrier is needed in between.  The result is the same, bit for bit, whatever the plan.
class AttentionPlan {
 public:
  // start: int64 [batch], read as long as the plan is used; checked by the caller.
  AttentionPlan(const AttentionShape& shape, const int64_t* start, int64_t threads);

  int64_t tasks() const { return tasks_; }
  bool split() const { return split_; }
  int64_t shared_floats() const;
  int64_t thread_floats() const;

  void prepare(float* shared) const;
  void run(const KernelTable& table, const AttentionBuffers& buffers, int64_t task, float* shared,
           float* own) const;

 private:
  struct Group {
    int64_t sequence, kv_head, token, tokens;  // tokens [token, token + tokens)
    int64_t chunks;                            // that its last token sees
    int64_t first_task;
  };
  Group group_of_task(int64_t task) const;
  Group group_at(int64_t sequence, int64_t kv_head, int64_t block) const;
  int64_t chunks_of_block(int64_t sequence, int64_t block) const;
  int64_t group_index(const Group& group) const;
  int64_t block_rows() const { return block_tokens_ * rows_per_token_; }
  int64_t states_floats() const { return block_rows() * attention_state_floats(shape_.dim); }

  // A group's query rows: as float32, or for an int8 cache as quantised, one factor each.
  struct Query {
    float* rows;
    int16_t* wide;
    float* scale;
  };
  int64_t query_floats() const;
  Query query_at(float* memory) const;
  void load_query(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                  const Query& query, float* row) const;
  int64_t attend(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                 int64_t chunk, const void* next, const Query& query, float* scratch,
                 float* states) const;
  void store_out(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                 const float* states, float* row) const;
  void run_chunk(const KernelTable& table, const AttentionBuffers& buffers, int64_t task,
                 float* shared, float* own) const;
  void run_group(const KernelTable& table, const AttentionBuffers& buffers, int64_t task,
                 float* own) const;
  int64_t cache_row(int64_t sequence, int64_t kv_head, int64_t position) const;
  const void* cache_at(const void* cache, int64_t sequence, int64_t kv_head,
                       int64_t position) const;

  AttentionShape shape_;
  const int64_t* start_;
  int64_t rows_per_token_, block_tokens_, blocks_, groups_, tasks_;
  bool split_;
};

// All of it in one parallel region.
void attend(const AttentionShape& shape, const int64_t* start, const AttentionBuffers& buffers);

}  // namespace bitnet::engine
