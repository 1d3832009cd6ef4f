// Float rows of every kernel table against float64, within bounds derived from the documented order
// of operations.  u = 2^-24 is half an ulp of 1; gamma(n) = n u / (1 - n u) bounds n roundings in a
// row (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1).  A sum of n
// products in 16 lanes rounds ceil(n / 16) times in its lane, once for each fused multiply-add, and
// 4 times in the tree.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/check.h"
#include "tests/contract.h"
#include "tests/random.h"
#include "tests/row_ops.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

constexpr double kU = 0x1p-24;
constexpr double kExpUlp = 1.0;  // asserted for exp; measured 0.9 (see the printed line)
constexpr double kExpError = 2 * kU * kExpUlp;
constexpr double kExpFloor = 1.7e-38;  // exp of anything below -87 gives e^-87 = 1.646e-38

double gamma(double n) { return n * kU / (1 - n * kU); }
double roundings_of_sum(int64_t n) { return static_cast<double>((n + 15) / 16 + 4); }

double ulp(double x) {
  int exponent;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent, -125) - 24);
}

double largest_share = 0;  // of a bound that an error took, since the last print_share

void check_near(float got, double want, double bound, int64_t i) {
  const double error = std::fabs(static_cast<double>(got) - want);
  CHECK(error <= bound, "[%lld] %.9g, not %.9g +- %.3g", static_cast<long long>(i),
        static_cast<double>(got), want, bound);
  if (bound > 0) largest_share = std::max(largest_share, error / bound);
}

void print_share(const KernelTable& kernels, const char* row) {
  std::printf("%s: %s takes at most %.2f of its bound\n", kernels.name, row, largest_share);
  largest_share = 0;
}

// ---- exp ----------------------------------------------------------------------------------------

// A query of 1 scores keys 0 and x <= 0 with 0 (the maximum) and x; values 0 and 1 then make the
// accumulator exp(x).
std::vector<float> exp_of(const KernelTable& kernels, const std::vector<float>& samples) {
  const float query = 1.0f, values[] = {0.0f, 1.0f};
  float state[attention_state_floats(1)], scratch[attention_scratch_floats(1, 1)];
  std::vector<float> result;
  for (const float x : samples) {
    const float keys[] = {0.0f, x};
    const AttentionChunk chunk = {.query = &query,
                                  .rows = 1,
                                  .dim = 1,
                                  .rows_per_token = 1,
                                  .type = DType::kF32,
                                  .keys = keys,
                                  .values = values,
                                  .stride_bytes = 4,
                                  .positions = 2,
                                  .first_visible = 2,
                                  .scale = 1.0f,
                                  .next = nullptr};
    kernels.attend_chunk(chunk, scratch, state);
    result.push_back(state[0]);
  }
  return result;
}

// Long double where it is wider than double (x86), double elsewhere: both far beyond a float's half
// ulp.
double exact_exp(float x) { return static_cast<double>(std::exp(static_cast<long double>(x))); }

// Every `stride`-th float in [-87, 0], and each float within 2^-12 of a multiple of ln 2 / 2, where
// the range reduction changes over and |r| is largest.
std::vector<float> exp_samples(uint32_t stride) {
  std::vector<float> samples = {0.0f};
  const auto last = std::bit_cast<uint32_t>(-87.0f);
  for (uint32_t b = std::bit_cast<uint32_t>(-0.0f); b <= last; b += stride) {
    samples.push_back(std::bit_cast<float>(b));
  }
  for (int half = 1; half < 251; half += 2) {
    auto x = static_cast<float>(-half * 0.34657359027997264);
    for (int i = 0; i < 64; ++i) x = std::nextafter(x, 0.0f);
    for (int i = 0; i < 128; ++i) samples.push_back(x = std::nextafter(x, -INFINITY));
  }
  return samples;
}

