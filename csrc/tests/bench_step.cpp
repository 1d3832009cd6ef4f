// Where the time of a model step goes, stage by stage, without torch: bench_step [model] [streams]
// [context] [layers] [head rows] [steps] [isa]. One thread does the work of two; of each stage the
// best of several steps counts, so that other processes disturb little. Weights are random bytes.
// With BENCH_STEP_PLAN=partitions it prints the plan for so many, a line a stage: "plan" name units
// least most parts nanoseconds, those of preparing, bytes of weights; benchmarks/many_cores.py
// reads them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "engine/model_step.h"
#include "format/layout.h"
#include "runtime/pages.h"
#include "runtime/tuning.h"
#include "tests/random.h"
#include "tests/tables.h"
#include "tests/threads.h"

namespace bitnet::test {
namespace {

using engine::kLayerWeights;

constexpr int64_t kBlock = 64;

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

struct Sizes {
  const char* name;
  int64_t hidden, heads, kv_heads, dim, intermediate;
};
constexpr Sizes kModels[] = {{"0.7b", 1536, 16, 16, 96, 4096}, {"2b-4t", 2560, 20, 5, 128, 6912}};

struct Settings {
  Sizes sizes = kModels[0];
  int64_t streams = 16, context = 128, layers = 6, vocab = 32002, steps = 12;
};

// Every stream has one new token behind `context` positions; a context of 0 means one sequence of
// `streams` new tokens, a prompt, of which the last one's logits are wanted.
struct Bench {
  engine::StepModel m{};
  std::vector<engine::StepLayer> layers;
  std::vector<Scratch<uint8_t>> memory;
  std::vector<float> frequencies, norms, ones, x, logits, head_scales;
  std::vector<int64_t> query_start, lengths, blocks, positions, slots, logit_rows;

  Bench(const KernelTable& table, const Settings& s) {
    m.table = &table;
    m.tokens = s.streams;
    m.hidden = s.sizes.hidden;
    m.heads = s.sizes.heads;
    m.kv_heads = s.sizes.kv_heads;
    m.dim = s.sizes.dim;
    m.intermediate = s.sizes.intermediate;
    m.n_layers = s.layers;
    m.type = DType::kBF16;
    m.activation = table.relu2_mul_row;
    m.eps = m.sub_eps = 1e-5f;
    for (int64_t i = 0; i < m.dim / 2; ++i) {
      const auto turn = -2.0f * static_cast<float>(i) / static_cast<float>(m.dim);
      frequencies.push_back(std::pow(10000.0f, turn));
    }
    m.rope = {frequencies.data(), 1.0f};
    m.attention_scale = 1.0f / std::sqrt(static_cast<float>(m.dim));
    cut(s);
    Random random(3);
    norms.assign(at(std::max(m.intermediate, m.hidden)), 1.0f);
    ones.assign(1, 1.0f);
    m.final_norm = norms.data();
    for (int64_t i = 0; i < m.n_layers; ++i) layers.push_back(layer(random));
    m.layers = layers.data();
    head_scales.assign(at(s.vocab), 0.01f);
    m.head = {engine::HeadFormat::kInt8,
              DType::kF32,
              some_bytes(random, s.vocab * m.hidden),
              head_scales.data(),
              s.vocab,
              m.hidden,
              0,
              engine::head_prefetch()};
    for (int64_t i = 0; i < m.tokens * m.hidden; ++i) x.push_back(random.unit());
    logits.resize(at(m.head_tokens * s.vocab));
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
    m.sequences = {sequences, query_start.data(), lengths.data(), blocks.data(), columns};
    m.positions = positions.data();
    m.slots = slots.data();
    m.logit_rows = logit_rows.data();
    m.head_tokens = sequences;
  }

  // 2-bit fields hold no 3, and bfloat16 no infinity.
  uint8_t* some_bytes(Random& random, int64_t count) {
    memory.emplace_back(count);
    uint8_t* bytes = memory.back().get();
    advise_huge_pages(bytes, count);
    for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(random.next() & 0x15);
    return bytes;
  }

  engine::PoolView rows(Random& random) {
    const int64_t row = m.dim * element_size(DType::kBF16), head = kBlock * row;
    const auto count = static_cast<int64_t>(blocks.size()) * m.kv_heads * head;
    return {reinterpret_cast<char*>(some_bytes(random, count)), m.kv_heads * head, row, head};
  }

