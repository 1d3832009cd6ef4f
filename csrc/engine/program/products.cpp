// The stages of products.h.
#include "engine/program/products.h"

#include <algorithm>
#include <cstring>

namespace bitnet::engine {
namespace {

int64_t float_bytes(int64_t n) { return n * static_cast<int64_t>(sizeof(float)); }

// Normalises the row of a job, without making its codes.
void normalise_row(const KernelTable& kernels, const NormJob& job) {
  if (job.y != job.x) std::memcpy(job.y, job.x, static_cast<size_t>(float_bytes(job.n)));
  kernels.round_row(job.type, job.y, job.n);
  apply_norm(kernels, {job.weight, job.eps}, job.type, job.n, job.y);
}

class Products final : public StageWork {
 public:
  Products(PlanBuilder& plan, const RowSource* source, ActivationFormat format,
           std::initializer_list<Target> targets, bool residual,
           const ActivationSparsity* sparsity = nullptr, ZeroCounts* zeros = nullptr);

  void prepare(int64_t slot) const override {
    if (step_.splits_norms) return;
    const StageInput& input = step_.thread_inputs[slot];
    for (int64_t j = 0; j < rows_.count; ++j) load_token(j, input.row, input);
    if (lists_) list_codes(slot);
  }
  void run(int64_t begin, int64_t end, int64_t slot) const override;
  const void* weights_of(int64_t unit) const override;

  // Makes row j as the products read it.
  void load_token(int64_t j, float* row, const StageInput& to) const;
  int64_t units() const override;
  ClaimRule claim() const;
  int64_t expand_units() const;
  void expand(int64_t begin, int64_t end) const;
  const StepRows& rows() const { return rows_; }
  const Step& step() const { return step_; }

 private:
  struct Part {
    const Linear* linear;
    void* out;        // null: rounded, it is added to the residual
    bool side;        // some token of the step has an adapter for this projection
    float* inner;     // [tokens with an adapter, max_rank]
    float* residual;  // what LoRA adds its outputs to; null: they stay in `out`
  };
  void list_codes(int64_t slot) const;
  bool reads_columns(const CodeList& list) const {
    return *list.count <= parts_[0].linear->max_listed;
  }
  QuantizedTokens tokens_of(const StageInput& from, int input) const;
  // Whether the kernel that normalises input i makes its codes, too.
  bool quantizes_at_once(const QuantizedTokens& x, int i) const {
    return x.format == ActivationFormat::kInt8 && x.groups == nullptr &&
           parts_[i].linear->signs.block == 0 && parts_[i].linear->copies == 1;
  }
  bool has_adapter(int64_t j) const {
    const AdapterGroups& with = *rows_.adapters;
    return with.with_adapter() != 0 && with.place(j) < with.with_adapter();
  }
  void load_input(int64_t j, const NormJob& job, int i, const StageInput& to) const;
  // Calls f with each product over the tokens of `from`: one for all projections, or one for each
  // if every projection has its own input.
  template <class F>
  void for_each_product(const StageInput& from, F&& f) const;
  LoraProjection side(const Part& part, const StageInput& from) const;
  template <class F>
  void for_each_side(const StageInput& from, F&& f) const;
  int64_t shrink_units() const;