void exp_accuracy(const KernelTable& kernels) {
  begin_case("%s exp", kernels.name);
  const std::vector<float> x = exp_samples(static_cast<uint32_t>(499 * thinning(kernels)));
  const std::vector<float> y = exp_of(kernels, x);
  double worst = 0;
  float worst_x = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double want = exact_exp(x[i]), error = std::fabs(y[i] - want) / ulp(want);
    CHECK(error <= kExpUlp, "exp(%a) = %a is off by %g ulp", x[i], y[i], error);
    if (error > worst) worst = error, worst_x = x[i];
  }
  std::printf("%s: exp on %zu floats of [-87, 0]: largest error %.4f ulp, at %a\n", kernels.name,
              x.size(), worst, worst_x);
  CHECK(y[0] == 1.0f, "exp(0) = %a", y[0]);
  // Below the range: a floor that adds at most e^-87 to a sum whose largest term is 1.
  for (const float below : {-87.5f, -100.0f, -1e4f, -3e38f, -INFINITY}) {
    const float e = exp_of(kernels, {0.0f, below})[1];
    CHECK(e >= 0 && e <= kExpFloor, "exp(%g) = %g", below, e);
  }
}

// ---- elementwise --------------------------------------------------------------------------------

void elementwise(const KernelTable& kernels, Flavour flavour) {
  begin_case("%s elementwise, %s", kernels.name, name_of(flavour));
  constexpr int64_t kN = 4099;
  Random random(11);
  const std::vector<float> a = random_floats(random, flavour, kN),
                           b = random_floats(random, flavour, kN);
  std::vector<float> sum(kN), relu2(kN);
  kernels.add_row(a.data(), b.data(), kN, sum.data());
  kernels.relu2_mul_row(a.data(), b.data(), kN, relu2.data());
  for (std::size_t i = 0; i < kN; ++i) {
    const double x = a[i], y = b[i];
    CHECK(sum[i] == static_cast<float>(x + y), "%a + %a = %a", a[i], b[i], sum[i]);
    const double positive = std::max(x, 0.0);
    const auto square = static_cast<float>(positive * positive);
    CHECK(relu2[i] == static_cast<float>(square * y), "relu(%a)^2 * %a = %a", a[i], b[i], relu2[i]);
  }
}

// g / (1 + e^-g) * up: the error of exp weighs at most fully, then an addition, a division and a
// product. From e^88.376 on (n = 128 in exp_f32) exp gives infinity and silu zero: off by at
// most 88.4 e^-88.376.
void silu(const KernelTable& kernels) {
  begin_case("%s silu_mul_row", kernels.name);
  std::vector<float> gate = {-INFINITY, -3e38f, -1e30f, -1e10f, -89.0f,
                             -88.0f,    87.0f,  1e30f,  3e38f};
  Random random(12);
  const auto count = 400000 / thinning(kernels);
  for (int64_t i = 0; i < count; ++i) gate.push_back(random.unit() * (i % 2 == 0 ? 4.0f : 95.0f));
  std::vector<float> up = random_floats(random, Flavour::kUnit, static_cast<int64_t>(gate.size()));
  std::vector<float> y(gate.size());
  kernels.silu_mul_row(gate.data(), up.data(), static_cast<int64_t>(gate.size()), y.data());
  for (std::size_t i = 1; i < gate.size(); ++i) {
    const double g = gate[i], want = g / (1 + std::exp(-g)) * up[i];
    const double bound = std::fabs(want) * (kExpError + gamma(3)) * (1 + 1e-6);
    check_near(y[i], want, bound + 88.4 * 4.2e-39 * std::fabs(up[i]) + 0x1p-149,
               static_cast<int64_t>(i));
  }
  CHECK(std::isnan(y[0]), "silu(-inf) is -inf / inf, got %g", y[0]);
}

