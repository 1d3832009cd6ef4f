// The SIMD primitives that every ISA has to write, in plain C++: what they mean, and all there is
// of the scalar ISA.  Everything else has a default, in defaults.h and defaults_float.inl,
// that an ISA replaces where its instructions do better; results agree bit for bit.
#pragma once

#include "kernels/isa/defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

// Sixteen float lanes.
struct F32x16 {
  float lane[16];
};

template <class Op>
inline F32x16 map(Op op) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.lane[i] = op(i);
  return r;
}

inline F32x16 set1(float x) {
  return map([&](int) { return x; });
}
// The first `count` elements (all 16 if count >= 16), zeros in the other lanes.
inline F32x16 load_n(const float* p, int64_t count) {
  return map([&](int i) { return i < count ? p[i] : 0.0f; });
}
inline void store_n(float* p, F32x16 v, int64_t count) {
  for (int i = 0; i < 16 && i < count; ++i) p[i] = v.lane[i];
}
inline F32x16 add(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a * b + c with one rounding.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return map([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
// a > b ? a : b, so that a NaN in b survives and one in a does not (the x86 instruction's rule).
inline F32x16 max(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
