// delta_net: convolution, gates and delta rule of new tokens of any sequences over their states;
// engine/delta_net.h does the rest.
#include "engine/delta_net.h"

#include "ops/paged_batch.h"
#include "ops/register.h"
#include "ops/state_checks.h"

namespace bitnet::ops {
namespace {

using engine::kMaxKeyDim, engine::kMaxTaps;

engine::DeltaShape shape_from(const Check& check, const Tensor& a_log, const Tensor& conv,
                              int64_t key_heads, int64_t key_dim, int64_t channels) {
  check.dtype(a_log, "A_log", ScalarType::Float);
  check.dim(a_log, "A_log", 1);
  check.contiguous(a_log, "A_log");
  check.dtype(conv, "conv", ScalarType::Float);
  check.dim(conv, "conv", 2);
  const int64_t heads = a_log.size(0), taps = conv.size(0);
  if (!(taps >= 2 && taps <= kMaxTaps))
    check.fail("conv", "with 2 to " + std::to_string(kMaxTaps) + " rows", std::to_string(taps));
  check.shape(conv, "conv", {taps, channels});
  check.contiguous(conv, "conv");
  const auto size = [&](const char* name, int64_t dim) {
    if (!(dim >= kStateColumns && dim <= kMaxKeyDim && dim % kStateColumns == 0))
      check.fail(
          name,
          "a multiple of " + std::to_string(kStateColumns) + " up to " + std::to_string(kMaxKeyDim),
          std::to_string(dim));
  };
  size("key_dim", key_dim);
  if (!(key_heads >= 1 && heads >= 1 && heads % key_heads == 0))
    check.fail("key_heads", "a divisor of the " + std::to_string(heads) + " heads of A_log",
               std::to_string(key_heads));
  const int64_t values = channels - 2 * key_heads * key_dim;
  if (values < 1 || values % heads != 0)
    check.fail("qkv", "with queries and keys of key_heads * key_dim features each, then values",
               std::to_string(channels) + " features");
  size("the values of a head", values / heads);
  return {key_heads, heads, key_dim, values / heads, taps};
}

}  // namespace

Tensor delta_net(const Tensor& qkv_in, const Tensor& a_in, const Tensor& b_in, const Tensor& conv,
                 const Tensor& a_log, const Tensor& dt_bias, const std::vector<Tensor>& states,
                 int64_t layer, const Tensor& query_start_loc, const Tensor& seq_lens,
                 const Tensor& state_steps, int64_t key_heads, int64_t key_dim) {
  const Check check("delta_net");
  check.float_dtype(qkv_in, "qkv");
  check.dim(qkv_in, "qkv", 2);
  const int64_t tokens = qkv_in.size(0);
  const engine::DeltaShape shape =
      shape_from(check, a_log, conv, key_heads, key_dim, qkv_in.size(1));
  check.dtype(dt_bias, "dt_bias", ScalarType::Float);
  check.shape(dt_bias, "dt_bias", {shape.value_heads});
  check.contiguous(dt_bias, "dt_bias");
  for (const auto& [t, name] : {std::pair(&a_in, "a"), std::pair(&b_in, "b")}) {
    check.dtype(*t, name, ScalarType::Float);
    check.shape(*t, name, {tokens, shape.value_heads});
  }
  if (states.size() != 3)
    check.fail("states", "of recurrent states, inputs and kept drafts",
               std::to_string(states.size()) + " tensors");
  const StatePool pool(check, shape.buffers(), {&states[0], &states[1], &states[2]},
                       {"states[0] (recurrent)", "states[1] (inputs)", "states[2] (kept)"});
  if (!(layer >= 0 && layer < pool.layers))
    check.fail("layer", "in [0, " + std::to_string(pool.layers) + ")", std::to_string(layer));
  PagedBatch sequences;
  sequences.set_lengths(check, query_start_loc, seq_lens, tokens);
  std::vector<engine::StateStep> steps;
  copy_state_steps(check, state_steps, sequences.view(), pool, steps);
  const Tensor qkv = as_contiguous(qkv_in), a = as_contiguous(a_in), b = as_contiguous(b_in);
  Mutated mutated;
  pool.add_to(check, mutated);
  for (const auto& [t, name] :
       {std::pair(&qkv, "qkv"), std::pair(&a, "a"), std::pair(&b, "b"), std::pair(&conv, "conv"),
        std::pair(&a_log, "A_log"), std::pair(&dt_bias, "dt_bias"),
        std::pair(&query_start_loc, "query_start_loc"), std::pair(&seq_lens, "seq_lens"),
        std::pair(&state_steps, "state_steps")})
    mutated.keep_apart(check, *t, name);
  Tensor out = empty({tokens, shape.values()}, ScalarType::Float);
  if (steps.empty()) return out;
  const engine::DeltaNet net(shape, {data<float>(conv), data<float>(a_log), data<float>(dt_bias)});
  engine::delta_net(net, sequences.view(), steps.data(),
                    engine::DeltaStates::of(pool.memory(), layer),
                    {tokens == 0 ? nullptr : qkv.const_data_ptr(), dtype_of(qkv), nullptr, nullptr,
                     nullptr, mutable_data<float>(out)},
                    data<float>(a), data<float>(b));
  return out;
}

BITNET_LIBRARY_IMPL(m) { BITNET_OP(m, delta_net); }

}  // namespace bitnet::ops
