// The memory of a model step, taken from one block that a thread keeps, and its one parallel
// region; see model_step.h.
#include <algorithm>
#include <chrono>

#include "engine/model_step.h"
#include "format/layout.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kMostKeptBytes = int64_t{1} << 26;

// In steps of an eighth, so that a growing context allocates seldom.
int64_t rounded_up(int64_t bytes) {
  int64_t step = 4096;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

// Whether the logits of all tokens are wanted, in their order.
bool keeps_all(const StepModel& m) {
  bool all = m.head_tokens == m.tokens;
  for (int64_t j = 0; all && j < m.tokens; ++j) all = m.logit_rows[j] == j;
  return all;
}

ProductShape shape_of(const StepModel& m, int first, int count, int64_t tokens) {
  const bool grouped = m.scale_forms[first] == ScaleForm::kGroups;
  ProductShape shape{tokens, m.layers[0].weights[first].k, 0, 1, grouped, !grouped};
  // products with inputs of their own are several, and their cells would have to be told apart
  if (m.inner_norms && count != 1) shape.splits_k = false;
  for (int i = first; i < first + count; ++i) {
    const Weight& w = m.layers[0].weights[i];
    shape.row_blocks += w.row_blocks;
    shape.block_rows = std::max(shape.block_rows, w.block_rows);
    if (w.format == WeightFormat::kCanonical) shape.splits_k = false;
  }
  return shape;
}

// What tokens need that are to be held normalised.
struct Sizes {
  int64_t tokens, with_adapter;
};

StepInput take_input(BumpAllocator& memory, const StepModel& m, const AttentionPlans& attention,
                     const Sizes& sizes) {
  const int64_t longest = std::max({m.hidden, m.query(), m.full_width()});
  const int64_t tokens = sizes.tokens;
  const bool grouped = std::ranges::count(m.scale_forms, ScaleForm::kGroups) != 0;
  const bool scaled = grouped && m.activations != ActivationFormat::kInt8;
  const int64_t groups = tokens * groups_for(longest, kSmallGroup);  // at most
  const int64_t planes = grouped ? planes_of(m.activations) : 1;
  StepInput input{};
  input.row = memory.take<float>(std::max(m.inner_norms ? 2 * longest : longest, 2 * m.dim));
  input.attention = memory.take<float>(attention.thread_floats());
  for (int64_t i = 0; i < m.inputs(); ++i) {
    input.x[i].codes = memory.take<int8_t>(tokens * planes * layout::padded_k(longest));
    input.x[i].sums = memory.take<int32_t>(tokens);
    input.x[i].scales = memory.take<float>(tokens);
    input.x[i].groups = memory.take<int32_t>(grouped ? groups : 0);
    input.x[i].group_scales = memory.take<float>(scaled ? groups : 0);
    input.side_rows[i] = memory.take<float>(sizes.with_adapter * longest);
  }
  const int64_t head_tokens = std::min(tokens, m.head_tokens);
  if (char* head = memory.take<char>(head_input_bytes(m.head, head_tokens)); head != nullptr) {
    input.head = bind_head_input(m.head, head_tokens, head);
  }
  return input;
}

StepBuffers take_buffers(BumpAllocator& memory, const StepModel& m, const AttentionPlans& attention,
                         const StepSides& sides, const StepCuts& cuts, int64_t partitions) {
  StepBuffers b{};
  b.x = memory.take<float>(m.tokens * m.hidden);
  b.kept = keeps_all(m) ? b.x : memory.take<float>(m.head_tokens * m.hidden);
  b.cos_sin = memory.take<float>((m.local_rope.inv_freq == nullptr ? 1 : 2) * m.tokens * m.dim);
  const auto take = [&](int64_t count) { return memory.take<char>(count * element_size(m.type)); };
  b.q = take(m.tokens * m.query());
  b.k = take(m.tokens * m.kv());
  b.v = take(m.tokens * m.kv());
  b.rotated = memory.take<float>(m.tokens * m.query());
  b.attended = memory.take<float>(m.tokens * m.query());
  b.gate = take(m.tokens * m.intermediate);
  b.up = take(m.tokens * m.intermediate);
  const int64_t with_adapter = sides.all.with_adapter();
  const bool projects = m.post_norms || with_adapter != 0;
  b.projected = take(projects ? m.tokens * m.hidden : 0);
  for (float*& inner : b.side_inner) inner = memory.take<float>(with_adapter * sides.most_rank);
  b.parts = {memory.take<int32_t>(cuts.sums), memory.take<int32_t>(cuts.cells)};
  b.attention = memory.take<float>(attention.shared_floats());
  const bool split = StepPlan::splits_norms(m.tokens, partitions);
  const Sizes all{m.tokens, with_adapter}, none{0, 0};
  b.shared = take_input(memory, m, attention, split ? all : none);
  b.own = memory.take<StepInput>(partitions);
  for (int64_t p = 0; p < partitions; ++p) {
    const StepInput own = take_input(memory, m, attention, split ? none : all);
    if (b.own != nullptr) b.own[p] = own;
  }
  return b;
}

AttentionShape shape_of(const StepModel& m, const StepLayer& layer) {
  return {m.heads, m.kv_heads, m.dim, DType::kF32, m.attention_scale, layer.pool, layer.window};
}

// Threads worth a region: each stage should be worth a barrier.
int64_t partitions_of(const StepModel& m) {
  int64_t weights = 0, attention = 0;
  for (int i = 0; i < kLayerWeights; ++i) weights += weight_size(m, i).rows * weight_size(m, i).k;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    attention += attention_work(shape_of(m, m.layers[i]), m.sequences) / m.n_layers;
  }
  const int64_t per_stage = (m.tokens * weights + attention) / 4;
  return std::min(partitions_for(StagedExecutor::kMaxPartitions, per_stage, kMinMacs),
                  StagedExecutor::kMaxPartitions);
}

