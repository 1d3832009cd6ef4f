// Gumbel noise of token ids, and a row of logits with it. Contract: add_noise_row in
// kernel_table.h. Integers are in the compiler's own vectors, as many as a register holds; these
// pass functions through memory alone, or the ABI would depend on the ISA.

constexpr int64_t kNoiseLanes = kHead8Step / 4;
using NoiseBits [[gnu::vector_size(kHead8Step)]] = uint32_t;
using NoiseInts [[gnu::vector_size(kHead8Step)]] = int32_t;
using NoiseFloats [[gnu::vector_size(kHead8Step)]] = float;

template <class V, class T>
[[gnu::always_inline]] inline void load_lanes(V& v, const T* p) {
  __builtin_memcpy(&v, p, sizeof v);
}
template <class V, class T>
[[gnu::always_inline]] inline void store_lanes(T* p, const V& v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// Of 16 ids: u in (0, 1) as its distance from the nearer end.
struct NoiseTails {
  alignas(64) float tail[16];     // t
  alignas(64) int32_t low[16];    // -1: u = t, 0: u = 1 - t
  alignas(64) int32_t above[16];  // bits of t where u = 1 - t, else of 1/2
};

// A bijection of 32 bits (Wellons' triple32) between the halves of the key turns every id into a
// number: its sign chooses the end, its other bits are the distance.
[[gnu::always_inline]] inline void noise_tails(uint32_t first, uint64_t key, NoiseTails& to) {
  alignas(64) static constexpr uint32_t kLane[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                     8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 16
  for (int64_t j = 0; j < 16; j += kNoiseLanes) {
    NoiseBits h;
    load_lanes(h, kLane + j);
    h = (h + first) ^ static_cast<uint32_t>(key);
    h = (h ^ h >> 17) * 0xed5ad4bbu;
    h = (h ^ h >> 11) + static_cast<uint32_t>(key >> 32);
    h *= 0xac4c1b51u;
    h = (h ^ h >> 15) * 0x31848babu;
    h ^= h >> 14;
    const NoiseInts bits = __builtin_bit_cast(NoiseInts, h), low = bits >> 31;
    const NoiseFloats t = __builtin_convertvector(bits ^ low, NoiseFloats) * 0x1p-32f + 0x1p-33f;
    const NoiseInts tail_bits = __builtin_bit_cast(NoiseInts, t);
    store_lanes(to.tail + j, t);
    store_lanes(to.low + j, low);
    store_lanes(to.above + j, low ? NoiseInts{} + 0x3f000000 : tail_bits);
  }
}

// -ln of 16 positive numbers 2^k (1 + r), 1 + r between the roots of 1/2 and 2, in place; ln(1 + r)
// within 2e-7 of itself. tails: those that the numbers are u of, else null.
[[gnu::always_inline]] inline void minus_log(float* x, const NoiseTails* tails) {
  alignas(64) float r[16], k[16];
#pragma GCC unroll 16
  for (int64_t j = 0; j < 16; j += kNoiseLanes) {
    NoiseInts bits;
    load_lanes(bits, x + j);
    const NoiseInts exponent = (bits - 0x3f3504f3) >> 23;
    const NoiseInts near_one = bits - exponent * (1 << 23);
    NoiseFloats rest = __builtin_bit_cast(NoiseFloats, near_one) - 1.0f;
    if (tails != nullptr) {  // 1 - t has lost the last bits of a small t: the largest noise
      NoiseFloats t;
      NoiseInts low;
      load_lanes(t, tails->tail + j);
      load_lanes(low, tails->low + j);
      rest = (exponent | low) == 0 ? -t : rest;
    }
    store_lanes(k + j, __builtin_convertvector(exponent, NoiseFloats));
    store_lanes(r + j, rest);
  }
  const F32x16 f = load_n(r, 16);
  F32x16 p = set1(-0.10347940772771835f);
  p = fma(p, f, set1(0.16278977692127228f));
  p = fma(p, f, set1(-0.1720156967639923f));
  p = fma(p, f, set1(0.1989399790763855f));
  p = fma(p, f, set1(-0.2497338503599167f));
  p = fma(p, f, set1(0.33335089683532715f));
  p = fma(p, f, set1(-0.5000028610229492f));
  p = fma(p, f, set1(1.0f));
  store_n(x, sub(zero(), fma(load_n(k, 16), set1(0.693147180559945f), mul(f, p))), 16);
}

// -ln(-ln u).
[[gnu::always_inline]] inline F32x16 gumbel(const NoiseTails& tails) {
  alignas(64) float x[16];
#pragma GCC unroll 16
  for (int64_t j = 0; j < 16; j += kNoiseLanes) {
    NoiseFloats t;
    NoiseInts low;
    load_lanes(t, tails.tail + j);
    load_lanes(low, tails.low + j);
    store_lanes(x + j, low ? t : 1.0f - t);
  }
  minus_log(x, &tails);
  minus_log(x, nullptr);
  return load_n(x, 16);
}

// An upper bound of gumbel() for less work: -ln u >= 1 - u, and log2(2^k (1 + r)) >= k + r, which
// are the bits of a float read as an integer.
[[gnu::always_inline]] inline F32x16 gumbel_bound(const NoiseTails& tails) {
  constexpr float kLog2 = 0.693147180559945f;
  return fma(from_i32_n(tails.above, 16), set1(-kLog2 * 0x1p-23f), set1(127 * kLog2 + 0.001f));
}

void add_noise_row(const float* x, int64_t n, float temperature, uint64_t key, int64_t first,
                   float threshold, float* out) {
  const F32x16 t = set1(temperature), lowest = set1(threshold);
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 v = load_n(x + i, count);
    NoiseTails tails;
    noise_tails(static_cast<uint32_t>(first + i), key, tails);
    F32x16 noisy = set1(-__builtin_inff());
    if (less_mask(fma(t, gumbel_bound(tails), v), lowest) != 0xffffu)
      noisy = fma(t, gumbel(tails), v);
    store_n(out + i, noisy, count);
  });
}
