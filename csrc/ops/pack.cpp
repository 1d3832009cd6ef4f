// pack, unpack, quantize_weights: between float masters, int8 codes and
// the canonical packed rows. Rare calls, made when a model is
// converted. Must not know private layouts (prepack.cpp).
#include <atomic>
#include <cmath>
#include <cstring>

#include "format/layout.h"
#include "ops/checks.h"
#include "ops/ops.h"

namespace bitnet::ops {
namespace {

// Returns false if a value is not -1, 0 or 1.
bool pack_row(const int8_t* codes, int64_t k, uint8_t* packed) {
  std::memset(packed, layout::kZeroByte, static_cast<size_t>(layout::row_bytes_for(k)));
  bool valid = true;
  for (int64_t i = 0; i < k; ++i) {
    valid &= codes[i] >= -1 && codes[i] <= 1;
    const int64_t in_block = i % layout::kBlockWeights;
    uint8_t& byte =
        packed[i / layout::kBlockWeights * layout::kBlockBytes + in_block % layout::kBlockBytes];
    const int shift = layout::shift_of(in_block);
    byte = static_cast<uint8_t>((byte & ~(3 << shift)) | (((codes[i] + 1) & 3) << shift));
  }
  return valid;
}

// Returns false if a code is 3 or a padding code is not 1.
bool unpack_row(const uint8_t* packed, int64_t k, int8_t* codes) {
  bool valid = true;
  for (int64_t i = 0; i < layout::padded_k(k); ++i) {
    const int64_t in_block = i % layout::kBlockWeights;
    const uint8_t byte =
        packed[i / layout::kBlockWeights * layout::kBlockBytes + in_block % layout::kBlockBytes];
    const int code = (byte >> layout::shift_of(in_block)) & 3;
    if (i < k) {
      valid &= code != 3;
      codes[i] = static_cast<int8_t>(code - 1);
    } else {
      valid &= code == 1;
    }
  }
  return valid;
}

// |w| summed in 8 double lanes, so that the result does not depend on a vector width.
double sum_abs(const float* w, int64_t n) {
  double lanes[8] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i % 8] += std::fabs(static_cast<double>(w[i]));
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// clamp(round_half_even(w * inv_scale), -1, 1); adding and subtracting 1.5 * 2^23 rounds.
int8_t ternary_code(float w, float inv_scale) {
  constexpr float kMagic = 12582912.0f;
  const float clamped = std::fmin(std::fmax(w * inv_scale, -2.0f), 2.0f);
  const float rounded = (clamped + kMagic) - kMagic;
  return static_cast<int8_t>(std::fmin(std::fmax(rounded, -1.0f), 1.0f));
}

struct MasterRows {
  const Tensor& weight;
  int64_t k = weight.size(1);
  DType type = dtype_of(weight);
  void load(int64_t row, float* buffer) const {
    const int64_t at = row * k * element_size(type);
    kernels().load_row(type, offset_bytes(weight.const_data_ptr(), at), k, buffer);
  }
};

}  // namespace

Tensor pack(const Tensor& codes_in) {
  const Check check("pack");
  check.dtype(codes_in, "codes", ScalarType::Char);
  check.dim(codes_in, "codes", 2);
  if (codes_in.size(1) < 1) check.fail("codes", "with at least one input feature (columns)", "0");
  const Tensor codes = as_contiguous(codes_in);
  const int64_t n = codes.size(0), k = codes.size(1), row_bytes = layout::row_bytes_for(k);
  Tensor packed = empty({n, row_bytes}, ScalarType::Byte);
  const auto* source = static_cast<const int8_t*>(codes.const_data_ptr());
  auto* target = static_cast<uint8_t*>(packed.mutable_data_ptr());
  std::atomic<int64_t> bad_row{-1};
  parallel_ranges(n, k, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (!pack_row(source + r * k, k, target + r * row_bytes)) bad_row.store(r);
    }
  });
  if (!(bad_row.load() < 0))
    check.fail("codes", "to hold only -1, 0 and 1",
               "another value in row " + std::to_string(bad_row.load()));
  return packed;
}

Tensor unpack(const Tensor& weight, int64_t in_features) {
  const Check check("unpack");
  check.packed_for(weight, "weight", in_features);
  const int64_t n = weight.size(0), row_bytes = weight.size(1);
  Tensor codes = empty({n, in_features}, ScalarType::Char);
  const auto* source = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* target = static_cast<int8_t*>(codes.mutable_data_ptr());
  std::atomic<int64_t> bad_row{-1};
  parallel_ranges(n, in_features, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (!unpack_row(source + r * row_bytes, in_features, target + r * in_features))
        bad_row.store(r);
    }
  });
  if (!(bad_row.load() < 0))
    check.fail("weight", "with codes 0, 1, 2 only and padding codes 1",
               "a code 3 or a wrong padding code in row " + std::to_string(bad_row.load()));
  return codes;
}

std::tuple<Tensor, Tensor> quantize_weights(const Tensor& weight_in) {
  const Check check("quantize_weights");
  check.float_dtype(weight_in, "weight");
  check.dim(weight_in, "weight", 2);
  if (!(weight_in.numel() > 0))
    check.fail("weight", "with at least one element", "shape " + shape_text(shape_of(weight_in)));
  const Tensor weight = as_contiguous(weight_in);
  const MasterRows rows{weight};
  const int64_t n = weight.size(0), k = rows.k;
  const int64_t shares = shares_for(n, n * k, kMinElements);
  Scratch<double> row_sums(n);
  Scratch<float> scratch(shares * k);
  run_shares(shares, [&](int64_t s) {
    float* buffer = scratch.get() + s * k;
    for (int64_t r = share_begin(n, shares, s); r < share_begin(n, shares, s + 1); ++r) {
      rows.load(r, buffer);
      row_sums.get()[r] = sum_abs(buffer, k);
    }
  });
  double total = 0.0;
  for (int64_t r = 0; r < n; ++r) total += row_sums.get()[r];
  if (!std::isfinite(total)) check.fail("weight", "with finite values", "NaN or infinity");
  const float scale = std::fmax(static_cast<float>(total / static_cast<double>(n * k)), 1e-5f);
  const float inv_scale = 1.0f / scale;
  Tensor codes = empty({n, k}, ScalarType::Char);
  Tensor scale_out = empty({1}, ScalarType::Float);
  *static_cast<float*>(scale_out.mutable_data_ptr()) = scale;
  auto* target = static_cast<int8_t*>(codes.mutable_data_ptr());
  run_shares(shares, [&](int64_t s) {
    float* buffer = scratch.get() + s * k;
    for (int64_t r = share_begin(n, shares, s); r < share_begin(n, shares, s + 1); ++r) {
      rows.load(r, buffer);
      for (int64_t i = 0; i < k; ++i) target[r * k + i] = ternary_code(buffer[i], inv_scale);
    }
  });
  return {codes, scale_out};
}

}  // namespace bitnet::ops
