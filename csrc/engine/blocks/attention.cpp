// The block `attention`: norm, q, k and v, rotation, cache, attention over it, out.
//
//   norm q k v o           names: the norm before, the projections
//   heads kv_heads head_dim
//   rope                   the name of a line `rope`, which turns the first features of a head
//   scale                  multiplies the scores; left out: 1 / sqrt(head_dim)
//   window sinks stride top_k threshold min_ratio max_ratio dense_below
//                          what a token sees: engine/attention_policy.h
//   output_gate            1: of each head q's rows are those of the query, then of a gate, whose
//                          sigmoid multiplies what attention gives; 0, the default: no gate
//   q_norm k_norm          norms of every query and key head, before rotation
//   sub_norm               norm before o
//   post_norm              norm of what is added to the residual
//   activation_format      what projections with scales of groups multiply by
#include <algorithm>
#include <cmath>

#include "engine/blocks/blocks.h"
#include "engine/program/products.h"

namespace bitnet::engine {
namespace {

class AttentionBlock final : public Block {
 public:
  explicit AttentionBlock(Binding& b);
  void append(PlanBuilder& plan) const override;
  bool mixes_tokens() const override { return true; }
  int64_t weights() const override { return (q_.rows + k_.rows + v_.rows + o_.rows) * q_.k; }
  int64_t product_stages() const override { return 2; }

  int64_t heads, kv_heads, dim, rope, rope_dim, layer, kind;
  bool chooses;        // pages
  int64_t query_step;  // from one head of q to the next, in features
  Norm q_norm, k_norm;

 private:
  Norm norm_, sub_norm_, post_norm_;
  Linear q_, k_, v_, o_;
  ActivationFormat format_, out_format_;
};

AttentionBlock::AttentionBlock(Binding& b) {
  const Settings& s = b.settings;
  heads = b.keys.integer("heads", 1, kMaxFeatures);
  kv_heads = b.keys.integer("kv_heads", 1, heads);
  dim = b.keys.integer("head_dim", 2, kMaxFeatures);
  if (heads % kv_heads != 0)
    b.keys.fail("heads", "a multiple of kv_heads=" + std::to_string(kv_heads),
                std::to_string(heads));
  if (dim % 2 != 0) b.keys.fail("head_dim", "even", std::to_string(dim));
  if (heads > kMaxFeatures / dim)
    b.keys.fail("heads", "at most " + std::to_string(kMaxFeatures / dim) + " of that size",
                std::to_string(heads));
  rope = b.program.rope_of(b.keys, dim);
  rope_dim = b.program.ropes()[static_cast<size_t>(rope)].dim;
  query_step = b.keys.integer("output_gate", 0, 1, 0) == 1 ? 2 * dim : dim;
  const float scale = b.keys.number("scale", 1.0f / std::sqrt(static_cast<float>(dim)));
  const AttentionPolicy policy = read_policy(b.keys);
  chooses = policy.chooses();
  const int64_t query = heads * dim, kv = kv_heads * dim;
  norm_ = b.norm("norm", s.hidden, s.eps);
  b.linear("q", heads * query_step, s.hidden, q_);
  b.linear("k", kv, s.hidden, k_);
  b.linear("v", kv, s.hidden, v_);
  b.linear("o", s.hidden, query, o_);
  q_norm = b.optional_norm("q_norm", dim, s.eps);
  k_norm = b.optional_norm("k_norm", dim, s.eps);
  sub_norm_ = b.optional_norm("sub_norm", query, s.sub_eps);
  post_norm_ = b.optional_norm("post_norm", s.hidden, s.eps);
  format_ = b.input_of({&q_, &k_, &v_});
  out_format_ = b.input_of({&o_});
  b.needs.row = std::max({b.needs.row, 3 * dim, query + dim});
  layer = b.program.add_attention(b.keys, kv_heads, dim);
  kind = b.program.attention_kind({heads, scale, policy, 1});
}

// Unit: a token and a query head, or a token and a key/value head, which is also written to the
// cache. Then, if only some rows go on, a unit for each of these rows, which copies it.
class Rotation final : public StageWork {
 public:
  struct Memory {
    const void *q, *k, *v;
    float* rotated;
  };
  Rotation(const Step& step, const AttentionBlock& block, const Memory& memory)
      : step_(step), block_(block), memory_(memory) {}

  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const CachePool pool = step_.batch.pool.of(block_.layer);
    const int64_t units = step_.batch.tokens * (block_.heads + block_.kv_heads);
    for (int64_t unit = begin; unit < end; ++unit) {
      if (unit < units) {
        rotate(pool, unit, step_.thread_inputs[slot].row);
      } else {
        step_.copy_logit_row(unit - units);
      }
    }
  }

