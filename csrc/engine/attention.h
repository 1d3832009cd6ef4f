// Attention of new tokens over paged caches, cut into tasks: what to compute, in how many pieces,
// with how much scratch memory, and one piece at a time, for callers with threads of their own; or
// all at once. The arithmetic is the kernels' (kernel_table.h, attend_chunk).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/kv_cache.h"
#include "kernels/kernel_table.h"

namespace bitnet::engine {

struct AttentionShape {
  int64_t heads, kv_heads, dim;
  DType query_type;  // of query and out
  float scale;
  CachePool pool;      // its strides; the data is that of each call
  int64_t window = 0;  // a token at p sees positions p - window + 1 .. p; 0: all up to p
};

struct AttentionBuffers {
  const void* query;  // [tokens, heads, dim]
  void* out;          // [tokens, heads, dim]
  CachePool pool;     // of the layer, with the shape's strides; the new tokens' keys included
};

// Multiply-adds of one half of attention with that window, about.
int64_t attention_work(const AttentionShape& shape, const Sequences& sequences);

// How to use it, with threads that the caller owns:
//   plan.build(shape, sequences, threads);                // per step, not per layer
//   shared: plan.shared_floats() floats, per thread: plan.thread_floats() floats
//   plan.prepare(shared)                                  // one thread, before the first task
//   any thread, any order, each task once:  plan.run(table, buffers, begin, end, shared, own)
// When every task has returned and the threads have synchronised, `out` is complete, and `shared`
// is prepared again for the next layer. A thread should take neighbouring tasks together: they read
// neighbouring memory, and chunks of one group share its query.
//
// A group is a block of tokens of one sequence times the query heads of one KV head. One that is
// more than a fair part of all the work is split: each chunk of its positions is a task, and
// whoever finishes the last one merges them, so no barrier is needed in between. Any other group is
// one task. The result is the same, bit for bit, whatever the plan. Chunks before a group's window
// are no part of it: what they hold is not read, and they cost nothing.
class AttentionPlan {
 public:
  // The sequences' arrays are read as long as the plan is used; checked by the caller. Memory of an
  // earlier plan is used again.
  void build(const AttentionShape& shape, const Sequences& sequences, int64_t threads);

  int64_t tasks() const { return static_cast<int64_t>(tasks_.size()); }
  // Tasks [0, split_tasks()) are chunks; those behind are groups, the dearest first.
  int64_t split_tasks() const { return split_tasks_; }
  int64_t shared_floats() const { return counter_floats() + states_floats_; }
  int64_t thread_floats() const;

  void prepare(float* shared) const;
  // Tasks [begin, end).
  void run(const KernelTable& table, const AttentionBuffers& buffers, int64_t begin, int64_t end,
           float* shared, float* own) const;

 private:
  struct Group {
    int64_t sequence, kv_head;
    int64_t token, tokens;  // of all tokens: [token, token + tokens)
    int64_t position;       // of the first
    int64_t first_chunk;    // that its first token sees
    int64_t chunks;         // from there on, to the last one that its last token sees
    int64_t end_chunk() const { return first_chunk + chunks; }
    int64_t counter = -1;  // split: which counter, and where its states begin
    int64_t states = 0;
  };
  struct Task {
    int32_t group, chunk;  // chunk -1: all of them
  };
  // A group's query rows: as float32, or for an int8 cache as quantised, one factor each.
  struct Query {
    float* rows;
    int16_t* wide;
    float* scale;
  };
  // A chunk's keys and values as the kernels take them.
  struct ChunkRows {
    const void *keys, *values;
    int64_t stride_bytes;
    const float *key_scale, *value_scale;
  };
  // The chunk that a thread reads next; no group: none.
  struct Next {
    const Group* group = nullptr;
    int64_t chunk = 0;
  };

  void choose_block_tokens(int64_t threads);
  void make_groups();
  void make_tasks(int64_t threads);
  int64_t rows_of(const Group& group) const { return group.tokens * rows_per_token_; }
  int64_t cost_of(const Group& group) const;
  int64_t counter_floats() const;
  int64_t state_floats() const { return attention_state_floats(shape_.dim); }
  int64_t query_floats() const;
  Query query_at(float* memory) const;
  float* row_at(float* memory) const { return memory + query_floats(); }
  float* gathered_at(float* memory) const { return row_at(memory) + attention_padded(shape_.dim); }
  int64_t gathered_floats() const;
  float* scratch_at(float* memory) const { return gathered_at(memory) + gathered_floats(); }

  void load_query(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                  const Query& query, float* row) const;
  // Whether a chunk's rows lie as the kernels want them; keys of a chunk that does, else null.
  bool lies_in_place(int64_t begin, int64_t positions) const;
  const void* keys_in_place(const CachePool& pool, const Next& next) const;
  ChunkRows rows_of_chunk(const CachePool& pool, const Group& group, int64_t begin,
                          int64_t positions, float* memory) const;
  int64_t positions_of(const Group& group, int64_t chunk) const;
  void find_panels(const CachePool& pool, const PoolView& view, const Group& group, int64_t chunk,
                   const void* (&panels)[kChunkPanels]) const;
  void attend(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
              int64_t chunk, const Next& next, const Query& query, float* own, float* states) const;
  void merge(const KernelTable& table, const Group& group, int64_t chunk, const float* later,
             float* states) const;
  int64_t first_seen(int64_t position) const;
  int64_t rows_before(const Group& group, int64_t chunk) const;
  int64_t rows_up_to(const Group& group, int64_t chunk) const;
  int64_t hidden_in(const Group& group, int64_t chunk) const;
  void store_out(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                 const float* states, float* row) const;
  void run_chunk(const KernelTable& table, const AttentionBuffers& buffers, int64_t task,
                 const Query& query, float* shared, float* own) const;
  void run_group(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                 const Query& query, float* own) const;

  AttentionShape shape_{};
  Sequences sequences_;
  std::vector<Group> groups_;
  std::vector<Task> tasks_;
  int64_t rows_per_token_ = 1, block_tokens_ = 1, most_rows_ = 0;
  bool pair_unit_ = false;  // AttentionChunk::pair_unit
  int64_t split_groups_ = 0, split_tasks_ = 0, states_floats_ = 0;
  bool evenly_strided_ = true;  // as the kernels take a chunk's rows and scales
  bool gathers_ = false;        // some chunk's rows have to be put together
};

// A step's plans: one for each kind of attention in its layers, over the same sequences.
class AttentionPlans {
 public:
  // Removes all; their memory is used again.
  void clear() { used_ = 0; }
  // Builds one more.
  void add(const AttentionShape& shape, const Sequences& sequences, int64_t threads);
  const AttentionPlan& at(int64_t plan) const { return plans_[static_cast<size_t>(plan)]; }

  // `shared` holds that of each plan, one behind the other; a thread's own serves all.
  int64_t shared_floats() const { return shared_before(used_); }
  int64_t thread_floats() const;
  float* shared_of(int64_t plan, float* shared) const {
    return shared + shared_before(static_cast<size_t>(plan));
  }
  void prepare(float* shared) const;

 private:
  int64_t shared_before(size_t plan) const;

  std::vector<AttentionPlan> plans_;
  size_t used_ = 0;
};

// All of it in one parallel region.
void attend(const AttentionShape& shape, const Sequences& sequences,
            const AttentionBuffers& buffers);

}  // namespace bitnet::engine
