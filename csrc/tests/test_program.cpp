// Model programs: what the parser and the binding reject, and whole steps on plain threads: the
// same logits and caches, bit for bit, for every number of threads, for prompts, drafts and single
// tokens. Built with BITNET_SANITIZE=thread it shows that the stages hand their memory over.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <vector>

#include "engine/program/plan.h"
#include "format/xxh64.h"
#include "runtime/page_count.h"
#include "tests/check.h"
#include "tests/plain_tensors.h"
#include "tests/system.h"
#include "tests/tables.h"
#include "tests/threads.h"

namespace bitnet::test {
namespace {

using engine::Program;
using engine::ProgramError;
using engine::StepState;

constexpr int64_t kLayers = 2, kVocab = 70, kCapacity = 60;

size_t at(int64_t i) { return static_cast<size_t>(i); }

struct Sizes {
  int64_t hidden = 192, heads = 6, kv_heads = 2, dim = 32, width = 456;
  const char* mlp = "";  // more keys
};
// The shape at which products are cut for many threads, with few rows and many columns.
constexpr Sizes kWide{256, 8, 2, 32, 1056, ""};

// What the blocks of a head that drafts have in common.
constexpr const char* kPairs =
    "embedding_norm=M.e state_norm=M.s fc=M.fc hidden=192 digits=3 activation_format=int8";

// extras: adapters, norms inside and behind projections, two ropes, a window, an output gate, and a
// blocks delta_net and draft_keys, behind which only some rows go on.
std::string program_text(const Sizes& s, bool extras) {
  std::ostringstream text;
  text << "model hidden=" << s.hidden << " dtype=bfloat16 eps=1e-05 linear_norm_eps=1e-06\n"
       << "rope name=global dim=" << s.dim << " inv_freq=rope.global factor=1.25\n"
       << "rope name=local dim=" << s.dim << " inv_freq=rope.local\n";
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string l = "L" + std::to_string(i) + ".";
    const bool local = extras && i == 1;
    const char* rope = local ? "local window=7 sinks=2 output_gate=1" : "global";
    text << "attention norm=" << l << "in q=" << l << "q k=" << l << "k v=" << l << "v o=" << l
         << "o heads=" << s.heads << " kv_heads=" << s.kv_heads << " head_dim=" << s.dim
         << " rope=" << rope << " scale=0.177 sub_norm=" << l << "attn_sub";
    if (extras) text << " post_norm=" << l << "post_o q_norm=" << l << "qn k_norm=" << l << "kn";
    text << "\nmlp norm=" << l << "post gate=" << l << "gate up=" << l << "up down=" << l
         << "down width=" << s.width << " activation=relu2 sub_norm=" << l << "ffn_sub" << s.mlp;
    if (extras) text << " post_norm=" << l << "post_down";
    text << "\n";
  }
  if (extras)
    text
        << "delta_net norm=D.in qkv=D.qkv z=D.z out=D.out a=D.a b=D.b conv=D.conv A_log=D.A_log "
        << "dt_bias=D.dt_bias gated_norm=D.gated key_heads=1 value_heads=3 key_dim=64 value_dim=32 "
        << "kernel=3\n"
        << "draft_keys " << kPairs << " output_norm=final norm=M.in k=M.k v=M.v k_norm=M.kn "
        << "kv_heads=" << s.kv_heads << " head_dim=" << s.dim << " rope=global\n";
  text << "head norm=final weight=embed vocab=" << kVocab << "\n";
  if (!extras) return text.str();
  // Adapters of the ranks 3 and 20 beside some projections.
  int64_t number = 0;
  const auto adapt = [&](const std::string& name) {
    for (const auto& [adapter, rank, has] :
         {std::tuple{0, 3, number % 3 == 0}, std::tuple{1, 20, number % 4 != 1}}) {
      if (has)
        text << "lora adapter=" << adapter << " projection=" << name << " a=" << name << ".a"
             << rank << " b=" << name << ".b" << rank << " scaling=0.0" << 1 + adapter << "\n";
    }
    ++number;
  };
  for (int64_t i = 0; i < kLayers; ++i) {
    for (const char* projection : {"q", "k", "v", "o", "gate", "up", "down"})
      adapt("L" + std::to_string(i) + "." + projection);
  }
  for (const char* projection : {"D.qkv", "D.z", "D.out"}) adapt(projection);
  return text.str();
}

// The program of a head that drafts, over the last layer of such a model's cache.
std::string draft_text(const Sizes& s) {
  std::ostringstream text;
  text << "model hidden=" << s.hidden << " dtype=bfloat16 eps=1e-05\n"
       << "rope name=global dim=" << s.dim << " inv_freq=rope.global factor=1.25\n"
       << "draft_input " << kPairs << "\n"
       << "attention norm=M.in q=M.q k=M.k v=M.v o=M.o heads=" << s.heads
       << " kv_heads=" << s.kv_heads << " head_dim=" << s.dim
       << " rope=global skip=1 digits=3 k_norm=M.kn\n"
       << "mlp norm=M.post gate=M.gate up=M.up down=M.down width=" << s.width
       << " activation=silu digits=3\nhead\n";
  return text.str();
}

void add_inner_norms(PlainTensors& tensors, const Sizes& s) {
  for (int64_t i = 0; i < kLayers; ++i) {
    for (const char* projection : {"q", "k", "v", "o", "gate", "up", "down"}) {
      const std::string kind = projection;
      const int64_t k = kind == "o" ? s.heads * s.dim : kind == "down" ? s.width : s.hidden;
      tensors.add("L" + std::to_string(i) + "." + kind + ".rms_norm.weight", tensors.some(k, 1.0f));
    }
  }
}

// A random model over `kernels`, and a pool with the blocks of its two sequences, of which the
// first has `per_sequence` new tokens and the second one.
struct Model {
  Sizes sizes;
  PlainTensors tensors;
  std::unique_ptr<Program> program;
  engine::Batch batch;
  std::vector<float> keys, values, x;
  std::vector<std::vector<float>> states;
  std::vector<engine::KeptMemory> kept;
  std::vector<engine::StateStep> state_steps;
  std::vector<int64_t> adapters, query_start, lengths, blocks, positions, slots, logit_rows;

