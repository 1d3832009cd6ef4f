// What one token reads where a policy chooses pages; attention_policy.h has the rule.
#pragma once

#include <cstdint>

#include "engine/attention_policy.h"
#include "engine/selection.h"
#include "kernels/kernel_table.h"

namespace bitnet::engine {

// Whether the token at a position chooses which pages it reads.
bool chooses_pages(const AttentionPolicy& policy, int64_t position);

// How many of `pages` a token reads at most, its own page included.
int64_t max_pages_read(const AttentionPolicy& policy, int64_t pages);

// The queries [rows, dim] of a token, added up so that one dot product with a page's bounds (the
// largest of every feature, then the smallest) is its score: max(q * largest, q * smallest) added
// over the queries is Q+ * largest + Q- * smallest, Q+ the sum of positive queries and Q- that of
// the others. sums: [2 * dim].
void add_queries(const float* queries, int64_t rows, int64_t dim, float scale, float* sums);

// Scratch memory to choose of up to `pages`.
struct PageMemory {
  float* weights;
  SelectionMemory selection;
  static PageMemory take(BumpAllocator& memory, int64_t pages) {
    return {memory.take<float>(pages), SelectionMemory::take(memory, pages)};
  }
};

// Chooses among `pages`, the last of which is the token's own; scores [pages - 1] are sums over
// `rows` queries. Writes the chosen pages, ascending, to `ids` [pages] and returns how many there
// are. A NaN counts as the largest score, so that its page is read and the NaN shows.
int64_t choose_pages(const KernelTable& kernels, const AttentionPolicy& policy, int64_t rows,
                     float* scores, int64_t pages, const PageMemory& memory, int32_t* ids);

}  // namespace bitnet::engine