// g / (1 + e^-2t) * up with t = sqrt(2 / pi) (g + 0.044715 g^3): the power is off by 6 roundings of
// its size, which e^power multiplies; where it lies beyond exp_f32's range the result is zero, off
// by at most 14 e^-87, or g.
void gelu(const KernelTable& kernels) {
  begin_case("%s gelu_mul_row", kernels.name);
  std::vector<float> gate = {-3e38f, -1e30f, -1e10f, -20.0f, 0.0f, 20.0f, 1e30f, 3e38f};
  Random random(13);
  const auto count = 400000 / thinning(kernels);
  for (int64_t i = 0; i < count; ++i) gate.push_back(random.unit() * (i % 2 == 0 ? 3.0f : 14.0f));
  std::vector<float> up = random_floats(random, Flavour::kUnit, static_cast<int64_t>(gate.size()));
  std::vector<float> y(gate.size());
  kernels.gelu_mul_row(gate.data(), up.data(), static_cast<int64_t>(gate.size()), y.data());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    const double t = std::sqrt(2.0 / 3.14159265358979323846) * (g + 0.044715 * g * g * g);
    const double want = g == 0 ? 0 : g / (1 + std::exp(-2 * t)) * up[i];
    const double power = std::min(std::fabs(2 * t), 89.0) * gamma(6);
    const double bound = std::fabs(want) * (kExpError + power + gamma(3)) * (1 + 1e-4);
    check_near(y[i], want, bound + 14 * 2e-38 * std::fabs(up[i]) + 0x1p-149,
               static_cast<int64_t>(i));
  }
}

void rope(const KernelTable& kernels) {
  for (const int64_t dim : {2, 30, 64, 128, 130}) {
    begin_case("%s rope_head dim=%d", kernels.name, static_cast<int>(dim));
    Random random(static_cast<uint64_t>(dim));
    const std::vector<float> x = random_floats(random, Flavour::kWide, dim);
    const std::vector<float> table_row = random_floats(random, Flavour::kUnit, dim);
    std::vector<float> y(x.size());
    kernels.rope_head(x.data(), table_row.data(), dim, y.data());
    const auto half = static_cast<std::size_t>(dim / 2);
    for (std::size_t i = 0; i < half; ++i) {
      // Two products and a sum, each rounded once and none of them fused.
      const double a = x[i], b = x[half + i], c = table_row[i], s = table_row[half + i];
      const auto f = [](double v) { return static_cast<double>(static_cast<float>(v)); };
      CHECK(y[i] == static_cast<float>(f(a * c) - f(b * s)), "[%zu] %a", i, y[i]);
      CHECK(y[half + i] == static_cast<float>(f(b * c) + f(a * s)), "[%zu] %a", i, y[half + i]);
    }
  }
}

// float(acc), w * x, their product, the bias: each rounded once.
void scale(const KernelTable& kernels) {
  for (const int64_t step : {0, 1}) {
    begin_case("%s store_block step %d", kernels.name, static_cast<int>(step));
    constexpr int64_t kN = 1003;
    Random random(13);
    std::vector<int32_t> acc(kN);
    for (int32_t& v : acc) v = static_cast<int32_t>(random.next());
    const std::vector<float> w = random_floats(random, Flavour::kUnit, kN);
    const std::vector<float> bias = random_floats(random, Flavour::kHuge, kN);
    const float x_scale = 0.0317f;
    std::vector<float> plain(kN), biased(kN);
    const auto store = [&](const float* bias_or_null, float* y) {
      kernels.store_block({.sums = acc.data(),
                           .sums_stride = 0,
                           .rows = kN,
                           .tokens = 1,
                           .w_scale = w.data(),
                           .w_scale_step = step,
                           .x_scale = &x_scale,
                           .bias = bias_or_null,
                           .kind = StoreKind::kStore,
                           .type = DType::kF32,
                           .out = y,
                           .out_stride_bytes = 0});
    };
    store(nullptr, plain.data());
    store(bias.data(), biased.data());
    for (std::size_t i = 0; i < kN; ++i) {
      const double ws = w[step == 0 ? 0 : i];
      const auto factor = static_cast<float>(ws * static_cast<double>(x_scale));
      const auto sum = static_cast<float>(acc[i]);
      const auto want = static_cast<float>(static_cast<double>(sum) * factor);
      CHECK(plain[i] == want, "[%zu] %a, not %a", i, plain[i], want);
      const auto with_bias = static_cast<float>(static_cast<double>(want) + bias[i]);
      CHECK(biased[i] == with_bias, "[%zu] %a, not %a", i, biased[i], with_bias);
    }
  }
}

