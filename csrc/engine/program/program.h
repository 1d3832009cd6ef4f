// A model as a program: blocks over named tensors, bound once and run at every step.
//
//   model hidden=2560 dtype=bfloat16 eps=1e-05
//   rope name=global inv_freq=rope.global
//   attention norm=L0.input_norm q=L0.q k=L0.k v=L0.v o=L0.o heads=20 kv_heads=5 head_dim=128 ...
//   mlp norm=L0.post_norm gate=L0.gate up=L0.up down=L0.down width=6912 activation=relu2
//   head norm=final weight=embed vocab=128256
//
// A block is a class in a file of engine/blocks: it reads its keys, states the memory that it needs
// and appends stages to a step's plan (plan.h). Beside blocks a program has the lines `model`
// (first), `rope` and `lora`; docs/reference/program.md lists every key.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/attention_policy.h"
#include "engine/fused.h"
#include "engine/kept.h"
#include "engine/lora.h"
#include "engine/products/product.h"
#include "engine/program/listing.h"
#include "engine/sparsity.h"

namespace bitnet::engine {

struct HeadView;
class PlanBuilder;
class Program;
struct Step;

// Bounds that keep every product of sizes far from overflow.
inline constexpr int64_t kMaxFeatures = int64_t{1} << 22;
inline constexpr int64_t kMaxRows = int64_t{1} << 40;

// The signs of a Hadamard transform of the input of a matrix: KernelTable::hadamard_row. block 0:
// the input stays as it is.
struct Signs {
  const float* data = nullptr;
  int64_t block = 0;

  void hadamard(const KernelTable& kernels, DType type, int64_t n, float* row) const {
    if (block == 0) return;
    kernels.hadamard_row(row, data, n, block, false, row);
    kernels.round_row(type, row, n);
  }
  bool operator==(const Signs&) const = default;
};

// What a program's names stand for: csrc/ops answers with torch's tensors, tests with plain memory.
// Each function checks what it finds and throws an exception that names it; the memory has to stay
// as long as the program is used.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual bool has(const std::string& name) const = 0;
  // NAME.weight and NAME.weight_scale of a ternary matrix rows x k, and NAME.bias if there is one.
  // `scaled` becomes their projection, but for its weight and where its results go.
  virtual Weight linear(const std::string& name, int64_t rows, int64_t k, Projection& scaled) = 0;
  // The signs of the Hadamard transform of NAME's input of k features, NAME.signs float32 [k /
  // block, block]; none where there is no such tensor.
  virtual Signs signs(const std::string& name, int64_t k) = 0;
  // NAME.columns, the matrix NAME as columns (format/layout.h).
  virtual const uint8_t* columns(const std::string& name, int64_t rows, int64_t k) = 0;
  // float32 [rows, n]
  virtual const float* matrix(const std::string& name, int64_t rows, int64_t n) = 0;
  // float32 [n]
  virtual const float* floats(const std::string& name, int64_t n) = 0;
  // NAME.weight and NAME.scale as lm_head takes them: rows x k.
  virtual HeadView head(const std::string& name, int64_t rows, int64_t k) = 0;
  // The factors of a LoRA adapter: a [rank, k], b in tiles of 16 of its `rows` rows.
  virtual LoraWeight factors(const std::string& a, const std::string& b, int64_t rows,
                             int64_t k) = 0;
};

// The line `model`.
struct Settings {
  int64_t hidden;
  DType type;  // what activations are rounded to between operations, kF32 or kBF16
  // Of the norms, of the norms before o and down, and of the norms inside projections.
  float eps, sub_eps, linear_eps;
  Prefetch ahead;  // of float weights in blocks: LoRA's factors and the like
};

// A line `rope`: its frequencies turn heads of `dim` features.
struct NamedRope {
  std::string name;
  int64_t dim;
  Rope rope;
};

// Attention blocks of one kind differ only in their weights. A step has one plan for each kind.
struct AttentionKind {
  int64_t heads;
  float scale;
  AttentionPolicy policy;
  int64_t layers;  // how many blocks are of this kind
};

// A ternary projection with what belongs to it.
struct Linear {
  std::string name;
  int64_t rows, k;
  int64_t copies;  // of the input, side by side: k counts all of them
  Weight weight;
  Projection scaled;                 // without its weight and its output
  const float* norm;                 // [k], of this projection's input alone; null: none
  Signs signs;                       // of this projection's input, applied after the norm
  std::vector<LoraWeight> lora;      // of every adapter; rank 0: none here
  const uint8_t* columns = nullptr;  // null: none
  int64_t max_listed = -1;           // most codes for which they are read; -1: to be measured

  // The projection into `out`; `Linear` stays where it is.
  Projection into(const Output& out) const {
    Projection p = scaled;
    p.weight = &weight;
    p.out = out;
    return p;
  }
};

// Memory that a block's stages need in addition to what they take from a step's plan. Blocks run
// one after the other, so a program needs the maximum over its blocks, not the sum.
struct Needs {
  int64_t row = 0;     // floats of a thread's row
  int64_t input = 0;   // features of the longest input of a product
  int64_t inputs = 1;  // different inputs of one stage
  int64_t planes = 1;  // of int8 codes, a token
  bool group_sums = false, group_scales = false;
};

