// The block `delta_net`: norm, projections, causal convolution, gated delta rule, gated norm, out.
//
//   norm qkv z out         names: the norm before, the projections; rows of qkv are queries, keys,
//                          values, head after head
//   a b                    names: dense float32 [value_heads, hidden], of decay and write strength
//   conv                   name: the convolution, float32 [kernel, channels], the last row that of
//                          the current token; a channel for each row of qkv
//   A_log dt_bias          names: float32 [value_heads]
//   gated_norm             name: the norm of every value head before z's SiLU multiplies it
//   key_heads value_heads  value head n has the queries and keys of head n / (value_heads /
//                          key_heads)
//   key_dim value_dim      multiples of 32
//   kernel                 tokens that the convolution sees, the current one included
//   activation_format      what projections with scales of groups multiply by
#include <algorithm>

#include "engine/blocks/blocks.h"
#include "engine/delta_net.h"
#include "engine/program/products.h"

namespace bitnet::engine {
namespace {

// Gates of a unit: the tokens that meet a row of weights, and the rows.
constexpr int64_t kGateTokens = 8, kGateHeads = 16;

class DeltaNetBlock final : public Block {
 public:
  explicit DeltaNetBlock(Binding& b);
  void append(PlanBuilder& plan) const override;
  bool mixes_tokens() const override { return true; }
  int64_t weights() const override { return (qkv_.rows + z_.rows + out_.rows) * qkv_.k; }
  int64_t product_stages() const override { return 2; }

  const DeltaShape& shape() const { return net->shape(); }

  std::unique_ptr<DeltaNet> net;
  KeptPlace place;
  Norm norm, gated_norm;
  const float *a, *b;

 private:
  Linear qkv_, z_, out_;
  ActivationFormat format_, out_format_;
};

int64_t head_dim(Keys& keys, const char* key) {
  const int64_t dim = keys.integer(key, kStateColumns, kMaxKeyDim);
  if (dim % kStateColumns != 0)
    keys.fail(key, "a multiple of " + std::to_string(kStateColumns), std::to_string(dim));
  return dim;
}

DeltaNetBlock::DeltaNetBlock(Binding& b) {
  const Settings& s = b.settings;
  DeltaShape shape{};
  shape.key_heads = b.keys.integer("key_heads", 1, kMaxFeatures / kMaxKeyDim);
  shape.value_heads = b.keys.integer("value_heads", 1, kMaxFeatures / kMaxKeyDim);
  if (shape.value_heads % shape.key_heads != 0)
    b.keys.fail("value_heads", "a multiple of key_heads=" + std::to_string(shape.key_heads),
                std::to_string(shape.value_heads));
  shape.key_dim = head_dim(b.keys, "key_dim");
  shape.value_dim = head_dim(b.keys, "value_dim");
  shape.taps = b.keys.integer("kernel", 2, kMaxTaps);
  norm = b.norm("norm", s.hidden, s.eps);
  gated_norm = b.norm("gated_norm", shape.value_dim, s.eps);
  b.linear("qkv", shape.channels(), s.hidden, qkv_);
  b.linear("z", shape.values(), s.hidden, z_);
  b.linear("out", s.hidden, shape.values(), out_);
  const auto vector = [&](const char* key) {
    return b.source.floats(b.keys.word(key), shape.value_heads);
  };
  const auto matrix = [&](const char* key, int64_t rows, int64_t n) {
    return b.source.matrix(b.keys.word(key) + ".weight", rows, n);
  };
  a = matrix("a", shape.value_heads, s.hidden);
  this->b = matrix("b", shape.value_heads, s.hidden);
  const DeltaWeights weights{matrix("conv", shape.taps, shape.channels()), vector("A_log"),
                             vector("dt_bias")};
  net = std::make_unique<DeltaNet>(shape, weights);
  format_ = b.input_of({&qkv_, &z_});
  out_format_ = b.input_of({&out_});
  b.needs.row =
      std::max({b.needs.row, net->thread_floats(), kGateTokens * (s.hidden + 2 * kGateHeads),
                shape.values() + 2 * shape.value_dim});
  place = b.program.keep(b.keys, "key_heads", shape.buffers());
}

struct DeltaMemory {
  const void *u, *z;
  float *mixed, *decay, *beta, *out;
};

// What stages of a block share.
class DeltaStage : public StageWork {
 public:
  DeltaStage(const Step& step, const DeltaNetBlock& block, const DeltaMemory& memory)
      : step_(step), block_(block), memory_(memory) {}

