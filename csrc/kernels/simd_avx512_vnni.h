// SIMD primitives of the avx512_vnni ISA: 16 float lanes in one zmm, k-steps of two blocks (64
// bytes), dot products by vpdpbusd. Meanings: simd_scalar.h, simd_defaults.h.
#pragma once

#include <immintrin.h>

#include "kernels/simd_defaults.h"

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
inline F32x16 where_greater(F32x16 a, F32x16 b, F32x16 x) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), x.v)};
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

// ---- attention ----------------------------------------------------------------------------

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

// Quarter by quarter: 4 x 4 blocks of single lanes, then whole quarters.
inline void transpose_16(const float* tile, float* to, int64_t stride) {
  __m512 column[4][4];  // [k][c]: lane c of each quarter, for rows 4 k .. 4 k + 3
  for (int k = 0; k < 4; ++k) {
    __m512 row[4];
    for (int r = 0; r < 4; ++r) row[r] = _mm512_loadu_ps(tile + 16 * (4 * k + r));
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

// ---- canonical rows -----------------------------------------------------------------------------

constexpr int64_t kStepBlocks = 2;
constexpr int64_t kFlushSteps = int64_t{1} << 30;
constexpr int kGemvRows = 4;
constexpr bool kGemvStreams = false;
constexpr int kTileRows = 4;
constexpr int kTileTokens = 4;

using Raw = __m512i;
using Codes = __m512i;
using Activations = __m512i;
using Partial = __m512i;
using Acc = __m512i;

inline __m256i load_half(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Raw load_raw(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Raw load_raw_tail(const uint8_t* p) { return _mm512_zextsi256_si512(load_half(p)); }
template <int F>
inline Codes codes(Raw raw) {
  return _mm512_and_si512(F == 3 ? raw : _mm512_srli_epi16(raw, 6 - 2 * F), _mm512_set1_epi8(3));
}
// The activations of one field lie 128 apart for the two blocks of a k-step.
template <int F>
inline Activations load_x(const int8_t* p) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_half(p + 32 * F)),
                            load_half(p + 128 + 32 * F), 1);
}
template <int F>
inline Activations load_x_tail(const int8_t* p) {
  return _mm512_zextsi256_si512(load_half(p + 32 * F));
}
constexpr bool kDotInTwoSteps = false;
inline Partial dot(Partial p, Codes c, Activations x) { return _mm512_dpbusd_epi32(p, c, x); }
inline Acc widen(Acc acc, Partial p) { return _mm512_add_epi32(acc, p); }
inline int32_t reduce(Acc acc) {
  const __m256i eight =
      _mm256_add_epi32(_mm512_castsi512_si256(acc), _mm512_extracti64x4_epi64(acc, 1));
  __m128i r = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  r = _mm_add_epi32(r, _mm_shuffle_epi32(r, 0x4e));
  r = _mm_add_epi32(r, _mm_shuffle_epi32(r, 0xb1));
  return _mm_cvtsi128_si32(r);
}
// Volatile assembly, for g++ 12 takes the intrinsic for a thing without effect: it leaves out every
// call of a function or lambda that does nothing else.
[[gnu::always_inline]] inline void prefetch(const void* p) {
  __asm__ volatile("prefetcht0 (%0)" : : "r"(p));
}

#if !defined(BITNET_EMULATE)
template <class T>
[[gnu::always_inline]] inline void pin(T& v) {
  __asm__ volatile("" : "+v"(v));
}
template <class T>
[[gnu::always_inline]] inline void renew(T& v) {
  pin(v);
}
#endif

inline int32_t sum_i8_vector(const int8_t* p, int64_t n) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i acc = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) acc = _mm512_dpbusd_epi32(acc, ones, _mm512_loadu_si512(p + i));
  int32_t sum = reduce(acc);
  for (; i < n; ++i) sum += p[i];
  return sum;
}
using LineXor = __m512i;
inline LineXor xor_line(LineXor x, const uint8_t* p) {
  return _mm512_xor_si512(x, _mm512_loadu_si512(p));
}
inline uint64_t reduce_lines(LineXor a, LineXor b) {
  const __m512i all = _mm512_xor_si512(a, b);
  const __m256i half =
      _mm256_xor_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  const __m128i r = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return static_cast<uint64_t>(_mm_extract_epi64(r, 0) ^ _mm_extract_epi64(r, 1));
}

// ---- tiles: 16 lanes; decoders in simd_vnni_tiles.h
// --------------------------------------

constexpr int64_t kTileLanes = 16;
constexpr int kTileAccs = 24, kPanelAccs = 24;       // 2 bit x 6 tokens, of 32 registers
constexpr int kTwoBitUnroll = 4, kTwoBitTokens = 5;  // 16 parts hide the latency of the dot
constexpr int kBase3Unroll = 2, kBase3Tokens = 4;

using TileStep = __m512i;
using TileCodes = __m512i;
using TileX = __m512i;
using TileAcc = __m512i;
using TileSum = __m512i;

