// How the format code words its errors: "<where>: expected <this>, got <that>; <remedy>".
// Internal to csrc/format; the text is built only once something is wrong.
// Must not know: which rules there are.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "format/sglbitnt.h"

namespace bitnet::format {

using Bytes = std::span<const std::uint8_t>;

inline constexpr const char* kDamaged = "; the file is damaged: convert the model again";

inline std::string str(std::uint64_t value) { return std::to_string(value); }

// Printable ASCII whatever the bytes are, and short: error lines end up on terminals and in logs.
inline std::string quoted(std::string_view bytes) {
  constexpr std::size_t kShown = 80;
  constexpr const char* kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : bytes.substr(0, kShown)) {
    const auto u = static_cast<unsigned char>(c);
    if (u >= 0x20 && u < 0x7f && c != '"' && c != '\\') {
      out += c;
    } else {
      out += {'\\', 'x', kHex[u >> 4], kHex[u & 15]};
    }
  }
  return out + (bytes.size() > kShown ? "\"..." : "\"");
}

// The part of the file an error speaks of: the header, or a tensor (named once its name is read).
struct Where {
  std::int64_t index = -1;  // -1: the header
  std::string_view name;

  std::string text() const {
    if (index < 0) return "header";
    const std::string tensor = "tensor " + std::to_string(index);
    return name.empty() ? tensor : tensor + " " + quoted(name);
  }
};

inline Where where_of(const TensorRecord& tensor) { return {tensor.index, tensor.name}; }

[[noreturn]] inline void fail(ErrorCode code, std::uint64_t offset_bytes, const Where& where,
                              const std::string& expected_got,
                              const std::string& remedy = kDamaged) {
  throw FormatError(code, offset_bytes, where.text() + ": expected " + expected_got + remedy);
}

}  // namespace bitnet::format
