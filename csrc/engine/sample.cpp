// Sampling; see sample.h.
#include "engine/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine/selection.h"
#include "kernels/dispatch.h"
#include "runtime/memory.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kBlock = kSelectionBlock;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One thread's memory.
struct RowMemory {
  float* logits;   // of a row that was changed or thinned out
  float* weights;  // exponentials
  int32_t* kept;   // ids of a row that was thinned out
  float* bounds;   // of blocks: their largest
  SelectionMemory selection;

  static RowMemory take(BumpAllocator& memory, int64_t vocab) {
    return {memory.take<float>(vocab), memory.take<float>(vocab), memory.take<int32_t>(vocab),
            memory.take<float>((vocab + kBlock - 1) / kBlock),
            SelectionMemory::take(memory, vocab)};
  }
};

// f(row, memory) for every row. Rows may differ much in cost, so threads take every n-th one.
template <class F>
void for_rows(int64_t rows, int64_t vocab, const F& f) {
  if (rows <= 0) return;
  const int64_t partitions = partitions_for(rows, rows * vocab, kMinElements);
  BumpAllocator count(nullptr);
  RowMemory::take(count, vocab);
  thread_local Workspace workspace;  // the size of a few rows, whatever the batch
  char* const block = workspace.reserve(partitions * count.used());
  run_partitions(partitions, [&](int64_t p) {
    BumpAllocator piece(block + p * count.used());
    const RowMemory memory = RowMemory::take(piece, vocab);
    for (int64_t row = p; row < rows; row += partitions) f(row, memory);
  });
}

struct Largest {
  float value;  // not finite if there is no distribution
  int64_t index;
};

// block_largest: of each block, where it is not null.
Largest largest_of(const float* x, int64_t n, float* block_largest = nullptr) {
  Largest best = {-kInfinity, 0};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const float value = active_kernels().max_row(x + begin, std::min(kBlock, n - begin));
    if (block_largest != nullptr) block_largest[begin / kBlock] = value;
    if (std::isnan(value)) return {value, begin};
    if (value > best.value) best = {value, begin};
  }
  while (std::isfinite(best.value) && x[best.index] != best.value) ++best.index;
  return best;
}

float edited(float x, const LogitEdit& edit) {
  float y = x + edit.bias;
  y = y > 0.0f ? y / edit.repetition : y * edit.repetition;
  return y - edit.subtracted;
}

// Row r with its edits, which are made in a copy.
const float* edited_row(const LogitRows& logits, const LogitEdits& edits, int64_t r,
                        const RowMemory& memory) {
  const float* x = logits.row(r);
  if (edits.begin == nullptr || edits.begin[r] == edits.begin[r + 1]) return x;
  std::copy_n(x, logits.vocab, memory.logits);
  for (int64_t e = edits.begin[r]; e < edits.begin[r + 1]; ++e) {
    memory.logits[edits.ids[e]] = edited(x[edits.ids[e]], edits.edits[e]);
  }
  return memory.logits;
}

// The tokens of a row that a draw may give, with their probabilities.
struct Distribution {
  Values p;            // of the tokens that top_k leaves
  double sum;          // of their exponentials, p.data
  const int32_t* ids;  // their tokens; null: all of the vocabulary
  Cut cut;             // what top_p and min_p leave
  double kept;         // what the cut keeps, if its sum is exact in any order; negative: not known

  int64_t token(int64_t i) const { return ids == nullptr ? i : ids[i]; }
};

Cut all_of(const Values& values) { return {0.0f, values.count - 1}; }

// The one that keeps less.
Cut stricter(const Cut& a, const Cut& b) { return a.keeps(b.value, b.index) ? b : a; }

// Thins the row x out to its k largest.
void keep_largest(const float*& x, int64_t n, int64_t k, const RowMemory& memory) {
  const Values values = {x, n, 1.0f};
  const Cut cut = cut_at_count(values, k, memory.selection);
  kept_ids(values, cut, memory.kept);
  if (k < n / 8) {
    for (int64_t i = 0; i < k; ++i) memory.logits[i] = x[memory.kept[i]];  // in place too: ids >= i
  } else {
    kept_values(values, cut, memory.logits);
  }
  x = memory.logits;
}

// Bounded, so that 0 times it is 0 and infinity times it is infinity.
float inverse_of(double temperature) {
  return static_cast<float>(1.0 / std::clamp(temperature, 1e-30, 1e30));
}

// A bound of the kernel's exponentials of numbers up to 0, which are right within an ulp.
constexpr float kRoundedOne = 1.000001f;

// Replaces each block's largest logit by a bound of its exponentials, rounded up because the
// kernel's exponential need not be monotone.
void bound_weights(float* bounds, int64_t n, float largest, float inv_temperature) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  active_kernels().exp_row(bounds, blocks, largest, inv_temperature, bounds);
  for (int64_t b = 0; b < blocks; ++b) bounds[b] *= kRoundedOne;
}

