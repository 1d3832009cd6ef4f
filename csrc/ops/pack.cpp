// pack, unpack, quantize_weights, repack, unrepack: checks and results; engine/pack.h does the
// rest.
#include "engine/pack.h"

#include "engine/quantized_tokens.h"
#include "format/layout.h"
#include "ops/checks.h"
#include "ops/register.h"
#include "ops/weight_view.h"

namespace bitnet::ops {

using engine::Weight;
using engine::WeightFormat;

namespace {

// The CPU-specific layout that is called `name`.
WeightFormat cpu_specific_format(const Check& check, const std::string& name) {
  std::string names;
  for (const WeightFormat format : layout::kWeightFormats) {
    const layout::WeightLayout& layout = layout::layout_of(format);
    if (!layout.cpu_specific) continue;
    if (name == layout.name) return format;
    names += std::string(names.empty() ? "'" : " or '") + layout.name + "'";
  }
  check.fail("format", names, "'" + name + "'");
}

}  // namespace

Tensor pack(const Tensor& codes_in) {
  const Check check("pack");
  check.dtype(codes_in, "codes", ScalarType::Char);
  check.dim(codes_in, "codes", 2);
  if (codes_in.size(1) < 1) check.fail("codes", "with at least one input feature (columns)", "0");
  const Tensor codes = as_contiguous(codes_in);
  const int64_t n = codes.size(0), k = codes.size(1);
  Tensor packed = empty({n, layout::row_bytes_for(k)}, ScalarType::Byte);
  const int64_t bad = engine::pack(data<int8_t>(codes), n, k, mutable_data<uint8_t>(packed));
  if (bad >= 0)
    check.fail("codes", "to hold only -1, 0 and 1", "another value in row " + std::to_string(bad));
  return packed;
}

Tensor unpack(const Tensor& weight, int64_t in_features) {
  const Check check("unpack");
  check.packed_for(weight, "weight", in_features);
  const int64_t n = weight.size(0);
  Tensor codes = empty({n, in_features}, ScalarType::Char);
  const int64_t bad =
      engine::unpack(data<uint8_t>(weight), n, in_features, mutable_data<int8_t>(codes));
  if (bad >= 0)
    check.fail("weight", "with codes 0, 1, 2 only and padding codes 1",
               "a code 3 or a wrong padding code in row " + std::to_string(bad));
  return codes;
}

std::tuple<Tensor, Tensor> quantize_weights(const Tensor& weight_in) {
  const Check check("quantize_weights");
  check.float_dtype(weight_in, "weight");
  check.dim(weight_in, "weight", 2);
  if (!(weight_in.numel() > 0))
    check.fail("weight", "with at least one element", "shape " + shape_text(shape_of(weight_in)));
  const Tensor weight = as_contiguous(weight_in);
  Tensor codes = empty(shape_of(weight), ScalarType::Char);
  Tensor scale = empty({1}, ScalarType::Float);
  if (!engine::quantize_weights(rows_view(weight), mutable_data<int8_t>(codes),
                                mutable_data<float>(scale)))
    check.fail("weight", "with finite values", "NaN or infinity");
  return {std::move(codes), std::move(scale)};
}

Tensor repack(const Tensor& weight, int64_t in_features, std::string format, int64_t group_size) {
  const Check check("repack");
  const WeightFormat to = cpu_specific_format(check, format);
  check.packed_for(weight, "weight", in_features);
  if (group_size != 0 && group_size != engine::kSmallGroup && group_size != engine::kGroupWeights)
    check.fail("group_size", "0, 64 or 128", std::to_string(group_size));
  check_tile_columns(check, "in_features", in_features, group_size != 0);
  const int64_t lanes = active_kernels().tile_lanes;
  Tensor out = empty(tile_shape(to, weight.size(0), in_features, lanes), ScalarType::Byte);
  auto* tiles = mutable_data<uint8_t>(out);
  const Weight view = engine::tile_weight(tiles, to, weight.size(0), in_features, lanes);
  if (!engine::repack(data<uint8_t>(weight), view, lanes, tiles))
    check.fail("weight", "with codes 0, 1, 2 only", "a code 3");
  return out;
}

Tensor unrepack(const Tensor& weight, std::vector<int64_t> shape) {
  const Check check("unrepack");
  if (shape.empty()) check.fail("shape", "with 2 elements", "0");
  check_sizes(check, shape, 2);
  const int64_t n = shape[0], k = shape[1];
  const Weight from = weight_view(check, weight, "weight", k, n);
  if (from.format == WeightFormat::kCanonical)
    check.fail("weight", "in a CPU-specific layout (3 or 4 dimensions)",
               shape_text(shape_of(weight)));
  Tensor out = empty({n, layout::row_bytes_for(k)}, ScalarType::Byte);
  if (!engine::restore(from, active_kernels().tile_lanes, mutable_data<uint8_t>(out)))
    check.fail("weight", "with codes 0, 1, 2 only", "a code 3");
  return out;
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, pack);
  BITNET_OP(m, unpack);
  BITNET_OP(m, repack);
  BITNET_OP(m, unrepack);
  BITNET_OP(m, quantize_weights);
}

}  // namespace bitnet::ops
