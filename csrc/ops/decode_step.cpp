// decode_step: a whole model on the same number of new tokens of every sequence of a rectangular
// cache; engine/model_step.h does the rest.
#include <algorithm>

#include "ops/register.h"
#include "ops/step_tensors.h"

namespace bitnet::ops {
namespace {

// The arguments of decode_step in the order of its schema.
struct DecodeStep {
  Tensor x;
  StepTensors model;
  Tensor key_cache, value_cache, start_positions;
  int64_t logits_to_keep;
  std::optional<Tensor> key_scale, value_scale;
};

// [layers, batch, kv_heads, capacity, dim], every layer contiguous: what is sliced off a longer
// batch leaves gaps between layers.
void check_cache(const Check& check, const Tensor& t, const char* argument) {
  check_cache_dtype(check, t, argument);
  check.dim(t, argument, 5);
  if (!dense_layers(t)) check.fail(argument, "contiguous within every layer", "other strides");
}

void check_caches(const Check& check, const Tensor& key_cache, const Tensor& value_cache) {
  check_cache(check, key_cache, "key_cache");
  check_cache(check, value_cache, "value_cache");
  check.dtype(value_cache, "value_cache", key_cache.scalar_type());
  check.same_shape(value_cache, "value_cache", key_cache, "key_cache");
  if (overlap(key_cache, value_cache))
    check.fail("value_cache", "in its own memory", "memory shared with key_cache");
}

// `tokens` new tokens of every sequence, the logits of the last `kept` of which are wanted.
void set_tokens(const std::vector<int64_t>& starts, int64_t tokens, int64_t kept, int64_t capacity,
                StepTokens& to) {
  to.positions.clear(), to.logit_rows.clear();
  for (const int64_t start : starts) {
    for (int64_t t = 0; t < tokens; ++t) {
      if (t >= tokens - kept) to.logit_rows.push_back(static_cast<int64_t>(to.positions.size()));
      to.positions.push_back(start + t);
    }
  }
  rectangular_slots(starts, tokens, capacity, to.slots);
  to.sequences.set_rectangular(starts, tokens);
}

Tensor decode_step(const DecodeStep& a) {
  const Check check("decode_step");
  thread_local engine::StepState state;
  thread_local StepTokens tokens;
  thread_local std::vector<int64_t> starts;
  engine::StepModel m{};
  check.dtype(a.x, "x", ScalarType::Float);
  check.dim(a.x, "x", 3);
  check_caches(check, a.key_cache, a.value_cache);
  const int64_t batch = a.x.size(0), per_sequence = a.x.size(1);
  const int64_t capacity = a.key_cache.size(kRectangularLayers.position);
  m.tokens = batch * per_sequence;
  m.hidden = a.x.size(2);
  m.n_layers = a.key_cache.size(0);
  m.kv_heads = a.key_cache.size(kRectangularLayers.head);
  m.dim = a.key_cache.size(4);
  if (a.key_cache.size(1) != batch)
    check.fail("key_cache", "with the " + std::to_string(batch) + " sequences of x",
               std::to_string(a.key_cache.size(1)));
  check_cache_scales(check, a.key_cache, a.value_cache, a.key_scale, a.value_scale, true);
  check_positions(check, a.start_positions, batch, capacity, per_sequence, starts);
  if (a.logits_to_keep < 0)
    check.fail("logits_to_keep", "at least 0", std::to_string(a.logits_to_keep));
  const int64_t kept =
      a.logits_to_keep == 0 ? per_sequence : std::min(a.logits_to_keep, per_sequence);
  const StepBinding binding("decode_step", "key_cache", a.model);
  binding.bind(m, state.layers);
  binding.bind_places(m, state.layers, tokens.dropped);
  set_tokens(starts, per_sequence, kept, capacity, tokens);
  binding.bind_adapters(m, state.side_paths, tokens);
  const Tensor x = as_contiguous(a.x);
  const Mutated mutated(a.key_cache, a.value_cache, a.key_scale, a.value_scale);
  mutated.keep_apart(check, x, "x");
  mutated.keep_apart(check, a.start_positions, "start_positions");
  binding.keep_apart(mutated, state.layers);
  Tensor logits = empty({batch, kept, m.head.rows}, ScalarType::Float);
  if (m.tokens == 0) return logits;
  StepBinding::run(state, m, tokens,
                   {a.key_cache, a.value_cache, a.key_scale, a.value_scale, kRectangularLayers}, x,
                   logits);
  return logits;
}

void unpack_decode_step(StableIValue* stack, uint64_t, uint64_t) {
  const DefaultFloatState floats;
  Arguments a(stack);
  DecodeStep step;
  step.x = a.take<Tensor>();
  step.model.take_weights(a);
  step.key_cache = a.take<Tensor>();
  step.value_cache = a.take<Tensor>();
  step.start_positions = a.take<Tensor>();
  step.model.take_numbers(a);
  step.logits_to_keep = a.take<int64_t>();
  step.key_scale = a.take<std::optional<Tensor>>();
  step.value_scale = a.take<std::optional<Tensor>>();
  step.model.take_extras(a);
  step.model.take_windows(a);
  put(stack, decode_step(step));
}

}  // namespace

BITNET_LIBRARY_IMPL(m) { m.impl("decode_step", &unpack_decode_step); }

}  // namespace bitnet::ops
