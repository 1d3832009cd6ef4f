// Attention in tasks on a executor of plain threads: whoever finishes a group's last chunk merges
// it, without a barrier, layer after layer, and the result is that of one thread, bit for bit.
// Built with BITNET_SANITIZE=thread it proves that hand-over; must not know what attention
// computes.
#include "engine/attention.h"

#include <cmath>
#include <cstring>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "engine/kv_cache.h"
#include "kernels/isa_tables.h"
#include "runtime/staged_executor.h"
#include "tests/check.h"
#include "tests/random.h"

namespace bitnet::test {
namespace {

using engine::AttentionBuffers;
using engine::AttentionPlan;
using engine::AttentionShape;
using engine::CachePool;
using engine::PoolView;
using engine::Sequences;

constexpr int64_t kDim = 16, kLength = 400;

size_t at(int64_t i) { return static_cast<size_t>(i); }

// A cache [batch, kv_heads, kLength, kDim], one long block for each sequence.
struct Cache {
  std::vector<float> keys, values;
  int64_t kv_heads;

  Cache(int64_t batch, int64_t kv_heads_in) : kv_heads(kv_heads_in) {
    Random random(3);
    for (int64_t i = 0; i < batch * kv_heads * kLength * kDim; ++i) {
      keys.push_back(random.unit()), values.push_back(random.unit());
    }
  }
  CachePool pool() const {
    const int64_t row = kDim * static_cast<int64_t>(sizeof(float));
    const auto view = [&](const std::vector<float>& rows) {
      return PoolView{reinterpret_cast<char*>(const_cast<float*>(rows.data())),
                      kv_heads * kLength * row, row, kLength * row};
    };
    return {DType::kF32, kLength, kDim, view(keys), view(values), {}, {}};
  }
};

// What the sequences of a case are to a plan.
struct Batch {
  std::vector<int64_t> query_start{0}, lengths, blocks;

  Batch(const std::vector<int64_t>& starts, const std::vector<int64_t>& tokens) {
    for (size_t s = 0; s < starts.size(); ++s) {
      query_start.push_back(query_start.back() + tokens[s]);
      lengths.push_back(starts[s] + tokens[s]);
      blocks.push_back(static_cast<int64_t>(s));
    }
  }
  Sequences view() const {
    return {static_cast<int64_t>(lengths.size()), query_start.data(), lengths.data(), blocks.data(),
            1};
  }
};

// A few layers over one cache; what a layer puts out is what the next one asks.
struct Layers {
  static constexpr int64_t kLayers = 6;
  AttentionShape shape;
  AttentionPlan plan;
  mutable std::vector<std::vector<float>> rows;  // [kLayers + 1]: query, then every layer's output
  mutable std::vector<float> shared;
  mutable std::vector<std::vector<float>> own;  // [slot]

