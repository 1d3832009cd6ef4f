// What the whole-model ops, decode_step and model_step, are given beside tokens and caches:
// checked, and bound to a StepModel.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/model_step.h"
#include "ops/cache_checks.h"
#include "ops/paged_batch.h"
#include "ops/register.h"

namespace bitnet::ops {

// A struct's fields from the arguments that torch passes, one after the other.
class Arguments {
 public:
  explicit Arguments(const StableIValue* next) : next_(next) {}
  template <class T>
  T take() {
    return Argument<T>::take(*next_++);
  }

 private:
  const StableIValue* next_;
};

struct StepTensors {
  std::vector<Tensor> weights;
  Tensor scales, norm_weights, head_weight;
  std::optional<Tensor> head_scale;
  ScalarType dtype;
  int64_t num_heads, intermediate_size, vocab_size;
  bool sub_norms;
  std::string activation;
  double eps;
  Tensor inv_freq;
  double attention_factor, scale;
  // What a plain model does without.
  std::optional<Tensor> biases;
  std::vector<int64_t> biased, scale_sizes;
  bool qk_norms;
  std::optional<double> sub_norm_eps, linear_norm_eps;
  std::optional<std::vector<Tensor>> lora_weights;
  std::optional<Tensor> lora_ranks, lora_scalings, lora_indices;
  std::vector<int64_t> grouped;
  std::string activation_format;
  std::optional<Tensor> dropped_neurons;
  bool post_norms;
  std::optional<Tensor> local_inv_freq;
  std::vector<int64_t> local_layers;
  std::vector<int64_t> windows;

  // In the order of the schemas: weights to head_scale, dtype to scale, and biases to local_layers.
  void take_weights(Arguments& a);
  void take_numbers(Arguments& a);
  void take_extras(Arguments& a);
  void take_windows(Arguments& a) { windows = a.take<std::vector<int64_t>>(); }  // the last one
};

// Which tokens a step computes and where their keys and values go.
struct StepTokens {
  std::vector<int64_t> positions, slots, logit_rows;
  std::vector<int64_t> adapters;  // of each token, -1: none
  std::vector<int64_t> dropped;   // [layers, StepModel::dropped], neurons
  PagedBatch sequences;
};

// Caches with the dimension of layers, and which dimension is which.
struct StepCaches {
  const Tensor &keys, &values;
  const std::optional<Tensor>&key_scale, &value_scale;
  CacheDims dims;
  CacheLayout layout = CacheLayout::kRows;
};

class StepBinding {
 public:
  // op: its name; cache: the argument that messages name for the sizes of a cache.
  StepBinding(const char* op, const char* cache, const StepTensors& tensors)
      : check_(op), op_(op), cache_(cache), tensors_(tensors) {}

  // Checks everything against m.hidden, n_layers, kv_heads and dim, and fills in the rest of `m`
  // but for tokens and caches. The layers, without their pools, lie in `layers`.
  void bind(engine::StepModel& m, std::vector<engine::StepLayer>& layers) const;
  // Behind `bind`: the dropped neurons, copied to `places`, the layers of the local rope, and the
  // layers' windows.
  void bind_places(engine::StepModel& m, std::vector<engine::StepLayer>& layers,
                   std::vector<int64_t>& places) const;
  // Behind `bind` and the tokens' sequences: the adapters, whose side paths lie in `paths`.
  void bind_adapters(engine::StepModel& m, std::vector<engine::SidePath>& paths,
                     StepTokens& tokens) const;
  // What the step reads must not lie in what it writes.
  void keep_apart(const Mutated& mutated, const std::vector<engine::StepLayer>& layers) const;
  // The step of a bound `m` over its tokens and caches, whose layers are those of `state`.
  static void run(engine::StepState& state, engine::StepModel& m, const StepTokens& tokens,
                  const StepCaches& caches, const Tensor& x, Tensor& logits);

 private:
  void check_most(const char* argument, const char* what, int64_t got, int64_t most) const;
  void check_numbers(engine::StepModel& m) const;
  void check_vocab() const;
  void bind_weights(const engine::StepModel& m, std::vector<engine::StepLayer>& layers) const;
  void bind_scales(engine::StepModel& m, std::vector<engine::StepLayer>& layers) const;
  int64_t scales_of(engine::StepModel& m, const std::vector<engine::StepLayer>& layers,
                    int which) const;
  void bind_biases(const engine::StepModel& m, std::vector<engine::StepLayer>& layers) const;
  void bind_norms(engine::StepModel& m, std::vector<engine::StepLayer>& layers) const;
  void bind_side_paths(const engine::StepModel& m, int64_t adapter, const int64_t* ranks,
                       const float* scalings, std::vector<engine::SidePath>& paths) const;

  Check check_;
  const char* op_;
  const char* cache_;
  const StepTensors& tensors_;
};

}  // namespace bitnet::ops
