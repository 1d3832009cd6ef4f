// What depends on the make of the CPU and not on its features: one small table, read once. A wrong
// row costs time, never correctness. Must not know kernels.
#pragma once

#include <cstdint>

namespace bitnet {

struct Tuning {
  const char* cpu;         // what the row is for, shown by `bitnet-ops doctor`
  int64_t prefetch_bytes;  // distance ahead of a weight stream
  // A core has few loads into L1 under way at once (24 on Zen 3 and 4): a stream that does little
  // else per line, a head's, is fetched into L2, which has more.
  bool head_into_l2;
  // Vectors of 512 bits have two ports for everything, so decoding a weight delays its products.
  bool shared_ports;
};

// The row of this CPU; BITNET_OPS_PREFETCH=bytes (0 to 65536) overrides the distance, bytes:L1 or
// bytes:L2 where the heads fetch to as well.  Throws std::runtime_error on another value.
const Tuning& tuning();

}  // namespace bitnet
