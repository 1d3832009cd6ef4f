// SIMD primitives of the avx512_vnni ISA: 16 float lanes in one zmm, k-steps of two blocks (64
// bytes), dot products by vpdpbusd. Meanings: scalar.h, defaults.h.
#pragma once

#include <immintrin.h>

#include "kernels/isa/ymm_sums.h"
#include "kernels/isa/zmm_float.h"

namespace bitnet::BITNET_ISA {
namespace {

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
// The same in place: g++ 12 copies and spills the accumulators of the intrinsic.
inline __m512i add_dot(__m512i acc, __m512i u, __m512i s) {
#if defined(BITNET_EMULATE)
  return _mm512_dpbusd_epi32(acc, u, s);
#else
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
  return acc;
#endif
}
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
[[gnu::always_inline]] inline void prefetch_l2(const void* p) {
  __asm__ volatile("prefetcht1 (%0)" : : "r"(p));
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

// ---- tiles: 16 lanes; decoders in vnni_tiles.h --------------------------------------------------

constexpr int64_t kTileLanes = 16;
constexpr int kTileAccs = 24, kPanelAccs = 24;       // 2 bit x 6 tokens, of 32 registers
constexpr int kTwoBitUnroll = 4, kTwoBitTokens = 5;  // 16 parts hide the latency of the dot
constexpr int kBase3Unroll = 2, kBase3Tokens = 4, kBase3DigitsTokens = 4;
constexpr int64_t kTwoBitPanelFrom = 32, kBase3PanelFrom = 24;
constexpr int64_t kVnniPanelSteps = 128;

using TileStep = __m512i;
using TileCodes = __m512i;
using TileX = __m512i;
using TileAcc = __m512i;
using TileSum = __m512i;

inline TileStep load_step(const uint8_t* p) {
  TileStep v = _mm512_loadu_si512(p);
#if !defined(BITNET_EMULATE)
  __asm__("" : "+v"(v));  // else g++ 12 loads it again for every use
#endif
  return v;
}
inline void store_step(uint8_t* p, TileCodes c) { _mm512_storeu_si512(p, c); }
inline TileX broadcast_x(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
template <int H>
inline void zip_lines(TileStep a, TileStep b, TileStep c, TileStep d, TileStep (&to)[2]) {
  const __m512i ab = H == 0 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  const __m512i cd = H == 0 ? _mm512_unpacklo_epi8(c, d) : _mm512_unpackhi_epi8(c, d);
  to[0] = _mm512_unpacklo_epi16(ab, cd);
  to[1] = _mm512_unpackhi_epi16(ab, cd);
}
inline int64_t list_step(const int8_t* q, int32_t first, int32_t* at, int8_t* x) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t count = 0;
  for (int i = 0; i < 64; i += 16) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i));
    const __m512i v = _mm512_cvtepi8_epi32(codes);
    const __mmask16 some = _mm512_test_epi32_mask(v, v);
    const __m512i numbers = _mm512_add_epi32(lanes, _mm512_set1_epi32(first + i));
    _mm512_storeu_si512(at + count, _mm512_maskz_compress_epi32(some, numbers));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x + count),
                     _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(some, v)));
    count += count_bits(some);
  }
  return count;
}
inline TileAcc tile_dot(TileAcc p, TileCodes c, TileX x) { return add_dot(p, c, x); }
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
inline TileStep high_fields(TileStep v) { return _mm512_srli_epi16(v, 4); }  // with other bits
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

// ---- tables of sums (ternary/tables.inl; YmmTables of ymm_int.h says what each is) --------------

