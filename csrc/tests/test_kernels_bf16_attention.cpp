// Attention over bfloat16 caches, bit for bit: against plain loops in the order that kernel_table.h
// defines; rows together as each alone, whatever lies behind what a row sees; and, since nothing in
// it is ever denormal, the same on a unit that flushes denormals.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/check.h"
#include "tests/panels.h"
#include "tests/random.h"
#include "tests/tables.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace bitnet::test {
namespace {

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// What the contract makes of a number: 8 bits of fraction, half to even; 0 below 2^-55.
float as_cached(float x) {
  if (std::fabs(x) < 0x1p-55f) return 0.0f;
  if (!std::isfinite(x)) return x;
  int exponent = 0;
  const double fraction = std::frexp(static_cast<double>(x), &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8));
}

std::vector<float> cached(std::vector<float> x) {
  for (float& v : x) v = as_cached(v);
  return x;
}

uint16_t code_of(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }

// Rows of one head, [count, dim], as memory and as numbers.
struct Rows {
  std::vector<uint16_t> codes;
  std::vector<float> values;
  int64_t dim;

  float value(int64_t j, int64_t i) const { return values[at(j * dim + i)]; }
};

Rows rows_of(std::vector<float> x, int64_t dim) {
  Rows rows{{}, std::move(x), dim};
  for (const float v : rows.values) rows.codes.push_back(code_of(v));
  return rows;
}

// Magnitudes from 2^-64 to 2^20: a few vanish, products reach the smallest that does not.
std::vector<float> spread_floats(Random& random, int64_t n) {
  std::vector<float> x(at(n));
  for (float& v : x) v = std::ldexp(random.unit(), static_cast<int>(random.below(84)) - 64);
  return x;
}

// AttentionChunk::pair_unit and matrix_unit of every chunk; main() runs all without and, where it
// may, with each.
bool by_pair_unit = false, by_matrix_unit = false;

const char* with_unit() { return by_pair_unit ? "by pairs" : by_matrix_unit ? "by tiles" : ""; }

// States of `rows` query rows over one chunk.
std::vector<float> attend(const KernelTable& kernels, const std::vector<float>& query, int64_t rows,
                          int64_t per_token, const Rows& keys, const Rows& values,
                          int64_t positions, int64_t first_visible, float scale,
                          int64_t first_hidden = kNothingHidden) {
  const int64_t dim = keys.dim;
  std::vector<float> states(at(rows * attention_state_floats(dim)));
  std::vector<float> scratch(at(attention_scratch_floats(rows, dim)),
                             std::numeric_limits<float>::quiet_NaN());
  const AttentionChunk chunk = {.query = query.data(),
                                .rows = rows,
                                .dim = dim,
                                .rows_per_token = per_token,
                                .type = DType::kBF16,
                                .keys = keys.codes.data(),
                                .values = values.codes.data(),
                                .stride_bytes = 2 * dim,
                                .positions = positions,
                                .first_visible = first_visible,
                                .scale = scale,
                                .next = nullptr,
                                .pair_unit = by_pair_unit,
                                .matrix_unit = by_matrix_unit,
                                .first_hidden = first_hidden};
  kernels.attend_chunk(chunk, scratch.data(), states.data());
  AttentionChunk again = chunk;  // the same chunk is one with the same queries
  again.same_queries = true;
  std::vector<float> twice(states.size());
  kernels.attend_chunk(again, scratch.data(), twice.data());
  CHECK(std::memcmp(twice.data(), states.data(), states.size() * sizeof(float)) == 0,
        "%d positions give other states for queries that are there", static_cast<int>(positions));
  CHECK(equal_in_panels<uint16_t>(kernels, chunk, 0x7fc0, scratch, states.data()),
        "%d positions in panels give other states than in rows", static_cast<int>(positions));
  return states;
}

// ---- the order ----------------------------------------------------------------------------------

template <class A, class B>
float two_chains(int64_t n, const A& a, const B& b) {
  float sum = 0;
  for (int64_t group = 0; group < n; group += 32) {
    float chain[2] = {0, 0};
    for (int64_t i = group; i < std::min(group + 32, n); ++i) {
      chain[i % 2] = std::fmaf(a(i), b(i), chain[i % 2]);
    }
    sum += chain[0] + chain[1];
  }
  return sum;
}

