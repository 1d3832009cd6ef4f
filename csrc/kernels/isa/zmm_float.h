// Float primitives of AVX-512: 16 lanes in one zmm. Meanings: scalar.h and
// defaults_float.inl, bit for bit.
#pragma once

#include <immintrin.h>

#include "kernels/isa/defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

struct F32x16 {
  __m512 v;
};

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1u);
}
inline F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 load_n(const float* p, int64_t count) {
  return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
}
inline void store_n(float* p, F32x16 x, int64_t count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), x.v);
}
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 pow2(F32x16 n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvttps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline F32x16 times_pow2(F32x16 p, F32x16 shifted) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), n))};
}
template <int kDistance>
inline F32x16 swapped(F32x16 x) {
  if constexpr (kDistance == 8) return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
  if constexpr (kDistance == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
  if constexpr (kDistance == 2) return {_mm512_shuffle_ps(x.v, x.v, 0x4e)};
  return {_mm512_shuffle_ps(x.v, x.v, 0xb1)};
}
inline F32x16 max_abs_bits(F32x16 acc, F32x16 x) {
  const __m512i b = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(acc.v), b))};
}
inline __m256 low_half(__m512 x) { return _mm512_castps512_ps256(x); }
inline __m256 high_half(__m512 x) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
inline uint32_t reduce_abs_bits(F32x16 acc) {
  const __m256i m =
      _mm256_max_epi32(_mm256_castps_si256(low_half(acc.v)), _mm256_castps_si256(high_half(acc.v)));
  __m128i r = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0x4e));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(r));
}
inline float reduce_add(F32x16 x) {
  const __m256 eight = _mm256_add_ps(low_half(x.v), high_half(x.v));
  __m128 r = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  r = _mm_add_ps(r, _mm_movehl_ps(r, r));
  r = _mm_add_ss(r, _mm_movehdup_ps(r));
  return _mm_cvtss_f32(r);
}
inline float reduce_max(F32x16 x) {
  const __m256 eight = _mm256_max_ps(low_half(x.v), high_half(x.v));
  __m128 r = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  r = _mm_max_ps(r, _mm_movehl_ps(r, r));
  r = _mm_max_ss(r, _mm_movehdup_ps(r));
  return _mm_cvtss_f32(r);
}

inline uint32_t less_mask(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline int64_t count_bits(uint32_t x) { return __builtin_popcount(x); }
inline F32x16 where_greater(F32x16 a, F32x16 b, F32x16 x) {  // less_mask's instruction, to share it
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b.v, a.v, _CMP_LT_OQ), x.v)};
}
// Without a branch for each index: which lanes are chosen cannot be foreseen.
inline int64_t store_indices(int32_t* ids, int32_t first, uint32_t mask, int64_t room) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i all = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
  const __m512i chosen = _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), all);
  if (room >= 16) {
    _mm512_storeu_si512(ids, chosen);
  } else {
    _mm512_mask_storeu_epi32(ids, first_lanes(room), chosen);
  }
  return count_bits(mask);
}
inline int64_t store_chosen(float* values, F32x16 x, uint32_t mask, int64_t room) {
  const __m512 chosen = _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), x.v);
  if (room >= 16) {
    _mm512_storeu_ps(values, chosen);
  } else {
    _mm512_mask_storeu_ps(values, first_lanes(room), chosen);
  }
  return count_bits(mask);
}
struct WideSums {
  double lane[16];
};
struct LaneSums {
  __m512d lo, hi;
};
inline void add_to_lanes(LaneSums& sums, F32x16 x) {
  sums.lo = _mm512_add_pd(sums.lo, _mm512_cvtps_pd(low_half(x.v)));
  sums.hi = _mm512_add_pd(sums.hi, _mm512_cvtps_pd(high_half(x.v)));
}
inline WideSums lanes_of_sums(const LaneSums& sums) {
  WideSums x;
  _mm512_storeu_pd(x.lane, sums.lo);
  _mm512_storeu_pd(x.lane + 8, sums.hi);
  return x;
}

