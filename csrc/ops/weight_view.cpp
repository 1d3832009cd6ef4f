// Checks of ternary weights; see weight_view.h.
#include "ops/weight_view.h"

#include "format/layout.h"

namespace bitnet::ops {
namespace {

using engine::Weight;
using engine::WeightFormat;

constexpr int64_t kMostRows = int64_t{1} << 40;

Weight canonical_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                      std::optional<int64_t> out_features) {
  check.packed_for(t, argument, k);
  const int64_t n = t.size(0);
  if (out_features.has_value() && *out_features != n)
    check.fail("out_features", "the " + std::to_string(n) + " rows of " + argument + ", or nothing",
               std::to_string(*out_features));
  return engine::canonical_weight(t.const_data_ptr(), n, k);
}

Weight tile_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                 std::optional<int64_t> out_features) {
  check.dtype(t, argument, ScalarType::Byte);
  check.contiguous(t, argument);
  if (!(k >= 1 && k <= layout::kTileMaxK))
    check.fail(argument, "for 1 to 32768 input features in a CPU-specific layout",
               std::to_string(k));
  if (!out_features.has_value())
    check.fail("out_features",
               std::string("given, for ") + argument + " is in a CPU-specific layout", "None");
  const int64_t n = *out_features, lanes = kernels().tile_lanes;
  if (n < 0 || n > kMostRows)  // before it is rounded up to whole tiles
    check.fail("out_features", "from 0 to " + std::to_string(kMostRows), std::to_string(n));
  const WeightFormat format = t.dim() == 4 ? WeightFormat::kBase3 : WeightFormat::kTwoBit;
  const layout::TensorShape expected = layout::layout_of(format).shape(n, k, lanes);
  if (!has_shape(t, {expected.size, static_cast<size_t>(expected.dimensions)}))
    check.fail(argument,
               "of shape " + shape_text(tile_shape(format, n, k, lanes)) + " (" +
                   std::to_string(n) + " x " + std::to_string(k) + " repacked for " +
                   kernels().name + "; repack again after changing the instruction set)",
               shape_text(shape_of(t)));
  return engine::tile_weight(t.const_data_ptr(), format, n, k, lanes);
}

}  // namespace

Shape tile_shape(WeightFormat format, int64_t n, int64_t k, int64_t lanes) {
  const layout::TensorShape shape = layout::layout_of(format).shape(n, k, lanes);
  return {shape.size, shape.size + shape.dimensions};
}

Weight weight_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                   std::optional<int64_t> out_features) {
  const bool tiles = t.dim() == 3 || t.dim() == 4;
  return (tiles ? tile_view : canonical_view)(check, t, argument, k, out_features);
}

Weight weight_view_at(const Check& check, const Tensor& t, const char* argument, int64_t k,
                      const std::vector<int64_t>& out_features, size_t index) {
  if (out_features.empty()) return weight_view(check, t, argument, k);
  return weight_view(check, t, argument, k, out_features[index]);
}

}  // namespace bitnet::ops
