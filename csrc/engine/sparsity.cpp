// Dropping of codes, and the break-even of columns; see sparsity.h.
#include "engine/sparsity.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "engine/program/program.h"
#include "runtime/oversubscription.h"

namespace bitnet::engine {
namespace {

constexpr int kMaxCode = 128;  // largest magnitude
constexpr int64_t kPanelRows = layout::kColumnRows;

// In (0, 1].
float share(Keys& keys, const char* name) {
  const float value = keys.number(name);
  if (!(value > 0 && value <= 1)) keys.fail(name, "above 0 and at most 1", std::to_string(value));
  return value;
}

// How many codes have each magnitude.
using Histogram = std::array<int32_t, kMaxCode + 1>;

// Calls f(codes, n) for the codes of token m, 64 at a time.
template <class F>
void for_codes(const QuantizedTokens& x, int64_t m, const F& f) {
  for (int64_t i = 0; i < x.k; i += kTokenStep) {
    f(x.token(m) + i / kTokenStep * x.step_stride(m), std::min(kTokenStep, x.k - i));
  }
}

Histogram magnitudes(const QuantizedTokens& x, int64_t m) {
  // four histograms: counting equal neighbours in one would wait for each other
  std::array<Histogram, 4> parts{};
  for_codes(x, m, [&](const int8_t* codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      ++parts[static_cast<size_t>(i % 4)][static_cast<size_t>(std::abs(int{codes[i]}))];
  });
  for (size_t c = 0; c < parts[0].size(); ++c)
    parts[0][c] += parts[1][c] + parts[2][c] + parts[3][c];
  return parts[0];
}

// entropy / log(k), from 0 to 1.
double spread(const Histogram& counts, int64_t k) {
  double sum = 0, weighed = 0;
  for (int c = 1; c <= kMaxCode; ++c) {
    const double total = static_cast<double>(counts[static_cast<size_t>(c)]) * c;
    sum += total;
    weighed += total * std::log(static_cast<double>(c));
  }
  if (sum == 0 || k < 2) return 0;
  const double entropy = std::log(sum) - weighed / sum;
  return std::clamp(entropy / std::log(static_cast<double>(k)), 0.0, 1.0);
}

// The lowest cut above 0 that leaves at most `max` codes, or that leaves only the largest
// magnitude.
int cut_that_leaves(const Histogram& counts, int64_t max) {
  int64_t left = 0;
  int cut = kMaxCode + 1;
  for (int c = kMaxCode; c >= 1; --c) {
    left += counts[static_cast<size_t>(c)];
    const bool largest = left == counts[static_cast<size_t>(c)];
    if (left > max && !largest) break;
    cut = c;
  }
  return cut;
}

}  // namespace

void ActivationSparsity::drop(const QuantizedTokens& x, int64_t m) const {
  int cut = 0;
  if (threshold > 0) {
    cut = static_cast<int>(std::ceil(127.0f * threshold));
  } else {
    const Histogram counts = magnitudes(x, m);
    double ratio = static_cast<double>(min_ratio);
    if (max_ratio > min_ratio)
      ratio += static_cast<double>(max_ratio - min_ratio) * spread(counts, x.k);
    cut =
        cut_that_leaves(counts, static_cast<int64_t>(std::ceil(ratio * static_cast<double>(x.k))));
  }
  int32_t sum = 0;
  for_codes(x, m, [&](int8_t* codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const int code = codes[i];
      codes[i] = static_cast<int8_t>(std::abs(code) < cut ? 0 : code);
      sum += codes[i];
    }
  });
  x.sums[m] = sum;
}

ActivationSparsity read_sparsity(Keys& keys) {
  ActivationSparsity s;
  if (keys.has("sparsity")) {
    const std::string word = keys.word("sparsity");
    if (word != "auto" && word != "exact") keys.fail("sparsity", "auto or exact", word);
    s.skips = true;
    s.always = word == "exact";
  }
  if (keys.has("threshold")) s.threshold = share(keys, "threshold");
  if (keys.has("top_k")) s.min_ratio = s.max_ratio = share(keys, "top_k");
  if (keys.has("max_ratio")) {
    if (keys.has("top_k")) keys.fail("max_ratio", "without top_k", "both");
    s.max_ratio = share(keys, "max_ratio");
    s.min_ratio = share(keys, "min_ratio");
    if (s.min_ratio > s.max_ratio)
      keys.fail("min_ratio", "at most max_ratio", std::to_string(s.min_ratio));
  }
  if (s.threshold > 0 && s.max_ratio > 0) keys.fail("threshold", "without ratios", "both");
  return s;
}

