// run_program and model_step: a bound program on new tokens of any sequences over a pool of blocks;
// engine/program/plan.h does the rest.
#include <algorithm>
#include <optional>

#include "ops/program.h"
#include "ops/register.h"
#include "ops/step_request.h"

namespace bitnet::ops {
namespace {

// What is kept for positions: "key" and "value", of int8 pools "key_scale" and "value_scale", of a
// program that chooses pages "key_bounds".
struct Caches {
  const Tensor &keys, &values;
  std::optional<Tensor> key_scale, value_scale, bounds;
  CacheLayout layout;

  Caches(const Check& check, const Named& given, const std::string& layout_name)
      : keys(given.get(check, "key")), values(given.get(check, "value")) {
    const auto optional = [&given](const char* name) {
      const Tensor* found = given.find(name);
      return found == nullptr ? std::nullopt : std::optional<Tensor>(Tensor::borrow(*found));
    };
    key_scale = optional("key_scale");
    value_scale = optional("value_scale");
    bounds = optional("key_bounds");
    check_pool(check, keys, values, kPagedLayers);
    check_pool_scales(check, keys, values, key_scale, value_scale);
    layout = check_layout(check, keys, values, layout_name, kPagedLayers);
    if (bounds) check_bounds(check, *bounds, keys, values, kPagedLayers);
  }

