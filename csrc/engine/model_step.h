// One decode step of a whole model as a program of stages for a Team: which stages there are, how
// many units each has, and what a unit does.  Only pointers and row functions of the kernel table:
// nothing here throws, allocates or calls torch.  The order of operations and every rounding are
// those of the composed ops (fused.cpp, attention.cpp), so results are equal bit for bit.
#pragma once

#include "ops/attention_core.h"
#include "ops/head_core.h"
#include "ops/weights.h"

namespace bitnet::ops {

// In the order in which a layer reads them, which is the order of decode_step's list of weights.
enum LayerWeight { kQ, kK, kV, kO, kGate, kUp, kDown, kLayerWeights };

struct StepLayer {
  Weight weights[kLayerWeights];
  const float* scales;          // [kLayerWeights]
  const float* attention_gain;  // [hidden]
  const float* out_gain;        // [heads * dim], the sub-norm; null: none
  const float* mlp_gain;        // [hidden]
  const float* down_gain;       // [inner], the sub-norm; null: none
  void* keys;                   // [batch, kv_heads, capacity, dim]
  void* values;
  float *key_scale, *value_scale;  // [batch, kv_heads, capacity], of an int8 cache
};

// What is the same for every layer.
struct StepModel {
  const KernelTable* table;
  int64_t tokens;        // of all sequences together
  int64_t per_sequence;  // consecutive tokens of one sequence
  int64_t kept;          // the last tokens of each sequence, whose logits are wanted
  int64_t hidden, heads, kv_heads, dim, inner;
  int64_t capacity;  // positions of the cache
  int64_t n_layers;
  const StepLayer* layers;
  const float* final_gain;  // [hidden]
  DType type;               // what activations are rounded to between operations
  DType cache_type;
  bool relu2;
  float eps;
  const int64_t* starts;  // [tokens / per_sequence]
  const AttentionPlan* attention;
  HeadView head;

  int64_t query() const { return heads * dim; }
  int64_t kv() const { return kv_heads * dim; }
  int64_t head_tokens() const { return tokens / per_sequence * kept; }
};

// A thread's own memory.
struct StepSlot {
  float* row;        // [longest row]
  float* values;     // [kChunkRows]
  int32_t* sums;     // [tokens of a block * rows of a chunk]
  float* attention;  // [attention->thread_floats()]
  int8_t* codes;     // quantised tokens, rows of padded_k(longest row)
  int32_t* code_sums;
  float* code_scales;
  HeadInput head;  // what the output head multiplies by
};

// Memory that all threads share; every row is written by one unit of one stage.
struct StepBuffers {
  float* x;                   // [tokens, hidden], the residual stream
  float* cos_sin;             // [tokens, dim]
  float *q, *k, *v;           // [tokens, query], [tokens, kv] twice
  float *rotated, *attended;  // [tokens, query]
  float *gate, *up;           // [tokens, inner], of the tokens that a layer's end computes
  float* attention;           // [attention->shared_floats()], prepared
  float* logits;              // [head_tokens, vocab]
  StepSlot shared;            // what a stage of its own normalises and quantises, for all
  StepSlot* slots;            // [shares]
};

class StepProgram {
 public:
  StepProgram(const StepModel& model, const StepBuffers& buffers, int64_t shares);

  // The Program of runtime/team.h.
  int64_t stages() const { return model_.n_layers * kStagesOfLayer + kStagesOfEnd; }
  int64_t units(int64_t stage) const;
  int64_t max_chunk(int64_t stage) const;
  void prepare(int64_t stage, int64_t slot) const;
  void run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const;
  void look_ahead(int64_t stage, int64_t slot) const;

  // Rows of weights that one chunk multiplies at most, for `tokens` tokens, and how many of these
  // meet them at once: the sums of both stay in L1.
  static int64_t chunk_rows(int64_t tokens);
  static int64_t block_tokens(int64_t tokens);
  static constexpr int64_t kMaxChunkRows = 512;
  // Whether tokens are normalised and quantised in stages of their own, into buffers.shared.
  static bool splits_norms(int64_t tokens, int64_t shares) { return shares > 1 && tokens > 2; }

 private:
  // Norm...: normalise and quantise, as a stage of its own where that is worth a barrier; otherwise
  // every thread does it for itself when it enters the stage behind, and the stage has no units.
  enum Stage {
    kNormQkv,
    kQkv,
    kRotate,
    kAttend,
    kNormOut,
    kOut,
    kNormGateUp,
    kGateUp,
    kNormDown,
    kDownStage,
    kStagesOfLayer,
    kNormHead = 0,
    kHead,
    kStagesOfEnd
  };
  struct Place {
    const StepLayer* layer;  // null behind the last
    int stage;
  };
  struct Product {
    const Weight* weights;
    int count;
    const float* scales;
    float* out[3];  // null: added to the residual stream
  };

  Place place(int64_t stage) const;
  // The tokens that a stage computes, and which of all tokens its j-th one is: behind the last
  // attention only those whose logits are wanted go on.
  bool is_thinned(const Place& at) const;
  int64_t tokens_at(const Place& at) const;
  int64_t token_of(const Place& at, int64_t j) const;
  Product product(const Place& at) const;
  const StepSlot& normed_by(int64_t slot) const {
    return split_norms_ ? buffers_.shared : buffers_.slots[slot];
  }
  void normalise(const Place& at, int64_t j, float* row, const StepSlot& to) const;
  void norm_row(const float* gain, int64_t n, float* row) const;
  void multiply(const Place& at, const Product& p, int64_t begin, int64_t end, int64_t slot) const;
  void store(const Place& at, const Product& p, int which, int64_t first, int64_t rows, int64_t j,
             const int32_t* sums, float x_scale, float* values) const;
  void rotate(const StepLayer& layer, int64_t unit, float* row) const;
  void attend(const StepLayer& layer, int64_t task, float* own) const;
  void logits(int64_t begin, int64_t end, const StepSlot& from) const;

  StepModel model_;
  StepBuffers buffers_;
  int64_t shares_;
  bool split_norms_;
};

}  // namespace bitnet::ops
