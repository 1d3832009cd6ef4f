// Building and running a step's plan; see plan.h.
#include "engine/program/plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "format/layout.h"
#include "runtime/page_count.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kMaxKeptBytes = int64_t{1} << 26;

// In steps of an eighth, so that a growing context allocates seldom.
int64_t rounded_up(int64_t bytes) {
  int64_t step = 4096;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

// Floats of whole lines of cache, so that two threads never write to one.
int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

// Whether the logits of all tokens are wanted, in their order.
bool wants_all_logits(const Batch& batch) {
  bool all = batch.logit_count == batch.tokens;
  for (int64_t j = 0; all && j < batch.tokens; ++j) all = batch.logit_rows[j] == j;
  return all;
}

StageInput take_input(BumpAllocator& memory, const Step& s, bool with_tokens) {
  const Needs& needs = s.program->needs();
  const int64_t tokens = with_tokens ? s.batch.tokens : 0;
  const int64_t groups = tokens * groups_for(needs.input, kSmallGroup);  // at most
  StageInput input{};
  input.row = memory.take<float>(needs.row);
  for (int64_t i = 0; i < needs.inputs; ++i) {
    input.x[i].codes = memory.take<int8_t>(tokens * needs.planes * layout::padded_k(needs.input));
    input.x[i].sums = memory.take<int32_t>(tokens);
    input.x[i].scales = memory.take<float>(tokens);
    input.x[i].groups = memory.take<int32_t>(needs.group_sums ? groups : 0);
    input.x[i].group_scales = memory.take<float>(needs.group_scales ? groups : 0);
    input.side_rows[i] =
        memory.take<float>(with_tokens ? s.adapters.with_adapter() * needs.input : 0);
  }
  return input;
}

// What all blocks share.
void take_memory(BumpAllocator& memory, Step& s, bool all_rows, int64_t sums, int64_t cells) {
  const Batch& batch = s.batch;
  const int64_t hidden = s.settings().hidden;
  s.x = memory.take<float>(batch.tokens * hidden);
  s.logit_x = all_rows ? s.x : memory.take<float>(batch.logit_count * hidden);
  int64_t angles = 0;
  for (const NamedRope& rope : s.program->ropes()) angles += rope.dim;
  s.cos_sin = memory.take<float>(angles * batch.tokens);
  s.parts = {memory.take<int32_t>(sums), memory.take<int32_t>(cells)};
  s.shared = take_input(memory, s, s.splits_norms);
  s.thread_inputs = memory.take<StageInput>(s.partitions);
  for (int64_t p = 0; p < s.partitions; ++p) {
    const StageInput input = take_input(memory, s, !s.splits_norms);
    if (s.thread_inputs != nullptr) s.thread_inputs[p] = input;
  }
}

AttentionShape shape_of(const Step& s, const AttentionKind& kind) {
  return {kind.heads,
          s.program->kv_heads(),
          s.program->head_dim(),
          DType::kF32,
          kind.scale,
          s.batch.pool.first,
          kind.policy};
}

// Threads worth a region: each stage should be worth a barrier.
int64_t partitions_of(const Step& s) {
  int64_t weights = 0, stages = 0;
  for (const auto& block : s.program->blocks()) {
    weights += block->weights();
    stages += block->product_stages();
  }
  int64_t work = s.batch.tokens * weights;
  for (const AttentionKind& kind : s.program->attention_kinds())
    work += kind.layers * attention_work(shape_of(s, kind), s.batch.sequences);
  return std::min(
      partitions_for(StagedExecutor::kMaxPartitions, work / std::max(stages, int64_t{1}), kMinMacs),
      StagedExecutor::kMaxPartitions);
}

// Whose tokens have adapters, in the order in which stages take them.
void group_adapters(Step& s, std::vector<int64_t>& wanted) {
  const Batch& batch = s.batch;
  const bool any =
      batch.adapters != nullptr && std::any_of(batch.adapters, batch.adapters + batch.tokens,
                                               [](int64_t adapter) { return adapter >= 0; });
  s.adapters.build(batch.adapters, any ? batch.tokens : 0);
  wanted.clear();
  for (int64_t j = 0; any && j < batch.logit_count; ++j)
    wanted.push_back(batch.adapters[batch.logit_rows[j]]);
  s.logit_adapters.build(wanted.data(), static_cast<int64_t>(wanted.size()));
  s.max_rank = 0;
  for (const Linear* linear : s.program->linears()) {
    for (const AdapterGroups::Group& group : s.adapters.groups())
      s.max_rank = std::max(s.max_rank, linear->lora[static_cast<size_t>(group.adapter)].rank);
  }
}

}  // namespace

