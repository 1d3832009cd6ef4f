// Views of ternary weights and the product of a range of units; see weights.h. Which kernel of the
// table a product takes is decided here, by layout and number of tokens. Must not know activations'
// types, scales or threads.
#include "ops/weights.h"

#include "format/layout.h"
#include "runtime/tuning.h"

namespace bitnet::ops {
namespace {

constexpr int64_t kCanonicalUnitRows = 16;
constexpr int64_t kMostRows = int64_t{1} << 40;

Weight canonical_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                      std::optional<int64_t> out_features) {
  check.packed_for(t, argument, k);
  const int64_t n = t.size(0);
  if (out_features.has_value() && *out_features != n)
    check.fail("out_features", "the " + std::to_string(n) + " rows of " + argument + ", or nothing",
               std::to_string(*out_features));
  return {static_cast<const uint8_t*>(t.const_data_ptr()),
          WeightFormat::kCanonical,
          n,
          k,
          kCanonicalUnitRows,
          (n + kCanonicalUnitRows - 1) / kCanonicalUnitRows,
          kCanonicalUnitRows * t.size(1),
          0};
}

Weight tile_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                 std::optional<int64_t> out_features) {
  const bool trits = t.dim() == 4;
  const int64_t lanes = kernels().tile_lanes, lines = layout::tile_lines(k);
  const int64_t fields = trits ? layout::kTritFields : layout::kTwoBitFields;
  check.dtype(t, argument, ScalarType::Byte);
  check.contiguous(t, argument);
  if (!(k >= 1 && k <= layout::kTileMaxK))
    check.fail(argument, "for 1 to 32768 input features in a private layout", std::to_string(k));
  if (!out_features.has_value())
    check.fail("out_features", std::string("given, for ") + argument + " is in a private layout",
               "None");
  const int64_t n = *out_features;
  if (n < 0 || n > kMostRows)  // before it is rounded up to whole tiles
    check.fail("out_features", "from 0 to " + std::to_string(kMostRows), std::to_string(n));
  Shape expected{layout::tiles_for(n, lanes, fields), lines, lanes * layout::kTileStepK};
  if (trits) expected = {expected[0], lines, lanes, layout::kTileStepK};
  if (shape_of(t) != expected)
    check.fail(argument,
               "of shape " + shape_text(expected) + " (" + std::to_string(n) + " x " +
                   std::to_string(k) + " prepacked for " + kernels().name +
                   "; prepack again after changing the instruction set)",
               shape_text(shape_of(t)));
  return {static_cast<const uint8_t*>(t.const_data_ptr()),
          trits ? WeightFormat::kTrits : WeightFormat::kTwoBit,
          n,
          k,
          lanes * fields,
          expected[0],
          lines * lanes * layout::kTileStepK,
          lines};
}

}  // namespace

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

void multiply_units(const KernelTable& table, const Weight& weight, int64_t unit_begin,
                    int64_t unit_end, const int8_t* x, int64_t x_stride, const int32_t* x_sum,
                    int64_t tokens, int32_t* out, int64_t out_stride) {
  if (weight.format != WeightFormat::kCanonical) {
    const TileJob job{weight.data + unit_begin * weight.unit_bytes,
                      weight.lines,
                      unit_end - unit_begin,
                      x,
                      x_stride,
                      x_sum,
                      tokens,
                      out,
                      out_stride,
                      tuning().prefetch_bytes};
    (weight.format == WeightFormat::kTwoBit ? table.tile_gemm : table.trit_tile_gemm)(job);
    return;
  }
  const int64_t row_bytes = layout::row_bytes_for(weight.k);
  table.ternary_gemm(weight.data, row_bytes, unit_begin * weight.unit_rows,
                     std::min(unit_end * weight.unit_rows, weight.n_rows), x, x_stride, x_sum,
                     tokens, out, out_stride, tuning().prefetch_bytes);
}

}  // namespace bitnet::ops
