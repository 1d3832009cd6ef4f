// Attention in tasks on a executor of plain threads: whoever finishes a group's last chunk merges it,
// without a barrier, layer after layer, and the result is that of one thread, bit for bit. Built
// with BITNET_SANITIZE=thread it proves that hand-over; must not know what attention computes.
#include "engine/attention.h"

#include <cstring>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/isa_tables.h"
#include "runtime/staged_executor.h"
#include "tests/check.h"
#include "tests/random.h"

namespace bitnet::test {
namespace {

using engine::AttentionBuffers;
using engine::AttentionPlan;
using engine::AttentionShape;

// A few layers over one cache; what a layer puts out is what the next one asks.
struct Layers {
  static constexpr int64_t kLayers = 6;
  AttentionShape shape;
  AttentionPlan plan;
  const std::vector<float>&keys, &values;
  mutable std::vector<std::vector<float>> rows;  // [kLayers + 1]: query, then every layer's output
  mutable std::vector<float> shared;
  mutable std::vector<std::vector<float>> own;  // [slot]

  Layers(const AttentionShape& shape_in, const std::vector<int64_t>& starts, int64_t threads,
         const std::vector<float>& keys_in, const std::vector<float>& values_in)
      : shape(shape_in), plan(shape, starts.data(), threads), keys(keys_in), values(values_in) {
    const auto size = static_cast<size_t>(shape.batch * shape.tokens * shape.heads * shape.dim);
    rows.assign(kLayers + 1, std::vector<float>(size));
    Random random(7);
    for (float& x : rows[0]) x = random.unit();
    shared.resize(static_cast<size_t>(plan.shared_floats()));
    own.assign(static_cast<size_t>(threads),
               std::vector<float>(static_cast<size_t>(plan.thread_floats())));
    plan.prepare(shared.data());
  }
  int64_t stages() const { return kLayers; }
  int64_t units(int64_t) const { return plan.tasks(); }
  ClaimRule claim(int64_t) const { return {1, 4}; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const {
    const auto layer = static_cast<size_t>(stage);
    const AttentionBuffers buffers{rows[layer].data(), keys.data(), values.data(),
                                   rows[layer + 1].data()};
    for (int64_t task = begin; task < end; ++task) {
      plan.run(*scalar::table(), buffers, task, shared.data(),
               own[static_cast<size_t>(slot)].data());
    }
  }
};

void run_layers(const Layers& layers, int64_t threads) {
  const auto executor = std::make_unique<StagedExecutor>();
  executor->start(threads, layers);
  std::vector<std::thread> others;
  for (int64_t s = 1; s < threads; ++s) {
    others.emplace_back([&, s] { executor->work(s, s + 1, layers); });
  }
  executor->work(0, 1, layers);
  for (std::thread& thread : others) thread.join();
}

struct Case {
  int64_t batch, tokens, heads, kv_heads;
  std::vector<int64_t> starts;
  bool split;  // with four threads
};

void equal_to_one_thread(const Case& c) {
  AttentionShape shape{};
  shape.batch = c.batch;
  shape.tokens = c.tokens;
  shape.heads = c.heads;
  shape.kv_heads = c.kv_heads;
  shape.length = 400;
  shape.dim = 16;
  shape.query_type = shape.cache_type = DType::kF32;
  shape.scale = 0.25f;
  const auto size = static_cast<size_t>(c.batch * c.kv_heads * shape.length * shape.dim);
  std::vector<float> keys(size), values(size);
  Random random(3);
  for (size_t i = 0; i < size; ++i) keys[i] = random.unit(), values[i] = random.unit();

  const Layers alone(shape, c.starts, 1, keys, values);
  run_layers(alone, 1);
  for (const int64_t threads : {2, 3, 4}) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      begin_case("%lld sequences, %lld tokens, %lld threads", static_cast<long long>(c.batch),
                 static_cast<long long>(c.tokens), static_cast<long long>(threads));
      const Layers layers(shape, c.starts, threads, keys, values);
      if (threads == 4) CHECK(layers.plan.split() == c.split, "the plan is of the other kind");
      run_layers(layers, threads);
      for (size_t layer = 1; layer <= Layers::kLayers; ++layer) {
        CHECK(std::memcmp(layers.rows[layer].data(), alone.rows[layer].data(),
                          alone.rows[layer].size() * sizeof(float)) == 0,
              "layer %zu differs from that of one thread", layer);
      }
    }
  }
}

}  // namespace
}  // namespace bitnet::test

int main() {
  using namespace bitnet::test;
  name_case_on_signals();
  equal_to_one_thread({1, 1, 4, 2, {399}, true});
  equal_to_one_thread({2, 3, 4, 2, {397, 70}, true});
  equal_to_one_thread({9, 1, 4, 4, {399, 0, 63, 64, 127, 128, 200, 1, 300}, false});
  return finish("test_attention_plan");
}