// exp(score - max) as the other types take it: float32 keys that are the scores themselves, values
// that tell the weights apart.
std::vector<float> exponentials(const KernelTable& kernels, const std::vector<float>& scores) {
  const int64_t n = kAttentionChunk, count = static_cast<int64_t>(scores.size());
  std::vector<float> query(at(n)), keys(at(count * n)), values(at(count * n));
  query[0] = 1;
  for (int64_t j = 0; j < count; ++j) {
    keys[at(j * n)] = scores[at(j)];
    values[at(j * n + j)] = 1;
  }
  std::vector<float> state(at(attention_state_floats(n)));
  std::vector<float> scratch(at(attention_scratch_floats(1, n)));
  const AttentionChunk chunk = {.query = query.data(),
                                .rows = 1,
                                .dim = n,
                                .rows_per_token = 1,
                                .type = DType::kF32,
                                .keys = keys.data(),
                                .values = values.data(),
                                .stride_bytes = 4 * n,
                                .positions = count,
                                .first_visible = count,
                                .scale = 1.0f,
                                .next = nullptr};
  kernels.attend_chunk(chunk, scratch.data(), state.data());
  state.resize(at(count));
  return state;
}

std::vector<float> expected_state(const KernelTable& kernels, const std::vector<float>& query,
                                  const Rows& keys, const Rows& values, int64_t positions,
                                  float scale) {
  std::vector<float> scores;
  for (int64_t j = 0; j < positions; ++j) {
    const float dot = two_chains(
        keys.dim, [&](int64_t i) { return query[at(i)]; },
        [&](int64_t i) { return keys.value(j, i); });
    scores.push_back(scale * dot);
  }
  const std::vector<float> weights = cached(exponentials(kernels, scores));
  float lanes[16] = {};
  for (int64_t j = 0; j < positions; ++j) lanes[j % 16] += weights[at(j)];
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  std::vector<float> state(at(attention_state_floats(keys.dim)));
  for (int64_t i = 0; i < keys.dim; ++i) {
    state[at(i)] = two_chains(
        positions, [&](int64_t j) { return weights[at(j)]; },
        [&](int64_t j) { return values.value(j, i); });
  }
  state[at(attention_padded(keys.dim))] = *std::max_element(scores.begin(), scores.end());
  state[at(attention_padded(keys.dim)) + 1] = lanes[0];
  return state;
}

void order(const KernelTable& kernels) {
  for (const int64_t dim : {1, 2, 5, 16, 31, 32, 33, 64, 80, 100, 128, 257}) {
    if (thinning(kernels) > 1 && dim > 33 && dim != 100) continue;
    for (const int64_t positions : {1, 2, 3, 16, 17, 31, 32, 33, 34, 50, 63, 64}) {
      for (const bool wide : {false, true}) {
        begin_case("%s bf16 attention %s, order, dim %d, %d positions, wide %d", kernels.name,
                   with_unit(), int(dim), int(positions), int(wide));
        Random random(static_cast<uint64_t>(dim * 100 + positions));
        const auto floats = [&](int64_t n) {
          return cached(wide ? spread_floats(random, n) : random_floats(random, Flavour::kUnit, n));
        };
        const std::vector<float> query = floats(dim);
        const Rows keys = rows_of(floats(positions * dim), dim);
        const Rows values = rows_of(floats(positions * dim), dim);
        const float scale = wide ? 0x1p-30f : 0.3f;
        const std::vector<float> got =
            attend(kernels, query, 1, 1, keys, values, positions, positions, scale);
        const std::vector<float> want =
            expected_state(kernels, query, keys, values, positions, scale);
        for (std::size_t i = 0; i < want.size(); ++i) {
          CHECK(got[i] == want[i], "[%d] %a, not %a", int(i), got[i], want[i]);
        }
      }
    }
  }
}

// ---- rows together ------------------------------------------------------------------------------

