// Which pages the tokens of a group read, where a policy chooses: scores of the pages' bounds, then
// page_choice.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/attention_cut.h"

namespace bitnet::engine {

class PageChooser {
 public:
  using Group = AttentionCut::Group;
  using Piece = AttentionCut::Piece;

  // Memory of a thread.
  static int64_t floats(const AttentionCut& cut);

  // pool: of the layer; query: [tokens, heads, dim]. To pages_read [sequences] it adds how many
  // pages the groups of each sequence read.
  PageChooser(const AttentionCut& cut, const KernelTable& kernels, const CachePool& pool,
              const void* query, float* shared, int64_t* pages_read, float* thread_memory);

  // Choices [begin, end).
  void choose(int64_t begin, int64_t end) const;

 private:
  // For one KV head after the other, or several of one token.
  struct Memory {
    float *queries, *sums, *scores;
    uint64_t* tokens;  // of each page: those that read it
    int32_t* ids;
    PageMemory pages;
  };
  static Memory take(const AttentionCut& cut, BumpAllocator& memory);
  // Choices [first, last): one, or several KV heads of one token.
  void choose_together(size_t first, size_t last) const;
  void list_choice(const Group& group, float* scores, Piece* choice) const;

  const AttentionCut& cut_;
  const KernelTable& kernels_;
  const CachePool& pool_;
  const void* query_;
  float* shared_;
  int64_t* pages_read_;
  Memory memory_;
};

}  // namespace bitnet::engine