  const Step& step_;
  StepRows rows_;
  const RowSource* source_;
  ActivationFormat format_;
  int count_ = 0;
  const ActivationSparsity* sparsity_;
  bool own_norms_, grouped_, any_side_ = false;
  bool lists_ = false;  // whether to list the codes that are not 0 (of the only token)
  CodeLists code_lists_;
  ZeroCounts* zeros_;
  Part parts_[StageInput::kMax];
  Projection projections_[StageInput::kMax];
  ProductPlan plan_;
};

bool has_side(const Step& step, const Linear& linear) {
  return std::ranges::any_of(step.adapters.groups(), [&](const AdapterGroups::Group& group) {
    return linear.lora[static_cast<size_t>(group.adapter)].rank != 0;
  });
}

Products::Products(PlanBuilder& plan, const RowSource* source, ActivationFormat format,
                   std::initializer_list<Target> targets, bool residual,
                   const ActivationSparsity* sparsity, ZeroCounts* zeros)
    : step_(plan.step()),
      rows_(plan.rows()),
      source_(source),
      format_(format),
      sparsity_(sparsity),
      own_norms_(targets.begin()->linear->norm != nullptr),
      grouped_(targets.begin()->linear->scaled.grouped()),
      zeros_(zeros) {
  const DType type = plan.settings().type;
  for (const Target& target : targets) {
    const Linear& linear = *target.linear;
    const bool side = has_side(step_, linear);
    any_side_ = any_side_ || side;
    float* inner =
        side ? plan.scratch<float>(step_.adapters.with_adapter() * step_.max_rank) : nullptr;
    Output out{StoreKind::kStore, type, target.out, linear.rows * element_size(type)};
    if (target.out == nullptr)
      out = {StoreKind::kAdd, type, rows_.residual, float_bytes(linear.rows)};
    parts_[count_] = {&linear, target.out, side, inner,
                      side && residual ? rows_.residual : nullptr};
    projections_[count_++] = linear.into(out);
  }
  // each thread needs a list of its own, so threads that share tokens cannot have one
  lists_ = step_.batch.tokens == 1 && rows_.count == 1 && parts_[0].linear->columns != nullptr;
  if (lists_) code_lists_ = CodeLists(plan, parts_[0].linear->k);
  ProductShape shape = shape_of(projections_, count_, rows_.count, planes_of(format_));
  // one product for each input: with parts of K their cells would get mixed up
  shape.splits_k = !shape.row_major() && (!own_norms_ || count_ == 1);
  plan_ = plan_product(*step_.kernels, shape, step_.partitions);
  plan.need_parts(plan_);
}

QuantizedTokens Products::tokens_of(const StageInput& from, int input) const {
  const Linear& linear = *parts_[input].linear;
  QuantizedTokens x = from.x[own_norms_ ? input : 0];
  x.tokens = rows_.count;
  x.k = linear.k;
  x.padded_k = layout::padded_k(linear.k);
  x.tile = plan_.blocking.token_tile;
  x.format = format_;
  if (grouped_) {
    x.group = linear.scaled.group();
  } else {
    x.groups = nullptr;
  }
  if (x.format == ActivationFormat::kInt8) x.group_scales = nullptr;
  return x;
}

template <class F>
void Products::for_each_product(const StageInput& from, F&& f) const {
  const int products = own_norms_ ? count_ : 1;
  for (int i = 0; i < products; ++i) {
    const QuantizedTokens x = tokens_of(from, i);
    f(Product(*step_.kernels, x, projections_ + i, own_norms_ ? 1 : count_, plan_, step_.parts));
  }
}

void Products::load_token(int64_t j, float* row, const StageInput& to) const {
  if (!own_norms_ && !has_adapter(j) && quantizes_at_once(tokens_of(to, 0), 0))
    return load_input(j, source_->codes_job(j, row), 0, to);
  const NormJob job = source_->job(j, row);
  if (!own_norms_) return load_input(j, job, 0, to);
  normalise_row(*step_.kernels, job);
  const float eps = step_.settings().linear_eps;
  for (int i = 0; i < count_; ++i) {  // the other projections need the row unchanged
    load_input(j, {row, job.n, job.type, parts_[i].linear->norm, eps, row + job.n}, i, to);
  }
}

void Products::load_input(int64_t j, const NormJob& job, int i, const StageInput& to) const {
  const KernelTable& kernels = *step_.kernels;
  const QuantizedTokens x = tokens_of(to, i);
  const Signs& signs = parts_[i].linear->signs;
  const bool at_once = quantizes_at_once(x, i);
  const bool drops = sparsity_ != nullptr && sparsity_->drops();
  if (at_once) {
    x.quantize_normed(kernels, job, j);
    if (drops) sparsity_->drop(x, j);
  } else {
    normalise_row(kernels, job);
  }
  if (has_adapter(j)) {
    std::memcpy(to.side_rows[i] + rows_.adapters->place(j) * job.n, job.y,
                static_cast<size_t>(float_bytes(job.n)));
  }
  if (at_once) return;
  for (int64_t at = job.n; at < x.k; at += job.n) std::copy_n(job.y, job.n, job.y + at);
  signs.hadamard(kernels, job.type, x.k, job.y);  // LoRA's factors read the row as it was
  x.quantize(kernels, job.y, j);
}

void Products::list_codes(int64_t slot) const {
  const QuantizedTokens x = tokens_of(step_.thread_inputs[slot], 0);
  const CodeList list = code_lists_.of(slot);
  *list.count = step_.kernels->list_nonzero(x.token(0), x.k, list.at, list.codes);
  zeros_->add(slot, x.k, reads_columns(list) ? x.k - *list.count : 0);
}

LoraProjection Products::side(const Part& part, const StageInput& from) const {
  const int64_t input = own_norms_ ? &part - parts_ : 0;
  return {
      .weights = part.linear->lora.data(),
      .k = part.linear->k,
      .rows = part.linear->rows,
      .x = from.side_rows[input],
      .inner = part.inner,
      .max_rank = step_.max_rank,
      .ahead = step_.settings().ahead,
      .type = step_.settings().type,
      .y = part.out,
      .residual = part.residual,
  };
}

template <class F>
void Products::for_each_side(const StageInput& from, F&& f) const {
  for (int i = 0; any_side_ && i < count_; ++i) {
    if (parts_[i].side) f(side(parts_[i], from));
  }
}

int64_t Products::shrink_units() const {
  int64_t units = 0;
  for_each_side(step_.shared, [&](const LoraProjection& p) {
    units += engine::shrink_units(*rows_.adapters, p);
  });
  return units;
}

int64_t Products::units() const {
  if (rows_.count == 0) return 0;
  int64_t units = shrink_units();
  for_each_product(step_.shared, [&](const Product& p) { units += p.units(); });
  return units;
}

ClaimRule Products::claim() const {
  ClaimRule rule{1, 64};
  bool first = true;
  for_each_product(step_.shared, [&](const Product& p) {
    if (first) rule = p.claim();
    first = false;
  });
  return rule;
}

// The part of units [begin, end) that lies in the `units` of a product behind `offset` others.
template <class F>
void within(int64_t begin, int64_t end, int64_t units, int64_t& offset, F&& f) {
  const int64_t first = std::max(begin - offset, int64_t{0}), last = std::min(end - offset, units);
  if (first < last) f(first, last);
  offset += units;
}

void Products::run(int64_t begin, int64_t end, int64_t slot) const {
  const StageInput& from = step_.splits_norms ? step_.shared : step_.thread_inputs[slot];
  int64_t offset = 0;
  for_each_side(from, [&](const LoraProjection& p) {
    within(begin, end, engine::shrink_units(*rows_.adapters, p), offset,
           [&](int64_t first, int64_t last) {
             shrink(*step_.kernels, *rows_.adapters, p, first, last);
           });
  });
  for_each_product(from, [&](const Product& p) {
    within(begin, end, p.units(), offset, [&](int64_t first, int64_t last) {
      if (!lists_) return p.run(first, last);
      const CodeList list = code_lists_.of(slot);
      if (!reads_columns(list)) return p.run(first, last);
      p.run_columns({parts_[0].linear->columns, *list.count, list.at, list.codes}, first, last);
    });
  });
}

const void* Products::weights_of(int64_t unit) const {
  unit -= shrink_units();
  const void* weights = nullptr;
  for_each_product(step_.shared, [&](const Product& p) {
    if (weights == nullptr && unit < p.units()) weights = p.weights_of(std::max(unit, int64_t{0}));
    unit -= p.units();
  });
  return weights;
}

int64_t Products::expand_units() const {
  int64_t units = 0;
  for_each_side(step_.shared, [&](const LoraProjection& p) {
    units += engine::expand_units(*rows_.adapters, p);
  });
  return units;
}

void Products::expand(int64_t begin, int64_t end) const {
  int64_t offset = 0;
  for_each_side(step_.shared, [&](const LoraProjection& p) {
    within(begin, end, engine::expand_units(*rows_.adapters, p), offset,
           [&](int64_t first, int64_t last) {
             engine::expand(*step_.kernels, *rows_.adapters, p, first, last);
           });
  });
}

// Unit: a row, which is made for all threads.
class Norms final : public StageWork {
 public:
  Norms(const Products* products, bool fills) : products_(*products), fills_(fills) {}
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const Step& step = products_.step();
    for (int64_t j = begin; j < end; ++j) {
      if (fills_) step.fill_token(j);
      products_.load_token(j, step.thread_inputs[slot].row, step.shared);
    }
  }

