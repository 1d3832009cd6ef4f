// The float rows of the kernel table once more, written down from the words of kernel_table.h in
// plain C++: one element after the other, no vectors, no code of the kernels. exp is libm's, in
// doubles; the rest has the bits that the contract asks for.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/small_floats.h"

namespace bitnet::test {
namespace contract {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- sums, exp ----------------------------------------------------------------------------------

template <class T>
struct LaneSum {
  std::array<T, 16> lane{};

  // fma(a(i), b(i), lane) for i < n, zeros up to whole lanes.
  template <class A, class B>
  void multiply(int64_t n, A a, B b) {
    for (int64_t i = 0; i < (n + 15) / 16 * 16; ++i) {
      T& at = lane[static_cast<std::size_t>(i % 16)];
      at = i < n ? std::fma(a(i), b(i), at) : std::fma(T{0}, T{0}, at);
    }
  }
  template <class A>
  void add(int64_t n, A a) {
    for (int64_t i = 0; i < (n + 15) / 16 * 16; ++i)
      lane[static_cast<std::size_t>(i % 16)] += i < n ? a(i) : T{0};
  }
  T total() {
    for (std::size_t apart = 8; apart > 0; apart /= 2) {
      for (std::size_t i = 0; i < apart; ++i) lane[i] = lane[i] + lane[i + apart];
    }
    return lane[0];
  }
};

// From -87 down e^-87, above 88.37 infinity.
inline float exp_of(float x) {
  if (std::isnan(x)) return x;
  return x > 88.37f ? kInfinity
                    : static_cast<float>(std::exp(std::max(static_cast<double>(x), -87.0)));
}

// ---- types --------------------------------------------------------------------------------------

inline const Format& format_of(DType type) {
  const auto* found = std::ranges::find(kFormats, type, &Format::type);
  if (found == std::end(kFormats)) std::abort();  // an op whose name lacks the type of its rows
  return *found;
}

inline uint16_t encode(DType type, float x) {
  const Format& format = format_of(type);
  if (!std::isnan(x)) return format.nearest(x);
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = std::signbit(x) ? 1 : 0;
  if (type == DType::kBF16) return 0x7fc0;
  if (type == DType::kF16) return static_cast<uint16_t>(sign << 15 | 0x7e00 | (bits >> 13 & 0x1ff));
  return static_cast<uint16_t>(sign << 7 | 0x7f);
}

inline float value_of(DType type, int code) {
  const Format& format = format_of(type);
  const int magnitude = code & (format.sign() - 1);
  const bool finite = magnitude < format.codes();
  const float x = finite ? static_cast<float>(format.value(magnitude))
                  : format.infinite && magnitude == format.codes() ? kInfinity
                                                                   : kNan;
  return code & format.sign() ? -x : x;
}

inline float decode(DType type, const void* data, int64_t i) {
  if (type == DType::kF32) return static_cast<const float*>(data)[i];
  if (type == DType::kInt8) return static_cast<const int8_t*>(data)[i];
  return value_of(type, format_of(type).width == 16 ? static_cast<const uint16_t*>(data)[i]
                                                    : static_cast<const uint8_t*>(data)[i]);
}

inline float rounded(DType type, float x) {
  return type == DType::kF32 || std::isnan(x) ? x : value_of(type, encode(type, x));
}

inline void store(DType type, void* data, int64_t i, float x) {
  if (type == DType::kF32) {
    static_cast<float*>(data)[i] = x;
  } else if (format_of(type).width == 16) {
    static_cast<uint16_t*>(data)[i] = encode(type, x);
  } else {
    static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(encode(type, x));
  }
}

// -0 becomes 0, too.
inline float cached(DType type, float x) {
  return type == DType::kBF16 && std::fabs(rounded(type, x)) < kMinCached ? 0.0f : x;
}

// ---- quantisation -------------------------------------------------------------------------------

// NaN where x holds NaN or an infinity.
inline float absmax(const float* x, int64_t n) {
  float max = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) return kNan;
    max = std::max(max, std::fabs(x[i]));
  }
  return max;
}