void rows_are_independent(const KernelTable& kernels) {
  const bool thinned = thinning(kernels) > 1;
  for (const int64_t dim : {1, 37, 96, 128}) {
    for (const int64_t rows : {2, 3, 4, 5, 7, 12, 13, 24, 29, 100}) {
      if (thinned && (dim == 1 || dim == 128 || (rows != 4 && rows != 29))) continue;
      for (const int64_t per_token : {1, 3, 4}) {
        for (const int64_t first : {1, 30, 47, 64}) {
          if (left_to_the_night(kernels) && (first == 1 || first == 47)) continue;
          for (const float behind : {1.0f, INFINITY}) {  // what the last position holds
            begin_case("%s bf16 attention %s, %d rows, %d a token, dim %d, first sees %d",
                       kernels.name, with_unit(), int(rows), int(per_token), int(dim), int(first));
            Random random(static_cast<uint64_t>(dim * 10 + rows));
            const std::vector<float> query =
                cached(random_floats(random, Flavour::kUnit, rows * dim));
            const Rows keys = rows_of(cached(random_floats(random, Flavour::kUnit, 64 * dim)), dim);
            std::vector<float> numbers = cached(random_floats(random, Flavour::kUnit, 64 * dim));
            numbers[at(63 * dim)] = behind;
            numbers[at(33 * dim)] = behind;
            const Rows values = rows_of(numbers, dim);
            const std::vector<float> all =
                attend(kernels, query, rows, per_token, keys, values, 64, first, 0.3f);
            for (int64_t r = 0; r < rows; ++r) {
              const std::vector<float> one(query.begin() + r * dim, query.begin() + (r + 1) * dim);
              const int64_t seen = std::min<int64_t>(first + r / per_token, 64);
              const std::vector<float> alone =
                  attend(kernels, one, 1, 1, keys, values, seen, seen, 0.3f);
              CHECK(std::memcmp(&all[at(r) * alone.size()], alone.data(),
                                alone.size() * sizeof(float)) == 0,
                    "row %d differs from the same row alone", int(r));
            }
          }
        }
      }
    }
  }
}

// Beside others, over a chunk whose positions outside of a row's window hold no numbers, as alone.
void windows(const KernelTable& kernels, int64_t dim) {
  for (const int64_t rows : {1, 2, 3, 4, 7, 29}) {
    for (const int64_t window : {35, 40, 51}) {
      for (const int64_t first : {1, 36, 45, 64}) {  // positions up to the first row's token
        const int64_t hidden = std::min(first - window, 63 - (rows - 1));
        begin_case("%s bf16 attention %s, %d rows, dim %d, a window of %d, first sees %d",
                   kernels.name, with_unit(), int(rows), int(dim), int(window), int(first));
        Random random(static_cast<uint64_t>(rows * 100 + window));
        const std::vector<float> query = cached(random_floats(random, Flavour::kUnit, rows * dim));
        const std::vector<float> numbers = cached(random_floats(random, Flavour::kUnit, 64 * dim));
        std::vector<float> weighed = numbers;  // infinite where the first row alone sees it
        weighed[at(std::max<int64_t>(hidden, 0) * dim)] = INFINITY;
        const Rows keys = rows_of(numbers, dim), values = rows_of(weighed, dim);
        const std::vector<float> all =
            attend(kernels, query, rows, 1, keys, values, 64, first, 0.3f, hidden);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t begin = std::max<int64_t>(0, hidden + r);
          const int64_t end = std::min<int64_t>(first + r, 64);
          const auto seen = [&](std::vector<float> x) {
            std::fill(x.begin(), x.begin() + begin * dim, NAN);
            std::fill(x.begin() + end * dim, x.end(), INFINITY);
            return rows_of(x, dim);
          };
          const std::vector<float> one(query.begin() + r * dim, query.begin() + (r + 1) * dim);
          const std::vector<float> alone =
              attend(kernels, one, 1, 1, seen(numbers), seen(weighed), 64, end, 0.3f, begin);
          CHECK(std::memcmp(&all[at(r) * alone.size()], alone.data(),
                            alone.size() * sizeof(float)) == 0,
                "row %d differs from the same row alone", int(r));
        }
      }
    }
  }
}

// Chunks that begin or end in the middle of a pair, whose other position holds no number.
void edges(const KernelTable& kernels) {
  for (const int64_t rows : {15, 16, 29}) {
    for (const int64_t positions : {1, 17, 32, 33, 47, 63}) {
      for (const int64_t hidden : {kNothingHidden, int64_t{1}, int64_t{33}}) {
        const int64_t first = std::max<int64_t>(1, positions - 9);
        if (hidden + rows / 4 >= first) continue;
        begin_case("%s bf16 attention %s, %d rows, %d positions, %d hidden", kernels.name,
                   with_unit(), int(rows), int(positions), int(std::max<int64_t>(hidden, 0)));
        constexpr int64_t kDim = 32;
        Random random(static_cast<uint64_t>(rows * 100 + positions));
        const std::vector<float> query = cached(random_floats(random, Flavour::kUnit, rows * kDim));
        std::vector<float> numbers =
            cached(random_floats(random, Flavour::kUnit, positions * kDim));
        std::fill_n(numbers.begin(), std::max<int64_t>(hidden, 0) * kDim, NAN);
        const Rows cache = rows_of(numbers, kDim);
        const std::vector<float> all =
            attend(kernels, query, rows, 4, cache, cache, positions, first, 0.3f, hidden);
        for (int64_t r = 0; r < rows; ++r) {
          const std::vector<float> one(query.begin() + r * kDim, query.begin() + (r + 1) * kDim);
          const int64_t seen = std::min(first + r / 4, positions);
          const std::vector<float> alone =
              attend(kernels, one, 1, 1, cache, cache, seen, seen, 0.3f, hidden + r / 4);
          CHECK(std::memcmp(&all[at(r) * alone.size()], alone.data(),
                            alone.size() * sizeof(float)) == 0,
                "row %d differs from the same row alone", int(r));
        }
      }
    }
  }
}

