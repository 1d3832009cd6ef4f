// SGLBITNT version 1: the strict reader of the model file that FORMAT.md defines.
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
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kMaxTensors = std::uint64_t{1} << 16;
inline constexpr std::uint64_t kMaxNameBytes = 1024;
inline constexpr std::uint32_t kMaxDims = 8;
inline constexpr std::uint32_t kMaxDim = 0x7fffffff;
// name length, name of 1 byte, dtype, ndim, one dim, has_scale, byte length, one f16 value
inline constexpr std::uint64_t kMinTensorBytes = 4 + 1 + 4 + 4 + 4 + 4 + 8 + 2;

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

struct TensorRecord {
  std::string_view name;    // into the file
  std::uint32_t index = 0;  // position in the file, for error messages
  DType dtype = DType::kU8;
  std::uint32_t ndim = 0;
  std::array<std::uint32_t, kMaxDims> dims{};  // dims[0 .. ndim)
  float scale = 0.0F;                          // meaningful for kU8 only; it multiplies
  std::uint64_t offset_bytes = 0;              // of the data, from the start of the file
  std::uint64_t size_bytes = 0;

  bool packed() const { return dtype == DType::kU8; }
};

struct ParsedFile {
  std::string_view config;  // UTF-8, into the file; JSON is parsed by the caller
  std::vector<TensorRecord> tensors;
};

struct CodeCounts {
  std::uint64_t minus = 0;
  std::uint64_t zero = 0;
  std::uint64_t plus = 0;
};

// Structure only: reads every header, no tensor data. The result views `file`.
ParsedFile parse(std::span<const std::uint8_t> file);

// Data of one tensor: no code 3 in a packed one, no NaN or infinity in a dense one.
void check_data(std::span<const std::uint8_t> file, const TensorRecord& tensor);

// A packed tensor against the true K: row bytes are 32*ceil(K/128) and every padding code is 1.
void check_in_features(std::span<const std::uint8_t> file, const TensorRecord& tensor,
                       std::uint64_t in_features);

// How often each weight occurs in a packed tensor, padding included (it counts as zero).
CodeCounts count_codes(std::span<const std::uint8_t> file, const TensorRecord& tensor);

}  // namespace bitnet::format

#pragma GCC visibility pop
