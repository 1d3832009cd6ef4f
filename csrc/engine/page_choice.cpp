// The choice of pages; see page_choice.h.
#include "engine/page_choice.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>

namespace bitnet::engine {
namespace {

// ceil(ratio * pages), a little less before rounding up, because a ratio is itself rounded.
int64_t share_of(double ratio, int64_t pages) {
  return static_cast<int64_t>(std::ceil(ratio * static_cast<double>(pages) * (1 - 1e-6)));
}

// Pages with sinks.
int64_t sink_pages(const AttentionPolicy& policy) {
  return policy.sinks / kAttentionChunk + (policy.sinks % kAttentionChunk != 0);
}

// Pages that are read whatever their scores: those with sinks, and the token's own.
int64_t fewest_pages(const AttentionPolicy& policy, int64_t pages) {
  return std::min(sink_pages(policy) + 1, pages);
}

// The fewest pages that a ratio leaves: one more, which its score has chosen.
int64_t fewest_of_share(const AttentionPolicy& policy, int64_t pages) {
  return std::min(fewest_pages(policy, pages) + 1, pages);
}

// How many of `pages` are read, if all scores are finite.
int64_t count_by_weight(const KernelTable& kernels, const AttentionPolicy& policy, int64_t rows,
                        const float* scores, float top, int64_t pages, float* weights) {
  const int64_t others = pages - 1, fewest = fewest_pages(policy, pages);
  const float inv = 1.0f / static_cast<float>(rows);
  const double sum = kernels.exp_row(scores, others, top, inv, weights);
  if (policy.threshold > 0) {
    return fewest + std::count_if(weights + fewest - 1, weights + others,
                                  [&](float weight) { return weight >= policy.threshold; });
  }
  double below = 0;  // weighted sum of how far scores lie below the best
  for (int64_t page = 0; page < others; ++page)
    below += static_cast<double>(weights[page]) *
             (static_cast<double>(top) - static_cast<double>(scores[page]));
  const double entropy = std::log(sum) + below * static_cast<double>(inv) / sum;
  const double spread = std::clamp(entropy / std::log(static_cast<double>(others)), 0.0, 1.0);
  const double ratio = policy.min_ratio + (policy.max_ratio - policy.min_ratio) * spread;
  return std::max(share_of(ratio, pages), fewest_of_share(policy, pages));
}

}  // namespace

bool chooses_pages(const AttentionPolicy& policy, int64_t position) {
  const int64_t pages = position / kAttentionChunk + 1;
  const bool fixed = policy.threshold == 0 && policy.min_ratio == policy.max_ratio;
  return policy.chooses() && position >= policy.dense_below && pages > 2 &&
         !(fixed && max_pages_read(policy, pages) == pages);
}

int64_t max_pages_read(const AttentionPolicy& policy, int64_t pages) {
  if (policy.threshold > 0) return pages;
  return std::clamp(share_of(policy.max_ratio, pages), fewest_of_share(policy, pages), pages);
}

void add_queries(const float* queries, int64_t rows, int64_t dim, float scale, float* sums) {
  std::fill_n(sums, 2 * dim, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < dim; ++i) {
      const float q = queries[r * dim + i] * scale;
      sums[i] += q > 0 ? q : 0.0f;
      sums[dim + i] += q > 0 ? 0.0f : q;
    }
  }
}

int64_t choose_pages(const KernelTable& kernels, const AttentionPolicy& policy, int64_t rows,
                     float* scores, int64_t pages, const PageMemory& memory, int32_t* ids) {
  const int64_t others = pages - 1, fewest = fewest_pages(policy, pages), sinks = fewest - 1;
  bool finite = true;
  for (int64_t page = 0; page < others; ++page) {
    float& score = scores[page];
    finite = finite && std::fabs(score) <= FLT_MAX;
    score = score == score ? std::clamp(score, -FLT_MAX, FLT_MAX) : FLT_MAX;
  }
  int64_t count = max_pages_read(policy, pages);
  if (finite && (policy.threshold > 0 || policy.min_ratio != policy.max_ratio)) {
    const float top = kernels.max_row(scores, others);
    count =
        std::min(count, count_by_weight(kernels, policy, rows, scores, top, pages, memory.weights));
  }
  std::iota(ids, ids + sinks, 0);
  const int64_t best = count - fewest;  // pages that scores choose
  if (best == others - sinks) {
    std::iota(ids + sinks, ids + others, static_cast<int32_t>(sinks));
  } else if (best > 0) {
    const Values values{scores + sinks, others - sinks, 1.0f};
    kept_ids(values, cut_at_count(values, best, memory.selection), ids + sinks);
    for (int64_t i = sinks; i < sinks + best; ++i) ids[i] += static_cast<int32_t>(sinks);
  }
  ids[count - 1] = static_cast<int32_t>(others);
  return count;
}

}  // namespace bitnet::engine
