// The tasks of a cut, run by one thread: queries in, chunks attended to, states merged, results
// out.
#pragma once

#include <cstdint>

#include "engine/attention_cut.h"
#include "engine/attention_reader.h"

namespace bitnet::engine {

struct AttentionBuffers {
  const void* query;  // [tokens, heads, dim]
  void* out;          // [tokens, heads, dim]
  CachePool pool;     // of the layer, with the shape's strides; the new tokens' keys included
};

class AttentionRun {
 public:
  // Memory of a thread.
  static int64_t floats(const AttentionCut& cut, const PoolAccess& access);

  AttentionRun(const AttentionCut& cut, const PoolAccess& access, const KernelTable& kernels,
               const AttentionBuffers& buffers, float* shared, float* thread_memory);

  // Tasks [begin, end).
  void run(int64_t begin, int64_t end) const;

 private:
  using Group = AttentionCut::Group;
  using Piece = AttentionCut::Piece;
  using Next = AttentionReader::Next;
  using Query = AttentionQuery;

  // The thread's memory, one array behind the other: the query rows of a group, those of some of
  // its tokens, a row of output, a chunk's rows copied together, the kernel's scratch, and states:
  // of the group so far, and of one chunk.
  struct Memory {
    float *query, *tokens, *row, *gathered, *scratch, *states;
    int64_t floats;
  };
  static Memory take(const AttentionCut& cut, const PoolAccess& access, float* thread_memory);
  Query query_at(float* memory) const;

  void load_query(const Group& group) const;
  void store_out(const Group& group, const float* states) const;
  void run_chunk(int64_t task) const;
  void run_group(const Group& group) const;
  void attend(const Group& group, const Piece& piece, const Next& next, bool same_queries,
              float* states) const;
  void merge(const Group& group, int64_t piece, const float* later, float* states) const;
  // The query rows of some tokens side by side, for a group that reads by token: copied, unless the
  // tokens are neighbours.
  Query rows_of_tokens(uint64_t tokens) const;
  // Merges the states of a piece, whose rows lie side by side, into those of all rows. `begun`: a
  // bit for each token that already has a state.
  void merge_tokens(uint64_t tokens, const float* later, uint64_t& begun, float* states) const;
  int64_t pieces_of(const Group& group) const { return cut_.pieces_of(group, shared_); }
  Piece piece_of(const Group& group, int64_t i) const { return cut_.piece_of(group, i, shared_); }

  const AttentionCut& cut_;
  const AttentionShape& shape_;
  const KernelTable& kernels_;
  const AttentionBuffers& buffers_;
  float* shared_;
  Memory memory_;
  Query query_;
  AttentionReader reader_;
};

}  // namespace bitnet::engine
