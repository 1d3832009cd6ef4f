// Row operations over the float primitives: quantise, scale, convert, norms, activations, RoPE.
// Contracts, including the order of sums:
// kernel_table.h.

// f(i, count) for every 16 elements: a constant 16 where they are whole.
template <class F>
[[gnu::always_inline]] inline void for_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, int64_t{16});
  if (i < n) f(i, n - i);
}

// f.template operator()<type>() of a type in memory; every other one is float32.
template <class F>
[[gnu::always_inline]] inline auto with_type(DType type, const F& f) {
  if (type == DType::kBF16) return f.template operator()<DType::kBF16>();
  if (type == DType::kF16) return f.template operator()<DType::kF16>();
  if (type == DType::kF8E4M3) return f.template operator()<DType::kF8E4M3>();
  if (type == DType::kF8E5M2) return f.template operator()<DType::kF8E5M2>();
  return f.template operator()<DType::kF32>();
}

template <DType kType>
void load_row_as(const void* src, int64_t n, float* dst) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    store_n(dst + i, load_as<kType>(src, i, count), count);
  });
}

void load_row(DType type, const void* src, int64_t n, float* dst) {
  with_type(type, [&]<DType kType>() { load_row_as<kType>(src, n, dst); });
}

template <DType kType>
[[gnu::always_inline]] inline void store_as(void* dst, int64_t i, F32x16 v, int64_t count) {
  if constexpr (kType == DType::kBF16) {
    store_bf16_n(static_cast<uint16_t*>(dst) + i, v, count);
  } else if constexpr (kType == DType::kF16) {
    store_f16_n(static_cast<uint16_t*>(dst) + i, v, count);
  } else if constexpr (kType == DType::kF8E4M3) {
    store_e4m3_n(static_cast<uint8_t*>(dst) + i, v, count);
  } else if constexpr (kType == DType::kF8E5M2) {
    store_e5m2_n(static_cast<uint8_t*>(dst) + i, v, count);
  } else {
    store_n(static_cast<float*>(dst) + i, v, count);
  }
}

template <DType kType>
void store_row_as(const float* src, int64_t n, void* dst) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    store_as<kType>(dst, i, load_n(src + i, count), count);
  });
}

void store_row(DType type, const float* src, int64_t n, void* dst) {
  with_type(type, [&]<DType kType>() { store_row_as<kType>(src, n, dst); });
}

// v as it would come back from memory of that type.
template <DType kType>
[[gnu::always_inline]] inline F32x16 rounded_as(F32x16 v) {
  if constexpr (kType == DType::kBF16) {
    return rounded_bf16(v);
  } else if constexpr (kType == DType::kF16) {
    uint16_t half[16];
    store_f16_n(half, v, 16);
    return load_f16_n(half, 16);
  } else if constexpr (kType == DType::kF8E4M3) {
    uint8_t byte[16];
    store_e4m3_n(byte, v, 16);
    return load_e4m3_n(byte, 16);
  } else if constexpr (kType == DType::kF8E5M2) {
    uint8_t byte[16];
    store_e5m2_n(byte, v, 16);
    return load_e5m2_n(byte, 16);
  } else {
    return v;
  }
}

F32x16 rounded(DType type, F32x16 v) {
  return with_type(type, [&]<DType kType>() { return rounded_as<kType>(v); });
}

void store_cache_row(DType type, const float* src, int64_t n, void* dst) {
  if (type != DType::kBF16) return store_row(type, src, n, dst);
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 v = cached_bf16(load_n(src + i, n - i));
    store_bf16_n(static_cast<uint16_t*>(dst) + i, v, n - i);
  }
}

template <DType kType>
void round_row_as(float* x, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    store_n(x + i, rounded_as<kType>(load_n(x + i, count)), count);
  });
}

void round_row(DType type, float* x, int64_t n) {
  if (type == DType::kF32) return;
  with_type(type, [&]<DType kType>() { round_row_as<kType>(x, n); });
}

// ---- int8 activations ---------------------------------------------------------------------------

uint32_t absmax_bits(const float* x, int64_t n) {
  F32x16 best = zero();
  for (int64_t i = 0; i < n; i += 16) best = max_abs_bits(best, load_n(x + i, n - i));
  return reduce_abs_bits(best);
}

