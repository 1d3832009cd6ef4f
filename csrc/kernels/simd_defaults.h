// SIMD primitives that an ISA need not write.  An ISA's own declaration of a name, in its inner
// namespace, hides the one here.  Included by every simd_*.h.
#pragma once

#include <cstdint>

namespace bitnet {
namespace {

// Fixes v in its register at this point.  Without it g++ 12 reassociates the integer sums of a tile
// across its fields, and so many intermediate sums live at once that it spills the accumulators.
template <class T>
inline void pin(T&) {}

// Makes the compiler take v for changed, so that it computes again what depends on v alone.
// Needless where `dot` is one instruction that adds into its accumulator.
template <class T>
inline void renew(T&) {}

// No unit that multiplies whole tiles; simd_amx_int8.h has one.
struct MatrixUnit {
  static constexpr int64_t kFromTokens = 0;  // never
};

}  // namespace
}  // namespace bitnet
