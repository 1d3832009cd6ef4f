// Attention of new tokens over paged caches, cut into tasks. AttentionPlan is for callers that have
// threads of their own; attend() does everything in one region. The arithmetic is in the kernels
// (kernel_table.h, attend_chunk).
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
  CachePool pool;      // strides only; each call brings the data
  int64_t window = 0;  // a token at p sees positions p - window + 1 .. p; 0: all up to p
};

struct AttentionBuffers {
  const void* query;  // [tokens, heads, dim]
  void* out;          // [tokens, heads, dim]
  CachePool pool;     // of the layer, with the shape's strides; the new tokens' keys included
};

// Roughly the multiply-adds of one half of attention (scores, or values).
int64_t attention_work(const AttentionShape& shape, const Sequences& sequences);

// Use, with threads that the caller owns:
//   plan.build(shape, sequences, threads);     // once a step, not once a layer
//   `shared` has plan.shared_floats() floats, `own`, one for each thread, plan.thread_floats()
//   plan.prepare(shared);                      // one thread, before the first task
//   plan.run(table, buffers, begin, end, shared, own);  // any thread, any order, each task once
// When all tasks are done and the threads have synchronised, `out` is complete and `shared` is
// ready for the next layer. A thread should take neighbouring tasks together: they read
// neighbouring memory, and the chunks of a group share its query.
//
// A group is a block of tokens of one sequence, times the query heads of one KV head. A group that
// is more than a fair share of all work is split: each chunk of its positions is a task, and the
// thread that finishes the last chunk merges them, without a barrier. Any other group is one task.
// The result is the same, bit for bit, for every plan. Chunks before a group's window are neither
// read nor counted.
class AttentionPlan {
 public:
  // The arrays of `sequences` must be valid, and live as long as the plan is used. Reuses the
  // memory of an earlier plan.
  void build(const AttentionShape& shape, const Sequences& sequences, int64_t threads);

  int64_t tasks() const { return static_cast<int64_t>(tasks_.size()); }
  // Tasks [0, split_tasks()) are chunks; the others are groups, the most expensive first.
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
    int64_t token, tokens;  // [token, token + tokens) of all tokens
    int64_t position;       // of its first token
    int64_t first_chunk;    // the first chunk that its first token sees
    int64_t chunks;         // up to the last chunk that its last token sees
    int64_t end_chunk() const { return first_chunk + chunks; }
    int64_t counter = -1;  // of a split group: its counter, and where its states begin
    int64_t states = 0;
  };
  struct Task {
    int32_t group, chunk;  // chunk -1: all chunks
  };
  // A group's query rows: float32, or for an int8 cache 16-bit integers with one factor a row.
  struct Query {
    float* rows;
    int16_t* wide;
    float* scale;
  };
  // A chunk's keys and values in the form that the kernels take.
  struct ChunkRows {
    const void *keys, *values;
    int64_t stride_bytes;
    const float *key_scale, *value_scale;
  };
  // The chunk that a thread will read next, to be prefetched; group null: none.
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
  // Whether the kernels can read a chunk's rows in place; the keys of such a chunk, else null.
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
  bool pair_unit_ = false, matrix_unit_ = false;  // of every AttentionChunk
  int64_t split_groups_ = 0, split_tasks_ = 0, states_floats_ = 0;
  bool evenly_strided_ = true;  // rows and scales have the strides that the kernels take
  bool gathers_ = false;        // the rows of some chunk have to be copied together
};

// A step's plans: one for each kind of attention in its layers, over the same sequences.
class AttentionPlans {
 public:
  // Removes all plans and keeps their memory.
  void clear() { used_ = 0; }
  // Builds one more.
  void add(const AttentionShape& shape, const Sequences& sequences, int64_t threads);
  const AttentionPlan& at(int64_t plan) const { return plans_[static_cast<size_t>(plan)]; }

  // `shared` has room for all plans, one after the other; a thread's own memory serves all.
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

// Attention of all sequences in one parallel region.
void attend(const AttentionShape& shape, const Sequences& sequences,
            const AttentionBuffers& buffers);

}  // namespace bitnet::engine