// From here on a largest magnitude is infinite or NaN.
constexpr uint32_t kInfinityBits = 0x7f800000u;

// The largest magnitude, at least 1e-30 so that its reciprocal and its 1 / 32512 stay normal.
inline float absmax_of(uint32_t bits) {
  const float absmax = __builtin_bit_cast(float, bits);
  return absmax > 1e-30f ? absmax : 1e-30f;
}

// bits: of the largest magnitude. store_codes(i, count, scale, q) makes the codes of elements
// [i, i + count).
template <class StoreCodes>
[[gnu::always_inline]] inline float quantize_with(uint32_t bits, int64_t n, int64_t n_padded,
                                                  int8_t* q, int64_t step_stride, int32_t* sum,
                                                  const StoreCodes& store_codes) {
  const bool finite = bits < kInfinityBits;
  const float absmax = __builtin_bit_cast(float, bits);
  // Two roundings, as torch computes 127 / t for a tensor t: codes equal Hugging Face's bit for
  // bit.
  const float inv_scale = 127.0f * (1.0f / (absmax > 1e-5f ? absmax : 1e-5f));
  const F32x16 s = set1(inv_scale);
  const int64_t step = step_stride == kTokenStep ? n_padded : kTokenStep;  // contiguous codes
  *sum = 0;
  for (int64_t from = 0; from < n_padded; from += step, q += step_stride) {
    const int64_t end = n_padded - from < step ? n_padded - from : step;
    const int64_t left = finite ? n - from : 0, count = left < end ? (left < 0 ? 0 : left) : end;
    store_codes(from, count, s, q);
    for (int64_t i = count; i < end; ++i) q[i] = 0;
    *sum += sum_i8_vector(q, count);
  }
  return finite ? 1.0f / inv_scale : __builtin_nanf("");
}

float quantize_by(uint32_t bits, const float* x, int64_t n, int64_t n_padded, int8_t* q,
                  int64_t step_stride, int32_t* sum) {
  return quantize_with(bits, n, n_padded, q, step_stride, sum,
                       [x](int64_t from, int64_t count, F32x16 scale, int8_t* to)
                           BITNET_INLINE_LAMBDA {
                             for_lanes(count, [&](int64_t i, int64_t lanes) BITNET_INLINE_LAMBDA {
                               to_i8_n(to + i, mul(load_n(x + from + i, lanes), scale), lanes);
                             });
                           });
}

float quantize_row(const float* x, int64_t n, int64_t n_padded, int8_t* q, int64_t step_stride,
                   int32_t* sum) {
  return quantize_by(absmax_bits(x, n), x, n, n_padded, q, step_stride, sum);
}

// ---- norms and activations ----------------------------------------------------------------------

F32x16 rstd_of(F32x16 squares, int64_t n, float eps) {
  const float mean = reduce_add(squares) / static_cast<float>(n);
  return set1(1.0f / __builtin_sqrtf(mean + eps));
}

void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, DType type, float* y) {
  F32x16 squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 v = load_n(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const F32x16 rstd = rstd_of(squares, n, eps);
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 v = rounded(type, mul(load_n(x + i, n - i), rstd));
    store_n(y + i, mul(v, load_n(weight + i, n - i)), n - i);
  }
}

// relu(gate)^2 * up.
[[gnu::always_inline]] inline F32x16 relu2_mul(F32x16 gate, F32x16 up) {
  const F32x16 g = max(zero(), gate);  // this order keeps a NaN
  return mul(mul(g, g), up);
}

// Up to 16 elements of a NormJob's x, from element i on.
struct FloatRow {
  const float* x;
  [[gnu::always_inline]] F32x16 load(int64_t i, int64_t count) const {
    return load_n(x + i, count);
  }
};
struct Relu2Row {
  const void *gate, *up;
  [[gnu::always_inline]] F32x16 load(int64_t i, int64_t count) const {
    return relu2_mul(load_as<DType::kBF16>(gate, i, count), load_as<DType::kBF16>(up, i, count));
  }
};

