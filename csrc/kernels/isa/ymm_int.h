// Integer primitives that avx2 and avx_vnni share: 32-byte k-steps, fields, sums.  Meanings:
// defaults.h.  `dot`, `Partial` and `widen` are the ISAs' own.
#pragma once

#include "kernels/isa/ymm_float.h"
#include "kernels/isa/ymm_sums.h"

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kStepBlocks = 1;
constexpr int kGemvRows = 4;
constexpr int kTileRows = 2;  // 2 x 4 accumulators leave half of the 16 registers for operands
constexpr int kTileTokens = 4;

using Raw = __m256i;
using Codes = __m256i;
using Activations = __m256i;
using Acc = __m256i;

inline __m256i load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Raw load_raw(const uint8_t* p) { return load_bytes(p); }
inline Raw load_raw_tail(const uint8_t* p) { return load_bytes(p); }
template <int F>
inline Codes codes(Raw raw) {
  // The 16-bit shift drags bits of the neighbouring byte in; the mask removes them.
  const __m256i three = _mm256_set1_epi8(3);
  return _mm256_and_si256(F == 3 ? raw : _mm256_srli_epi16(raw, 6 - 2 * F), three);
}
template <int F>
inline Activations load_x(const int8_t* p) {
  return load_bytes(p + 32 * F);
}
template <int F>
inline Activations load_x_tail(const int8_t* p) {
  return load_bytes(p + 32 * F);
}
inline int32_t reduce(Acc acc) {
  __m128i r = _mm_add_epi32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
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

// ---- tiles: 8 lanes -----------------------------------------------------------------------------

constexpr int64_t kTileLanes = 8;
constexpr bool kFewRegisters = true;
constexpr int kTileAccs = 10;   // accumulators that leave registers for decoding
constexpr int kPanelAccs = 12;  // the same where the codes are in memory

using TileStep = __m256i;
using TileCodes = __m256i;
using TileX = __m256i;
using TileAcc = __m256i;
using TileSum = __m256i;

inline TileStep load_step(const uint8_t* p) { return load_bytes(p); }
inline void store_step(uint8_t* p, TileCodes c) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), c);
}
inline TileX broadcast_x(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
template <int H>
inline void zip_lines(TileStep a, TileStep b, TileStep c, TileStep d, TileStep (&to)[2]) {
  const __m256i ab = H == 0 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
  const __m256i cd = H == 0 ? _mm256_unpacklo_epi8(c, d) : _mm256_unpackhi_epi8(c, d);
  to[0] = _mm256_unpacklo_epi16(ab, cd);
  to[1] = _mm256_unpackhi_epi16(ab, cd);
}
constexpr int kColumnHalves = 1;  // 8 sums of 16 registers
inline int64_t list_step(const int8_t* q, int32_t first, int32_t* at, int8_t* x) {
  const auto zeros = [&](int i) {
    const __m256i equal = _mm256_cmpeq_epi8(load_bytes(q + i), _mm256_setzero_si256());
    return uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(equal))};
  };
  uint64_t left = ~(zeros(0) | zeros(32) << 32);
  int64_t count = 0;
  while (left != 0) {
    // several at once, whether there are so many or not: a branch for each would be guessed wrong
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int next = __builtin_ctzll(left | uint64_t{1} << 63);
      at[count] = first + next;
      x[count] = q[next];
      count += left != 0;
      left &= left - 1;
    }
  }
  return count;
}
inline TileSum load_sum(const int32_t* p) { return load_bytes(p); }
inline void store_sum(int32_t* p, TileSum s) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), s);
}
inline TileSum set1_sum(int32_t x) { return _mm256_set1_epi32(x); }
inline TileSum add_sum(TileSum a, TileSum b) { return _mm256_add_epi32(a, b); }
inline TileSum sub_sum(TileSum a, TileSum b) { return _mm256_sub_epi32(a, b); }
template <int N>
inline TileSum shift_sum(TileSum s) {
  return _mm256_srai_epi32(s, N);
}
inline TileCodes and_bytes(TileStep v, int mask) {
  return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(mask)));
}
// Bit N and up of every 16 bits; a mask must follow.
template <int N>
inline TileStep shift_bytes(TileStep v) {
  return N == 0 ? v : _mm256_srli_epi16(v, N);
}
inline TileStep add_bytes(TileStep a, TileStep b) { return _mm256_add_epi8(a, b); }
inline TileStep avg_bytes(TileStep a, TileStep b) { return _mm256_avg_epu8(a, b); }
inline TileStep set1_byte(int b) { return _mm256_set1_epi8(static_cast<char>(b)); }

