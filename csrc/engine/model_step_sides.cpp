// The side paths (LoRA) of a model step; see model_step.h and side_paths.h. In the last layer,
// where only tokens whose logits are wanted go on, these are ordered by adapter anew.
#include <algorithm>

#include "engine/model_step.h"

namespace bitnet::engine {

void StepSides::build(const StepModel& m) {
  const bool any = m.adapters != 0 && std::any_of(m.token_adapters, m.token_adapters + m.tokens,
                                                  [](int64_t a) { return a >= 0; });
  all.build(m.token_adapters, any ? m.tokens : 0);
  kept_adapters_.clear();
  for (int64_t j = 0; any && j < m.head_tokens; ++j) {
    kept_adapters_.push_back(m.token_adapters[m.logit_rows[j]]);
  }
  kept.build(kept_adapters_.data(), static_cast<int64_t>(kept_adapters_.size()));
  most_rank = 0;
  has.assign(any ? static_cast<size_t>(m.n_layers * kLayerWeights) : 0, 0);
  for (size_t i = 0; i < has.size(); ++i) {
    for (const AdapterGroups::Group& group : all.groups()) {
      const int64_t rank = m.side_paths[static_cast<int64_t>(i) * m.adapters + group.adapter].rank;
      most_rank = std::max(most_rank, rank);
      if (rank != 0) has[i] = 1;
    }
  }
}

const AdapterGroups& StepPlan::groups(const Place& at) const {
  return keeps_logit_rows_only(at) ? sides_.kept : sides_.all;
}

bool StepPlan::has_side(const Place& at, int which) const {
  if (sides_.has.empty()) return false;
  const int64_t layer = at.layer - model_.layers;
  return sides_.has[static_cast<size_t>(layer * kLayerWeights + which)] != 0;
}

SideProjection StepPlan::side(const Place& at, int which, int i, const StepInput& from) const {
  const StepModel& m = model_;
  const int64_t layer = at.layer - m.layers;
  const bool added = which == kO || which == kDown;
  return {
      .paths = m.side_paths + (layer * kLayerWeights + which) * m.adapters,
      .k = input_width(m, which),
      .rows = weight_size(m, which).rows,
      .x = from.side_rows[m.inner_norms ? i : 0],
      .inner = buffers_.side_inner[i],
      .most_rank = sides_.most_rank,
      .ahead = m.head.ahead,
      .type = m.type,
      .y = output(at, which),
      .residual = added && !m.post_norms ? residual(at) : nullptr,
  };
}

template <class F>
void StepPlan::for_each_side(const Place& at, const StepInput& from, F&& f) const {
  if (sides_.has.empty()) return;
  const StageWeights weights = weights_at(at);
  for (int i = 0; i < weights.count; ++i) {
    const int which = weights.first + i;
    if (has_side(at, which)) f(side(at, which, i, from));
  }
}

int64_t StepPlan::shrink_units_at(const Place& at) const {
  int64_t units = 0;
  for_each_side(at, buffers_.shared,
                [&](const SideProjection& p) { units += shrink_units(groups(at), p); });
  return units;
}

void StepPlan::shrink_at(const Place& at, const StepInput& from, int64_t begin, int64_t end) const {
  int64_t offset = 0;  // of the projection's units among all
  for_each_side(at, from, [&](const SideProjection& p) {
    const int64_t units = shrink_units(groups(at), p);
    const int64_t first = std::max(begin - offset, int64_t{0}),
                  last = std::min(end - offset, units);
    if (first < last) shrink(*model_.table, groups(at), p, first, last);
    offset += units;
  });
}

int64_t StepPlan::expand_units_at(const Place& at) const {
  int64_t units = 0;
  for_each_side(at, buffers_.shared,
                [&](const SideProjection& p) { units += expand_units(groups(at), p); });
  return units;
}

void StepPlan::expand_at(const Place& at, int64_t begin, int64_t end) const {
  int64_t offset = 0;
  for_each_side(at, buffers_.shared, [&](const SideProjection& p) {
    const int64_t units = expand_units(groups(at), p);
    const int64_t first = std::max(begin - offset, int64_t{0}),
                  last = std::min(end - offset, units);
    if (first < last) expand(*model_.table, groups(at), p, first, last);
    offset += units;
  });
}

}  // namespace bitnet::engine
