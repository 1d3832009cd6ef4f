// Head words of the avx512_vnni ISA: a line of int4 codes is one zmm, a row one lane; both formats
// by vpdpbusd with the high and the low bytes of the activations; int8 weights become unsigned by
// an offset of 128.  Meanings: simd_scalar_head.h.
#pragma once

#include "format/layout.h"
#include "kernels/kernel_table.h"
#include "kernels/simd_avx512_vnni.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int kHeadStreams = 1;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 4;  // rows of a dense tile at two tokens

inline void store_i16(int16_t* p, F32x16 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v.v)));
}
inline int64_t head_distance(int64_t tuned) { return tuned; }

// ---- bfloat16 -----------------------------------------------------------------------------------

inline F32x16 head_bf16_x(const float* p, int64_t count) { return load_n(p, count); }
inline F32x16 head_bf16_weights(const uint16_t* p, int64_t count) { return load_bf16_n(p, count); }
inline F32x16 head_bf16_ordered(F32x16 acc) { return acc; }

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

// Two chains of vpdpbusd for each of high and low: one alone would wait for its latency.
struct Head4Acc {
  __m512i high[2], low[2];
};

inline Head4Acc head4_zero() {
  const __m512i none = _mm512_setzero_si512();
  return {{none, none}, {none, none}};
}
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
    const __m512i raw = _mm512_loadu_si512(p + layout::kHeadLineBytes * j);
    const __m512i lo = _mm512_and_si512(raw, mask);
    const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int8_t* high = x[t].high + k + layout::kHeadLineFeatures * j;
      const int8_t* low = x[t].low + k + layout::kHeadLineFeatures * j;
      acc[t].high[0] = _mm512_dpbusd_epi32(acc[t].high[0], lo, broadcast4(high));
      acc[t].high[1] = _mm512_dpbusd_epi32(acc[t].high[1], hi, broadcast4(high + 4));
      acc[t].low[0] = _mm512_dpbusd_epi32(acc[t].low[0], lo, broadcast4(low));
      acc[t].low[1] = _mm512_dpbusd_epi32(acc[t].low[1], hi, broadcast4(low + 4));
    }
  }
}
inline F32x16 head4_float(const Head4Acc& acc, int32_t offset) {
  const __m512i high = _mm512_slli_epi32(_mm512_add_epi32(acc.high[0], acc.high[1]), 8);
  const __m512i sum = _mm512_add_epi32(high, _mm512_add_epi32(acc.low[0], acc.low[1]));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(offset)))};
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