 private:
  // Norm and rotation of a head of the projection's results. `loaded`: scratch of the head's size.
  void rotated(const void* buffer, int64_t from, const Norm& norm, const float* angles,
               float* loaded, float* to) const {
    const KernelTable& kernels = *step_.kernels;
    const DType type = step_.settings().type;
    load_values(kernels, type, buffer, from, block_.dim, loaded);
    apply_norm(kernels, norm, type, block_.dim, loaded);
    kernels.rope_head(loaded, angles, block_.rope_dim, to);
    std::copy(loaded + block_.rope_dim, loaded + block_.dim, to + block_.rope_dim);
    kernels.round_row(type, to, block_.dim);
  }

  void rotate(const CachePool& pool, int64_t unit, float* row) const {
    const int64_t heads = block_.heads, kv_heads = block_.kv_heads, dim = block_.dim;
    const int64_t token = unit / (heads + kv_heads), head = unit % (heads + kv_heads);
    const float* angles = step_.angles(block_.rope, token);
    float* loaded = row + dim;
    if (head < heads) {
      const int64_t at = token * heads + head;
      return rotated(memory_.q, at * block_.query_step, block_.q_norm, angles, loaded,
                     memory_.rotated + at * dim);
    }
    const int64_t kv_head = head - heads, from = (token * kv_heads + kv_head) * dim;
    rotated(memory_.k, from, block_.k_norm, angles, loaded, row);
    load_values(*step_.kernels, step_.settings().type, memory_.v, from, dim, loaded);
    store_cache_rows(*step_.kernels, pool, step_.batch.slots[token], kv_head, row, loaded);
  }

  const Step& step_;
  const AttentionBlock& block_;
  Memory memory_;
};

// Unit: a page whose last position the step has written, and a head.
class Bounding final : public StageWork {
 public:
  Bounding(const Step& step, const AttentionBlock& block) : step_(step), block_(block) {}

  int64_t units() const override {
    return static_cast<int64_t>(step_.filled_pages.size()) * block_.kv_heads;
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const CachePool pool = step_.batch.pool.of(block_.layer);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t page = step_.filled_pages[static_cast<size_t>(i / block_.kv_heads)];
      bound_page(*step_.kernels, pool, page, i % block_.kv_heads, step_.thread_inputs[slot].row);
    }
  }

 private:
  const Step& step_;
  const AttentionBlock& block_;
};

// Unit: a group of the step's attention plan that chooses its pages.
class Choosing final : public StageWork {
 public:
  Choosing(const Step& step, const AttentionBlock& block, const float* rotated)
      : step_(step), block_(block), rotated_(rotated) {}

  int64_t units() const override { return plan().choices(); }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const AttentionBuffers buffers{rotated_, nullptr, step_.batch.pool.of(block_.layer)};
    float* shared = step_.attention.shared_of(block_.kind, step_.attention_shared);
    plan().choose(*step_.kernels, buffers, begin, end, shared, step_.thread_inputs[slot].attention);
  }

 private:
  const AttentionPlan& plan() const { return step_.attention.at(block_.kind); }

  const Step& step_;
  const AttentionBlock& block_;
  const float* rotated_;
};

// Unit: a task of the step's attention plan.
class Attending final : public StageWork {
 public:
  Attending(const Step& step, const AttentionBlock& block, const float* rotated, float* attended)
      : step_(step), block_(block), rotated_(rotated), attended_(attended) {}