  Layers(const AttentionShape& shape_in, const Batch& batch, int64_t threads) : shape(shape_in) {
    plan.build(shape, batch.view(), threads);
    const auto size = static_cast<size_t>(batch.query_start.back() * shape.heads * shape.dim);
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
    const AttentionBuffers buffers{rows[layer].data(), rows[layer + 1].data(), shape.pool};
    plan.run(*scalar::table(), buffers, begin, end, shared.data(),
             own[static_cast<size_t>(slot)].data());
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
  int64_t heads, kv_heads;
  std::vector<int64_t> starts, tokens;
  enum { kSplit, kWhole, kBoth } kind;  // of its groups, with four threads
  int64_t window = 0;
};

void equal_to_one_thread(const Case& c) {
  const Cache cache(static_cast<int64_t>(c.starts.size()), c.kv_heads);
  const Batch batch(c.starts, c.tokens);
  const AttentionShape shape{
      c.heads, c.kv_heads, kDim, DType::kF32, 0.25f, cache.pool(), {c.window, c.window / 3}};
  const Layers alone(shape, batch, 1);
  run_layers(alone, 1);
  for (const int64_t threads : {2, 3, 4}) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      begin_case("%d sequences, %d tokens, %d threads", static_cast<int>(c.starts.size()),
                 static_cast<int>(batch.query_start.back()), static_cast<int>(threads));
      const Layers layers(shape, batch, threads);
      const int64_t split = layers.plan.split_tasks(), tasks = layers.plan.tasks();
      const auto kind = split == 0 ? Case::kWhole : split == tasks ? Case::kSplit : Case::kBoth;
      if (threads == 4) CHECK(kind == c.kind, "the plan is of the other kind");
      run_layers(layers, threads);
      for (size_t layer = 1; layer <= Layers::kLayers; ++layer) {
        CHECK(std::memcmp(layers.rows[layer].data(), alone.rows[layer].data(),
                          alone.rows[layer].size() * sizeof(float)) == 0,
              "layer %zu differs from that of one thread", layer);
      }
    }
  }
}

// Of a split plan, of a step of one token: the chunks that its window reaches, and no more.
void windows_cut_the_work() {
  const Cache cache(1, 2);
  const Batch batch({399}, {1});
  for (const auto& [window, chunks] :
       {std::pair{0, 7}, {1, 1}, {16, 1}, {17, 2}, {80, 2}, {81, 3}, {400, 7}, {401, 7}}) {
    begin_case("a window of %d positions", window);
    AttentionPlan plan;
    plan.build({4, 2, kDim, DType::kF32, 0.25f, cache.pool(), {window}}, batch.view(), 4);
    CHECK(plan.tasks() == 2 * chunks, "%d tasks, not %d for each of 2 heads",
          static_cast<int>(plan.tasks()), chunks);
  }
}

// Every token by the definition, in double precision.
void by_definition(int64_t start, int64_t tokens, int64_t window, int64_t sinks = 0) {
  begin_case("%d tokens from %d on, a window of %d, %d sinks", static_cast<int>(tokens),
             static_cast<int>(start), static_cast<int>(window), static_cast<int>(sinks));
  const Cache cache(1, 1);
  const Batch batch({start}, {tokens});
  const AttentionShape shape{1, 1, kDim, DType::kF32, 0.25f, cache.pool(), {window, sinks}};
  const Layers layers(shape, batch, 1);
  run_layers(layers, 1);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t position = start + t, first = std::max<int64_t>(0, position - window + 1);
    std::vector<double> out(kDim);
    double sum = 0;
    for (int64_t j = 0; j <= position; ++j) {
      if (j < first && j >= sinks) continue;
      double score = 0;
      for (int64_t i = 0; i < kDim; ++i) {
        score += 0.25 * layers.rows[0][at(t * kDim + i)] * cache.keys[at(j * kDim + i)];
      }
      sum += std::exp(score);
      for (int64_t i = 0; i < kDim; ++i) {
        out[at(i)] += std::exp(score) * cache.values[at(j * kDim + i)];
      }
    }
    for (int64_t i = 0; i < kDim; ++i) {
      const double found = layers.rows[1][at(t * kDim + i)], want = out[at(i)] / sum;
      CHECK(std::fabs(found - want) < 1e-5, "token %d: %g, not %g", static_cast<int>(t), found,
            want);
    }
  }
}

