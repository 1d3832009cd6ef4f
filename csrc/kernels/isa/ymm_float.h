// Float primitives of AVX2 + FMA + F16C: 16 lanes as two ymm registers, for avx2 and avx_vnni.
// Meanings: scalar.h and defaults_float.inl, bit for bit.
#pragma once

#include <immintrin.h>

#include "kernels/isa/defaults.h"

namespace bitnet::BITNET_ISA {
namespace {

struct F32x16 {
  __m256 lo, hi;
};

inline F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 load_n(const float* p, int64_t count) {
  if (count >= 16) return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  alignas(32) float buffer[16] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return {_mm256_load_ps(buffer), _mm256_load_ps(buffer + 8)};
}
inline void store_n(float* p, F32x16 v, int64_t count) {
  if (count >= 16) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
    return;
  }
  alignas(32) float buffer[16];
  _mm256_store_ps(buffer, v.lo);
  _mm256_store_ps(buffer + 8, v.hi);
  for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
}
inline F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline __m256 pow2_half(__m256 n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline F32x16 pow2(F32x16 n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }
inline __m256 times_pow2_half(__m256 p, __m256 shifted) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
}
inline F32x16 times_pow2(F32x16 p, F32x16 shifted) {
  return {times_pow2_half(p.lo, shifted.lo), times_pow2_half(p.hi, shifted.hi)};
}
inline __m256 max_abs_bits_half(__m256 acc, __m256 x) {
  const __m256i b = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(acc), b));
}
template <int kDistance>
inline F32x16 swapped(F32x16 x) {
  if constexpr (kDistance == 8) return {x.hi, x.lo};
  const auto in_half = [](__m256 v) {
    if constexpr (kDistance == 4) return _mm256_permute2f128_ps(v, v, 1);
    if constexpr (kDistance == 2) return _mm256_permute_ps(v, 0x4e);
    return _mm256_permute_ps(v, 0xb1);
  };
  return {in_half(x.lo), in_half(x.hi)};
}
inline F32x16 max_abs_bits(F32x16 acc, F32x16 x) {
  return {max_abs_bits_half(acc.lo, x.lo), max_abs_bits_half(acc.hi, x.hi)};
}
inline uint32_t reduce_abs_bits(F32x16 acc) {
  const __m256i m = _mm256_max_epi32(_mm256_castps_si256(acc.lo), _mm256_castps_si256(acc.hi));
  __m128i r = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0x4e));
  r = _mm_max_epi32(r, _mm_shuffle_epi32(r, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(r));
}
inline float reduce_add(F32x16 v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  __m128 r = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  r = _mm_add_ps(r, _mm_movehl_ps(r, r));
  r = _mm_add_ss(r, _mm_movehdup_ps(r));
  return _mm_cvtss_f32(r);
}
inline float reduce_max(F32x16 v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  __m128 r = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  r = _mm_max_ps(r, _mm_movehl_ps(r, r));
  r = _mm_max_ss(r, _mm_movehdup_ps(r));
  return _mm_cvtss_f32(r);
}

