// A whole model step on plain threads: the same logits and caches, bit for bit, for every number of
// threads, for prompts, drafts and single tokens. Built with BITNET_SANITIZE=thread it proves that
// the stages hand their memory over.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine/model_step.h"
#include "engine/pack.h"
#include "format/layout.h"
#include "tests/check.h"
#include "tests/random.h"
#include "tests/tables.h"
#include "tests/threads.h"

namespace bitnet::test {
namespace {

using engine::kLayerWeights;
using engine::StepLayer;
using engine::StepModel;
using engine::StepState;

constexpr int64_t kLayers = 2, kVocab = 70, kCapacity = 60;

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

std::vector<float> random_floats(Random& random, int64_t n, float centre) {
  std::vector<float> values(at(n));
  for (float& v : values) v = centre + random.unit();
  return values;
}

// A random model over `table`, and a pool with the blocks of its two sequences, of which the first
// has `per_sequence` new tokens and the second one.
struct Model {
  StepModel m{};
  std::vector<std::vector<uint8_t>> packed;
  std::vector<StepLayer> layers;
  std::vector<float> frequencies, scales, norms, head, keys, values, factors;
  std::vector<engine::SidePath> side_paths;
  std::vector<int64_t> adapters, dropped;
  std::vector<int64_t> query_start, lengths, blocks, positions, slots, logit_rows;

  // kept: of how many last tokens of the first sequence the logits are wanted, with those of the
  // second one's. wide: of the shape at which products are cut for many threads, with few rows and
  // many columns.
  Model(const KernelTable& table, int64_t per_sequence, int64_t kept, int64_t block_size,
        bool extras, bool wide = false) {
    m.table = &table;
    m.tokens = per_sequence + 1;
    m.hidden = wide ? 256 : 192;
    m.heads = wide ? 8 : 6;
    m.kv_heads = 2;
    m.dim = 32;
    m.intermediate = wide ? 1056 : 456;
    if (extras) drop_neurons();
    m.n_layers = kLayers;
    m.type = DType::kBF16;
    m.activation = table.relu2_mul_row;
    m.eps = m.sub_eps = 1e-5f;
    for (int64_t i = 0; i < m.dim / 2; ++i) {
      frequencies.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / 32.0f));
    }
    m.rope = {frequencies.data(), 1.25f};
    m.attention_scale = 0.177f;
    cut(per_sequence, kept, block_size);
    Random random(9);
    scales.assign(at(kLayers * kLayerWeights), 0.05f);
    norms = random_floats(random, wide ? 1100 : 1000, 1.0f);
    head = random_floats(random, kVocab * m.hidden, 0.0f);
    m.head = {
        engine::HeadFormat::kDense, DType::kF32, head.data(), nullptr, kVocab, m.hidden, 0, {2048}};
    m.final_norm = norms.data();
    const int64_t cache = at_most_blocks(block_size) * block_size * m.kv_heads * m.dim;
    keys.assign(at(kLayers * cache), 0.25f);
    values.assign(at(kLayers * cache), 0.5f);
    packed.reserve(at(kLayers * kLayerWeights));
    for (int64_t i = 0; i < kLayers; ++i) {
      StepLayer layer{};
      for (int64_t w = 0; w < kLayerWeights; ++w) {
        layer.scales[w] = scales.data() + i * kLayerWeights + w;
      }
      layer.attention_norm = layer.mlp_norm = norms.data();
      layer.out_norm = layer.down_norm = norms.data() + 1;
      layer.out_post_norm = layer.down_post_norm = norms.data() + 3;
      layer.dropped = dropped.data() + i * m.dropped;
      layer.pool.block_size = block_size;
      layer.pool.dim = m.dim;
      layer.pool.keys = rows_of(keys.data() + i * cache, block_size);
      layer.pool.values = rows_of(values.data() + i * cache, block_size);
      for (int w = 0; w < kLayerWeights; ++w) layer.weights[w] = weight(random, w);
      layers.push_back(layer);
    }
    m.layers = layers.data();
    if (!extras) return;
    add_adapters(random);
    add_inner_norms();
    m.post_norms = true;
    m.local_rope = {norms.data(), 1.0f};
    layers[1].local_rope = true;
    layers[1].window = 7;
  }

  // Two adapters of the ranks 3 and 20 beside some projections: the first sequence has the second
  // of them, the other one the first.
  void add_adapters(Random& random) {
    m.adapters = 2;
    factors = random_floats(random, 40 * (m.intermediate + 16), 0.0f);
    side_paths.resize(at(kLayers * kLayerWeights * 2));
    for (int64_t i = 0; i < kLayers * kLayerWeights; ++i) {
      side_paths[at(2 * i)] = {DType::kF32, factors.data(), factors.data() + i,
                               i % 3 == 0 ? int64_t{3} : 0, 0.02f};
      side_paths[at(2 * i + 1)] = {DType::kF32, factors.data() + i, factors.data(),
                                   i % 4 == 1 ? 0 : int64_t{20}, 0.01f};
    }
    adapters.assign(at(m.tokens), 1);
    adapters.back() = 0;
    m.side_paths = side_paths.data();
    m.token_adapters = adapters.data();
  }

  // The first, the last, two neighbours, and others in the second layer.
  void drop_neurons() {
    dropped = {0, 17, 18, 459, 5, 100, 101, 458};
    m.dropped = 4;
  }

  void add_inner_norms() {
    m.inner_norms = true;
    m.inner_eps = 1e-6f;
    for (StepLayer& layer : layers) {
      for (int w = 0; w < kLayerWeights; ++w) layer.inner_norms[w] = norms.data() + 2 * w;
    }
  }

  static int64_t at_most_blocks(int64_t block_size) { return 2 * (kCapacity / block_size + 1); }