 private:
  const Products& products_;
  bool fills_;
};

class Expansion final : public StageWork {
 public:
  explicit Expansion(const Products* products) : products_(*products) {}
  void run(int64_t begin, int64_t end, int64_t) const override { products_.expand(begin, end); }

 private:
  const Products& products_;
};

// Unit: a row of `y`, which is normalised and added to the residual.
class AddNormed final : public StageWork {
 public:
  AddNormed(const Step& step, const StepRows& rows, const void* y, const Norm& norm)
      : step_(step), rows_(rows), y_(y), norm_(norm) {}
  void run(int64_t begin, int64_t end, int64_t slot) const override {
    const KernelTable& kernels = *step_.kernels;
    const auto [n, type] = std::pair{step_.settings().hidden, step_.settings().type};
    float* row = step_.thread_inputs[slot].row;
    for (int64_t j = begin; j < end; ++j) {
      load_values(kernels, type, y_, j * n, n, row);
      apply_norm(kernels, norm_, type, n, row);
      float* to = rows_.residual + j * n;
      kernels.add_row(to, row, n, to);
    }
  }

 private:
  const Step& step_;
  StepRows rows_;
  const void* y_;
  Norm norm_;
};

void append(PlanBuilder& plan, const StageNames& names, const Products* products) {
  const Step& step = plan.step();
  const int64_t count = plan.rows().count;
  if (count == 0) return;
  if (step.splits_norms) {
    const bool fills = !plan.rows().are_logit_rows && plan.take_filling();
    plan.add({names.norm, plan.make<Norms>(products, fills), count, {1, 64}});
  }
  plan.add({names.product, products, products->units(), products->claim(), true});
  plan.add({names.expand, plan.make<Expansion>(products), products->expand_units(), {1, 64}});
}

}  // namespace

void append_products(PlanBuilder& plan, const StageNames& names, const RowSource* source,
                     ActivationFormat format, std::initializer_list<Target> targets) {
  append(plan, names, plan.make<Products>(plan, source, format, targets, false));
}

void append_added(PlanBuilder& plan, const StageNames& names, const char* post_name,
                  const RowSource* source, ActivationFormat format, const Linear& linear,
                  const Norm& post, const ActivationSparsity* sparsity, ZeroCounts* zeros) {
  const bool normed = post.weight != nullptr;
  const int64_t count = plan.rows().count;
  void* y =
      normed || has_side(plan.step(), linear) ? plan.activations(count * linear.rows) : nullptr;
  append(plan, names,
         plan.make<Products>(plan, source, format, std::initializer_list<Target>{{&linear, y}},
                             !normed, sparsity, zeros));
  if (normed)
    plan.add({post_name, plan.make<AddNormed>(plan.step(), plan.rows(), y, post), count, {1, 64}});
}

}  // namespace bitnet::engine
