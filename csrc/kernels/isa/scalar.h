// The SIMD primitives that every ISA has to write, in plain C++: what they mean, and all there is
// of the scalar ISA.  Everything else has a default, in defaults.h and defaults_float.inl,
// that an ISA replaces where its instructions do better; results agree bit for bit.
#pragma once

#include "kernels/isa/defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

// Four floats of the compiler's own vectors, which it puts into registers where there are some.
using F32x4 [[gnu::vector_size(16)]] = float;

// Sixteen float lanes.
struct F32x16 {
  F32x4 part[4];
};

template <class Op>
inline F32x16 map(Op op) {
  return {{op(0), op(1), op(2), op(3)}};
}

inline F32x16 set1(float x) {
  return map([&](int) { return F32x4{x, x, x, x}; });
}
// The first `count` elements (all 16 if count >= 16), zeros in the other lanes.
inline F32x16 load_n(const float* p, int64_t count) {
  F32x16 v = {};
  __builtin_memcpy(&v, p, count >= 16 ? sizeof v : static_cast<std::size_t>(count) * 4);
  return v;
}
inline void store_n(float* p, F32x16 v, int64_t count) {
  __builtin_memcpy(p, &v, count >= 16 ? sizeof v : static_cast<std::size_t>(count) * 4);
}
inline F32x16 add(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] + b.part[i]; });
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] - b.part[i]; });
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] * b.part[i]; });
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] / b.part[i]; });
}
// a * b + c with one rounding. Where a CPU has no instruction for it these are sixteen calls of the
// library, in one place: written out in every kernel they are most of its code.
#ifdef __FP_FAST_FMAF
inline
#else
[[gnu::noinline]]
#endif
    F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return map([&](int i) {
    F32x4 r;
    for (int j = 0; j < 4; ++j) r[j] = __builtin_fmaf(a.part[i][j], b.part[i][j], c.part[i][j]);
    return r;
  });
}
// a > b ? a : b, so that a NaN in b survives and one in a does not (the x86 instruction's rule).
inline F32x16 max(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}

// Few registers.
constexpr int kBlockRows = 2;
constexpr int kSoftmaxRows = 1;
constexpr int kPairTiles = 1;

BITNET_OVERRIDES(kBlockRows, kSoftmaxRows, kPairTiles)

}  // namespace
}  // namespace bitnet::BITNET_ISA