// ---- small numbers ------------------------------------------------------------------------------

void written(const KernelTable& kernels) {
  for (const Flavour flavour : kFlavours) {
    begin_case("%s store_cache_row of %s numbers", kernels.name, name_of(flavour));
    Random random(11);
    std::vector<float> x = random_floats(random, flavour, 1001);
    for (int i = 0; i < 500; ++i) x[at(2 * i)] = std::ldexp(random.unit(), -54);
    const float edge[] = {0x1p-55f, -0x1p-55f, 0x1.fffffep-56f, -0x1.fffffep-56f, -0.0f};
    std::copy(std::begin(edge), std::end(edge), x.begin());
    std::vector<uint16_t> got(x.size());
    kernels.store_cache_row(DType::kBF16, x.data(), 1001, got.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto value = std::bit_cast<float>(static_cast<uint32_t>(got[i]) << 16);
      const float want = as_cached(x[i]);
      CHECK(std::isnan(want) ? std::isnan(value) : value == want, "%a became %a, not %a", x[i],
            value, want);
    }
  }
}

// Runs f with subnormal operands and results flushed to zero, as torch.set_flush_denormal(True)
// leaves a thread.
template <class F>
void with_denormals_flushed(const F& f) {
#if defined(__SSE__)
  const unsigned state = _mm_getcsr();
  _mm_setcsr(state | 0x8040);  // results and operands
  f();
  _mm_setcsr(state);
#elif defined(__aarch64__)
  uint64_t state;
  __asm__ volatile("mrs %0, fpcr" : "=r"(state));
  __asm__ volatile("msr fpcr, %0" : : "r"(state | (uint64_t{1} << 24)) : "memory");  // FZ
  f();
  __asm__ volatile("msr fpcr, %0" : : "r"(state) : "memory");
#else
#error "how does this CPU flush subnormal numbers?"
#endif
}

void flushing_changes_nothing(const KernelTable& kernels) {
  for (const int64_t rows : {1, 4, 24}) {
    begin_case("%s bf16 attention %s with denormals flushed, %d rows", kernels.name, with_unit(),
               int(rows));
    Random random(9);
    constexpr int64_t kDim = 96;
    const std::vector<float> query = cached(spread_floats(random, rows * kDim));
    const Rows keys = rows_of(cached(spread_floats(random, 64 * kDim)), kDim);
    const Rows values = rows_of(cached(spread_floats(random, 64 * kDim)), kDim);
    const auto run = [&] {
      return attend(kernels, query, rows, 1, keys, values, 64, 64, 0x1p-24f);
    };
    const std::vector<float> plain = run();
    std::vector<float> flushed;
    with_denormals_flushed([&] { flushed = run(); });
    CHECK(std::memcmp(plain.data(), flushed.data(), plain.size() * sizeof(float)) == 0, "differs");
  }
}

// Every table without the CPU's units and, where one may be used, with it.
template <class F>
void with_and_without_unit(const F& f) {
  for (const KernelTable* kernels : tables_under_test()) {
    for (const bool unit : {false, true}) {
      if (unit && !may_use_pair_unit(*kernels)) continue;
      by_pair_unit = unit;
      f(*kernels);
    }
    by_pair_unit = false;
    by_matrix_unit = may_use_matrix_unit(*kernels);
    if (by_matrix_unit) f(*kernels);
    by_matrix_unit = false;
  }
}

TEST(order) { with_and_without_unit(order); }
TEST(rows_are_independent) { with_and_without_unit(rows_are_independent); }
TEST(flushing_changes_nothing) { with_and_without_unit(flushing_changes_nothing); }
TEST(windows) {  // the unit takes multiples of 32
  with_and_without_unit([](const KernelTable& kernels) {
    windows(kernels, by_pair_unit || by_matrix_unit ? 64 : 40);
  });
}
TEST(edges) { with_and_without_unit(edges); }
TEST(written) { on_every_table(written); }

}  // namespace
}  // namespace bitnet::test
