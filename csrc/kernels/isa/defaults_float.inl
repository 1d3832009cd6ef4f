// SIMD primitives made of those that every ISA supplies
// (scalar.h lists them). Primitives without float lanes are in
// defaults.h.

// What a wrong size would break without a message: an ISA that has one of these writes its group.
static_assert(TwoBit::kFields == layout::layout_of(layout::WeightFormat::kTwoBit).fields);
static_assert(Base3::kFields == layout::layout_of(layout::WeightFormat::kBase3).fields);
static_assert(sizeof(TileStep) == 4 * kTileLanes && sizeof(TileSum) == 4 * kTileLanes);

#define BITNET_INLINE_LAMBDA __attribute__((always_inline))

// ---- 16 float lanes -----------------------------------------------------------------------------

struct Lanes {
  alignas(64) float at[16];
};
template <class V>
inline Lanes lanes_of(V v) {
  Lanes x;
  store_n(x.at, v, 16);
  return x;
}
// Lane i is op(i).
template <class Op>
[[gnu::always_inline]] inline F32x16 make_lanes(const Op& op) {
  Lanes x;
  for (int i = 0; i < 16; ++i) x.at[i] = op(i);
  return load_n(x.at, 16);
}

template <class = void>
inline F32x16 zero() {
  return set1(0.0f);
}
// 2^n for integral n in [-126, 128]; 2^128 is infinity.
template <class V>
inline V pow2(V n) {
  const Lanes x = lanes_of(n);
  return make_lanes([&](int i) {
    const int32_t e = x.at[i] == x.at[i] ? static_cast<int32_t>(x.at[i]) : 0;
    return float_of(static_cast<uint32_t>(e + 127) << 23);
  });
}
// p * 2^n for shifted = 1.5 * 2^23 + n, whose lowest bits are those of n; p and the result normal.
template <class V>
inline V times_pow2(V p, V shifted) {
  const Lanes x = lanes_of(p), y = lanes_of(shifted);
  return make_lanes([&](int i) { return float_of(bits_of(x.at[i]) + (bits_of(y.at[i]) << 23)); });
}
// Lane i is lane i ^ kDistance of v; kDistance 1, 2, 4 or 8.
template <int kDistance, class V>
inline V swapped(V v) {
  const Lanes x = lanes_of(v);
  return make_lanes([&](int i) { return x.at[i ^ kDistance]; });
}
// Largest |x| so far, compared as bit patterns: exact, order-free, and NaN > infinity > finite.
template <class V>
inline V max_abs_bits(V acc, V x) {
  const Lanes best = lanes_of(acc), now = lanes_of(x);
  return make_lanes([&](int i) {
    const uint32_t bits = bits_of(now.at[i]) & 0x7fffffffu;
    return bits > bits_of(best.at[i]) ? float_of(bits) : best.at[i];
  });
}
template <class V>
inline uint32_t reduce_abs_bits(V acc) {
  const Lanes x = lanes_of(acc);
  uint32_t best = 0;
  for (const float lane : x.at) best = bits_of(lane) > best ? bits_of(lane) : best;
  return best;
}
// The tree: lanes 8 apart, then 4, 2, 1.
template <class V>
inline float reduce_add(V v) {
  Lanes x = lanes_of(v);
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) x.at[i] += x.at[i + width];
  }
  return x.at[0];
}
template <class V>
inline float reduce_max(V v) {
  Lanes x = lanes_of(v);
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) {
      x.at[i] = x.at[i] > x.at[i + width] ? x.at[i] : x.at[i + width];
    }
  }
  return x.at[0];
}

// ---- comparisons, and sums in float64 -----------------------------------------------------------

// Bit i: a[i] < b[i]; not if either is a NaN.
template <class V>
inline uint32_t less_mask(V a, V b) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(x.at[i] < y.at[i]) << i;
  return mask;
}
// a > b ? v : 0; 0 if either is a NaN.
template <class V>
inline V where_greater(V a, V b, V v) {
  const Lanes x = lanes_of(a), y = lanes_of(b), z = lanes_of(v);
  return make_lanes([&](int i) { return x.at[i] > y.at[i] ? z.at[i] : 0.0f; });
}
// Writes first + i for every bit i of the mask, ascending; returns how many.  Up to `room` elements
// may be written, and up to 16.
template <class T>
inline int64_t store_indices(T* ids, T first, uint32_t mask, int64_t) {
  int64_t count = 0;
  for (; mask != 0; mask &= mask - 1) ids[count++] = first + __builtin_ctz(mask);
  return count;
}
// Writes the lanes of v whose bits the mask has; the rest as store_indices.
template <class V>
inline int64_t store_chosen(float* values, V v, uint32_t mask, int64_t) {
  if (mask == 0) return 0;
  const Lanes x = lanes_of(v);
  int64_t count = 0;
  for (; mask != 0; mask &= mask - 1) values[count++] = x.at[__builtin_ctz(mask)];
  return count;
}
template <class S, class V>
inline void add_to_lanes(S& sums, V v) {
  const Lanes x = lanes_of(v);
  for (int i = 0; i < 16; ++i) sums.lane[i] += static_cast<double>(x.at[i]);
}
template <class S>
inline S lanes_of_sums(const S& sums) {
  return sums;
}
// The tree, as of reduce_add.
template <class S>
inline double sum_of_lanes(const S& sums) {
  auto x = lanes_of_sums(sums);
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) x.lane[i] += x.lane[i + width];
  }
  return x.lane[0];
}