// What both widths of it share: lanes of weights are those of a k-step, whatever tokens a register
// has.
struct TableSteps {
  static constexpr bool kHere = true;
  static TileCodes masked(TileStep v, int mask) { return and_bytes(v, mask); }
  template <int N>  // bits, of bytes that have none in the lowest N
  static TileStep shifted(TileStep v) {
    return _mm512_srli_epi16(v, N);
  }
  static TileStep joined(TileStep a, TileStep b) { return _mm512_or_si512(a, b); }
  // As YmmTables.
  static TileSum two_lines(TileCodes a, TileCodes b) {
    const __m512i powers = _mm512_set1_epi32(0x1b090301);
    const __m512i second = _mm512_dpbusd_epi32(_mm512_setzero_si512(), b, powers);
    return _mm512_dpbusd_epi32(_mm512_slli_epi32(second, 16), a, powers);
  }
  template <int kLeft, int kRight>
  static void store_lines(__m512i (&pairs)[4], uint16_t* to) {
    for (int i = 0; i < 4; ++i) {
      if (kLeft > 0) pairs[i] = _mm512_slli_epi16(pairs[i], kLeft);
      if (kRight > 0) pairs[i] = _mm512_srli_epi16(pairs[i], kRight);
    }
    const __m512i a = _mm512_unpacklo_epi32(pairs[0], pairs[1]);
    const __m512i b = _mm512_unpackhi_epi32(pairs[0], pairs[1]);
    const __m512i c = _mm512_unpacklo_epi32(pairs[2], pairs[3]);
    const __m512i d = _mm512_unpackhi_epi32(pairs[2], pairs[3]);
    const __m512i rows[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                             _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
    for (int i = 0; i < 4; ++i) _mm512_store_si512(to + 32 * i, rows[i]);
  }
  // As they are in registers: four rows each, four apart.
  static constexpr int row_at(int place) { return place % 4 * 4 + place / 4; }
};

// 16 tokens of a ymm, for few.
struct NarrowTables : TableSteps, YmmSums {
  using Narrow = NarrowTables;
  static constexpr int kDotTokens = 2;
  static constexpr int64_t kRowCost = 850, kBothCost = 1050, kLinesCost = 95, kBuildCost = 80000;
  static constexpr int64_t kProductCost = 52;

  template <int J>
  static Sums codes(const float* words) {
    const __m512i v = _mm512_slli_epi32(_mm512_loadu_si512(words), 24 - 8 * J);
    return _mm512_cvtepi32_epi16(_mm512_srai_epi32(v, 24));
  }
  // wide = before + sums; before null: 0.
  static void widen(const int16_t* sums, const int32_t* before, int32_t* wide) {
    __m512i v = _mm512_cvtepi16_epi32(load_half(sums));
    if (before != nullptr) v = _mm512_add_epi32(v, _mm512_load_si512(before));
    _mm512_store_si512(wide, v);
  }
  using Factors = __m512;
  static Factors factors(const float* x_scale) { return _mm512_loadu_ps(x_scale); }
  [[gnu::always_inline]] static void add_scaled(const int16_t* sums, float scale, const Factors& f,
                                                bool first, float* values) {
    const __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(load_half(sums)));
    const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(values);
    _mm512_storeu_ps(values, _mm512_fmadd_ps(v, _mm512_mul_ps(_mm512_set1_ps(scale), f), before));
  }
};

// 32 tokens of a zmm.
struct SumTables : TableSteps {
  using Narrow = NarrowTables;
  static constexpr int64_t kTokens = 32, kFromRows = 512;
  static constexpr int64_t kFromTokens = 16;  // 12 gain a tenth, or lose a third beside a neighbour
  static constexpr int kDotTokens = 4;
  static constexpr int64_t kRowCost = 1280, kBothCost = 1800, kLinesCost = 95, kBuildCost = 130000;
  static constexpr int64_t kProductCost = 52;
  using Sums = __m512i;  // int16

