// model_step: a whole model on new tokens of any sequences over a pool of blocks;
// engine/model_step.h does the rest.
#include "ops/register.h"
#include "ops/step_tensors.h"

namespace bitnet::ops {
namespace {

// The arguments of model_step in the order of its schema.
struct ModelStep {
  Tensor x;
  StepTensors model;
  Tensor key_pool, value_pool;
  Tensor positions, slot_mapping, query_start_loc, seq_lens, block_table, logit_rows;
  std::optional<Tensor> key_scale, value_scale;
  std::string layout;
};

void set_tokens(const Check& check, const ModelStep& a, StepTokens& to) {
  const int64_t tokens = a.x.size(0);
  const int64_t blocks = a.key_pool.size(kPagedLayers.block);
  const int64_t block_size = a.key_pool.size(kPagedLayers.position);
  copy_indices(check, a.positions, "positions", {tokens}, to.positions);
  for (const int64_t position : to.positions) {
    if (position < 0) check.fail("positions", "at least 0", std::to_string(position));
  }
  copy_slots(check, a.slot_mapping, tokens, blocks * block_size, to.slots);
  to.sequences.set(check, a.query_start_loc, a.seq_lens, a.block_table, tokens, blocks, block_size);
  check.dim(a.logit_rows, "logit_rows", 1);
  if (a.logit_rows.size(0) > tokens)  // the workspace has room for as many as there are tokens
    check.fail("logit_rows", "of at most the " + std::to_string(tokens) + " tokens of x",
               std::to_string(a.logit_rows.size(0)));
  copy_indices(check, a.logit_rows, "logit_rows", {a.logit_rows.size(0)}, to.logit_rows);
  for (const int64_t row : to.logit_rows) {
    if (!(row >= 0 && row < tokens))
      check.fail("logit_rows", "of rows in [0, " + std::to_string(tokens) + ")",
                 std::to_string(row));
  }
}

Tensor model_step(const ModelStep& a) {
  const Check check("model_step");
  thread_local engine::StepState state;
  thread_local StepTokens tokens;
  engine::StepModel m{};
  check.dtype(a.x, "x", ScalarType::Float);
  check.dim(a.x, "x", 2);
  check_pool(check, a.key_pool, a.value_pool, kPagedLayers);
  check_pool_scales(check, a.key_pool, a.value_pool, a.key_scale, a.value_scale);
  const CacheLayout layout = check_layout(check, a.key_pool, a.value_pool, a.layout, kPagedLayers);
  m.tokens = a.x.size(0);
  m.hidden = a.x.size(1);
  m.n_layers = a.key_pool.size(0);
  m.kv_heads = a.key_pool.size(kPagedLayers.head);
  m.dim = a.key_pool.size(4);
  const StepBinding binding("model_step", "key_pool", a.model);
  binding.bind(m, state.layers);
  binding.bind_places(m, state.layers, tokens.dropped);
  set_tokens(check, a, tokens);
  binding.bind_adapters(m, state.side_paths, tokens);
  const Tensor x = as_contiguous(a.x);
  const Mutated mutated(a.key_pool, a.value_pool, a.key_scale, a.value_scale, "key_pool",
                        "value_pool");
  mutated.keep_apart(check, x, "x");
  mutated.keep_apart(check, a.positions, "positions");
  mutated.keep_apart(check, a.slot_mapping, "slot_mapping");
  mutated.keep_apart(check, a.query_start_loc, "query_start_loc");
  mutated.keep_apart(check, a.seq_lens, "seq_lens");
  mutated.keep_apart(check, a.block_table, "block_table");
  mutated.keep_apart(check, a.logit_rows, "logit_rows");
  binding.keep_apart(mutated, state.layers);
  Tensor logits =
      empty({static_cast<int64_t>(tokens.logit_rows.size()), m.head.rows}, ScalarType::Float);
  if (m.tokens == 0) return logits;
  StepBinding::run(state, m, tokens,
                   {a.key_pool, a.value_pool, a.key_scale, a.value_scale, kPagedLayers, layout}, x,
                   logits);
  return logits;
}

void unpack_model_step(StableIValue* stack, uint64_t, uint64_t) {
  const DefaultFloatState floats;
  Arguments a(stack);
  ModelStep step;
  step.x = a.take<Tensor>();
  step.model.take_weights(a);
  step.key_pool = a.take<Tensor>();
  step.value_pool = a.take<Tensor>();
  step.positions = a.take<Tensor>();
  step.slot_mapping = a.take<Tensor>();
  step.query_start_loc = a.take<Tensor>();
  step.seq_lens = a.take<Tensor>();
  step.block_table = a.take<Tensor>();
  step.logit_rows = a.take<Tensor>();
  step.model.take_numbers(a);
  step.key_scale = a.take<std::optional<Tensor>>();
  step.value_scale = a.take<std::optional<Tensor>>();
  step.model.take_extras(a);
  step.layout = a.take<std::string>();
  step.model.take_windows(a);
  put(stack, model_step(step));
}

}  // namespace

BITNET_LIBRARY_IMPL(m) { m.impl("model_step", &unpack_model_step); }

}  // namespace bitnet::ops
