// Head words of the avx2 ISA: int8 by vpmaddwd with 16-bit activations,
// int4 by vpmaddubsw with their high and low bytes. Meanings:
// simd_scalar_head.h. Must not know which rows a thread has.
#pragma once

#include "kernels/simd_avx2.h"
#include "kernels/simd_ymm_head.h"

namespace bitnet::BITNET_ISA {
namespace {

// Zen 3 reads memory faster in several streams: int8 rows at .67, .84 and .97 of the read limit in
// one, two and four.  int4 computes nearly as long as it reads, and four streams cost it registers.
constexpr int kHeadStreams = 4;
constexpr int kHead4Streams = 2;
constexpr int kHeadPairRows = 2;  // rows of a dense tile at two tokens
inline int64_t head_distance(int64_t) { return 1024; }

// ---- int8 ---------------------------------------------------------------------------------------

// Overflow bound: a lane grows by 4 products a step, each at most 128 * 32512 in magnitude; 128
// steps: 512 * 128 * 32512 = 2130706432 < 2^31.
constexpr int64_t kHead8Step = 32;
constexpr int64_t kHead8FlushSteps = 128;
constexpr int kHead8Unroll = 1;
constexpr int kHead8Rows = 2;
constexpr int kHead8Tokens = 4;
constexpr int64_t kHead8Offset = 0;

struct Head8Weights {
  __m256i lo, hi;  // as int16
};
using Head8Acc = __m256i;

inline Head8Acc head8_zero() { return _mm256_setzero_si256(); }
inline Head8Weights head8_weights(const int8_t* p) {
  const auto* v = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(v)), _mm256_cvtepi8_epi16(_mm_loadu_si128(v + 1))};
}
inline Head8Acc head8_dot(Head8Acc acc, Head8Weights w, const HeadToken& x, int64_t i) {
  const __m256i a = _mm256_madd_epi16(w.lo, load_bytes(x.wide + i));
  const __m256i b = _mm256_madd_epi16(w.hi, load_bytes(x.wide + i + 16));
  return _mm256_add_epi32(acc, _mm256_add_epi32(a, b));
}
inline Head8Acc head8_add(Head8Acc a, Head8Acc b) { return _mm256_add_epi32(a, b); }
inline int64_t head8_sum(Head8Acc acc) { return sum_i32_wide(acc); }

// ---- int4 ---------------------------------------------------------------------------------------

constexpr int kHead4Tokens = 2;

struct Head4Pairs {
  __m256i high, low;  // int16 sums of two neighbouring features, per half of the 16-bit value
};

// Adds the products of 32 bytes of a line (8 rows x 8 features).  Overflow bound: one vpmaddubsw
// gives at most 2 * 15 * 128 = 3840 in magnitude, four lines add eight of them: 30720 < 2^15.
[[gnu::always_inline]] inline void head4_line(const uint8_t* p, const __m256i (&x)[4],
                                              Head4Pairs& sums) {
  __m256i raw = load_bytes(p);
  keep(raw);
  const __m256i lo = low_codes(raw), hi = high_codes(raw);
  // Products together, then sums: Zen 3 issues more of them than of the two in turn.
  __m256i a = _mm256_maddubs_epi16(lo, x[0]), b = _mm256_maddubs_epi16(lo, x[2]);
  __m256i c = _mm256_maddubs_epi16(hi, x[1]), d = _mm256_maddubs_epi16(hi, x[3]);
  keep(a, b, c, d);
  sums.high = _mm256_add_epi16(sums.high, a);
  sums.low = _mm256_add_epi16(sums.low, b);
  sums.high = _mm256_add_epi16(sums.high, c);
  sums.low = _mm256_add_epi16(sums.low, d);
  keep(sums.high);
  keep(sums.low);
}
// 256 * high + low of the four features of a dword, in the two multiplications that widen them.
[[gnu::always_inline]] inline __m256i head4_widen(__m256i acc, Head4Pairs sums) {
  const __m256i high = _mm256_madd_epi16(sums.high, _mm256_set1_epi16(256));
  const __m256i low = _mm256_madd_epi16(sums.low, _mm256_set1_epi16(1));
  return _mm256_add_epi32(acc, _mm256_add_epi32(high, low));
}
[[gnu::always_inline]] inline void head4_x(const HeadToken& x, int64_t k, __m256i (&v)[4]) {
  v[0] = broadcast4(x.high + k);
  v[1] = broadcast4(x.high + k + 4);
  v[2] = broadcast4(x.low + k);
  v[3] = broadcast4(x.low + k + 4);
}

struct Head4Acc {
  __m256i lo, hi;  // rows 0..7 and 8..15 of the tile
};

inline Head4Acc head4_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
template <int T>
[[gnu::always_inline]] inline void head4_block(const uint8_t* p, const HeadToken* x, int64_t k,
                                               Head4Acc (&acc)[T]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    Head4Pairs lo = {_mm256_setzero_si256(), _mm256_setzero_si256()}, hi = lo;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m256i v[4];
      head4_x(x[t], k + layout::kHeadLineFeatures * j, v);
      head4_line(p + layout::kHeadLineBytes * j, v, lo);
      head4_line(p + layout::kHeadLineBytes * j + 32, v, hi);
    }
    acc[t] = {head4_widen(acc[t].lo, lo), head4_widen(acc[t].hi, hi)};
  }
}
inline F32x16 head4_float(Head4Acc acc, int32_t offset) {
  return head4_less(acc.lo, acc.hi, offset);
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