inline int code(float x, int low, int high) {
  return static_cast<int>(
      std::clamp(round_half_even(static_cast<double>(x)), double(low), double(high)));
}

inline float quantize_row(const float* x, int64_t n, int64_t n_padded, int8_t* q,
                          int64_t step_stride, int32_t* sum) {
  const float max = absmax(x, n), s = 127.0f * (1.0f / std::max(max, 1e-5f));
  *sum = 0;
  for (int64_t i = 0; i < n_padded; ++i) {
    const int v = std::isnan(max) || i >= n ? 0 : code(x[i] * s, -128, 127);
    q[i / 64 * step_stride + i % 64] = static_cast<int8_t>(v);
    *sum += v;
  }
  return std::isnan(max) ? kNan : 1.0f / s;
}

inline float quantize_query(const float* x, int64_t n, int64_t n_padded, int16_t* wide) {
  const float max = absmax(x, n), a = std::max(max, 1e-30f);
  for (int64_t i = 0; i < n_padded; ++i) {
    wide[i] = 0;
    if (i < n && !std::isnan(max))
      wide[i] = static_cast<int16_t>(code(x[i] * (32512.0f / a), -32768, 32767));
  }
  return std::isnan(max) ? kNan : a / 32512.0f;
}

inline float head_quantize_token(const float* x, int64_t n, int64_t n_padded, int16_t* wide,
                                 int8_t* high, int8_t* low, int32_t* sums) {
  const float factor = quantize_query(x, n, n_padded, wide);
  for (int64_t i = 0; i < n_padded; ++i) {
    const int upper = static_cast<int>(std::floor((wide[i] + 128) / 256.0));
    high[i] = static_cast<int8_t>(upper);
    low[i] = static_cast<int8_t>(wide[i] - 256 * upper);
    sums[i / 64] = (i % 64 == 0 ? 0 : sums[i / 64]) + wide[i];
  }
  return factor;
}

inline float head_quantize_int8(const float* w, int64_t n, int8_t* q) {
  const float max = absmax(w, n), a = std::max(max, 1e-30f);
  for (int64_t i = 0; i < n; ++i)
    q[i] = static_cast<int8_t>(std::isnan(max) ? 0 : code(w[i] * (127.0f / a), -128, 127));
  return std::isnan(max) ? kNan : a / 127.0f;
}

// The scale of a group is a / 7, rounded to bfloat16 before the codes are made: 1 / 7 if poisoned.
inline float head_quantize_int4(const float* w, int64_t n, int64_t group, uint8_t* codes,
                                uint16_t* scale) {
  float result = 0;
  for (int64_t from = 0; from < n; from += group) {
    const float max = absmax(w + from, std::min(group, n - from));
    const bool bad = std::isnan(max);
    if (bad) result = kNan;
    store(DType::kBF16, scale, from / group, (bad ? 1.0f : std::max(max, 1e-30f)) / 7.0f);
    const float inverse = 1.0f / decode(DType::kBF16, scale, from / group);
    for (int64_t i = from; i < from + group; ++i) {
      const int v = bad || i >= n ? 0 : code(w[i] * inverse, -8, 7);
      codes[i] = static_cast<uint8_t>(v + 8);
    }
  }
  return result;
}

// ---- rows ---------------------------------------------------------------------------------------

inline void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, DType type,
                         float* y) {
  LaneSum<float> squares;
  squares.multiply(n, [&](int64_t i) { return x[i]; }, [&](int64_t i) { return x[i]; });
  const float rstd = 1.0f / std::sqrt(squares.total() / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) y[i] = rounded(type, x[i] * rstd) * weight[i];
}

inline void relu2_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gate[i] < 0 ? 0.0f : gate[i];  // a NaN stays
    y[i] = g * g * up[i];
  }
}

