// The stages of a model step; see model_step.h. A stage may read what another has written because
// the executor ends one before it begins the next. Nothing here throws or allocates.
#include "engine/model_step.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "engine/fused.h"
#include "engine/kv_cache.h"
#include "format/layout.h"

namespace bitnet::engine {
namespace {

// Of a unit: they stay in cache while every token meets them.
int64_t head_unit_rows(const HeadView& head) {
  constexpr int64_t kRows = 32;
  static_assert(kRows % layout::kHeadTileRows == 0);
  return head.format == HeadFormat::kTernary ? head.unit_rows() : kRows;
}

int64_t float_bytes(int64_t n) { return n * static_cast<int64_t>(sizeof(float)); }

// row [n] -> [n + count]: zeros come to the places `dropped`, which ascend. From the end, in place.
void spread(const int64_t* dropped, int64_t count, int64_t n, float* row) {
  for (int64_t i = count - 1; i >= 0; --i) {
    const int64_t begin = dropped[i] - i;  // of those behind it, as they lie now
    std::memmove(row + dropped[i] + 1, row + begin, static_cast<size_t>(float_bytes(n - begin)));
    row[dropped[i]] = 0.0f;
    n = begin;
  }
}

// The job's row but for its codes.
void normalise_row(const KernelTable& table, const NormJob& job) {
  if (job.y != job.x) std::memcpy(job.y, job.x, static_cast<size_t>(float_bytes(job.n)));
  table.round_row(job.type, job.y, job.n);
  apply_norm(table, {job.weight, job.eps}, job.type, job.n, job.y);
}

// row [width] -> [width - count], back again.
void gather(const int64_t* dropped, int64_t count, int64_t width, float* row) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = dropped[i] + 1, end = i + 1 < count ? dropped[i + 1] : width;
    std::memmove(row + dropped[i] - i, row + begin, static_cast<size_t>(float_bytes(end - begin)));
  }
}

}  // namespace

void fill_token(const StepModel& m, const StepBuffers& buffers, int64_t token) {
  const int64_t at = token * m.hidden;
  std::copy_n(buffers.input + at, m.hidden, buffers.x + at);
  rope_angles(m.positions[token], m.rope, m.dim / 2, buffers.cos_sin + token * m.dim);
  if (m.local_rope.inv_freq == nullptr) return;
  float* local = buffers.cos_sin + (m.tokens + token) * m.dim;
  rope_angles(m.positions[token], m.local_rope, m.dim / 2, local);
}

void keep_logit_row(const StepModel& m, const StepBuffers& buffers, int64_t j) {
  if (buffers.kept == buffers.x) return;
  std::memcpy(buffers.kept + j * m.hidden, buffers.x + m.logit_rows[j] * m.hidden,
              static_cast<size_t>(m.hidden) * sizeof(float));
}

int64_t input_width(const StepModel& m, int which) {
  return which == kDown ? m.full_width() : weight_size(m, which).k;
}

WeightSize weight_size(const StepModel& m, int which) {
  switch (which) {
    case kQ:
      return {m.query(), m.hidden};
    case kK:
    case kV:
      return {m.kv(), m.hidden};
    case kO:
      return {m.hidden, m.query()};
    case kDown:
      return {m.hidden, m.down_width()};
    default:
      return {m.intermediate, m.hidden};
  }
}

// Normalising every token on every thread costs tokens * (partitions - 1) rows of work too many,
// about 0.2 us each; a stage of its own costs a barrier and a trip of the codes between caches.
StepPlan::StepPlan(const StepModel& model, const AttentionPlans& attention, const StepSides& sides,
                   const StepCuts& cuts, const StepBuffers& buffers, int64_t partitions)
    : model_(model),
      attention_(attention),
      sides_(sides),
      cuts_(cuts),
      buffers_(buffers),
      partitions_(partitions),
      split_norms_(splits_norms(model.tokens, partitions)) {}

