// The blocks of an MTP head, which guesses tokens from states of the model.
//
// A head reads pairs: the embedding of a token and the state, behind the last norm, of the token
// before. `draft_keys` stands behind the last block of the model's own program. It makes the keys
// and values of the head's attention for the pairs of all new tokens, and keeps the newest states.
// So the head's cache is a layer of the model's, and whatever shares, moves or takes back positions
// of the model does so with it. A token at position 0 has no pair; its keys are of no use.
//
//   embedding_norm state_norm  names: the norms of the two halves
//   fc                         name: [hidden, 2 hidden], the half of the embedding first
//   hidden                     as of the line `model`
//   output_norm                name: the model's last norm
//   norm k v k_norm            names: of the attention block of the head, which lies in another
//                              program over the same cache (its layer of it)
//   kv_heads head_dim rope     likewise
//   digits activation_format   as of every projection
//
// `draft_input`, the first block of the head's program, makes the residual stream of pairs. It has
// embedding_norm, state_norm, fc, hidden, digits and activation_format. The state of a pair lies
// among the kept ones.
#include <algorithm>

#include "engine/blocks/blocks.h"
#include "engine/program/products.h"

namespace bitnet::engine {
namespace {

// Of a sequence the state of its last certain token, then those of its drafts.
KeptBuffer states_of(int64_t hidden) { return {"draft_states", {hidden}, 1}; }

// What both blocks share.
struct Pairs {
  explicit Pairs(Binding& b)
      : embedding_norm(b.norm("embedding_norm", b.settings.hidden, b.settings.eps)),
        state_norm(b.norm("state_norm", b.settings.hidden, b.settings.eps)) {
    const int64_t hidden = b.settings.hidden;
    b.keys.integer("hidden", hidden, hidden);
    b.linear("fc", hidden, 2 * hidden, fc);
    place = b.program.keep(b.keys, "fc", {states_of(hidden)});
  }

  // The kept states of a sequence: row r is that in front of its next token if r drafts of its
  // last step turned out right.
  float* kept(const Step& step, int64_t sequence) const {
    const KeptMemory& memory = step.batch.kept[place.first];
    return memory.data + step.batch.state_steps[sequence].slot * memory.slot +
           place.layer * memory.layer;
  }

  Norm embedding_norm, state_norm;
  Linear fc;
  KeptPlace place;
};

int64_t sequence_of(const Sequences& sequences, int64_t token) {
  const int64_t* const end = sequences.query_start + sequences.count;
  return std::upper_bound(sequences.query_start, end + 1, token) - sequences.query_start - 1;
}

// The normalised halves of every token's pair.
class PairRows final : public RowSource {
 public:
  // states: [tokens, hidden], of the step's own tokens; null: all states are kept ones
  PairRows(const Step& step, const Pairs& pairs, const float* states)
      : step_(step), pairs_(pairs), states_(states) {}

  NormJob job(int64_t token, float* row) const override {
    const KernelTable& kernels = *step_.kernels;
    const Settings& s = step_.settings();
    const Sequences& sequences = step_.batch.sequences;
    const int64_t sequence = sequence_of(sequences, token);
    float* const half = row + s.hidden;
    std::copy_n(step_.batch.x + token * s.hidden, s.hidden, row);
    if (states_ != nullptr && token != sequences.query_start[sequence]) {
      std::copy_n(states_ + (token - 1) * s.hidden, s.hidden, half);
    } else if (sequences.start(sequence) == 0) {
      std::fill_n(half, s.hidden, 0.0f);
    } else {
      const int64_t replays = step_.batch.state_steps[sequence].replays;
      std::copy_n(pairs_.kept(step_, sequence) + replays * s.hidden, s.hidden, half);
    }
    for (const auto& [part, norm] :
         {std::pair(row, pairs_.embedding_norm), std::pair(half, pairs_.state_norm)}) {
      kernels.round_row(s.type, part, s.hidden);
      apply_norm(kernels, norm, s.type, s.hidden, part);
    }
    return {row, 2 * s.hidden, s.type, nullptr, 0.0f, row};
  }

 private:
  const Step& step_;
  const Pairs& pairs_;
  const float* states_;
};

// Rows of Settings::type, with a norm.
class StoredRows final : public RowSource {
 public:
  StoredRows(const Step& step, const void* x, const Norm& norm) : step_(step), x_(x), norm_(norm) {}

