// SIMD primitives of the output heads where there are 512-bit vectors and vpdpbusd. Included by
// avx512_vnni.h, behind its other primitives. Meanings: defaults.h.
#pragma once

#include <immintrin.h>

#include "kernels/isa/defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

// ---- heads --------------------------------------------------------------------------------------

constexpr int kHeadStreams = 4;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 4;  // rows of a dense tile at two tokens

inline void store_i16(int16_t* p, F32x16 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v.v)));
}
inline int64_t head_distance(int64_t tuned) { return tuned; }

// ---- int8 ---------------------------------------------------------------------------------------

// Overflow bound: layout::kHeadMaxK.
constexpr int64_t kHead8Step = 64;
constexpr int64_t kHead8FlushSteps = int64_t{1} << 20;
constexpr int kHead8Unroll = 2;
constexpr int kHead8Rows = 2;
constexpr int kHead8Tokens = 4;
constexpr int64_t kHead8Offset = 128;

using Head8Weights = __m512i;
struct Head8Acc {
  __m512i high, low;
};

inline Head8Weights head8_weights(const int8_t* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
struct Head8Token {
  __m512i high, low;
};
inline Head8Token head8_token(const HeadToken& x, int64_t i) {
  return {load_step(reinterpret_cast<const uint8_t*>(x.high + i)),
          load_step(reinterpret_cast<const uint8_t*>(x.low + i))};
}
inline Head8Acc head8_dot(Head8Acc acc, Head8Weights w, const Head8Token& x) {
  return {add_dot(acc.high, w, x.high), add_dot(acc.low, w, x.low)};
}
inline Head8Acc head8_add(Head8Acc a, Head8Acc b) {
  return {_mm512_add_epi32(a.high, b.high), _mm512_add_epi32(a.low, b.low)};
}
// The bound above is that of the whole sum, so the reductions may add in int32.
inline int64_t head8_sum(Head8Acc acc) {
  return 256 * int64_t{reduce(acc.high)} + int64_t{reduce(acc.low)};
}
template <int N>
[[gnu::always_inline]] inline void head8_sums(const Head8Acc (&acc)[N], int64_t (&sums)[8]) {
  __m512i high[8] = {}, low[8] = {};
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) high[i] = acc[i].high, low[i] = acc[i].low;
  const __m256i wide = reduce_eight_dots(high), narrow = reduce_eight_dots(low);
  const auto store = [](__m128i h, __m128i l, int64_t* to) {
    const __m256i times = _mm256_slli_epi64(_mm256_cvtepi32_epi64(h), 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_add_epi64(times, _mm256_cvtepi32_epi64(l)));
  };
  store(_mm256_castsi256_si128(wide), _mm256_castsi256_si128(narrow), sums);
  store(_mm256_extracti128_si256(wide, 1), _mm256_extracti128_si256(narrow, 1), sums + 4);
}

// Of high bytes alone, for head/high_bytes.inl: kTokens at once, kOffset times their sum too large.
struct HeadBytes {
  static constexpr int64_t kFromTokens = 5;  // fewer are bound by reading
  static constexpr int kTokens = 8;
  static constexpr int64_t kStep = 64;
  static constexpr int32_t kOffset = 128;
  using Acc = __m512i;
  using Weights = __m512i;

  static Weights weights(const int8_t* p) { return head8_weights(p); }
  static __m512i token(const int8_t* p) { return _mm512_loadu_si512(p); }
  // In place: g++ 12 copies the sums of a function that returns them.
  [[gnu::always_inline]] static void add(Acc& acc, Weights w, __m512i x) {
#if defined(BITNET_EMULATE)
    acc = add_dot(acc, w, x);
#else
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
#endif
  }
  // 128 * 127 for the square of -128.
  [[gnu::always_inline]] static void add_squares(Acc& acc, const int8_t* p) {
    const __m512i magnitudes = _mm512_abs_epi8(_mm512_loadu_si512(p));
    add(acc, magnitudes, _mm512_min_epu8(magnitudes, _mm512_set1_epi8(127)));
  }
};

// ---- int4 ---------------------------------------------------------------------------------------

constexpr int kHead4Tokens = 4;

// Two chains of vpdpbusd for each of high and low: one alone would wait for its latency.
struct Head4Acc {
  __m512i high[2], low[2];
};

inline __m512i broadcast4(const int8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}
template <int T>
[[gnu::always_inline]] inline void head4_block(const uint8_t* p, const HeadToken* x, int64_t k,
                                               Head4Acc (&acc)[T]) {
  const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i raw = _mm512_loadu_si512(p + layout::kHeadStepBytes * j);
    const __m512i lo = _mm512_and_si512(raw, mask);
    const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int8_t* high = x[t].high + k + layout::kHeadStepFeatures * j;
      const int8_t* low = x[t].low + k + layout::kHeadStepFeatures * j;
      acc[t].high[0] = add_dot(acc[t].high[0], lo, broadcast4(high));
      acc[t].high[1] = add_dot(acc[t].high[1], hi, broadcast4(high + 4));
      acc[t].low[0] = add_dot(acc[t].low[0], lo, broadcast4(low));
      acc[t].low[1] = add_dot(acc[t].low[1], hi, broadcast4(low + 4));
    }
  }
}
inline F32x16 head4_float(const Head4Acc& acc, int32_t offset) {
  const __m512i high = _mm512_slli_epi32(_mm512_add_epi32(acc.high[0], acc.high[1]), 8);
  const __m512i sum = _mm512_add_epi32(high, _mm512_add_epi32(acc.low[0], acc.low[1]));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(offset)))};
}

BITNET_OVERRIDES(kHeadStreams, kHead4Streams, kHeadPairRows, head_distance, kHead8Step,
                 kHead8FlushSteps, kHead8Unroll, kHead8Rows, kHead8Tokens, kHead8Offset,
                 Head8Weights, Head8Acc, head8_weights, head8_dot, head8_add, head8_sum,
                 kHead4Tokens, Head4Acc, head4_block, store_i16, head8_token, head8_sums, HeadBytes,
                 head4_float)

}  // namespace
}  // namespace bitnet::BITNET_ISA