Distribution distribution_of(const float* x, int64_t n, float largest, const SamplingOptions& o,
                             const RowMemory& memory) {
  const bool thinned = o.top_k > 0 && o.top_k < n;
  if (thinned) {
    keep_largest(x, n, o.top_k, memory);
    n = o.top_k;
  }
  const float inv_temperature = inverse_of(o.temperature);
  double sum = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    sum += active_kernels().exp_row(x + begin, std::min(kBlock, n - begin), largest,
                                    inv_temperature, memory.weights + begin);
  }
  Distribution d = {{memory.weights, n, static_cast<float>(1.0 / sum)},
                    sum,
                    thinned ? memory.kept : nullptr,
                    {},
                    -1.0};
  d.p.bound = kRoundedOne;
  if (!thinned) {
    bound_weights(memory.bounds, n, largest, inv_temperature);
    d.p.block_bounds = memory.bounds;
  }
  double kept = 0.0;
  d.cut = o.top_p < 1.0 ? cut_at_sum(d.p, o.top_p, memory.selection, &kept) : all_of(d.p);
  const float threshold = static_cast<float>(o.min_p) * d.p.scale;  // the largest weight is 1
  if (o.min_p > 0.0) {
    d.cut = stricter(d.cut, {threshold, n - 1});
  } else if (o.top_p < 1.0 && sums_exactly(n, o.top_p)) {
    d.kept = kept;
  }
  return d;
}

// The first index up to which the kept values sum to more than `uniform` times their total.
int64_t draw_ascending(const Distribution& d, double uniform) {
  const int64_t n = d.p.count;
  const auto block_sum = [&](int64_t begin) {
    if (d.p.block_bounds[begin / kBlock] * d.p.scale < d.cut.value) return 0.0;
    return kept_sum(d.p, d.cut, begin, std::min(begin + kBlock, n));
  };
  double all = d.kept;
  if (all < 0) {
    all = 0.0;
    for (int64_t begin = 0; begin < n; begin += kBlock) all += block_sum(begin);
  }
  double before = 0.0;
  const double point = uniform * all;
  int64_t last = 0;  // the last one with a positive probability
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const double after = before + block_sum(begin);
    const int64_t end = std::min(begin + kBlock, n);
    if (after <= point && after < all) {
      before = after;
      continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      const float p = d.p.at(i);
      if (!(p > 0.0f && d.cut.keeps(p, i))) continue;
      before += static_cast<double>(p);
      last = i;
      if (before > point) return i;
    }
  }
  return last;  // by rounding, a block's sum may exceed the sum of its elements
}

// The index of the smallest value that is kept and positive.
int64_t min_kept(const Distribution& d) {
  Cut last = {kInfinity, -1};
  for (int64_t i = 0; i < d.p.count; ++i) {
    const float p = d.p.at(i);
    if (p > 0.0f && d.cut.keeps(p, i) && !last.keeps(p, i)) last = {p, i};
  }
  return last.index;
}

int64_t draw_descending(const Distribution& d, double uniform, const SelectionMemory& memory) {
  const double all = kept_sum(d.p, d.cut, 0, d.p.count);
  const double point = std::nextafter(uniform * all, 2.0);  // passed, not only reached
  const Cut at = cut_at_sum(d.p, point, memory);
  // By rounding, the kept values summed in another order may not reach the point.
  return at.value > 0.0f && d.cut.keeps(at.value, at.index) ? at.index : min_kept(d);
}

// -ln(2^-33), rounded up: no noise exceeds it.
constexpr float kMaxNoise = 22.9f;

// The id whose logit with its noise is the largest. memory.bounds: of each block, its largest
// logit.
int64_t draw_of_all(const float* x, int64_t n, int64_t most_probable, const Noise& noise,
                    const RowMemory& memory) {
  const auto add_noise = [&](int64_t begin, int64_t count, float threshold) {
    active_kernels().add_noise_row(x + begin, count, noise.temperature, noise.key, begin, threshold,
                                   memory.weights);
  };
  add_noise(most_probable, 1, -kInfinity);
  Largest best = {memory.weights[0], most_probable};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const float bound = std::fma(noise.temperature, kMaxNoise, memory.bounds[begin / kBlock]);
    if (bound < best.value) continue;
    add_noise(begin, std::min(kBlock, n - begin), best.value);
    const Largest found = largest_of(memory.weights, std::min(kBlock, n - begin));
    const int64_t id = begin + found.index;
    if (found.value > best.value || (found.value == best.value && id < best.index))
      best = {found.value, id};
  }
  return best.index;
}

