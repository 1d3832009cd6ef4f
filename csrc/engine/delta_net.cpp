// Units of delta_net.h.
#include "engine/delta_net.h"

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

// Queries and keys are normalised to length 1: x / sqrt(sum(x^2) + eps).
constexpr float kLengthEps = 1e-6f;

void load_channels(const KernelTable& kernels, const DeltaRows& rows, int64_t channels,
                   int64_t token, int64_t channel, int64_t n, float* to) {
  const int64_t at = (token * channels + channel) * element_size(rows.type);
  kernels.load_row(rows.type, offset_bytes(rows.u, at), n, to);
}

}  // namespace

DeltaNet::DeltaNet(const DeltaShape& shape, const DeltaWeights& weights)
    : shape_(shape), weights_(weights) {
  // the kernel's norm divides by the root of a mean
  const double dim = static_cast<double>(shape.key_dim), root = std::sqrt(dim);
  key_scale_.assign(static_cast<size_t>(shape.key_dim), static_cast<float>(1 / root));
  query_scale_.assign(static_cast<size_t>(shape.key_dim), static_cast<float>(1 / dim));
}

int64_t DeltaNet::thread_floats() const {
  const int64_t head = std::max(shape_.key_dim, shape_.value_dim);
  return std::max((2 * shape_.taps - 1) * head, shape_.slab_floats());
}

void DeltaNet::mix(const KernelTable& kernels, const Sequences& s, const StateStep* steps,
                   const DeltaStates& states, const DeltaRows& rows, int64_t unit,
                   float* scratch) const {
  const int64_t heads = shape_.heads(), channels = shape_.channels();
  const int64_t sequence = unit / heads, head = unit % heads, value = head - 2 * shape_.key_heads;
  const int64_t dim = value < 0 ? shape_.key_dim : shape_.value_dim;
  const int64_t channel = value < 0 ? head * dim : 2 * shape_.keys() + value * dim;
  const StateStep& step = steps[sequence];
  const int64_t begin = s.query_start[sequence], tokens = s.tokens(sequence);
  const int64_t before = shape_.taps - 1;
  float* inputs = states.inputs + step.slot * states.inputs_slot + channel;
  // the inputs before the first token, and a ring of the last `taps`
  float *past = scratch, *ring = scratch + before * dim;
  for (int64_t i = 0; i < before; ++i) {
    if (s.start(sequence) == 0) {
      std::fill_n(past + i * dim, dim, 0.0f);
    } else {
      std::copy_n(inputs + (step.replays + i) * channels, dim, past + i * dim);
    }
    std::copy_n(past + i * dim, dim, ring + i * dim);
  }
  const auto ring_row = [&](int64_t i) { return ring + i % shape_.taps * dim; };
  const float* taps[kMaxTaps];
  for (int64_t t = 0; t < tokens; ++t) {
    load_channels(kernels, rows, channels, begin + t, channel, dim, ring_row(before + t));
    for (int64_t j = 0; j < shape_.taps; ++j) taps[j] = ring_row(t + j);
    float* y = rows.mixed + (head * s.query_start[s.count] + begin + t) * shape_.head_floats();
    kernels.conv_silu_row(taps, shape_.taps, weights_.conv + channel, channels, dim, y);
    if (value >= 0) continue;
    const auto& scale = head < shape_.key_heads ? query_scale_ : key_scale_;
    kernels.rms_norm_row(y, scale.data(), dim, kLengthEps / static_cast<float>(dim), DType::kF32,
                         y);
  }
  // the inputs that the next step needs: the last ones before the drafts, and the drafts'
  const int64_t first = tokens - step.drafts - before;
  for (int64_t i = 0; i < before + step.drafts; ++i) {
    float* to = inputs + i * channels;
    if (const int64_t t = first + i; t < 0) {
      std::copy_n(past + (before + t) * dim, dim, to);
    } else {
      load_channels(kernels, rows, channels, begin + t, channel, dim, to);
    }
  }
}

void DeltaNet::gates(const KernelTable& kernels, const float* a, const float* b, int64_t head,
                     int64_t heads, float* decay, float* beta) const {
  kernels.delta_gates_row(a, b, weights_.a_log + head, weights_.dt_bias + head, heads, decay, beta);
}

