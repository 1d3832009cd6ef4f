// model_step: a bound program on new tokens of any sequences over a pool of blocks;
// engine/program/plan.h does the rest.
#include <cmath>
#include <optional>

#include "engine/program/plan.h"
#include "ops/paged_batch.h"
#include "ops/program.h"
#include "ops/register.h"
#include "ops/state_checks.h"

namespace bitnet::ops {
namespace {

// The list `caches`: key pool and value pool, and of int8 pools their scales; behind them, of a
// program that chooses pages, the bounds of keys; of one with states, the three tensors of a
// StatePool.
struct Caches {
  const Tensor &keys, &values;
  std::optional<Tensor> key_scale, value_scale, bounds;
  CacheLayout layout;

  Caches(const Check& check, const std::vector<Tensor>& given, const std::string& layout_name,
         size_t pools)
      : keys(first_of(check, given, pools)), values(given[1]) {
    if (pools % 2 == 1) bounds = Tensor::borrow(given[pools - 1]);
    if (pools >= 4) {
      key_scale = Tensor::borrow(given[2]);
      value_scale = Tensor::borrow(given[3]);
    }
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

 private:
  static const Tensor& first_of(const Check& check, const std::vector<Tensor>& given,
                                size_t pools) {
    if (pools < 2 || pools > 5)
      check.fail(
          "caches",
          "a key pool and a value pool, with int8 pools their scales behind them, with a program "
          "that chooses pages their bounds, and with a program's states three tensors more",
          std::to_string(given.size()) + " tensors");
    return given[0];
  }
};

// Which tokens a step computes and where their keys and values go: copied, then checked.
struct Tokens {
  std::vector<int64_t> positions, slots, logit_rows, of_sequences, adapters;
  PagedBatch sequences;
  std::vector<engine::StateStep> state_steps;
  std::vector<engine::Noise> noise;
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

void copy_logit_rows(const Check& check, const Tensor& rows, int64_t tokens,
                     std::vector<int64_t>& copy) {
  check.dim(rows, "logit_rows", 1);
  if (rows.size(0) > tokens)  // the workspace has room for as many as there are tokens
    check.fail("logit_rows", "of at most the " + std::to_string(tokens) + " tokens of x",
               std::to_string(rows.size(0)));
  copy_indices(check, rows, "logit_rows", {rows.size(0)}, copy);
  for (const int64_t row : copy) {
    if (!(row >= 0 && row < tokens))
      check.fail("logit_rows", "of rows in [0, " + std::to_string(tokens) + ")",
                 std::to_string(row));
  }
}

// The adapter of every token from those of the sequences.
void copy_adapters(const Check& check, const Tensor& adapters, int64_t tokens, int64_t count,
                   Tokens& to) {
  const engine::Sequences sequences = to.sequences.view();
  copy_indices(check, adapters, "adapters", {sequences.count}, to.of_sequences);
  to.adapters.assign(static_cast<size_t>(tokens), -1);
  for (int64_t s = 0; s < sequences.count; ++s) {
    const int64_t adapter = to.of_sequences[static_cast<size_t>(s)];
    if (!(adapter >= -1 && adapter < count))
      check.fail("adapters", "from -1 (none) to " + std::to_string(count - 1),
                 std::to_string(adapter));
    for (int64_t t = sequences.query_start[s]; t < sequences.query_start[s + 1]; ++t)
      to.adapters[static_cast<size_t>(t)] = adapter;
  }
}

void copy_draws(const Check& check, const Tensor& draws, int64_t rows,
                std::vector<engine::Noise>& copy) {
  check.dtype(draws, "draws", ScalarType::Double);
  check.shape(draws, "draws", {rows, 2});
  const Tensor dense = as_contiguous(draws);
  const double* values = data<double>(dense);
  copy.clear();
  for (int64_t r = 0; r < rows; ++r) {
    const double temperature = values[2 * r], uniform = values[2 * r + 1];
    if (!(temperature >= 0 && std::isfinite(temperature) && uniform >= 0 && uniform < 1))
      check.fail("draws", "of temperatures finite and at least 0, uniforms from 0 to below 1",
                 std::to_string(temperature) + " and " + std::to_string(uniform) + " for row " +
                     std::to_string(r));
    copy.push_back(engine::noise_of(temperature, uniform));
  }
}

Tensor model_step(const Tensor& x_in, const Tensor& program_handle,
                  const std::vector<Tensor>& cache_list, const Tensor& positions,
                  const Tensor& slot_mapping, const Tensor& query_start_loc, const Tensor& seq_lens,
                  const Tensor& block_table, const Tensor& logit_rows, int64_t out_features,
                  const std::optional<Tensor>& adapters, std::string layout,
                  const std::optional<Tensor>& state_steps, int64_t largest,
                  const std::optional<Tensor>& draws) {
  const Check check("model_step");
  thread_local engine::StepState state;
  thread_local Tokens tokens;
  const auto [kept, bound] = bound_program(check, program_handle);
  const engine::Program& program = bound->program();
  check.dtype(x_in, "x", ScalarType::Float);
  check.dim(x_in, "x", 2);
  check.shape(x_in, "x", {x_in.size(0), program.settings().hidden});
  if (out_features != program.out_features())
    check.fail("out_features",
               (program.head().rows != 0 ? "the program's vocab " : "the program's hidden ") +
                   std::to_string(program.out_features()),
               std::to_string(out_features));
  if (largest < 0) check.fail("largest", "at least 0", std::to_string(largest));
  const size_t state_tensors = program.state_layers() == 0 ? 0 : 3;
  const size_t pools = cache_list.size() - std::min(state_tensors, cache_list.size());
  const Caches caches(check, cache_list, layout, pools);
  check_caches(check, caches, program);
  if (program.chooses_pages() && !caches.bounds)
    check.fail("caches", "with bounds of keys behind the pools, for the program chooses pages",
               std::to_string(pools) + " tensors");
  const int64_t count = x_in.size(0), blocks = caches.keys.size(kPagedLayers.block),
                block_size = caches.keys.size(kPagedLayers.position);
  copy_indices(check, positions, "positions", {count}, tokens.positions);
  for (const int64_t position : tokens.positions) {
    if (position < 0) check.fail("positions", "at least 0", std::to_string(position));
  }
  copy_slots(check, slot_mapping, count, blocks * block_size, tokens.slots);
  tokens.sequences.set(check, query_start_loc, seq_lens, block_table, count, blocks, block_size);
  copy_logit_rows(check, logit_rows, count, tokens.logit_rows);
  const bool noisy = draws.has_value() && draws->defined();
  if (noisy) copy_draws(check, *draws, logit_rows.size(0), tokens.noise);
  const bool adapted = adapters.has_value() && adapters->defined();
  if (adapted) copy_adapters(check, *adapters, count, program.adapters(), tokens);
  const bool stated = state_steps.has_value() && state_steps->defined();
  if (stated != (state_tensors != 0))
    check.fail("state_steps",
               state_tensors != 0 ? "of a program with states"
                                  : "to be None, for the program has no states",
               stated ? "some" : "None");
  std::optional<StatePool> states;
  if (stated) {
    states.emplace(check, cache_list[pools], cache_list[pools + 1], cache_list[pools + 2],
                   program.delta_shape(), program.state_layers());
    copy_state_steps(check, *state_steps, tokens.sequences.view(), *states, tokens.state_steps);
  }
  const Tensor x = as_contiguous(x_in);
  Mutated mutated(caches.keys, caches.values, caches.key_scale, caches.value_scale, "key_pool",
                  "value_pool");
  if (caches.bounds) mutated.add(*caches.bounds, "key_bounds");
  if (stated) states->add_to(check, mutated);
  mutated.keep_apart(check, x, "x");
  for (const auto& [indices, name] :
       {std::pair(&positions, "positions"), std::pair(&slot_mapping, "slot_mapping"),
        std::pair(&query_start_loc, "query_start_loc"), std::pair(&seq_lens, "seq_lens"),
        std::pair(&block_table, "block_table"), std::pair(&logit_rows, "logit_rows")})
    mutated.keep_apart(check, *indices, name);
  if (adapted) mutated.keep_apart(check, *adapters, "adapters");
  if (stated) mutated.keep_apart(check, *state_steps, "state_steps");
  if (noisy) mutated.keep_apart(check, *draws, "draws");
  bound->keep_apart(check, mutated);
  const auto rows = static_cast<int64_t>(tokens.logit_rows.size());
  Tensor logits = empty({rows, out_features}, ScalarType::Float);
  if (count == 0) return logits;
  engine::Batch batch{.tokens = count,
                      .x = data<float>(x),
                      .positions = tokens.positions.data(),
                      .slots = tokens.slots.data(),
                      .logit_rows = tokens.logit_rows.data(),
                      .logit_count = rows,
                      .sequences = tokens.sequences.view(),
                      .adapters = adapted ? tokens.adapters.data() : nullptr,
                      .pool = caches.pool(),
                      .out = mutable_data<float>(logits),
                      .largest = largest,
                      .noise = noisy ? tokens.noise.data() : nullptr};
  if (stated) {
    batch.states = states->first();
    batch.state_steps = tokens.state_steps.data();
  }
  engine::run_step(state, program, bound->id(), batch);
  return logits;
}

}  // namespace

BITNET_LIBRARY_IMPL(m) { BITNET_OP(m, model_step); }

}  // namespace bitnet::ops
