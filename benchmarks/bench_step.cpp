// Where the time of a model step goes, stage by stage, without torch: bench_step [model] [streams]
// [context] [layers] [head rows] [steps] [isa]. One thread does the work of two; of each stage the
// best of several steps counts, so that other processes disturb little. Weights are random bytes.
// With BENCH_STEP_PLAN=partitions it prints the plan for so many, a line a stage: "plan" name units
// min max parts nanoseconds, those of preparing, bytes of weights; benchmarks/many_cores.py
// reads them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/delta_net.h"
#include "engine/head.h"
#include "engine/program/plan.h"
#include "format/layout.h"
#include "runtime/pages.h"
#include "runtime/tuning.h"
#include "tests/random.h"
#include "tests/tables.h"
#include "tests/threads.h"

namespace bitnet::test {
namespace {

constexpr int64_t kBlock = 64;

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

// value_heads: of Gated DeltaNet in three layers of four, with 16 heads of keys; rotated in blocks
// of `block`. 0: attention in all.
struct Sizes {
  const char* name;
  int64_t hidden, heads, kv_heads, dim, intermediate, value_heads = 0, block = 0;

  bool is_linear(int64_t layer) const { return value_heads != 0 && layer % 4 != 3; }
  engine::DeltaShape delta() const { return {16, value_heads, 128, 128, 4}; }
};
constexpr Sizes kModels[] = {
    {"0.7b", 1536, 16, 16, 96, 4096},
    {"2b-4t", 2560, 20, 5, 128, 6912},
    {"bonsai2-2b", 2048, 8, 2, 256, 6144, 16, 1024},
    {"bonsai2-9b", 4096, 16, 4, 256, 12288, 32, 1024},
    {"bonsai2-27b", 5120, 24, 4, 256, 17408, 48, 1024},
};

struct Settings {
  Sizes sizes = kModels[0];
  int64_t streams = 16, context = 128, layers = 6, vocab = 32002, steps = 12;
};

// Random bytes under every name that a program asks for.
class RandomTensors final : public engine::TensorSource {
 public:
  RandomTensors(const KernelTable& kernels, int64_t block) : kernels_(kernels), block_(block) {}

  bool has(const std::string&) const override { return false; }

  engine::Weight linear(const std::string& name, int64_t rows, int64_t k,
                        engine::Projection& scaled) override {
    engine::Weight w =
        engine::tile_weight(nullptr, engine::WeightFormat::kTwoBit, rows, k, kernels_.tile_lanes);
    w.data = some_bytes(w.bytes());
    bytes_[name.substr(name.find('.') + 1)] = w.bytes();
    macs += rows * k;
    scaled = engine::make_projection(w, &one_, 1, DType::kF32, nullptr);
    return w;
  }
  engine::Signs signs(const std::string& name, int64_t k) override {
    if (block_ == 0) return {};
    const float*& shared = signs_[k];  // of all matrices of that width
    if (shared == nullptr) shared = floats(name, k);
    return {shared, block_};
  }
  const uint8_t* columns(const std::string&, int64_t rows, int64_t k) override {
    return some_bytes(layout::column_panels(rows) * k * layout::kColumnBytes);
  }
  const float* matrix(const std::string& name, int64_t rows, int64_t n) override {
    return floats(name, rows * n);
  }
  const float* floats(const std::string&, int64_t n) override {
    floats_.emplace_back(at(n), 1.0f);
    return floats_.back().data();
  }
  engine::HeadView head(const std::string&, int64_t rows, int64_t k) override {
    floats_.emplace_back(at(rows), 0.01f);
    head_bytes = rows * k;
    return {engine::HeadFormat::kInt8,
            DType::kF32,
            some_bytes(rows * k),
            floats_.back().data(),
            rows,
            k,
            0,
            engine::head_prefetch()};
  }
  engine::LoraWeight factors(const std::string&, const std::string&, int64_t, int64_t) override {
    return {};
  }

  // 2-bit fields hold no 3, and bfloat16 no infinity.
  uint8_t* some_bytes(int64_t count) {
    memory_.emplace_back(count);
    uint8_t* bytes = memory_.back().get();
    advise_huge_pages(bytes, count);
    for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(random_.next() & 0x15);
    return bytes;
  }

  // What a stage of that name reads of weights.
  int64_t bytes_of(const std::string& stage) const {
    if (stage == "head") return head_bytes;
    const std::map<std::string, std::vector<const char*>> stages = {{"qkv", {"q", "k", "v"}},
                                                                    {"qkvz", {"qkv", "z"}},
                                                                    {"out", {"o"}},
                                                                    {"gate/up", {"gate", "up"}},
                                                                    {"down", {"down"}}};
    int64_t bytes = 0;
    if (const auto found = stages.find(stage); found != stages.end())
      for (const char* name : found->second) bytes += bytes_.at(name);
    return bytes;
  }