inline float norm_quantize_row(const NormJob& job, int64_t n_padded, int8_t* q, int64_t step_stride,
                               int32_t* sum) {
  const auto round = [&] {
    for (int64_t i = 0; i < job.n; ++i) job.y[i] = rounded(job.type, job.y[i]);
  };
  if (job.gate == nullptr) {
    std::copy_n(job.x, job.n, job.y);
  } else {
    for (int64_t i = 0; i < job.n; ++i) {
      const float gate = decode(job.type, job.gate, i), up = decode(job.type, job.up, i);
      relu2_mul_row(&gate, &up, 1, job.y + i);
    }
  }
  round();
  if (job.weight != nullptr) rms_norm_row(job.y, job.weight, job.n, job.eps, job.type, job.y);
  round();
  return quantize_row(job.y, job.n, n_padded, q, step_stride, sum);
}

inline void store_block(const EpilogueJob& job) {
  for (int64_t m = 0; m < job.tokens; ++m) {
    void* out = static_cast<char*>(job.out) + m * job.out_stride_bytes;
    for (int64_t i = 0; i < job.rows; ++i) {
      const int32_t sum = job.sums[m * job.sums_stride + i];
      if (job.kind == StoreKind::kSums) {
        static_cast<int32_t*>(out)[i] = sum;
        continue;
      }
      float y = static_cast<float>(sum) * (job.w_scale[i * job.w_scale_step] * job.x_scale[m]);
      if (job.bias != nullptr) y = y + job.bias[i];
      float* as_floats = static_cast<float*>(out) + i;
      if (job.kind == StoreKind::kStore) store(job.type, out, i, y);
      if (job.kind == StoreKind::kRound) *as_floats = rounded(job.type, y);
      if (job.kind == StoreKind::kAdd) *as_floats = *as_floats + rounded(job.type, y);
    }
  }
}

