// Attention over int8 caches against softmax in float64 of the dequantised keys and values, within
// a bound derived from the definition (kernel_table.h); its extremes, where every sum is at its
// limit; and that a row's result does not depend on the rows beside it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/check.h"
#include "tests/panels.h"
#include "tests/random.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

constexpr double kU = 0x1p-24;
constexpr double kExpError = 2 * kU, kExpFloor = 1.7e-38;  // as test_kernels_accuracy measures them
// Half a step of 16 bits, and what the factor's two roundings add to it: 32512 * 2 u < 0.004.
constexpr double kHalfStep = 0.504 / 32512;

double gamma(double n) { return n * kU / (1 - n * kU); }

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// Keys or values of one head, [length, dim].
struct Cache {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  int64_t dim;

  double code(int64_t j, int64_t i) const { return codes[at(j * dim + i)]; }
  double value(int64_t j, int64_t i) const { return code(j, i) * scales[at(j)]; }
};

Cache random_cache(Random& random, int64_t length, int64_t dim, float size) {
  Cache cache{{}, {}, dim};
  for (int64_t j = 0; j < length; ++j) {
    const std::vector<float> row = random_floats(random, Flavour::kUnit, dim);
    std::vector<int8_t> codes(row.size());
    const float scale = scalar_kernels().head_quantize_int8(row.data(), dim, codes.data());
    cache.codes.insert(cache.codes.end(), codes.begin(), codes.end());
    cache.scales.push_back(scale * size * (0.1f + std::fabs(random.unit())));
  }
  return cache;
}

struct Attended {
  std::vector<float> states;  // of all rows, merged over the chunks
  int64_t dim;

  const float* row(int64_t r) const { return &states[at(r * attention_state_floats(dim))]; }
  std::vector<float> out(const KernelTable& kernels, int64_t r) const {
    std::vector<float> y(at(dim));
    kernels.finish_attention(dim, row(r), y.data());
    return y;
  }
};

// `rows` query rows over all positions, chunk after chunk.
Attended attend(const KernelTable& kernels, const std::vector<float>& query, int64_t rows,
                const Cache& keys, const Cache& values, float scale) {
  const int64_t dim = keys.dim, padded = wide_padded(dim);
  const auto length = static_cast<int64_t>(keys.scales.size());
  std::vector<int16_t> wide(at(rows * padded));
  std::vector<float> factors;
  for (int64_t r = 0; r < rows; ++r) {
    factors.push_back(
        kernels.quantize_query(&query[at(r * dim)], dim, padded, &wide[at(r * padded)]));
  }
  Attended result{std::vector<float>(at(rows * attention_state_floats(dim))), dim};
  std::vector<float> later(result.states.size());
  std::vector<float> scratch(at(attention_scratch_floats(rows, dim)));
  for (int64_t begin = 0; begin < length; begin += kAttentionChunk) {
    const int64_t positions = std::min(kAttentionChunk, length - begin);
    const AttentionChunk chunk = {
        .query = nullptr,
        .rows = rows,
        .dim = dim,
        .rows_per_token = rows,
        .type = DType::kInt8,
        .keys = &keys.codes[at(begin * dim)],
        .values = &values.codes[at(begin * dim)],
        .stride_bytes = dim,
        .positions = positions,
        .first_visible = positions,
        .scale = scale,
        .next = nullptr,
        .int8 = {wide.data(), factors.data(), &keys.scales[at(begin)], &values.scales[at(begin)]}};
    kernels.attend_chunk(chunk, scratch.data(), (begin == 0 ? result.states : later).data());
    const std::vector<float>& states = begin == 0 ? result.states : later;
    CHECK(equal_in_panels<int8_t>(kernels, chunk, 77, scratch, states.data()),
          "%d positions in panels give other states than in rows", static_cast<int>(positions));
    AttentionChunk causal = chunk;  // rows that see one position more each
    causal.rows_per_token = 1;
    causal.first_visible = std::max<int64_t>(1, positions - rows / 2);
    std::vector<float> seen(states.size());
    kernels.attend_chunk(causal, scratch.data(), seen.data());
    CHECK(equal_in_panels<int8_t>(kernels, causal, 77, scratch, seen.data()),
          "%d positions in panels give other causal states", static_cast<int>(positions));
    AttentionChunk windowed = causal;  // and whose first ones do not see the first ones
    windowed.first_hidden = std::min({positions / 2, windowed.first_visible - 1, positions - rows});
    kernels.attend_chunk(windowed, scratch.data(), seen.data());
    CHECK(equal_in_panels<int8_t>(kernels, windowed, 77, scratch, seen.data()),
          "%d positions in panels give other states in a window", static_cast<int>(positions));
    if (begin > 0) kernels.merge_attention(rows, dim, later.data(), result.states.data());
  }
  return result;
}