// Sums as floats, lane by lane, for scales of groups.
using TileFloats = __m256;
inline TileFloats floats_of(TileSum s) { return _mm256_cvtepi32_ps(s); }
inline TileFloats load_floats(const float* p) { return _mm256_loadu_ps(p); }
inline TileFloats load_floats(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_floats(float* p, TileFloats v) { _mm256_storeu_ps(p, v); }
inline TileFloats set1_floats(float x) { return _mm256_set1_ps(x); }
inline TileFloats mul_floats(TileFloats a, TileFloats b) { return _mm256_mul_ps(a, b); }
inline TileFloats fma_floats(TileFloats a, TileFloats b, TileFloats c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline TileSum times_256(TileSum s) { return _mm256_slli_epi32(s, 8); }

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
  const __m256i ones = _mm256_set1_epi8(1);
  __m256i acc = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    // Pair sums of unsigned ones x signed bytes stay within int16; madd widens them to int32.
    const __m256i pairs = _mm256_maddubs_epi16(ones, load_bytes(p + i));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  int32_t sum = reduce(acc);
  for (; i < n; ++i) sum += p[i];
  return sum;
}
struct LineXor {
  __m256i half[2];
};
inline LineXor xor_line(LineXor x, const uint8_t* p) {
  return LineXor{{_mm256_xor_si256(x.half[0], load_bytes(p)),
                  _mm256_xor_si256(x.half[1], load_bytes(p + 32))}};
}
inline uint64_t reduce_lines(LineXor a, LineXor b) {
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(a.half[0], a.half[1]),
                                       _mm256_xor_si256(b.half[0], b.half[1]));
  const __m128i r = _mm_xor_si128(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  return static_cast<uint64_t>(_mm_extract_epi64(r, 0) ^ _mm_extract_epi64(r, 1));
}

// ---- tables of sums (ternary/tables.inl) --------------------------------------------------------

struct YmmTables : YmmSums {
  static constexpr bool kHere = true;
  using Narrow = YmmTables;                   // tables of fewer tokens, or these
  static constexpr int64_t kFromTokens = 13;  // fewer are multiplied
  static constexpr int64_t kFromRows = 320;   // likewise, for each building of tables
  // Tokens with which a k-step is multiplied beside a row's lines.
  static constexpr int kDotTokens = 0;
  // Hundredths of a cycle, on Zen 4: a row of 32 k, alone and with a k-step beside it; its lines,
  // and the tables, for all rows; a token's product with 32 k of a row.
  static constexpr int64_t kRowCost = 740, kBothCost = 0, kLinesCost = 0;
  static constexpr int64_t kBuildCost = 48000, kProductCost = 64;

  static TileCodes masked(TileStep v, int mask) { return and_bytes(v, mask); }
  template <int N>  // bits, of bytes that have none in the lowest N
  static TileStep shifted(TileStep v) {
    return _mm256_srli_epi16(v, N);
  }
  static TileStep joined(TileStep a, TileStep b) { return _mm256_or_si256(a, b); }
  // The four codes of a lane times 1, 3, 9 and 27: of a below, of b above.
  static TileSum two_lines(TileCodes a, TileCodes b) {
    const auto line = [](TileCodes v) {
      const __m256i powers = _mm256_set1_epi32(0x1b090301);
      return _mm256_madd_epi16(_mm256_maddubs_epi16(v, powers), _mm256_set1_epi16(1));
    };
    return _mm256_or_si256(line(a), _mm256_slli_epi32(line(b), 16));
  }
  // Code J of every token's word of four.
  template <int J>
  static Sums codes(const float* words) {
    const __m256i a = load_bytes(words), b = load_bytes(words + 8);
    const auto code = [](__m256i v) {
      return _mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * J), 24);
    };
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(code(a), code(b)), 0xd8);
  }
  // wide = before + sums; before null: 0.
  static void widen(const int16_t* sums, const int32_t* before, int32_t* wide) {
    for (int i = 0; i < kTokens; i += 8) {
      const auto* from = reinterpret_cast<const __m128i*>(sums + i);
      __m256i v = _mm256_cvtepi16_epi32(_mm_load_si128(from));
      if (before != nullptr)
        v = _mm256_add_epi32(v, _mm256_load_si256(reinterpret_cast<const __m256i*>(before + i)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(wide + i), v);
    }
  }
  // Scales of the tokens of a register.
  struct Factors {
    __m256 half[2];
  };
  static Factors factors(const float* x_scale) {
    return {{_mm256_load_ps(x_scale), _mm256_load_ps(x_scale + 8)}};
  }
  // values = fma(sums, scale * factors, first ? 0 : values)
  [[gnu::always_inline]] static void add_scaled(const int16_t* sums, float scale, const Factors& f,
                                                bool first, float* values) {
    for (int i = 0; i < 2; ++i) {
      const auto* from = reinterpret_cast<const __m128i*>(sums + 8 * i);
      const __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_load_si128(from)));
      const __m256 before = first ? _mm256_setzero_ps() : _mm256_load_ps(values + 8 * i);
      const __m256 factor = _mm256_mul_ps(_mm256_set1_ps(scale), f.half[i]);
      _mm256_store_ps(values + 8 * i, _mm256_fmadd_ps(v, factor, before));
    }
  }
  // Eight numbers below 2^13 of every lane, times 2^kLeft or by 2^kRight.
  template <int kLeft, int kRight>
  static void store_lines(__m256i (&pairs)[4], uint16_t* to) {
    for (int i = 0; i < 4; ++i) {
      if (kLeft > 0) pairs[i] = _mm256_slli_epi16(pairs[i], kLeft);
      if (kRight > 0) pairs[i] = _mm256_srli_epi16(pairs[i], kRight);
    }
    const __m256i a = _mm256_unpacklo_epi32(pairs[0], pairs[1]);
    const __m256i b = _mm256_unpackhi_epi32(pairs[0], pairs[1]);
    const __m256i c = _mm256_unpacklo_epi32(pairs[2], pairs[3]);
    const __m256i d = _mm256_unpackhi_epi32(pairs[2], pairs[3]);
    const __m256i rows[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                             _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
    auto* out = reinterpret_cast<__m256i*>(to);
    for (int i = 0; i < 4; ++i) _mm256_store_si256(out + i, rows[i]);
  }
  // As they are in registers: two rows each, four apart.
  static constexpr int row_at(int place) { return place % 2 * 4 + place / 2; }
};