  int64_t macs = 0, head_bytes = 0;

 private:
  const KernelTable& kernels_;
  int64_t block_;
  std::map<int64_t, const float*> signs_;
  Random random_{3};
  const float one_ = 1.0f;
  std::vector<Scratch<uint8_t>> memory_;
  std::vector<std::vector<float>> floats_;
  std::map<std::string, int64_t> bytes_;
};

std::string program_text(const Settings& s) {
  const Sizes& m = s.sizes;
  std::ostringstream text;
  text << "model hidden=" << m.hidden << " dtype=bfloat16 eps=1e-05\n"
       << "rope name=rope dim=" << (m.value_heads == 0 ? m.dim : m.dim / 4) << " inv_freq=rope\n";
  for (int64_t i = 0; i < s.layers; ++i) {
    const std::string l = "L" + std::to_string(i) + ".";
    const bool plain = m.value_heads == 0;
    if (m.is_linear(i)) {
      text << "delta_net norm=in qkv=" << l << "qkv z=" << l << "z out=" << l
           << "o a=a b=b conv=conv A_log=A_log dt_bias=dt_bias gated_norm=gated key_heads=16 "
           << "value_heads=" << m.value_heads << " key_dim=128 value_dim=128 kernel=4\n";
    } else {
      text << "attention norm=in q=" << l << "q k=" << l << "k v=" << l << "v o=" << l
           << "o heads=" << m.heads << " kv_heads=" << m.kv_heads << " head_dim=" << m.dim
           << " rope=rope " << (plain ? "sub_norm=sub\n" : "q_norm=qn k_norm=kn output_gate=1\n");
    }
    text << "mlp norm=post gate=" << l << "gate up=" << l << "up down=" << l
         << "down width=" << m.intermediate
         << (plain ? " activation=relu2 sub_norm=ffn_sub\n" : " activation=silu\n");
  }
  text << "head norm=final weight=embed vocab=" << s.vocab << "\n";
  return text.str();
}

// Every stream has one new token behind `context` positions; a context of 0 means one sequence of
// `streams` new tokens, a prompt, of which the last one's logits are wanted.
struct Bench {
  RandomTensors tensors;
  engine::Program program;
  engine::Batch batch;
  std::vector<float> x, logits;
  std::vector<std::vector<float>> states;
  std::vector<engine::KeptMemory> kept;
  std::vector<engine::StateStep> steps;
  std::vector<int64_t> query_start, lengths, blocks, positions, slots, logit_rows;

  Bench(const KernelTable& kernels, const Settings& s)
      : tensors(kernels, s.sizes.block), program(program_text(s), tensors, kernels) {
    cut(s);
    if (!program.kept().empty()) hold_states();
    Random random(4);
    for (int64_t i = 0; i < batch.tokens * s.sizes.hidden; ++i) x.push_back(random.unit());
    logits.resize(at(batch.logit_count * s.vocab));
    batch.x = x.data();
    batch.out = logits.data();
  }

  void hold_states() {
    const int64_t sequences = batch.sequences.count;
    for (const engine::KeptBuffer& buffer : program.kept()) {
      kept.push_back(engine::KeptMemory::of(buffer, 0, nullptr));
      states.emplace_back(at(sequences * kept.back().slot));
      kept.back().data = states.back().data();
    }
    batch.kept = kept.data();
    for (int64_t q = 0; q < sequences; ++q) steps.push_back({q, 0, 0});
    batch.state_steps = steps.data();
  }

