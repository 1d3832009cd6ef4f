// The stages of a decode step; see step_program.h. Which stage reads what another has written is
// safe because the team ends one before it begins the next. Must not know torch, tensors or
// threads.
#include "ops/step_program.h"

#include <cstring>

#include "format/layout.h"

namespace bitnet::ops {
namespace {

constexpr int64_t kHeadRows = 32;  // of a unit: they stay in cache while every token meets them
constexpr int64_t kMostBlockTokens = 64;
static_assert(kHeadRows % layout::kHeadTileRows == 0);

const StepLayer& layer_at(const StepModel& model, int64_t index) { return model.layers[index]; }

}  // namespace

// Normalising every token on every thread costs tokens * (shares - 1) rows of work too many, about
// 0.2 us each; a stage of its own costs a barrier and a trip of the codes between caches.
StepProgram::StepProgram(const StepModel& model, const StepBuffers& buffers, int64_t shares)
    : model_(model),
      buffers_(buffers),
      shares_(shares),
      split_norms_(splits_norms(model.tokens, shares)) {}

int64_t StepProgram::chunk_rows(int64_t tokens) {
  return std::clamp<int64_t>(8192 / std::max<int64_t>(tokens, 1), kMaxUnitRows, kMaxChunkRows);
}

// As equal as can be, so that more tokens never cost less.
int64_t StepProgram::block_tokens(int64_t tokens) {
  const int64_t blocks = (tokens + kMostBlockTokens - 1) / kMostBlockTokens;
  return (tokens + blocks - 1) / blocks;
}

StepProgram::Place StepProgram::place(int64_t stage) const {
  const int64_t layer = stage / kStagesOfLayer;
  return {layer < model_.n_layers ? &layer_at(model_, layer) : nullptr,
          static_cast<int>(stage % kStagesOfLayer)};
}

bool StepProgram::is_thinned(const Place& at) const {
  return at.layer == nullptr ||
         (at.layer == &layer_at(model_, model_.n_layers - 1) && at.stage >= kNormOut);
}

int64_t StepProgram::tokens_at(const Place& at) const {
  return is_thinned(at) ? model_.head_tokens() : model_.tokens;
}

int64_t StepProgram::token_of(const Place& at, int64_t j) const {
  if (!is_thinned(at)) return j;
  const int64_t skipped = model_.per_sequence - model_.kept;
  return j / model_.kept * model_.per_sequence + skipped + j % model_.kept;
}

StepProgram::Product StepProgram::product(const Place& at) const {
  if (at.layer == nullptr) return {};
  const Weight* w = at.layer->weights;
  const float* s = at.layer->scales;
  switch (at.stage) {
    case kQkv:
      return {w + kQ, 3, s + kQ, {buffers_.q, buffers_.k, buffers_.v}};
    case kOut:
      return {w + kO, 1, s + kO, {}};
    case kGateUp:
      return {w + kGate, 2, s + kGate, {buffers_.gate, buffers_.up}};
    case kDownStage:
      return {w + kDown, 1, s + kDown, {}};
    default:
      return {};
  }
}

int64_t StepProgram::units(int64_t stage) const {
  const Place at = place(stage);
  const Product p = product(at);
  int64_t units = 0;
  for (int i = 0; i < p.count; ++i) units += p.weights[i].units;
  if (p.count != 0) return units;
  if (at.layer == nullptr && at.stage == kHead)
    return (model_.head.rows + kHeadRows - 1) / kHeadRows;
  if (at.layer != nullptr && at.stage == kRotate)
    return model_.tokens * (model_.heads + model_.kv_heads);
  if (at.layer != nullptr && at.stage == kAttend) return model_.attention->tasks();
  return split_norms_ ? tokens_at(at) : 0;
}

int64_t StepProgram::max_chunk(int64_t stage) const {
  const Product p = product(place(stage));
  int64_t rows = 1;
  for (int i = 0; i < p.count; ++i) rows = std::max(rows, p.weights[i].unit_rows);
  return p.count == 0 ? 64 : std::max<int64_t>(1, chunk_rows(model_.tokens) / rows);
}

void StepProgram::norm_row(const float* gain, int64_t n, float* row) const {
  if (gain == nullptr) return;
  model_.table->rms_norm_row(row, gain, n, model_.eps, model_.type, row);
  model_.table->round_row(model_.type, row, n);
}

// What the stage at `at` multiplies by, for one token: norm (or activation and sub-norm), int8.
void StepProgram::normalise(const Place& at, int64_t j, float* row, const StepSlot& to) const {
  const StepModel& m = model_;
  const KernelTable& table = *m.table;
  const int64_t token = token_of(at, j);
  if (at.layer == nullptr) {
    table.rms_norm_row(buffers_.x + token * m.hidden, m.final_gain, m.hidden, m.eps, DType::kF32,
                       row);
    return prepare_head_token(table, m.head, row, j, to.head);
  }
  int64_t n = m.hidden;
  if (at.stage == kQkv || at.stage == kGateUp) {
    std::memcpy(row, buffers_.x + token * n, static_cast<size_t>(n) * sizeof(float));
    table.round_row(m.type, row, n);
    norm_row(at.stage == kQkv ? at.layer->attention_gain : at.layer->mlp_gain, n, row);
  } else if (at.stage == kOut) {
    n = m.query();
    std::memcpy(row, buffers_.attended + token * n, static_cast<size_t>(n) * sizeof(float));
    table.round_row(m.type, row, n);
    norm_row(at.layer->out_gain, n, row);
  } else {
    n = m.inner;
    (m.relu2 ? table.relu2_mul_row : table.silu_mul_row)(buffers_.gate + j * n, buffers_.up + j * n,
                                                         n, row);
    table.round_row(m.type, row, n);
    norm_row(at.layer->down_gain, n, row);
  }
  const int64_t stride = layout::padded_k(n);
  to.code_scales[j] = table.quantize_row(row, n, stride, to.codes + j * stride, to.code_sums + j);
}

void StepProgram::prepare(int64_t stage, int64_t slot) const {
  const Place at = place(stage);
  const bool needs_norm = product(at).count != 0 || (at.layer == nullptr && at.stage == kHead);
  if (!needs_norm || split_norms_) return;
  const StepSlot& own = buffers_.slots[slot];
  for (int64_t j = 0; j < tokens_at(at); ++j) normalise(at, j, own.row, own);
}

void StepProgram::run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const {
  const Place at = place(stage);
  const StepSlot& own = buffers_.slots[slot];
  if (const Product p = product(at); p.count != 0) return multiply(at, p, begin, end, slot);
  if (at.layer == nullptr && at.stage == kHead) return logits(begin, end, normed_by(slot));
  for (int64_t unit = begin; unit < end; ++unit) {
    if (at.layer != nullptr && at.stage == kRotate) {
      rotate(*at.layer, unit, own.row);
    } else if (at.layer != nullptr && at.stage == kAttend) {
      // a plan of whole groups begins with the longest
      const int64_t last = model_.attention->tasks() - 1;
      attend(*at.layer, model_.attention->split() ? unit : last - unit, own.attention);
    } else {  // a norm stage stands right before the stage it is for
      normalise({at.layer, at.stage + 1}, unit, own.row, buffers_.shared);
    }
  }
}

void StepProgram::multiply(const Place& at, const Product& p, int64_t begin, int64_t end,
                           int64_t slot) const {
  const StepSlot& own = buffers_.slots[slot];
  const StepSlot& x = normed_by(slot);
  const int64_t tokens = tokens_at(at), block = block_tokens(tokens);
  int64_t offset = 0;  // of the matrix's units among those of the stage
  for (int i = 0; i < p.count; offset += p.weights[i].units, ++i) {
    const Weight& w = p.weights[i];
    const int64_t first_unit = std::max(begin - offset, int64_t{0});
    const int64_t last_unit = std::min(end - offset, w.units);
    if (first_unit >= last_unit) continue;
    const int64_t stride = (last_unit - first_unit) * w.unit_rows, first = first_unit * w.unit_rows;
    const int64_t rows = std::min(last_unit * w.unit_rows, w.n_rows) - first;
    const int64_t code_stride = layout::padded_k(w.k);
    for (int64_t from = 0; from < tokens; from += block) {
      const int64_t count = std::min(block, tokens - from);
      multiply_units(*model_.table, w, first_unit, last_unit, x.codes + from * code_stride,
                     code_stride, x.code_sums + from, count, own.sums, stride);
      for (int64_t j = 0; j < count; ++j) {
        store(at, p, i, first, rows, from + j, own.sums + j * stride, x.code_scales[from + j],
              own.values);
      }
    }
  }
}

void StepProgram::store(const Place& at, const Product& p, int which, int64_t first, int64_t rows,
                        int64_t j, const int32_t* sums, float x_scale, float* values) const {
  const KernelTable& table = *model_.table;
  if (float* out = p.out[which]; out != nullptr) {
    out += j * p.weights[which].n_rows + first;
    table.scale_row(sums, rows, p.scales + which, 0, x_scale, nullptr, out);
    table.round_row(model_.type, out, rows);
    return;
  }
  float* x = buffers_.x + token_of(at, j) * model_.hidden + first;
  table.scale_row(sums, rows, p.scales + which, 0, x_scale, nullptr, values);
  table.round_row(model_.type, values, rows);
  table.add_row(x, values, rows, x);
}

// Unit = a token and a query head, or a token and a key/value head, which also enters the cache.
void StepProgram::rotate(const StepLayer& layer, int64_t unit, float* row) const {
  const StepModel& m = model_;
  const KernelTable& table = *m.table;
  const int64_t per_token = m.heads + m.kv_heads, dim = m.dim;
  const int64_t token = unit / per_token, head = unit % per_token;
  const float* cos_sin = buffers_.cos_sin + token * dim;
  if (head < m.heads) {
    float* to = buffers_.rotated + token * m.query() + head * dim;
    table.rope_head(buffers_.q + token * m.query() + head * dim, cos_sin, dim, to);
    table.round_row(m.type, to, dim);
    return;
  }
  const int64_t kv_head = head - m.heads, from = token * m.kv() + kv_head * dim;
  const int64_t sequence = token / m.per_sequence;
  const int64_t position = m.starts[sequence] + token % m.per_sequence;
  const int64_t at = (sequence * m.kv_heads + kv_head) * m.capacity + position;
  table.rope_head(buffers_.k + from, cos_sin, dim, row);
  table.round_row(m.type, row, dim);
  store_cache_row(table, m.cache_type, row, dim, at, layer.keys, layer.key_scale);
  store_cache_row(table, m.cache_type, buffers_.v + from, dim, at, layer.values, layer.value_scale);
}

void StepProgram::attend(const StepLayer& layer, int64_t task, float* own) const {
  const AttentionBuffers buffers{buffers_.rotated,  layer.keys,      layer.values,
                                 buffers_.attended, layer.key_scale, layer.value_scale};
  model_.attention->run(*model_.table, buffers, task, buffers_.attention, own);
}

void StepProgram::logits(int64_t begin, int64_t end, const StepSlot& from) const {
  const HeadView& head = model_.head;
  const int64_t first = begin * kHeadRows;
  head_rows(*model_.table, head, first, std::min(end * kHeadRows, head.rows), from.head,
            model_.head_tokens(), buffers_.logits + first, head.rows);
}

// The thread's first bytes of the next matrix: they travel while it waits for the others.
void StepProgram::look_ahead(int64_t stage, int64_t slot) const {
  constexpr int64_t kBytes = 8192, kLine = 64;
  const auto prefetch = [](const void* from) {
    for (int64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(offset_bytes(from, i));
  };
  if (product(place(stage)).count == 0) return;
  for (int64_t next = stage + 1; next < stages(); ++next) {
    const Place at = place(next);
    if (const Product p = product(at); p.count != 0) {
      int64_t unit = share_begin(units(next), shares_, slot);
      const Weight* w = p.weights;
      while (unit >= w->units && w + 1 < p.weights + p.count) unit -= w++->units;
      return prefetch(w->data + unit * w->unit_bytes);
    }
    if (at.layer == nullptr && at.stage == kHead) {
      const int64_t row = share_begin(units(next), shares_, slot) * kHeadRows;
      return prefetch(offset_bytes(model_.head.weight, row * model_.head.row_bytes()));
    }
  }
}

}  // namespace bitnet::ops
