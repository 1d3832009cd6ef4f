// One step of a whole model as a plan of stages (runtime/staged_executor.h): which stages there
// are, how many units each has, and what a unit does. The order of operations and every rounding
// are those of the composed ops, so results are equal bit for bit.
#pragma once

#include <vector>

#include "engine/attention.h"
#include "engine/head.h"
#include "engine/product.h"
#include "engine/side_paths.h"

namespace bitnet::engine {

// In the order in which a layer reads them, which is the order of decode_step's list of weights.
enum LayerWeight { kQ, kK, kV, kO, kGate, kUp, kDown, kLayerWeights };

struct StepLayer {
  Weight weights[kLayerWeights];
  const void* scales[kLayerWeights];   // as many as ScaleForm says, float32 but for kGroups
  const float* biases[kLayerWeights];  // [rows], null: none
  const float* attention_norm;         // [hidden]
  const float* q_norm;                 // [dim], of a query head before it is rotated; null: none
  const float* k_norm;                 // [dim], of a key
  const float* out_norm;               // [heads * dim], the sub-norm; null: none
  const float* mlp_norm;               // [hidden]
  const float* out_post_norm;          // [hidden], of what attention adds; null: none
  const float* down_norm;              // [full_width()], the sub-norm; null: none
  const float* down_post_norm;         // [hidden], of what the MLP adds; null: none
  const int64_t* dropped;              // [StepModel::dropped], ascending
  bool local_rope;                     // turned by StepModel::local_rope instead
  int64_t window;                      // AttentionShape::window
  // [k], down's [full_width()], of a projection's own input; null: none
  const float* inner_norms[kLayerWeights];
  CachePool pool;
};

// What a projection's scales are for, the same in every layer.  Of groups they lie as GroupScales
// has them: [rows, groups] beside canonical weights, blocked beside the CPU-specific ones.
enum class ScaleForm { kMatrix, kRows, kGroups };

// What is the same for every layer.
struct StepModel {
  const KernelTable* table;
  int64_t tokens;  // of all sequences together
  Sequences sequences;
  const int64_t* positions;   // [tokens]
  const int64_t* slots;       // [tokens], where their keys and values go
  const int64_t* logit_rows;  // [head_tokens], the tokens whose logits are wanted, in any order
  int64_t head_tokens;
  int64_t hidden, heads, kv_heads, dim, intermediate;
  // Neurons of each layer's MLP that are always zero and have no weights. What norms and side paths
  // before down sum has them in their places, so that sums are the same with and without them.
  int64_t dropped;
  bool whole_down;  // down has columns for these too: its scales of groups count them
  int64_t n_layers;
  const StepLayer* layers;
  const float* final_norm;  // [hidden]
  DType type;               // what activations are rounded to between operations
  GatedRow activation;
  float eps, sub_eps, inner_eps;  // of the norms, the sub-norms, the norms inside projections
  bool inner_norms;               // whether every projection has one
  bool post_norms;                // whether what o and down give is normalised before it is added
  ScaleForm scale_forms[kLayerWeights];
  int64_t group_weights[kLayerWeights];  // of kGroups: 128 or 64, alike where tokens are the same
  DType group_scale_type;                // of the scales of groups, kF32 or kF16
  ActivationFormat activations;          // what projections with scales of groups multiply by
  Rope rope;                             // of dim / 2 frequencies
  Rope local_rope;                       // of some layers; no frequencies: of none
  float attention_scale;
  HeadView head;
  int64_t adapters;               // LoRA, 0: none
  const SidePath* side_paths;     // [n_layers, kLayerWeights, adapters]
  const int64_t* token_adapters;  // [tokens], -1: none; not read where there are no adapters