// ---- conversions, of all 16 elements or the first `count` ---------------------------------------

template <class = void>
inline F32x16 from_i32_n(const int32_t* p, int64_t count) {
  return make_lanes([&](int i) { return i < count ? static_cast<float>(p[i]) : 0.0f; });
}
// Round half to even, clamp to [-128, 127]; |v| < 2^22.
template <class V>
inline void to_i8_n(int8_t* p, V v, int64_t count) {
  const Lanes x = lanes_of(v);
  for (int i = 0; i < 16 && i < count; ++i) {
    float r = round_half_even(x.at[i]);
    r = r > 127.0f ? 127.0f : r;
    r = r < -128.0f ? -128.0f : r;
    p[i] = static_cast<int8_t>(r);
  }
}
// All 16, |v| <= 32512, rounded half to even.
template <class V>
inline void store_i16(int16_t* p, V v) {
  const Lanes x = lanes_of(v);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>(round_half_even(x.at[i]));
}
template <class = void>
inline F32x16 load_bf16_n(const uint16_t* p, int64_t count) {
  return make_lanes([&](int i) { return i < count ? bf16_to_f32(p[i]) : 0.0f; });
}
template <class = void>
inline F32x16 load_f16_n(const uint16_t* p, int64_t count) {
  return make_lanes([&](int i) { return i < count ? f16_to_f32(p[i]) : 0.0f; });
}
template <class = void>
inline F32x16 load_e4m3_n(const uint8_t* p, int64_t count) {
  return make_lanes([&](int i) { return i < count ? e4m3_to_f32(p[i]) : 0.0f; });
}
template <class = void>
inline F32x16 load_e5m2_n(const uint8_t* p, int64_t count) {
  return make_lanes([&](int i) { return i < count ? e5m2_to_f32(p[i]) : 0.0f; });
}
template <class V>
inline void store_bf16_n(uint16_t* p, V v, int64_t count) {
  const Lanes x = lanes_of(v);
  for (int i = 0; i < 16 && i < count; ++i) p[i] = f32_to_bf16(x.at[i]);
}
// As it would come back from memory as bfloat16.
template <class V>
inline V rounded_bf16(V v) {
  const Lanes x = lanes_of(v);
  return make_lanes([&](int i) { return bf16_to_f32(f32_to_bf16(x.at[i])); });
}
// x with what rounds it to bfloat16 added to its bits: its upper halves are those of
// rounded_bf16(x) but for some NaNs.
template <class V>
inline V half_added_bf16(V v) {
  const Lanes x = lanes_of(v);
  return make_lanes([&](int i) {
    const uint32_t bits = bits_of(x.at[i]);
    return float_of(bits + 0x7fffu + ((bits >> 16) & 1u));
  });
}
template <class V>
inline V upper_halves(V v) {
  const Lanes x = lanes_of(v);
  return make_lanes([&](int i) { return float_of(bits_of(x.at[i]) & 0xffff0000u); });
}
// The upper halves of 16 numbers each, as load_of_pairs<0> and <1> read them.
template <class V>
inline void store_pairs(void* p, V first, V second) {
  const Lanes x = lanes_of(first), y = lanes_of(second);
  for (int i = 0; i < 16; ++i) {
    const uint32_t pair = bits_of(x.at[i]) >> 16 | (bits_of(y.at[i]) & 0xffff0000u);
    __builtin_memcpy(static_cast<char*>(p) + 4 * i, &pair, 4);
  }
}
// As a bfloat16 cache holds it, kMinCached included.
template <class V>
inline V cached_bf16(V v) {
  const Lanes x = lanes_of(v);
  return make_lanes([&](int i) {
    const float size = x.at[i] < 0 ? -x.at[i] : x.at[i];
    return size < kMinCached ? 0.0f : bf16_to_f32(f32_to_bf16(x.at[i]));
  });
}
template <class V>
inline void store_f16_n(uint16_t* p, V v, int64_t count) {
  const Lanes x = lanes_of(v);
  for (int i = 0; i < 16 && i < count; ++i) p[i] = f32_to_f16(x.at[i]);
}
template <class V>
inline void store_e4m3_n(uint8_t* p, V v, int64_t count) {
  const Lanes x = lanes_of(v);
  uint8_t codes[16];
  for (int i = 0; i < 16; i += 4) f32_to_f8<3, 7, 0x7e, 0x7e>(x.at + i, codes + i);
  __builtin_memcpy(p, codes, static_cast<std::size_t>(count < 16 ? count : 16));
}
template <class V>
inline void store_e5m2_n(uint8_t* p, V v, int64_t count) {
  const Lanes x = lanes_of(v);
  uint8_t codes[16];
  for (int i = 0; i < 16; i += 4) f32_to_f8<2, 15, 0x7b, 0x7c>(x.at + i, codes + i);
  __builtin_memcpy(p, codes, static_cast<std::size_t>(count < 16 ? count : 16));
}

