// SGLBITNT version 1 reader; see sglbitnt.h for the contract and FORMAT.md for the rules.
// Lengths and counts of the file meet arithmetic only in `Cursor::take` and `checked_mul`: whoever
// adds a field goes through them, and so cannot overflow, read past the end or allocate first.
// Must not know: torch, Python, threads, SIMD, what the config means.
#include "format/sglbitnt.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "format/errors.h"
#include "format/layout.h"
#include "format/utf8.h"

static_assert(std::endian::native == std::endian::little, "SGLBITNT is read by memcpy");

namespace bitnet::format {
namespace {

// In the order of ErrorCode.
constexpr std::array<const char*, static_cast<std::size_t>(ErrorCode::kCount)> kCodeNames = {
    "io",
    "truncated",
    "magic",
    "version",
    "config_length",
    "config_utf8",
    "tensor_count",
    "name_length",
    "name_utf8",
    "name_control",
    "name_duplicate",
    "dtype",
    "ndim",
    "dim",
    "packed_shape",
    "has_scale",
    "scale_missing",
    "scale_unexpected",
    "scale_value",
    "size_overflow",
    "size_mismatch",
    "trailing_bytes",
    "invalid_code",
    "non_finite",
    "in_features",
    "padding_code",
};

std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// False if the product does not fit u64.
bool checked_mul(std::uint64_t a, std::uint64_t b, std::uint64_t& product) {
  return !__builtin_mul_overflow(a, b, &product);
}

// A position in the file that cannot leave it.
class Cursor {
 public:
  explicit Cursor(Bytes file) : file_(file) {}
  std::uint64_t offset() const { return offset_; }
  std::uint64_t left() const { return file_.size() - offset_; }

  Bytes take(std::uint64_t size_bytes, const Where& where, const char* field) {
    if (size_bytes > left()) {
      fail(ErrorCode::kTruncated, offset_, where,
           str(size_bytes) + " bytes for " + field + " at offset " + str(offset_) + ", got " +
               str(left()) + " before the end of the file",
           "; the file is incomplete: copy it or convert the model again");
    }
    const Bytes taken = file_.subspan(offset_, size_bytes);
    offset_ += size_bytes;  // <= file_.size()
    return taken;
  }

  template <class T>
  T value(const Where& where, const char* field) {
    T out;
    std::memcpy(&out, take(sizeof(T), where, field).data(), sizeof(T));
    return out;
  }

