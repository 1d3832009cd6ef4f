// Which of the positions up to its own a token attends to.
#pragma once

#include "engine/program/listing.h"

namespace bitnet::engine {

// Chunks of attention (kAttentionChunk) of which a token sees nothing are not read. What it sees
// follows from its position p alone, whatever else a step computes. A token to which everything is
// left gets the result of the policy that leaves nothing out, bit for bit.
struct AttentionPolicy {
  int64_t window = 0;  // p - window + 1 .. p; 0: all, and then there are no sinks and no stride
  int64_t sinks = 0;   // and the first ones, so many
  int64_t stride = 0;  // and every chunk whose number is a multiple of it; 0: no such chunks
  // Or chunks, here pages, that look promising, chosen for each token and KV head: a token at
  // dense_below or behind reads its own page, those with sinks, and of the others so many of the
  // best that they are ceil(ratio * pages) in all, one at least, lower ones first among equals. The
  // score of a page is a bound of scale * query * key, added over the queries of the KV head. With
  // p the softmax of scores / queries, ratio = min_ratio + (max_ratio - min_ratio) * entropy(p) /
  // log(pages); or, with a threshold, they are the pages with p of at least threshold times the
  // largest.
  float min_ratio = 0, max_ratio = 0;  // 0: no such choice
  float threshold = 0;                 // 0: not by it
  int64_t dense_below = 0;

  bool chooses() const { return max_ratio > 0 || threshold > 0; }
  bool operator==(const AttentionPolicy&) const = default;
};

// Where choosing pages begins to pay, unless a policy says it: docs/guide/attention.md.
inline constexpr int64_t kDenseBelow = 2048;

// The keys of a line that say it, by the names above.
AttentionPolicy read_policy(Keys& keys);

}  // namespace bitnet::engine