  // kept: of how many last tokens of the first sequence the logits are wanted, with those of the
  // second one's.
  Model(const KernelTable& kernels, int64_t per_sequence, int64_t kept, int64_t block_size,
        bool extras, const Sizes& s = {}, const std::string& text = "")
      : sizes(s), tensors(kernels) {
    for (const float base : {10000.0f, 100.0f}) {
      std::vector<float> frequencies;
      for (int64_t i = 0; i < s.dim / 2; ++i) {
        frequencies.push_back(
            std::pow(base, -2.0f * static_cast<float>(i) / static_cast<float>(s.dim)));
      }
      tensors.add(base > 1000.0f ? "rope.global" : "rope.local", frequencies);
    }
    if (extras) {
      add_inner_norms(tensors, s);
      for (const auto& [name, block] :
           {std::pair{"L1.o", 64}, std::pair{"D.out", 32}, std::pair{"embed", 16}})
        tensors.rotate(name, block);
    }
    program =
        std::make_unique<Program>(text.empty() ? program_text(s, extras) : text, tensors, kernels);
    cut(per_sequence, kept, block_size);
    x = PlainTensors(kernels, 21).some(batch.tokens * s.hidden, 0.0f);
    batch.x = x.data();
    if (!extras) return;
    adapters.assign(at(batch.tokens), 1);
    adapters.back() = 0;
    batch.adapters = adapters.data();
  }

  static int64_t max_blocks(int64_t block_size) { return 2 * (kCapacity / block_size + 1); }

  // [blocks, kv_heads, block_size, dim]
  engine::PoolView rows_of(std::vector<float>& memory, int64_t block_size) const {
    const int64_t row = sizes.dim * static_cast<int64_t>(sizeof(float));
    return {reinterpret_cast<char*>(memory.data()), sizes.kv_heads * block_size * row, row,
            block_size * row};
  }

