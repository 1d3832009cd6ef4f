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

  bool operator==(const AttentionPolicy&) const = default;
};

// The keys of a line that say it, by the names above.
AttentionPolicy read_policy(Keys& keys);

}  // namespace bitnet::engine
