// Tensors of a model program in plain memory, random and reproducible: for tests and benchmarks of
// programs without torch.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/head.h"
#include "engine/pack.h"
#include "engine/program/program.h"
#include "format/layout.h"
#include "tests/random.h"

namespace bitnet::test {

class PlainTensors final : public engine::TensorSource {
 public:
  explicit PlainTensors(const KernelTable& kernels, uint64_t seed = 9)
      : kernels_(kernels), random_(seed) {}

  Random& random() { return random_; }

  void add(const std::string& name, std::vector<float> values) {
    floats_[name] = std::move(values);
  }
  std::vector<float> some(int64_t n, float centre) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = centre + random_.unit();
    return values;
  }

  bool has(const std::string& name) const override { return floats_.contains(name); }

  // A projection is made when a program asks for it.
  engine::Weight linear(const std::string& name, int64_t rows, int64_t k,
                        engine::Projection& scaled) override {
    std::vector<int8_t>& codes = codes_[name];
    codes.resize(static_cast<size_t>(rows * k));
    for (int8_t& code : codes) code = static_cast<int8_t>(random_.next() % 3) - 1;
    std::vector<uint8_t> canonical(static_cast<size_t>(rows * layout::row_bytes_for(k)));
    engine::pack(codes.data(), rows, k, canonical.data());
    const int64_t lanes = kernels_.tile_lanes;
    engine::Weight w = engine::tile_weight(nullptr, engine::WeightFormat::kTwoBit, rows, k, lanes);
    std::vector<uint8_t>& tiles = weights_[name];
    tiles.resize(static_cast<size_t>(w.bytes()));
    engine::repack(canonical.data(), w, lanes, tiles.data());
    w.data = tiles.data();
    scaled = engine::make_projection(w, &kScale, 1, DType::kF32, nullptr);
    return w;
  }

  engine::Signs signs(const std::string& name, int64_t k) override {
    const auto found = blocks_.find(name);
    if (found == blocks_.end()) return {};
    std::vector<float>& values = floats_[name + ".signs"];
    if (values.empty()) values = some(k, 0.0f);
    for (float& value : values) value = value < 0 ? -1.0f : 1.0f;
    return {values.data(), found->second};
  }
  // Of a projection that a program has asked for.
  const uint8_t* columns(const std::string& name, int64_t rows, int64_t k) override {
    const std::vector<int8_t>& codes = codes_[name];
    std::vector<uint8_t>& lines = columns_[name];
    lines.assign(static_cast<size_t>(layout::column_panels(rows) * k * layout::kColumnBytes), 0x55);
    for (int64_t i = 0; i < rows * k; ++i) {
      const int64_t row = i / k, shift = row % layout::kColumnRows / layout::kColumnBytes * 2;
      const int64_t line = row / layout::kColumnRows * k + i % k;
      uint8_t& byte =
          lines[static_cast<size_t>(line * layout::kColumnBytes + row % layout::kColumnBytes)];
      const int code = codes[static_cast<size_t>(i)] + 1;
      byte = static_cast<uint8_t>((byte & ~(3 << shift)) | code << shift);
    }
    return lines.data();
  }
  // The input of `name` gets a Hadamard transform in blocks of that size.
  void rotate(const std::string& name, int64_t block) { blocks_[name] = block; }

  const float* matrix(const std::string& name, int64_t rows, int64_t n) override {
    std::vector<float>& values = floats_[name];
    if (values.empty()) values = some(rows * n, 0.0f);
    return values.data();
  }

  // Norms that are not given are random around 1.
  const float* floats(const std::string& name, int64_t n) override {
    std::vector<float>& values = floats_[name];
    if (values.empty()) values = some(n, 1.0f);
    return values.data();
  }

  engine::HeadView head(const std::string& name, int64_t rows, int64_t k) override {
    std::vector<float>& values = floats_[name];
    if (values.empty()) values = some(rows * k, 0.0f);
    return {engine::HeadFormat::kDense, DType::kF32, values.data(), nullptr, rows, k, 0, {2048}};
  }

  // The rank is the number at the end of `a`'s name.
  engine::LoraWeight factors(const std::string& a, const std::string& b, int64_t rows,
                             int64_t k) override {
    const int64_t rank = std::stoll(a.substr(a.find_last_not_of("0123456789") + 1));
    if (floats_[a].empty()) floats_[a] = some(rank * k, 0.0f);
    if (floats_[b].empty())
      floats_[b] = some(engine::lora_tiles(rows) * engine::kLoraTileRows * rank, 0.0f);
    return {DType::kF32, floats_[a].data(), floats_[b].data(), rank, 0.0f};
  }

 private:
  static constexpr float kScale = 0.05f;

  const KernelTable& kernels_;
  Random random_;
  std::map<std::string, std::vector<float>> floats_;
  std::map<std::string, std::vector<uint8_t>> weights_, columns_;
  std::map<std::string, std::vector<int8_t>> codes_;
  std::map<std::string, int64_t> blocks_;
};

}  // namespace bitnet::test