// ln(1 + e^x), seen through the decay e^(-rate * softplus), with a rate that makes the product
// about 1: so a relative error of softplus is one of the decay. That of e^-|x| goes over to its
// logarithm; division, sums and the last terms of the series round five times, then comes max(x,
// 0).
void softplus(const KernelTable& kernels) {
  constexpr int64_t kN = 20001;  // from -87, where e^x ends, to 100
  std::vector<float> x, a_log, zeros(kN, 0.0f), decay(kN), beta(kN);
  for (int64_t i = 0; i < kN; ++i) {
    x.push_back(-87.0f + 187.0f * static_cast<float>(i) / (kN - 1));
    const double exact = std::log1p(std::exp(-std::fabs(double{x.back()})));
    a_log.push_back(static_cast<float>(-std::log(std::max(0.0, double{x.back()}) + exact)));
  }
  begin_case("%s delta_gates_row", kernels.name);
  kernels.delta_gates_row(x.data(), x.data(), a_log.data(), zeros.data(), kN, decay.data(),
                          beta.data());
  for (std::size_t i = 0; i < kN; ++i) {
    const double at = x[i], rate = std::exp(double{a_log[i]});
    const double power = rate * (std::max(0.0, at) + std::log1p(std::exp(-std::fabs(at))));
    const double want = std::exp(-power);
    const auto index = static_cast<int64_t>(i);
    check_near(decay[i], want, want * (power * (gamma(7) + 2 * kExpError) + kExpError), index);
    const double gate = 1 / (1 + std::exp(-at));
    check_near(beta[i], gate, gate * (kExpError + gamma(2)), index);
  }
}

// Decays that the formula makes as small as a float can say, or no decay at all.
void extreme_gates(const KernelTable& kernels) {
  begin_case("%s delta_gates_row, extremes", kernels.name);
  const float a[] = {1e30f, -1e30f, 1e30f, 0.0f, 100.0f},
              b[] = {1e30f, -1e30f, 0.0f, 88.0f, -88.0f};
  const float a_log[] = {0.0f, 0.0f, 1e30f, -1e30f, 10.0f},
              dt_bias[] = {0.0f, 0.0f, 0.0f, 0.0f, 5.0f};
  float decay[5], beta[5];
  kernels.delta_gates_row(a, b, a_log, dt_bias, 5, decay, beta);
  const double want[] = {0, 1, 0, 1, 0}, gates[] = {1, 0, 0.5, 1, 0};
  for (std::size_t i = 0; i < 5; ++i) {
    check_near(decay[i], want[i], kExpFloor, static_cast<int64_t>(i));
    check_near(beta[i], gates[i], kExpFloor, static_cast<int64_t>(i));
  }
}

// ---- noise --------------------------------------------------------------------------------------

// The id that the key 0 gives these bits.
int64_t id_of_bits(uint32_t h) {
  const auto unmultiply = [](uint32_t x, uint32_t factor) {
    uint32_t inverse = factor;  // right to 3 bits, and to twice as many with every step
    for (int i = 0; i < 4; ++i) inverse *= 2 - factor * inverse;
    return x * inverse;
  };
  const auto unshift = [](uint32_t x, int by) {
    uint32_t y = x;
    for (int i = by; i < 32; i += by) y = x ^ y >> by;
    return y;
  };
  h = unshift(unmultiply(unshift(h, 14), 0x31848babu), 15);
  return unshift(unmultiply(unshift(unmultiply(h, 0xac4c1b51u), 11), 0xed5ad4bbu), 17);
}