inline void silu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
}
inline void gelu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gate[i], t = 0.7978845608028654f * (g + 0.044715f * (g * g) * g);
    y[i] = g / (1.0f + exp_of(-2.0f * t)) * up[i];
  }
}
inline void sigmoid_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = up[i] / (1.0f + exp_of(-gate[i]));
}
inline void hadamard_row(const float* x, const float* signs, int64_t n, int64_t block,
                         bool signs_last, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = signs_last ? x[i] : x[i] * signs[i];
  for (int64_t apart = 1; apart < block; apart *= 2) {
    for (int64_t i = 0; i < n; ++i) {
      if (i / apart % 2 != 0) continue;
      const float a = y[i], b = y[i + apart];
      y[i] = a + b;
      y[i + apart] = a - b;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    y[i] = y[i] * (1.0f / std::sqrt(static_cast<float>(block)));
    if (signs_last) y[i] = y[i] * signs[i];
  }
}
inline void rope_head(const float* x, const float* cos_sin, int64_t dim, float* y) {
  for (int64_t i = 0, j = dim / 2; j < dim; ++i, ++j) {
    y[i] = x[i] * cos_sin[i] - x[j] * cos_sin[j];
    y[j] = x[j] * cos_sin[i] + x[i] * cos_sin[j];
  }
}

// ---- attention, without the order of its sums ---------------------------------------------------

inline std::vector<double> rows_of(const AttentionChunk& c, const void* rows) {
  std::vector<double> values;
  for (int64_t j = 0; j < c.positions; ++j) {
    for (int64_t i = 0; i < c.dim; ++i)
      values.push_back(decode(c.type, static_cast<const char*>(rows) + j * c.stride_bytes, i));
  }
  return values;
}

inline void attend_chunk(const AttentionChunk& c, float*, float* states) {
  const bool int8 = c.type == DType::kInt8, pairs = c.type == DType::kBF16;
  const std::vector<double> keys = rows_of(c, c.keys), values = rows_of(c, c.values);
  const auto at = [&](int64_t j, int64_t i) { return static_cast<std::size_t>(j * c.dim + i); };
  for (int64_t r = 0; r < c.rows; ++r, states += attention_state_floats(c.dim)) {
    const int64_t token = r / c.rows_per_token;
    const int64_t begin = std::max<int64_t>(0, c.first_hidden + token);
    const int64_t end = std::min(c.positions, c.first_visible + token);
    std::vector<double> weight;
    float top = -kInfinity;
    for (int64_t j = begin; j < end; ++j) {
      double dot = 0;
      for (int64_t i = 0; i < c.dim; ++i) {
        const float q = int8 ? c.int8.query[r * wide_padded(c.dim) + i] : c.query[r * c.dim + i];
        dot += keys[at(j, i)] * static_cast<double>(q);
      }
      auto score = c.scale * static_cast<float>(dot);
      if (int8)
        score = static_cast<float>(dot) * (c.int8.query_scale[r] * c.scale * c.int8.key_scale[j]);
      weight.push_back(score);
      top = score > top ? score : top;
    }
    double sum = 0, largest = 0;
    for (int64_t j = begin; j < end; ++j) {
      double& w = weight[static_cast<std::size_t>(j - begin)];
      // a chunk of nothing but -inf weighs nothing
      w = top == -kInfinity && !std::isnan(w) ? 0.0 : double{exp_of(static_cast<float>(w) - top)};
      if (pairs) w = cached(DType::kBF16, rounded(DType::kBF16, static_cast<float>(w)));
      sum += w;
      if (int8) w = static_cast<float>(w) * c.int8.value_scale[j];
      largest = std::isfinite(w) ? std::max(largest, std::fabs(w)) : double{kNan};  // NaN stays
    }
    // int8: weights of 16 bits, in units of the largest
    const float unit = std::max(static_cast<float>(largest), 1e-30f);
    for (double& w : weight) {
      if (int8)
        w = std::isfinite(largest) ? code(static_cast<float>(w) * (32512.0f / unit), -32768, 32767)
                                   : double{kNan};
    }
    std::fill_n(states, attention_state_floats(c.dim), 0.0f);
    for (int64_t i = 0; i < c.dim; ++i) {
      double acc = 0;
      for (int64_t j = begin; j < end; ++j)
        acc += weight[static_cast<std::size_t>(j - begin)] * values[at(j, i)];
      states[i] = static_cast<float>(acc) * (int8 ? unit / 32512.0f : 1.0f);
    }
    states[attention_padded(c.dim)] = top;
    states[attention_padded(c.dim) + 1] = static_cast<float>(sum);
  }
}

inline void merge_attention(int64_t rows, int64_t dim, const float* later, float* states) {
  const int64_t padded = attention_padded(dim), stride = attention_state_floats(dim);
  for (int64_t r = 0; r < rows; ++r, later += stride, states += stride) {
    const float before = states[padded], now = later[padded];
    const float top = before > now ? before : now;
    const bool nothing = top == -kInfinity;
    const float a = exp_of(nothing ? before : before - top), b = exp_of(nothing ? now : now - top);
    for (int64_t i = 0; i < padded; ++i) states[i] = std::fma(later[i], b, states[i] * a);
    states[padded] = top;
    states[padded + 1] = std::fma(later[padded + 1], b, states[padded + 1] * a);
  }
}

// ---- Gated DeltaNet -----------------------------------------------------------------------------

inline void conv_silu_row(const float* const* x, int64_t taps, const float* weight, int64_t stride,
                          int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = x[0][i] * weight[i];
    for (int64_t j = 1; j < taps; ++j) sum = std::fma(x[j][i], weight[j * stride + i], sum);
    y[i] = sum / (1.0f + exp_of(-sum));
  }
}

inline void delta_gates_row(const float* a, const float* b, const float* a_log,
                            const float* dt_bias, int64_t n, float* decay, float* beta) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = a[i] + dt_bias[i];
    const double softplus =
        std::isnan(x) ? double{x} : std::max(x, 0.0f) + std::log1p(double{exp_of(-std::fabs(x))});
    decay[i] = exp_of(-exp_of(a_log[i]) * static_cast<float>(softplus));
    beta[i] = 1.0f / (1.0f + exp_of(-b[i]));
  }
}