  engine::LayeredPool pool() const {
    const auto bytes = [](const Tensor& t) {
      return t.stride(0) * static_cast<int64_t>(t.element_size());
    };
    engine::LayeredPool pool;
    pool.first = pool_view(keys, values, key_scale, value_scale, kPagedLayers, 0, layout);
    pool.key_bytes = bytes(keys);
    pool.value_bytes = bytes(values);
    if (pool.first.scaled()) {
      pool.key_scale_bytes = bytes(*key_scale);
      pool.value_scale_bytes = bytes(*value_scale);
    }
    if (bounds) {
      pool.first.bounds = bounds_view(*bounds, kPagedLayers);
      pool.bound_bytes = bytes(*bounds);
    }
    return pool;
  }
};

void check_caches(const Check& check, const Caches& caches, const engine::Program& program) {
  const auto expect = [&](int dimension, const char* what, int64_t expected) {
    if (caches.keys.size(dimension) != expected)
      check.fail("key_pool", "with the program's " + std::to_string(expected) + what,
                 std::to_string(caches.keys.size(dimension)));
  };
  expect(0, " layers of attention", program.attention_layers());
  if (program.attention_layers() == 0) return;
  expect(kPagedLayers.head, " heads of keys", program.kv_heads());
  expect(4, " features of a head", program.head_dim());
}

// What is kept for sequences, by the names that the program's blocks give it.
std::optional<StatePool> states_of(const Check& check, const Named& caches,
                                   const engine::Program& program) {
  if (program.kept().empty()) return std::nullopt;
  std::vector<const Tensor*> tensors;
  std::vector<std::string> names;
  for (const engine::KeptBuffer& buffer : program.kept()) {
    tensors.push_back(&caches.get(check, buffer.name));
    names.push_back(buffer.name);
  }
  return std::optional<StatePool>(std::in_place, check, program.kept(), std::move(tensors),
                                  std::move(names));
}

Tensor step(const Check& check, const ProgramInUse& in_use, const Tensor& x_in,
            const Named& cache_list, const std::string& layout, const Named& given,
            int64_t out_features, int64_t largest) {
  thread_local engine::StepState state;
  thread_local StepRequest request;
  const BoundProgram& bound = *in_use.bound;
  const engine::Program& program = bound.program();
  check.dtype(x_in, "x", ScalarType::Float);
  check.dim(x_in, "x", 2);
  check.shape(x_in, "x", {x_in.size(0), program.settings().hidden});
  if (out_features != program.out_features())
    check.fail("out_features",
               (program.gives_logits() ? "the program's vocab " : "the program's hidden ") +
                   std::to_string(program.out_features()),
               std::to_string(out_features));
  if (largest < 0) check.fail("largest", "at least 0", std::to_string(largest));
  const Caches caches(check, cache_list, layout);
  check_caches(check, caches, program);
  if (program.chooses_pages() && !caches.bounds)
    check.fail("caches", "with key_bounds, for the program chooses pages", "none");
  const std::optional<StatePool> states = states_of(check, cache_list, program);
  cache_list.finish(check);
  const int64_t tokens = x_in.size(0);
  request.set(check, given, program, tokens, caches.keys.size(kPagedLayers.block),
              caches.keys.size(kPagedLayers.position), states ? &*states : nullptr);
  given.finish(check);
  const Tensor x = as_contiguous(x_in);
  Mutated mutated(caches.keys, caches.values, caches.key_scale, caches.value_scale, "key_pool",
                  "value_pool");
  if (caches.bounds) mutated.add(*caches.bounds, "key_bounds");
  if (states && states->add_beside(check, caches.keys, caches.values, mutated))
    request.check_pages(check, caches.keys.size(kPagedLayers.position));
  mutated.keep_apart(check, x, "x");
  given.keep_apart(check, mutated);
  bound.keep_apart(check, mutated);
  Tensor logits = empty({request.rows(), out_features}, ScalarType::Float);
  if (tokens == 0) return logits;
  engine::Batch batch;
  batch.tokens = tokens;
  batch.x = data<float>(x);
  batch.pool = caches.pool();
  batch.kept = states ? states->memory() : nullptr;
  batch.out = mutable_data<float>(logits);
  batch.largest = largest;
  request.fill(batch);
  engine::run_step(state, program, bound.id(), batch);
  return logits;
}

// cache_names, step_names: those of the tensors, one a line
Tensor run_program(const Tensor& x, const Tensor& program, std::string cache_names,
                   const std::vector<Tensor>& caches, std::string step_names,
                   const std::vector<Tensor>& given, int64_t out_features, std::string layout,
                   int64_t largest) {
  const Check check("run_program");
  return step(check, bound_program(check, program), x, Named(check, "caches", cache_names, caches),
              layout, Named(check, "step", step_names, given), out_features, largest);
}

// The form of 0.1: caches by their places, the parts of a step as arguments of their own.
Tensor model_step(const Tensor& x, const Tensor& program_handle, const std::vector<Tensor>& list,
                  const Tensor& positions, const Tensor& slot_mapping,
                  const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_table,
                  const Tensor& logit_rows, int64_t out_features,
                  const std::optional<Tensor>& adapters, std::string layout,
                  const std::optional<Tensor>& state_steps, int64_t largest,
                  const std::optional<Tensor>& draws) {
  const Check check("model_step");
  const ProgramInUse in_use = bound_program(check, program_handle);
  const std::vector<engine::KeptBuffer>& kept = in_use.bound->program().kept();
  const size_t pools = list.size() - std::min(kept.size(), list.size());
  if (pools < 2 || pools > 5)
    check.fail("caches",
               "a key pool and a value pool, with int8 pools their scales behind them, with a "
               "program that chooses pages their bounds, and with a program's states three tensors "
               "more",
               std::to_string(list.size()) + " tensors");
  Named caches("caches");
  constexpr const char* kPools[] = {"key", "value", "key_scale", "value_scale"};
  for (size_t i = 0; i < pools - pools % 2; ++i) caches.add(kPools[i], list[i]);
  if (pools % 2 == 1) caches.add("key_bounds", list[pools - 1]);
  for (size_t i = 0; i < kept.size(); ++i) caches.add(kept[i].name, list[pools + i]);
  Named given("step");
  for (const auto& [name, tensor] :
       {std::pair("positions", &positions), std::pair("slot_mapping", &slot_mapping),
        std::pair("query_start_loc", &query_start_loc), std::pair("seq_lens", &seq_lens),
        std::pair("block_table", &block_table), std::pair("logit_rows", &logit_rows)})
    given.add(name, *tensor);
  for (const auto& [name, tensor] :
       {std::pair("adapters", &adapters), std::pair("state_steps", &state_steps),
        std::pair("draws", &draws)}) {
    if (tensor->has_value() && (*tensor)->defined()) given.add(name, **tensor);
  }
  return step(check, in_use, x, caches, layout, given, out_features, largest);
}

}  // namespace

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, run_program);
  BITNET_OP(m, model_step);
}

}  // namespace bitnet::ops