  void cut(const Settings& s) {
    const bool prompt = s.context == 0;
    const int64_t sequences = prompt ? 1 : s.streams, tokens = prompt ? s.streams : 1;
    const int64_t columns = (s.context + tokens + kBlock - 1) / kBlock;
    query_start.push_back(0);
    for (int64_t i = 0; i < sequences * columns; ++i) blocks.push_back(i);
    for (int64_t q = 0; q < sequences; ++q) {
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t position = s.context + t;
        positions.push_back(position);
        slots.push_back(blocks[at(q * columns + position / kBlock)] * kBlock + position % kBlock);
      }
      query_start.push_back((q + 1) * tokens);
      lengths.push_back(s.context + tokens);
      logit_rows.push_back((q + 1) * tokens - 1);
    }
    batch.tokens = s.streams;
    batch.positions.time = positions.data();
    batch.slots = slots.data();
    batch.logit_rows = logit_rows.data();
    batch.logit_count = sequences;
    batch.sequences = {sequences, query_start.data(), lengths.data(), blocks.data(), columns};
    const int64_t row = s.sizes.dim * element_size(DType::kBF16), head = kBlock * row;
    const int64_t block = s.sizes.kv_heads * head;
    const auto layer = static_cast<int64_t>(blocks.size()) * block;
    const auto rows = [&] {
      auto* data = reinterpret_cast<char*>(tensors.some_bytes(s.layers * layer));
      return engine::PoolView{data, block, row, head};
    };
    batch.pool.first = {DType::kBF16, kBlock, s.sizes.dim, rows(), rows(), {}, {}};
    batch.pool.key_bytes = batch.pool.value_bytes = layer;
  }
};

// Nanoseconds of whole steps on so many threads, the best one.
void report_threads(const Bench& bench, const Settings& s, int64_t threads) {
  engine::StepState state;
  pool_threads = threads;
  double best = 1e9;
  for (int64_t i = 0; i < 3 * s.steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    engine::run_step(state, bench.program, 1, bench.batch);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
  }
  std::printf("threads %lld %.0f\n", static_cast<long long>(threads), best * 1e9);
}

void report(const Bench& bench, const Settings& s, int64_t partitions) {
  engine::StepState state;
  engine::StageTimes times;
  std::vector<double> best, prepare;
  for (int64_t i = 0; i < s.steps; ++i) {
    engine::run_step_timed(state, bench.program, 1, bench.batch, partitions, times);
    if (best.empty()) best = times.seconds, prepare = times.prepare_seconds;
    for (std::size_t j = 0; j < best.size(); ++j)
      prepare[j] = std::min(prepare[j], times.prepare_seconds[j]);
    for (std::size_t j = 0; j < best.size(); ++j) best[j] = std::min(best[j], times.seconds[j]);
  }
  if (std::getenv("BENCH_STEP_PLAN") != nullptr) {
    for (std::size_t j = 0; j < best.size(); ++j) {
      const ClaimRule& rule = times.claims[j];
      std::printf("plan \"%s\" %lld %lld %lld %lld %.0f %.0f %lld\n", times.names[j],
                  static_cast<long long>(times.units[j]), static_cast<long long>(rule.min),
                  static_cast<long long>(rule.max), static_cast<long long>(rule.parts),
                  best[j] * 1e9, prepare[j] * 1e9,
                  static_cast<long long>(bench.tensors.bytes_of(times.names[j])));
    }
    return;
  }
  std::map<std::string, double> of_name;
  double all = 0;
  for (std::size_t j = 0; j < best.size(); ++j) {
    of_name[times.names[j]] += best[j];
    all += best[j];
  }
  for (const auto& [name, seconds] : of_name)
    if (seconds > 0)
      std::printf("  %-14s%9.3f ms%6.1f%%\n", name.c_str(), seconds * 1e3, 100 * seconds / all);
  const double macs = static_cast<double>(bench.tensors.macs * s.streams);
  double peak = 0;
  for (int i = 0; i < 200; ++i) {
    int32_t sink = 0;
    const auto start = std::chrono::steady_clock::now();
    const auto done = static_cast<double>(bench.program.kernels().probe_int8_peak(2000, &sink));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    peak = std::max(peak, done / took.count());
  }
  std::printf("  %-14s%9.3f ms; ternary products at the int8 peak %.3f ms\n", "all", all * 1e3,
              macs / peak * 1e3);
}

}  // namespace
}  // namespace bitnet::test

int main(int argc, char** argv) {
  using namespace bitnet::test;
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::max<int64_t>(0, std::atoll(argv[i])) : otherwise;
  };
  Settings s;
  for (const Sizes& sizes : kModels)
    if (argc > 1 && std::string(argv[1]) == sizes.name) s.sizes = sizes;
  s.streams = number(2, s.streams);
  s.context = number(3, s.context);
  s.layers = number(4, s.layers);
  s.vocab = number(5, s.vocab);
  s.steps = number(6, s.steps);
  const std::string isa = argc > 7 ? argv[7] : bitnet::available_tables().front()->name;
  for (const bitnet::KernelTable* kernels : bitnet::available_tables()) {
    if (isa != kernels->name || !bitnet::make_ready(*kernels)) continue;
    std::printf("%s, %s, %d tokens behind %d positions, %d layers, head of %d rows\n",
                kernels->name, s.sizes.name, static_cast<int>(s.streams),
                static_cast<int>(s.context), static_cast<int>(s.layers), static_cast<int>(s.vocab));
    const Bench bench(*kernels, s);
    const char* plan = std::getenv("BENCH_STEP_PLAN");
    report(bench, s, plan == nullptr ? 2 : std::max(1, std::atoi(plan)));
    if (plan == nullptr || std::atoi(plan) > 2) continue;
    use_plain_threads();
    const int64_t cpus = std::max(2u, std::thread::hardware_concurrency());
    for (int64_t threads = 1; threads <= cpus; threads *= 2) report_threads(bench, s, threads);
  }
  return 0;
}
