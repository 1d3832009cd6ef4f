// The strings of a GGUF metadata array: each a length of 8 bytes and UTF-8. A vocabulary has some
// hundred thousand of them, so they are walked here and stay bytes; Python makes text of those it
// is asked for. Must not know: files, Python, what a string means.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#pragma GCC visibility push(default)

namespace bitnet::format {

enum class GgufStringFault : std::uint32_t {
  kNone = 0,     // all that were asked for
  kEnds = 1,     // the bytes end within the next one
  kTooLong = 2,  // its length exceeds the limit
  kUtf8 = 3,     // it is no UTF-8
};

struct GgufStrings {
  std::uint64_t count = 0;  // whole and valid strings
  std::uint64_t end = 0;    // offset behind the last of these
  GgufStringFault fault = GgufStringFault::kNone;
  std::uint64_t at = 0;              // kTooLong: the length; kUtf8: offset of the first bad byte
  std::vector<std::uint64_t> marks;  // offsets of strings whose number divides by the stride
};

// Walks up to `count` strings of `bytes` from `offset` on. `first` is the number of the first one
// within its array, and `stride` (above 0) says which of them are marked. Memory: the marks alone.
GgufStrings walk_gguf_strings(std::span<const std::uint8_t> bytes, std::uint64_t offset,
                              std::uint64_t count, std::uint64_t max_bytes, std::uint64_t first,
                              std::uint64_t stride);

}  // namespace bitnet::format

#pragma GCC visibility pop