// Logarithms are right within 2e-7 of themselves and a few roundings, and the outer one takes the
// inner one's relative error as its own; then it is rounded.
double noise_error(double noise) { return 7e-7 + 2 * kU * std::fabs(noise); }

void noise(const KernelTable& kernels) {
  begin_case("%s add_noise_row", kernels.name);
  constexpr int64_t kN = 50'001;
  std::vector<float> got(kN), zeros(kN, 0.0f);
  for (const uint64_t key : {uint64_t{0}, uint64_t{0xfedcba9876543210u}}) {
    for (const int64_t first : {int64_t{0}, int64_t{INT32_MAX} - kN}) {
      kernels.add_noise_row(zeros.data(), kN, 1.0f, key, first, -INFINITY, got.data());
      for (int64_t i = 0; i < kN; ++i) {
        const double want = contract::noise_of_bits(contract::noise_bits(key, first + i));
        check_near(got[static_cast<std::size_t>(i)], want, noise_error(want), i);
      }
      for (int64_t i = 0; i < kN; i += 997) {  // wherever a range begins
        float one;
        kernels.add_noise_row(&zeros[0], 1, 1.0f, key, first + i, -INFINITY, &one);
        CHECK(one == got[static_cast<std::size_t>(i)], "another noise of one id");
      }
      std::vector<float> reaching(kN);
      kernels.add_noise_row(zeros.data(), kN, 1.0f, key, first, 5.0f, reaching.data());
      int64_t left_out = 0;
      for (std::size_t i = 0; i < kN; ++i) {
        left_out += reaching[i] != got[i];
        CHECK(reaching[i] == got[i] || (reaching[i] == -INFINITY && got[i] < 5.0f), "%g, not %g",
              static_cast<double>(reaching[i]), static_cast<double>(got[i]));
      }
      CHECK(left_out > kN * 3 / 5, "%lld left out", static_cast<long long>(left_out));
    }
  }
  // Both ends, the middle, and where the inner logarithm changes its form.
  for (const uint32_t middle : {0u, 0x7fffffffu, 0x80000000u, 0xffffffffu, 0x4afb0ccdu}) {
    for (uint32_t bits = middle - 300; bits != middle + 300; ++bits) {
      const int64_t id = id_of_bits(bits);
      CHECK(contract::noise_bits(0, id) == bits, "not the inverse");
      float one;
      kernels.add_noise_row(&zeros[0], 1, 1.0f, 0, id, -INFINITY, &one);
      const double want = contract::noise_of_bits(bits);
      check_near(one, want, noise_error(want), id);
      CHECK(one <= 22.9f, "more than engine/sample.cpp expects");
    }
  }
}

// ---- reductions ---------------------------------------------------------------------------------

constexpr int64_t kLengths[] = {1, 2, 15, 16, 17, 31, 33, 64, 70, 128, 200, 640, 2560, 6912, 14336};

// Relative error of 1 / sqrt(mean + eps): half of that of the mean (a sum of squares, a division,
// the addition of eps), then the root and the reciprocal; two products follow.
void rms_norm(const KernelTable& kernels, Flavour flavour) {
  for (const int64_t n : kLengths) {
    begin_case("%s rms_norm_row n=%d %s", kernels.name, static_cast<int>(n), name_of(flavour));
    Random random(static_cast<uint64_t>(n));
    const std::vector<float> x = random_floats(random, flavour, n);
    const std::vector<float> w = random_floats(random, Flavour::kUnit, n);
    const float eps = 1e-5f;
    double squares = 0;
    for (const float v : x) squares += static_cast<double>(v) * v;
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
    const double relative = gamma(roundings_of_sum(n) + 2) / 2 + gamma(4);
    for (const DType type : {DType::kF32, DType::kBF16}) {
      std::vector<float> y(x.size());
      kernels.rms_norm_row(x.data(), w.data(), n, eps, type, y.data());
      // Rounding to `type`: 8 significant bits for bf16, and an even spacing below 2^-126.
      const bool bf16 = type == DType::kBF16;
      const double stored = bf16 ? 0x1p-8 : 0, floor = bf16 ? 0x1p-134 : 0x1p-150;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double want = x[i] * rstd * w[i];
        check_near(
            y[i], want,
            std::fabs(want) * (relative + stored) * 1.001 + floor * std::fabs(w[i]) + 0x1p-150,
            static_cast<int64_t>(i));
      }
    }
  }
}