// ---- accuracy -----------------------------------------------------------------------------------

struct Exact {
  std::vector<double> out, bound;
};

// What 16 bits lose of the weights of element i: half a step of each chunk's largest product of
// weight and scale, for every position of the chunk.
double lost_weights(const std::vector<double>& numerator, const Cache& values, int64_t i) {
  const auto length = static_cast<int64_t>(numerator.size());
  double lost = 0;
  for (int64_t begin = 0; begin < length; begin += kAttentionChunk) {
    double largest = 0, codes = 0;
    for (int64_t j = begin; j < std::min(begin + kAttentionChunk, length); ++j) {
      largest = std::max(largest, numerator[at(j)] * values.scales[at(j)]);
      codes += std::fabs(values.code(j, i));
    }
    lost += kHalfStep * largest * codes;
  }
  return lost;
}

// A score is off by half a step of the query for every element of the key, by the factor's
// rounding, float(dot), two products of factors and the product with them.  From there on as in
// test_kernels_accuracy, with lost_weights and five more roundings (two products, float(sum), the
// factor and the product with it) instead of `length` multiply-adds.
Exact exact_attention(const std::vector<float>& q, const Cache& keys, const Cache& values,
                      float scale) {
  const auto length = static_cast<int64_t>(keys.scales.size());
  const int64_t dim = keys.dim;
  double absmax = 0, best = -INFINITY, score_error = 0, total = 0, deepest = 0;
  for (const float x : q) absmax = std::max(absmax, std::fabs(static_cast<double>(x)));
  std::vector<double> score, numerator;
  for (int64_t j = 0; j < length; ++j) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < dim; ++i) {
      sum += q[at(i)] * keys.value(j, i);
      size += std::fabs(keys.value(j, i));
    }
    const double half_steps = kHalfStep * absmax * size * scale;
    score.push_back(sum * scale);
    best = std::max(best, score.back());
    score_error =
        std::max(score_error, half_steps + gamma(6) * (std::fabs(score.back()) + half_steps));
  }
  for (const double s : score) {
    numerator.push_back(std::exp(s - best));
    total += numerator.back();
    deepest = std::max(deepest, best - s);
  }
  const double merges = std::ceil(static_cast<double>(length) / kAttentionChunk) - 1;
  const double eta = std::expm1(2 * score_error + 2 * kU * (deepest + 2 * score_error)) +
                     (1 + merges) * (kExpError + 2 * kU);
  const double sums = gamma(8 + 2 * merges);  // of the weights, in 16 lanes; and the merges
  const double relative = 2 * eta + sums + gamma(5 + 2 * merges) + 2 * kU;
  Exact result;
  for (int64_t i = 0; i < dim; ++i) {
    double sum = 0, size = 0, largest = 0;
    for (int64_t j = 0; j < length; ++j) {
      sum += numerator[at(j)] * values.value(j, i);
      size += numerator[at(j)] * std::fabs(values.value(j, i));
      largest = std::max(largest, std::fabs(values.value(j, i)));
    }
    const double lost = lost_weights(numerator, values, i) * (1 + eta);
    result.out.push_back(sum / total);
    result.bound.push_back((relative * 1.01 * size + lost * (1 + relative)) / total +
                           4 * static_cast<double>(length) * kExpFloor * largest);
  }
  return result;
}

void accuracy(const KernelTable& kernels) {
  double worst = 0;
  for (const int64_t dim : {1, 16, 30, 64, 80, 128, 256}) {
    for (const int64_t length : {1, 2, 15, 17, 64, 65, 300}) {
      for (const float spread : {0.5f, 4.0f, 40.0f}) {  // flat to one-hot, past the range of exp
        if (dim > 80 && length > 65 && thinning(kernels) > 1) continue;
        begin_case("%s int8 attention dim=%d length=%d spread=%g", kernels.name,
                   static_cast<int>(dim), static_cast<int>(length), spread);
        Random random(static_cast<uint64_t>(dim * 1000 + length));
        const std::vector<float> q = random_floats(random, Flavour::kUnit, dim);
        const Cache keys = random_cache(random, length, dim, spread);
        const Cache values = random_cache(random, length, dim, 1.0f);
        const float scale = 0.9f;
        const std::vector<float> got = attend(kernels, q, 1, keys, values, scale).out(kernels, 0);
        const Exact want = exact_attention(q, keys, values, scale);
        for (int64_t i = 0; i < dim; ++i) {
          const double error = std::fabs(got[at(i)] - want.out[at(i)]), bound = want.bound[at(i)];
          CHECK(error <= bound, "[%d] %.9g, not %.9g +- %.3g", static_cast<int>(i), got[at(i)],
                want.out[at(i)], bound);
          if (bound > 0) worst = std::max(worst, error / bound);
        }
      }
    }
  }
  std::printf("%s: int8 attention takes at most %.2f of its bound\n", kernels.name, worst);
}