// The buffers of a block: the first one's place in Program::kept(), and its layer of them.
struct KeptPlace {
  size_t first;
  int64_t layer;
};

// A block's state on one thread, which outlives plans. Made for the first step of the program on
// the thread; the block's stages get it from PlanBuilder::state.
class BlockState {
 public:
  virtual ~BlockState() = default;
  // Before and after the stages of a step, on the thread that runs the step. A step no larger than
  // an earlier one should allocate nothing.
  virtual void begin(const Step& /*step*/) {}
  virtual void end(const Step& /*step*/) {}
};

class Block {
 public:
  virtual ~Block() = default;
  virtual void append(PlanBuilder& plan) const = 0;
  // Null: the block has no state.
  virtual std::unique_ptr<BlockState> make_state() const { return nullptr; }
  // Whether tokens see other tokens in this block. Blocks behind the last such block compute only
  // the tokens whose logits are wanted.
  virtual bool mixes_tokens() const { return false; }
  // Weights of a token's products, and the stages among which they are divided.
  virtual int64_t weights() const { return 0; }
  virtual int64_t product_stages() const { return 0; }
};

// What a block is made from: its keys, the program's settings and the tensors.
class Binding {
 public:
  Binding(Program& program, Keys& keys, TensorSource& source, int64_t adapters,
          std::vector<Linear*>& linears, Needs& needs);

  // The projection that a key names, rows x k; where the line has a key digits, rows x digits * k,
  // and it multiplies as many copies of its input. It must stay where it is.
  void linear(const char* key, int64_t rows, int64_t k, Linear& to);
  // The norm that a key names, over n features; without a weight where the key is left out.
  Norm norm(const char* key, int64_t n, float eps);
  Norm optional_norm(const char* key, int64_t n, float eps);
  // Projections of one input: with scales of groups of one size all, or none. Notes what their
  // input needs.
  ActivationFormat input_of(std::initializer_list<const Linear*> linears);
  // The line's options for zeros in the input of a projection, which may get its columns.
  ActivationSparsity sparsity(Linear& linear);
  // Rejects a setting of the line that nothing in it follows.
  void finish();

  Program& program;
  Keys& keys;
  TensorSource& source;
  const Settings& settings;
  Needs& needs;

 private:
  int64_t adapters_;
  std::vector<Linear*>& linears_;
  bool grouped_ = false;  // whether a projection has scales of groups
};

class Program {
 public:
  // Parses and binds. Throws ProgramError, or what `source` throws.
  Program(std::string_view text, TensorSource& source, const KernelTable& kernels);

  const KernelTable& kernels() const { return *kernels_; }
  const Settings& settings() const { return settings_; }
  const Needs& needs() const { return needs_; }
  const std::vector<NamedRope>& ropes() const { return ropes_; }
  const std::vector<std::unique_ptr<Block>>& blocks() const { return blocks_; }
  int64_t adapters() const { return adapters_; }
  const std::vector<Linear*>& linears() const { return linears_; }
  // Of the attention blocks: how many there are; their KV heads and head size, the same for all.
  int64_t attention_layers() const { return attention_layers_; }
  int64_t kv_heads() const { return kv_heads_; }
  int64_t head_dim() const { return head_dim_; }
  const std::vector<AttentionKind>& attention_kinds() const { return attention_kinds_; }
  // Whether a block of them needs the bounds of pages.
  bool chooses_pages() const;
  // What blocks keep for sequences.
  const std::vector<KeptBuffer>& kept() const { return kept_; }
  // What a row of the result is: logits of the vocabulary, or a state.
  int64_t out_features() const { return out_features_; }
  bool gives_logits() const { return gives_logits_; }
  int64_t last_mixer() const { return last_mixer_; }  // its place among blocks, -1: none

  // For blocks, while they are made.
  int64_t rope_of(Keys& keys, int64_t head_dim) const;
  // The number of the attention block in the caches.
  int64_t add_attention(const Keys& keys, int64_t kv_heads, int64_t head_dim);
  // Where a block finds its buffers. Blocks that use the same names must agree in their form, else
  // the error names `key`.
  KeptPlace keep(const Keys& keys, const char* key, const std::vector<KeptBuffer>& buffers);
  // The number of a kind of attention; a new kind is added.
  int64_t attention_kind(const AttentionKind& kind);
  void set_result(int64_t out_features, bool logits);

 private:
  void read_settings(Keys& keys);
  void read_rope(Keys& keys, TensorSource& source);
  void read_lora(Keys& keys, TensorSource& source);
  void read_block(Keys& keys, TensorSource& source, int64_t adapters);

  const KernelTable* kernels_;
  Settings settings_{};
  Needs needs_;
  std::vector<NamedRope> ropes_;
  std::vector<AttentionKind> attention_kinds_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Linear*> linears_;
  int64_t adapters_ = 0, attention_layers_ = 0, kv_heads_ = 0, head_dim_ = 0, last_mixer_ = -1;
  std::vector<KeptBuffer> kept_;
  int64_t out_features_ = 0;  // 0: no head yet
  bool gives_logits_ = false;
};

}  // namespace bitnet::engine