// The values of a matrix in `type`, and their bytes.
struct Matrix {
  std::vector<char> stored;
  std::vector<float> value;
  const void* data() const { return stored.data(); }
};
Matrix random_matrix(Random& random, DType type, int64_t count, float size) {
  Matrix m;
  for (int64_t i = 0; i < count; ++i) m.value.push_back(random.unit() * size);
  m.stored.resize(static_cast<std::size_t>(count * element_size(type)));
  scalar_kernels().store_row(type, m.value.data(), count, m.stored.data());
  scalar_kernels().round_row(type, m.value.data(), count);
  return m;
}

void head_dense(const KernelTable& kernels, DType type) {
  for (const int64_t k : kLengths) {
    begin_case("%s head_dense k=%d type=%d", kernels.name, static_cast<int>(k),
               static_cast<int>(type));
    Random random(static_cast<uint64_t>(k));
    const std::vector<float> x = random_floats(random, Flavour::kUnit, k);
    const Matrix m = random_matrix(random, type, 7 * k, 1.0f);
    float out[7];
    kernels.head_dense(x.data(), 1, type, m.data(), k, 0, 7, {64, 64, true}, out, 7);
    for (int64_t row = 0; row < 7; ++row) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double p = static_cast<double>(x[static_cast<std::size_t>(i)]) *
                         m.value[static_cast<std::size_t>(row * k + i)];
        sum += p;
        magnitude += std::fabs(p);
      }
      check_near(out[row], sum, gamma(roundings_of_sum(k)) * magnitude, row);
    }
  }
}

// Rows in tiles give what head_dense gives for them as they lie, times a factor, bit for bit.
void dense_tiles(const KernelTable& kernels, DType type) {
  constexpr int64_t kRows = 37, kPadded = 48, kTokens = 3;
  const int64_t size = element_size(type);
  for (int64_t k = 1; k <= 70; ++k) {
    begin_case("%s dense_tiles k=%d type=%d", kernels.name, static_cast<int>(k),
               static_cast<int>(type));
    Random random(static_cast<uint64_t>(k));
    const std::vector<float> x = random_floats(random, Flavour::kUnit, kTokens * k);
    const Matrix m = random_matrix(random, type, kPadded * k, 1.0f);
    std::vector<uint8_t> tiles(m.stored.size());
    for (int64_t i = 0; i < kPadded * k; ++i) {
      const int64_t n = i / k, j = i % k, to = (n / 16 * k + j) * 16 + n % 16;
      std::memcpy(&tiles[static_cast<std::size_t>(to * size)],
                  &m.stored[static_cast<std::size_t>(i * size)], static_cast<std::size_t>(size));
    }
    float rows[kTokens * kRows], out[kTokens * kRows];
    kernels.head_dense(x.data(), kTokens, type, m.data(), k, 0, kRows, {0, 0}, rows, kRows);
    kernels.dense_tiles(x.data(), kTokens, type, tiles.data(), k, 0.37f, 0, 16, out, kRows);
    kernels.dense_tiles(x.data(), kTokens, type, tiles.data(), k, 0.37f, 16, kRows, out + 16,
                        kRows);
    for (int64_t i = 0; i < kTokens * kRows; ++i) {
      const float want = rows[i] * 0.37f;
      CHECK(std::memcmp(&out[i], &want, sizeof(float)) == 0, "value %d: %a, not %a",
            static_cast<int>(i), static_cast<double>(out[i]), static_cast<double>(want));
    }
  }
}

