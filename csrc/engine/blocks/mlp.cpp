// The block `mlp`: norm, gate and up, the gated product, down.
//
//   norm gate up down      names: the norm before, the projections
//   width                  neurons: rows of gate and up, columns of down
//   activation             relu2, silu or gelu_pytorch_tanh
//   sub_norm               norm before down
//   post_norm              norm of what is added to the residual
//   activation_format      what projections with scales of groups multiply by
//   sparsity, threshold, top_k, min_ratio, max_ratio
//                          of the input of down: engine/sparsity.h
#include <algorithm>

#include "engine/blocks/blocks.h"
#include "engine/program/products.h"

namespace bitnet::engine {
namespace {

class MlpBlock final : public Block {
 public:
  explicit MlpBlock(Binding& b);
  void append(PlanBuilder& plan) const override;
  int64_t weights() const override { return 3 * width_ * gate_.k; }
  int64_t product_stages() const override { return 2; }
  std::unique_ptr<BlockState> make_state() const override {
    return down_.columns == nullptr ? nullptr : std::make_unique<ZeroCounts>();
  }

 private:
  int64_t width_;
  Norm norm_, sub_norm_, post_norm_;
  Linear gate_, up_, down_;
  GatedRow activation_;
  ActivationFormat format_, down_format_;
  ActivationSparsity sparsity_;
};

MlpBlock::MlpBlock(Binding& b) {
  const Settings& s = b.settings;
  width_ = b.keys.integer("width", 1, kMaxFeatures);
  const std::string activation = b.keys.word("activation");
  activation_ = gated_row(b.program.kernels(), activation);
  if (activation_ == nullptr)
    b.keys.fail("activation", "relu2, silu or gelu_pytorch_tanh", activation);
  norm_ = b.norm("norm", s.hidden, s.eps);
  b.linear("gate", width_, s.hidden, gate_);
  b.linear("up", width_, s.hidden, up_);
  b.linear("down", s.hidden, width_, down_);
  sub_norm_ = b.optional_norm("sub_norm", width_, s.sub_eps);
  post_norm_ = b.optional_norm("post_norm", s.hidden, s.eps);
  format_ = b.input_of({&gate_, &up_});
  down_format_ = b.input_of({&down_});
  sparsity_ = b.sparsity(down_);
}

// activation(gate) * up of a token, which the norm before down rounds.
class Activated final : public RowSource {
 public:
  Activated(const Step& step, GatedRow activation, int64_t width, const Norm& norm,
            const void* gate, const void* up)
      : step_(step), activation_(activation), width_(width), norm_(norm), gate_(gate), up_(up) {}

  NormJob job(int64_t j, float* row) const override {
    const DType type = step_.settings().type;
    activate(type, j, row);
    return {row, width_, type, norm_.weight, norm_.eps, row};
  }
  // relu2 of bfloat16 is a part of the norm's first pass.
  NormJob codes_job(int64_t j, float* row) const override {
    const DType type = step_.settings().type;
    if (type != DType::kBF16 || activation_ != step_.kernels->relu2_mul_row)
      return RowSource::codes_job(j, row);
    const auto at = [&](const void* buffer) {
      return offset_bytes(buffer, j * width_ * element_size(type));
    };
    return {nullptr, width_, type, norm_.weight, norm_.eps, row, true, at(gate_), at(up_)};
  }

 private:
  // In pieces that stay in the first-level cache from loading to the product.
  void activate(DType type, int64_t j, float* row) const {
    constexpr int64_t kPiece = 512;
    const KernelTable& kernels = *step_.kernels;
    if (type == DType::kF32) {  // nothing to load or round
      const auto at = [&](const void* buffer) {
        return static_cast<const float*>(buffer) + j * width_;
      };
      return activation_(at(gate_), at(up_), width_, row);
    }
    alignas(64) float gate[kPiece], up[kPiece];
    for (int64_t i = 0; i < width_; i += kPiece) {
      const int64_t from = j * width_ + i, n = std::min(kPiece, width_ - i);
      load_values(kernels, type, gate_, from, n, gate);
      load_values(kernels, type, up_, from, n, up);
      activation_(gate, up, n, row + i);
    }
  }

  const Step& step_;
  GatedRow activation_;
  int64_t width_;
  Norm norm_;
  const void *gate_, *up_;
};

void MlpBlock::append(PlanBuilder& plan) const {
  const Step& step = plan.step();
  const Settings& s = plan.settings();
  const int64_t count = plan.rows().count;
  void *gate = plan.activations(count * width_), *up = plan.activations(count * width_);
  const auto* input = plan.make<NormedRows>(plan.rows().residual, s.hidden, norm_, s.type);
  append_products(plan, {"norm gate/up", "gate/up", "expand gate/up"}, input, format_,
                  {{&gate_, gate}, {&up_, up}});
  const auto* activated = plan.make<Activated>(step, activation_, width_, sub_norm_, gate, up);
  append_added(plan, {"norm down", "down", "expand down"}, "post down", activated, down_format_,
               down_, post_norm_, &sparsity_, plan.state<ZeroCounts>());
}

}  // namespace

std::unique_ptr<Block> make_mlp(Binding& binding) { return std::make_unique<MlpBlock>(binding); }

}  // namespace bitnet::engine