// Tokens that choose pages, on threads: those of the choice have come together before the others
// begin, as between the stages of a step. Every token gets what it gets alone.
void choices_equal_to_each_token(const engine::AttentionPolicy& policy, int64_t start,
                                 int64_t tokens, int64_t threads) {
  begin_case("%d tokens from %d on, %d threads", static_cast<int>(tokens), static_cast<int>(start),
             static_cast<int>(threads));
  constexpr int64_t kHeads = 4, kKvHeads = 2, kPages = kLength / kAttentionChunk;
  const KernelTable& kernels = *scalar::table();
  const Cache cache(1, kKvHeads);
  CachePool pool = cache.pool();
  std::vector<uint16_t> bounds(kPages * kKvHeads * 2 * kDim);
  const int64_t bytes = 2 * kDim * static_cast<int64_t>(sizeof(uint16_t));
  pool.bounds = {reinterpret_cast<char*>(bounds.data()), kPages * kKvHeads * bytes,
                 kKvHeads * bytes, bytes};
  std::vector<float> row(3 * kDim);
  for (int64_t i = 0; i < kPages * kKvHeads; ++i)
    engine::bound_page(kernels, pool, i / kKvHeads, i % kKvHeads, row.data());
  const AttentionShape shape{kHeads, kKvHeads, kDim, DType::kF32, 2.0f, pool, policy};
  std::vector<float> query(at(tokens * kHeads * kDim));
  Random random(11);
  for (float& x : query) x = random.unit();

  const auto attended = [&](int64_t first, int64_t count, int64_t slots) {
    const Batch batch({start + first}, {count});
    AttentionPlan plan;
    plan.build(shape, batch.view(), slots);
    std::vector<float> out(at(count * kHeads * kDim)), shared(at(plan.shared_floats()));
    std::vector<std::vector<float>> own(at(slots), std::vector<float>(at(plan.thread_floats())));
    plan.prepare(shared.data());
    const AttentionBuffers buffers{query.data() + first * kHeads * kDim, out.data(), pool};
    const auto each = [&](int64_t units, const auto& run) {
      std::atomic<int64_t> next{0};
      std::vector<std::thread> others;
      for (int64_t s = 0; s < slots; ++s) {
        others.emplace_back([&, s] {
          for (int64_t i = next++; i < units; i = next++) run(i, own[at(s)].data());
        });
      }
      for (std::thread& thread : others) thread.join();
    };
    CHECK(plan.choices() > 0, "no token chooses");
    each(plan.choices(), [&](int64_t i, float* mine) {
      plan.choose(kernels, buffers, i, i + 1, shared.data(), mine);
    });
    each(plan.tasks(), [&](int64_t i, float* mine) {
      plan.run(kernels, buffers, i, i + 1, shared.data(), mine);
    });
    return out;
  };
  const std::vector<float> together = attended(0, tokens, threads);
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<float> alone = attended(t, 1, 1);
    CHECK(std::memcmp(&together[at(t * kHeads * kDim)], alone.data(),
                      alone.size() * sizeof(float)) == 0,
          "token %d differs from what it is alone", static_cast<int>(t));
  }
}

TEST(choices) {
  for (const int64_t threads : {1, 2, 4}) {
    choices_equal_to_each_token({.min_ratio = 0.4f, .max_ratio = 0.4f}, 130, 250, threads);
    choices_equal_to_each_token({.sinks = 4, .threshold = 0.1f}, 250, 13, threads);
    choices_equal_to_each_token({.min_ratio = 0.2f, .max_ratio = 0.9f}, 390, 9, threads);
  }
}

TEST(equal_to_one_thread) {
  equal_to_one_thread({4, 2, {399}, {1}, Case::kSplit});
  equal_to_one_thread({4, 2, {397, 70}, {3, 3}, Case::kSplit});
  equal_to_one_thread(
      {4, 4, {399, 0, 63, 64, 127, 128, 200, 1, 300}, {1, 1, 1, 1, 1, 1, 1, 1, 1}, Case::kBoth});
  std::vector<int64_t> starts(20, 10), tokens(20, 1);
  equal_to_one_thread({4, 4, starts, tokens, Case::kWhole});
  starts[7] = 300, tokens[7] = 90, tokens[8] = 0;  // a prompt's chunk, and one with nothing to do
  equal_to_one_thread({4, 4, starts, tokens, Case::kBoth});
  equal_to_one_thread({4, 2, {399}, {1}, Case::kSplit, 100});
  equal_to_one_thread({4, 2, {397, 70}, {3, 3}, Case::kSplit, 150});
  equal_to_one_thread({4, 4, starts, tokens, Case::kBoth, 10});
  equal_to_one_thread({4, 4, starts, tokens, Case::kBoth, 70});
}

TEST(windows) {
  windows_cut_the_work();
  for (const int64_t window : {1, 2, 15, 63, 64, 65, 130, 399}) by_definition(0, 400, window);
  for (const int64_t window : {1, 63, 64, 65, 200}) by_definition(350, 50, window);
  for (const int64_t sinks : {1, 4, 64, 70, 130}) by_definition(0, 400, 50, sinks);
}

}  // namespace
}  // namespace bitnet::test
