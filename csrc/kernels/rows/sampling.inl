// Rows of logits and of probabilities over the float primitives: maximum, exponentials, and the
// values above a bound or between two bounds, with their indices. Contracts, including the order of
// sums: kernel_table.h.

float max_row(const float* x, int64_t n) {
  F32x16 best = set1(-__builtin_inff()), magnitude = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F32x16 v = load_n(x + i, 16);
    best = max(v, best);  // this order passes over a NaN, which the magnitude shows
    magnitude = max_abs_bits(magnitude, v);
  }
  float top = reduce_max(best);
  uint32_t bits = reduce_abs_bits(magnitude);
  for (; i < n; ++i) {
    const uint32_t now = bits_of(x[i]) & 0x7fffffffu;
    bits = now > bits ? now : bits;
    top = x[i] > top ? x[i] : top;
  }
  return bits > kInfinityBits ? __builtin_nanf("") : top;
}

// exp_f32 of x from just above -87, where the result is a normal number, to 0; anything else gives
// anything.
inline F32x16 exp_below_zero(F32x16 x) {
  const ExpParts e = exp_parts(x);
  return times_pow2(e.fraction, e.shifted);
}

// Below this, e^x times any number of tokens is nothing beside the 1 of the largest.
constexpr float kMinExponent = -87.0f;

double exp_row(const float* x, int64_t n, float top, float inv_temperature, float* w) {
  LaneSums sums = {};
  const F32x16 largest = set1(top), factor = set1(inv_temperature), min_x = set1(kMinExponent);
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 v = mul(sub(load_n(x + i, count), largest), factor);
    F32x16 e = where_greater(v, min_x, exp_below_zero(v));
    store_n(w + i, e, count);
    if (count < 16) e = load_n(w + i, count);  // zeros in the lanes behind the end
    add_to_lanes(sums, e);
  });
  return sum_of_lanes(sums);
}

template <bool kCount, bool kSum, bool kBetween>
Split split_parts(const float* v, int64_t n, float scale, float low, float high, float* values) {
  LaneSums sums = {};
  int64_t above = 0, between = 0;
  const F32x16 factor = set1(scale), min_x = set1(low), max_x = set1(high);
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 x = mul(load_n(v + i, count), factor);
    uint32_t mask = first_bits(count);
    if constexpr (kCount || kSum) {
      const uint32_t higher = less_mask(max_x, x) & mask;
      if constexpr (kCount) above += count_bits(higher);
      mask &= ~higher;
    }
    if constexpr (kSum) add_to_lanes(sums, where_greater(x, max_x, x));
    if constexpr (kBetween) {
      mask &= ~less_mask(x, min_x);
      between += store_chosen(values + between, x, mask, count);
    }
  });
  return {above, between, kSum ? sum_of_lanes(sums) : 0.0};
}

Split split_row(const float* v, int64_t n, float scale, float low, float high, bool sum,
                float* values) {
  const auto run = [&](auto parts) { return parts(v, n, scale, low, high, values); };
  if (values == nullptr)
    return run(sum ? split_parts<false, true, false> : split_parts<true, false, false>);
  if (high == __builtin_inff()) return run(split_parts<false, false, true>);
  return run(sum ? split_parts<false, true, true> : split_parts<true, false, true>);
}

int64_t find_row(const float* v, int64_t n, float scale, float low, float high, int32_t* ids) {
  int64_t found = 0;
  const F32x16 factor = set1(scale), min_x = set1(low), max_x = set1(high);
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 x = mul(load_n(v + i, count), factor);
    const uint32_t outside = less_mask(x, min_x) | less_mask(max_x, x);
    const uint32_t mask = first_bits(count) & ~outside;
    found += store_indices(ids + found, static_cast<int32_t>(i), mask, count);
  });
  return found;
}