// ---- int8 caches --------------------------------------------------------------------------------

// acc + the sums of neighbouring products of 16-bit numbers: the ISA's.
inline __m256i add_pairs(__m256i acc, __m256i a, __m256i b);

constexpr int64_t kCacheStep = 16;

inline __m256i widen_bytes(__m128i v) { return _mm256_cvtepi8_epi16(v); }
inline __m128i load_step(const int8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// ---- keys ---------------------------------------------------------------------------------------

using CacheKeys = __m256i;
using CacheQuery = __m256i;
using CacheDot = __m256i;

inline CacheKeys cache_keys(const int8_t* p) { return widen_bytes(load_step(p)); }
inline CacheQuery cache_query(const int16_t* p) {
  CacheQuery q = load_bytes(p);
#if !defined(BITNET_EMULATE)
  __asm__("" : "+x"(q));  // else g++ 12 loads it again for every key
#endif
  return q;
}
inline CacheDot cache_dot(CacheDot acc, CacheKeys k, CacheQuery q) { return add_pairs(acc, k, q); }
inline __m256i shuffle_lanes(__m256i a, __m256i b, const int lanes) {
  const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
  return _mm256_castps_si256(lanes == 0x88 ? _mm256_shuffle_ps(x, y, 0x88)
                                           : _mm256_shuffle_ps(x, y, 0xdd));
}
// {low half of a + high half of a, the same of b}; then lanes 2 apart; then neighbours.
inline __m256i sum_halves(__m256i a, __m256i b) {
  return _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xf0), _mm256_permute2x128_si256(a, b, 0x21));
}
inline __m256i sum_pairs(__m256i a, __m256i b) {
  return _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xcc), _mm256_alignr_epi8(b, a, 8));
}
inline __m256i sum_neighbours(__m256i a, __m256i b) {
  return _mm256_add_epi32(shuffle_lanes(a, b, 0x88), shuffle_lanes(a, b, 0xdd));
}
inline void reduce_dots(const CacheDot (&v)[8], int32_t* out) {
  const __m256i a = sum_pairs(sum_halves(v[0], v[1]), sum_halves(v[2], v[3]));
  const __m256i b = sum_pairs(sum_halves(v[4], v[5]), sum_halves(v[6], v[7]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i r = _mm256_permutevar8x32_epi32(sum_neighbours(a, b), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), r);
}

// ---- values -------------------------------------------------------------------------------------

constexpr int kCacheAccs = 2;

struct CacheValues {
  __m256i part[kCacheAccs];  // elements 0..7 and 8..15, the two positions side by side
};
using CacheWeights = __m256i;
using CacheSum = __m256i;

inline CacheValues cache_values(const int8_t* a, const int8_t* b) {
  const __m128i x = load_step(a), y = load_step(b);
  return {{widen_bytes(_mm_unpacklo_epi8(x, y)), widen_bytes(_mm_unpackhi_epi8(x, y))}};
}
inline CacheWeights cache_weights(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
template <int P>
inline CacheSum cache_sum(CacheSum acc, const CacheValues& v, CacheWeights w) {
  return add_pairs(acc, v.part[P], w);
}
inline void store_cache_sums(const CacheSum (&sums)[kCacheAccs], int32_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), sums[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), sums[1]);
}