 protected:
  ~DeltaStage() = default;
  DeltaStates states() const {
    return DeltaStates::of(step_.batch.kept + block_.place.first, block_.place.layer);
  }
  DeltaRows rows() const {
    return {memory_.u,     step_.settings().type, memory_.mixed,
            memory_.decay, memory_.beta,          memory_.out};
  }

  const Step& step_;
  const DeltaNetBlock& block_;
  DeltaMemory memory_;
};

// Units: gates of some tokens and heads; then a head of a sequence's queries, keys or values; then,
// if only some rows go on, a unit for each of these rows, which copies it.
class Mixing final : public DeltaStage {
 public:
  Mixing(const Step& step, const DeltaNetBlock& block, const DeltaMemory& memory, int64_t copied)
      : DeltaStage(step, block, memory), copied_(copied) {}

  int64_t units() const override {
    return gate_units() + block_.net->mix_units(step_.batch.sequences) + copied_;
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const int64_t gates = gate_units(), mixes = block_.net->mix_units(step_.batch.sequences);
    float* row = step_.thread_inputs[slot].row;
    for (int64_t unit = begin; unit < end; ++unit) {
      if (unit < gates) {
        gate(unit, row);
      } else if (unit < gates + mixes) {
        block_.net->mix(*step_.kernels, step_.batch.sequences, step_.batch.state_steps, states(),
                        rows(), unit - gates, row);
      } else {
        step_.copy_logit_row(unit - gates - mixes);
      }
    }
  }

 private:
  int64_t head_groups() const { return (block_.shape().value_heads + kGateHeads - 1) / kGateHeads; }
  int64_t gate_units() const {
    return (step_.batch.tokens + kGateTokens - 1) / kGateTokens * head_groups();
  }

  void gate(int64_t unit, float* row) const {
    const KernelTable& kernels = *step_.kernels;
    const Settings& s = step_.settings();
    const int64_t heads = block_.shape().value_heads, first = unit / head_groups() * kGateTokens;
    const int64_t head = unit % head_groups() * kGateHeads;
    const int64_t count = std::min(kGateHeads, heads - head);
    const int64_t tokens = std::min(kGateTokens, step_.batch.tokens - first);
    for (int64_t t = 0; t < tokens; ++t) {
      float* to = row + t * s.hidden;
      std::copy_n(step_.x + (first + t) * s.hidden, s.hidden, to);
      kernels.round_row(s.type, to, s.hidden);
      apply_norm(kernels, block_.norm, s.type, s.hidden, to);
    }
    float *a = row + kGateTokens * s.hidden, *b = a + kGateTokens * kGateHeads;
    const Prefetch ahead = step_.settings().ahead;
    kernels.head_dense(row, tokens, DType::kF32, block_.a, s.hidden, head, head + count, ahead, a,
                       kGateHeads);
    kernels.head_dense(row, tokens, DType::kF32, block_.b, s.hidden, head, head + count, ahead, b,
                       kGateHeads);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = (first + t) * heads + head;
      block_.net->gates(kernels, a + t * kGateHeads, b + t * kGateHeads, head, count,
                        memory_.decay + at, memory_.beta + at);
    }
  }

  int64_t copied_;  // rows of logits, to be copied
};

// Unit: a slab of a value head's state, of a sequence.
class Rule final : public DeltaStage {
 public:
  using DeltaStage::DeltaStage;