inline TileStep load_step(const uint8_t* p) {
  TileStep v = _mm512_loadu_si512(p);
#if !defined(BITNET_EMULATE)
  __asm__("" : "+v"(v));  // else g++ 12 loads it again for every mask
#endif
  return v;
}
inline void store_step(uint8_t* p, TileCodes c) { _mm512_storeu_si512(p, c); }
inline TileX broadcast_x(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
inline TileAcc tile_dot(TileAcc p, TileCodes c, TileX x) {
#if defined(BITNET_EMULATE)
  return _mm512_dpbusd_epi32(p, c, x);
#else
  // g++ 12 copies and spills the accumulators of the intrinsic
  __asm__("vpdpbusd %2, %1, %0" : "+v"(p) : "v"(c), "v"(x));
  return p;
#endif
}
inline TileSum load_sum(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_sum(int32_t* p, TileSum s) { _mm512_storeu_si512(p, s); }
inline TileSum set1_sum(int32_t x) { return _mm512_set1_epi32(x); }
inline TileSum add_sum(TileSum a, TileSum b) { return _mm512_add_epi32(a, b); }
inline TileSum sub_sum(TileSum a, TileSum b) { return _mm512_sub_epi32(a, b); }
template <int N>
inline TileSum shift_sum(TileSum s) {
  return _mm512_srai_epi32(s, N);
}
inline TileCodes and_bytes(TileStep v, int mask) {
  return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask)));
}
inline TileStep add_bytes(TileStep a, TileStep b) { return _mm512_add_epi8(a, b); }
inline TileStep avg_bytes(TileStep a, TileStep b) { return _mm512_avg_epu8(a, b); }
inline TileStep set1_byte(int b) { return _mm512_set1_epi8(static_cast<char>(b)); }

// Sums as floats, lane by lane, for scales of groups.
using TileFloats = __m512;
inline TileFloats floats_of(TileSum s) { return _mm512_cvtepi32_ps(s); }
inline TileFloats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline TileFloats load_floats(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_floats(float* p, TileFloats v) { _mm512_storeu_ps(p, v); }
inline TileFloats set1_floats(float x) { return _mm512_set1_ps(x); }
inline TileFloats mul_floats(TileFloats a, TileFloats b) { return _mm512_mul_ps(a, b); }
inline TileFloats fma_floats(TileFloats a, TileFloats b, TileFloats c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline TileSum times_256(TileSum s) { return _mm512_slli_epi32(s, 8); }

// ---- int8 caches --------------------------------------------------------------------------------

constexpr int64_t kCacheStep = 32;

// acc + the sums of neighbouring products of 16-bit numbers, in place: g++ 12 copies and spills the
// accumulators of the intrinsic.
inline __m512i add_pairs(__m512i acc, __m512i a, __m512i b) {
#if defined(BITNET_EMULATE)
  return _mm512_dpwssd_epi32(acc, a, b);
#else
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#endif
}

// ---- keys ---------------------------------------------------------------------------------------

using CacheKeys = __m512i;
using CacheQuery = __m512i;
using CacheDot = __m512i;

inline CacheKeys cache_keys(const int8_t* p) { return _mm512_cvtepi8_epi16(load_half(p)); }
inline CacheQuery cache_query(const int16_t* p) { return _mm512_loadu_si512(p); }
inline CacheDot cache_dot(CacheDot acc, CacheKeys k, CacheQuery q) { return add_pairs(acc, k, q); }
// Quarters of two sums, then of four, each added to its neighbour 8 and 4 lanes on.
inline __m512i sum_halves(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}
inline __m512i sum_quarters(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
inline void reduce_dots(const CacheDot (&v)[8], int32_t* out) {
  const __m512i a = sum_quarters(sum_halves(v[0], v[1]), sum_halves(v[2], v[3]));
  const __m512i b = sum_quarters(sum_halves(v[4], v[5]), sum_halves(v[6], v[7]));
  const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m512i d = _mm512_add_epi32(c, _mm512_srli_epi64(c, 32));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, d)));
}

// ---- values -------------------------------------------------------------------------------------

constexpr int kCacheAccs = 2;

struct CacheValues {
  __m512i part[kCacheAccs];  // elements 0..7, 16..23 and 8..15, 24..31, two positions side by side
};
using CacheWeights = __m512i;
using CacheSum = __m512i;

inline CacheValues cache_values(const int8_t* a, const int8_t* b) {
  const __m256i x = load_half(a), y = load_half(b);
  return {{_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y)),
           _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y))}};
}
inline CacheWeights cache_weights(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
template <int P>
inline CacheSum cache_sum(CacheSum acc, const CacheValues& v, CacheWeights w) {
  return add_pairs(acc, v.part[P], w);
}
inline void store_cache_sums(const CacheSum (&sums)[kCacheAccs], int32_t* out) {
  const __m512i a = _mm512_shuffle_i32x4(sums[0], sums[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(sums[0], sums[1], 0xee);
  _mm512_storeu_si512(out, a);
  _mm512_storeu_si512(out + 16, b);
}

// ---- heads --------------------------------------------------------------------------------------

constexpr int kHeadStreams = 1;
constexpr int kHead4Streams = 1;
constexpr int kHeadPairRows = 4;  // rows of a dense tile at two tokens

inline void store_i16(int16_t* p, F32x16 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v.v)));
}
inline int64_t head_distance(int64_t tuned) { return tuned; }

// ---- bfloat16 -----------------------------------------------------------------------------------

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

#include "kernels/simd_vnni_tiles.h"
