// decode_step: checks of its many tensors, and their binding to a StepModel; engine/model_step.h does
// the rest.
#include <algorithm>
#include <cmath>

#include "engine/model_step.h"
#include "format/layout.h"
#include "ops/cache_checks.h"
#include "ops/head_view.h"
#include "ops/ops.h"
#include "ops/weight_view.h"

namespace bitnet::ops {
namespace {

using engine::kLayerWeights;
using engine::StepLayer;
using engine::StepModel;
using engine::Weight;

// Everything of the call that is not a weight, checked.
struct Sizes {
  int64_t batch, per_sequence, hidden, n_layers, kv_heads, capacity, dim;
  int64_t tokens() const { return batch * per_sequence; }
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

Sizes check_sizes(const Check& check, const Tensor& x, const Tensor& key_cache,
                  const Tensor& value_cache, const std::vector<Tensor>& weights) {
  check.dtype(x, "x", ScalarType::Float);
  check.dim(x, "x", 3);
  check_caches(check, key_cache, value_cache);
  const Sizes s{x.size(0),         x.size(1),         x.size(2),        key_cache.size(0),
                key_cache.size(2), key_cache.size(3), key_cache.size(4)};
  if (s.hidden < 1) check.fail("x", "with at least one feature in the last dimension", "0");
  if (key_cache.size(1) != s.batch)
    check.fail("key_cache", "with the " + std::to_string(s.batch) + " sequences of x",
               std::to_string(key_cache.size(1)));
  if (!(s.dim >= 2 && s.dim % 2 == 0))
    check.fail("key_cache", "with an even head dimension", std::to_string(s.dim));
  const auto given = static_cast<int64_t>(weights.size());
  if (given % kLayerWeights != 0 || given / kLayerWeights != s.n_layers)
    check.fail("weights",
               "to be q, k, v, o, gate, up and down of each of the cache's " +
                   std::to_string(s.n_layers) + " layers",
               std::to_string(given) + " tensors");
  return s;
}

void check_most(const Check& check, const char* argument, const char* what, int64_t got,
                int64_t most) {
  if (got > most)
    check.fail(argument, "with at most " + std::to_string(most) + " " + what, std::to_string(got));
}

void check_numbers(const Check& check, const StepModel& m, double scale, double theta,
                   ScalarType dtype) {
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16)
    check.fail("dtype", "float32 or bfloat16", dtype_name(dtype));
  if (!(m.heads >= 1 && m.kv_heads >= 1 && m.heads % m.kv_heads == 0))
    check.fail("heads", "a multiple of the cache's " + std::to_string(m.kv_heads) + " heads",
               std::to_string(m.heads));
  if (m.intermediate < 1) check.fail("inner", "positive", std::to_string(m.intermediate));
  // Before any of these is multiplied: a product that has overflowed would pass for a small one.
  check_most(check, "x", "features in the last dimension", m.hidden, kMaxInFeatures);
  check_most(check, "key_cache", "features of a head", m.dim, kMaxInFeatures);
  check_most(check, "heads", "heads of that size", m.heads, kMaxInFeatures / m.dim);
  check_most(check, "inner", "features", m.intermediate, kMaxInFeatures);
  if (!(m.eps >= 0.0f && std::isfinite(m.eps)))
    check.fail("eps", "finite and not negative", std::to_string(m.eps));
  if (!(theta > 0.0 && std::isfinite(theta)))
    check.fail("rope_theta", "finite and positive", std::to_string(theta));
  if (!std::isfinite(scale)) check.fail("scale", "finite", std::to_string(scale));
}

void check_vocab(const Check& check, const Tensor& head_weight, int64_t vocab) {
  if (!head_weight.defined() || head_weight.dim() < 1) return;  // head_view has words for that
  const bool tiles = head_weight.dim() == 3;
  const int64_t rows = head_weight.size(0);
  const int64_t padded = tiles ? rows * layout::kHeadTileRows : rows;
  if (vocab > padded || vocab <= padded - (tiles ? layout::kHeadTileRows : 1))
    check.fail("vocab",
               "to be the " + std::to_string(rows) +
                   (tiles ? " tiles of 16 rows of head_weight" : " rows of head_weight"),
               std::to_string(vocab));
}

StepModel model_of(const Check& check, const Sizes& sizes, const std::string& activation) {
  StepModel m{};
  m.table = &kernels();
  m.tokens = sizes.tokens();
  m.per_sequence = sizes.per_sequence;
  m.hidden = sizes.hidden;
  m.kv_heads = sizes.kv_heads;
  m.dim = sizes.dim;
  m.capacity = sizes.capacity;
  m.n_layers = sizes.n_layers;
  m.relu2 = activation == "relu2";
  if (!(m.relu2 || activation == "silu"))
    check.fail("activation", "'relu2' or 'silu'", "'" + activation + "'");
  return m;
}

constexpr const char* kNames[] = {"weights (q)",    "weights (k)",  "weights (v)",   "weights (o)",
                                  "weights (gate)", "weights (up)", "weights (down)"};

void bind_weights(const Check& check, const StepModel& m, const std::vector<Tensor>& weights,
                  std::vector<StepLayer>& layers) {
  layers.resize(static_cast<size_t>(m.n_layers));
  for (size_t i = 0; i < weights.size(); ++i) {
    const int which = static_cast<int>(i % kLayerWeights);
    const engine::WeightSize expected = engine::weight_size(m, which);
    Weight& w = layers[i / kLayerWeights].weights[which];
    check.dtype(weights[i], kNames[which], ScalarType::Byte);  // before a look at its shape
    const bool canonical = weights[i].dim() == 2;
    w = weight_view(check, weights[i], kNames[which], expected.k,
                    canonical ? std::nullopt : std::optional<int64_t>(expected.rows));
    if (w.n_rows != expected.rows)
      check.fail(kNames[which], "with " + std::to_string(expected.rows) + " rows",
                 std::to_string(w.n_rows));
  }
}

void keep_weights_apart(const Check& check, const Mutated& mutated,
                        const std::vector<StepLayer>& layers) {
  for (const StepLayer& layer : layers) {
    for (int i = 0; i < kLayerWeights; ++i) {
      mutated.keep_apart(check, layer.weights[i].data, layer.weights[i].bytes(), kNames[i]);
    }
  }
}

// The small parameters: scales [layers, 7]; gains in one row, in the order in which they are used.
void bind_gains(const Check& check, StepModel& m, const Tensor& scales, const Tensor& gains,
                bool sub_norms, std::vector<StepLayer>& layers) {
  check.dtype(scales, "scales", ScalarType::Float);
  check.shape(scales, "scales", {m.n_layers, kLayerWeights});
  check.contiguous(scales, "scales");
  const int64_t sub = sub_norms ? m.query() + m.intermediate : 0;
  check.dtype(gains, "gains", ScalarType::Float);
  check.shape(gains, "gains", {m.n_layers * (2 * m.hidden + sub) + m.hidden});
  check.contiguous(gains, "gains");
  const auto* scale = static_cast<const float*>(scales.const_data_ptr());
  const auto* gain = static_cast<const float*>(gains.const_data_ptr());
  const auto next = [&gain](int64_t n) { return (gain += n) - n; };
  for (StepLayer& layer : layers) {
    layer.scales = scale;
    scale += kLayerWeights;
    layer.attention_norm = next(m.hidden);
    layer.out_norm = sub_norms ? next(m.query()) : nullptr;
    layer.mlp_norm = next(m.hidden);
    layer.down_norm = sub_norms ? next(m.intermediate) : nullptr;
  }
  m.final_norm = gain;
}

void bind_caches(Tensor& key_cache, Tensor& value_cache, std::vector<StepLayer>& layers) {
  char* keys = static_cast<char*>(key_cache.mutable_data_ptr());
  char* values = static_cast<char*>(value_cache.mutable_data_ptr());
  const auto element = static_cast<int64_t>(key_cache.element_size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    layers[i].keys = keys + layer * key_cache.stride(0) * element;
    layers[i].values = values + layer * value_cache.stride(0) * element;
  }
}

void bind_cache_scales(const CacheScales& scales, int64_t key_stride, int64_t value_stride,
                       std::vector<StepLayer>& layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].key_scale = scales.key + static_cast<int64_t>(i) * key_stride;
    layers[i].value_scale = scales.value + static_cast<int64_t>(i) * value_stride;
  }
}

}  // namespace