// ---- panels -------------------------------------------------------------------------------------

struct QuadWords {
  __m256i even[2], odd[2];  // numbers 0 and 2, 1 and 3 of lanes 0..7 and 8..15
};
struct QuadSums {
  __m256i half[2];
};
using QuadFactor = __m256i;

inline QuadWords quad_words(const void* p) {
  const auto* at = static_cast<const __m256i*>(p);
  const __m256i a = load_bytes(at), b = load_bytes(at + 1);
  return {{_mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8),
           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8)},
          {_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8)}};
}
inline QuadFactor quad_factor(const int32_t* word) { return _mm256_set1_epi32(*word); }
[[gnu::always_inline]] inline void quad_add(QuadSums& acc, const QuadWords& w, QuadFactor first,
                                            QuadFactor second) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    acc.half[i] = add_pairs(acc.half[i], w.even[i], first);
    acc.half[i] = add_pairs(acc.half[i], w.odd[i], second);
  }
}
inline void store_quads(const QuadSums& acc, int32_t, int32_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), acc.half[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), acc.half[1]);
}

// ---- heads --------------------------------------------------------------------------------------

inline void store_i16(int16_t* p, F32x16 v) {
  const __m256i wide = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(wide, 0xd8));
}

// Fixes v in its register at this point.  Without it g++ 12 holds so many sums of a k-step at once
// that it spills them.
[[gnu::always_inline]] inline void keep([[maybe_unused]] __m256i& v) {
#if !defined(BITNET_EMULATE)
  __asm__("" : "+x"(v));
#endif
}