inline void delta_replay(const float* k, const float* errors, float decay, int64_t key_dim,
                         float* state) {
  for (int64_t i = 0; i < key_dim * kStateColumns; ++i)
    state[i] = std::fma(k[i / kStateColumns], errors[i % kStateColumns], decay * state[i]);
}

inline void delta_rule(const DeltaJob& job) {
  for (int64_t t = 0; t < job.tokens; ++t) {
    const auto read = [&](const float* row, int64_t column) {
      float sum = 0;
      for (int64_t i = 0; i < job.key_dim; ++i)
        sum = std::fma(row[i], job.state[i * kStateColumns + column], sum);
      return sum;
    };
    const float *q = job.q + t * job.row_stride, *k = job.k + t * job.row_stride;
    const float decay = job.decay[t * job.gate_stride], beta = job.beta[t * job.gate_stride];
    float errors[kStateColumns];
    for (int64_t c = 0; c < kStateColumns; ++c) {
      errors[c] = beta * (job.v[t * job.row_stride + c] - decay * read(k, c));
      if (job.errors != nullptr) job.errors[t * job.error_stride + c] = errors[c];
    }
    delta_replay(k, errors, decay, job.key_dim, job.state);
    for (int64_t c = 0; c < kStateColumns; ++c) job.out[t * job.out_stride + c] = read(q, c);
  }
}

// ---- heads --------------------------------------------------------------------------------------

inline void head_dense(const float* x, int64_t tokens, DType type, const void* weight, int64_t k,
                       int64_t row_begin, int64_t row_end, Prefetch, float* out,
                       int64_t out_stride) {
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = row_begin; n < row_end; ++n) {
      LaneSum<float> sum;
      sum.multiply(
          k, [&](int64_t i) { return x[m * k + i]; },
          [&](int64_t i) { return decode(type, weight, n * k + i); });
      out[m * out_stride + n - row_begin] = sum.total();
    }
  }
}

inline void score_rows(const float* x, int64_t tokens, const void* const* rows, int64_t count,
                       int64_t k, float* out, int64_t out_stride) {
  for (int64_t n = 0; n < count; ++n) {
    head_dense(x, tokens, DType::kBF16, rows[n], k, 0, 1, {0, 0}, out + n, out_stride);
  }
}

inline void dense_tiles(const float* x, int64_t tokens, DType type, const void* tiles, int64_t rank,
                        float scale, int64_t row_begin, int64_t row_end, float* out,
                        int64_t out_stride) {
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = row_begin; n < row_end; ++n) {
      LaneSum<float> sum;
      sum.multiply(
          rank, [&](int64_t j) { return x[m * rank + j]; },
          [&](int64_t j) { return decode(type, tiles, (n / 16 * rank + j) * 16 + n % 16); });
      out[m * out_stride + n - row_begin] = sum.total() * scale;
    }
  }
}

// ---- sampling -----------------------------------------------------------------------------------

inline float max_row(const float* x, int64_t n) {
  float top = -kInfinity;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return kNan;
    top = x[i] > top ? x[i] : top;
  }
  return top;
}

inline double exp_row(const float* x, int64_t n, float top, float inv_temperature, float* w) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = (x[i] - top) * inv_temperature;
    w[i] = v > -87.0f ? exp_of(v) : 0.0f;
  }
  LaneSum<double> sum;
  sum.add(n, [&](int64_t i) { return double{w[i]}; });
  return sum.total();
}

inline Split split_row(const float* v, int64_t n, float scale, float low, float high, bool sum,
                       float* values) {
  Split split = {0, 0, 0.0};
  LaneSum<double> sums;
  sums.add(n, [&](int64_t i) { return v[i] * scale > high ? double{v[i] * scale} : 0.0; });
  if (sum) split.sum_above = sums.total();
  for (int64_t i = 0; i < n; ++i) {
    const float x = v[i] * scale;
    if (!sum && x > high) ++split.above;
    if (values != nullptr && low <= x && x <= high) values[split.between++] = x;
  }
  return split;
}