  // The sequences' blocks alternate, from the last one down.
  void cut(int64_t per_sequence, int64_t kept, int64_t block_size) {
    const int64_t starts[2] = {5, 3}, tokens[2] = {per_sequence, 1};
    const int64_t columns = max_blocks(block_size) / 2;
    for (int64_t i = 0; i < 2 * columns; ++i)
      blocks.push_back(2 * columns - 1 - (i % columns * 2 + i / columns));
    query_start.push_back(0);
    for (int64_t s = 0; s < 2; ++s) {
      for (int64_t t = 0; t < tokens[s]; ++t) {
        const int64_t position = starts[s] + t;
        if (s == 1 || t >= per_sequence - kept)
          logit_rows.push_back(static_cast<int64_t>(positions.size()));
        positions.push_back(position);
        slots.push_back(blocks[at(s * columns + position / block_size)] * block_size +
                        position % block_size);
      }
      query_start.push_back(static_cast<int64_t>(positions.size()));
      lengths.push_back(starts[s] + tokens[s]);
    }
    const int64_t layer = max_blocks(block_size) * block_size * sizes.kv_heads * sizes.dim;
    keys.assign(at(program->attention_layers() * layer), 0.25f);
    values.assign(at(program->attention_layers() * layer), 0.5f);
    batch.tokens = per_sequence + 1;
    batch.positions.time = positions.data();
    batch.slots = slots.data();
    batch.logit_rows = logit_rows.data();
    batch.logit_count = static_cast<int64_t>(logit_rows.size());
    batch.sequences = {2, query_start.data(), lengths.data(), blocks.data(), columns};
    batch.pool.first.block_size = block_size;
    batch.pool.first.dim = sizes.dim;
    batch.pool.first.keys = rows_of(keys, block_size);
    batch.pool.first.values = rows_of(values, block_size);
    batch.pool.key_bytes = batch.pool.value_bytes = layer * static_cast<int64_t>(sizeof(float));
  }

  // Noise in every slot. The first sequence follows a draft and, of more tokens than one, ends with
  // two; the second one begins with its state as it is, and its token is a draft.
  void begin_states() {
    constexpr int64_t kSlots = 3, kDrafts = 2;
    PlainTensors random(scalar_kernels(), 33);
    states.clear();
    kept.clear();
    for (const engine::KeptBuffer& buffer : program->kept()) {
      kept.push_back(engine::KeptMemory::of(buffer, kDrafts, nullptr));
      states.push_back(random.some(kSlots * kept.back().slot, 0.0f));
      kept.back().data = states.back().data();
    }
    batch.kept = kept.data();
    state_steps = {{2, 1, batch.tokens > 2 ? 2 : 0}, {0, 0, 1}};
    batch.state_steps = state_steps.data();
  }

  std::vector<float> step(StepState& state, int64_t id) {
    begin_states();
    std::vector<float> logits(at(batch.logit_count * program->out_features()), -1.0f);
    batch.out = logits.data();
    engine::run_step(state, *program, id, batch);
    return logits;
  }
};

int64_t next_id() {
  static int64_t id = 0;
  return ++id;
}

bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size() || a.empty()) return a.size() == b.size();
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

#ifdef __SANITIZE_THREAD__
// Every access costs ten times as much here: prompts as long as all threads have work, and no run
// on one thread.
constexpr int64_t kLongPrompt = 21, kShortPrompt = 18, kMinThreads = 2;
constexpr int64_t kMaxThreads = 12;
#else
constexpr int64_t kLongPrompt = 45, kShortPrompt = 40, kMinThreads = 1;
constexpr int64_t kMaxThreads = 64;
#endif

void same_on_every_number_of_threads(const KernelTable& kernels, int64_t tokens, int64_t kept,
                                     bool extras) {
  StepState state;
  pool_threads = 1;
  Model alone(scalar_kernels(), tokens, kept, kCapacity, extras);
  const std::vector<float> expected = alone.step(state, next_id());
  float largest = 0;
  for (const float v : expected) largest = v > largest ? v : largest;
  CHECK(largest > 0.1f, "the logits say nothing");
  for (const int64_t block_size : {kCapacity, int64_t{16}, int64_t{1}}) {
    for (const int64_t threads : {1, 2, 3, 5}) {
      if (threads < kMinThreads) continue;
      begin_case("%s, %d tokens, blocks of %d, %d threads%s", kernels.name,
                 static_cast<int>(tokens), static_cast<int>(block_size), static_cast<int>(threads),
                 extras ? ", extras" : "");
      pool_threads = threads;
      Model model(kernels, tokens, kept, block_size, extras);
      const int64_t id = next_id();
      CHECK(equal(model.step(state, id), expected), "other logits");
      if (block_size != kCapacity) continue;
      CHECK(equal(model.keys, alone.keys) && equal(model.values, alone.values), "other caches");
      CHECK(std::ranges::equal(model.states, alone.states, equal), "other states");
      // Again by the same plan, which adapters make anew.
      const int64_t built = state.built;
      CHECK(equal(model.step(state, id), expected), "other logits at the second step");
      CHECK((state.built == built) == !extras, "the plan was built %d times",
            static_cast<int>(state.built - built));
    }
  }
  pool_threads = 1;
}