Tensor decode_step(const Tensor& x_in, std::vector<Tensor> weights, const Tensor& scales,
                   const Tensor& gains, const Tensor& head_weight, std::optional<Tensor> head_scale,
                   Tensor key_cache, Tensor value_cache, const Tensor& start_positions,
                   ScalarType dtype, int64_t heads, int64_t inner, int64_t vocab, bool sub_norms,
                   std::string activation, double eps, double rope_theta, double scale,
                   int64_t logits_to_keep, std::optional<Tensor> key_scale,
                   std::optional<Tensor> value_scale) {
  const Check check("decode_step");
  const Sizes sizes = check_sizes(check, x_in, key_cache, value_cache, weights);
  StepModel m = model_of(check, sizes, activation);
  m.heads = heads;
  m.intermediate = inner;
  m.type = dtype == ScalarType::BFloat16 ? DType::kBF16 : DType::kF32;
  m.cache_type = cache_type_of(key_cache);
  const CacheScales cache_scales =
      check_cache_scales(check, key_cache, value_cache, key_scale, value_scale, true);
  m.eps = static_cast<float>(eps);
  m.rope_theta = rope_theta;
  m.attention_scale = static_cast<float>(scale);
  check_numbers(check, m, scale, rope_theta, dtype);
  if (logits_to_keep < 0)
    check.fail("logits_to_keep", "at least 0", std::to_string(logits_to_keep));
  m.kept = logits_to_keep == 0 ? m.per_sequence : std::min(logits_to_keep, m.per_sequence);
  thread_local engine::StepState state;
  check_positions(check, start_positions, sizes.batch, sizes.capacity, sizes.per_sequence,
                  state.starts);
  m.starts = state.starts.data();
  check_vocab(check, head_weight, vocab);
  m.head = head_view(Check("decode_step", "head_"), head_weight, head_scale, m.hidden, vocab);

  bind_weights(check, m, weights, state.layers);
  bind_gains(check, m, scales, gains, sub_norms, state.layers);
  const Tensor x = as_contiguous(x_in);
  const Mutated mutated(key_cache, value_cache, key_scale, value_scale);
  mutated.keep_apart(check, x, "x");
  mutated.keep_apart(check, scales, "scales");
  mutated.keep_apart(check, gains, "gains");
  mutated.keep_apart(check, head_weight, "head_weight");
  if (head_scale.has_value()) mutated.keep_apart(check, *head_scale, "head_scale");
  mutated.keep_apart(check, start_positions, "start_positions");
  keep_weights_apart(check, mutated, state.layers);
  Tensor logits = empty({sizes.batch, m.kept, m.head.rows}, ScalarType::Float);
  if (m.tokens == 0) return logits;
  bind_caches(key_cache, value_cache, state.layers);
  if (m.cache_type == DType::kInt8) {
    bind_cache_scales(cache_scales, key_scale->stride(0), value_scale->stride(0), state.layers);
  }
  m.layers = state.layers.data();
  engine::run_step(state, m, data<float>(x), mutable_data<float>(logits));
  return logits;
}

}  // namespace bitnet::ops