  int64_t units() const override { return block_.net->rule_units(step_.batch.sequences); }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    for (int64_t unit = begin; unit < end; ++unit)
      block_.net->rule(*step_.kernels, step_.batch.sequences, step_.batch.state_steps, states(),
                       rows(), unit, step_.thread_inputs[slot].row);
  }
  const void* weights_of(int64_t unit) const override {
    const int64_t of_sequence = block_.shape().value_heads * block_.shape().slabs();
    const DeltaStates from = states();
    const int64_t sequence = unit / of_sequence;
    if (sequence >= step_.batch.sequences.count) return nullptr;
    return from.recurrent + step_.batch.state_steps[sequence].slot * from.recurrent_slot +
           unit % of_sequence * block_.shape().slab_floats();
  }
};

// Every value head normalised, times silu(z).
class GatedHeads final : public RowSource {
 public:
  GatedHeads(const Step& step, const DeltaNetBlock& block, const DeltaMemory& memory,
             bool are_logit_rows)
      : step_(step), block_(block), memory_(memory), are_logit_rows_(are_logit_rows) {}

  NormJob job(int64_t j, float* row) const override {
    const KernelTable& kernels = *step_.kernels;
    const DType type = step_.settings().type;
    const DeltaShape& shape = block_.shape();
    const int64_t token = are_logit_rows_ ? step_.batch.logit_rows[j] : j, dim = shape.value_dim;
    float *head = row + shape.values(), *z = head + dim;
    for (int64_t i = 0; i < shape.values(); i += dim) {
      const int64_t at = token * shape.values() + i;
      kernels.rms_norm_row(memory_.out + at, block_.gated_norm.weight, dim, block_.gated_norm.eps,
                           DType::kF32, head);
      load_values(kernels, type, memory_.z, at, dim, z);
      kernels.silu_mul_row(z, head, dim, row + i);
    }
    return {row, shape.values(), type, nullptr, 0.0f, row};
  }

 private:
  const Step& step_;
  const DeltaNetBlock& block_;
  DeltaMemory memory_;
  bool are_logit_rows_;
};

void DeltaNetBlock::append(PlanBuilder& plan) const {
  const Step& step = plan.step();
  const Settings& s = plan.settings();
  const DeltaShape& of = shape();
  const int64_t tokens = plan.rows().count;
  void *u = plan.activations(tokens * of.channels()), *z = plan.activations(tokens * of.values());
  const DeltaMemory memory{u,
                           z,
                           plan.scratch<float>(of.mixed_floats(tokens)),
                           plan.scratch<float>(tokens * of.value_heads),
                           plan.scratch<float>(tokens * of.value_heads),
                           plan.scratch<float>(tokens * of.values())};
  const auto* input = plan.make<NormedRows>(plan.rows().residual, s.hidden, norm, s.type);
  append_products(plan, {"norm qkvz", "qkvz", "expand qkvz"}, input, format_,
                  {{&qkv_, u}, {&z_, z}});
  const bool selects = plan.selects_logit_rows();
  const int64_t copied = selects && !step.wants_all_logits() ? step.batch.logit_count : 0;
  Stage mix{"mix", plan.make<Mixing>(step, *this, memory, copied), 0, {1, 64}};
  Stage rule{"delta rule", plan.make<Rule>(step, *this, memory), 0, {1, 64}, true};
  mix.varies = rule.varies = true;
  plan.add(mix);
  plan.add(rule);
  if (selects) plan.select_logit_rows();
  const auto* heads = plan.make<GatedHeads>(step, *this, memory, plan.rows().are_logit_rows);
  append_added(plan, {"norm out", "out", "expand out"}, "post out", heads, out_format_, out_,
               Norm{nullptr, 0.0f});
}

}  // namespace

std::unique_ptr<Block> make_delta_net(Binding& binding) {
  return std::make_unique<DeltaNetBlock>(binding);
}

}  // namespace bitnet::engine
