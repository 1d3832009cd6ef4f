// The memory of a model step, taken from one block that a thread keeps, and its one parallel
// region; see model_step.h.
#include <algorithm>

#include "engine/model_step.h"
#include "format/layout.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kMostKeptBytes = int64_t{1} << 26;

// Memory of attention at the longest context that the cache can hold, so that a growing context
// never allocates.
struct AttentionLimits {
  int64_t shared, own;
};
AttentionLimits attention_limits(const AttentionShape& shape, const AttentionPlan& now,
                                 int64_t partitions, std::vector<int64_t>& last) {
  last.assign(static_cast<size_t>(shape.batch), shape.length - shape.tokens);
  const AttentionPlan longest(shape, last.data(), partitions);
  return {std::max(now.shared_floats(), longest.shared_floats()),
          std::max(now.thread_floats(), longest.thread_floats())};
}

// tokens: how many it holds normalised.
StepInput take_input(BumpAllocator& memory, const StepModel& m, const AttentionLimits& limits,
                     int64_t tokens) {
  const int64_t longest = std::max({m.hidden, m.query(), m.intermediate});
  StepInput input{};
  input.row = memory.take<float>(std::max(longest, m.dim));
  input.attention = memory.take<float>(limits.own);
  input.x.codes = memory.take<int8_t>(tokens * layout::padded_k(longest));
  input.x.sums = memory.take<int32_t>(tokens);
  input.x.scales = memory.take<float>(tokens);
  const int64_t head_tokens = std::min(tokens, m.head_tokens());
  if (char* head = memory.take<char>(head_input_bytes(m.head, head_tokens)); head != nullptr) {
    input.head = bind_head_input(m.head, head_tokens, head);
  }
  return input;
}

StepBuffers take_buffers(BumpAllocator& memory, const StepModel& m, const AttentionLimits& limits,
                         int64_t partitions) {
  StepBuffers b{};
  b.x = memory.take<float>(m.tokens * m.hidden);
  b.cos_sin = memory.take<float>((m.tokens + 1) * m.dim);  // the last row: frequencies
  b.q = memory.take<float>(m.tokens * m.query());
  b.k = memory.take<float>(m.tokens * m.kv());
  b.v = memory.take<float>(m.tokens * m.kv());
  b.rotated = memory.take<float>(m.tokens * m.query());
  b.attended = memory.take<float>(m.tokens * m.query());
  b.gate = memory.take<float>(m.tokens * m.intermediate);
  b.up = memory.take<float>(m.tokens * m.intermediate);
  b.attention = memory.take<float>(limits.shared);
  const bool split = StepPlan::splits_norms(m.tokens, partitions);
  b.shared = take_input(memory, m, limits, split ? m.tokens : 0);
  b.own = memory.take<StepInput>(partitions);
  for (int64_t p = 0; p < partitions; ++p) {
    const StepInput own = take_input(memory, m, limits, split ? 0 : m.tokens);
    if (b.own != nullptr) b.own[p] = own;
  }
  return b;
}

// Threads worth a region: each stage should be worth a barrier.
int64_t partitions_of(const StepModel& m) {
  const int64_t longest = *std::max_element(m.starts, m.starts + m.batch()) + m.per_sequence;
  const int64_t attention = m.tokens * m.heads * longest * m.dim;
  int64_t weights = 0;
  for (int i = 0; i < kLayerWeights; ++i) weights += weight_size(m, i).rows * weight_size(m, i).k;
  const int64_t per_stage = (m.tokens * weights + attention) / 4;
  return std::min(partitions_for(StagedExecutor::kMaxPartitions, per_stage, kMinMacs),
                  StagedExecutor::kMaxPartitions);
}

void fill_inputs(const StepModel& m, const float* x, const StepBuffers& b) {
  std::copy(x, x + m.tokens * m.hidden, b.x);
  float* frequencies = b.cos_sin + m.tokens * m.dim;
  rope_frequencies(m.dim, m.rope_theta, frequencies);
  for (int64_t token = 0; token < m.tokens; ++token) {
    const int64_t position = m.starts[token / m.per_sequence] + token % m.per_sequence;
    rope_angles(position, frequencies, m.dim / 2, b.cos_sin + token * m.dim);
  }
}

}  // namespace

void run_step(StepState& state, const StepModel& m, const float* x, float* logits) {
  const int64_t partitions = partitions_of(m);
  const AttentionShape shape{m.batch(), m.per_sequence, m.heads,      m.kv_heads,       m.capacity,
                             m.dim,     DType::kF32,    m.cache_type, m.attention_scale};
  const AttentionPlan attention(shape, m.starts, partitions);
  const AttentionLimits limits =
      attention_limits(shape, attention, partitions, state.last_positions);
  BumpAllocator count(nullptr);
  take_buffers(count, m, limits, partitions);
  Workspace passing;  // for a long prompt at once: not worth keeping
  Workspace& workspace = count.used() > kMostKeptBytes ? passing : state.memory;
  BumpAllocator memory(workspace.reserve(count.used()));
  StepBuffers buffers = take_buffers(memory, m, limits, partitions);
  buffers.logits = logits;
  attention.prepare(buffers.attention);
  fill_inputs(m, x, buffers);
  state.executor.run(partitions, StepPlan(m, attention, buffers, partitions));
}

}  // namespace bitnet::engine
