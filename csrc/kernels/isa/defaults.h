// SIMD primitives that an ISA need not write.  An ISA's own declaration of a name, in its inner
// namespace, hides the one here; BITNET_OVERRIDES says so.  Included by every header of an ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/layout.h"
#include "kernels/isa/defaults_heads.h"
#include "kernels/kernel_table.h"

// BITNET_OVERRIDES(name, ...), in the namespace of an ISA and behind its definitions: what it
// writes instead of a default. A name that is not both here and there does not compile, so that a
// misspelt override is not a slow kernel; tests/kernels/test_overrides.py finds those not declared.
#define BITNET_PARENS_ ()
// As many scans as there may be names, and more.
#define BITNET_SCAN_(...) \
  BITNET_SCAN_3_(BITNET_SCAN_3_(BITNET_SCAN_3_(BITNET_SCAN_3_(__VA_ARGS__))))
#define BITNET_SCAN_3_(...) \
  BITNET_SCAN_2_(BITNET_SCAN_2_(BITNET_SCAN_2_(BITNET_SCAN_2_(__VA_ARGS__))))
#define BITNET_SCAN_2_(...) \
  BITNET_SCAN_1_(BITNET_SCAN_1_(BITNET_SCAN_1_(BITNET_SCAN_1_(__VA_ARGS__))))
#define BITNET_SCAN_1_(...) \
  BITNET_SCAN_0_(BITNET_SCAN_0_(BITNET_SCAN_0_(BITNET_SCAN_0_(__VA_ARGS__))))
#define BITNET_SCAN_0_(...) __VA_ARGS__
#define BITNET_USING_(scope, name, ...) \
  using scope::name;                    \
  __VA_OPT__(BITNET_USING_AGAIN_ BITNET_PARENS_(scope, __VA_ARGS__))
#define BITNET_USING_AGAIN_() BITNET_USING_
#define BITNET_OVERRIDES(...)                                    \
  namespace defaults_overridden {                                \
  BITNET_SCAN_(BITNET_USING_(::bitnet, __VA_ARGS__))             \
  }                                                              \
  namespace overrides {                                          \
  BITNET_SCAN_(BITNET_USING_(::bitnet::BITNET_ISA, __VA_ARGS__)) \
  }

