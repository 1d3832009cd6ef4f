// decode_step: checks of its many tensors, and their binding to a StepModel; engine/model_step.h
// does the rest.
#include <algorithm>
#include <cmath>

#include "engine/model_step.h"
#include "format/layout.h"
#include "ops/cache_checks.h"
#include "ops/head_view.h"
#include "ops/register.h"
#include "ops/weight_view.h"

namespace bitnet::ops {
namespace {

// The arguments of decode_step in the order of its schema.
struct DecodeStep {
  Tensor x;
  std::vector<Tensor> weights;
  Tensor scales, norm_weights, head_weight;
  std::optional<Tensor> head_scale;
  Tensor key_cache, value_cache, start_positions;
  ScalarType dtype;
  int64_t num_heads, intermediate_size, vocab_size;
  bool sub_norms;
  std::string activation;
  double eps, rope_theta, scale;
  int64_t logits_to_keep;
  std::optional<Tensor> key_scale, value_scale;
};

using engine::kLayerWeights;
using engine::StepLayer;
using engine::StepModel;
using engine::Weight;

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

// Sizes of the tensors into `m`; returns the number of sequences.
int64_t check_sizes(const Check& check, const DecodeStep& a, StepModel& m) {
  check.dtype(a.x, "x", ScalarType::Float);
  check.dim(a.x, "x", 3);
  check_caches(check, a.key_cache, a.value_cache);
  const int64_t batch = a.x.size(0);
  m.per_sequence = a.x.size(1);
  m.tokens = batch * m.per_sequence;
  m.hidden = a.x.size(2);
  m.n_layers = a.key_cache.size(0);
  m.kv_heads = a.key_cache.size(2);
  m.capacity = a.key_cache.size(3);
  m.dim = a.key_cache.size(4);
  m.cache_type = cache_type_of(a.key_cache);
  if (m.hidden < 1) check.fail("x", "with at least one feature in the last dimension", "0");
  if (a.key_cache.size(1) != batch)
    check.fail("key_cache", "with the " + std::to_string(batch) + " sequences of x",
               std::to_string(a.key_cache.size(1)));
  if (!(m.dim >= 2 && m.dim % 2 == 0))
    check.fail("key_cache", "with an even head dimension", std::to_string(m.dim));
  const auto given = static_cast<int64_t>(a.weights.size());
  if (given % kLayerWeights != 0 || given / kLayerWeights != m.n_layers)
    check.fail("weights",
               "to be q, k, v, o, gate, up and down of each of the cache's " +
                   std::to_string(m.n_layers) + " layers",
               std::to_string(given) + " tensors");
  return batch;
}

void check_most(const Check& check, const char* argument, const char* what, int64_t got,
                int64_t most) {
  if (got > most)
    check.fail(argument, "with at most " + std::to_string(most) + " " + what, std::to_string(got));
}

void check_numbers(const Check& check, const DecodeStep& a, StepModel& m) {
  m.activation = activation_row(check, a.activation);
  m.type = a.dtype == ScalarType::BFloat16 ? DType::kBF16 : DType::kF32;
  if (a.dtype != ScalarType::Float && a.dtype != ScalarType::BFloat16)
    check.fail("dtype", "float32 or bfloat16", dtype_name(a.dtype));
  m.heads = a.num_heads;
  if (!(m.heads >= 1 && m.kv_heads >= 1 && m.heads % m.kv_heads == 0))
    check.fail("num_heads", "a multiple of the cache's " + std::to_string(m.kv_heads) + " heads",
               std::to_string(m.heads));
  m.intermediate = a.intermediate_size;
  if (m.intermediate < 1)
    check.fail("intermediate_size", "positive", std::to_string(m.intermediate));
  // Before any of these is multiplied: a product that has overflowed would pass for a small one.
  check_most(check, "x", "features in the last dimension", m.hidden, kMaxInFeatures);
  check_most(check, "key_cache", "features of a head", m.dim, kMaxInFeatures);
  check_most(check, "num_heads", "heads of that size", m.heads, kMaxInFeatures / m.dim);
  check_most(check, "intermediate_size", "features", m.intermediate, kMaxInFeatures);
  m.eps = static_cast<float>(a.eps);
  if (!(m.eps >= 0.0f && std::isfinite(m.eps)))
    check.fail("eps", "finite and not negative", std::to_string(m.eps));
  m.rope_theta = a.rope_theta;
  if (!(m.rope_theta > 0.0 && std::isfinite(m.rope_theta)))
    check.fail("rope_theta", "finite and positive", std::to_string(m.rope_theta));
  m.attention_scale = static_cast<float>(a.scale);
  if (!std::isfinite(a.scale)) check.fail("scale", "finite", std::to_string(a.scale));
  if (a.logits_to_keep < 0)
    check.fail("logits_to_keep", "at least 0", std::to_string(a.logits_to_keep));
  m.kept = a.logits_to_keep == 0 ? m.per_sequence : std::min(a.logits_to_keep, m.per_sequence);
}

void check_vocab(const Check& check, const Tensor& head_weight, int64_t vocab) {
  if (!head_weight.defined() || head_weight.dim() < 1) return;  // head_view has words for that
  const bool tiles = head_weight.dim() == 3;
  const int64_t rows = head_weight.size(0);
  const int64_t padded = tiles ? rows * layout::kHeadTileRows : rows;
  if (vocab > padded || vocab <= padded - (tiles ? layout::kHeadTileRows : 1))
    check.fail("vocab_size",
               "to be the " + std::to_string(rows) +
                   (tiles ? " tiles of 16 rows of head_weight" : " rows of head_weight"),
               std::to_string(vocab));
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

// What the step reads must not lie in what it writes. x: as it is read.
void keep_apart(const Check& check, const DecodeStep& a, const Tensor& x,
                const std::vector<StepLayer>& layers) {
  const Mutated mutated(a.key_cache, a.value_cache, a.key_scale, a.value_scale);
  mutated.keep_apart(check, x, "x");
  mutated.keep_apart(check, a.scales, "scales");
  mutated.keep_apart(check, a.norm_weights, "norm_weights");
  mutated.keep_apart(check, a.head_weight, "head_weight");
  if (a.head_scale.has_value()) mutated.keep_apart(check, *a.head_scale, "head_scale");
  mutated.keep_apart(check, a.start_positions, "start_positions");
  for (const StepLayer& layer : layers) {
    for (int i = 0; i < kLayerWeights; ++i) {
      mutated.keep_apart(check, layer.weights[i].data, layer.weights[i].bytes(), kNames[i]);
    }
  }
}

// The small parameters: scales [layers, 7]; norm weights in one row, in the order of their use.
void bind_norms(const Check& check, StepModel& m, const DecodeStep& a,
                std::vector<StepLayer>& layers) {
  check.dtype(a.scales, "scales", ScalarType::Float);
  check.shape(a.scales, "scales", {m.n_layers, kLayerWeights});
  check.contiguous(a.scales, "scales");
  const int64_t sub = a.sub_norms ? m.query() + m.intermediate : 0;
  check.dtype(a.norm_weights, "norm_weights", ScalarType::Float);
  check.shape(a.norm_weights, "norm_weights", {m.n_layers * (2 * m.hidden + sub) + m.hidden});
  check.contiguous(a.norm_weights, "norm_weights");
  const auto* scale = data<float>(a.scales);
  const auto* norm = data<float>(a.norm_weights);
  const auto next = [&norm](int64_t n) { return (norm += n) - n; };
  for (StepLayer& layer : layers) {
    layer.scales = scale;
    scale += kLayerWeights;
    layer.attention_norm = next(m.hidden);
    layer.out_norm = a.sub_norms ? next(m.query()) : nullptr;
    layer.mlp_norm = next(m.hidden);
    layer.down_norm = a.sub_norms ? next(m.intermediate) : nullptr;
  }
  m.final_norm = norm;
}

void bind_caches(DecodeStep& a, const CacheScales& scales, std::vector<StepLayer>& layers) {
  char* keys = mutable_data<char>(a.key_cache);
  char* values = mutable_data<char>(a.value_cache);
  const auto element = static_cast<int64_t>(a.key_cache.element_size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    layers[i].keys = keys + layer * a.key_cache.stride(0) * element;
    layers[i].values = values + layer * a.value_cache.stride(0) * element;
    if (scales.key == nullptr) continue;  // caches that are not int8
    layers[i].key_scale = scales.key + layer * a.key_scale->stride(0);
    layers[i].value_scale = scales.value + layer * a.value_scale->stride(0);
  }
}

}  // namespace

Tensor decode_step(DecodeStep a) {
  const Check check("decode_step");
  thread_local engine::StepState state;
  StepModel m{};
  m.table = &kernels();
  const int64_t batch = check_sizes(check, a, m);
  const CacheScales cache_scales =
      check_cache_scales(check, a.key_cache, a.value_cache, a.key_scale, a.value_scale, true);
  check_numbers(check, a, m);
  check_positions(check, a.start_positions, batch, m.capacity, m.per_sequence, state.starts);
  m.starts = state.starts.data();
  check_vocab(check, a.head_weight, a.vocab_size);
  m.head =
      head_view(Check("decode_step", "head_"), a.head_weight, a.head_scale, m.hidden, a.vocab_size);
  bind_weights(check, m, a.weights, state.layers);
  bind_norms(check, m, a, state.layers);
  const Tensor x = as_contiguous(a.x);
  keep_apart(check, a, x, state.layers);
  Tensor logits = empty({batch, m.kept, m.head.rows}, ScalarType::Float);
  if (m.tokens == 0) return logits;
  bind_caches(a, cache_scales, state.layers);
  m.layers = state.layers.data();
  engine::run_step(state, m, data<float>(x), mutable_data<float>(logits));
  return logits;
}

namespace {

// A struct's fields from the arguments that torch passes, one after the other.
class Arguments {
 public:
  explicit Arguments(const StableIValue* next) : next_(next) {}
  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }

