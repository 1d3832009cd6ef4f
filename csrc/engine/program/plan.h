// One step of a program as a plan of stages (runtime/staged_executor.h): what the blocks append to,
// the memory that their stages share, and the run.
//
// A stage is data: a name, how many units it has, how they are claimed, and the work of one. A
// stage may read what an earlier one has written, because the executor ends one before it begins
// the next. The order of operations and every rounding are those of the single ops, so results are
// equal bit for bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/attention.h"
#include "engine/program/program.h"
#include "engine/sample.h"
#include "runtime/staged_executor.h"

namespace bitnet::engine {

// The pool of every attention block: that of the first, and how far the others lie apart.
struct LayeredPool {
  CachePool first;
  int64_t key_bytes = 0, value_bytes = 0, key_scale_bytes = 0, value_scale_bytes = 0,
          bound_bytes = 0;

  CachePool of(int64_t layer) const;
};

// What a step is given: new tokens of any sequences, one sequence's behind the other's.
struct Batch {
  int64_t tokens = 0;
  const float* x = nullptr;  // [tokens, hidden], embedded
  Positions positions;
  const int64_t* slots = nullptr;       // [tokens], where their keys and values go
  const int64_t* logit_rows = nullptr;  // [logit_count], at most `tokens`, in any order
  int64_t logit_count = 0;
  Sequences sequences;
  const int64_t* adapters = nullptr;  // [tokens], -1: none; null: no token has one
  LayeredPool pool;
  const KeptMemory* kept = nullptr;        // of each of Program::kept()
  const StateStep* state_steps = nullptr;  // of each sequence
  float* out = nullptr;                    // [logit_count, Program::out_features()]
  // How many of a row's largest logits are wanted, lower ids first among equals: others may be
  // -infinity. 0: all are.
  int64_t largest = 0;
  // [logit_count], null: none. Of a row with noise only the logit that wins with it is wanted then.
  const Noise* noise = nullptr;

  Noise noise_of(int64_t j) const { return noise == nullptr ? Noise{} : noise[j]; }
};

// Normalised and quantised tokens, of one thread or of all.
struct StageInput {
  static constexpr int64_t kMax = 3;  // different inputs of a stage

  float* row;  // [Needs::row]
  // Room for tokens of the longest row; each stage sets how many there are and their k.
  QuantizedTokens x[kMax];
  float* side_rows[kMax];  // of tokens with an adapter, by place: what has been quantised
  float* attention;        // [AttentionPlans::thread_floats()], a thread's own
};

// What all stages of a step share. Every row of the residual stream is written by one unit of one
// stage.
struct Step {
  const Program* program = nullptr;
  const KernelTable* kernels = nullptr;
  Batch batch;
  int64_t partitions = 1;
  // Whether tokens are normalised and quantised in stages of their own, into `shared`. Normalising
  // every token on every thread costs tokens * (partitions - 1) rows of work too many, about 0.2 us
  // each; a stage of its own costs a barrier and a trip of the codes between caches.
  bool splits_norms = false;
  std::vector<int64_t> filled_pages;  // whose bounds are to be made, where a block chooses pages
  AttentionPlans attention;           // one for each of Program::attention_kinds()
  // Tokens with an adapter: of all, and of those whose logits are wanted.
  AdapterGroups adapters, logit_adapters;
  int64_t max_rank = 0;  // of the adapters of the step
  float* x = nullptr;    // [tokens, hidden], the residual stream
  // [logit_count, hidden]: the same behind the last block that mixes tokens; x itself where every
  // token's logits are wanted.
  float* logit_x = nullptr;
  float* cos_sin = nullptr;  // [ropes, tokens, dim of each]
  PartSums parts;            // of the stage that runs
  float* attention_shared = nullptr;
  StageInput shared;
  StageInput* thread_inputs = nullptr;  // [partitions]

  const Settings& settings() const { return program->settings(); }
  bool wants_all_logits() const { return logit_x == x; }
  // A token's row of x from the batch, and its angles.
  void fill_token(int64_t token) const;
  // Row j of `logit_x` from x.
  void copy_logit_row(int64_t j) const;
  // Angles of a token for one of the program's ropes: cosines, then sines.
  float* angles(int64_t rope, int64_t token) const;
};

// The tokens that a stage computes.
struct StepRows {
  int64_t count;
  float* residual;  // [count, hidden]
  const AdapterGroups* adapters;
  bool are_logit_rows;  // those whose logits are wanted; row j is then token logit_rows[j]
};

// The work of a stage, called by several threads at once: nothing here throws or allocates.
// slot: the thread's first partition. Objects live in the plan's memory and are never destroyed.
class StageWork {
 public:
  virtual void prepare(int64_t /*slot*/) const {}  // once a thread, before its first unit
  virtual void run(int64_t begin, int64_t end, int64_t slot) const = 0;
  // The weights that a unit reads, to be asked for ahead; null where there are none.
  virtual const void* weights_of(int64_t /*unit*/) const { return nullptr; }
  // Of a stage whose units depend on the lengths of sequences.
  virtual int64_t units() const { return 0; }