inline uint32_t less_mask(F32x16 a, F32x16 b) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
  return static_cast<uint32_t>(lo | hi << 8);
}
inline int64_t count_bits(uint32_t x) { return __builtin_popcount(x); }
inline F32x16 where_greater(F32x16 a, F32x16 b, F32x16 v) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), v.lo),
          _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ), v.hi)};
}
// Byte j of entry m is the place of bit j of those that m has.
struct BitPlaces {
  uint64_t of[256];
};
constexpr BitPlaces bit_places() {
  BitPlaces places = {};
  for (int mask = 0; mask < 256; ++mask) {
    for (uint64_t bit = 0, shift = 0; bit < 8; ++bit) {
      if ((mask >> bit & 1) == 0) continue;
      places.of[mask] |= bit << shift;
      shift += 8;
    }
  }
  return places;
}
constexpr BitPlaces kBitPlaces = bit_places();
inline __m256i chosen_lanes(uint32_t mask) {  // of 8
  const auto places = static_cast<long long>(kBitPlaces.of[mask & 0xff]);
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(places));
}
// Without a branch for each lane: which ones are chosen cannot be foreseen, but mostly none is.
inline int64_t store_chosen(float* values, F32x16 x, uint32_t mask, int64_t room) {
  if (mask == 0) return 0;
  if (room < 16) {
    float lanes[16];
    store_n(lanes, x, 16);
    int64_t count = 0;
    for (; mask != 0; mask &= mask - 1) values[count++] = lanes[__builtin_ctz(mask)];
    return count;
  }
  const int64_t count = count_bits(mask & 0xff);
  _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(x.lo, chosen_lanes(mask)));
  _mm256_storeu_ps(values + count, _mm256_permutevar8x32_ps(x.hi, chosen_lanes(mask >> 8)));
  return count + count_bits(mask >> 8);
}
inline int64_t store_indices(int32_t* ids, int32_t first, uint32_t mask, int64_t room) {
  if (mask == 0) return 0;
  if (room < 16) {
    int64_t count = 0;
    for (; mask != 0; mask &= mask - 1) ids[count++] = first + __builtin_ctz(mask);
    return count;
  }
  const int64_t count = count_bits(mask & 0xff);
  const __m256i lo = _mm256_add_epi32(chosen_lanes(mask), _mm256_set1_epi32(first));
  const __m256i hi = _mm256_add_epi32(chosen_lanes(mask >> 8), _mm256_set1_epi32(first + 8));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(ids), lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(ids + count), hi);
  return count + count_bits(mask >> 8);
}
struct WideSums {
  double lane[16];
};
struct LaneSums {
  __m256d v[4];
};
inline void add_to_lanes(LaneSums& sums, F32x16 x) {
  sums.v[0] = _mm256_add_pd(sums.v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.lo)));
  sums.v[1] = _mm256_add_pd(sums.v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.lo, 1)));
  sums.v[2] = _mm256_add_pd(sums.v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.hi)));
  sums.v[3] = _mm256_add_pd(sums.v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.hi, 1)));
}
inline WideSums lanes_of_sums(const LaneSums& sums) {
  WideSums x;
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(x.lane + 4 * i, sums.v[i]);
  return x;
}

inline F32x16 from_i32_n(const int32_t* p, int64_t count) {
  alignas(32) int32_t buffer[16] = {};
  if (count < 16) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
    p = buffer;
  }
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
          _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8)))};
}
inline void to_i8_n(int8_t* p, F32x16 v, int64_t count) {
  // cvtps rounds half to even; the two packs saturate, first to int16, then to int8.
  const __m256i wide = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(wide, 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  if (count >= 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    return;
  }
  alignas(16) int8_t buffer[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), bytes);
  for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
}