  // [blocks, kv_heads, block_size, dim]
  engine::PoolView rows_of(float* memory, int64_t block_size) const {
    const int64_t row = m.dim * static_cast<int64_t>(sizeof(float));
    return {reinterpret_cast<char*>(memory), m.kv_heads * block_size * row, row, block_size * row};
  }

  // The sequences' blocks alternate, from the last one down.
  void cut(int64_t per_sequence, int64_t kept, int64_t block_size) {
    const int64_t starts[2] = {5, 3}, tokens[2] = {per_sequence, 1};
    const int64_t columns = at_most_blocks(block_size) / 2;
    for (int64_t i = 0; i < 2 * columns; ++i) {
      blocks.push_back(2 * columns - 1 - (i % columns * 2 + i / columns));
    }
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
    m.sequences = {2, query_start.data(), lengths.data(), blocks.data(), columns};
    m.positions = positions.data();
    m.slots = slots.data();
    m.logit_rows = logit_rows.data();
    m.head_tokens = static_cast<int64_t>(logit_rows.size());
  }

  engine::Weight weight(Random& random, int which) {
    const auto [n, k] = engine::weight_size(m, which);
    std::vector<int8_t> codes(at(n * k));
    for (int8_t& code : codes) code = static_cast<int8_t>(random.next() % 3) - 1;
    std::vector<uint8_t> canonical(at(n * layout::row_bytes_for(k)));
    engine::pack(codes.data(), n, k, canonical.data());
    const int64_t lanes = m.table->tile_lanes;
    engine::Weight w = engine::tile_weight(nullptr, engine::WeightFormat::kTwoBit, n, k, lanes);
    std::vector<uint8_t>& tiles = packed.emplace_back(at(w.bytes()));
    w.data = tiles.data();
    engine::repack(canonical.data(), w, lanes, tiles.data());
    return w;
  }

  std::vector<float> step(StepState& state) {
    Random random(21);
    const std::vector<float> x = random_floats(random, m.tokens * m.hidden, 0.0f);
    std::vector<float> logits(at(m.head_tokens * kVocab), -1.0f);
    engine::run_step(state, m, x.data(), logits.data());
    return logits;
  }
};

bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

#ifdef __SANITIZE_THREAD__
// Every access costs ten times as much here: prompts as long as all threads have work, and no run
// on one thread.
constexpr int64_t kLongPrompt = 21, kShortPrompt = 18, kFewestThreads = 2;
constexpr int64_t kMostThreads = 12;
#else
constexpr int64_t kLongPrompt = 45, kShortPrompt = 40, kFewestThreads = 1;
constexpr int64_t kMostThreads = 64;
#endif

// extras: adapters, norms inside and behind projections, dropped neurons, two ropes, a window.
void same_on_every_number_of_threads(const KernelTable& table, int64_t tokens, int64_t kept,
                                     bool extras) {
  StepState state;
  pool_threads = 1;
  Model alone(scalar_table(), tokens, kept, kCapacity, extras);
  const std::vector<float> expected = alone.step(state);
  float largest = 0;
  for (const float v : expected) largest = v > largest ? v : largest;
  CHECK(largest > 0.1f, "the logits say nothing");
  for (const int64_t block_size : {kCapacity, int64_t{16}, int64_t{1}}) {
    for (const int64_t threads : {1, 2, 3, 5}) {
      if (threads < kFewestThreads) continue;
      begin_case("%s, %d tokens, blocks of %d, %d threads%s", table.name, static_cast<int>(tokens),
                 static_cast<int>(block_size), static_cast<int>(threads),
                 extras ? ", adapters" : "");
      pool_threads = threads;
      Model model(table, tokens, kept, block_size, extras);
      CHECK(equal(model.step(state), expected), "other logits");
      if (block_size != kCapacity) continue;
      CHECK(equal(model.keys, alone.keys) && equal(model.values, alone.values), "other caches");
    }
  }
  pool_threads = 1;
}

// More threads than CPUs, so that a thread may lose its CPU anywhere: parts of K are added up by
// whoever comes last.
void wide_products_on_many_threads(const KernelTable& table, int64_t tokens) {
  StepState state;
  pool_threads = 1;
  const std::vector<float> expected =
      Model(scalar_table(), tokens, 1, kCapacity, false, true).step(state);
  Model model(table, tokens, 1, kCapacity, false, true);
  bool parts = false;
  for (const int64_t threads : {6, 12, 64}) {
    if (threads > kMostThreads) continue;
    begin_case("%s, wide, %d tokens, %d threads", table.name, static_cast<int>(tokens),
               static_cast<int>(threads));
    pool_threads = threads;
    for (int64_t i = 0; i < (thinning(table) == 1 ? 3 : 1); ++i)
      CHECK(equal(model.step(state), expected), "other logits");
    parts = parts || state.cuts.sums != 0;
  }
  CHECK(parts || table.tile_lanes < 8, "K was never cut");
  pool_threads = 1;
}

}  // namespace
}  // namespace bitnet::test

int main() {
  using namespace bitnet::test;
  announce("test_engine_step");
  // more threads than CPUs gain nothing, and those that rest prove nothing
  setenv("BITNET_OPS_REST", "0", 1);
  use_plain_threads();
  for (const bitnet::KernelTable* table : tables_under_test()) {
    for (const bool extras : {false, true}) {
      same_on_every_number_of_threads(*table, 1, 1, extras);
      same_on_every_number_of_threads(*table, 4, 4, extras);
      same_on_every_number_of_threads(*table, kLongPrompt, 2, extras);
      same_on_every_number_of_threads(*table, kShortPrompt, 1, extras);
    }
    wide_products_on_many_threads(*table, 31);
  }
  return finish("test_engine_step");
}