// While the chain of sums of squares waits, values are rounded and their largest magnitude is
// found.
template <DType kType, class Row>
float norm_quantize_as(const NormJob& job, const Row& row, int64_t n_padded, int8_t* q,
                       int64_t step_stride, int32_t* sum) {
  const float* weight = job.weight;
  float* y = job.y;
  F32x16 squares = zero(), best = zero();
  if (weight == nullptr) {
    for_lanes(job.n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
      const F32x16 v = rounded_as<kType>(row.load(i, count));
      store_n(y + i, v, count);
      best = max_abs_bits(best, v);
    });
  } else {
    for_lanes(job.n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
      const F32x16 v = rounded_as<kType>(row.load(i, count));
      store_n(y + i, v, count);
      squares = fma(v, v, squares);
    });
    const F32x16 rstd = rstd_of(squares, job.n, job.eps);
    for_lanes(job.n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
      const F32x16 v = rounded_as<kType>(mul(load_n(y + i, count), rstd));
      const F32x16 weighted = rounded_as<kType>(mul(v, load_n(weight + i, count)));
      store_n(y + i, weighted, count);
      best = max_abs_bits(best, weighted);
    });
  }
  return quantize_by(reduce_abs_bits(best), y, job.n, n_padded, q, step_stride, sum);
}

// The same codes of a row of kBF16 with a norm, of which n is a multiple of kPairedRow. Between the
// passes lie bfloat16 numbers, so the row takes half the lines of L1. Two vectors are one of pairs,
// which costs less than packing each. Behind the first pass no NaN is looked for: each is seen as
// the largest magnitude of what is not yet rounded, and then there are no codes.
constexpr int64_t kPairedRow = 32;

template <class Row>
float norm_quantize_pairs(const NormJob& job, const Row& row, int64_t n_padded, int8_t* q,
                          int64_t step_stride, int32_t* sum) {
  const float* weight = job.weight;
  char* pairs = reinterpret_cast<char*>(job.y);
  F32x16 squares = zero(), best = zero();
  for (int64_t i = 0; i < job.n; i += kPairedRow) {
    const F32x16 first = rounded_bf16(row.load(i, 16));
    const F32x16 second = rounded_bf16(row.load(i + 16, 16));
    squares = fma(first, first, squares);
    squares = fma(second, second, squares);
    store_pairs(pairs + 2 * i, first, second);
  }
  const F32x16 rstd = rstd_of(squares, job.n, job.eps);
  const auto weighted = [&](F32x16 v, int64_t i) BITNET_INLINE_LAMBDA {
    const F32x16 normed = upper_halves(half_added_bf16(mul(v, rstd)));
    const F32x16 product = mul(normed, load_n(weight + i, 16));
    best = max_abs_bits(best, product);
    return half_added_bf16(product);
  };
  for (int64_t i = 0; i < job.n; i += kPairedRow) {
    const void* both = pairs + 2 * i;
    const F32x16 first = weighted(load_of_pairs<0>(both), i);
    const F32x16 second = weighted(load_of_pairs<1>(both), i + 16);
    store_pairs(pairs + 2 * i, first, second);
  }
  const float largest = __builtin_bit_cast(float, reduce_abs_bits(best));
  const uint32_t bits = static_cast<uint32_t>(f32_to_bf16(largest)) << 16;
  return quantize_with(bits, job.n, n_padded, q, step_stride, sum,
                       [pairs](int64_t from, int64_t count, F32x16 scale, int8_t* to)
                           BITNET_INLINE_LAMBDA {
                             for (int64_t i = 0; i < count; i += kPairedRow) {
                               const void* both = pairs + 2 * (from + i);
                               to_i8_n(to + i, mul(load_of_pairs<0>(both), scale), 16);
                               to_i8_n(to + i + 16, mul(load_of_pairs<1>(both), scale), 16);
                             }
                           });
}

template <class Row>
float norm_quantize_bf16(const NormJob& job, const Row& row, int64_t n_padded, int8_t* q,
                         int64_t step_stride, int32_t* sum) {
  if constexpr (kRowsInPairs) {
    if (job.codes_only && job.weight != nullptr && job.n % kPairedRow == 0)
      return norm_quantize_pairs(job, row, n_padded, q, step_stride, sum);
  }
  return norm_quantize_as<DType::kBF16>(job, row, n_padded, q, step_stride, sum);
}

