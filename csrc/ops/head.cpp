// quantize_head, lm_head, embedding: checks, memory, rows and tokens
// shared out over threads. The products are head_core.h's; must not
// know how codes lie in memory beyond their shapes.
#include <sys/mman.h>

#include <atomic>

#include "ops/checks.h"
#include "ops/head_view.h"
#include "ops/ops.h"
#include "runtime/tuning.h"

namespace bitnet::ops {
namespace {

std::string text(int64_t n) { return std::to_string(n); }

void check_in_features(const Check& check, int64_t k) {
  if (k < 1 || k > layout::kHeadMaxK)
    check.fail("weight", "with 1 to " + text(layout::kHeadMaxK) + " features for a quantised head",
               text(k));
}

// A head of float32, bfloat16 or float16 rows.
HeadView dense_view(const Check& check, const Tensor& weight, const std::optional<Tensor>& scale,
                    int64_t k) {
  check.float_dtype(weight, "weight");
  check.dim(weight, "weight", 2);
  check.contiguous(weight, "weight");
  if (scale.has_value())
    check.fail("scale", "left out for a float weight",
               "a tensor of " + shape_text(shape_of(*scale)));
  check.shape(weight, "weight", {weight.size(0), k < 0 ? weight.size(1) : k});
  return {HeadFormat::kDense,
          dtype_of(weight),
          weight.const_data_ptr(),
          nullptr,
          weight.size(0),
          weight.size(1),
          0,
          tuning().prefetch_bytes};
}

const Tensor& required_scale(const Check& check, const std::optional<Tensor>& scale) {
  if (!scale.has_value())
    check.fail("scale", "with a quantised weight (quantize_head returns both)", "none");
  check.contiguous(*scale, "scale");
  return *scale;
}

HeadView int8_view(const Check& check, const Tensor& weight, const std::optional<Tensor>& scale,
                   int64_t k) {
  check.dtype(weight, "weight", ScalarType::Char);
  check.dim(weight, "weight", 2);
  check.contiguous(weight, "weight");
  check.shape(weight, "weight", {weight.size(0), k < 0 ? weight.size(1) : k});
  check_in_features(check, weight.size(1));
  const Tensor& scales = required_scale(check, scale);
  check.dtype(scales, "scale", ScalarType::Float);
  check.shape(scales, "scale", {weight.size(0)});
  return {HeadFormat::kInt8,
          DType::kF32,
          weight.const_data_ptr(),
          scales.const_data_ptr(),
          weight.size(0),
          weight.size(1),
          0,
          tuning().prefetch_bytes};
}

// The group size follows from the shapes: lines = groups * group / 8.
HeadView int4_view(const Check& check, const Tensor& weight, const std::optional<Tensor>& scale,
                   int64_t k, std::optional<int64_t> rows_in) {
  check.dtype(weight, "weight", ScalarType::Byte);
  check.dim(weight, "weight", 3);
  check.contiguous(weight, "weight");
  const Tensor& scales = required_scale(check, scale);
  check.dtype(scales, "scale", ScalarType::BFloat16);
  check.dim(scales, "scale", 3);
  const int64_t tiles = weight.size(0), lines = weight.size(1), groups = scales.size(1);
  check.shape(weight, "weight", {tiles, lines, layout::kHeadLineBytes});
  check.shape(scales, "scale", {tiles, groups, layout::kHeadTileRows});
  const int64_t group = groups == 0 ? 0 : lines * layout::kHeadLineFeatures / groups;
  if ((group != 64 && group != 128) || group * groups != lines * layout::kHeadLineFeatures)
    check.fail("scale", "with one group per 8 or 16 of the weight's " + text(lines) + " lines",
               text(groups) + " groups");
  if (k < 0) k = lines * layout::kHeadLineFeatures;
  check_in_features(check, k);
  if ((k + group - 1) / group != groups)
    check.fail("weight",
               "with " + text((k + group - 1) / group) + " groups of " + text(group) +
                   " features for " + text(k) + " features",
               text(groups));
  const int64_t rows = rows_in.value_or(tiles * layout::kHeadTileRows);
  const int64_t padded = tiles * layout::kHeadTileRows;
  if (rows < 0 || rows > padded || rows <= padded - layout::kHeadTileRows)
    check.fail("out_features", "to fill " + text(tiles) + " tiles of 16 rows", text(rows));
  return {HeadFormat::kInt4,
          DType::kF32,
          weight.const_data_ptr(),
          scales.const_data_ptr(),
          rows,
          k,
          group,
          tuning().prefetch_bytes};
}

}  // namespace

HeadView head_view(const Check& check, const Tensor& weight, const std::optional<Tensor>& scale,
                   int64_t k, std::optional<int64_t> out_features) {
  if (!weight.defined()) check.fail("weight", "to be a tensor", "None");
  const ScalarType type = weight.scalar_type();
  if (type == ScalarType::Byte) return int4_view(check, weight, scale, k, out_features);
  const HeadView view = type == ScalarType::Char ? int8_view(check, weight, scale, k)
                                                 : dense_view(check, weight, scale, k);
  if (out_features.value_or(view.rows) != view.rows)
    check.fail("out_features", "equal to the weight's rows " + text(view.rows),
               text(*out_features));
  return view;
}

namespace {

void prepare_tokens(const KernelTable& table, const HeadView& head, const Tensor& x, int64_t tokens,
                    const HeadInput& input) {
  const DType type = dtype_of(x);
  const void* source = x.const_data_ptr();
  const int64_t shares = shares_for(tokens, tokens * head.k, kMinElements);
  Scratch<float> scratch(shares * head.k);
  run_shares(shares, [&](int64_t s) {
    float* row = scratch.get() + s * head.k;
    const int64_t end = share_begin(tokens, shares, s + 1);
    for (int64_t m = share_begin(tokens, shares, s); m < end; ++m) {
      table.load_row(type, offset_bytes(source, m * head.k * element_size(type)), head.k, row);
      prepare_head_token(table, head, row, m, input);
    }
  });
}

// Fresh memory that a step reads once a token: with huge pages the reads miss the TLB less often.
// Advice only, so a refusal is no error.
void advise_huge_pages(Tensor& t) {
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin =
      (reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + kPage - 1) / kPage * kPage;
  const auto bytes = static_cast<uintptr_t>(t.numel());
  const auto end = (reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + bytes) / kPage * kPage;
#if defined(MADV_HUGEPAGE)
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// What quantize_head reads.
struct Source {
  const Check& check;
  DType type;
  const void* data;
  int64_t rows, k;
  const float* row(const KernelTable& table, int64_t n, float* buffer) const {
    table.load_row(type, offset_bytes(data, n * k * element_size(type)), k, buffer);
    return buffer;
  }
};

void require_finite(const Check& check, int64_t bad_row) {
  if (bad_row >= 0) check.fail("weight", "finite", "a NaN or an infinity in row " + text(bad_row));
}

std::tuple<Tensor, Tensor> quantize_int8(const Source& w) {
  Tensor packed = empty({w.rows, w.k}, ScalarType::Char);
  advise_huge_pages(packed);
  Tensor scale = empty({w.rows}, ScalarType::Float);
  auto* codes = static_cast<int8_t*>(packed.mutable_data_ptr());
  auto* scales = static_cast<float*>(scale.mutable_data_ptr());
  const KernelTable& table = kernels();
  const int64_t shares = shares_for(w.rows, w.rows * w.k, kMinElements);
  Scratch<float> scratch(shares * w.k);
  std::atomic<int64_t> bad_row{-1};
  run_shares(shares, [&](int64_t s) {
    float* buffer = scratch.get() + s * w.k;
    const int64_t end = share_begin(w.rows, shares, s + 1);
    for (int64_t n = share_begin(w.rows, shares, s); n < end; ++n) {
      scales[n] = table.head_quantize_int8(w.row(table, n, buffer), w.k, codes + n * w.k);
      if (scales[n] != scales[n]) bad_row = n;
    }
  });
  require_finite(w.check, bad_row);
  return {packed, scale};
}

// Quantises the rows of one tile; `codes` and `scales` are scratch for one row.
bool quantize_tile(const KernelTable& table, const Source& w, int64_t tile, int64_t group,
                   float* buffer, uint8_t* codes, uint16_t* scales, uint8_t* packed,
                   uint16_t* packed_scales) {
  const int64_t groups = (w.k + group - 1) / group;
  bool finite = true;
  for (int64_t r = 0; r < layout::kHeadTileRows; ++r) {
    const int64_t n = tile * layout::kHeadTileRows + r;
    if (n < w.rows) {
      const float* row = w.row(table, n, buffer);
      finite &= table.head_quantize_int4(row, w.k, group, codes, scales) == 0.0f;
    } else {
      std::fill_n(codes, groups * group, uint8_t{8});
      std::fill_n(scales, groups, uint16_t{0});
    }
    store_head4_row(codes, groups * group, r, packed);
    for (int64_t g = 0; g < groups; ++g) {
      packed_scales[g * layout::kHeadTileRows + r] = scales[g];
    }
  }
  return finite;
}

std::tuple<Tensor, Tensor> quantize_int4(const Source& w, int64_t group) {
  const int64_t tiles = layout::head_tiles(w.rows), groups = (w.k + group - 1) / group;
  const int64_t lines = groups * group / layout::kHeadLineFeatures;
  Tensor packed = empty({tiles, lines, layout::kHeadLineBytes}, ScalarType::Byte);
  advise_huge_pages(packed);
  Tensor scale = empty({tiles, groups, layout::kHeadTileRows}, ScalarType::BFloat16);
  auto* bytes = static_cast<uint8_t*>(packed.mutable_data_ptr());
  auto* scales = static_cast<uint16_t*>(scale.mutable_data_ptr());
  const KernelTable& table = kernels();
  const int64_t shares = shares_for(tiles, w.rows * w.k, kMinElements);
  Scratch<float> scratch(shares * w.k);
  Scratch<uint8_t> codes(shares * groups * group);
  Scratch<uint16_t> row_scales(shares * groups);
  std::atomic<int64_t> bad_tile{-1};
  run_shares(shares, [&](int64_t s) {
    const int64_t end = share_begin(tiles, shares, s + 1);
    for (int64_t t = share_begin(tiles, shares, s); t < end; ++t) {
      const bool finite = quantize_tile(
          table, w, t, group, scratch.get() + s * w.k, codes.get() + s * groups * group,
          row_scales.get() + s * groups, bytes + t * lines * layout::kHeadLineBytes,
          scales + t * groups * layout::kHeadTileRows);
      if (!finite) bad_tile = t;
    }
  });
  if (bad_tile >= 0)
    w.check.fail("weight", "finite",
                 "a NaN or an infinity in rows " + text(bad_tile * layout::kHeadTileRows) +
                     " and the 15 behind it");
  return {packed, scale};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_head(const Tensor& weight_in, std::string format,
                                         int64_t group_size) {
  const Check check("quantize_head");
  check.float_dtype(weight_in, "weight");
  check.dim(weight_in, "weight", 2);
  check_in_features(check, weight_in.size(1));
  if (format != "int8" && format != "int4")
    check.fail("format", "\"int8\" or \"int4\"", "\"" + format + "\"");
  if (group_size != 64 && group_size != 128)
    check.fail("group_size", "64 or 128", text(group_size));
  const Tensor weight = as_contiguous(weight_in);
  const Source source{check, dtype_of(weight), weight.const_data_ptr(), weight.size(0),
                      weight.size(1)};
  return format == "int8" ? quantize_int8(source) : quantize_int4(source, group_size);
}

Tensor lm_head(const Tensor& x_in, const Tensor& weight, std::optional<Tensor> scale,
               std::optional<int64_t> out_features, std::optional<int64_t> in_features) {
  const Check check("lm_head");
  check.float_dtype(x_in, "x");
  check.min_dim(x_in, "x", 1);
  Shape shape = shape_of(x_in);
  check.in_features(in_features, shape.back());
  const HeadView head = head_view(check, weight, scale, shape.back(), out_features);
  const int64_t tokens = product(shape, 0, shape.size() - 1);
  shape.back() = head.rows;
  Tensor logits = empty(shape, ScalarType::Float);
  if (logits.numel() == 0) return logits;  // of no features and no rows there may be many tokens
  const Tensor x = as_contiguous(x_in);
  const KernelTable& table = kernels();
  Scratch<char> memory(head_input_bytes(head, tokens));
  const HeadInput input = bind_head_input(head, tokens, memory.get());
  prepare_tokens(table, head, x, tokens, input);
  auto* out = static_cast<float*>(logits.mutable_data_ptr());
  const int64_t unit = head.unit_rows(), units = (head.rows + unit - 1) / unit;
  parallel_ranges(units, unit * head.k * tokens, kMinElements, [&](int64_t begin, int64_t end) {
    head_rows(table, head, begin * unit, std::min(end * unit, head.rows), input, tokens,
              out + begin * unit, head.rows);
  });
  return logits;
}

Tensor embedding(const Tensor& ids_in, const Tensor& weight, std::optional<Tensor> scale,
                 std::optional<int64_t> out_features, std::optional<int64_t> in_features) {
  const Check check("embedding");
  check.dtype(ids_in, "ids", ScalarType::Long);
  if (in_features.has_value() && *in_features < 0)
    check.fail("in_features", "at least 0", text(*in_features));
  const HeadView head = head_view(check, weight, scale, in_features.value_or(-1), out_features);
  const Tensor ids = as_contiguous(ids_in);
  const int64_t count = ids.numel();
  // Copied before they are checked, for they become addresses: another thread may write to ids.
  Scratch<int64_t> copy(count);
  std::copy_n(static_cast<const int64_t*>(ids.const_data_ptr()), count, copy.get());
  const int64_t* id = copy.get();
  for (int64_t i = 0; i < count; ++i) {
    if (id[i] < 0 || id[i] >= head.rows)
      check.fail("ids", "from 0 to " + text(head.rows - 1), text(id[i]));
  }
  Shape shape = shape_of(ids);
  shape.push_back(head.k);
  Tensor rows = empty(shape, ScalarType::Float);
  auto* out = static_cast<float*>(rows.mutable_data_ptr());
  const KernelTable& table = kernels();
  parallel_ranges(count, head.k, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) embed_row(table, head, id[i], out + i * head.k);
  });
  return rows;
}

}  // namespace bitnet::ops