// Up to 16 elements of a known type, from element i on.  A constant count of 16 is one plain load.
template <DType kType>
[[gnu::always_inline]] inline F32x16 load_as(const void* src, int64_t i, int64_t count) {
  const void* p = static_cast<const char*>(src) + i * element_size(kType);
  if constexpr (kType == DType::kBF16) return load_bf16_n(static_cast<const uint16_t*>(p), count);
  if constexpr (kType == DType::kF16) return load_f16_n(static_cast<const uint16_t*>(p), count);
  if constexpr (kType == DType::kF8E4M3) return load_e4m3_n(static_cast<const uint8_t*>(p), count);
  if constexpr (kType == DType::kF8E5M2) return load_e5m2_n(static_cast<const uint8_t*>(p), count);
  if constexpr (kType == DType::kF32) return load_n(static_cast<const float*>(p), count);
}

// ---- attention ----------------------------------------------------------------------------------
// Many dot products at once, over elements of a cache of a known type.  A Reg is what one register
// holds of 16 lanes, kRegs of them make a step.  A step may come in another order than memory's
// where that loads cheaper: mix brings a row into that order, unmix back.

inline F32x16 lane_reg(NoReg*) { return zero(); }
template <class R>
inline R lane_reg(R*) {
  return R{};
}
using LaneReg = decltype(lane_reg(static_cast<Reg*>(nullptr)));

template <int P, class V>
inline V reg(V v) {
  return v;
}
template <class = void>
inline F32x16 load_reg(const float* p) {  // 16 / kRegs elements
  return load_n(p, 16);
}
template <class R>
inline R reg_fma(R a, R b, R c) {
  return fma(a, b, c);
}
template <DType kType>
[[gnu::always_inline]] inline F32x16 load_mixed(const void* p) {
  return load_as<kType>(p, 0, 16);
}
template <DType kType, class V>
inline V mix(V v) {
  return v;
}
template <DType kType, class V>
inline V unmix(V v) {
  return v;
}
// Numbers P (0 or 1) of 16 pairs of bfloat16.
template <int P, class T>
inline F32x16 load_of_pairs(const T* p) {
  return make_lanes([&](int i) {
    uint16_t h;
    __builtin_memcpy(&h, reinterpret_cast<const char*>(p) + 4 * i + 2 * P, 2);
    return bf16_to_f32(h);
  });
}
// out[i] = reduce_add of the 16 lanes, in their unmixed order, whose parts are sums[0..kRegs)[i].
template <DType kType, class R>
inline void reduce_eight(const R (&sums)[1][8], float* out) {
  for (int i = 0; i < 8; ++i) out[i] = reduce_add(sums[0][i]);
}

// ---- heads --------------------------------------------------------------------------------------
// bfloat16: sixteen (or the first `count`) weights and activations, both in the same order of
// lanes, which the ISA may choose; head_bf16_ordered puts the lanes of their sums back.

template <class = void>
inline F32x16 head_bf16_x(const float* p, int64_t count) {
  return load_n(p, count);
}
template <class = void>
inline F32x16 head_bf16_weights(const uint16_t* p, int64_t count) {
  return load_bf16_n(p, count);
}
template <class V>
inline V head_bf16_ordered(V acc) {
  return acc;
}
template <class A>
inline F32x16 head4_float(const A& acc, int32_t offset) {
  return make_lanes([&](int i) { return static_cast<float>(acc.lane[i] - offset); });
}

// ---- tiles --------------------------------------------------------------------------------------

// The int32 sums of accumulators that need no widening.
template <class A>
inline TileSum tile_acc_sum(const A& acc) {
  return acc;
}

// ---- heads --------------------------------------------------------------------------------------

// What head8_dot takes of a token from feature i on, loaded once for all rows.
struct Head8At {
  const HeadToken& token;
  int64_t i;
};
template <class = void>
[[gnu::always_inline]] inline Head8At head8_token(const HeadToken& token, int64_t i) {
  return {token, i};
}
template <class A, class W>
[[gnu::always_inline]] inline A head8_dot(A acc, const W& w, const Head8At& x) {
  return head8_dot(acc, w, x.token, x.i);
}

// head8_sum of each of at most 8.
template <class A, int N>
[[gnu::always_inline]] inline void head8_sums(const A (&acc)[N], int64_t (&sums)[8]) {
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) sums[i] = head8_sum(acc[i]);
}