  // Sums in this order: g++ 12 would use a register for a load that an addition can do.
  [[gnu::always_inline]] static void keep_order([[maybe_unused]] Sums& v) {
#if !defined(BITNET_EMULATE)
    __asm__("" : "+v"(v));
#endif
  }
  static Sums load(const int16_t* p) { return _mm512_loadu_si512(p); }
  static void store(int16_t* p, Sums v) { _mm512_store_si512(p, v); }
  static Sums zero() { return _mm512_setzero_si512(); }
  static Sums add(Sums a, Sums b) { return _mm512_add_epi16(a, b); }
  static Sums sub(Sums a, Sums b) { return _mm512_sub_epi16(a, b); }
  static Sums negative(Sums v) { return sub(zero(), v); }
  static Sums magnitude(Sums v) { return _mm512_abs_epi16(v); }
  static bool any_above(Sums v, int16_t bound) {
    return _mm512_cmpge_epi16_mask(v, _mm512_set1_epi16(static_cast<int16_t>(bound + 1))) != 0;
  }
  template <int J>
  static Sums codes(const float* words) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(Narrow::codes<J>(words)),
                              Narrow::codes<J>(words + Narrow::kTokens), 1);
  }
  static void widen(const int16_t* sums, const int32_t* before, int32_t* wide) {
    constexpr int64_t kHalf = Narrow::kTokens;
    Narrow::widen(sums, before, wide);
    Narrow::widen(sums + kHalf, before == nullptr ? nullptr : before + kHalf, wide + kHalf);
  }
  struct Factors {
    Narrow::Factors half[2];
  };
  static Factors factors(const float* x_scale) {
    return {{Narrow::factors(x_scale), Narrow::factors(x_scale + Narrow::kTokens)}};
  }
  [[gnu::always_inline]] static void add_scaled(const int16_t* sums, float scale, const Factors& f,
                                                bool first, float* values) {
    for (int i = 0; i < 2; ++i) {
      const int64_t at = i * Narrow::kTokens;
      Narrow::add_scaled(sums + at, scale, f.half[i], first, values + at);
    }
  }
};

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
inline __m256i reduce_eight_dots(const CacheDot (&v)[8]) {
  const __m512i a = sum_quarters(sum_halves(v[0], v[1]), sum_halves(v[2], v[3]));
  const __m512i b = sum_quarters(sum_halves(v[4], v[5]), sum_halves(v[6], v[7]));
  const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m512i d = _mm512_add_epi32(c, _mm512_srli_epi64(c, 32));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
  return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, d));
}
inline void reduce_dots(const CacheDot (&v)[8], int32_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), reduce_eight_dots(v));
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

// ---- panels -------------------------------------------------------------------------------------

constexpr int kQuadTiles = 8;
constexpr bool kQuadHalves = true;
constexpr int32_t kQuadOffset = 128;

using QuadWords = __m512i;  // the numbers + 128, for vpdpbusd takes one operand without a sign
using QuadFactor = __m512i;
struct QuadSums {
  __m512i low, high;
};

inline QuadWords quad_words(const void* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
inline QuadFactor quad_factor(const int32_t* word) { return _mm512_set1_epi32(*word); }
inline void quad_add(QuadSums& acc, QuadWords w, QuadFactor first, QuadFactor second) {
  acc.low = tile_dot(acc.low, w, first);
  acc.high = tile_dot(acc.high, w, second);
}
inline void store_quads(const QuadSums& acc, int32_t excess, int32_t* out) {
  const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(acc.high, 8), acc.low);
  _mm512_storeu_si512(out, _mm512_sub_epi32(sum, _mm512_set1_epi32(excess)));
}

BITNET_OVERRIDES(kStepBlocks, kFlushSteps, kGemvRows, kGemvStreams, kTileRows, kTileTokens, Raw,
                 Codes, Activations, Partial, Acc, load_raw, load_raw_tail, codes, load_x,
                 load_x_tail, kDotInTwoSteps, dot, widen, reduce, prefetch, prefetch_l2,
                 sum_i8_vector, LineXor, xor_line, reduce_lines, kTileLanes, kTileAccs, kPanelAccs,
                 TileStep, TileCodes, TileX, TileAcc, TileSum, SumTables, load_step, store_step,
                 broadcast_x, zip_lines, list_step, tile_dot, load_sum, store_sum, set1_sum,
                 add_sum, sub_sum, TileFloats, floats_of, load_floats, store_floats, set1_floats,
                 mul_floats, fma_floats, times_256, kCacheStep, CacheKeys, CacheQuery, CacheDot,
                 cache_keys, cache_query, cache_dot, reduce_dots, kCacheAccs, CacheValues,
                 CacheWeights, CacheSum, cache_values, cache_weights, cache_sum, store_cache_sums,
                 kQuadTiles, kQuadHalves, kQuadOffset, QuadWords, QuadFactor, QuadSums, quad_words,
                 quad_factor, quad_add, store_quads)
#if !defined(BITNET_EMULATE)
BITNET_OVERRIDES(pin, renew)
#endif

}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/isa/avx512_heads.h"
#include "kernels/isa/vnni_tiles.h"
