// SGLBITNT versions 1 and 2: the strict reader of the model file that FORMAT.md defines.
// The file is bytes in memory, never copied: names, config and data are views of them. Every number
// the file supplies is checked (range, u64 arithmetic, room left in the file) before it is used,
// and what is allocated is bounded by kMaxTensors records whatever the file claims. Must not know:
// torch, Python, threads, SIMD, what the config means.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// The classes cross from libbitnet_kernels.so into _runtime.so; an exception type must be one
// symbol.
#pragma GCC visibility push(default)

namespace bitnet::format {

inline constexpr std::string_view kMagic = "SGLBITNT";
inline constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kMaxTensors = std::uint64_t{1} << 16;
inline constexpr std::uint64_t kMaxNameBytes = 1024;
inline constexpr std::uint32_t kMaxDims = 8;
inline constexpr std::uint32_t kMaxDim = 0x7fffffff;
// Version 2: data, scales, config and index begin at multiples of this, so that a mapping serves as
// memory of any dtype.
inline constexpr std::uint64_t kAlignment = 64;

// One code per rule of FORMAT.md; error_code_name() gives the spelling used there.
enum class ErrorCode {
  kIo,
  kTruncated,
  kMagic,
  kVersion,
  kConfigLength,
  kConfigUtf8,
  kTensorCount,
  kNameLength,
  kNameUtf8,
  kNameControl,
  kNameDuplicate,
  kDtype,
  kNdim,
  kDim,
  kPackedShape,
  kHasScale,
  kScaleMissing,
  kScaleUnexpected,
  kScaleValue,
  kSizeOverflow,
  kSizeMismatch,
  kTrailingBytes,
  kInvalidCode,
  kNonFinite,
  kInFeatures,
  kPaddingCode,
  kHeaderChecksum,
  kConfigChecksum,
  kIndexChecksum,
  kDataChecksum,
  kReserved,
  kFileLength,
  kOffset,
  kPaddingBytes,
  kScaleKind,
  kScaleDtype,
  kGroupSize,
  kCount  // number of codes, not a code
};

const char* error_code_name(ErrorCode code);

// what() reads "<where>: expected <this>, got <that>; <remedy>".
class FormatError : public std::runtime_error {
 public:
  FormatError(ErrorCode code, std::uint64_t offset_bytes, const std::string& message)
      : std::runtime_error(message), code_(code), offset_bytes_(offset_bytes) {}
  ErrorCode code() const { return code_; }
  std::uint64_t offset_bytes() const { return offset_bytes_; }  // of the offending field

 private:
  ErrorCode code_;
  std::uint64_t offset_bytes_;
};

enum class DType : std::uint32_t { kU8 = 0, kF32 = 1, kF16 = 2, kBF16 = 3 };

enum class ScaleKind : std::uint32_t { kNone = 0, kTensor = 1, kRow = 2, kGroup = 3 };

// Version 1 has no in_features (0), scales of the tensor alone, and no checksums.
struct TensorRecord {
  std::string name;
  std::uint32_t version = 1;
  std::uint32_t index = 0;  // position in the file, for error messages
  DType dtype = DType::kU8;
  std::uint32_t ndim = 0;
  std::array<std::uint32_t, kMaxDims> dims{};  // dims[0 .. ndim); packed: rows, bytes of a row
  std::uint32_t in_features = 0;               // the true K of a packed tensor
  std::uint64_t offset_bytes = 0;              // of the data, from the start of the file
  std::uint64_t size_bytes = 0;
  std::uint64_t checksum = 0;  // XXH64 of the data
  ScaleKind scale_kind = ScaleKind::kNone;
  float scale = 0.0F;               // of kTensor; scales multiply
  DType scale_dtype = DType::kF32;  // of kRow and kGroup: f32 or f16
  std::uint32_t group_size = 0;     // of kGroup: weights along K that share a scale
  std::uint64_t scales_offset = 0;  // of kRow, [rows], and kGroup, [rows, groups]
  std::uint64_t scales_bytes = 0;
  std::uint64_t scales_checksum = 0;

  bool packed() const { return dtype == DType::kU8; }
};

// Texts are copies that were made before they were checked: whoever writes to a mapped file while
// it is read may change what a tensor's data are, but no text that has passed for UTF-8 or for
// unique.
struct ParsedFile {
  std::uint32_t version = 1;
  std::string config;  // UTF-8; JSON is parsed by the caller
  std::uint64_t config_offset = 0;
  std::vector<TensorRecord> tensors;
};

struct CodeCounts {
  std::uint64_t minus = 0;
  std::uint64_t zero = 0;
  std::uint64_t plus = 0;
};

// Structure only: reads every header, no tensor data. The result views `file`.
ParsedFile parse(std::span<const std::uint8_t> file);

// Version 2: the data and scales of one tensor have their checksums. Version 1: nothing.
void check_sum(std::span<const std::uint8_t> file, const TensorRecord& tensor);

// Data of one tensor: check_sum; no code 3 in a packed one, no NaN or infinity in a dense one;
// version 2 also: scales finite and not negative, padding codes 1, bytes between tensors 0.
void check_data(std::span<const std::uint8_t> file, const TensorRecord& tensor);

// A packed tensor against the true K: row bytes are 32*ceil(K/128), every padding code is 1, and K
// is that of the record if it has one.
void check_in_features(std::span<const std::uint8_t> file, const TensorRecord& tensor,
                       std::uint64_t in_features);

// How often each weight occurs in a packed tensor, padding included (it counts as zero).
CodeCounts count_codes(std::span<const std::uint8_t> file, const TensorRecord& tensor);

}  // namespace bitnet::format

#pragma GCC visibility pop