// Of two sequences with one token each.
void drafts_on_every_number_of_threads(const KernelTable& kernels) {
  StepState state;
  pool_threads = 1;
  const std::string text = draft_text({});
  Model alone(scalar_kernels(), 1, 1, kCapacity, false, {}, text);
  const std::vector<float> expected = alone.step(state, next_id());
  CHECK(expected.size() == at(2 * Sizes{}.hidden), "rows of another size");
  for (const int64_t threads : {1, 2, 5}) {
    if (threads < kMinThreads) continue;
    begin_case("%s, drafts, %d threads", kernels.name, static_cast<int>(threads));
    pool_threads = threads;
    Model model(kernels, 1, 1, 16, false, {}, text);
    CHECK(equal(model.step(state, next_id()), expected), "other rows");
  }
  // Position 0 has no pair, and what lies there is not read.
  pool_threads = 1;
  Model other(kernels, 1, 1, kCapacity, false, {}, text);
  const int64_t heads = other.sizes.kv_heads, row = heads * kCapacity * other.sizes.dim;
  for (int64_t s = 0; s < 2; ++s) {
    const int64_t block = other.blocks[at(s * other.batch.sequences.table_stride)];
    for (int64_t h = 0; h < heads; ++h)
      other.keys[at(block * row + h * kCapacity * other.sizes.dim)] = NAN;
  }
  CHECK(equal(other.step(state, next_id()), expected), "a pair at position 0 was read");
}

// More threads than CPUs, so that a thread may lose its CPU anywhere: parts of K are added up by
// whoever comes last.
void wide_products_on_many_threads(const KernelTable& kernels, int64_t tokens) {
  StepState state;
  pool_threads = 1;
  const std::vector<float> expected =
      Model(scalar_kernels(), tokens, 1, kCapacity, false, kWide).step(state, next_id());
  Model model(kernels, tokens, 1, kCapacity, false, kWide);
  bool parts = false;
  for (const int64_t threads : {6, 12, 64}) {
    if (threads > kMaxThreads) continue;
    begin_case("%s, wide, %d tokens, %d threads", kernels.name, static_cast<int>(tokens),
               static_cast<int>(threads));
    pool_threads = threads;
    for (int64_t i = 0; i < (thinning(kernels) == 1 ? 3 : 1); ++i)
      CHECK(equal(model.step(state, next_id()), expected), "other logits");
    parts = parts || state.cells != 0;
  }
  CHECK(parts || kernels.tile_lanes < 8, "K was never cut");
  pool_threads = 1;
}

void begin_threads() {
  // more threads than CPUs gain nothing, and those that back off prove nothing
  set_variable("BITNET_OPS_TUNING", "measure=0,back_off=0");
  use_plain_threads();
}

// What binding says of a text, `rotated` being a projection with signs; empty: nothing.
std::string rejection(const std::string& text, const char* rotated = nullptr) {
  PlainTensors tensors(scalar_kernels());
  if (rotated != nullptr) tensors.rotate(rotated, 64);
  try {
    const Program program(text, tensors, scalar_kernels());
  } catch (const ProgramError& error) {
    return error.what();
  }
  return "";
}

// A good text with its first `from` replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text = program_text({}, true);
  const size_t found = text.find(from);
  CHECK(found != std::string::npos, "the text has no %s", from.c_str());
  return text.replace(found, from.size(), to);
}