 private:
  const StableIValue* next_;
};

void unpack_decode_step(StableIValue* stack, uint64_t, uint64_t) {
  const DefaultFloatState floats;
  Arguments a(stack);
  DecodeStep step{
      .x = a.take<Tensor>(),
      .weights = a.take<std::vector<Tensor>>(),
      .scales = a.take<Tensor>(),
      .norm_weights = a.take<Tensor>(),
      .head_weight = a.take<Tensor>(),
      .head_scale = a.take<std::optional<Tensor>>(),
      .key_cache = a.take<Tensor>(),
      .value_cache = a.take<Tensor>(),
      .start_positions = a.take<Tensor>(),
      .dtype = a.take<ScalarType>(),
      .num_heads = a.take<int64_t>(),
      .intermediate_size = a.take<int64_t>(),
      .vocab_size = a.take<int64_t>(),
      .sub_norms = a.take<bool>(),
      .activation = a.take<std::string>(),
      .eps = a.take<double>(),
      .rope_theta = a.take<double>(),
      .scale = a.take<double>(),
      .logits_to_keep = a.take<int64_t>(),
      .key_scale = a.take<std::optional<Tensor>>(),
      .value_scale = a.take<std::optional<Tensor>>(),
  };
  stack[0] = torch::stable::detail::from(decode_step(std::move(step)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bitnet, CPU, m) { m.impl("decode_step", &unpack_decode_step); }

}  // namespace bitnet::ops