StepPlan::Place StepPlan::place(int64_t stage) const {
  const int64_t layer = stage / kStagesOfLayer;
  return {layer < model_.n_layers ? model_.layers + layer : nullptr,
          static_cast<int>(stage % kStagesOfLayer)};
}

const char* StepPlan::name(int64_t stage) const {
  static constexpr const char* kLayer[] = {
      "norm qkv",  "qkv",        "expand qkv",  "rotate",       "attend",  "norm out",
      "out",       "expand out", "post out",    "norm gate/up", "gate/up", "expand gate/up",
      "norm down", "down",       "expand down", "post down"};
  static constexpr const char* kEnd[] = {"norm head", "head"};
  static_assert(std::size(kLayer) == kStagesOfLayer && std::size(kEnd) == kStagesOfEnd);
  const Place at = place(stage);
  return (at.layer == nullptr ? kEnd : kLayer)[at.stage];
}

bool StepPlan::keeps_logit_rows_only(const Place& at) const {
  return at.layer == nullptr ||
         (at.layer == model_.layers + model_.n_layers - 1 && at.stage >= kNormOut);
}

int64_t StepPlan::tokens_at(const Place& at) const {
  return keeps_logit_rows_only(at) ? model_.head_tokens : model_.tokens;
}

bool StepPlan::copies_logit_rows(const Place& at) const {
  return at.layer == model_.layers + model_.n_layers - 1 && buffers_.kept != buffers_.x;
}

float* StepPlan::residual(const Place& at) const {
  return keeps_logit_rows_only(at) ? buffers_.kept : buffers_.x;
}

StepPlan::StageWeights StepPlan::weights_at(const Place& at) {
  if (at.layer == nullptr) return {};
  switch (at.stage) {
    case kQkv:
    case kExpandQkv:
      return {kQ, 3};
    case kOut:
    case kExpandOut:
      return {kO, 1};
    case kGateUp:
    case kExpandGateUp:
      return {kGate, 2};
    case kDownStage:
    case kExpandDown:
      return {kDown, 1};
    default:
      return {};
  }
}

void* StepPlan::output(const Place& at, int which) const {
  void* const own[] = {buffers_.q, buffers_.k, buffers_.v, nullptr, buffers_.gate, buffers_.up};
  if (which != kO && which != kDown) return own[which];
  return model_.post_norms || has_side(at, which) ? buffers_.projected : nullptr;
}

Projection StepPlan::projection(const Place& at, int which) const {
  const Weight& w = at.layer->weights[which];
  const ScaleForm form = model_.scale_forms[which];
  void* out = output(at, which);
  Projection p{&w,
               static_cast<const float*>(at.layer->scales[which]),
               form == ScaleForm::kRows ? 1 : 0,
               at.layer->biases[which],
               {StoreKind::kStore, model_.type, out, w.n_rows * element_size(model_.type)}};
  if (form == ScaleForm::kGroups) {
    const bool blocked = w.format != WeightFormat::kCanonical;
    p.groups = {at.layer->scales[which], blocked ? model_.group_scale_type : DType::kF32, blocked,
                model_.group_weights[which]};
  }
  if (out == nullptr) p.out = {StoreKind::kAdd, model_.type, residual(at), float_bytes(w.n_rows)};
  return p;
}

StepPlan::Projections StepPlan::projections(const Place& at) const {
  Projections p;
  if (expands(at)) return p;
  const StageWeights weights = weights_at(at);
  p.count = weights.count;
  for (int i = 0; i < p.count; ++i) p.at[i] = projection(at, weights.first + i);
  return p;
}

QuantizedTokens StepPlan::tokens_of(const Place& at, int64_t k, const StepInput& from,
                                    int input) const {
  QuantizedTokens x = from.x[input];
  x.tokens = tokens_at(at);
  x.k = k;
  x.padded_k = layout::padded_k(k);
  // sums over groups are taken of rows as they lie
  const bool grouped = is_grouped(at);
  x.tile = grouped ? 0 : model_.table->product_blocking(x.tokens, k).token_tile;
  x.format = grouped ? model_.activations : ActivationFormat::kInt8;
  if (grouped) x.group = model_.group_weights[weights_at(at).first];
  if (!grouped) x.groups = nullptr;
  if (x.format == ActivationFormat::kInt8) x.group_scales = nullptr;
  return x;
}