inline int64_t find_row(const float* v, int64_t n, float scale, float low, float high,
                        int32_t* ids) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (low <= v[i] * scale && v[i] * scale <= high) ids[found++] = static_cast<int32_t>(i);
  }
  return found;
}

// 32 random bits of an id, and Gumbel noise of such bits.
inline uint32_t noise_bits(uint64_t key, int64_t id) {
  uint32_t h = static_cast<uint32_t>(id) ^ static_cast<uint32_t>(key);
  h = (h ^ h >> 17) * 0xed5ad4bbu;
  h = (h ^ h >> 11) + static_cast<uint32_t>(key >> 32);
  h = h * 0xac4c1b51u;
  h = (h ^ h >> 15) * 0x31848babu;
  return h ^ h >> 14;
}
inline double noise_of_bits(uint32_t bits) {
  const auto number = static_cast<int32_t>(bits);
  const double tail = (static_cast<double>(number < 0 ? ~number : number) + 0.5) * 0x1p-32;
  return -std::log(number < 0 ? -std::log(tail) : -std::log1p(-tail));
}

inline void add_noise_row(const float* x, int64_t n, float temperature, uint64_t key, int64_t first,
                          float /*threshold*/, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const double noise = noise_of_bits(noise_bits(key, first + i));
    out[i] = static_cast<float>(double{temperature} * noise + double{x[i]});
  }
}

// A table of these; rows that are not float rows are null.
inline KernelTable table() {
  KernelTable t = {};
  t.name = "contract";
  t.quantize_row = quantize_row;
  t.store_block = store_block;
  t.load_row = [](DType type, const void* src, int64_t n, float* dst) {
    for (int64_t i = 0; i < n; ++i) dst[i] = decode(type, src, i);
  };
  t.store_row = [](DType type, const float* src, int64_t n, void* dst) {
    for (int64_t i = 0; i < n; ++i) store(type, dst, i, src[i]);
  };
  t.round_row = [](DType type, float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = rounded(type, x[i]);
  };
  t.store_cache_row = [](DType type, const float* src, int64_t n, void* dst) {
    for (int64_t i = 0; i < n; ++i) store(type, dst, i, cached(type, src[i]));
  };
  t.rms_norm_row = rms_norm_row;
  t.norm_quantize_row = norm_quantize_row;
  t.add_row = [](const float* a, const float* b, int64_t n, float* y) {
    for (int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
  };
  t.relu2_mul_row = relu2_mul_row;
  t.silu_mul_row = silu_mul_row;
  t.gelu_mul_row = gelu_mul_row;
  t.sigmoid_mul_row = sigmoid_mul_row;
  t.hadamard_row = hadamard_row;
  t.conv_silu_row = conv_silu_row;
  t.delta_gates_row = delta_gates_row;
  t.delta_rule = delta_rule;
  t.delta_replay = delta_replay;
  t.rope_head = rope_head;
  t.attend_chunk = attend_chunk;
  t.quantize_query = quantize_query;
  t.merge_attention = merge_attention;
  t.finish_attention = [](int64_t dim, const float* state, float* out) {
    for (int64_t i = 0; i < dim; ++i) out[i] = state[i] / state[attention_padded(dim) + 1];
  };
  t.head_dense = head_dense;
  t.score_rows = score_rows;
  t.dense_tiles = dense_tiles;
  t.head_quantize_token = head_quantize_token;
  t.head_quantize_int8 = head_quantize_int8;
  t.head_quantize_int4 = head_quantize_int4;
  t.max_row = max_row;
  t.exp_row = exp_row;
  t.split_row = split_row;
  t.find_row = find_row;
  t.add_noise_row = add_noise_row;
  return t;
}

}  // namespace contract
}  // namespace bitnet::test