inline F32x16 from_i32_n(const int32_t* p, int64_t count) {
  return {_mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(first_lanes(count), p))};
}
inline void to_i8_n(int8_t* p, F32x16 x, int64_t count) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v));
  _mm_mask_storeu_epi8(p, first_lanes(count), bytes);
}
inline F32x16 load_bf16_n(const uint16_t* p, int64_t count) {
  const __m256i h = _mm256_maskz_loadu_epi16(first_lanes(count), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline F32x16 load_f16_n(const uint16_t* p, int64_t count) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p))};
}
inline void store_bf16_n(uint16_t* p, F32x16 x, int64_t count) {
  const __m512i b = _mm512_castps_si512(x.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(b, bias), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i r = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0));
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm512_cvtepi32_epi16(r));
}
inline F32x16 rounded_bf16(F32x16 x) {
  const __m512i b = _mm512_castps_si512(x.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(b, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return {_mm512_castsi512_ps(
      _mm512_mask_mov_epi32(_mm512_and_si512(rounded, upper), nan, _mm512_set1_epi32(0x7fc00000)))};
}
// A mask says which numbers are odd: with sums of their bits there would be one instruction more.
inline F32x16 half_added_bf16(F32x16 x) {
  const __m512i b = _mm512_castps_si512(x.v);
  const __mmask16 odd = _mm512_test_epi32_mask(b, _mm512_set1_epi32(0x10000));
  const __m512i even_sum = _mm512_add_epi32(b, _mm512_set1_epi32(0x7fff));
  return {_mm512_castsi512_ps(_mm512_mask_add_epi32(even_sum, odd, b, _mm512_set1_epi32(0x8000)))};
}
inline F32x16 upper_halves(F32x16 x) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), upper))};
}
inline void store_pairs(void* p, F32x16 first, F32x16 second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first.v), 16);
  _mm512_storeu_si512(p, _mm512_mask_mov_epi16(_mm512_castps_si512(second.v), 0x55555555u, low));
}
constexpr bool kRowsInPairs = true;
inline F32x16 cached_bf16(F32x16 x) {
  const __m512i b = _mm512_castps_si512(x.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(b, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 size = _mm512_abs_ps(x.v);
  const __mmask16 keep = _mm512_cmp_ps_mask(size, _mm512_set1_ps(kMinCached), _CMP_NLT_UQ);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return {_mm512_castsi512_ps(
      _mm512_mask_mov_epi32(_mm512_maskz_and_epi32(keep, rounded, upper), nan, b))};
}
inline void store_f16_n(uint16_t* p, F32x16 x, int64_t count) {
  const __m256i h = _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(p, first_lanes(count), h);
}

// 8-bit floats become float16, which is widened at full speed, the smallest numbers included.
inline F32x16 load_e4m3_n(const uint8_t* p, int64_t count) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(first_lanes(count), p));
  const __m256i h = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(-0x4080));
  const __m256i magnitude = _mm256_set1_epi16(0x3f80);  // of NaN, too: there it would be 480
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(h, magnitude), magnitude);
  const __m256i half = _mm256_mask_add_epi16(h, nan, h, _mm256_set1_epi16(0x4000));
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
}
inline F32x16 load_e5m2_n(const uint8_t* p, int64_t count) {
  const __m256i words = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(first_lanes(count), p));
  return {_mm512_cvtph_ps(_mm256_slli_epi16(words, 8))};
}

// ---- attention ----------------------------------------------------------------------------------

using Reg = __m512;
constexpr int kRegs = 1;

template <int P>
inline Reg reg(F32x16 v) {
  return v.v;
}
inline Reg load_reg(const float* p) { return _mm512_loadu_ps(p); }
inline Reg reg_fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }

// Lanes 8 apart of a and b: {two quarters of a, two quarters of b}.
inline __m512 fold_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
// Then 4 apart: four quarters, one for each of the four sums in a and b.
inline __m512 fold_quarters(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
template <DType>
inline void reduce_eight(const Reg (&sums)[kRegs][8], float* out) {
  const __m512(&v)[8] = sums[0];
  const __m512 a = fold_quarters(fold_halves(v[0], v[1]), fold_halves(v[2], v[3]));
  const __m512 b = fold_quarters(fold_halves(v[4], v[5]), fold_halves(v[6], v[7]));
  const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m512 d = _mm512_add_ps(c, _mm512_shuffle_ps(c, c, 0xb1));  // a in lane 0, b in lane 2
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
  _mm256_storeu_ps(out, low_half(_mm512_permutexvar_ps(order, d)));
}

constexpr int kBlockRows = 12;
constexpr int kDeltaVectors = 2;

// Quarter by quarter: 4 x 4 blocks of single lanes, then whole quarters.
inline void transpose_16(const void* rows, int64_t row_bytes, float* to, int64_t stride) {
  const char* from = static_cast<const char*>(rows);
  __m512 column[4][4];  // [k][c]: lane c of each quarter, for rows 4 k .. 4 k + 3
  for (int k = 0; k < 4; ++k) {
    __m512 row[4];
    for (int r = 0; r < 4; ++r) row[r] = _mm512_loadu_ps(from + (4 * k + r) * row_bytes);
    const __m512 a = _mm512_unpacklo_ps(row[0], row[1]), b = _mm512_unpackhi_ps(row[0], row[1]);
    const __m512 c = _mm512_unpacklo_ps(row[2], row[3]), d = _mm512_unpackhi_ps(row[2], row[3]);
    column[k][0] = _mm512_shuffle_ps(a, c, 0x44);
    column[k][1] = _mm512_shuffle_ps(a, c, 0xee);
    column[k][2] = _mm512_shuffle_ps(b, d, 0x44);
    column[k][3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(column[0][c], column[1][c], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(column[2][c], column[3][c], 0x44);
    const __m512 d = _mm512_shuffle_f32x4(column[0][c], column[1][c], 0xee);
    const __m512 e = _mm512_shuffle_f32x4(column[2][c], column[3][c], 0xee);
    _mm512_storeu_ps(to + c * stride, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(to + (c + 4) * stride, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(to + (c + 8) * stride, _mm512_shuffle_f32x4(d, e, 0x88));
    _mm512_storeu_ps(to + (c + 12) * stride, _mm512_shuffle_f32x4(d, e, 0xdd));
  }
}

constexpr int kPairTiles = 16;

template <int P>
inline F32x16 load_of_pairs(const void* p) {
  const __m512i w = _mm512_loadu_si512(p);
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(P == 0 ? _mm512_slli_epi32(w, 16) : _mm512_and_si512(w, odd))};
}

// vdpbf16ps, which a CPU of this ISA may have or not: AttentionChunk::pair_unit.
struct PairUnit {
  static constexpr bool kHere = true;
  using Words = __m512i;
  struct Chains {
    Words even, odd;
  };

  // Of words {0, 1} and {2, 3}, lower half first: {2, 0} and {3, 1}.
  static Chains chains_of(const void* first, const void* second) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    return {_mm512_mask_mov_epi16(b, 0xaaaaaaaau, _mm512_slli_epi32(a, 16)),
            _mm512_mask_mov_epi16(a, 0x55555555u, _mm512_srli_epi32(b, 16))};
  }
  // Of 16 numbers of position 0, 1, 2 and 3 each.
  static Chains chains_of_rows(const char* data, int64_t stride) {
    const auto row = [&](int i) { return _mm512_cvtepu16_epi32(load_words(data + i * stride)); };
    return {_mm512_or_si512(_mm512_slli_epi32(row(0), 16), row(2)),
            _mm512_or_si512(_mm512_slli_epi32(row(1), 16), row(3))};
  }
  // 16 bfloat16 numbers, as floats, to the eight words that meet them: {2, 0}, {3, 1}, {6, 4} ...
  static void store_words(const float* x, float* words) {
    const __m512i v = _mm512_loadu_si512(x);
    const __m512i later = _mm512_srli_epi32(_mm512_unpackhi_epi64(v, v), 16);
    // not compressed into memory, which some CPUs do by microcode
    const __m512i met = _mm512_maskz_compress_epi64(0x55, _mm512_or_si512(v, later));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm512_castsi512_si256(met));
  }
  static Words load(const float* words) { return _mm512_loadu_si512(words); }
  // In place: g++ 12 copies the sums of a function that returns them.
#if defined(BITNET_EMULATE)
  static void add(F32x16& sum, Words a, Words b) {
    const Words upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const auto high = [&](Words w) { return _mm512_castsi512_ps(_mm512_and_si512(w, upper)); };
    const auto low = [&](Words w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); };
    sum.v = _mm512_fmadd_ps(low(a), low(b), _mm512_fmadd_ps(high(a), high(b), sum.v));
  }
  static void add(F32x16& sum, Words a, const float* word) { add(sum, a, broadcast(word)); }
#else
  [[gnu::always_inline]] static void add(F32x16& sum, Words a, Words b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(a), "v"(b));
  }
  [[gnu::always_inline]] static void add(F32x16& sum, Words a, const float* word) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(a), "m"(*word));
  }
#endif
  static Words broadcast(const float* word) { return _mm512_castps_si512(_mm512_set1_ps(*word)); }

 private:
  static __m256i load_words(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
};

BITNET_OVERRIDES(count_bits, LaneSums, Reg, kRegs, kBlockRows, kDeltaVectors, transpose_16,
                 kPairTiles, PairUnit, half_added_bf16, upper_halves, store_pairs, kRowsInPairs,
                 pow2, times_pow2, swapped, max_abs_bits, reduce_abs_bits, reduce_add, reduce_max,
                 less_mask, where_greater, store_indices, store_chosen, add_to_lanes, lanes_of_sums,
                 from_i32_n, to_i8_n, load_bf16_n, load_f16_n, store_bf16_n, rounded_bf16,
                 cached_bf16, store_f16_n, load_e4m3_n, load_e5m2_n, reg, load_reg, reg_fma,
                 reduce_eight, load_of_pairs)

}  // namespace
}  // namespace bitnet::BITNET_ISA