int64_t sample_row(const float* x, int64_t n, const SamplingOptions& o, const RowMemory& memory) {
  const Largest largest = largest_of(x, n, memory.bounds);
  if (!std::isfinite(largest.value)) return -1;
  if (o.temperature == 0.0) return largest.index;
  if (o.draws_of_all(n))
    return draw_of_all(x, n, largest.index, noise_of(o.temperature, o.uniform), memory);
  const Distribution d = distribution_of(x, n, largest.value, o, memory);
  return d.token(d.ids == nullptr ? draw_ascending(d, o.uniform)
                                  : draw_descending(d, o.uniform, memory.selection));
}

void probabilities_of_row(const float* x, int64_t n, const SamplingOptions& o,
                          const RowMemory& memory, float* out) {
  const Largest largest = largest_of(x, n, memory.bounds);
  const bool good = std::isfinite(largest.value);
  std::fill_n(out, n, good ? 0.0f : std::numeric_limits<float>::quiet_NaN());
  if (!good) return;
  if (o.temperature == 0.0) {
    out[largest.index] = 1.0f;
    return;
  }
  const Distribution d = distribution_of(x, n, largest.value, o, memory);
  double sum = 0.0;
  for (int64_t i = 0; i < d.p.count; ++i) {
    if (d.cut.keeps(d.p.at(i), i)) sum += static_cast<double>(d.p.data[i]);
  }
  const bool all = d.cut.value == 0.0f && d.cut.index == d.p.count - 1;
  const auto scale = static_cast<float>(1.0 / (all ? d.sum : sum));
  for (int64_t i = 0; i < d.p.count; ++i) {
    if (d.cut.keeps(d.p.at(i), i)) out[d.token(i)] = d.p.data[i] * scale;
  }
}

// The `top` largest of a row, descending, of equals the lower id first.
void largest_ids(const float* x, int64_t n, int64_t top, const RowMemory& memory, int64_t* ids) {
  const float* kept = x;
  if (top < n) {
    keep_largest(kept, n, top, memory);
    std::copy_n(memory.kept, top, ids);
  } else {
    std::iota(ids, ids + n, int64_t{0});
  }
  std::sort(ids, ids + top,
            [x](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
}

}  // namespace

// SplitMix64's mixing of its bits.
Noise noise_of(double temperature, double uniform) {
  auto key = static_cast<uint64_t>(uniform * 0x1p53) + 0x9e3779b97f4a7c15u;
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
  key = (key ^ key >> 27) * 0x94d049bb133111ebu;
  if (temperature == 0.0) return {};
  return {static_cast<float>(std::clamp(temperature, 0x1p-100, 0x1p96)), key ^ key >> 31};
}

void sample_tokens(const LogitRows& logits, const SamplingOptions* options, const LogitEdits& edits,
                   int64_t* tokens) {
  for_rows(logits.count, logits.vocab, [&](int64_t r, const RowMemory& memory) {
    const float* x = edited_row(logits, edits, r, memory);
    tokens[r] = sample_row(x, logits.vocab, options[r], memory);
  });
}

void token_probabilities(const LogitRows& logits, const SamplingOptions* options,
                         const LogitEdits& edits, float* probabilities) {
  const int64_t n = logits.vocab;
  for_rows(logits.count, n, [&](int64_t r, const RowMemory& memory) {
    const float* x = edited_row(logits, edits, r, memory);
    probabilities_of_row(x, n, options[r], memory, probabilities + r * n);
  });
}

void top_logprobs(const LogitRows& logits, const int64_t* tokens, int64_t top, float* of_tokens,
                  int64_t* ids, float* of_ids) {
  const int64_t n = logits.vocab;
  for_rows(logits.count, n, [&](int64_t r, const RowMemory& memory) {
    constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
    const float* x = logits.row(r);
    const float largest = largest_of(x, n).value;
    int64_t* const row_ids = ids + r * top;
    of_tokens[r] = kNone;
    std::fill_n(row_ids, top, -1);
    std::fill_n(of_ids + r * top, top, kNone);
    if (!std::isfinite(largest)) return;
    double sum = 0.0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      sum += active_kernels().exp_row(x + begin, std::min(kBlock, n - begin), largest, 1.0f,
                                      memory.weights);
    }
    const double log_sum = std::log(sum);
    const auto logprob = [&](int64_t id) {  // the sum would vanish beside a logit of 1e17
      return static_cast<float>((static_cast<double>(x[id]) - largest) - log_sum);
    };
    if (tokens[r] >= 0) of_tokens[r] = logprob(tokens[r]);
    if (top > 0) largest_ids(x, n, top, memory, row_ids);
    for (int64_t i = 0; i < top; ++i) of_ids[r * top + i] = logprob(row_ids[i]);
  });
}

}  // namespace bitnet::engine
