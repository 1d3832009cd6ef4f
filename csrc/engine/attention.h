// Attention of new tokens over paged caches, cut into tasks. AttentionPlan is for callers that have
// threads of their own; attend() does everything in one region. The arithmetic is in the kernels
// (kernel_table.h, attend_chunk).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/attention_policy.h"
#include "engine/kv_cache.h"
#include "engine/page_choice.h"
#include "kernels/kernel_table.h"

namespace bitnet::engine {

struct AttentionShape {
  int64_t heads, kv_heads, dim;
  DType query_type;  // of query and out
  float scale;
  CachePool pool;  // strides only; each call brings the data
  AttentionPolicy policy{};
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
// The result is the same, bit for bit, for every plan. What a group reads is a list of pieces, each
// some of the positions of one chunk. Where tokens choose their pages, a piece names the tokens of
// the group that read it, and their rows are computed together.
class AttentionPlan {
 public:
  // The arrays of `sequences` must be valid, and live as long as the plan is used. Reuses the
  // memory of an earlier plan.
  void build(const AttentionShape& shape, const Sequences& sequences, int64_t threads);

  int64_t tasks() const { return static_cast<int64_t>(tasks_.size()); }
  // Tasks [0, split_tasks()) are chunks; the others are groups, the most expensive first.
  int64_t split_tasks() const { return split_tasks_; }
  int64_t shared_floats() const {
    return whole_lines(choices_at() + chosen_pieces_ * kPieceFloats);
  }
  // Groups that choose what they read: choose() of each before the first task of a layer.
  int64_t choices() const { return static_cast<int64_t>(choosing_.size()); }
  int64_t thread_floats() const;

  void prepare(float* shared) const;
  // When so many layers are done: adds what was read to page_counts() (runtime/page_count.h).
  void add_page_counts(int64_t layers) const;
  // Choices [begin, end).
  void choose(const KernelTable& table, const AttentionBuffers& buffers, int64_t begin, int64_t end,
              float* shared, float* own) const;
  // Tasks [begin, end).
  void run(const KernelTable& table, const AttentionBuffers& buffers, int64_t begin, int64_t end,
           float* shared, float* own) const;

 private:
  struct Group {
    int64_t sequence, kv_head;
    int64_t token, tokens;  // [token, token + tokens) of all tokens
    int64_t position;       // of its first token
    int64_t first_piece;    // in pieces_, which the heads of a block of tokens share
    int64_t pieces;         // of one that chooses: at most
    int64_t row_pieces;     // pieces that each of its rows reads, added up; likewise
    int64_t choice = -1;    // of one that chooses: where its choice lies
    int64_t counter = -1;   // of a split group: its counter, and where its states begin
    int64_t states = 0;
  };
  // What a group reads of a chunk: of the positions up to its own, each token sees those of its
  // window, all, or those of the first `sinks`. One chunk may be two pieces, its sinks the first.
  struct Piece {
    enum Kind : int32_t { kWindow, kAll, kSinks };
    int32_t chunk;
    Kind kind;
    uint64_t tokens = 0;  // of one that was chosen: those that read it, by bits
    int64_t begin() const { return chunk * kAttentionChunk; }
  };
  static constexpr int64_t kPieceFloats = sizeof(Piece) / sizeof(float);
  static constexpr int64_t kChoosingTokens = 64;  // of a group, the bits of Piece::tokens
  struct Task {
    int32_t group, piece;  // piece -1: all pieces
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
  // What a thread will read next, to be prefetched; group null: nothing.
  struct Next {
    const Group* group = nullptr;
    Piece piece{};
  };