// Softmax in float64 of one head, and how far the kernel may be from it.
struct Attention {
  std::vector<double> out, bound;
};

// A score is off by its sum's roundings and the product with `scale`, its distance to the maximum
// by one more; a common shift of all scores cancels.  exp turns that into a relative error of the
// numerators, and the weights' sum has it too.  Then `length` multiply-adds, the sum of the
// numerators, one division.  Weights of bfloat16 caches are rounded to 8 bits, the smallest to 0,
// numerators and sum alike.
Attention exact_attention(DType type, const std::vector<float>& q, const Matrix& keys,
                          const Matrix& values, int64_t length, int64_t dim, float scale) {
  const bool pairs = type == DType::kBF16;
  const auto key = [&](const Matrix& m, int64_t j, int64_t i) {
    return static_cast<double>(m.value[static_cast<std::size_t>(j * dim + i)]);
  };
  std::vector<double> score, numerator;
  double best = -INFINITY, score_error = 0;
  for (int64_t j = 0; j < length; ++j) {
    double sum = 0, magnitude = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const double p = q[static_cast<std::size_t>(i)] * key(keys, j, i);
      sum += p;
      magnitude += std::fabs(p);
    }
    score.push_back(sum * scale);
    best = std::max(best, score.back());
    score_error = std::max(score_error, gamma(roundings_of_sum(dim) + 1) * magnitude * scale);
  }
  double total = 0, deepest = 0;
  for (const double s : score) {
    numerator.push_back(std::exp(s - best));
    total += numerator.back();
    deepest = std::max(deepest, best - s);
  }
  // A merge multiplies both sides with an exp of a difference of maxima; those add up to `deepest`.
  const double merges = std::ceil(static_cast<double>(length) / kAttentionChunk) - 1;
  const double eta = std::expm1(score_error + 2 * kU * (deepest + 2 * score_error)) +
                     (1 + merges) * (kExpError + 2 * kU) + (pairs ? 0x1p-8 : 0.0);
  const double l = static_cast<double>(length);
  const double relative = 2 * eta + gamma(l) + gamma(roundings_of_sum(length)) + 2 * kU;
  Attention result;
  for (int64_t i = 0; i < dim; ++i) {
    double sum = 0, magnitude = 0, largest = 0;
    for (int64_t j = 0; j < length; ++j) {
      const double v = key(values, j, i);
      sum += numerator[static_cast<std::size_t>(j)] * v;
      magnitude += numerator[static_cast<std::size_t>(j)] * std::fabs(v);
      largest = std::max(largest, std::fabs(v));
    }
    result.out.push_back(sum / total);
    result.bound.push_back(relative * 1.01 * magnitude / total +
                           4 * l * (pairs ? kMinCached : kExpFloor) * largest);
  }
  return result;
}

// Chunk after chunk, as a caller runs them.
std::vector<float> attend(const KernelTable& kernels, DType type, const std::vector<float>& q,
                          const Matrix& keys, const Matrix& values, int64_t length, float scale) {
  const auto dim = static_cast<int64_t>(q.size()), row_bytes = dim * element_size(type);
  const auto floats = static_cast<std::size_t>(attention_state_floats(dim));
  std::vector<float> state(floats), later(floats), out(q.size());
  std::vector<float> scratch(static_cast<std::size_t>(attention_scratch_floats(1, dim)));
  for (int64_t begin = 0; begin < length; begin += kAttentionChunk) {
    const auto at = [&](const Matrix& m) {
      return static_cast<const char*>(m.data()) + begin * row_bytes;
    };
    const int64_t positions = std::min(kAttentionChunk, length - begin);
    const AttentionChunk chunk = {.query = q.data(),
                                  .rows = 1,
                                  .dim = dim,
                                  .rows_per_token = 1,
                                  .type = type,
                                  .keys = at(keys),
                                  .values = at(values),
                                  .stride_bytes = row_bytes,
                                  .positions = positions,
                                  .first_visible = positions,
                                  .scale = scale,
                                  .next = nullptr};
    kernels.attend_chunk(chunk, scratch.data(), begin == 0 ? state.data() : later.data());
    if (begin > 0) kernels.merge_attention(1, dim, later.data(), state.data());
  }
  kernels.finish_attention(dim, state.data(), out.data());
  return out;
}