TEST(wrong_programs_are_rejected_by_line_and_key) {
  const std::string good = program_text({}, true);
  CHECK(rejection(good).empty(), "a good program: %s", rejection(good).c_str());
  CHECK(rejection("# a comment\n\n" + good + "  \n").empty(), "comments and empty lines");
  const std::pair<std::string, const char*> cases[] = {
      {"", "begins with a line model, got no line"},
      {"rope name=a\n", "begins with a line model, got a line rope"},
      {with("hidden=192", "hidden=0"), "key hidden of line 1 (model) from 1 to 4194304, got 0"},
      {with("hidden=192", "hidden=1e3"), "key hidden of line 1 (model) from 1"},
      {with("hidden=192", "hidden=99999999999999999999"), "from 1 to 4194304, got 9999999"},
      {with("hidden=192", "width=192"), "key hidden of line 1 (model) to be given, got nothing"},
      {with("dtype=bfloat16", "dtype=float16"), "float32 or bfloat16, got float16"},
      {with("eps=1e-05", "eps=nan"), "key eps of line 1 (model) a finite number, got nan"},
      {with("eps=1e-05", "eps=-1"), "key eps of line 1 (model) at least 0"},
      {with("eps=1e-05", "eps=1e-05 eps=1"), "key eps of line 1 (model) once"},
      {with("eps=1e-05", "eps=1e-05 shape=1"), "line 1 (model) of the program with keys that it"},
      {with("eps=1e-05", "eps=1e-05 twice"), "with keys as key=value, got twice"},
      {with("eps=1e-05", "eps=1e-05 a="), "with keys as key=value, got a="},
      {with("eps=1e-05", "eps=1e-05 =a"), "with keys as key=value, got =a"},
      {with("dim=32", "dim=31"), "key dim of line 2 (rope) even, got 31"},
      {with("factor=1.25", "factor=0"), "key factor of line 2 (rope) above 0"},
      {with("name=local", "name=global"), "key name of line 3 (rope) a name of its own"},
      {with("rope=global", "rope=other"), "key rope of line 4 (attention) the name of a line rope"},
      {with("head_dim=32", "head_dim=30"),
       "key rope of line 4 (attention) of dim 30 at most, got 32"},
      {with("heads=6", "heads=5"), "key heads of line 4 (attention) a multiple of kv_heads=2"},
      {with("kv_heads=2", "kv_heads=9"), "key kv_heads of line 4 (attention) from 1 to 6, got 9"},
      {with("heads=6", "heads=4194304"), "at most 131072 of that size"},
      {with("window=7", "window=-1"), "key window of line 6 (attention) from 0"},
      {with("sinks=2", "sinks=0"), "key sinks of line 6 (attention) from 1"},
      {with("window=7", "window=0"), "key sinks of line 6 (attention) beside a window or a choice"},
      {with("window=7", "top_k=1.5"), "key top_k of line 6 (attention) above 0 and at most 1"},
      {with("window=7", "threshold=0"), "key threshold of line 6 (attention) above 0"},
      {with("window=7", "max_ratio=0.5"), "key min_ratio of line 6 (attention) to be given"},
      {with("sinks=2", "skip=1"), "key skip of line 6 (attention) without a window and a choice"},
      {with("hidden=192 digits=3", "hidden=191 digits=3"),
       "key hidden of line 9 (draft_keys) from"},
      {with("digits=3", "digits=5"), "key digits of line 9 (draft_keys) from 1 to 4, got 5"},
      {with(" fc=M.fc", ""), "key fc of line 9 (draft_keys) to be given, got nothing"},
      {with("sinks=2", "top_k=0.5"), "key window of line 6 (attention) without a choice of pages"},
      {with("scale=0.177", "scale=inf"), "key scale of line 4 (attention) a finite number"},
      {with("q=L0.q", "q=L0.k"), "with a projection of its own, got L0.k again"},
      {with("activation=relu2", "activation=gelu"), "relu2, silu or gelu_pytorch_tanh, got gelu"},
      {with("activation=relu2", "activation=relu2 activation_format=int2"), "or int16_group"},
      {with("activation=relu2", "activation=relu2 sparsity=on"),
       "key sparsity of line 5 (mlp) auto or exact, got on"},
      {with("activation=relu2", "activation=relu2 top_k=0"), "key top_k of line 5 (mlp) above 0"},
      {with("activation=relu2", "activation=relu2 threshold=2"),
       "of line 5 (mlp) above 0 and at m"},
      {with("activation=relu2", "activation=relu2 threshold=0.1 top_k=0.5"),
       "key threshold of line 5 (mlp) without ratios, got both"},
      {with("activation=relu2", "activation=relu2 min_ratio=0.6 max_ratio=0.5"),
       "key min_ratio of line 5 (mlp) at most max_ratio"},
      {with("width=456", "width=0"), "key width of line 5 (mlp) from 1 to 4194304, got 0"},
      {with("mlp norm=L0", "moe norm=L0"), "delta_net, mlp, draft_keys, draft_input, head, got m"},
      {with("activation=relu2", "activation=relu2 activation_format=int8_group"),
       "key activation_format of line 5 (mlp) int8, for no projection of the line has scales"},
      {with("output_gate=1", "output_gate=2"), "key output_gate of line 6 (attention) from 0 to 1"},
      {with("key_dim=64", "key_dim=48"), "key key_dim of line 8 (delta_net) a multiple of 32"},
      {with("key_dim=64", "key_dim=288"), "key key_dim of line 8 (delta_net) from 32 to 256"},
      {with("value_dim=32", "value_dim=0"), "key value_dim of line 8 (delta_net) from 32 to 256"},
      {with("value_heads=3", "value_heads=0"), "key value_heads of line 8 (delta_net) from 1"},
      {with("key_heads=1", "key_heads=2"), "key value_heads of line 8 (delta_net) a multiple of k"},
      {with("kernel=3", "kernel=1"), "key kernel of line 8 (delta_net) from 2 to 8, got 1"},
      {with("kernel=3", "kernel=9"), "key kernel of line 8 (delta_net) from 2 to 8, got 9"},
      {with(" z=D.z", ""), "key z of line 8 (delta_net) to be given, got nothing"},
      {with("z=D.z", "z=D.qkv"), "with a projection of its own, got D.qkv again"},
      {with("kernel=3", "kernel=3 window=1"), "line 8 (delta_net) of the program with keys that"},
      {with(
           "head norm=final",
           "delta_net norm=E.in qkv=E.qkv z=E.z out=E.out a=E.a b=E.b conv=E.conv A_log=E.A "
           "dt_bias=E.d gated_norm=E.g key_heads=1 value_heads=3 key_dim=32 value_dim=32 kernel=3\n"
           "head norm=final"),
       "key key_heads of line 10 (delta_net) and all sizes of a state as of the first such block"},
      {with("vocab=70", "vocab=0"), "key vocab of line 10 (head) from 1"},
      {with(" vocab=70", ""), "key vocab of line 10 (head) to be given, got nothing"},
      {with(" weight=embed", ""), "line 10 (head) of the program with keys that it"},
      {with("head norm", "# norm"), "ends with a line head, got none"},
      {good + "mlp norm=a\n", "nothing but lines lora behind the head, got line"},
      {with("projection=L0.q ", "projection=L9.q "), "one of a block above, got L9.q"},
      {with("adapter=0", "adapter=-1"), "key adapter of line 11 (lora) from 0 to 4095, got -1"},
      {with("adapter=1", "adapter=0"), "key projection of line 12 (lora) once for each adapter"},
      {good.substr(0, good.find("head norm")), "ends with a line head, got none"},
  };
  for (const auto& [text, words] : cases) {
    begin_case("%s", words);
    const std::string got = rejection(text);
    CHECK(got.find(words) != std::string::npos, "expected \"%s\", got \"%s\"", words, got.c_str());
  }
}

