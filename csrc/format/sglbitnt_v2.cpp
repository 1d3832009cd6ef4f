// SGLBITNT version 2: a header of 64 bytes, aligned data, the config and an index with checksums;
// FORMAT.md has the rules. Every offset is determined by what precedes it, so a file has one form.
// Must not know: torch, Python, threads, SIMD, what the config means.
#include <algorithm>

#include "format/fields.h"
#include "format/layout.h"
#include "format/xxh64.h"

namespace bitnet::format {
namespace {

constexpr std::uint64_t kHeaderBytes = 64;
constexpr std::uint64_t kHeaderSummed = 56;  // the checksum of the header comes last
// name length, name of 1 byte, dtype, ndim, one dim, scale kind, offset, byte length, checksum
constexpr std::uint64_t kMinRecordBytes = 4 + 1 + 4 + 4 + 4 + 4 + 8 + 8 + 8;

// Where fields of the header lie, for errors.
constexpr std::uint64_t kAtTensors = 12, kAtFileLength = 16, kAtConfigOffset = 24;
constexpr std::uint64_t kAtConfigLength = 32, kAtReserved = 36;

struct Header {
  std::uint32_t tensors = 0;
  std::uint64_t config_offset = 0;
  std::uint32_t config_length = 0;
  std::uint64_t config_sum = 0;
  std::uint64_t index_sum = 0;
};

std::string hex(std::uint64_t value) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string out = "0x";
  for (int shift = 60; shift >= 0; shift -= 4) out += kHex[(value >> shift) & 15U];
  return out;
}

void check_hash(ErrorCode code, Bytes bytes, std::uint64_t stored, const char* what,
                const Where& where, std::uint64_t at) {
  const std::uint64_t computed = xxh64(bytes);
  if (computed != stored) {
    fail(code, at, where,
         std::string("XXH64 ") + hex(stored) + " of " + what + ", got " + hex(computed));
  }
}

void check_offset(std::uint64_t offset, std::uint64_t expected, const char* what,
                  const Where& where, std::uint64_t at) {
  if (offset != expected) {
    fail(ErrorCode::kOffset, at, where,
         std::string(what) + " at offset " + str(expected) + ", got " + str(offset));
  }
}

// The next multiple of 64; `end` lies in the file, so nothing overflows.
std::uint64_t aligned(std::uint64_t end) {
  return (end + kAlignment - 1) / kAlignment * kAlignment;
}

void check_zeros(Bytes file, std::uint64_t begin, std::uint64_t end, const Where& where) {
  for (std::uint64_t i = begin; i < end; ++i) {
    if (file[i] != 0) {
      fail(ErrorCode::kPaddingBytes, i, where,
           "zeros up to the next multiple of 64, got another byte at offset " + str(i));
    }
  }
}

Header read_header(Bytes file, Cursor& in) {
  const Where where;
  Header h;
  h.tensors = in.value<std::uint32_t>(where, "the tensor count");
  const auto length = in.value<std::uint64_t>(where, "the file length");
  h.config_offset = in.value<std::uint64_t>(where, "the config offset");
  h.config_length = in.value<std::uint32_t>(where, "the config length");
  const auto reserved = in.value<std::uint32_t>(where, "the reserved field");
  h.config_sum = in.value<std::uint64_t>(where, "the config checksum");
  h.index_sum = in.value<std::uint64_t>(where, "the index checksum");
  const auto sum = in.value<std::uint64_t>(where, "the header checksum");
  check_hash(ErrorCode::kHeaderChecksum, file.first(kHeaderSummed), sum, "the header", where,
             kHeaderSummed);
  if (length != file.size()) {
    fail(ErrorCode::kFileLength, kAtFileLength, where,
         "a file of " + str(length) + " bytes, got " + str(file.size()),
         "; the file is incomplete: copy it or convert the model again");
  }
  if (reserved != 0)
    fail(ErrorCode::kReserved, kAtReserved, where, "a reserved field of 0, got " + str(reserved));
  return h;
}

std::string read_config(Bytes file, const Header& h) {
  check_config_length(h.config_length, kAtConfigLength);
  if (h.config_offset < kHeaderBytes || h.config_offset > file.size() ||
      h.config_offset % kAlignment != 0) {
    fail(ErrorCode::kOffset, kAtConfigOffset, Where{},
         "the config at a multiple of 64 from 64 to " + str(file.size()) + ", got " +
             str(h.config_offset));
  }
  Cursor in(file, h.config_offset);
  const std::string config(as_text(in.take(h.config_length, Where{}, "the config")));
  check_hash(ErrorCode::kConfigChecksum,
             {reinterpret_cast<const std::uint8_t*>(config.data()), config.size()}, h.config_sum,
             "the config", Where{}, h.config_offset);
  check_config_text(config, h.config_offset);
  return config;
}

// The index is the rest of the file after the config.
Cursor open_index(Bytes file, const Header& h) {
  const std::uint64_t config_end = h.config_offset + h.config_length;
  const std::uint64_t begin = aligned(config_end);
  if (begin > file.size()) {
    fail(ErrorCode::kTruncated, config_end, Where{},
         str(begin - config_end) + " bytes for the index at offset " + str(config_end) + ", got " +
             str(file.size() - config_end) + " before the end of the file",
         "; the file is incomplete: copy it or convert the model again");
  }
  check_zeros(file, config_end, begin, Where{});
  check_hash(ErrorCode::kIndexChecksum, file.subspan(begin), h.index_sum, "the index", Where{},
             begin);
  check_tensor_count(h.tensors, file.size() - begin, kMinRecordBytes, kAtTensors);
  return Cursor(file, begin);
}

// Packed dimensions are [N, K] in the file and [N, row bytes] in the record.
void read_shape(Cursor& in, const Where& where, TensorRecord& tensor) {
  read_dims(in, where, tensor);
  if (!tensor.packed()) return;
  tensor.in_features = tensor.dims[1];
  tensor.dims[1] = static_cast<std::uint32_t>(layout::row_bytes_for(tensor.in_features));
}

ScaleKind read_scale_kind(Cursor& in, const Where& where, const TensorRecord& tensor) {
  const std::uint64_t at = in.offset();
  const auto kind = in.value<std::uint32_t>(where, "the scale kind");
  if (kind > static_cast<std::uint32_t>(ScaleKind::kGroup)) {
    fail(ErrorCode::kScaleKind, at, where,
         "scale kind 0 (none), 1 (tensor), 2 (row) or 3 (group), got " + str(kind));
  }
  if (tensor.packed() && kind == 0) {
    fail(ErrorCode::kScaleMissing, at, where, "scale kind 1, 2 or 3 for a packed tensor, got 0",
         "; a packed tensor needs its multiplying scale: convert the model again");
  }
  if (!tensor.packed() && kind != 0) {
    fail(ErrorCode::kScaleUnexpected, at, where,
         "scale kind 0 for a dense tensor, got " + str(kind),
         "; fold the scale into the values: a dense tensor has none");
  }
  return static_cast<ScaleKind>(kind);
}

void read_scale_fields(Cursor& in, const Where& where, TensorRecord& tensor) {
  tensor.scale_kind = read_scale_kind(in, where, tensor);
  if (tensor.scale_kind == ScaleKind::kTensor) tensor.scale = read_scale(in, where);
  if (tensor.scale_kind < ScaleKind::kRow) return;
  const std::uint64_t at = in.offset();
  const auto dtype = in.value<std::uint32_t>(where, "the scale dtype");
  if (dtype != 1 && dtype != 2)
    fail(ErrorCode::kScaleDtype, at, where, "scale dtype 1 (f32) or 2 (f16), got " + str(dtype));
  tensor.scale_dtype = static_cast<DType>(dtype);
  if (tensor.scale_kind != ScaleKind::kGroup) return;
  tensor.group_size = in.value<std::uint32_t>(where, "the group size");
  if (tensor.group_size != layout::kBlockWeights &&
      tensor.group_size != layout::kBlockWeights / 2) {
    fail(ErrorCode::kGroupSize, at + 4, where,
         "a group size of 128 or 64, got " + str(tensor.group_size));
  }
}

// An offset and a byte length, which must be `expected` bytes from the next multiple of 64 on and
// end before the config. `end` moves behind them.
void read_place(Cursor& in, const Where& where, const char* what, std::uint64_t expected,
                std::uint64_t config_offset, std::uint64_t& end, std::uint64_t& offset,
                std::uint64_t& size_bytes) {
  const std::uint64_t at = in.offset();
  offset = in.value<std::uint64_t>(where, "an offset");
  size_bytes = in.value<std::uint64_t>(where, "a byte length");
  check_size(size_bytes, expected, "of ", where, at + 8);
  check_offset(offset, aligned(end), what, where, at);
  if (offset > config_offset || size_bytes > config_offset - offset) {
    const std::uint64_t room = config_offset - std::min(offset, config_offset);
    fail(ErrorCode::kTruncated, at, where,
         str(size_bytes) + " bytes for " + what + " at offset " + str(offset) + ", got " +
             str(room) + " before the end of the file",
         "; the file is incomplete: copy it or convert the model again");
  }
  end = offset + size_bytes;
}

std::uint64_t scales_bytes(const TensorRecord& tensor) {
  std::uint64_t count = tensor.dims[0];  // below 2^31, as are the groups: no overflow
  if (tensor.scale_kind == ScaleKind::kGroup)
    count *= (static_cast<std::uint64_t>(tensor.in_features) + tensor.group_size - 1) /
             tensor.group_size;
  return count * (tensor.scale_dtype == DType::kF32 ? 4 : 2);
}

TensorRecord read_record(Cursor& in, std::uint32_t index, std::uint64_t config_offset,
                         std::uint64_t& end) {
  Where where{index, {}};
  TensorRecord tensor;
  tensor.version = 2;
  tensor.index = index;
  read_name(in, where, tensor.name);
  tensor.dtype = read_dtype(in, where);
  read_shape(in, where, tensor);
  read_scale_fields(in, where, tensor);
  read_place(in, where, "the data", bytes_of_dims(tensor, where, in.offset()), config_offset, end,
             tensor.offset_bytes, tensor.size_bytes);
  tensor.checksum = in.value<std::uint64_t>(where, "a checksum");
  if (tensor.scale_kind >= ScaleKind::kRow) {
    read_place(in, where, "the scales", scales_bytes(tensor), config_offset, end,
               tensor.scales_offset, tensor.scales_bytes);
    tensor.scales_checksum = in.value<std::uint64_t>(where, "a checksum");
  }
  return tensor;
}

// A scale of a row or a group may be 0, where all weights are; a single one may not.
void check_scale_values(Bytes scales, const TensorRecord& tensor) {
  const bool f32 = tensor.scale_dtype == DType::kF32;
  const std::uint64_t item = f32 ? 4 : 2;
  for (std::uint64_t i = 0; i < scales.size() / item; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, scales.data() + i * item, item);
    const bool subnormal = f32 && bits != 0 && bits < 0x00800000U;
    if (bits >= (f32 ? 0x7f800000U : 0x7c00U) || subnormal) {
      fail(ErrorCode::kScaleValue, tensor.scales_offset + i * item, where_of(tensor),
           "scales that are finite, not negative and not subnormal in f32, got bits " + hex(bits) +
               " at scale " + str(i),
           "; check the source's scales and convert the model again");
    }
  }
}

}  // namespace