[[gnu::always_inline]] inline void keep([[maybe_unused]] __m256i& a, [[maybe_unused]] __m256i& b,
                                        [[maybe_unused]] __m256i& c, [[maybe_unused]] __m256i& d) {
#if !defined(BITNET_EMULATE)
  __asm__("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d));
#endif
}

// Eight 32-bit sums, each of which may use all of its bits.
inline int64_t sum_i32_wide(__m256i v) {
  const __m256i four = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(v)),
                                        _mm256_cvtepi32_epi64(_mm256_extracti128_si256(v, 1)));
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return _mm_extract_epi64(two, 0) + _mm_extract_epi64(two, 1);
}

// ---- bfloat16 -----------------------------------------------------------------------------------
// Unpacking behind zeros makes floats of eight bfloat16 in one instruction, in the order 0-3, 8-11
// and 4-7, 12-15, where widening in order takes two or three.

inline F32x16 head_bf16_swapped(F32x16 v) {
  return {_mm256_permute2f128_ps(v.lo, v.hi, 0x20), _mm256_permute2f128_ps(v.lo, v.hi, 0x31)};
}
inline F32x16 head_bf16_x(const float* p, int64_t count) {
  return head_bf16_swapped(load_n(p, count));
}
inline F32x16 head_bf16_weights(const uint16_t* p, int64_t count) {
  const __m256i h = load_u16_n(p, count), none = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, h)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, h))};
}
inline F32x16 head_bf16_ordered(F32x16 acc) { return head_bf16_swapped(acc); }

// ---- int4 ---------------------------------------------------------------------------------------

// Sums of rows 0..7 and 8..15 of a tile, less an offset.
inline F32x16 head4_less(__m256i lo, __m256i hi, int32_t offset) {
  const __m256i o = _mm256_set1_epi32(offset);
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(lo, o)), _mm256_cvtepi32_ps(_mm256_sub_epi32(hi, o))};
}
// Four bytes of activations for every row.
inline __m256i broadcast4(const int8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}
inline __m256i low_codes(__m256i raw) { return _mm256_and_si256(raw, _mm256_set1_epi8(15)); }
inline __m256i high_codes(__m256i raw) { return low_codes(_mm256_srli_epi16(raw, 4)); }

BITNET_OVERRIDES(kStepBlocks, kGemvRows, kTileRows, kTileTokens, Raw, Codes, Activations, Acc,
                 load_raw, load_raw_tail, codes, load_x, load_x_tail, reduce, prefetch, prefetch_l2,
                 kTileLanes, kFewRegisters, kTileAccs, kPanelAccs, TileStep, TileCodes, TileX,
                 TileAcc, TileSum, load_step, store_step, broadcast_x, zip_lines, kColumnHalves,
                 list_step, load_sum, store_sum, set1_sum, add_sum, sub_sum, TileFloats, floats_of,
                 load_floats, store_floats, set1_floats, mul_floats, fma_floats, times_256,
                 sum_i8_vector, LineXor, xor_line, reduce_lines, kCacheStep, CacheKeys, CacheQuery,
                 CacheDot, cache_keys, cache_query, cache_dot, reduce_dots, kCacheAccs, CacheValues,
                 CacheWeights, CacheSum, cache_values, cache_weights, cache_sum, store_cache_sums,
                 QuadWords, QuadSums, QuadFactor, quad_words, quad_factor, quad_add, store_quads,
                 store_i16, head_bf16_x, head_bf16_weights, head_bf16_ordered)
#if !defined(BITNET_EMULATE)
BITNET_OVERRIDES(pin, renew)
#endif

}  // namespace
}  // namespace bitnet::BITNET_ISA
