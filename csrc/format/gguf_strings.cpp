// Walking the strings of a GGUF array; see gguf_strings.h. Every length is compared with what is
// left before it is used, so nothing overflows and nothing is read past the end. Must not know:
// files, Python, what a string means.
#include "format/gguf_strings.h"

#include <bit>
#include <cstring>
#include <string_view>

#include "format/utf8.h"

static_assert(std::endian::native == std::endian::little, "GGUF is read by memcpy");

namespace bitnet::format {

GgufStrings walk_gguf_strings(std::span<const std::uint8_t> bytes, std::uint64_t offset,
                              std::uint64_t count, std::uint64_t max_bytes, std::uint64_t first,
                              std::uint64_t stride) {
  GgufStrings out;
  out.end = offset;
  for (; out.count < count; ++out.count) {
    std::uint64_t length = 0;
    if (out.end > bytes.size() || bytes.size() - out.end < sizeof(length)) {
      out.fault = GgufStringFault::kEnds;
      return out;
    }
    std::memcpy(&length, bytes.data() + out.end, sizeof(length));
    if (length > max_bytes) {
      out.fault = GgufStringFault::kTooLong;
      out.at = length;
      return out;
    }
    const std::uint64_t begin = out.end + sizeof(length);  // <= bytes.size()
    if (length > bytes.size() - begin) {
      out.fault = GgufStringFault::kEnds;
      return out;
    }
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + begin, length);
    if (const std::size_t bad = first_bad_utf8(text); bad != length) {
      out.fault = GgufStringFault::kUtf8;
      out.at = begin + bad;
      return out;
    }
    if ((first + out.count) % stride == 0) out.marks.push_back(out.end);
    out.end = begin + length;
  }
  return out;
}

}  // namespace bitnet::format
