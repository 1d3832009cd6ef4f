// SGLBITNT version 1, and what both versions begin with; see sglbitnt.h for the contract and
// FORMAT.md for the rules.
// Must not know: torch, Python, threads, SIMD, what the config means.
#include "format/sglbitnt.h"

#include <array>
#include <bit>

#include "format/fields.h"
#include "format/layout.h"

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
    "header_checksum",
    "config_checksum",
    "index_checksum",
    "data_checksum",
    "reserved",
    "file_length",
    "offset",
    "padding_bytes",
    "scale_kind",
    "scale_dtype",
    "group_size",
};

// name length, name of 1 byte, dtype, ndim, one dim, has_scale, byte length, one f16 value
constexpr std::uint64_t kMinTensorBytes = 4 + 1 + 4 + 4 + 4 + 4 + 8 + 2;

std::uint32_t read_version(Cursor& in) {
  const Where where;
  const std::string_view magic = as_text(in.take(kMagic.size(), where, "the magic"));
  if (magic != kMagic) {
    fail(ErrorCode::kMagic, 0, where, "magic " + quoted(kMagic) + ", got " + quoted(magic),
         "; this is not an SGLBITNT file: make one with 'bitnet-ops convert'");
  }
  const std::uint64_t at = in.offset();
  const auto version = in.value<std::uint32_t>(where, "the version");
  if (version != 1 && version != 2) {
    fail(ErrorCode::kVersion, at, where, "version 1 or 2, got " + str(version),
         "; convert the model again, or use the release that wrote the file");
  }
  return version;
}

void read_config(Cursor& in, ParsedFile& parsed) {
  const std::uint64_t at = in.offset();
  const auto length = in.value<std::uint32_t>(Where{}, "the config length");
  check_config_length(length, at);
  parsed.config_offset = in.offset();
  parsed.config = as_text(in.take(length, Where{}, "the config"));
  check_config_text(parsed.config, at + 4);
}

std::uint64_t read_tensor_count(Cursor& in) {
  const std::uint64_t at = in.offset();
  const std::uint64_t count = in.value<std::uint32_t>(Where{}, "the tensor count");
  check_tensor_count(count, in.left(), kMinTensorBytes, at);
  return count;
}

void read_shape(Cursor& in, const Where& where, TensorRecord& tensor) {
  const std::uint64_t at = in.offset();
  read_dims(in, where, tensor);
  if (tensor.packed() && tensor.dims[1] % layout::kBlockBytes != 0) {
    fail(ErrorCode::kPackedShape, at + 8, where,
         "packed rows of a multiple of " + str(layout::kBlockBytes) + " bytes, got " +
             str(tensor.dims[1]),
         "; rows hold 32*ceil(K/128) bytes: pad K with code 1");
  }
}

void read_scale_field(Cursor& in, const Where& where, TensorRecord& tensor) {
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
  tensor.scale_kind = ScaleKind::kTensor;
  tensor.scale = read_scale(in, where);
}

TensorRecord read_tensor(Cursor& in, std::uint32_t index) {
  Where where{index, {}};
  TensorRecord tensor;
  tensor.index = index;
  read_name(in, where, tensor.name);
  tensor.dtype = read_dtype(in, where);
  read_shape(in, where, tensor);
  read_scale_field(in, where, tensor);
  const std::uint64_t at = in.offset();
  const std::uint64_t expected = bytes_of_dims(tensor, where, at);
  tensor.size_bytes = in.value<std::uint64_t>(where, "the byte length");
  check_size(tensor.size_bytes, expected, "of ", where, at);
  tensor.offset_bytes = in.offset();
  in.take(tensor.size_bytes, where, "the data");
  return tensor;
}

}  // namespace

const char* error_code_name(ErrorCode code) { return kCodeNames[static_cast<std::size_t>(code)]; }

ParsedFile parse_v1(Bytes, Cursor in) {
  ParsedFile parsed;
  parsed.version = 1;
  read_config(in, parsed);
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

ParsedFile parse(std::span<const std::uint8_t> file) {
  Cursor in(file);
  return read_version(in) == 1 ? parse_v1(file, in) : parse_v2(file, in);
}

}  // namespace bitnet::format