  int64_t query() const { return heads * dim; }
  int64_t kv() const { return kv_heads * dim; }
  int64_t full_width() const { return intermediate + dropped; }
  int64_t down_width() const { return whole_down ? full_width() : intermediate; }
  // How many different inputs the projections of a stage have.
  int64_t inputs() const { return inner_norms ? kMostInputs : 1; }
  static constexpr int64_t kMostInputs = 3;
};

// Rows and input features of a layer's weight.
struct WeightSize {
  int64_t rows, k;
};
WeightSize weight_size(const StepModel& m, int which);
// Features of what norms and side paths in front of it see: of down all neurons.
int64_t input_width(const StepModel& m, int which);

// Normalised and quantised tokens, of one thread or of all.
struct StepInput {
  float* row;  // [longest row], and once more where projections have norms of their own
  // Of every input of a stage: room for tokens of the longest row, whose number and k each stage
  // sets, and for those with an adapter, by place, what has been quantised.
  QuantizedTokens x[StepModel::kMostInputs];
  float* side_rows[StepModel::kMostInputs];
  HeadInput head;    // what the output head multiplies by
  float* attention;  // [attention.thread_floats()], a thread's own
};

// Memory that all threads share; every row is written by one unit of one stage.
struct StepBuffers {
  const float* input;  // [tokens, hidden], of the caller
  float* x;            // [tokens, hidden], the residual stream
  float* kept;         // [head_tokens, hidden], the same behind the last attention; x itself
                       // where every token's logits are wanted
  float* cos_sin;      // [tokens, dim], and once more of the local rope
  // What projections give is rounded to StepModel::type and lies in it.
  void *q, *k, *v;            // [tokens, query], [tokens, kv] twice
  float *rotated, *attended;  // [tokens, query]
  void *gate, *up;            // [tokens, intermediate], of the tokens that a layer's end computes
  void* projected;            // [tokens, hidden], what o and down give where side paths add to it
                              // or a norm follows
  float* side_inner[3];       // [tokens with an adapter, most_rank], of each projection of a stage
  PartSums parts;             // of the stage that runs
  float* attention;           // [attention.shared_floats()], prepared
  float* logits;              // [head_tokens, vocab]
  StepInput shared;           // what a stage of its own normalises and quantises, for all
  StepInput* own;             // [partitions]
};

// Which tokens of the step go through side paths; empty where none has an adapter.
struct StepSides {
  AdapterGroups all, kept;  // of the step's tokens, and of those whose logits are wanted
  int64_t most_rank = 0;
  std::vector<uint8_t> has;  // [n_layers * kLayerWeights], whether any token has a side path there

  void build(const StepModel& m);

 private:
  std::vector<int64_t> kept_adapters_;
};

// How the products of a step are cut for its partitions.
struct StepCuts {
  // By the first weight of a stage: over all tokens, and over those whose logits are wanted.
  ProductCut of_all[kLayerWeights], of_kept[kLayerWeights];
  int64_t cells = 0, sums = 0;  // of PartSums, the most that a stage needs

  void build(const StepModel& m, int64_t partitions);
};

// A token's row of buffers.x from the input, and its angles.
void fill_token(const StepModel& m, const StepBuffers& buffers, int64_t token);

// Row j of buffers.kept from buffers.x.
void keep_logit_row(const StepModel& m, const StepBuffers& buffers, int64_t j);

class StepPlan {
 public:
  StepPlan(const StepModel& model, const AttentionPlans& attention, const StepSides& sides,
           const StepCuts& cuts, const StepBuffers& buffers, int64_t partitions);

  // The plan of runtime/staged_executor.h.
  int64_t stages() const { return model_.n_layers * kStagesOfLayer + kStagesOfEnd; }
  int64_t units(int64_t stage) const;
  ClaimRule claim(int64_t stage) const;
  void prepare(int64_t stage, int64_t slot) const;
  void run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const;
  void prefetch_next(int64_t stage, int64_t slot) const;

  // What a stage does, in a word.
  const char* name(int64_t stage) const;

  // Whether tokens are normalised and quantised in stages of their own, into buffers.shared.
  static bool splits_norms(int64_t tokens, int64_t partitions) {
    return partitions > 1 && tokens > 2;
  }

 private:
  // Norm...: normalise and quantise, as a stage of its own where that is worth a barrier; otherwise
  // every thread does it for itself when it enters the stage behind, and the stage has no units.
  // The stage of a product computes x A^T of its side paths as well; Expand... the rest of them.
  // Post...: the norm of what a product gave, which is then added; without units where there is
  // none.
  enum Stage {
    kNormQkv,
    kQkv,
    kExpandQkv,
    kRotate,
    kAttend,
    kNormOut,
    kOut,
    kExpandOut,
    kPostOut,
    kNormGateUp,
    kGateUp,
    kExpandGateUp,
    kNormDown,
    kDownStage,
    kExpandDown,
    kPostDown,
    kStagesOfLayer,
    kNormHead = 0,
    kHead,
    kStagesOfEnd
  };
  struct Place {
    const StepLayer* layer;  // null behind the last
    int stage;
  };
  // The weights that a stage multiplies, from `first` on; none where it does something else.
  struct StageWeights {
    int first = 0, count = 0;
  };
  struct Projections {
    int count = 0;
    Projection at[3];
  };

