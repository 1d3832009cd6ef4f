// UTF-8 validation for names and the config: where the first bad
// byte is. Strict: no overlong form, no surrogate, nothing beyond
// U+10FFFF. Must not know: files, errors.
#pragma once

#include <cstddef>
#include <string_view>

namespace bitnet::format {

// Length of the well-formed sequence at the start of `s` (not empty), 0 if it is not one (Unicode
// table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF).
inline std::size_t utf8_length(std::string_view s) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || s.size() < length) return 0;
  const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (at(1) < low || at(1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

// Index of the first byte that is not UTF-8, or size().
inline std::size_t first_bad_utf8(std::string_view s) {
  std::size_t i = 0;
  while (i < s.size()) {
    const std::size_t length = utf8_length(s.substr(i));
    if (length == 0) return i;
    i += length;
  }
  return i;
}

// Index of the first C0 control, DEL or C1 control of valid UTF-8, or size().
inline std::size_t first_control(std::string_view s) {
  for (std::size_t i = 0; i < s.size(); ++i) {
    const auto c = static_cast<unsigned char>(s[i]);
    if (c < 0x20 || c == 0x7f) return i;
    if (c == 0xc2 && i + 1 < s.size() && static_cast<unsigned char>(s[i + 1]) < 0xa0) return i;
  }
  return s.size();
}

}  // namespace bitnet::format
