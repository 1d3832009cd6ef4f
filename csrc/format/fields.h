// The fields that both versions of the format have, read and checked once for both.
// Lengths and counts of the file meet arithmetic only in `Cursor::take` and `checked_mul`: whoever
// adds a field goes through them, and so cannot overflow, read past the end or allocate first.
// Internal to csrc/format. Must not know: in which order a version has its fields.
#pragma once

#include <cstring>

#include "format/errors.h"

namespace bitnet::format {

inline std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// False if the product does not fit u64.
inline bool checked_mul(std::uint64_t a, std::uint64_t b, std::uint64_t& product) {
  return !__builtin_mul_overflow(a, b, &product);
}

// A position in the file that cannot leave it.
class Cursor {
 public:
  explicit Cursor(Bytes file, std::uint64_t offset = 0) : file_(file), offset_(offset) {}
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
  std::uint64_t offset_;
};

std::string text_of(float value);  // nine digits, which identify every f32

// `at`: where the field lies in the file, for the error.
void check_config_length(std::uint64_t length, std::uint64_t at);
void check_config_text(std::string_view config, std::uint64_t at);
void check_tensor_count(std::uint64_t count, std::uint64_t room_bytes, std::uint64_t smallest,
                        std::uint64_t at);
// Puts the name into `name`, which `where` refers to from then on.
void read_name(Cursor& in, Where& where, std::string& name);
DType read_dtype(Cursor& in, const Where& where);
void read_dims(Cursor& in, const Where& where, TensorRecord& tensor);  // ndim, and the dimensions
float read_scale(Cursor& in, const Where& where);
// The size in bytes of a dense tensor's data, or of a packed one's, whose dims are [N, row bytes].
std::uint64_t bytes_of_dims(const TensorRecord& tensor, const Where& where, std::uint64_t at);
void check_size(std::uint64_t size_bytes, std::uint64_t expected, const char* what,
                const Where& where, std::uint64_t at);
void check_unique(const std::vector<TensorRecord>& tensors);

// The file after its magic and version.
ParsedFile parse_v1(Bytes file, Cursor in);
ParsedFile parse_v2(Bytes file, Cursor in);

// Version 2: the values of a tensor's scales, and zeros behind its data and scales.
void check_scales_and_gaps(Bytes file, const TensorRecord& tensor);

}  // namespace bitnet::format