  NormJob job(int64_t j, float* row) const override {
    const Settings& s = step_.settings();
    load_values(*step_.kernels, s.type, x_, j * s.hidden, s.hidden, row);
    return {row, s.hidden, s.type, norm_.weight, norm_.eps, row};
  }

 private:
  const Step& step_;
  const void* x_;
  Norm norm_;
};

class DraftKeysBlock final : public Block {
 public:
  explicit DraftKeysBlock(Binding& b);
  void append(PlanBuilder& plan) const override;
  bool mixes_tokens() const override { return true; }
  int64_t weights() const override {
    return pairs.fc.rows * pairs.fc.k + (k_.rows + v_.rows) * k_.k;
  }
  int64_t product_stages() const override { return 2; }

  int64_t kv_heads, dim, rope, rope_dim, layer;
  Pairs pairs;
  Norm output_norm, norm, k_norm;

 private:
  Linear k_, v_;
  ActivationFormat pair_format_, format_;
};

DraftKeysBlock::DraftKeysBlock(Binding& b)
    : kv_heads(b.keys.integer("kv_heads", 1, kMaxFeatures)),
      dim(b.keys.integer("head_dim", 2, kMaxFeatures / kv_heads)),
      rope(b.program.rope_of(b.keys, dim)),
      rope_dim(b.program.ropes()[static_cast<size_t>(rope)].dim),
      pairs(b) {
  const Settings& s = b.settings;
  output_norm = b.norm("output_norm", s.hidden, s.eps);
  norm = b.norm("norm", s.hidden, s.eps);
  k_norm = b.optional_norm("k_norm", dim, s.eps);
  b.linear("k", kv_heads * dim, s.hidden, k_);
  b.linear("v", kv_heads * dim, s.hidden, v_);
  pair_format_ = b.input_of({&pairs.fc});
  format_ = b.input_of({&k_, &v_});
  b.needs.row = std::max({b.needs.row, 2 * s.hidden, 2 * dim});
  layer = b.program.add_attention(b.keys, kv_heads, dim);
}

// Unit: a token, whose state is made; then a row of logits, which is copied.
class NewStates final : public StageWork {
 public:
  NewStates(const Step& step, const Norm& norm, float* states)
      : step_(step), norm_(norm), states_(states) {}

  void run(int64_t begin, int64_t end, int64_t /*slot*/) const override {
    const int64_t hidden = step_.settings().hidden, tokens = step_.batch.tokens;
    for (int64_t unit = begin; unit < end; ++unit) {
      if (unit >= tokens) {
        step_.copy_logit_row(unit - tokens);
        continue;
      }
      step_.kernels->rms_norm_row(step_.x + unit * hidden, norm_.weight, hidden, norm_.eps,
                                  DType::kF32, states_ + unit * hidden);
    }
  }

 private:
  const Step& step_;
  Norm norm_;
  float* states_;
};

// Unit: a token and a head, whose key and value are written; then a sequence, whose states are
// kept for the next step.
class DraftKeys final : public StageWork {
 public:
  struct Memory {
    const void *k, *v;
    const float* states;
  };
  DraftKeys(const Step& step, const DraftKeysBlock& block, const Memory& memory)
      : step_(step), block_(block), memory_(memory) {}

  int64_t units() const override {
    return step_.batch.tokens * block_.kv_heads + step_.batch.sequences.count;
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const CachePool pool = step_.batch.pool.of(block_.layer);
    const int64_t heads = step_.batch.tokens * block_.kv_heads;
    for (int64_t unit = begin; unit < end; ++unit) {
      if (unit < heads) {
        write(pool, unit, step_.thread_inputs[slot].row);
      } else {
        keep(unit - heads);
      }
    }
  }

 private:
  void write(const CachePool& pool, int64_t unit, float* row) const {
    const KernelTable& kernels = *step_.kernels;
    const DType type = step_.settings().type;
    const int64_t dim = block_.dim, token = unit / block_.kv_heads;
    float* const other = row + dim;
    load_values(kernels, type, memory_.k, unit * dim, dim, other);
    apply_norm(kernels, block_.k_norm, type, dim, other);
    kernels.rope_head(other, step_.angles(block_.rope, token), block_.rope_dim, row);
    std::copy(other + block_.rope_dim, other + dim, row + block_.rope_dim);
    kernels.round_row(type, row, dim);
    load_values(kernels, type, memory_.v, unit * dim, dim, other);
    store_cache_rows(kernels, pool, step_.batch.slots[token], unit % block_.kv_heads, row, other);
  }