// Projections without norms of their own read the same row.
TEST(projections_of_one_input_have_the_same_signs) {
  const std::string got = rejection(program_text({}, true), "D.z");
  CHECK(got == "expected D.z with the signs of D.qkv, for they read the same tokens, got others",
        "%s", got.c_str());
  CHECK(rejection(program_text({}, true), "L1.o").empty(), "a projection alone");
}

// Whatever a text is, it is read or rejected. (Binding would make tensors as large as it says.)
TEST(mutated_programs_are_read_or_rejected) {
  const std::string good = program_text({}, true);
  const std::string letters = "=#\n 0123456789.-eaqx\xff";
  Random random(4);
  int64_t rejected = 0, mutants = quick() ? 200 : 2000;
  for (int64_t i = 0; i < mutants; ++i) {
    std::string text = good.substr(0, at(random.below(static_cast<int64_t>(good.size()))));
    if (random.below(2) == 0) text = good;
    for (int64_t change = random.below(4); change >= 0; --change) {
      const size_t place = at(random.below(static_cast<int64_t>(text.size()) + 1));
      const char letter = letters[at(random.below(static_cast<int64_t>(letters.size())))];
      if (place < text.size() && random.below(3) == 0)
        text.erase(place, 1);
      else if (place < text.size() && random.below(2) == 0)
        text[place] = letter;
      else
        text.insert(place, 1, letter);
    }
    begin_case("mutant %d", static_cast<int>(i));
    try {
      for (const engine::Line& line : engine::parse_listing(text)) engine::Keys(line).has("norm");
    } catch (const ProgramError&) {
      ++rejected;
    }
  }
  CHECK(rejected > 0 && rejected < mutants, "%d rejected", static_cast<int>(rejected));
}

