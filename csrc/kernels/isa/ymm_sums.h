// 16 sums of 16 bits in a ymm, of 16 tokens each: what tables of sums (ternary/tables.inl) need of
// them on AVX2 and, for few tokens, on AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace bitnet::BITNET_ISA {
namespace {

struct YmmSums {
  static constexpr int64_t kTokens = 16;
  using Sums = __m256i;

  // Sums in this order: g++ 12 would use a register for a load that an addition can do.
  [[gnu::always_inline]] static void keep_order([[maybe_unused]] Sums& v) {
#if !defined(BITNET_EMULATE)
    __asm__("" : "+x"(v));
#endif
  }
  static Sums load(const int16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store(int16_t* p, Sums v) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), v); }
  static Sums zero() { return _mm256_setzero_si256(); }
  static Sums add(Sums a, Sums b) { return _mm256_add_epi16(a, b); }
  static Sums sub(Sums a, Sums b) { return _mm256_sub_epi16(a, b); }
  static Sums negative(Sums v) { return sub(zero(), v); }
  static Sums magnitude(Sums v) { return _mm256_abs_epi16(v); }
  static bool any_above(Sums v, int16_t bound) {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(v, _mm256_set1_epi16(bound))) != 0;
  }
};

}  // namespace
}  // namespace bitnet::BITNET_ISA
