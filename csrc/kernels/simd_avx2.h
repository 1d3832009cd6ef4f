// Vocabulary of the avx2 ISA: the shared ymm words, and a dot product by vpmaddubsw in int16.
// Meanings: simd_scalar.h.
#pragma once

#include "kernels/simd_avx2_float.h"
#include "kernels/simd_ymm_int.h"

namespace bitnet::BITNET_ISA {
namespace {

// Overflow bound: vpmaddubsw of codes <= 3 (2 in valid weights) with |x| <= 128 gives |pair| <=
// 768; four fields a unit, 8 units: 768 * 4 * 8 = 24576 < 32768.  So any byte is safe for 8 units.
constexpr int64_t kFlushUnits = 8;

using Partial = __m256i;  // 16 x int16

inline Partial partial_zero() { return _mm256_setzero_si256(); }
inline Partial dot(Partial p, Codes c, Activations x) {
  return _mm256_add_epi16(p, _mm256_maddubs_epi16(c, x));
}
// The two halves of `dot`, for the peak loop.  The sum is spelt out because g++ 12 writes it into
// the product's register and then needs a move per sum.
constexpr bool kDotInTwoSteps = true;
inline Partial dot_product(Codes c, Activations x) { return _mm256_maddubs_epi16(c, x); }
inline void add_product(Partial& p, Partial product) {
#if defined(BITNET_EMULATE)
  p = _mm256_add_epi16(p, product);
#else
  __asm__("vpaddw %1, %0, %0" : "+x"(p) : "x"(product));
#endif
}
inline Acc widen(Acc acc, Partial p) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