  void choose_block_tokens(int64_t threads);
  void make_groups();
  void add_choice(Group& group);
  const Group& choosing(size_t i) const { return groups_[static_cast<size_t>(choosing_[i])]; }
  // A thread's memory to choose, for one KV head after the other or several of one token.
  struct ChoosingMemory {
    float *queries, *sums, *scores;
    uint64_t* tokens;  // of each page: those that read it
    int32_t* ids;
    PageMemory pages;
  };
  ChoosingMemory choosing_memory(BumpAllocator& memory) const;
  // Groups [first, last) of choosing_: one, or several KV heads of one token.
  void choose(const KernelTable& table, const AttentionBuffers& buffers, size_t first, size_t last,
              float* shared, const ChoosingMemory& memory) const;
  void list_choice(const KernelTable& table, const Group& group, float* scores, Piece* choice,
                   const ChoosingMemory& memory) const;
  int64_t choosing_floats() const;
  static int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }
  int64_t choices_at() const { return counter_floats() + whole_lines(states_floats_); }
  // The pieces of a group that chooses; before them one whose `chunk` counts them.
  Piece* choice_of(const Group& group, float* shared) const {
    return reinterpret_cast<Piece*>(shared + choices_at()) + group.choice;
  }
  void add_pieces(int64_t position, int64_t tokens);
  void make_tasks(int64_t threads);
  int64_t rows_of(const Group& group) const { return group.tokens * rows_per_token_; }
  int64_t cost_of(const Group& group) const;
  int64_t counter_floats() const;
  int64_t state_floats() const { return attention_state_floats(shape_.dim); }
  int64_t query_floats() const;
  Query query_at(float* memory) const;
  float* tokens_at(float* memory) const { return memory + query_floats(); }
  float* row_at(float* memory) const {
    return tokens_at(memory) + (reads_by_token_ ? query_floats() : 0);
  }
  float* gathered_at(float* memory) const { return row_at(memory) + attention_padded(shape_.dim); }
  int64_t gathered_floats() const;
  float* scratch_at(float* memory) const { return gathered_at(memory) + gathered_floats(); }
  float* states_at(float* memory) const {
    return scratch_at(memory) + attention_scratch_floats(most_rows_, shape_.dim);
  }

  void load_query(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                  const Query& query, float* row) const;
  // Where a position of a sequence lies in the pool.
  struct Place {
    int64_t block, position;
  };
  Place place_of(const Group& group, int64_t position) const;
  // Whether the kernels can read a chunk's rows in place; the keys of such a chunk, else null.
  bool lies_in_place(int64_t begin, int64_t positions) const;
  const void* keys_in_place(const CachePool& pool, const Next& next) const;
  ChunkRows rows_of_piece(const CachePool& pool, const Group& group, const Piece& piece,
                          float* memory) const;
  int64_t pieces_of(const Group& group, float* shared) const {
    return group.choice < 0 ? group.pieces : choice_of(group, shared)[0].chunk;
  }
  Piece piece_of(const Group& group, int64_t i, float* shared) const {
    if (group.choice >= 0) return choice_of(group, shared)[1 + i];
    return pieces_[static_cast<size_t>(group.first_piece + i)];
  }
  int64_t positions_of(const Group& group, const Piece& piece) const;
  using Panels = const void* [kChunkPanels];
  void find_panels(const CachePool& pool, const Group& group, const Piece& piece, Panels& keys,
                   Panels& values) const;
  // What the kernel takes of an int8 cache.
  Int8Attention int8_of(const CachePool& pool, const Query& query, const ChunkRows& rows,
                        const Next& next) const;
  void attend(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
              const Piece& piece, const Next& next, const Query& query, bool same_queries,
              float* own, float* states) const;
  void merge(const KernelTable& table, const Group& group, int64_t piece, const float* later,
             float* states, float* shared) const;
  static bool reads_by_token(const Group& group) { return group.choice >= 0 && group.tokens > 1; }
  // Of such a group: the tokens' rows side by side, or where they lie if they do so already.
  Query rows_of_tokens(const Query& query, uint64_t tokens, float* memory) const;
  // The states of a piece, its tokens' rows side by side, into those of all rows; `begun`: tokens
  // that have states, by bits.
  void merge_tokens(const KernelTable& table, uint64_t tokens, const float* later, uint64_t& begun,
                    float* states) const;
  bool sees_all(int64_t position) const;
  int64_t first_seen(int64_t position) const;
  int64_t rows_before(const Group& group, const Piece& piece) const;
  int64_t rows_up_to(const Group& group, const Piece& piece) const;
  int64_t hidden_in(const Group& group, const Piece& piece) const;
  void store_out(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                 const float* states, float* row) const;
  void run_chunk(const KernelTable& table, const AttentionBuffers& buffers, int64_t task,
                 const Query& query, float* shared, float* own) const;
  void run_group(const KernelTable& table, const AttentionBuffers& buffers, const Group& group,
                 const Query& query, float* shared, float* own) const;

  AttentionShape shape_{};
  Sequences sequences_;
  std::vector<Group> groups_;
  std::vector<Piece> pieces_;
  std::vector<int32_t> choosing_;               // groups
  mutable std::vector<int64_t> pages_read_;     // by sequence, of groups that choose, in all layers
  int64_t chosen_pieces_ = 0;                   // of all choices, their counts included
  int64_t most_pages_ = 0, most_choosing_ = 0;  // of a choice: pages, and tokens
  bool reads_by_token_ = false;                 // some group does
  std::vector<Task> tasks_;
  int64_t rows_per_token_ = 1, block_tokens_ = 1, most_rows_ = 0;
  int block_bits_ = -1;  // the pool's block_size is 2^block_bits_; below 0: no power of two
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