float* DeltaNet::kept(const DeltaStates& states, int64_t slot, int64_t draft, int64_t slab) const {
  const int64_t at = draft * shape_.value_heads * shape_.slabs() + slab;
  return states.kept + slot * states.kept_slot + at * shape_.kept_floats();
}

void DeltaNet::rule(const KernelTable& kernels, const Sequences& s, const StateStep* steps,
                    const DeltaStates& states, const DeltaRows& rows, int64_t unit,
                    float* scratch) const {
  const int64_t slabs = shape_.slabs(), of_sequence = shape_.value_heads * slabs;
  const int64_t sequence = unit / of_sequence, slab = unit % of_sequence, head = slab / slabs;
  const int64_t column = slab * kStateColumns;
  const int64_t group = head / (shape_.value_heads / shape_.key_heads), dim = shape_.key_dim;
  const StateStep& step = steps[sequence];
  const int64_t begin = s.query_start[sequence], certain = s.tokens(sequence) - step.drafts;
  float* state = states.recurrent + step.slot * states.recurrent_slot + slab * shape_.slab_floats();
  if (s.start(sequence) == 0) std::fill_n(state, shape_.slab_floats(), 0.0f);
  for (int64_t r = 0; r < step.replays; ++r) {
    const float* from = kept(states, step.slot, r, slab);
    kernels.delta_replay(from, from + dim, from[dim + kStateColumns], dim, state);
  }
  const auto job_from = [&](int64_t token, int64_t tokens, float* to) {
    const auto row = [&](int64_t h) {
      return rows.mixed + (h * s.query_start[s.count] + token) * shape_.head_floats();
    };
    const int64_t gate = token * shape_.value_heads + head;
    return DeltaJob{.state = to,
                    .key_dim = dim,
                    .tokens = tokens,
                    .q = row(group),
                    .k = row(shape_.key_heads + group),
                    .v = row(2 * shape_.key_heads + head) + column % shape_.value_dim,
                    .row_stride = shape_.head_floats(),
                    .decay = rows.decay + gate,
                    .beta = rows.beta + gate,
                    .gate_stride = shape_.value_heads,
                    .out = rows.out + token * shape_.values() + column,
                    .out_stride = shape_.values(),
                    .errors = nullptr,
                    .error_stride = 0};
  };
  kernels.delta_rule(job_from(begin, certain, state));
  if (step.drafts == 0) return;
  std::copy_n(state, shape_.slab_floats(), scratch);
  DeltaJob job = job_from(begin + certain, step.drafts, scratch);
  float* to = kept(states, step.slot, 0, slab);
  job.errors = to + dim;
  job.error_stride = of_sequence * shape_.kept_floats();
  kernels.delta_rule(job);
  for (int64_t d = 0; d < step.drafts; ++d) {
    float* entry = to + d * job.error_stride;
    std::copy_n(job.k + d * job.row_stride, dim, entry);
    entry[dim + kStateColumns] = job.decay[d * job.gate_stride];
  }
}

void delta_net(const DeltaNet& net, const Sequences& s, const StateStep* steps,
               const DeltaStates& states, const DeltaRows& given, const float* a, const float* b) {
  const KernelTable& kernels = active_kernels();
  const DeltaShape& shape = net.shape();
  const int64_t tokens = s.count == 0 ? 0 : s.query_start[s.count], heads = shape.value_heads;
  Scratch<float> mixed(shape.mixed_floats(tokens)), gates(2 * tokens * heads);
  DeltaRows rows = given;
  rows.mixed = mixed.get();
  rows.decay = gates.get();
  rows.beta = gates.get() + tokens * heads;
  parallel_ranges(tokens, heads * 64, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      net.gates(kernels, a + t * heads, b + t * heads, 0, heads, rows.decay + t * heads,
                rows.beta + t * heads);
  });
  const int64_t each = tokens / std::max(s.count, int64_t{1});
  parallel_rows(net.mix_units(s), each * shape.value_dim * 8, net.thread_floats(),
                [&](int64_t unit, float* scratch) {
                  net.mix(kernels, s, steps, states, rows, unit, scratch);
                });
  parallel_rows(net.rule_units(s), each * shape.slab_floats(), net.thread_floats(),
                [&](int64_t unit, float* scratch) {
                  net.rule(kernels, s, steps, states, rows, unit, scratch);
                });
}

}  // namespace bitnet::engine
