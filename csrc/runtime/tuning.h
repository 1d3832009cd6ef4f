// Settings that depend on the make of a CPU rather than on its features: one small table, read
// once. A wrong row costs time, never correctness.
#pragma once

#include <cstdint>
#include <string>

namespace bitnet {

// Where the choice among the algorithms of a product comes from (engine/products/tune.h).
enum class ProductChoice {
  kUsual,     // from the order of the ISA's list alone
  kPrior,     // and from what is known of this make of CPU
  kMeasured,  // from a measurement of each kind of product, at its first use
};

struct Tuning {
  const char* cpu;         // name of the row, shown by `bitnet-ops doctor`
  int64_t prefetch_bytes;  // distance ahead of a weight stream
  // Likewise of a head for one token, and whether a head is asked for into L2. One token does
  // little work for each line of a head, which is read in several streams: the hardware's own
  // prefetcher is faster than a core's few loads into L1 (24 under way at once on Zen 3 and 4), and
  // only has to be told where a stream goes on.
  int64_t head_bytes;
  bool head_into_l2;
  // vdpbf16ps, where it is, takes no longer than a multiply-add, which does half of its work. On
  // Sapphire Rapids it takes four times as long.
  bool fast_pairs;
  ProductChoice products;
  // Whether products of many tokens may use tables of sums (ternary/tables.inl).
  bool sum_tables = true;
  // The algorithm (a name of the kernels' list of products) that is taken wherever it can be;
  // empty: as the shape asks for.
  std::string product = {};
};

// The row of this CPU, and what BITNET_OPS_TUNING says of it: prefetch=bytes (0 to 65536) the
// distance, bytes:L1 or bytes:L2 where the heads fetch to as well; tables=0 or 1 whether tables of
// sums may be used; measure=0 that the ISA's usual products are taken, 1 that each is measured;
// product=name.  Throws std::runtime_error on another value or key.
const Tuning& tuning();

// The value of a key in BITNET_OPS_TUNING="key=value,key=value", or of the variable of its own that
// it replaces (BITNET_OPS_TABLES for "tables"; PREFETCH, SPREAD and BACK_OFF likewise, no others);
// empty: neither is set. Keys: those above, spread and back_off (oversubscription.h).
std::string setting(const std::string& key);

}  // namespace bitnet