CachePool LayeredPool::of(int64_t layer) const {
  CachePool pool = first;
  const auto move = [layer](PoolView& view, int64_t bytes) {
    if (view.data != nullptr) view.data += layer * bytes;
  };
  move(pool.keys, key_bytes);
  move(pool.values, value_bytes);
  move(pool.key_scales, key_scale_bytes);
  move(pool.value_scales, value_scale_bytes);
  move(pool.bounds, bound_bytes);
  return pool;
}

float* Step::angles(int64_t rope, int64_t token) const {
  float* at = cos_sin;
  for (int64_t i = 0; i < rope; ++i)
    at += program->ropes()[static_cast<size_t>(i)].dim * batch.tokens;
  return at + token * program->ropes()[static_cast<size_t>(rope)].dim;
}

void Step::fill_token(int64_t token) const {
  const int64_t hidden = settings().hidden, ropes = static_cast<int64_t>(program->ropes().size());
  std::copy_n(batch.x + token * hidden, hidden, x + token * hidden);
  for (int64_t i = 0; i < ropes; ++i) {
    const NamedRope& rope = program->ropes()[static_cast<size_t>(i)];
    rope_angles(batch.positions, token, rope.rope, rope.dim / 2, angles(i, token));
  }
}

void Step::copy_logit_row(int64_t j) const {
  if (logit_x == x) return;
  const int64_t hidden = settings().hidden;
  std::copy_n(x + batch.logit_rows[j] * hidden, hidden, logit_x + j * hidden);
}

void Plan::clear() {
  stages_.clear();
  piece_ = used_ = 0;
}

void* Plan::allocate(size_t bytes) {
  bytes = (bytes + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) *
          alignof(std::max_align_t);
  if (used_ + bytes > kPiece) ++piece_, used_ = 0;
  if (piece_ == memory_.size()) memory_.push_back(std::make_unique<std::byte[]>(kPiece));
  used_ += bytes;
  return memory_[piece_].get() + (used_ - bytes);
}

void Plan::finish(int64_t partitions) {
  partitions_ = partitions;
  int64_t next = -1;
  for (int64_t i = stages(); i-- > 0;) {
    Stage& stage = stages_[static_cast<size_t>(i)];
    stage.next_weights = stage.has_weights ? next : -1;
    if (stage.has_weights) next = i;
  }
}

void Plan::update_units() {
  for (Stage& stage : stages_) {
    if (stage.varies) stage.units = stage.work->units();
  }
}

void Plan::prefetch_next(int64_t stage, int64_t slot) const {
  constexpr int64_t kBytes = 8192, kLine = 64;
  const int64_t next = at(stage).next_weights;
  if (next < 0) return;
  const void* from = at(next).work->weights_of(partition_begin(units(next), partitions_, slot));
  for (int64_t i = 0; from != nullptr && i < kBytes; i += kLine)
    __builtin_prefetch(offset_bytes(from, i));
}

PlanBuilder::PlanBuilder(Step& step, Plan& plan,
                         const std::vector<std::unique_ptr<BlockState>>& states, char* lasting,
                         char* scratch)
    : step_(step),
      plan_(plan),
      states_(states),
      memory_(scratch),
      lasting_(lasting),
      scratch_(scratch) {
  rows_ = {step.batch.tokens, step.x, &step.adapters, false};
  if (step.program->last_mixer() < 0) select_logit_rows();
}

void PlanBuilder::select_logit_rows() {
  rows_ = {step_.batch.logit_count, step_.logit_x, &step_.logit_adapters, true};
}

void PlanBuilder::append_blocks() {
  for (const auto& block : step_.program->blocks()) {
    scratch_ = BumpAllocator(memory_);
    block->append(*this);
    ++block_;
  }
}