 private:
  Bytes file_;
  std::uint64_t offset_ = 0;
};

// Nine digits identify every f32; std::to_string would show a tiny one as 0.
std::string text_of(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}

std::string_view read_config(Cursor& in) {
  const Where where;
  const std::uint64_t at = in.offset();
  const auto length = in.value<std::uint32_t>(where, "the config length");
  if (length == 0 || length > kMaxConfigBytes) {
    fail(ErrorCode::kConfigLength, at, where,
         "a config length of 1 to " + str(kMaxConfigBytes) + " bytes, got " + str(length));
  }
  const std::string_view config = as_text(in.take(length, where, "the config"));
  const std::size_t bad = first_bad_utf8(config);
  if (bad != config.size()) {
    fail(ErrorCode::kConfigUtf8, at + 4 + bad, where,
         "the config as UTF-8, got " + quoted(config.substr(bad, 4)) + " at its byte " + str(bad));
  }
  return config;
}

std::string_view read_header(Cursor& in) {
  const Where where;
  const std::string_view magic = as_text(in.take(kMagic.size(), where, "the magic"));
  if (magic != kMagic) {
    fail(ErrorCode::kMagic, 0, where, "magic " + quoted(kMagic) + ", got " + quoted(magic),
         "; this is not an SGLBITNT file: make one with 'bitnet-ops convert'");
  }
  const std::uint64_t at = in.offset();
  const auto version = in.value<std::uint32_t>(where, "the version");
  if (version != kVersion) {
    fail(ErrorCode::kVersion, at, where, "version " + str(kVersion) + ", got " + str(version),
         "; convert the model again, or use the release that wrote the file");
  }
  return read_config(in);
}

// The bound by the room left is what makes reserve() safe against a lying count.
std::uint64_t read_tensor_count(Cursor& in) {
  const std::uint64_t at = in.offset();
  const std::uint64_t count = in.value<std::uint32_t>(Where{}, "the tensor count");
  const std::uint64_t most = std::min(kMaxTensors, in.left() / kMinTensorBytes);
  if (count > most) {
    fail(ErrorCode::kTensorCount, at, Where{},
         "a tensor count of at most " + str(most) + " (limit " + str(kMaxTensors) + ", and " +
             str(in.left()) + " bytes follow), got " + str(count),
         "; the file is incomplete or damaged: convert the model again");
  }
  return count;
}

std::string_view read_name(Cursor& in, Where& where) {
  const std::uint64_t at = in.offset();
  const auto length = in.value<std::uint32_t>(where, "the name length");
  if (length == 0 || length > kMaxNameBytes) {
    fail(ErrorCode::kNameLength, at, where,
         "a name of 1 to " + str(kMaxNameBytes) + " bytes, got " + str(length));
  }
  const std::string_view name = as_text(in.take(length, where, "the name"));
  where.name = name;
  if (const std::size_t bad = first_bad_utf8(name); bad != name.size()) {
    fail(ErrorCode::kNameUtf8, at + 4 + bad, where,
         "a name in UTF-8, got " + quoted(name.substr(bad, 4)) + " at its byte " + str(bad));
  }
  if (const std::size_t bad = first_control(name); bad != name.size()) {
    fail(ErrorCode::kNameControl, at + 4 + bad, where,
         "a name without control characters, got " + quoted(name.substr(bad, 2)) + " at its byte " +
             str(bad));
  }
  return name;
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

void read_shape(Cursor& in, const Where& where, TensorRecord& tensor) {
  const std::uint64_t at = in.offset();
  tensor.ndim = in.value<std::uint32_t>(where, "ndim");
  const bool fits =
      tensor.packed() ? tensor.ndim == 2 : tensor.ndim >= 1 && tensor.ndim <= kMaxDims;
  if (!fits) {
    const std::string most = tensor.packed() ? "2 (packed)" : "1 to " + str(kMaxDims);
    fail(ErrorCode::kNdim, at, where, "ndim " + most + ", got " + str(tensor.ndim));
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
  if (tensor.packed() && tensor.dims[1] % layout::kBlockBytes != 0) {
    fail(ErrorCode::kPackedShape, at + 8, where,
         "packed rows of a multiple of " + str(layout::kBlockBytes) + " bytes, got " +
             str(tensor.dims[1]),
         "; rows hold 32*ceil(K/128) bytes: pad K with code 1");
  }
}

void read_scale(Cursor& in, const Where& where, TensorRecord& tensor) {
  const std::uint64_t at = in.offset();
  const auto has_scale = in.value<std::uint32_t>(where, "has_scale");
  if (has_scale > 1)
    fail(ErrorCode::kHasScale, at, where, "has_scale 0 or 1, got " + str(has_scale));
  if (tensor.packed() && has_scale == 0) {
    fail(ErrorCode::kScaleMissing, at, where, "has_scale 1 for a packed (u8) tensor, got 0",
         "; a packed tensor needs its multiplying scale: convert the model again");
  }
  if (!tensor.packed() && has_scale == 1) {
    fail(ErrorCode::kScaleUnexpected, at, where, "has_scale 0 for a dense tensor, got 1",
         "; fold the scale into the values: a dense tensor has none");
  }
  if (has_scale == 0) return;
  const std::uint64_t scale_at = in.offset();
  tensor.scale = in.value<float>(where, "the scale");
  if (!(std::isnormal(tensor.scale) && tensor.scale > 0.0F)) {
    fail(ErrorCode::kScaleValue, scale_at, where,
         "a scale that is finite, normal and above 0, got " + text_of(tensor.scale),
         "; check the source's weight_scale and convert the model again");
  }
}

std::uint64_t item_bytes(DType dtype) {
  if (dtype == DType::kU8) return 1;
  return dtype == DType::kF32 ? 4 : 2;
}

std::uint64_t expected_bytes(const TensorRecord& tensor, const Where& where, std::uint64_t at) {
  std::uint64_t size_bytes = item_bytes(tensor.dtype);
  for (std::uint32_t i = 0; i < tensor.ndim; ++i) {
    if (!checked_mul(size_bytes, tensor.dims[i], size_bytes)) {
      fail(ErrorCode::kSizeOverflow, at, where,
           "dimensions whose byte size fits 64 bits, got an overflow at dimension " + str(i));
    }
  }
  return size_bytes;
}

void read_data(Cursor& in, const Where& where, TensorRecord& tensor) {
  const std::uint64_t at = in.offset();
  const std::uint64_t expected = expected_bytes(tensor, where, at);
  tensor.size_bytes = in.value<std::uint64_t>(where, "the byte length");
  if (tensor.size_bytes != expected) {
    fail(ErrorCode::kSizeMismatch, at, where,
         "a byte length of " + str(expected) + " from dtype and dimensions, got " +
             str(tensor.size_bytes));
  }
  tensor.offset_bytes = in.offset();
  in.take(tensor.size_bytes, where, "the data");
}

TensorRecord read_tensor(Cursor& in, std::uint32_t index) {
  Where where{index, {}};
  TensorRecord tensor;
  tensor.index = index;
  tensor.name = read_name(in, where);
  tensor.dtype = read_dtype(in, where);
  read_shape(in, where, tensor);
  read_scale(in, where, tensor);
  read_data(in, where, tensor);
  return tensor;
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

}  // namespace

const char* error_code_name(ErrorCode code) { return kCodeNames[static_cast<std::size_t>(code)]; }

ParsedFile parse(std::span<const std::uint8_t> file) {
  Cursor in(file);
  ParsedFile parsed;
  parsed.config = read_header(in);
  const std::uint64_t count = read_tensor_count(in);
  parsed.tensors.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) parsed.tensors.push_back(read_tensor(in, i));
  if (in.left() != 0) {
    fail(ErrorCode::kTrailingBytes, in.offset(), Where{},
         "the end of the file at offset " + str(in.offset()) + " after " + str(count) +
             " tensors, got " + str(in.left()) + " more bytes");
  }
  check_unique(parsed.tensors);
  return parsed;
}

}  // namespace bitnet::format