 protected:
  ~StageWork() = default;
};

struct Stage {
  const char* name;
  const StageWork* work;
  int64_t units;
  ClaimRule claim;
  bool has_weights = false;   // weights_of answers
  bool varies = false;        // units are asked of `work` at every step
  int64_t next_weights = -1;  // the next stage with weights
};

// The stages of a step, and the memory of their work. The plan of the executor.
class Plan {
 public:
  int64_t stages() const { return static_cast<int64_t>(stages_.size()); }
  int64_t units(int64_t stage) const { return at(stage).units; }
  ClaimRule claim(int64_t stage) const { return at(stage).claim; }
  void prepare(int64_t stage, int64_t slot) const { at(stage).work->prepare(slot); }
  void run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const {
    at(stage).work->run(begin, end, slot);
  }
  // The thread's first bytes of the next matrix: they travel while it waits for the others.
  void prefetch_next(int64_t stage, int64_t slot) const;
  const char* name(int64_t stage) const { return at(stage).name; }

  void clear();
  void add(const Stage& stage) { stages_.push_back(stage); }
  void finish(int64_t partitions);
  void update_units();
  // Aligned for every type, at most kPiece.
  void* allocate(size_t bytes);
  static constexpr size_t kPiece = size_t{1} << 14;

 private:
  const Stage& at(int64_t stage) const { return stages_[static_cast<size_t>(stage)]; }

  std::vector<Stage> stages_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;  // pieces of kPiece
  size_t piece_ = 0, used_ = 0;
  int64_t partitions_ = 1;
};

// What a block appends its stages to.
class PlanBuilder {
 public:
  // lasting, scratch: memory for the stages of all blocks, and of one block at a time; null: what
  // they need is counted. states: StepState::blocks.
  PlanBuilder(Step& step, Plan& plan, const std::vector<std::unique_ptr<BlockState>>& states,
              char* lasting, char* scratch);

  Step& step() const { return step_; }
  const KernelTable& kernels() const { return *step_.kernels; }
  const Settings& settings() const { return step_.settings(); }
  const StepRows& rows() const { return rows_; }
  // Memory of this block's stages.
  template <class T>
  T* scratch(int64_t count) {
    T* piece = scratch_.take<T>(count);
    scratch_bytes_ = std::max(scratch_bytes_, scratch_.used());
    return piece;
  }
  // Memory that is this block's for as long as the plan stays: other blocks do not write to it.
  template <class T>
  T* lasting(int64_t count) {
    return lasting_.take<T>(count);
  }
  // What this block's make_state has made.
  template <class T>
  T* state() const {
    return static_cast<T*>(states_[static_cast<size_t>(block_)].get());
  }
  // Scratch for values of Settings::type.
  void* activations(int64_t count) { return scratch<char>(count * element_size(settings().type)); }
  // Whether only rows whose logits are wanted go on behind this block's mixing of tokens.
  bool selects_logit_rows() const { return block_ == step_.program->last_mixer(); }
  void select_logit_rows();

  template <class Work, class... Args>
  const Work* make(Args&&... args) {
    static_assert(std::is_trivially_destructible_v<Work> &&
                  alignof(Work) <= alignof(std::max_align_t) && sizeof(Work) <= Plan::kPiece);
    return new (plan_.allocate(sizeof(Work))) Work(std::forward<Args>(args)...);
  }
  // A stage without units is left out.
  void add(const Stage& stage) {
    if (stage.units != 0 || stage.varies) plan_.add(stage);
  }
  // Memory for the sums of products that are cut along K.
  void need_parts(const ProductPlan& cut) {
    sums_ = std::max(sums_, cut.sums);
    cells_ = std::max(cells_, cut.cells);
  }
  // Whether x and the angles of all tokens are still to be filled; asked once, by who fills them.
  bool take_filling() { return std::exchange(fills_, false); }

  void append_blocks();
  int64_t lasting_bytes() const { return lasting_.used(); }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  int64_t sums() const { return sums_; }
  int64_t cells() const { return cells_; }
  bool unfilled() const { return fills_; }

 private:
  Step& step_;
  Plan& plan_;
  const std::vector<std::unique_ptr<BlockState>>& states_;
  char* memory_;
  BumpAllocator lasting_, scratch_;
  StepRows rows_;
  int64_t block_ = 0, scratch_bytes_ = 0, sums_ = 0, cells_ = 0;
  bool fills_ = true;
};

// What decides a plan of tokens without adapters, but for the lengths of sequences.
struct PlanKey {
  int64_t program = 0, tokens = 0, logit_count = 0, partitions = 0;
  bool all_rows = false;
  bool operator==(const PlanKey&) const = default;
};

// What a thread keeps between its steps: a step of the same program and size builds and allocates
// nothing anew.
struct StepState {
  Step step;
  Plan plan;
  StagedExecutor executor;
  Workspace memory, attention_memory;
  std::vector<int64_t> logit_adapters;
  PlanKey key;              // of the plan, if it can be used again
  bool keeps_plan = false;  // whether it can
  bool unfilled = false;    // whether no stage of the plan fills x
  // Of each block of a program, null: none; with the program's id, 0: of no program.
  std::vector<std::unique_ptr<BlockState>> blocks;
  int64_t blocks_of = 0;
  int64_t cells = 0;  // of Step::parts
  int64_t built = 0;  // plans so far
};

// What the stages of a step cost: for benchmarks.
struct StageTimes {
  std::vector<const char*> names;
  std::vector<double> seconds;
  std::vector<double> prepare_seconds;  // of these, what every thread does for itself
  std::vector<int64_t> units;
  std::vector<ClaimRule> claims;
};

// program_id: a number that no other program has had.
void run_step(StepState& state, const Program& program, int64_t program_id, const Batch& batch);
// The same, the work of `partitions` threads done by this one alone, with a clock beside it.
void run_step_timed(StepState& state, const Program& program, int64_t program_id,
                    const Batch& batch, int64_t partitions, StageTimes& times);

}  // namespace bitnet::engine