// ---- rows and extremes --------------------------------------------------------------------------

void rows_are_independent(const KernelTable& kernels) {
  for (const int64_t dim : {1, 17, 31, 33, 48, 100, 128}) {
    for (int64_t rows = 1; rows <= 9; ++rows) {
      begin_case("%s int8 attention, %d rows of dim %d", kernels.name, static_cast<int>(rows),
                 static_cast<int>(dim));
      Random random(static_cast<uint64_t>(dim * 10 + rows));
      const std::vector<float> q = random_floats(random, Flavour::kUnit, rows * dim);
      const Cache keys = random_cache(random, 77, dim, 3.0f);
      const Cache values = random_cache(random, 77, dim, 1.0f);
      const Attended all = attend(kernels, q, rows, keys, values, 0.3f);
      for (int64_t r = 0; r < rows; ++r) {
        const std::vector<float> one(q.begin() + r * dim, q.begin() + (r + 1) * dim);
        const Attended alone = attend(kernels, one, 1, keys, values, 0.3f);
        CHECK(std::memcmp(all.row(r), alone.row(0), alone.states.size() * sizeof(float)) == 0,
              "row %d differs from the same row alone", static_cast<int>(r));
      }
    }
  }
}

// -128 * 32512 * 512 = -127 * 2^24 is the largest sum of keys; equal weights make the largest of
// values, 64 * 128 * 32512.  Both are floats, so the results are exact.
void extremes(const KernelTable& kernels) {
  for (const int64_t dim : {1, 2, 16, 128, 512}) {
    for (const int sign : {-1, 1}) {
      begin_case("%s int8 attention, extremes of dim %d", kernels.name, static_cast<int>(dim));
      const std::vector<float> q(at(dim), 32512.0f * static_cast<float>(sign));
      Cache keys{std::vector<int8_t>(at(kAttentionChunk * dim), -128),
                 std::vector<float>(at(kAttentionChunk), 1.0f), dim};
      const Cache& values = keys;
      const Attended got = attend(kernels, q, 1, keys, values, 1.0f);
      const float* state = got.row(0);
      const auto top = static_cast<float>(-sign * 128.0 * 32512.0 * static_cast<double>(dim));
      CHECK(state[attention_padded(dim)] == top, "maximum %a, not %a", state[attention_padded(dim)],
            top);
      CHECK(state[attention_padded(dim) + 1] == 64.0f, "sum %a", state[attention_padded(dim) + 1]);
      const auto factor = static_cast<float>(1.0f / 32512.0f);
      for (int64_t i = 0; i < dim; ++i) {
        CHECK(state[i] == -64.0f * 128.0f * 32512.0f * factor, "[%d] %a", static_cast<int>(i),
              state[i]);
      }
    }
  }
}

void not_finite(const KernelTable& kernels) {
  constexpr int64_t kDim = 20;
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = INFINITY;
  const auto out = [&](int64_t j, float key_scale, float value_scale, float query) {
    Random random(5);
    std::vector<float> q = random_floats(random, Flavour::kUnit, kDim);
    q[3] = query;
    Cache keys = random_cache(random, 70, kDim, 1.0f), values = keys;
    keys.scales[at(j)] = key_scale;
    values.scales[at(j)] = value_scale;
    return attend(kernels, q, 1, keys, values, 1.0f).out(kernels, 0);
  };
  begin_case("%s int8 attention, not finite", kernels.name);
  for (const int64_t j : {0, 40, 69}) {
    for (const float bad : {nan, inf}) {
      for (int64_t i = 0; i < kDim; ++i) {
        CHECK(std::isnan(out(j, nan, 1.0f, 0.5f)[at(i)]), "key scale NaN at %d", int(j));
        CHECK(std::isnan(out(j, 1.0f, bad, 0.5f)[at(i)]), "value scale %g at %d", bad, int(j));
        CHECK(std::isnan(out(j, 1.0f, 1.0f, bad)[at(i)]), "query of %g", bad);
        CHECK(!std::isnan(out(j, 0.0f, 0.0f, 0.5f)[at(i)]), "zero scales at %d", int(j));
      }
    }
  }
}

TEST(accuracy) { on_every_table(accuracy); }
TEST(rows_are_independent) { on_every_table(rows_are_independent); }
TEST(extremes) { on_every_table(extremes); }
TEST(not_finite) { on_every_table(not_finite); }

}  // namespace
}  // namespace bitnet::test