// What the first norm stage would fill, where the plan has none.
void fill_inputs(const StepModel& m, const StepBuffers& b, int64_t partitions) {
  if (m.n_layers != 0 && StepPlan::splits_norms(m.tokens, partitions)) return;
  for (int64_t token = 0; token < m.tokens; ++token) fill_token(m, b, token);
  for (int64_t j = 0; m.n_layers == 0 && j < m.head_tokens; ++j) keep_logit_row(m, b, j);
}

// A step's plan over memory of its state, ready to run on so many partitions.
StepPlan make_plan(StepState& state, Workspace& passing, const StepModel& m, int64_t partitions,
                   const float* x, float* logits) {
  AttentionPlans& attention = state.attention;
  attention.clear();
  for (int64_t i = 0; i < m.n_layers; ++i) {
    attention.add(shape_of(m, m.layers[i]), m.sequences, partitions);
  }
  StepSides& sides = state.sides;
  sides.build(m);
  StepCuts& cuts = state.cuts;
  cuts.build(m, partitions);
  BumpAllocator count(nullptr);
  take_buffers(count, m, attention, sides, cuts, partitions);
  const bool keep = count.used() <= kMostKeptBytes;
  Workspace& workspace = keep ? state.memory : passing;
  BumpAllocator memory(workspace.reserve(keep ? rounded_up(count.used()) : count.used()));
  StepBuffers buffers = take_buffers(memory, m, attention, sides, cuts, partitions);
  buffers.logits = logits;
  std::fill_n(buffers.parts.done, cuts.cells, 0);
  attention.prepare(buffers.attention);
  buffers.input = x;
  fill_inputs(m, buffers, partitions);
  return StepPlan(m, attention, sides, cuts, buffers, partitions);
}

// A plan that measures its stages.
struct TimedPlan {
  using Clock = std::chrono::steady_clock;

  const StepPlan& plan;
  StageTimes& times;

  template <class F>
  void timed(int64_t stage, F&& f) const {
    const auto start = Clock::now();
    f();
    const std::chrono::duration<double> took = Clock::now() - start;
    times.seconds[static_cast<size_t>(stage)] += took.count();
  }
  int64_t stages() const { return plan.stages(); }
  int64_t units(int64_t stage) const { return plan.units(stage); }
  ClaimRule claim(int64_t stage) const { return plan.claim(stage); }
  void prepare(int64_t stage, int64_t slot) const {
    const double before = times.seconds[static_cast<size_t>(stage)];
    timed(stage, [&] { plan.prepare(stage, slot); });
    times.prepare_seconds[static_cast<size_t>(stage)] =
        times.seconds[static_cast<size_t>(stage)] - before;
  }
  void run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const {
    timed(stage, [&] { plan.run(stage, begin, end, slot); });
  }
  void prefetch_next(int64_t stage, int64_t slot) const { plan.prefetch_next(stage, slot); }
};

}  // namespace

// The weights of a projection have one format in all layers.
void StepCuts::build(const StepModel& m, int64_t partitions) {
  *this = {};
  if (partitions == 1 || m.n_layers == 0) return;
  const auto cut = [&](int first, int count, int64_t tokens, ProductCut& to) {
    to = cut_for(*m.table, shape_of(m, first, count, tokens), partitions);
    cells = std::max(cells, to.cells);
    sums = std::max(sums, to.sums);
  };
  cut(kQ, 3, m.tokens, of_all[kQ]);
  for (const auto& [first, count] : {std::pair{kO, 1}, {kGate, 2}, {kDown, 1}}) {
    cut(first, count, m.tokens, of_all[first]);
    cut(first, count, m.head_tokens, of_kept[first]);
  }
}

void run_step(StepState& state, const StepModel& m, const float* x, float* logits) {
  Workspace passing;  // for a long prompt at once: not worth keeping
  const int64_t partitions = partitions_of(m);
  state.executor.run(partitions, make_plan(state, passing, m, partitions, x, logits));
}

void run_step_timed(StepState& state, const StepModel& m, int64_t partitions, const float* x,
                    float* logits, StageTimes& times) {
  Workspace passing;
  const StepPlan plan = make_plan(state, passing, m, partitions, x, logits);
  times.names.clear();
  times.units.clear();
  times.claims.clear();
  for (int64_t stage = 0; stage < plan.stages(); ++stage) {
    times.names.push_back(plan.name(stage));
    times.units.push_back(plan.units(stage));
    times.claims.push_back(plan.claim(stage));
  }
  times.seconds.assign(times.names.size(), 0.0);
  times.prepare_seconds.assign(times.names.size(), 0.0);
  const TimedPlan timed{plan, times};
  state.executor.start(partitions, timed);
  state.executor.work(0, partitions, timed);
}

}  // namespace bitnet::engine