namespace {

// A made-up token of k codes, some of which are not 0, to be multiplied by a matrix.
struct Trial {
  explicit Trial(int64_t k) : codes(static_cast<size_t>(layout::padded_k(k))) {
    at.resize(static_cast<size_t>(k + CodeList::kRoom));
    listed.resize(at.size());
  }

  // About `share` of the codes are not 0, at places without a pattern.
  void fill(const KernelTable& kernels, int64_t k, double share) {
    uint32_t state = 1;
    for (int64_t i = 0; i < k; ++i) {
      state = state * 1664525 + 1013904223;
      codes[static_cast<size_t>(i)] = static_cast<double>(state >> 8) < share * (1 << 24) ? 1 : 0;
    }
    count = kernels.list_nonzero(codes.data(), k, at.data(), listed.data());
    sum = static_cast<int32_t>(count);
  }

  std::vector<int8_t> codes, listed;
  std::vector<int32_t> at;
  int64_t count = 0;
  int32_t sum = 0;
};

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double columns_ns(const KernelTable& kernels, const Linear& linear, const Trial& trial,
                  std::vector<int32_t>& sums) {
  const int64_t panels = layout::column_panels(linear.rows);
  sums.resize(static_cast<size_t>(panels * kPanelRows));
  const int64_t begin = steady_ns();
  kernels.column_product({linear.columns, linear.k, panels, trial.at.data(), trial.listed.data(),
                          trial.count, trial.sum, sums.data()});
  return static_cast<double>(steady_ns() - begin);
}

double tiles_ns(const KernelTable& kernels, const Linear& linear, const Trial& trial,
                std::vector<int32_t>& sums) {
  const Weight& w = linear.weight;
  const int64_t blocks = std::max<int64_t>(1, 512 / w.block_rows);  // as products have them
  sums.resize(static_cast<size_t>(blocks * w.block_rows));
  const int64_t begin = steady_ns();
  for (int64_t block = 0; block < w.row_blocks; block += blocks) {
    ProductJob job = job_of(w, block, std::min(block + blocks, w.row_blocks));
    job.x = trial.codes.data();
    job.x_stride = layout::padded_k(linear.k);
    job.x_sum = &trial.sum;
    job.tokens = 1;
    job.sums = sums.data();
    job.out_stride = blocks * w.block_rows;
    algorithm_for(kernels, shape_of(job)).run(job, nullptr);
  }
  return static_cast<double>(steady_ns() - begin);
}

}  // namespace

void tune_columns(const KernelTable& kernels, const std::vector<Linear*>& linears) {
  // Two shares of codes that are not 0; a straight line through both gives the time of columns. Not
  // above kMaxShare, where hardware prefetchers begin to help and the line no longer holds.
  constexpr double kFew = 0.08, kMany = 0.3, kMaxShare = 0.45;
  constexpr size_t kRounds = 24;
  std::vector<Linear*> with;
  for (Linear* linear : linears) {
    if (linear->columns != nullptr && linear->max_listed < 0) with.push_back(linear);
  }
  if (with.empty()) return;
  const int64_t k = with[0]->k;
  Trial few(k), many(k);
  few.fill(kernels, k, kFew);
  many.fill(kernels, k, kMany);
  std::vector<double> dense_ns, few_ns, many_ns;
  std::vector<int32_t> sums;
  // Matrices take turns, so that they come from memory as in a step. Those of another size are left
  // out: the blocks of one program are alike.
  size_t next = 0;
  const auto turn = [&]() -> const Linear& {
    while (with[next++ % with.size()]->k != k) {
    }
    return *with[(next - 1) % with.size()];
  };
  for (size_t round = 0; round < kRounds; ++round) {
    const Linear& first = turn();
    const double size = static_cast<double>(first.rows);
    dense_ns.push_back(tiles_ns(kernels, first, few, sums) / size);
    const Linear& second = turn();
    few_ns.push_back(columns_ns(kernels, second, few, sums) / static_cast<double>(second.rows));
    const Linear& third = turn();
    many_ns.push_back(columns_ns(kernels, third, many, sums) / static_cast<double>(third.rows));
  }
  const double dense = median(dense_ns), low = median(few_ns), high = median(many_ns);
  const double slope = std::max((high - low) / (kMany - kFew), dense * 1e-3);
  const double share = std::clamp(kFew + (0.97 * dense - low) / slope, 0.0, kMaxShare);
  for (Linear* linear : with)
    linear->max_listed = static_cast<int64_t>(share * static_cast<double>(linear->k));
}

}  // namespace bitnet::engine