bool StepPlan::is_grouped(const Place& at) const {
  return model_.scale_forms[weights_at(at).first] == ScaleForm::kGroups;
}

template <class F>
void StepPlan::for_each_product(const Place& at, const StepInput& from, F&& f) const {
  const Projections p = projections(at);
  const int first = weights_at(at).first;
  const ProductCut& cut = (keeps_logit_rows_only(at) ? cuts_.of_kept : cuts_.of_all)[first];
  const int products = model_.inner_norms ? p.count : std::min(p.count, 1);
  for (int i = 0; i < products; ++i) {
    const QuantizedTokens x = tokens_of(at, p.at[i].weight->k, from, i);
    f(Product(*model_.table, x, p.at + i, model_.inner_norms ? 1 : p.count, cut, buffers_.parts));
  }
}

int64_t StepPlan::units(int64_t stage) const {
  const Place at = place(stage);
  if (tokens_at(at) == 0) return 0;
  if (weights_at(at).count != 0) {
    if (expands(at)) return expand_units_at(at);
    int64_t units = shrink_units_at(at);
    for_each_product(at, buffers_.shared, [&](const Product& p) { units += p.units(); });
    return units;
  }
  if (at.layer == nullptr && at.stage == kHead)
    return (model_.head.rows + head_unit_rows(model_.head) - 1) / head_unit_rows(model_.head);
  if (at.layer != nullptr && at.stage == kRotate)
    return rotated_heads() + (copies_logit_rows(at) ? model_.head_tokens : 0);
  if (at.layer != nullptr && at.stage == kAttend) return attention_.of(at.layer->window).tasks();
  if (is_post(at)) return model_.post_norms ? tokens_at(at) : 0;
  return split_norms_ ? tokens_at(at) : 0;
}

ClaimRule StepPlan::claim(int64_t stage) const {
  ClaimRule rule{1, 64};
  bool first = true;
  for_each_product(place(stage), buffers_.shared, [&](const Product& p) {
    if (first) rule = p.claim();
    first = false;
  });
  return rule;
}

// What the stage at `at` multiplies by, for one token: norm (or activation and sub-norm), int8.
void StepPlan::normalise(const Place& at, int64_t j, float* row, const StepInput& to) const {
  const StepModel& m = model_;
  const KernelTable& table = *m.table;
  if (at.layer == nullptr) {
    table.rms_norm_row(buffers_.kept + j * m.hidden, m.final_norm, m.hidden, m.eps, DType::kF32,
                       row);
    return prepare_head_token(table, m.head, row, j, to.head);
  }
  NormJob job{nullptr, m.hidden, m.type, nullptr, m.eps, row};
  if (at.stage == kQkv || at.stage == kGateUp) {
    job.x = residual(at) + j * job.n;
    job.weight = at.stage == kQkv ? at.layer->attention_norm : at.layer->mlp_norm;
  } else if (at.stage == kOut) {
    const int64_t token = keeps_logit_rows_only(at) ? m.logit_rows[j] : j;
    job.n = m.query();
    job.x = buffers_.attended + token * job.n;
    job.weight = at.layer->out_norm;
    job.eps = m.sub_eps;
  } else {
    activate(j, row);
    spread(at.layer->dropped, m.dropped, m.intermediate, row);
    job = {row, m.full_width(), m.type, at.layer->down_norm, m.sub_eps, row};
  }
  if (!m.inner_norms) return enter(at, j, job, 0, to);
  normalise_row(table, job);
  const StageWeights weights = weights_at(at);
  for (int i = 0; i < weights.count; ++i) {  // others need the row as it is
    const float* weight = at.layer->inner_norms[weights.first + i];
    enter(at, j, {row, job.n, m.type, weight, m.inner_eps, row + job.n}, i, to);
  }
}

