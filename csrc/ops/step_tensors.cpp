// The checks of step_tensors.h.
#include "ops/step_tensors.h"

#include <algorithm>
#include <cmath>

#include "format/layout.h"
#include "ops/group_scales.h"
#include "ops/head_view.h"
#include "ops/weight_view.h"

namespace bitnet::ops {

using engine::kDown;
using engine::kGate;
using engine::kK;
using engine::kLayerWeights;
using engine::kO;
using engine::kQ;
using engine::kUp;
using engine::kV;
using engine::ScaleForm;
using engine::SidePath;
using engine::StepLayer;
using engine::StepModel;
using engine::Weight;

namespace {

constexpr int64_t kMaxLoraRank = 1 << 16;  // products with it stay far from overflow
constexpr const char* kNames[] = {"weights (q)",    "weights (k)",  "weights (v)",   "weights (o)",
                                  "weights (gate)", "weights (up)", "weights (down)"};

}  // namespace

void StepTensors::take_weights(Arguments& a) {
  weights = a.take<std::vector<Tensor>>();
  scales = a.take<Tensor>();
  norm_weights = a.take<Tensor>();
  head_weight = a.take<Tensor>();
  head_scale = a.take<std::optional<Tensor>>();
}

void StepTensors::take_numbers(Arguments& a) {
  dtype = a.take<ScalarType>();
  num_heads = a.take<int64_t>();
  intermediate_size = a.take<int64_t>();
  vocab_size = a.take<int64_t>();
  sub_norms = a.take<bool>();
  activation = a.take<std::string>();
  eps = a.take<double>();
  inv_freq = a.take<Tensor>();
  attention_factor = a.take<double>();
  scale = a.take<double>();
}

void StepTensors::take_extras(Arguments& a) {
  biases = a.take<std::optional<Tensor>>();
  biased = a.take<std::vector<int64_t>>();
  scale_sizes = a.take<std::vector<int64_t>>();
  qk_norms = a.take<bool>();
  sub_norm_eps = a.take<std::optional<double>>();
  linear_norm_eps = a.take<std::optional<double>>();
  lora_weights = a.take<std::optional<std::vector<Tensor>>>();
  lora_ranks = a.take<std::optional<Tensor>>();
  lora_scalings = a.take<std::optional<Tensor>>();
  lora_indices = a.take<std::optional<Tensor>>();
  grouped = a.take<std::vector<int64_t>>();
  activation_format = a.take<std::string>();
  dropped_neurons = a.take<std::optional<Tensor>>();
  post_norms = a.take<bool>();
  local_inv_freq = a.take<std::optional<Tensor>>();
  local_layers = a.take<std::vector<int64_t>>();
}

void StepBinding::check_most(const char* argument, const char* what, int64_t got,
                             int64_t most) const {
  if (got > most)
    check_.fail(argument, "with at most " + std::to_string(most) + " " + what, std::to_string(got));
}

void StepBinding::check_numbers(StepModel& m) const {
  const StepTensors& a = tensors_;
  if (m.hidden < 1) check_.fail("x", "with at least one feature in the last dimension", "0");
  if (!(m.dim >= 2 && m.dim % 2 == 0))
    check_.fail(cache_, "with an even head dimension", std::to_string(m.dim));
  const auto given = static_cast<int64_t>(a.weights.size());
  if (given % kLayerWeights != 0 || given / kLayerWeights != m.n_layers)
    check_.fail("weights",
                "to be q, k, v, o, gate, up and down of each of the cache's " +
                    std::to_string(m.n_layers) + " layers",
                std::to_string(given) + " tensors");
  m.activation = activation_row(check_, a.activation);
  m.type = a.dtype == ScalarType::BFloat16 ? DType::kBF16 : DType::kF32;
  if (a.dtype != ScalarType::Float && a.dtype != ScalarType::BFloat16)
    check_.fail("dtype", "float32 or bfloat16", dtype_name(a.dtype));
  m.heads = a.num_heads;
  if (!(m.heads >= 1 && m.kv_heads >= 1 && m.heads % m.kv_heads == 0))
    check_.fail("num_heads", "a multiple of the cache's " + std::to_string(m.kv_heads) + " heads",
                std::to_string(m.heads));
  m.intermediate = a.intermediate_size;
  if (m.intermediate < 1)
    check_.fail("intermediate_size", "positive", std::to_string(m.intermediate));
  // Before any of these is multiplied: a product that has overflowed would pass for a small one.
  check_most("x", "features in the last dimension", m.hidden, kMaxInFeatures);
  check_most(cache_, "features of a head", m.dim, kMaxInFeatures);
  check_most("num_heads", "heads of that size", m.heads, kMaxInFeatures / m.dim);
  check_most("intermediate_size", "features", m.intermediate, kMaxInFeatures);
  m.dropped = 0;
  if (a.dropped_neurons.has_value()) {
    check_.dim(*a.dropped_neurons, "dropped_neurons", 2);
    m.dropped = a.dropped_neurons->size(1);
    check_most("dropped_neurons", "neurons of a layer", m.dropped, kMaxInFeatures - m.intermediate);
  }
  m.whole_down = std::ranges::count(a.grouped, int64_t{kDown}) != 0;
  m.post_norms = a.post_norms;
  m.eps = static_cast<float>(a.eps);
  if (!(m.eps >= 0.0f && std::isfinite(m.eps)))
    check_.fail("eps", "finite and not negative", std::to_string(m.eps));
  m.sub_eps = static_cast<float>(a.sub_norm_eps.value_or(a.eps));
  if (!(m.sub_eps >= 0.0f && std::isfinite(m.sub_eps)))
    check_.fail("sub_norm_eps", "finite and not negative", std::to_string(m.sub_eps));
  m.inner_norms = a.linear_norm_eps.has_value();
  m.inner_eps = static_cast<float>(a.linear_norm_eps.value_or(0.0));
  if (!(m.inner_eps >= 0.0f && std::isfinite(m.inner_eps)))
    check_.fail("linear_norm_eps", "finite and not negative", std::to_string(m.inner_eps));
  check_.dtype(a.inv_freq, "inv_freq", ScalarType::Float);
  check_.shape(a.inv_freq, "inv_freq", {m.dim / 2});
  check_.contiguous(a.inv_freq, "inv_freq");
  m.rope = {data<float>(a.inv_freq), static_cast<float>(a.attention_factor)};
  if (!(a.attention_factor > 0.0 && std::isfinite(a.attention_factor)))
    check_.fail("attention_factor", "finite and positive", std::to_string(a.attention_factor));
  m.local_rope = {nullptr, 1.0f};
  if (a.local_inv_freq.has_value()) {
    check_.dtype(*a.local_inv_freq, "local_inv_freq", ScalarType::Float);
    check_.shape(*a.local_inv_freq, "local_inv_freq", {m.dim / 2});
    check_.contiguous(*a.local_inv_freq, "local_inv_freq");
    m.local_rope.inv_freq = data<float>(*a.local_inv_freq);
  }
  m.attention_scale = static_cast<float>(a.scale);
  if (!std::isfinite(a.scale)) check_.fail("scale", "finite", std::to_string(a.scale));
}

void StepBinding::check_vocab() const {
  const Tensor& head_weight = tensors_.head_weight;
  const int64_t vocab = tensors_.vocab_size;
  if (!head_weight.defined() || head_weight.dim() < 1) return;    // head_view has words for that
  if (is_ternary_head(head_weight, tensors_.head_scale)) return;  // of any layout: head_view knows
  const bool tiles = head_weight.dim() == 3;
  const int64_t rows = head_weight.size(0);
  const int64_t padded = tiles ? rows * layout::kHeadTileRows : rows;
  if (vocab > padded || vocab <= padded - (tiles ? layout::kHeadTileRows : 1))
    check_.fail("vocab_size",
                "to be the " + std::to_string(rows) +
                    (tiles ? " tiles of 16 rows of head_weight" : " rows of head_weight"),
                std::to_string(vocab));
}

void StepBinding::bind_weights(const StepModel& m, std::vector<StepLayer>& layers) const {
  const std::vector<Tensor>& weights = tensors_.weights;
  layers.resize(static_cast<size_t>(m.n_layers));
  for (size_t i = 0; i < weights.size(); ++i) {
    const int which = static_cast<int>(i % kLayerWeights);
    const engine::WeightSize expected = engine::weight_size(m, which);
    Weight& w = layers[i / kLayerWeights].weights[which];
    check_.dtype(weights[i], kNames[which], ScalarType::Byte);  // before a look at its shape
    const bool canonical = weights[i].dim() == 2;
    w = weight_view(check_, weights[i], kNames[which], expected.k,
                    canonical ? std::nullopt : std::optional<int64_t>(expected.rows));
    if (w.n_rows != expected.rows)
      check_.fail(kNames[which], "with " + std::to_string(expected.rows) + " rows",
                  std::to_string(w.n_rows));
  }
}

// How many scales a layer's weight `which` has, and in which form.
int64_t StepBinding::scales_of(StepModel& m, const std::vector<StepLayer>& layers,
                               int which) const {
  const StepTensors& a = tensors_;
  const auto [rows, k] = engine::weight_size(m, which);
  const int64_t size = a.scale_sizes.empty() ? 1 : a.scale_sizes[static_cast<size_t>(which)];
  const bool grouped = std::ranges::count(a.grouped, which) != 0;
  m.scale_forms[which] = grouped     ? ScaleForm::kGroups
                         : size == 1 ? ScaleForm::kMatrix
                                     : ScaleForm::kRows;
  if (!grouped) {
    if (size != 1 && size != rows)
      check_.fail("scale_sizes",
                  "1 or " + std::to_string(rows) + " (one a row) for " + kNames[which] +
                      ", which is not in grouped",
                  std::to_string(size));
    return size;
  }
  int64_t stored_rows = rows;
  for (const StepLayer& layer : layers) {
    const Weight& w = layer.weights[which];
    if (w.format != layers[0].weights[which].format)
      check_.fail(kNames[which], "in one layout in every layer, for it has scales of groups",
                  "another one");
    if (w.format != engine::WeightFormat::kCanonical) stored_rows = w.row_blocks * w.block_rows;
  }
  const int64_t large = stored_rows * engine::groups_for(k, engine::kGroupWeights);
  const int64_t small = stored_rows * engine::groups_for(k, engine::kSmallGroup);
  if (size != large && size != small)
    check_.fail("scale_sizes",
                std::to_string(large) + " (one a row and 128 input features) or " +
                    std::to_string(small) + " (64) for " + kNames[which] + ", which is in grouped",
                std::to_string(size));
  m.group_weights[which] = size == large ? engine::kGroupWeights : engine::kSmallGroup;
  return size;
}

// The scales of a layer's seven projections follow each other, of each as many as scale_sizes says.
void StepBinding::bind_scales(StepModel& m, std::vector<StepLayer>& layers) const {
  const StepTensors& a = tensors_;
  int64_t sizes[kLayerWeights], total = 0, last = -1;
  if (!a.scale_sizes.empty() && a.scale_sizes.size() != kLayerWeights)
    check_.fail("scale_sizes", "empty or 7 numbers",
                std::to_string(a.scale_sizes.size()) + " numbers");
  for (const int64_t which : a.grouped) {
    if (!(which > last && which < kLayerWeights))
      check_.fail("grouped", "ascending places from 0 to 6", std::to_string(which));
    last = which;
  }
  for (int i = 0; i < kLayerWeights; ++i) total += sizes[i] = scales_of(m, layers, i);
  m.activations = ops::activation_format(check_, a.activation_format);
  if (a.grouped.empty() && m.activations != engine::ActivationFormat::kInt8)
    check_.fail("activation_format", "int8 where grouped is empty", a.activation_format);
  // They read the same tokens, whose sums groups need.
  const auto same = [&](int one, int other) {
    if ((m.scale_forms[one] == ScaleForm::kGroups) != (m.scale_forms[other] == ScaleForm::kGroups))
      check_.fail("grouped",
                  std::string("with ") + kNames[one] + " and " + kNames[other] + " or with neither",
                  "one of them");
    if (m.scale_forms[one] == ScaleForm::kGroups && m.group_weights[one] != m.group_weights[other])
      check_.fail("scale_sizes",
                  std::string("of groups of one size for ") + kNames[one] + " and " + kNames[other],
                  std::to_string(m.group_weights[one]) + " and " +
                      std::to_string(m.group_weights[other]) + " weights");
  };
  same(kQ, kK), same(kQ, kV), same(kGate, kUp);
  const bool half = a.scales.defined() && a.scales.scalar_type() == ScalarType::Half;
  if (!half) check_.dtype(a.scales, "scales", ScalarType::Float);
  m.group_scale_type = half ? DType::kF16 : DType::kF32;
  for (int i = 0; half && i < kLayerWeights && !layers.empty(); ++i) {
    if (m.scale_forms[i] != ScaleForm::kGroups ||
        layers[0].weights[i].format == engine::WeightFormat::kCanonical)
      check_.fail("scales",
                  std::string("of dtype float32 unless all are of groups, beside CPU-specific "
                              "layouts, as those of ") +
                      kNames[i] + " are not",
                  "float16");
  }
  check_.shape(a.scales, "scales", {m.n_layers, total});
  check_.contiguous(a.scales, "scales");
  const auto* scale = static_cast<const char*>(a.scales.const_data_ptr());
  for (StepLayer& layer : layers) {
    for (int i = 0; i < kLayerWeights; ++i) {
      layer.scales[i] = scale;
      scale += sizes[i] * element_size(m.group_scale_type);
    }
  }
}

void StepBinding::bind_biases(const StepModel& m, std::vector<StepLayer>& layers) const {
  const StepTensors& a = tensors_;
  for (StepLayer& layer : layers) std::ranges::fill(layer.biases, nullptr);
  const bool given = a.biases.has_value() && a.biases->defined();
  int64_t total = 0, last = -1;
  for (const int64_t which : a.biased) {
    if (!(which > last && which < kLayerWeights))
      check_.fail("biased", "ascending places from 0 to 6", std::to_string(which));
    total += engine::weight_size(m, static_cast<int>(which)).rows;
    last = which;
  }
  if (a.biased.empty() == given)
    check_.fail("biases", given ? "to be left out where biased is empty" : "of dtype float32",
                given ? "a tensor" : "none");
  if (!given) return;
  check_.dtype(*a.biases, "biases", ScalarType::Float);
  check_.shape(*a.biases, "biases", {m.n_layers, total});
  check_.contiguous(*a.biases, "biases");
  const auto* bias = data<float>(*a.biases);
  for (StepLayer& layer : layers) {
    for (const int64_t which : a.biased) {
      layer.biases[which] = bias;
      bias += engine::weight_size(m, static_cast<int>(which)).rows;
    }
  }
}

// All norm weights in one row, in the order of their use.
void StepBinding::bind_norms(StepModel& m, std::vector<StepLayer>& layers) const {
  const StepTensors& a = tensors_;
  const int64_t heads = a.qk_norms ? 2 * m.dim : 0;
  const int64_t sub = a.sub_norms ? m.query() + m.full_width() : 0;
  const int64_t post = a.post_norms ? 2 * m.hidden : 0;
  int64_t inner = 0;
  for (int i = 0; m.inner_norms && i < kLayerWeights; ++i) inner += engine::input_width(m, i);
  check_.dtype(a.norm_weights, "norm_weights", ScalarType::Float);
  check_.shape(a.norm_weights, "norm_weights",
               {m.n_layers * (2 * m.hidden + heads + sub + post + inner) + m.hidden});
  check_.contiguous(a.norm_weights, "norm_weights");
  const auto* norm = data<float>(a.norm_weights);
  const auto next = [&norm](int64_t n) { return (norm += n) - n; };
  for (StepLayer& layer : layers) {
    const auto inside = [&](std::initializer_list<int> projections) {
      for (const int i : projections) {
        layer.inner_norms[i] = m.inner_norms ? next(engine::input_width(m, i)) : nullptr;
      }
    };
    layer.attention_norm = next(m.hidden);
    inside({kQ, kK, kV});
    layer.q_norm = a.qk_norms ? next(m.dim) : nullptr;
    layer.k_norm = a.qk_norms ? next(m.dim) : nullptr;
    layer.out_norm = a.sub_norms ? next(m.query()) : nullptr;
    inside({kO});
    layer.out_post_norm = a.post_norms ? next(m.hidden) : nullptr;
    layer.mlp_norm = next(m.hidden);
    inside({kGate, kUp});
    layer.down_norm = a.sub_norms ? next(m.full_width()) : nullptr;
    inside({kDown});
    layer.down_post_norm = a.post_norms ? next(m.hidden) : nullptr;
  }
  m.final_norm = norm;
}

void StepBinding::bind(StepModel& m, std::vector<StepLayer>& layers) const {
  m.table = &kernels();
  check_numbers(m);
  check_vocab();
  m.head = head_view(Check(op_, "head_"), tensors_.head_weight, tensors_.head_scale, m.hidden,
                     tensors_.vocab_size);
  bind_weights(m, layers);
  bind_scales(m, layers);
  bind_biases(m, layers);
  bind_norms(m, layers);
  m.layers = layers.data();
}

// Copied first, for they become addresses.
void StepBinding::bind_places(StepModel& m, std::vector<StepLayer>& layers,
                              std::vector<int64_t>& places) const {
  const StepTensors& a = tensors_;
  check_windows(check_, a.windows, m.n_layers);
  places.clear();
  if (a.dropped_neurons.has_value()) {
    const Tensor& dropped = *a.dropped_neurons;
    check_.dtype(dropped, "dropped_neurons", ScalarType::Long);
    check_.shape(dropped, "dropped_neurons", {m.n_layers, m.dropped});
    check_.contiguous(dropped, "dropped_neurons");
    const auto* from = data<int64_t>(dropped);
    places.assign(from, from + dropped.numel());
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t* own = places.data() + static_cast<int64_t>(i) * m.dropped;
    for (int64_t j = 0; j < m.dropped; ++j) {
      if (!(own[j] > (j == 0 ? -1 : own[j - 1]) && own[j] < m.full_width()))
        check_.fail("dropped_neurons",
                    "of ascending neurons below " + std::to_string(m.full_width()),
                    std::to_string(own[j]));
    }
    layers[i].dropped = own;
    layers[i].local_rope = false;
    layers[i].window = a.windows.empty() ? 0 : a.windows[i];
  }
  if (a.local_inv_freq.has_value() == a.local_layers.empty())
    check_.fail(
        "local_layers",
        a.local_layers.empty() ? "with local_inv_freq" : "to be empty without local_inv_freq",
        std::to_string(a.local_layers.size()) + " layers");
  for (const int64_t layer : a.local_layers) {
    if (!(layer >= 0 && layer < m.n_layers))
      check_.fail("local_layers", "of layers below " + std::to_string(m.n_layers),
                  std::to_string(layer));
    layers[static_cast<size_t>(layer)].local_rope = true;
  }
}

// lora_weights[adapter]: A and the tiles of B of each projection that it is beside, layer by layer.
void StepBinding::bind_side_paths(const StepModel& m, int64_t adapter, const int64_t* ranks,
                                  const float* scalings, std::vector<SidePath>& paths) const {
  const Tensor& weights = (*tensors_.lora_weights)[static_cast<size_t>(adapter)];
  check_.float_dtype(weights, "lora_weights");
  check_.contiguous(weights, "lora_weights");
  const DType type = dtype_of(weights);
  const int64_t size = element_size(type);
  int64_t taken = 0;
  const auto next = [&](int64_t n) {
    taken += n;
    return offset_bytes(weights.const_data_ptr(), (taken - n) * size);
  };
  for (int64_t i = 0; i < m.n_layers * kLayerWeights; ++i) {
    const int which = static_cast<int>(i % kLayerWeights);
    const int64_t rows = engine::weight_size(m, which).rows, k = engine::input_width(m, which);
    const int64_t rank = ranks[i];
    if (!(rank >= 0 && rank <= kMaxLoraRank))
      check_.fail("lora_ranks", "from 0 to " + std::to_string(kMaxLoraRank), std::to_string(rank));
    const void* a = next(rank * k);
    const void* b = next(engine::side_tiles(rows) * engine::kSideTileRows * rank);
    paths[static_cast<size_t>(i * m.adapters + adapter)] = {type, a, b, rank, scalings[i]};
  }
  check_.shape(weights, "lora_weights", {taken});
}

void StepBinding::bind_adapters(StepModel& m, std::vector<SidePath>& paths,
                                StepTokens& tokens) const {
  const StepTensors& a = tensors_;
  for (const auto& [t, argument] :
       {std::pair{&a.lora_ranks, "lora_ranks"}, std::pair{&a.lora_scalings, "lora_scalings"},
        std::pair{&a.lora_indices, "lora_indices"}}) {
    const bool given = t->has_value() && (*t)->defined();
    if (given != a.lora_weights.has_value())
      check_.fail(argument, given ? "to be left out without lora_weights" : "with lora_weights",
                  given ? "a tensor" : "none");
  }
  m.adapters = a.lora_weights.has_value() ? static_cast<int64_t>(a.lora_weights->size()) : 0;
  if (!a.lora_weights.has_value()) return;
  const Tensor &ranks = *a.lora_ranks, &scalings = *a.lora_scalings, &indices = *a.lora_indices;
  const Shape table = {m.adapters, m.n_layers, kLayerWeights};
  check_.dtype(ranks, "lora_ranks", ScalarType::Long);
  check_.shape(ranks, "lora_ranks", table);
  check_.contiguous(ranks, "lora_ranks");
  check_.dtype(scalings, "lora_scalings", ScalarType::Float);
  check_.shape(scalings, "lora_scalings", table);
  check_.contiguous(scalings, "lora_scalings");
  const int64_t each = m.n_layers * kLayerWeights;
  paths.resize(static_cast<size_t>(each * m.adapters));
  for (int64_t i = 0; i < m.adapters; ++i) {
    bind_side_paths(m, i, data<int64_t>(ranks) + i * each, data<float>(scalings) + i * each, paths);
  }
  const engine::Sequences sequences = tokens.sequences.view();
  std::vector<int64_t> of_sequences;
  copy_indices(check_, indices, "lora_indices", {sequences.count}, of_sequences);
  tokens.adapters.assign(static_cast<size_t>(m.tokens), -1);
  for (int64_t s = 0; s < sequences.count; ++s) {
    const int64_t adapter = of_sequences[static_cast<size_t>(s)];
    if (!(adapter >= -1 && adapter < m.adapters))
      check_.fail("lora_indices", "from -1 (none) to " + std::to_string(m.adapters - 1),
                  std::to_string(adapter));
    for (int64_t t = sequences.query_start[s]; t < sequences.query_start[s + 1]; ++t) {
      tokens.adapters[static_cast<size_t>(t)] = adapter;
    }
  }
  m.side_paths = paths.data();
  m.token_adapters = tokens.adapters.data();
}

void StepBinding::keep_apart(const Mutated& mutated, const std::vector<StepLayer>& layers) const {
  mutated.keep_apart(check_, tensors_.scales, "scales");
  mutated.keep_apart(check_, tensors_.norm_weights, "norm_weights");
  mutated.keep_apart(check_, tensors_.inv_freq, "inv_freq");
  if (tensors_.local_inv_freq.has_value())
    mutated.keep_apart(check_, *tensors_.local_inv_freq, "local_inv_freq");
  if (tensors_.dropped_neurons.has_value())
    mutated.keep_apart(check_, *tensors_.dropped_neurons, "dropped_neurons");
  if (tensors_.biases.has_value()) mutated.keep_apart(check_, *tensors_.biases, "biases");
  if (tensors_.lora_weights.has_value()) {
    for (const Tensor& t : *tensors_.lora_weights) mutated.keep_apart(check_, t, "lora_weights");
  }
  for (const auto& [t, argument] : {std::pair{&tensors_.lora_ranks, "lora_ranks"},
                                    std::pair{&tensors_.lora_scalings, "lora_scalings"},
                                    std::pair{&tensors_.lora_indices, "lora_indices"}}) {
    if (t->has_value()) mutated.keep_apart(check_, **t, argument);
  }
  mutated.keep_apart(check_, tensors_.head_weight, "head_weight");
  if (tensors_.head_scale.has_value())
    mutated.keep_apart(check_, *tensors_.head_scale, "head_scale");
  for (const StepLayer& layer : layers) {
    for (int i = 0; i < kLayerWeights; ++i) {
      mutated.keep_apart(check_, layer.weights[i].data, layer.weights[i].bytes(), kNames[i]);
    }
  }
}

void StepBinding::run(engine::StepState& state, StepModel& m, const StepTokens& tokens,
                      const StepCaches& caches, const Tensor& x, Tensor& logits) {
  m.sequences = tokens.sequences.view();
  m.positions = tokens.positions.data();
  m.slots = tokens.slots.data();
  m.logit_rows = tokens.logit_rows.data();
  m.head_tokens = static_cast<int64_t>(tokens.logit_rows.size());
  for (size_t i = 0; i < state.layers.size(); ++i) {
    state.layers[i].pool =
        pool_view(caches.keys, caches.values, caches.key_scale, caches.value_scale, caches.dims,
                  static_cast<int64_t>(i), caches.layout);
  }
  engine::run_step(state, m, data<float>(x), mutable_data<float>(logits));
}

}  // namespace bitnet::ops