TEST(same_on_every_number_of_threads) {
  begin_threads();
  for (const KernelTable* kernels : tables_under_test()) {
    for (const bool extras : {false, true}) {
      same_on_every_number_of_threads(*kernels, 1, 1, extras);
      same_on_every_number_of_threads(*kernels, 4, 4, extras);
      same_on_every_number_of_threads(*kernels, kLongPrompt, 2, extras);
      same_on_every_number_of_threads(*kernels, kShortPrompt, 1, extras);
    }
  }
}

// One token, of which some codes are 0: their columns are not read. And what drops more gives the
// same on every number of threads, whether columns are read or not.
void zeros_are_left_out(const KernelTable& kernels, const Sizes& dense, const char* drops) {
  const std::string exact = std::string(" sparsity=exact") + drops;
  Sizes sizes = dense;
  StepState state;
  pool_threads = 1;
  sizes.mlp = drops;
  const std::vector<float> expected =
      Model(scalar_kernels(), 0, 0, kCapacity, false, sizes).step(state, next_id());
  for (const char* keys : {exact.c_str(), drops}) {
    sizes.mlp = keys;
    Model model(kernels, 0, 0, kCapacity, false, sizes);
    for (const int64_t threads : {1, 2, 3, 7}) {
      if (threads < kMinThreads) continue;
      begin_case("%s, width %d,%s, %d threads", kernels.name, static_cast<int>(sizes.width), keys,
                 static_cast<int>(threads));
      pool_threads = threads;
      const int64_t id = next_id();
      for (int again = 0; again < 2; ++again) {
        CHECK(equal(model.step(state, id), expected), "other logits");
        const auto [skipped, inputs] = zero_counts();
        CHECK(keys == drops ? inputs == 0 : inputs > 0 && skipped > 0 && skipped < inputs,
              "%d of %d left out", static_cast<int>(skipped), static_cast<int>(inputs));
      }
    }
  }
  pool_threads = 1;
}

TEST(drafts_on_every_number_of_threads) {
  begin_threads();
  for (const KernelTable* kernels : tables_under_test())
    drafts_on_every_number_of_threads(*kernels);
}

TEST(zeros_are_left_out) {
  begin_threads();
  for (const KernelTable* kernels : tables_under_test()) {
    for (const char* drops :
         {"", " threshold=0.1", " top_k=0.05", " min_ratio=0.1 max_ratio=0.4"}) {
      zeros_are_left_out(*kernels, {}, drops);
      zeros_are_left_out(*kernels, kWide, drops);
    }
  }
}

uint64_t sum_of(const std::vector<float>& values) {
  return format::xxh64({reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4});
}

// The bits themselves: other compilers, systems and maths libraries must give the same.
TEST(bits_are_those_of_every_build) {
  begin_threads();
  struct Sums {
    uint64_t logits, keys, values;
  };
  constexpr Sums kPlain{0x7235a5fd71fe3c19, 0x20cb068947091421, 0x065b67454d85cdbf};
  constexpr Sums kExtras{0x11babbe64c10e8c9, 0x1d551de0c1208459, 0xbe680f05cb105e1b};
  for (const KernelTable* kernels : tables_under_test()) {
    for (const bool extras : {false, true}) {
      begin_case("%s, %s", kernels->name, extras ? "extras" : "plain");
      StepState state;
      Model model(*kernels, 12, 3, 16, extras);
      const Sums sums{sum_of(model.step(state, next_id())), sum_of(model.keys),
                      sum_of(model.values)};
      const Sums& wanted = extras ? kExtras : kPlain;
      for (const auto& [what, got, want] : {std::tuple{"logits", sums.logits, wanted.logits},
                                            std::tuple{"keys", sums.keys, wanted.keys},
                                            std::tuple{"values", sums.values, wanted.values}})
        CHECK(got == want, "%s: 0x%016llx", what, static_cast<unsigned long long>(got));
    }
  }
}

TEST(wide_products_on_many_threads) {
  begin_threads();
  for (const KernelTable* kernels : tables_under_test())
    wide_products_on_many_threads(*kernels, 31);
}

}  // namespace
}  // namespace bitnet::test