void StepPlan::load(const void* buffer, int64_t from, int64_t n, float* row) const {
  const DType type = model_.type;
  model_.table->load_row(type, offset_bytes(buffer, from * element_size(type)), n, row);
}

// In pieces that stay in the first-level cache from loading to rounding.
void StepPlan::activate(int64_t j, float* row) const {
  constexpr int64_t kPiece = 512;
  alignas(64) float gate[kPiece], up[kPiece];
  if (model_.type == DType::kF32) {  // nothing to load or round
    const auto at = [&](const void* buffer) {
      return static_cast<const float*>(buffer) + j * model_.intermediate;
    };
    return model_.activation(at(buffers_.gate), at(buffers_.up), model_.intermediate, row);
  }
  for (int64_t i = 0; i < model_.intermediate; i += kPiece) {
    const int64_t from = j * model_.intermediate + i;
    const int64_t n = std::min(kPiece, model_.intermediate - i);
    load(buffers_.gate, from, n, gate);
    load(buffers_.up, from, n, up);
    model_.activation(gate, up, n, row + i);
    model_.table->round_row(model_.type, row + i, n);
  }
}

void StepPlan::enter(const Place& at, int64_t j, const NormJob& job, int i,
                     const StepInput& to) const {
  const KernelTable& table = *model_.table;
  const int64_t k = at.stage == kDownStage ? model_.down_width() : job.n;
  const QuantizedTokens x = tokens_of(at, k, to, i);
  const bool at_once = k == job.n && x.format == ActivationFormat::kInt8 && x.groups == nullptr;
  if (at_once) {
    x.quantize_normed(table, job, j);
  } else {
    normalise_row(table, job);
  }
  const AdapterGroups& with = groups(at);
  if (with.with_adapter() != 0 && with.place(j) < with.with_adapter()) {
    std::memcpy(to.side_rows[i] + with.place(j) * job.n, job.y,
                static_cast<size_t>(float_bytes(job.n)));
  }
  if (at_once) return;
  gather(at.layer->dropped, job.n - k, job.n, job.y);
  x.quantize(table, job.y, j);
}

void StepPlan::prepare(int64_t stage, int64_t slot) const {
  const Place at = place(stage);
  const bool head = at.layer == nullptr && at.stage == kHead;
  if (split_norms_ || (!head && (weights_at(at).count == 0 || expands(at)))) return;
  const StepInput& own = buffers_.own[slot];
  for (int64_t j = 0; j < tokens_at(at); ++j) normalise(at, j, own.row, own);
}

void StepPlan::run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const {
  const Place at = place(stage);
  const StepInput& own = buffers_.own[slot];
  const StepInput& input = split_norms_ ? buffers_.shared : own;
  if (weights_at(at).count != 0) {
    if (expands(at)) return expand_at(at, begin, end);
    int64_t offset = shrink_units_at(at);
    if (begin < offset) shrink_at(at, input, begin, std::min(end, offset));
    return for_each_product(at, input, [&](const Product& p) {
      const int64_t first = std::max(begin - offset, int64_t{0});
      const int64_t last = std::min(end - offset, p.units());
      if (first < last) p.run(first, last);
      offset += p.units();
    });
  }
  if (at.layer == nullptr && at.stage == kHead) return logits(begin, end, input);
  if (at.layer != nullptr && at.stage == kAttend) {
    return attend(*at.layer, begin, end, own.attention);
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    if (at.layer != nullptr && at.stage == kRotate) {
      rotate(*at.layer, unit, own.row);
    } else if (is_post(at)) {
      add_normed(at, unit, own.row);
    } else {  // a norm stage stands right before the stage it is for
      if (at.layer == model_.layers && at.stage == kNormQkv) fill_token(model_, buffers_, unit);
      normalise({at.layer, at.stage + 1}, unit, own.row, buffers_.shared);
    }
  }
}