  engine::StepLayer layer(Random& random) {
    engine::StepLayer one{};
    for (int w = 0; w < kLayerWeights; ++w) {
      const auto [n, k] = engine::weight_size(m, w);
      engine::Weight& weight = one.weights[w];
      weight =
          engine::tile_weight(nullptr, engine::WeightFormat::kTwoBit, n, k, m.table->tile_lanes);
      weight.data = some_bytes(random, weight.bytes());
      one.scales[w] = ones.data();
    }
    one.attention_norm = one.mlp_norm = one.out_norm = one.down_norm = norms.data();
    one.pool = {DType::kBF16, kBlock, m.dim, rows(random), rows(random), {}, {}};
    return one;
  }
};

// What a stage of that name reads of weights.
int64_t weight_bytes(const engine::StepModel& m, const std::string& name) {
  const std::map<std::string, std::vector<int>> stages = {
      {"qkv", {engine::kQ, engine::kK, engine::kV}},
      {"out", {engine::kO}},
      {"gate/up", {engine::kGate, engine::kUp}},
      {"down", {engine::kDown}}};
  if (name == "head") return m.head.rows * m.head.row_bytes();
  int64_t bytes = 0;
  if (const auto found = stages.find(name); found != stages.end())
    for (const int w : found->second) bytes += m.layers[0].weights[w].bytes();
  return bytes;
}

// Nanoseconds of whole steps on so many threads, the best one.
void report_threads(const Bench& bench, const Settings& s, int64_t threads) {
  engine::StepState state;
  std::vector<float> logits = bench.logits;
  pool_threads = threads;
  double best = 1e9;
  for (int64_t i = 0; i < 3 * s.steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    engine::run_step(state, bench.m, bench.x.data(), logits.data());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
  }
  std::printf("threads %lld %.0f\n", static_cast<long long>(threads), best * 1e9);
}

void report(const Bench& bench, const Settings& s, int64_t partitions) {
  engine::StepState state;
  engine::StageTimes times;
  std::vector<double> best, prepare;
  std::vector<float> logits = bench.logits;
  for (int64_t i = 0; i < s.steps; ++i) {
    engine::run_step_timed(state, bench.m, partitions, bench.x.data(), logits.data(), times);
    if (best.empty()) best = times.seconds, prepare = times.prepare_seconds;
    for (std::size_t j = 0; j < best.size(); ++j)
      prepare[j] = std::min(prepare[j], times.prepare_seconds[j]);
    for (std::size_t j = 0; j < best.size(); ++j) best[j] = std::min(best[j], times.seconds[j]);
  }
  if (std::getenv("BENCH_STEP_PLAN") != nullptr) {
    for (std::size_t j = 0; j < best.size(); ++j) {
      const ClaimRule& rule = times.claims[j];
      std::printf("plan \"%s\" %lld %lld %lld %lld %.0f %.0f %lld\n", times.names[j],
                  static_cast<long long>(times.units[j]), static_cast<long long>(rule.least),
                  static_cast<long long>(rule.most), static_cast<long long>(rule.parts),
                  best[j] * 1e9, prepare[j] * 1e9,
                  static_cast<long long>(weight_bytes(bench.m, times.names[j])));
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
  double macs = 0, peak = 0;
  for (int w = 0; w < kLayerWeights; ++w) {
    const auto [n, k] = engine::weight_size(bench.m, w);
    macs += static_cast<double>(n * k);
  }
  macs *= static_cast<double>(s.streams * s.layers);
  for (int i = 0; i < 200; ++i) {
    int32_t sink = 0;
    const auto start = std::chrono::steady_clock::now();
    const auto done = static_cast<double>(bench.m.table->probe_int8_peak(2000, &sink));
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
  for (const bitnet::KernelTable* table : bitnet::available_tables()) {
    if (isa != table->name || !bitnet::make_ready(*table)) continue;
    std::printf("%s, %s, %d tokens behind %d positions, %d layers, head of %d rows\n", table->name,
                s.sizes.name, static_cast<int>(s.streams), static_cast<int>(s.context),
                static_cast<int>(s.layers), static_cast<int>(s.vocab));
    const Bench bench(*table, s);
    const char* plan = std::getenv("BENCH_STEP_PLAN");
    report(bench, s, plan == nullptr ? 2 : std::max(1, std::atoi(plan)));
    if (plan == nullptr || std::atoi(plan) > 2) continue;
    use_plain_threads();
    for (const int64_t threads : {1, 2}) report_threads(bench, s, threads);
  }
  return 0;
}