namespace {

// The plan of `state.step` over memory of the state, or of `passing` where it is too much to keep.
void build_plan(StepState& state, bool all_rows, Workspace& passing) {
  Step& s = state.step;
  // First without memory: how much do the stages need?
  BumpAllocator nothing(nullptr);
  take_memory(nothing, s, all_rows, 0, 0);
  state.plan.clear();
  PlanBuilder counted(s, state.plan, state.blocks, nullptr, nullptr);
  counted.append_blocks();
  BumpAllocator count(nullptr);
  take_memory(count, s, all_rows, counted.sums(), counted.cells());
  const int64_t bytes = count.used() + counted.lasting_bytes() + counted.scratch_bytes();
  state.keeps_plan = bytes <= kMaxKeptBytes;
  Workspace& workspace = state.keeps_plan ? state.memory : passing;
  char* block = workspace.reserve(state.keeps_plan ? rounded_up(bytes) : bytes);
  BumpAllocator memory(block);
  take_memory(memory, s, all_rows, counted.sums(), counted.cells());
  state.plan.clear();
  char* const lasting = block + memory.used();
  PlanBuilder builder(s, state.plan, state.blocks, lasting, lasting + counted.lasting_bytes());
  builder.append_blocks();
  state.plan.finish(s.partitions);
  state.unfilled = builder.unfilled();
  state.cells = builder.cells();
  ++state.built;
}

void make_states(StepState& state, const Program& program, int64_t program_id) {
  state.keeps_plan = false;  // whose stages read the states
  state.blocks_of = 0;       // until all are there
  state.blocks.clear();
  for (const auto& block : program.blocks()) state.blocks.push_back(block->make_state());
  state.blocks_of = program_id;
}

// Makes `state` ready to run the batch; partitions 0: as many as the work is worth.
void prepare_step(StepState& state, const Program& program, int64_t program_id, const Batch& batch,
                  int64_t partitions, Workspace& passing) {
  Step& s = state.step;
  s.program = &program;
  s.kernels = &program.kernels();
  s.batch = batch;
  s.partitions = partitions == 0 ? partitions_of(s) : partitions;
  s.splits_norms = s.partitions > 1 && batch.tokens > 2;
  group_adapters(s, state.logit_adapters);
  s.attention.clear();
  for (const AttentionKind& kind : program.attention_kinds()) {
    s.attention.add(shape_of(s, kind), batch.sequences, s.partitions);
  }
  s.filled_pages.clear();
  if (program.chooses_pages()) find_filled_pages(batch.slots, batch.tokens, s.filled_pages);
  if (state.blocks_of != program_id) make_states(state, program, program_id);
  for (const auto& block : state.blocks) {
    if (block != nullptr) block->begin(s);
  }
  const bool all_rows = wants_all_logits(batch);
  const PlanKey key{program_id, batch.tokens, batch.logit_count, s.partitions, all_rows};
  // what adapters add is told by the adapters of every token
  const bool plain = s.adapters.with_adapter() == 0;
  if (!(plain && state.keeps_plan && state.key == key)) {
    state.keeps_plan = false;  // until it is whole
    build_plan(state, all_rows, passing);
    state.keeps_plan = state.keeps_plan && plain;
    state.key = key;
  }
  // Attention's own memory grows with the context, so it lies apart.
  const int64_t shared = whole_lines(s.attention.shared_floats());
  const int64_t of_thread = whole_lines(s.attention.thread_floats());
  const auto bytes = (shared + s.partitions * of_thread) * static_cast<int64_t>(sizeof(float));
  s.attention_shared = reinterpret_cast<float*>(state.attention_memory.reserve(rounded_up(bytes)));
  for (int64_t p = 0; p < s.partitions; ++p)
    s.thread_inputs[p].attention = s.attention_shared + shared + p * of_thread;
  s.attention.prepare(s.attention_shared);
  std::fill_n(s.parts.done, state.cells, 0);
  state.plan.update_units();
  if (!state.unfilled) return;
  for (int64_t token = 0; token < batch.tokens; ++token) s.fill_token(token);
  for (int64_t j = 0; program.last_mixer() < 0 && j < batch.logit_count; ++j) s.copy_logit_row(j);
}

// A plan that measures its stages.
struct TimedPlan {
  using Clock = std::chrono::steady_clock;

  const Plan& plan;
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

void run_step(StepState& state, const Program& program, int64_t program_id, const Batch& batch) {
  Workspace passing;  // for a long prompt at once: not worth keeping
  prepare_step(state, program, program_id, batch, 0, passing);
  state.executor.run(state.step.partitions, state.plan);
  zero_counts() = {};
  for (const auto& block : state.blocks) {
    if (block != nullptr) block->end(state.step);
  }
  page_counts().clear();
  for (size_t kind = 0; kind < program.attention_kinds().size(); ++kind) {
    state.step.attention.at(static_cast<int64_t>(kind))
        .add_page_counts(program.attention_kinds()[kind].layers);
  }
}

void run_step_timed(StepState& state, const Program& program, int64_t program_id,
                    const Batch& batch, int64_t partitions, StageTimes& times) {
  Workspace passing;
  prepare_step(state, program, program_id, batch, partitions, passing);
  times.names.clear();
  times.units.clear();
  times.claims.clear();
  for (int64_t stage = 0; stage < state.plan.stages(); ++stage) {
    times.names.push_back(state.plan.name(stage));
    times.units.push_back(state.plan.units(stage));
    times.claims.push_back(state.plan.claim(stage));
  }
  times.seconds.assign(times.names.size(), 0.0);
  times.prepare_seconds.assign(times.names.size(), 0.0);
  const TimedPlan timed{state.plan, times};
  state.executor.start(partitions, timed);
  state.executor.work(0, partitions, timed);
}

}  // namespace bitnet::engine