// What o or down gave for token j, normalised, is added to the residual stream.
void StepPlan::add_normed(const Place& at, int64_t j, float* row) const {
  const StepModel& m = model_;
  const float* norm = at.stage == kPostOut ? at.layer->out_post_norm : at.layer->down_post_norm;
  const int64_t n = m.hidden;
  load(buffers_.projected, j * n, n, row);
  apply_norm(*m.table, {norm, m.eps}, m.type, n, row);
  float* to = residual(at) + j * n;
  m.table->add_row(to, row, n, to);
}

// Unit = a token and a query head, or a token and a key/value head, which also enters the cache;
// behind these in the last layer a token whose logits are wanted.
void StepPlan::rotate(const StepLayer& layer, int64_t unit, float* row) const {
  const StepModel& m = model_;
  if (unit >= rotated_heads()) {
    const int64_t j = unit - rotated_heads();
    return keep_logit_row(m, buffers_, j);
  }
  const KernelTable& table = *m.table;
  const int64_t per_token = m.heads + m.kv_heads, dim = m.dim;
  const int64_t token = unit / per_token, head = unit % per_token;
  const float* cos_sin = buffers_.cos_sin + (token + (layer.local_rope ? m.tokens : 0)) * dim;
  // `to` from a head as the projection has left it; `row`'s second half for what is loaded
  float* loaded = row + dim;
  const auto rotated = [&](const void* buffer, int64_t from, const float* norm, float* to) {
    load(buffer, from, dim, loaded);
    apply_norm(table, {norm, m.eps}, m.type, dim, loaded);
    table.rope_head(loaded, cos_sin, dim, to);
    table.round_row(m.type, to, dim);
  };
  if (head < m.heads) {
    const int64_t at = token * m.query() + head * dim;
    return rotated(buffers_.q, at, layer.q_norm, buffers_.rotated + at);
  }
  const int64_t kv_head = head - m.heads, from = token * m.kv() + kv_head * dim;
  rotated(buffers_.k, from, layer.k_norm, row);
  load(buffers_.v, from, dim, loaded);
  store_cache_rows(table, layer.pool, m.slots[token], kv_head, row, loaded);
}

void StepPlan::attend(const StepLayer& layer, int64_t begin, int64_t end, float* own) const {
  const AttentionBuffers buffers{buffers_.rotated, buffers_.attended, layer.pool};
  float* shared = attention_.shared_of(layer.window, buffers_.attention);
  attention_.of(layer.window).run(*model_.table, buffers, begin, end, shared, own);
}

void StepPlan::logits(int64_t begin, int64_t end, const StepInput& from) const {
  const HeadView& head = model_.head;
  const int64_t unit = head_unit_rows(head), first = begin * unit;
  head_rows(*model_.table, head, first, std::min(end * unit, head.rows), from.head,
            model_.head_tokens, buffers_.logits + first, head.rows);
}

// The thread's first bytes of the next matrix: they travel while it waits for the others.
void StepPlan::prefetch_next(int64_t stage, int64_t slot) const {
  constexpr int64_t kBytes = 8192, kLine = 64;
  const auto prefetch = [](const void* from) {
    for (int64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(offset_bytes(from, i));
  };
  if (weights_at(place(stage)).count == 0) return;
  for (int64_t next = stage + 1; next < stages(); ++next) {
    const Place at = place(next);
    if (tokens_at(at) == 0) return;
    if (weights_at(at).count != 0 && !expands(at)) {
      int64_t unit = partition_begin(units(next), partitions_, slot) - shrink_units_at(at);
      const void* from = nullptr;
      for_each_product(at, buffers_.shared, [&](const Product& p) {
        if (from == nullptr && unit < p.units()) from = p.weights_of(std::max(unit, int64_t{0}));
        unit -= p.units();
      });
      if (from != nullptr) prefetch(from);
      return;
    }
    if (at.layer == nullptr && at.stage == kHead) {
      const int64_t row =
          partition_begin(units(next), partitions_, slot) * head_unit_rows(model_.head);
      return prefetch(offset_bytes(model_.head.weight, row * model_.head.row_bytes()));
    }
  }
}

}  // namespace bitnet::engine