  Place place(int64_t stage) const;
  // The tokens that a stage computes: behind the last attention only those whose logits are wanted
  // go on, in rows of their own.
  bool keeps_logit_rows_only(const Place& at) const;
  int64_t tokens_at(const Place& at) const;
  float* residual(const Place& at) const;
  static bool is_post(const Place& at) {
    return at.layer != nullptr && (at.stage == kPostOut || at.stage == kPostDown);
  }
  // Whether the rows of their own have to be filled in this layer.
  bool copies_logit_rows(const Place& at) const;
  int64_t rotated_heads() const { return model_.tokens * (model_.heads + model_.kv_heads); }
  static StageWeights weights_at(const Place& at);
  static bool expands(const Place& at) {
    return at.stage == kExpandQkv || at.stage == kExpandOut || at.stage == kExpandGateUp ||
           at.stage == kExpandDown;
  }
  // What the projection writes; null: rounded, it is added to the residual stream.
  void* output(const Place& at, int which) const;
  Projections projections(const Place& at) const;
  Projection projection(const Place& at, int which) const;
  // Calls f with each product of the stage over the tokens of `from`: one of all projections, or
  // one of each where they have inputs of their own.
  template <class F>
  void for_each_product(const Place& at, const StepInput& from, F&& f) const;
  // Whether the stage multiplies with scales for every group of input features.
  bool is_grouped(const Place& at) const;
  // The memory of `from` as the tokens of the stage.
  QuantizedTokens tokens_of(const Place& at, int64_t k, const StepInput& from, int input) const;
  void normalise(const Place& at, int64_t j, float* row, const StepInput& to) const;
  // Values [from, from + n) of a buffer of StepModel::type.
  void load(const void* buffer, int64_t from, int64_t n, float* row) const;
  // row [intermediate] = activation(gate) * up of token j, rounded.
  void activate(int64_t j, float* row) const;
  // What the job gives becomes token j of the stage's input i; down's without the dropped neurons.
  void enter(const Place& at, int64_t j, const NormJob& job, int i, const StepInput& to) const;
  const AdapterGroups& groups(const Place& at) const;
  bool has_side(const Place& at, int which) const;
  // Of a stage's weight `which`, its i-th.
  SideProjection side(const Place& at, int which, int i, const StepInput& from) const;
  // Calls f with the side paths of each projection of the stage that has any in this step.
  template <class F>
  void for_each_side(const Place& at, const StepInput& from, F&& f) const;
  int64_t shrink_units_at(const Place& at) const;
  void shrink_at(const Place& at, const StepInput& from, int64_t begin, int64_t end) const;
  int64_t expand_units_at(const Place& at) const;
  void expand_at(const Place& at, int64_t begin, int64_t end) const;
  void add_normed(const Place& at, int64_t j, float* row) const;
  void rotate(const StepLayer& layer, int64_t unit, float* row) const;
  void attend(const StepLayer& layer, int64_t begin, int64_t end, float* own) const;
  void logits(int64_t begin, int64_t end, const StepInput& from) const;

  StepModel model_;
  const AttentionPlans& attention_;
  const StepSides& sides_;
  const StepCuts& cuts_;
  StepBuffers buffers_;
  int64_t partitions_;
  bool split_norms_;
};

// What a thread keeps between its steps, so that a step of the same size allocates nothing.
struct StepState {
  std::vector<StepLayer> layers;
  std::vector<SidePath> side_paths;
  AttentionPlans attention;
  StepSides sides;
  StepCuts cuts;
  Workspace memory;
  StagedExecutor executor;
};

// What the stages of a step cost: for benchmarks.
struct StageTimes {
  std::vector<const char*> names;
  std::vector<double> seconds;
  std::vector<double> prepare_seconds;  // of these, what every thread does for itself
  std::vector<int64_t> units;
  std::vector<ClaimRule> claims;
};

// The whole step: x float32 [tokens, hidden] -> logits float32 [head_tokens, vocab].
void run_step(StepState& state, const StepModel& model, const float* x, float* logits);
// The same, the work of `partitions` threads done by this one alone, with a clock beside it.
void run_step_timed(StepState& state, const StepModel& model, int64_t partitions, const float* x,
                    float* logits, StageTimes& times);

}  // namespace bitnet::engine