namespace bitnet {
namespace {

// ---- numbers ------------------------------------------------------------------------------------

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t x) { return __builtin_bit_cast(float, x); }

// |x| < 2^22.
inline float round_half_even(float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  return (x + kMagic) - kMagic;
}
inline float bf16_to_f32(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
inline uint16_t f32_to_bf16(float x) {
  if (x != x) return 0x7fc0;
  const uint32_t b = bits_of(x);
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t fraction = h & 0x3ffu;
  if (exponent == 31)
    return float_of(sign | 0x7f800000u | (fraction ? 0x400000u | (fraction << 13) : 0));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-08f;  // 2^-24
  return float_of(sign | bits_of(magnitude));
}
inline uint16_t f32_to_f16(float x) {
  const uint32_t b = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>((b >> 16) & 0x8000u);
  const uint32_t a = b & 0x7fffffffu;
  if (a > 0x7f800000u) return sign | 0x7e00u | static_cast<uint16_t>((a >> 13) & 0x3ffu);
  if (a >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (a < 0x38800000u) {  // below 2^-14: subnormal; the add rounds half to even
    const float shifted = float_of(a) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// ---- sums in float64 ----------------------------------------------------------------------------

// Sixteen lanes; see defaults_float.inl.
struct LaneSums {
  double lane[16];
};

// The lowest `count` bits, all 16 if count >= 16; count is positive.
inline uint32_t first_bits(int64_t count) { return count >= 16 ? 0xffffu : (1u << count) - 1u; }

// How many of 16 bits are set: the builtin would be a call where there is no instruction for it.
inline int64_t count_bits(uint32_t x) {
  x -= (x >> 1) & 0x5555u;
  x = (x & 0x3333u) + ((x >> 2) & 0x3333u);
  x = (x + (x >> 4)) & 0x0f0fu;
  return (x + (x >> 8)) & 0x1fu;
}

// 8-bit floats.  Both are a float16 in disguise: E5M2 its upper byte; E4M3 one whose exponent is 8
// less, save for its only NaN, which would be 480.
inline float e5m2_to_f32(uint8_t c) { return f16_to_f32(static_cast<uint16_t>(c << 8)); }
inline float e4m3_to_f32(uint8_t c) {
  const int32_t nan = (c & 0x7f) == 0x7f ? 0x7e00 : 0;
  const int32_t half = (c & 0x80) << 8 | (c & 0x7f) << 7 | nan;
  return f16_to_f32(static_cast<uint16_t>(half)) * 256.0f;
}
// The codes of 4 numbers in a format with so many bits of fraction.  In the compiler's own vectors:
// it does not find them in a loop.
template <int kFraction, int32_t kBias, int32_t kLargest, int32_t kInfinity>
inline void f32_to_f8(const float* x, uint8_t* codes) {
  using Ints [[gnu::vector_size(16)]] = int32_t;
  using Floats [[gnu::vector_size(16)]] = float;
  using Bytes [[gnu::vector_size(4)]] = uint8_t;
  constexpr int kShift = 23 - kFraction;
  constexpr int32_t kUp = (127 - kBias) << 23;
  // In a sum with this number the format's smallest step is the last bit, and the sum is rounded.
  constexpr int32_t kMagic = (127 + 24 - kBias - kFraction) << 23;
  Ints b;
  __builtin_memcpy(&b, x, sizeof b);
  const Ints a = b & 0x7fffffff;
  const Floats sum = __builtin_bit_cast(Floats, a) + __builtin_bit_cast(float, kMagic);
  const Ints tiny = __builtin_bit_cast(Ints, sum) - kMagic;
  const Ints normal = (a - kUp + ((1 << (kShift - 1)) - 1) + ((a >> kShift) & 1)) >> kShift;
  Ints code = a < kUp + (1 << 23) ? tiny : normal;
  code = code < kLargest ? code : Ints{} + kLargest;
  code = a == 0x7f800000 ? Ints{} + kInfinity : code;
  code = a > 0x7f800000 ? Ints{} + 0x7f : code;
  const Bytes bytes = __builtin_convertvector(code | ((b >> 24) & 0x80), Bytes);
  __builtin_memcpy(codes, &bytes, sizeof bytes);
}

// ---- attention ----------------------------------------------------------------------------------

struct NoReg {};
using Reg = NoReg;  // of float lanes: F32x16 itself; see defaults_float.inl
constexpr int kRegs = 1;

// Vectors of 16 columns of a recurrent state that delta_rule takes at once (delta/rule.inl).
constexpr int kDeltaVectors = 1;
// Rows of queries that meet a step of keys or values at once, where there are many of them.
constexpr int kBlockRows = 4;
// Rows whose softmax is taken side by side.
constexpr int kSoftmaxRows = 4;
// Vectors of sums that the chains of pairs of bfloat16 have at least, where there are few rows.
constexpr int kPairTiles = 4;

// Whether rows of bfloat16 numbers lie in pairs between the passes of a norm (rows/rows.inl).
constexpr bool kRowsInPairs = false;

// to[c * stride + r] = row r's word c, for r and c in [0, 16): words of 32 bits, whatever they
// hold; rows row_bytes apart, of any alignment.
inline void transpose_16(const void* rows, int64_t row_bytes, float* to, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 16; ++c) {
      const char* word = static_cast<const char*>(rows) + r * row_bytes + 4 * c;
      __builtin_memcpy(to + c * stride + r, word, 4);
    }
  }
}

// ---- the compiler -------------------------------------------------------------------------------

// Fixes v in its register at this point.  Without it g++ 12 reassociates the integer sums of a tile
// across its fields, and so many intermediate sums live at once that it spills the accumulators.
template <class T>
[[gnu::always_inline]] inline void pin([[maybe_unused]] T& v) {
  if constexpr (sizeof(v) <= 8) __asm__ volatile("" : "+r"(v));
}

// Makes the compiler take v for changed, so that it computes again what depends on v alone.
template <class T>
[[gnu::always_inline]] inline void renew(T& v) {
  __asm__ volatile("" : "+m"(v));
}

// No unit for pairs of bfloat16; zmm_float.h has one and shows what it must hold.
struct PairUnit {
  static constexpr bool kHere = false;
};

// No unit that multiplies whole tiles; amx_int8.h has one.
struct MatrixUnit {
  static constexpr int64_t kFromTokens = 0;  // never
};

// No registers of 16-bit sums for tables; YmmTables of ymm_int.h has them and shows what it must
// hold.
struct SumTables {
  static constexpr bool kHere = false;
};

// No products of bytes that are faster than those of head_int8; avx512_heads.h has some and shows
// what it must hold.
struct HeadBytes {
  static constexpr int64_t kFromTokens = 0;  // never
};

// No unit that multiplies two rows with two tokens; neon_i8mm.h has one and shows what it must
// hold.
struct TokenPairs {
  static constexpr bool kHere = false;
};

// ---- canonical rows -----------------------------------------------------------------------------
// A k-step is kStepBlocks weight blocks of a row. Raw holds its bytes; codes<F> takes field F out
// (0 = bits 7-6, meeting activations 0..31 of each block); load_x<F> loads the activations that
// meet it. dot adds their products into a Partial, which is safe for kFlushSteps steps; widen folds
// a Partial into an Acc. load_raw_tail / load_x_tail do the same for a last step of one block.

constexpr int64_t kStepBlocks = 1;
constexpr int64_t kFlushSteps = 1 << 30;  // int32 partial sums: no flush needed
constexpr int kGemvRows = 4;              // rows per tile at one token
constexpr bool kGemvStreams = false;      // which rows: neighbours, or (true) far apart
constexpr int kTileRows = 2;              // rows x tokens per tile at more tokens
constexpr int kTileTokens = 4;

struct Raw {
  uint8_t byte[32];
};
struct Codes {
  int16_t code[32];
};
struct Activations {
  int16_t x[32];
};
using Partial = int32_t;
using Acc = int32_t;

inline Raw load_raw(const uint8_t* p) {
  Raw r;
  for (int i = 0; i < 32; ++i) r.byte[i] = p[i];
  return r;
}
inline Raw load_raw_tail(const uint8_t* p) { return load_raw(p); }
template <int F>
inline Codes codes(const Raw& raw) {
  Codes c;
  for (int i = 0; i < 32; ++i) c.code[i] = static_cast<int16_t>((raw.byte[i] >> (6 - 2 * F)) & 3);
  return c;
}
template <int F>
inline Activations load_x(const int8_t* p) {
  Activations a;
  for (int i = 0; i < 32; ++i) a.x[i] = p[32 * F + i];
  return a;
}
template <int F>
inline Activations load_x_tail(const int8_t* p) {
  return load_x<F>(p);
}
// Whether `dot` is two instructions, which an ISA then names: dot_product and add_product.
constexpr bool kDotInTwoSteps = false;
inline Partial dot(Partial p, const Codes& c, const Activations& a) {
  for (int i = 0; i < 32; ++i) p += static_cast<int32_t>(c.code[i]) * a.x[i];
  return p;
}
inline Acc widen(Acc acc, Partial p) { return acc + p; }
inline int32_t reduce(Acc acc) { return acc; }
inline void prefetch(const void*) {}
// Into the second level cache: what is used much later.  Few requests of the first level can wait
// for memory at a time, and while they are all taken, what it has at hand waits with them.
inline void prefetch_l2(const void*) {}

// ---- tiles of the CPU-specific layouts ----------------------------------------------------------
// A k-step of a tile is kTileLanes lanes of 4 bytes.  A decoder (TwoBit, Base3, ...;
// ternary/tiles.inl) takes code vectors out of it; broadcast_x gives every lane the same 4
// activations; tile_dot adds the 4 products of every lane; a TileAcc holds them for a decoder's
// kFlush steps and tile_acc_sum makes int32 sums of it.

constexpr int64_t kTileLanes = 8;
constexpr int kTileAccs = 8, kPanelAccs = 8;
constexpr bool kFewRegisters = false;  // tokens are broadcast one at a time
constexpr int kTokensOfTwoSets = 0;    // so few tokens in two passes have two sets of sums
constexpr int kTileStreams = 0;        // one tile after the other, sums in registers

struct TileStep {
  uint8_t byte[32];
};
using TileCodes = TileStep;
struct TileX {
  int8_t x[4];
};
struct TileSum {
  int32_t lane[8];
};
using TileAcc = TileSum;

inline TileStep load_step(const uint8_t* p) {
  TileStep v;
  for (int i = 0; i < 32; ++i) v.byte[i] = p[i];
  return v;
}
inline void store_step(uint8_t* p, const TileCodes& c) {
  for (int i = 0; i < 32; ++i) p[i] = c.byte[i];
}
inline TileX broadcast_x(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
// Half H of the four steps that registers of four lines become: lane l of step s has bytes
// 16 (l / 4) + 4 s + l % 4 of a, b, c and d (ternary/columns.inl).
template <int H>
inline void zip_lines(const TileStep& a, const TileStep& b, const TileStep& c, const TileStep& d,
                      TileStep (&to)[2]) {
  for (int s = 0; s < 2; ++s) {
    for (int l = 0; l < 8; ++l) {
      const int i = 16 * (l / 4) + 4 * (2 * H + s) + l % 4;
      to[s].byte[4 * l] = a.byte[i];
      to[s].byte[4 * l + 1] = b.byte[i];
      to[s].byte[4 * l + 2] = c.byte[i];
      to[s].byte[4 * l + 3] = d.byte[i];
    }
  }
}
constexpr int kColumnHalves = 2;  // that one pass over the lines takes
// Of 64 codes q those that are not 0, and their numbers from `first` on; returns how many. at and x
// have room for 64.
inline int64_t list_step(const int8_t* q, int32_t first, int32_t* at, int8_t* x) {
  int64_t count = 0;
  for (int32_t i = 0; i < 64; ++i) {
    at[count] = first + i;
    x[count] = q[i];
    count += q[i] != 0;
  }
  return count;
}
inline TileSum set1_sum(int32_t x) { return {{x, x, x, x, x, x, x, x}}; }
inline TileAcc tile_dot(TileAcc p, const TileCodes& c, const TileX& a) {
  for (int i = 0; i < 32; ++i) p.lane[i / 4] += int32_t{c.byte[i]} * a.x[i % 4];
  return p;
}
inline TileSum load_sum(const int32_t* p) {
  TileSum s;
  for (int i = 0; i < 8; ++i) s.lane[i] = p[i];
  return s;
}
inline void store_sum(int32_t* p, const TileSum& s) {
  for (int i = 0; i < 8; ++i) p[i] = s.lane[i];
}
inline TileSum add_sum(TileSum a, const TileSum& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline TileSum sub_sum(TileSum a, const TileSum& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] -= b.lane[i];
  return a;
}

// Sums as floats, lane by lane, for scales of groups; float16 as its bits.
struct TileFloats {
  float lane[8];
};
inline TileFloats floats_of(const TileSum& s) {
  TileFloats v;
  for (int i = 0; i < 8; ++i) v.lane[i] = static_cast<float>(s.lane[i]);
  return v;
}
inline TileFloats load_floats(const float* p) {
  TileFloats v;
  for (int i = 0; i < 8; ++i) v.lane[i] = p[i];
  return v;
}
inline TileFloats load_floats(const uint16_t* p) {
  TileFloats v;
  for (int i = 0; i < 8; ++i) v.lane[i] = f16_to_f32(p[i]);
  return v;
}
inline void store_floats(float* p, const TileFloats& v) {
  for (int i = 0; i < 8; ++i) p[i] = v.lane[i];
}
inline TileFloats set1_floats(float x) { return {{x, x, x, x, x, x, x, x}}; }
inline TileFloats mul_floats(TileFloats a, const TileFloats& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] *= b.lane[i];
  return a;
}
// a * b + c with one rounding.
inline TileFloats fma_floats(TileFloats a, const TileFloats& b, const TileFloats& c) {
  for (int i = 0; i < 8; ++i) a.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return a;
}
inline TileSum times_256(TileSum s) {
  for (int32_t& v : s.lane) v *= 256;
  return s;
}

struct TwoBit {
  static constexpr int kFields = 4, kDots = 4, kUnroll = 1, kTokens = 2, kZeroCode = 1;
  static constexpr int64_t kFlush = int64_t{1} << 30;
  using Prepared = TileStep;
  static Prepared prepare(const TileStep& v) { return v; }
  template <int F>
  static TileCodes codes(Prepared v) {
    for (uint8_t& b : v.byte) b = (b >> (2 * F)) & 3;
    return v;
  }
  static void finish(TileSum (&)[4]) {}
};
using TwoBitPlain = TwoBit;

// Digits of a fraction in base 3 come off the top by multiplying with 3.
struct Base3 {
  static constexpr int kFields = 5, kDots = 5, kUnroll = 1, kTokens = 1, kZeroCode = 1;
  static constexpr int kFactor = 1;  // of a code
  static constexpr int64_t kFlush = int64_t{1} << 30;
  using Prepared = TileStep;
  static Prepared prepare(const TileStep& v) { return v; }
  template <int F>
  static TileCodes codes(Prepared v) {
    constexpr int kPower[] = {1, 3, 9, 27, 81};
    for (uint8_t& b : v.byte) b = static_cast<uint8_t>((b * kPower[F] & 0xff) * 3 >> 8);
    return v;
  }
  static void finish(TileSum (&)[5]) {}
};
using Base3Digits = Base3;

inline int32_t sum_i8_vector(const int8_t* p, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += p[i];
  return sum;
}
// Reading for the sake of reading: the xor of 64-byte lines, reduced to the xor of their words.
struct LineXor {
  uint64_t word[8];
};
inline LineXor xor_line(LineXor x, const uint8_t* p) {
  for (int i = 0; i < 8; ++i) {
    uint64_t v;
    __builtin_memcpy(&v, p + 8 * i, 8);
    x.word[i] ^= v;
  }
  return x;
}
inline uint64_t reduce_lines(LineXor a, LineXor b) {
  uint64_t x = 0;
  for (int i = 0; i < 8; ++i) x ^= a.word[i] ^ b.word[i];
  return x;
}

// ---- int8 caches --------------------------------------------------------------------------------

// Elements of a step: of keys, and of values at a pair of positions.  32 at most.
constexpr int64_t kCacheStep = 16;

// ---- keys ---------------------------------------------------------------------------------------

struct CacheKeys {
  int16_t x[kCacheStep];
};
using CacheQuery = CacheKeys;
using CacheDot = int32_t;

inline CacheKeys cache_keys(const int8_t* p) {
  CacheKeys k;
  for (int i = 0; i < kCacheStep; ++i) k.x[i] = p[i];
  return k;
}
inline CacheQuery cache_query(const int16_t* p) {
  CacheQuery q;
  for (int i = 0; i < kCacheStep; ++i) q.x[i] = p[i];
  return q;
}
// Adds the products of a step of keys with a step of queries.
inline CacheDot cache_dot(CacheDot acc, const CacheKeys& k, const CacheQuery& q) {
  for (int i = 0; i < kCacheStep; ++i) acc += int32_t{k.x[i]} * q.x[i];
  return acc;
}
inline void reduce_dots(const CacheDot (&dots)[8], int32_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = dots[i];
}

// ---- values -------------------------------------------------------------------------------------
// The sums of a step are kCacheAccs accumulators, in an order of elements that the ISA may choose;
// store_cache_sums puts them in memory's.

constexpr int kCacheAccs = 1;

struct CacheValues {
  int16_t a[kCacheStep], b[kCacheStep];
};
struct CacheWeights {
  int16_t a, b;
};
struct CacheSum {
  int32_t lane[kCacheStep];
};

// One step of two positions.
inline CacheValues cache_values(const int8_t* a, const int8_t* b) {
  CacheValues v;
  for (int i = 0; i < kCacheStep; ++i) v.a[i] = a[i], v.b[i] = b[i];
  return v;
}
// The weights of two neighbouring positions.
inline CacheWeights cache_weights(const int16_t* p) { return {p[0], p[1]}; }
template <int P>
inline CacheSum cache_sum(CacheSum acc, const CacheValues& v, CacheWeights w) {
  for (int i = 0; i < kCacheStep; ++i) acc.lane[i] += int32_t{v.a[i]} * w.a + int32_t{v.b[i]} * w.b;
  return acc;
}
inline void store_cache_sums(const CacheSum (&sums)[kCacheAccs], int32_t* out) {
  for (int i = 0; i < kCacheStep; ++i) out[i] = sums[0].lane[i];
}

// ---- panels -------------------------------------------------------------------------------------
// Words of four neighbouring numbers, 16 lanes of them.  quad_add adds the products of each lane's
// four with four 16-bit factors to that lane; store_quads stores the sums less an excess.  The
// factors come as two words (attention/int8_panels.inl): with kQuadHalves their low and high
// bytes, and the sums may be kQuadOffset times the factors' sum too large; else numbers 0 and 2,
// and 1 and 3, 16 bits each.

constexpr int kQuadTiles = 4;  // QuadSums that fit into registers
constexpr bool kQuadHalves = false;
constexpr int32_t kQuadOffset = 0;

struct QuadWords {
  const int8_t* at;
};
struct QuadSums {
  int32_t lane[16];
};
using QuadFactor = const int32_t*;

inline QuadWords quad_words(const void* p) { return {static_cast<const int8_t*>(p)}; }
inline QuadFactor quad_factor(const int32_t* word) { return word; }
inline void quad_add(QuadSums& acc, QuadWords w, QuadFactor first, QuadFactor second) {
  int16_t a[2], b[2];
  __builtin_memcpy(a, first, 4);
  __builtin_memcpy(b, second, 4);
  for (int i = 0; i < 16; ++i) {
    const int8_t* v = w.at + 4 * i;
    acc.lane[i] += v[0] * a[0] + v[1] * b[0] + v[2] * a[1] + v[3] * b[1];
  }
}
inline void store_quads(const QuadSums& acc, int32_t, int32_t* out) {
  for (int i = 0; i < 16; ++i) out[i] = acc.lane[i];
}

// ---- defaults_float.inl -------------------------------------------------------------------------

// Its templates of float lanes, to which an ISA's own functions are preferred: their names, for
// BITNET_OVERRIDES.
enum LaneDefaults {
  lanes_of,
  make_lanes,
  zero,
  pow2,
  times_pow2,
  swapped,
  max_abs_bits,
  reduce_abs_bits,
  reduce_add,
  reduce_max,
  less_mask,
  where_greater,
  store_indices,
  store_chosen,
  add_to_lanes,
  lanes_of_sums,
  sum_of_lanes,
  from_i32_n,
  to_i8_n,
  store_i16,
  load_bf16_n,
  load_f16_n,
  load_e4m3_n,
  load_e5m2_n,
  store_bf16_n,
  rounded_bf16,
  half_added_bf16,
  upper_halves,
  store_pairs,
  cached_bf16,
  store_f16_n,
  store_e4m3_n,
  store_e5m2_n,
  load_as,
  lane_reg,
  reg,
  load_reg,
  reg_fma,
  load_mixed,
  mix,
  unmix,
  load_of_pairs,
  reduce_eight,
  head_bf16_x,
  head_bf16_weights,
  head_bf16_ordered,
  head4_float,
  tile_acc_sum,
  head8_token,
  head8_sums,
};

}  // namespace
}  // namespace bitnet