float norm_quantize_row(const NormJob& job, int64_t n_padded, int8_t* q, int64_t step_stride,
                        int32_t* sum) {
  if (job.gate != nullptr)
    return norm_quantize_bf16(job, Relu2Row{job.gate, job.up}, n_padded, q, step_stride, sum);
  const FloatRow row{job.x};
  if (job.type == DType::kBF16) return norm_quantize_bf16(job, row, n_padded, q, step_stride, sum);
  if (job.type == DType::kF16)
    return norm_quantize_as<DType::kF16>(job, row, n_padded, q, step_stride, sum);
  return norm_quantize_as<DType::kF32>(job, row, n_padded, q, step_stride, sum);
}

void add_row(const float* a, const float* b, int64_t n, float* y) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    store_n(y + i, add(load_n(a + i, count), load_n(b + i, count)), count);
  });
}

void relu2_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    store_n(y + i, relu2_mul(load_n(gate + i, count), load_n(up + i, count)), count);
  });
}

// x = n ln 2 + r with |r| <= ln 2 / 2.
struct ExpParts {
  F32x16 shifted;   // 1.5 * 2^23 + n
  F32x16 n;         // an integer
  F32x16 fraction;  // e^r, a degree-7 Taylor polynomial
};

inline ExpParts exp_parts(F32x16 x) {
  const F32x16 magic =
      set1(12582912.0f);  // adding and subtracting it rounds to an integer, half to even
  const F32x16 shifted = add(mul(x, set1(1.44269504088896341f)), magic), n = sub(shifted, magic);
  F32x16 r = fma(n, set1(-0.693359375f), x);  // ln 2 in two parts; the first has few bits: exact
  r = fma(n, set1(2.12194440e-4f), r);
  F32x16 p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return {shifted, n, p};
}

// e^x within 1 ulp.  Clamped to [-87, 89]: at the low end 2^n stays a normal number, from 88.4 on
// it is 2^128, infinity, so that silu of any large negative number is zero.  A NaN passes through.
// Inlined: vectors of two registers are passed through memory, so a call takes as long as the
// arithmetic.
[[gnu::always_inline]] inline F32x16 exp_f32(F32x16 x) {
  const ExpParts e = exp_parts(min(set1(89.0f), max(set1(-87.0f), x)));
  return mul(e.fraction, pow2(e.n));
}

void silu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 g = load_n(gate + i, n - i);
    const F32x16 denominator = add(set1(1.0f), exp_f32(sub(zero(), g)));
    store_n(y + i, mul(div(g, denominator), load_n(up + i, n - i)), n - i);
  }
}

// gelu(g) = g / 2 * (1 + tanh(t)) = g / (1 + e^(-2 t)), t = sqrt(2 / pi) * (g + 0.044715 g^3): the
// approximation by tanh, without the cancellation of 1 + tanh.
void gelu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 g = load_n(gate + i, n - i);
    const F32x16 inner = fma(mul(mul(g, g), set1(0.044715f)), g, g);
    const F32x16 power = mul(inner, set1(-1.5957691216057308f));  // -2 sqrt(2 / pi)
    const F32x16 denominator = add(set1(1.0f), exp_f32(power));
    store_n(y + i, mul(div(g, denominator), load_n(up + i, n - i)), n - i);
  }
}

void sigmoid_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for_lanes(n, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 denominator = add(set1(1.0f), exp_f32(sub(zero(), load_n(gate + i, count))));
    store_n(y + i, div(load_n(up + i, count), denominator), count);
  });
}

void rope_head(const float* x, const float* cos_sin, int64_t dim, float* y) {
  const int64_t half = dim / 2;
  for_lanes(half, [&](int64_t i, int64_t count) BITNET_INLINE_LAMBDA {
    const F32x16 a = load_n(x + i, count), b = load_n(x + half + i, count);
    const F32x16 c = load_n(cos_sin + i, count), s = load_n(cos_sin + half + i, count);
    store_n(y + i, sub(mul(a, c), mul(b, s)), count);
    store_n(y + half + i, add(mul(b, c), mul(a, s)), count);
  });
}
