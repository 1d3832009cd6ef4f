// Fields of the format and their checks; see fields.h. Every rejection
// says where, what was expected and what was found. Must not know: in
// which order a version has its fields, torch, Python.
#include "format/fields.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "format/utf8.h"

namespace bitnet::format {

// std::to_string would show a tiny value as 0.
std::string text_of(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}

void check_config_length(std::uint64_t length, std::uint64_t at) {
  if (length == 0 || length > kMaxConfigBytes) {
    fail(ErrorCode::kConfigLength, at, Where{},
         "a config length of 1 to " + str(kMaxConfigBytes) + " bytes, got " + str(length));
  }
}

void check_config_text(std::string_view config, std::uint64_t at) {
  const std::size_t bad = first_bad_utf8(config);
  if (bad != config.size()) {
    fail(ErrorCode::kConfigUtf8, at + bad, Where{},
         "the config as UTF-8, got " + quoted(config.substr(bad, 4)) + " at its byte " + str(bad));
  }
}

// The bound by the room left is what makes reserve() safe against a lying count.
void check_tensor_count(std::uint64_t count, std::uint64_t room_bytes, std::uint64_t smallest,
                        std::uint64_t at) {
  const std::uint64_t max = std::min(kMaxTensors, room_bytes / smallest);
  if (count > max) {
    fail(ErrorCode::kTensorCount, at, Where{},
         "a tensor count of at most " + str(max) + " (limit " + str(kMaxTensors) + ", and " +
             str(room_bytes) + " bytes follow), got " + str(count),
         "; the file is incomplete or damaged: convert the model again");
  }
}

void read_name(Cursor& in, Where& where, std::string& name) {
  const std::uint64_t at = in.offset();
  const auto length = in.value<std::uint32_t>(where, "the name length");
  if (length == 0 || length > kMaxNameBytes) {
    fail(ErrorCode::kNameLength, at, where,
         "a name of 1 to " + str(kMaxNameBytes) + " bytes, got " + str(length));
  }
  name = as_text(in.take(length, where, "the name"));
  where.name = name;
  if (const std::size_t bad = first_bad_utf8(name); bad != name.size()) {
    fail(ErrorCode::kNameUtf8, at + 4 + bad, where,
         "a name in UTF-8, got " + quoted(std::string_view(name).substr(bad, 4)) + " at its byte " +
             str(bad));
  }
  if (const std::size_t bad = first_control(name); bad != name.size()) {
    fail(ErrorCode::kNameControl, at + 4 + bad, where,
         "a name without control characters, got " + quoted(name.substr(bad, 2)) + " at its byte " +
             str(bad));
  }
}

DType read_dtype(Cursor& in, const Where& where) {
  const std::uint64_t at = in.offset();
  const auto dtype = in.value<std::uint32_t>(where, "the dtype");
  if (dtype > static_cast<std::uint32_t>(DType::kBF16)) {
    fail(ErrorCode::kDtype, at, where,
         "dtype 0 (u8), 1 (f32), 2 (f16) or 3 (bf16), got " + str(dtype));
  }
  return static_cast<DType>(dtype);
}

void read_dims(Cursor& in, const Where& where, TensorRecord& tensor) {
  const std::uint64_t at = in.offset();
  tensor.ndim = in.value<std::uint32_t>(where, "ndim");
  const bool fits =
      tensor.packed() ? tensor.ndim == 2 : tensor.ndim >= 1 && tensor.ndim <= kMaxDims;
  if (!fits) {
    const std::string range = tensor.packed() ? "2 (packed)" : "1 to " + str(kMaxDims);
    fail(ErrorCode::kNdim, at, where, "ndim " + range + ", got " + str(tensor.ndim));
  }
  for (std::uint32_t i = 0; i < tensor.ndim; ++i) {
    const std::uint64_t dim_at = in.offset();
    const auto dim = in.value<std::uint32_t>(where, "a dimension");
    if (dim == 0 || dim > kMaxDim) {
      fail(ErrorCode::kDim, dim_at, where,
           "dimension " + str(i) + " from 1 to " + str(kMaxDim) + ", got " + str(dim));
    }
    tensor.dims[i] = dim;
  }
}

float read_scale(Cursor& in, const Where& where) {
  const std::uint64_t at = in.offset();
  const auto scale = in.value<float>(where, "the scale");
  if (!(std::isnormal(scale) && scale > 0.0F)) {
    fail(ErrorCode::kScaleValue, at, where,
         "a scale that is finite, normal and above 0, got " + text_of(scale),
         "; check the source's weight_scale and convert the model again");
  }
  return scale;
}

namespace {

std::uint64_t item_bytes(DType dtype) {
  if (dtype == DType::kU8) return 1;
  return dtype == DType::kF32 ? 4 : 2;
}

}  // namespace

std::uint64_t bytes_of_dims(const TensorRecord& tensor, const Where& where, std::uint64_t at) {
  std::uint64_t size_bytes = item_bytes(tensor.dtype);
  for (std::uint32_t i = 0; i < tensor.ndim; ++i) {
    if (!checked_mul(size_bytes, tensor.dims[i], size_bytes)) {
      fail(ErrorCode::kSizeOverflow, at, where,
           "dimensions whose byte size fits 64 bits, got an overflow at dimension " + str(i));
    }
  }
  return size_bytes;
}

void check_size(std::uint64_t size_bytes, std::uint64_t expected, const char* what,
                const Where& where, std::uint64_t at) {
  if (size_bytes != expected) {
    fail(ErrorCode::kSizeMismatch, at, where,
         std::string("a byte length ") + what + str(expected) + " from dtype and dimensions, got " +
             str(size_bytes));
  }
}

// Sorting indices costs 4 bytes a tensor and cannot be made quadratic by chosen names.
void check_unique(const std::vector<TensorRecord>& tensors) {
  std::vector<std::uint32_t> order(tensors.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    const int c = tensors[a].name.compare(tensors[b].name);
    return c != 0 ? c < 0 : a < b;
  });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const TensorRecord& later = tensors[order[i]];
    if (tensors[order[i - 1]].name == later.name) {
      fail(ErrorCode::kNameDuplicate, later.offset_bytes, where_of(later),
           "a name of its own, got that of tensor " + str(order[i - 1]));
    }
  }
}

}  // namespace bitnet::format