// Sixteen 16-bit elements, the missing ones zero.
inline __m256i load_u16_n(const uint16_t* p, int64_t count) {
  if (count >= 16) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  alignas(32) uint16_t buffer[16] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
}
inline void store_u16_n(uint16_t* p, __m128i lo, __m128i hi, int64_t count) {
  if (count >= 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), lo);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), hi);
    return;
  }
  alignas(16) uint16_t buffer[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), lo);
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer + 8), hi);
  for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
}
inline __m256 bf16_half_to_f32(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline F32x16 load_bf16_n(const uint16_t* p, int64_t count) {
  const __m256i h = load_u16_n(p, count);
  return {bf16_half_to_f32(_mm256_castsi256_si128(h)),
          bf16_half_to_f32(_mm256_extracti128_si256(h, 1))};
}
inline F32x16 load_f16_n(const uint16_t* p, int64_t count) {
  const __m256i h = load_u16_n(p, count);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
inline __m128i f32_half_to_bf16(__m256 x) {
  const __m256i b = _mm256_castps_si256(x);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(b, bias), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i r = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_packus_epi32(r, r);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline void store_bf16_n(uint16_t* p, F32x16 v, int64_t count) {
  store_u16_n(p, f32_half_to_bf16(v.lo), f32_half_to_bf16(v.hi), count);
}
inline __m256 rounded_bf16_half(__m256 x) {
  const __m256i b = _mm256_castps_si256(x);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(b, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 kept = _mm256_castsi256_ps(_mm256_and_si256(rounded, upper));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_ps(kept, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
}
inline F32x16 rounded_bf16(F32x16 x) { return {rounded_bf16_half(x.lo), rounded_bf16_half(x.hi)}; }
inline __m256 cached_bf16_half(__m256 x) {
  const __m256i b = _mm256_castps_si256(x);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(b, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  const __m256 size = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  const __m256 keep = _mm256_cmp_ps(size, _mm256_set1_ps(kMinCached), _CMP_NLT_UQ);
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 kept = _mm256_and_ps(_mm256_and_ps(_mm256_castsi256_ps(rounded), upper), keep);
  return _mm256_blendv_ps(kept, x, nan);
}
inline F32x16 cached_bf16(F32x16 x) { return {cached_bf16_half(x.lo), cached_bf16_half(x.hi)}; }
inline void store_f16_n(uint16_t* p, F32x16 v, int64_t count) {
  store_u16_n(p, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT),
              _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT), count);
}

// 8-bit floats become float16, which F16C widens at full speed, the smallest numbers included.  A
// code is the upper byte of its word; what lies below it does not matter for E4M3.
inline __m256 e5m2_words_to_f32(__m128i words) { return _mm256_cvtph_ps(words); }
inline __m256 e4m3_words_to_f32(__m128i words) {
  const __m128i h = _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(-0x4080));  // 0xbf80
  const __m128i magnitude = _mm_set1_epi16(0x3f80);  // of NaN, too: there it would be 480
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(h, magnitude), magnitude);
  const __m128i half = _mm_or_si128(h, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
inline __m128i load_u8_n(const uint8_t* p, int64_t count) {
  if (count >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  alignas(16) uint8_t buffer[16] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}
inline F32x16 load_e4m3_n(const uint8_t* p, int64_t count) {
  const __m128i b = load_u8_n(p, count), none = _mm_setzero_si128();
  return {e4m3_words_to_f32(_mm_unpacklo_epi8(none, b)),
          e4m3_words_to_f32(_mm_unpackhi_epi8(none, b))};
}
inline F32x16 load_e5m2_n(const uint8_t* p, int64_t count) {
  const __m128i b = load_u8_n(p, count), none = _mm_setzero_si128();
  return {e5m2_words_to_f32(_mm_unpacklo_epi8(none, b)),
          e5m2_words_to_f32(_mm_unpackhi_epi8(none, b))};
}

// ---- attention ----------------------------------------------------------------------------------

using Reg = __m256;
constexpr int kRegs = 2;

template <int P>
inline Reg reg(F32x16 v) {
  return P == 0 ? v.lo : v.hi;
}
inline Reg load_reg(const float* p) { return _mm256_loadu_ps(p); }
inline Reg reg_fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }

// bfloat16 and 8-bit floats: the even lanes, then the odd ones.  One load and a few simple
// operations for 16 elements; widening in memory order would need the shuffle ports, which the
// multiply-adds are short of.  float16 needs neither: its conversion reads memory.
constexpr bool evens_first(DType type) { return type != DType::kF32 && type != DType::kF16; }

template <DType kType>
  requires(evens_first(kType))
inline F32x16 load_mixed(const void* p) {
  if constexpr (kType == DType::kBF16) {
    const __m256i h = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    const __m256i odd = _mm256_and_si256(h, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(h, 16)), _mm256_castsi256_ps(odd)};
  } else {
    const __m128i b = _mm_loadu_si128(static_cast<const __m128i*>(p)), even = _mm_slli_epi16(b, 8);
    if constexpr (kType == DType::kF8E4M3) return {e4m3_words_to_f32(even), e4m3_words_to_f32(b)};
    return {e5m2_words_to_f32(even), e5m2_words_to_f32(_mm_and_si128(b, _mm_set1_epi16(-0x100)))};
  }
}
template <DType kType>
inline F32x16 mix(F32x16 v) {
  if constexpr (!evens_first(kType)) return v;
  const __m256 a = _mm256_permute2f128_ps(v.lo, v.hi, 0x20);
  const __m256 b = _mm256_permute2f128_ps(v.lo, v.hi, 0x31);
  return {_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)};
}
template <DType kType>
inline F32x16 unmix(F32x16 v) {
  if constexpr (!evens_first(kType)) return v;
  const __m256 a = _mm256_unpacklo_ps(v.lo, v.hi), b = _mm256_unpackhi_ps(v.lo, v.hi);
  return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
}
// One level of the tree for two sums: {low half of a + high half of a, the same of b}.
inline __m256 fold_halves(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
}
// The next level, in each half: {a0 + a2, a1 + a3, b0 + b2, b1 + b3}.
inline __m256 fold_pairs(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}
// And {a0 + a1, a2 + a3, b0 + b1, b2 + b3}.
inline __m256 fold_neighbours(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
// Three levels for eight registers at once; the result's order is 0 2 4 6 1 3 5 7.
inline __m256 fold_eight(const __m256 (&v)[8]) {
  const __m256 a = fold_pairs(fold_halves(v[0], v[1]), fold_halves(v[2], v[3]));
  const __m256 b = fold_pairs(fold_halves(v[4], v[5]), fold_halves(v[6], v[7]));
  return fold_neighbours(a, b);
}
template <DType kType>
inline void reduce_eight(const Reg (&sums)[kRegs][8], float* out) {
  __m256 r;
  if constexpr (!evens_first(kType)) {  // lanes 8 apart lie in two registers: they come first
    __m256 eight[8];
    for (int i = 0; i < 8; ++i) eight[i] = _mm256_add_ps(sums[0][i], sums[1][i]);
    r = fold_eight(eight);
  } else {  // neighbouring lanes lie in two registers: they come last
    r = _mm256_add_ps(fold_eight(sums[0]), fold_eight(sums[1]));
  }
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(r, order));
}

constexpr int kBlockRows = 6;  // 12 of 16 registers hold sums

inline __m256 load_words(const char* p) {
  return _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void transpose_8(const char* rows, int64_t row_bytes, float* to, int64_t stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    const __m256 x = load_words(rows + i * row_bytes), y = load_words(rows + (i + 1) * row_bytes);
    a[i] = _mm256_unpacklo_ps(x, y);
    a[i + 1] = _mm256_unpackhi_ps(x, y);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  }
}
inline void transpose_16(const void* rows, int64_t row_bytes, float* to, int64_t stride) {
  for (int r = 0; r < 16; r += 8) {
    const char* from = static_cast<const char*>(rows) + r * row_bytes;
    for (int c = 0; c < 16; c += 8) {
      transpose_8(from + 4 * c, row_bytes, to + c * stride + r, stride);
    }
  }
}

inline __m256 half_added(__m256 x) {
  const __m256i b = _mm256_castps_si256(x);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i even_sum = _mm256_add_epi32(b, _mm256_set1_epi32(0x7fff));
  return _mm256_castsi256_ps(_mm256_add_epi32(even_sum, lsb));
}
inline F32x16 half_added_bf16(F32x16 x) { return {half_added(x.lo), half_added(x.hi)}; }
inline F32x16 upper_halves(F32x16 x) {
  const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {_mm256_and_ps(x.lo, upper), _mm256_and_ps(x.hi, upper)};
}
inline __m256i pairs_of(__m256 first, __m256 second) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
  return _mm256_blend_epi16(low, _mm256_castps_si256(second), 0xaa);
}
inline void store_pairs(void* p, F32x16 first, F32x16 second) {
  auto* to = static_cast<__m256i*>(p);
  _mm256_storeu_si256(to, pairs_of(first.lo, second.lo));
  _mm256_storeu_si256(to + 1, pairs_of(first.hi, second.hi));
}
constexpr bool kRowsInPairs = true;

// Numbers P of 16 pairs of bfloat16: of the pairs 0..7, then 8..15.
template <int P>
inline __m256 number_of_pairs(const __m256i* p) {
  const __m256i w = _mm256_loadu_si256(p);
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm256_castsi256_ps(P == 0 ? _mm256_slli_epi32(w, 16) : _mm256_and_si256(w, odd));
}
template <int P>
inline F32x16 load_of_pairs(const void* p) {
  const auto* w = static_cast<const __m256i*>(p);
  return {number_of_pairs<P>(w), number_of_pairs<P>(w + 1)};
}

BITNET_OVERRIDES(count_bits, LaneSums, Reg, kRegs, kBlockRows, transpose_16, pow2, times_pow2,
                 swapped, max_abs_bits, reduce_abs_bits, reduce_add, reduce_max, less_mask,
                 where_greater, store_chosen, store_indices, add_to_lanes, lanes_of_sums,
                 from_i32_n, to_i8_n, load_bf16_n, load_f16_n, store_bf16_n, rounded_bf16,
                 cached_bf16, store_f16_n, load_e4m3_n, load_e5m2_n, reg, load_reg, reg_fma,
                 load_mixed, mix, unmix, reduce_eight, load_of_pairs, half_added_bf16, upper_halves,
                 store_pairs, kRowsInPairs)

}  // namespace
}  // namespace bitnet::BITNET_ISA