  void keep(int64_t sequence) const {
    const int64_t hidden = step_.settings().hidden,
                  end = step_.batch.sequences.query_start[sequence + 1];
    const int64_t drafts = step_.batch.state_steps[sequence].drafts;
    float* to = block_.pairs.kept(step_, sequence);
    // All tokens of a step may be drafts, as where a state is brought up to date.
    const bool only_drafts = drafts == step_.batch.sequences.tokens(sequence);
    if (only_drafts) {
      const int64_t replays = step_.batch.state_steps[sequence].replays;
      if (step_.batch.sequences.start(sequence) == 0) {
        std::fill_n(to, hidden, 0.0f);
      } else if (replays != 0) {
        std::copy_n(to + replays * hidden, hidden, to);
      }
    }
    for (int64_t i = only_drafts ? 1 : 0; i <= drafts; ++i)
      std::copy_n(memory_.states + (end - 1 - drafts + i) * hidden, hidden, to + i * hidden);
  }

  const Step& step_;
  const DraftKeysBlock& block_;
  Memory memory_;
};

void DraftKeysBlock::append(PlanBuilder& plan) const {
  const Step& step = plan.step();
  const Settings& s = plan.settings();
  const int64_t tokens = plan.rows().count, kv = kv_heads * dim;
  auto* states = plan.scratch<float>(tokens * s.hidden);
  void *pair = plan.activations(tokens * s.hidden), *k = plan.activations(tokens * kv),
       *v = plan.activations(tokens * kv);
  const bool selects = plan.selects_logit_rows();
  const int64_t copied = selects && !step.wants_all_logits() ? step.batch.logit_count : 0;
  plan.add(
      {"draft states", plan.make<NewStates>(step, output_norm, states), tokens + copied, {1, 64}});
  append_products(plan, {"norm pairs", "draft fc", "expand fc"},
                  plan.make<PairRows>(step, pairs, states), pair_format_, {{&pairs.fc, pair}});
  append_products(plan, {"norm draft kv", "draft kv", "expand draft kv"},
                  plan.make<StoredRows>(step, pair, norm), format_, {{&k_, k}, {&v_, v}});
  Stage keep{
      "draft keys", plan.make<DraftKeys>(step, *this, DraftKeys::Memory{k, v, states}), 0, {1, 64}};
  keep.varies = true;
  plan.add(keep);
  if (selects) plan.select_logit_rows();
}

class DraftInputBlock final : public Block {
 public:
  explicit DraftInputBlock(Binding& b) : pairs_(b) {
    format_ = b.input_of({&pairs_.fc});
    b.needs.row = std::max(b.needs.row, 2 * b.settings.hidden);
  }
  void append(PlanBuilder& plan) const override;
  int64_t weights() const override { return pairs_.fc.rows * pairs_.fc.k; }
  int64_t product_stages() const override { return 1; }

 private:
  Pairs pairs_;
  ActivationFormat format_;
};

// Unit: a token, whose row of the residual stream becomes that of a buffer.
class Entering final : public StageWork {
 public:
  Entering(const Step& step, const void* rows) : step_(step), rows_(rows) {}

  void run(int64_t begin, int64_t end, int64_t /*slot*/) const override {
    const int64_t hidden = step_.settings().hidden;
    for (int64_t token = begin; token < end; ++token)
      load_values(*step_.kernels, step_.settings().type, rows_, token * hidden, hidden,
                  step_.x + token * hidden);
  }

 private:
  const Step& step_;
  const void* rows_;
};

void DraftInputBlock::append(PlanBuilder& plan) const {
  const Step& step = plan.step();
  const int64_t tokens = plan.rows().count;
  void* pair = plan.activations(tokens * plan.settings().hidden);
  append_products(plan, {"norm pairs", "draft fc", "expand fc"},
                  plan.make<PairRows>(step, pairs_, nullptr), format_, {{&pairs_.fc, pair}});
  plan.add({"enter pairs", plan.make<Entering>(step, pair), tokens, {1, 64}});
}

}  // namespace

std::unique_ptr<Block> make_draft_keys(Binding& binding) {
  return std::make_unique<DraftKeysBlock>(binding);
}

std::unique_ptr<Block> make_draft_input(Binding& binding) {
  return std::make_unique<DraftInputBlock>(binding);
}

}  // namespace bitnet::engine