void check_sum(Bytes file, const TensorRecord& tensor) {
  if (tensor.version < 2) return;
  const Where where = where_of(tensor);
  check_hash(ErrorCode::kDataChecksum, file.subspan(tensor.offset_bytes, tensor.size_bytes),
             tensor.checksum, "the data", where, tensor.offset_bytes);
  if (tensor.scales_bytes == 0) return;
  check_hash(ErrorCode::kDataChecksum, file.subspan(tensor.scales_offset, tensor.scales_bytes),
             tensor.scales_checksum, "the scales", where, tensor.scales_offset);
}

void check_scales_and_gaps(Bytes file, const TensorRecord& tensor) {
  const Where where = where_of(tensor);
  check_scale_values(file.subspan(tensor.scales_offset, tensor.scales_bytes), tensor);
  const std::uint64_t data_end = tensor.offset_bytes + tensor.size_bytes;
  check_zeros(file, data_end, aligned(data_end), where);
  if (tensor.scales_bytes == 0) return;
  const std::uint64_t scales_end = tensor.scales_offset + tensor.scales_bytes;
  check_zeros(file, scales_end, aligned(scales_end), where);
}

ParsedFile parse_v2(Bytes file, Cursor in) {
  const Header header = read_header(file, in);
  ParsedFile parsed;
  parsed.version = 2;
  parsed.config = read_config(file, header);
  parsed.config_offset = header.config_offset;
  Cursor index = open_index(file, header);
  parsed.tensors.reserve(header.tensors);
  std::uint64_t end = kHeaderBytes;
  for (std::uint32_t i = 0; i < header.tensors; ++i)
    parsed.tensors.push_back(read_record(index, i, header.config_offset, end));
  if (index.left() != 0) {
    fail(ErrorCode::kTrailingBytes, index.offset(), Where{},
         "the end of the file at offset " + str(index.offset()) + " after " + str(header.tensors) +
             " tensors, got " + str(index.left()) + " more bytes");
  }
  check_offset(header.config_offset, aligned(end), "the config", Where{}, kAtConfigOffset);
  check_unique(parsed.tensors);
  return parsed;
}

}  // namespace bitnet::format