  int64_t units() const override { return plan().tasks(); }
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const AttentionBuffers buffers{rotated_, attended_, step_.batch.pool.of(block_.layer)};
    float* shared = step_.attention.shared_of(block_.kind, step_.attention_shared);
    plan().run(*step_.kernels, buffers, begin, end, shared, step_.thread_inputs[slot].attention);
  }

 private:
  const AttentionPlan& plan() const { return step_.attention.at(block_.kind); }

  const Step& step_;
  const AttentionBlock& block_;
  const float* rotated_;
  float* attended_;
};

// The results of attention times the sigmoid of their gates. A head's gate lies behind its query.
class Gated final : public RowSource {
 public:
  Gated(const Step& step, const AttentionBlock& block, const float* attended, const void* q,
        const Norm& norm, bool are_logit_rows)
      : step_(step),
        block_(block),
        attended_(attended),
        q_(q),
        norm_(norm),
        are_logit_rows_(are_logit_rows) {}

  NormJob job(int64_t j, float* row) const override {
    const KernelTable& kernels = *step_.kernels;
    const DType type = step_.settings().type;
    const int64_t dim = block_.dim, token = are_logit_rows_ ? step_.batch.logit_rows[j] : j;
    for (int64_t head = 0; head < block_.heads; ++head) {
      const int64_t at = token * block_.heads + head;
      float *gate = row + head * dim, *value = row + block_.heads * dim;
      std::copy_n(attended_ + at * dim, dim, value);
      kernels.round_row(type, value, dim);
      load_values(kernels, type, q_, at * block_.query_step + dim, dim, gate);
      kernels.sigmoid_mul_row(gate, value, dim, gate);
    }
    return {row, block_.heads * dim, type, norm_.weight, norm_.eps, row};
  }

 private:
  const Step& step_;
  const AttentionBlock& block_;
  const float* attended_;
  const void* q_;
  Norm norm_;
  bool are_logit_rows_;
};

void AttentionBlock::append(PlanBuilder& plan) const {
  const Step& step = plan.step();
  const Settings& s = plan.settings();
  const int64_t tokens = plan.rows().count, query = heads * dim, kv = kv_heads * dim;
  void *q = plan.activations(tokens * heads * query_step), *k = plan.activations(tokens * kv),
       *v = plan.activations(tokens * kv);
  auto* rotated = plan.scratch<float>(tokens * query);
  auto* attended = plan.scratch<float>(tokens * query);
  const auto* input = plan.make<NormedRows>(plan.rows().residual, s.hidden, norm_, s.type);
  append_products(plan, {"norm qkv", "qkv", "expand qkv"}, input, format_,
                  {{&q_, q}, {&k_, k}, {&v_, v}});
  const bool selects = plan.selects_logit_rows();
  const int64_t copied = selects && !step.wants_all_logits() ? step.batch.logit_count : 0;
  plan.add({"rotate",
            plan.make<Rotation>(step, *this, Rotation::Memory{q, k, v, rotated}),
            tokens * (heads + kv_heads) + copied,
            {1, 64}});
  const auto add_varying = [&plan](const char* name, const StageWork* work, int64_t min = 1) {
    Stage stage{name, work, 0, {min, 64}};
    stage.varies = true;
    plan.add(stage);
  };
  if (chooses) {
    add_varying("bound pages", plan.make<Bounding>(step, *this));
    add_varying("choose pages", plan.make<Choosing>(step, *this, rotated), 4);
  }
  add_varying("attend", plan.make<Attending>(step, *this, rotated, attended));
  if (selects) plan.select_logit_rows();
  const RowSource* out = plan.make<NormedRows>(attended, query, sub_norm_, s.type,
                                               selects ? &step.batch.logit_rows : nullptr);
  if (query_step != dim)
    out = plan.make<Gated>(step, *this, attended, q, sub_norm_, plan.rows().are_logit_rows);
  append_added(plan, {"norm out", "out", "expand out"}, "post out", out, out_format_, o_,
               post_norm_);
}

}  // namespace

std::unique_ptr<Block> make_attention(Binding& binding) {
  return std::make_unique<AttentionBlock>(binding);
}

}  // namespace bitnet::engine