void attention(const KernelTable& kernels, DType type) {
  for (const int64_t dim : {1, 16, 30, 64, 80, 128}) {
    for (const int64_t length : {1, 2, 15, 16, 17, 70, 500}) {
      for (const float spread : {0.5f, 4.0f, 40.0f}) {  // flat to one-hot, past the range of exp
        begin_case("%s attention type=%d dim=%d length=%d spread=%g", kernels.name,
                   static_cast<int>(type), static_cast<int>(dim), static_cast<int>(length), spread);
        Random random(static_cast<uint64_t>(dim * 1000 + length));
        std::vector<float> q = random_floats(random, Flavour::kUnit, dim);
        if (type == DType::kBF16) kernels.round_row(type, q.data(), dim);  // as it wants queries
        const Matrix keys = random_matrix(random, type, length * dim, spread);
        const Matrix values = random_matrix(random, type, length * dim, 1.0f);
        const float scale = 0.9f;
        const std::vector<float> out = attend(kernels, type, q, keys, values, length, scale);
        const Attention want = exact_attention(type, q, keys, values, length, dim, scale);
        for (std::size_t i = 0; i < out.size(); ++i) {
          check_near(out[i], want.out[i], want.bound[i], static_cast<int64_t>(i));
        }
      }
    }
  }
}

TEST(exp_accuracy) { on_every_table(exp_accuracy); }
TEST(rope) { on_every_table(rope); }
TEST(scale) { on_every_table(scale); }

constexpr Flavour kBoundedFlavours[] = {Flavour::kUnit, Flavour::kWide, Flavour::kTiny,
                                        Flavour::kTies};

TEST(elementwise) {
  for (const KernelTable* kernels : tables_under_test()) {
    for (const Flavour flavour : kBoundedFlavours) elementwise(*kernels, flavour);
  }
}

TEST(rms_norm) {
  for (const KernelTable* kernels : tables_under_test()) {
    for (const Flavour flavour : kBoundedFlavours) rms_norm(*kernels, flavour);
    print_share(*kernels, "rms_norm_row");
  }
}

TEST(gated) {
  for (const KernelTable* kernels : tables_under_test()) {
    silu(*kernels);
    print_share(*kernels, "silu_mul_row");
    gelu(*kernels);
    print_share(*kernels, "gelu_mul_row");
  }
}

TEST(noise) {
  for (const KernelTable* kernels : tables_under_test()) {
    noise(*kernels);
    print_share(*kernels, "add_noise_row");
  }
}

TEST(gates) {
  for (const KernelTable* kernels : tables_under_test()) {
    softplus(*kernels);
    print_share(*kernels, "delta_gates_row");
    extreme_gates(*kernels);
  }
}

TEST(head) {
  for (const KernelTable* kernels : tables_under_test()) {
    for (const DType type : kTypes) head_dense(*kernels, type);
    print_share(*kernels, "head_dense");
    for (const DType type : kTypes) dense_tiles(*kernels, type);
  }
}

TEST(attention) {
  for (const KernelTable* kernels : tables_under_test()) {
    for (const DType type : kCacheTypes) attention(*kernels, type);
    print_share(*kernels, "attention");
  }
}

}  // namespace
}  // namespace bitnet::test
