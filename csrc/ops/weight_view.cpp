// Checks of ternary weights; see weight_view.h.
#include "ops/weight_view.h"

#include "format/layout.h"

namespace bitnet::ops {
namespace {

using engine::Weight;
using engine::WeightFormat;

constexpr int64_t kMaxRows = int64_t{1} << 40;

Weight canonical_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                      std::optional<int64_t> rows) {
  check.packed_for(t, argument, k);
  const int64_t n = t.size(0);
  if (rows.value_or(n) != n)
    check.fail("shape", "with the " + std::to_string(n) + " rows of " + argument + ", or empty",
               std::to_string(*rows));
  return engine::canonical_weight(t.const_data_ptr(), n, k);
}

Weight tile_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                 std::optional<int64_t> rows) {
  check.dtype(t, argument, ScalarType::Byte);
  check.contiguous(t, argument);
  if (k < 1) check.fail(argument, "for at least 1 input feature", std::to_string(k));
  check_tile_columns(check, argument, k, true);  // as long as nobody has looked at its scales
  if (!rows.has_value())
    check.fail("shape", std::string("given, for ") + argument + " is in a CPU-specific layout",
               "none");
  const int64_t n = *rows, lanes = active_kernels().tile_lanes;
  if (n < 0 || n > kMaxRows)  // before it is rounded up to whole tiles
    check.fail(argument, "with 0 to " + std::to_string(kMaxRows) + " rows", std::to_string(n));
  const WeightFormat format = t.dim() == 4 ? WeightFormat::kBase3 : WeightFormat::kTwoBit;
  const layout::TensorShape expected = layout::layout_of(format).shape(n, k, lanes);
  if (!has_shape(t, {expected.size, static_cast<size_t>(expected.dimensions)}))
    check.fail(argument,
               "of shape " + shape_text(tile_shape(format, n, k, lanes)) + " (" +
                   std::to_string(n) + " x " + std::to_string(k) + " repacked for " +
                   active_kernels().name + "; repack again after changing the instruction set)",
               shape_text(shape_of(t)));
  return engine::tile_weight(t.const_data_ptr(), format, n, k, lanes);
}

}  // namespace

Shape tile_shape(WeightFormat format, int64_t n, int64_t k, int64_t lanes) {
  const layout::TensorShape shape = layout::layout_of(format).shape(n, k, lanes);
  return {shape.size, shape.size + shape.dimensions};
}

Weight weight_view(const Check& check, const Tensor& t, const char* argument, int64_t k,
                   std::optional<int64_t> rows) {
  const bool tiles = t.dim() == 3 || t.dim() == 4;
  return (tiles ? tile_view : canonical_view)(check, t, argument, k, rows);
}

void check_tile_columns(const Check& check, const char* argument, int64_t k, bool grouped) {
  const int64_t most = grouped ? layout::kGroupedTileMaxK : layout::kTileMaxK;
  if (k > most)
    check.fail(argument,
               "at most " + std::to_string(most) + " input features in a CPU-specific layout " +
                   (grouped ? "with" : "without") + " scales of groups; use the canonical one",
               std::to_string(k));
}

void check_sizes(const Check& check, const std::vector<int64_t>& shape, size_t count) {
  if (shape.empty()) return;
  if (shape.size() != count)
    check.fail("shape", "empty or with " + std::to_string(count) + " elements",
               std::to_string(shape.size()));
  for (const int64_t size : shape) {
    if (size < 0 || size > kMaxRows)  // before it is rounded up to whole tiles
      check.fail("shape", "of sizes from 0 to " + std::to_string(kMaxRows), std::to_string(size));
  }
}

Weight weight_view(const Check& check, const Tensor& t, const char* argument, int64_t x_features,
                   const MatrixShape& stated) {
  check.in_features(stated.columns, x_features);
  return weight_view(check, t, argument, x_features, stated.rows);
}

}  // namespace bitnet::ops
