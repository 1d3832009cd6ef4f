// Which of the positions up to its own a token attends to.
#pragma once

#include <algorithm>

#include "engine/program/listing.h"

namespace bitnet::engine {

// A token does not read chunks (kAttentionChunk) of which it sees nothing. What it sees depends on
// its position p alone, not on what else a step computes. A token that sees everything gets the
// same bits as without a policy.
struct AttentionPolicy {
  int64_t window = 0;  // sees p - window + 1 .. p; 0: all, without sinks and stride
  int64_t sinks = 0;   // and the first `sinks` positions
  int64_t stride = 0;  // and every chunk whose number is a multiple of it; 0: no such chunks
  // Does not see the first `skip` positions, itself apart. For steps of few tokens a sequence:
  // each token is a group of its own.
  int64_t skip = 0;
  // Or promising chunks, here called pages, are chosen for each token and KV head. A token at
  // dense_below or behind reads its own page, the pages with sinks, and the best of the others: at
  // least one, and ceil(ratio * pages) in all. Of equals the lower pages come first. The score of a
  // page is a bound of scale * query * key, summed over the queries of the KV head. With p the
  // softmax of scores / queries, ratio = min_ratio + (max_ratio - min_ratio) * entropy(p) /
  // log(pages). With a threshold, the best are the pages whose p is at least threshold times the
  // largest p.
  float min_ratio = 0, max_ratio = 0;  // 0: pages are not chosen by ratio
  float threshold = 0;                 // 0: pages are not chosen by threshold
  int64_t dense_below = 0;

  bool chooses() const { return max_ratio > 0 || threshold > 0; }
  // How many positions, its own the last, a token at `position` sees; 0: all.
  int64_t window_at(int64_t position) const {
    return skip == 0 ? window : std::max<int64_t>(1, position + 1 - skip);
  }
  bool operator==(const AttentionPolicy&) const = default;
};

// The default of dense_below: from there on it pays to choose pages (docs/guide/attention.md).
inline constexpr int64_t kDenseBelow = 2048;

// From the keys of a line, which have the names above.
AttentionPolicy read_policy(Keys& keys);

}  // namespace bitnet::engine
