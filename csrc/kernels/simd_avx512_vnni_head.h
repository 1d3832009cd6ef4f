// Head words of the avx512_vnni ISA: a line of int4 codes is one zmm, a row one lane; both formats
// by vpdpbusd with the high and the low bytes of the activations; int8 weights become unsigned by
// an offset of 128.  Meanings: simd_scalar_head.h.
#pragma once

#include "format/layout.h"
#include "kernels/kernel_table.h"
#include "kernels/simd_avx512_vnni.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kHeadPrefetch = 6144;
constexpr int kHeadPairRows = 4;  // rows of a dense tile at two tokens

inline void store_i16(int16_t* p, F32x16 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v.v)));
}

// ---- int8 ---------------------------------------------------------------------------------------

// Overflow bound: layout::kHeadMaxK.
constexpr int64_t kHead8Step = 64;
constexpr int64_t kHead8FlushSteps = int64_t{1} << 20;
constexpr int kHead8Unroll = 4;
constexpr int kHead8Rows = 2;
constexpr int kHead8Tokens = 4;
constexpr int64_t kHead8Offset = 128;

using Head8Weights = __m512i;
struct Head8Acc {
  __m512i high, low;
};

inline Head8Acc head8_zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
inline Head8Weights head8_weights(const int8_t* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
inline Head8Acc head8_dot(Head8Acc acc, Head8Weights w, const HeadToken& x, int64_t i) {
  return {_mm512_dpbusd_epi32(acc.high, w, _mm512_loadu_si512(x.high + i)),
          _mm512_dpbusd_epi32(acc.low, w, _mm512_loadu_si512(x.low + i))};
}
inline Head8Acc head8_add(Head8Acc a, Head8Acc b) {
  return {_mm512_add_epi32(a.high, b.high), _mm512_add_epi32(a.low, b.low)};
}
// The bound above is that of the whole sum, so `reduce` may add in int32.
inline int64_t head8_sum(Head8Acc acc) {
  return 256 * int64_t{reduce(acc.high)} + int64_t{reduce(acc.low)};
}

// ---- int4 ---------------------------------------------------------------------------------------

constexpr int kHead4Tokens = 4;

using Head4Sums = __m512i;

inline F32x16 head4_float(Head4Sums sums, int32_t offset) {
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(offset)))};
}
inline __m512i broadcast4(const int8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

// Two chains of vpdpbusd for each of high and low: one alone would wait for its latency.
template <int T>
[[gnu::always_inline]] inline void head4_group(const uint8_t* p, int64_t lines, const HeadToken* x,
                                               int64_t k0, Head4Sums (&sums)[T]) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i high[T][2], low[T][2];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    high[t][0] = high[t][1] = low[t][0] = low[t][1] = _mm512_setzero_si512();
  }
  for (int64_t s = 0; s < lines; ++s) {
    const uint8_t* line = p + layout::kHeadLineBytes * s;
    const int64_t k = k0 + layout::kHeadLineFeatures * s;
    prefetch(line + kHeadPrefetch);
    const __m512i raw = _mm512_loadu_si512(line);
    const __m512i lo = _mm512_and_si512(raw, mask);
    const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      high[t][0] = _mm512_dpbusd_epi32(high[t][0], lo, broadcast4(x[t].high + k));
      high[t][1] = _mm512_dpbusd_epi32(high[t][1], hi, broadcast4(x[t].high + k + 4));
      low[t][0] = _mm512_dpbusd_epi32(low[t][0], lo, broadcast4(x[t].low + k));
      low[t][1] = _mm512_dpbusd_epi32(low[t][1], hi, broadcast4(x[t].low + k + 4));
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const __m512i h = _mm512_slli_epi32(_mm512_add_epi32(high[t][0], high[t][1]), 8);
    sums[t] = _mm512_add_epi32(h, _mm512_add_epi32(low[t][0], low[t][1]));
  }
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
