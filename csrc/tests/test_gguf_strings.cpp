// Walking strings of GGUF arrays against hostile bytes: a second walk, written otherwise, must
// agree on every mutant, whether it is given whole or in pieces, and memory is that of the marks.
// Meant to be built with -fsanitize=address,undefined as well. Must not know: files, Python.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "format/gguf_strings.h"
#include "tests/hostile.h"

namespace bitnet::test {
namespace {

using Fault = format::GgufStringFault;

void append(Buffer& bytes, const std::string& text) {
  const std::uint64_t length = text.size();
  for (int shift = 0; shift < 64; shift += 8)
    bytes.push_back(static_cast<std::uint8_t>(length >> shift));
  bytes.insert(bytes.end(), text.begin(), text.end());
}

// How many bytes the scalar value that starts a text takes, 0 if it is none: by decoding it and
// encoding it again, which format/utf8.h does not do.
std::size_t decoded(const std::uint8_t* text, std::size_t left) {
  for (std::size_t length = 1; length <= std::min<std::size_t>(left, 4); ++length) {
    constexpr std::uint32_t kLeadBits[] = {0x7f, 0x1f, 0x0f, 0x07};
    constexpr std::uint32_t kLeadMark[] = {0x00, 0xc0, 0xe0, 0xf0};
    constexpr std::uint32_t kSmallest[] = {0, 0x80, 0x800, 0x10000};
    if ((text[0] & ~kLeadBits[length - 1] & 0xffU) != kLeadMark[length - 1]) continue;
    std::uint32_t value = text[0] & kLeadBits[length - 1];
    bool right = true;
    for (std::size_t i = 1; i < length; ++i) {
      right = right && (text[i] >> 6) == 2;
      value = value << 6 | (text[i] & 0x3fU);
    }
    right = right && value >= kSmallest[length - 1] && value <= 0x10ffff;
    if (right && (value < 0xd800 || value > 0xdfff)) return length;
  }
  return 0;
}

struct Expected {
  std::vector<std::uint64_t> starts;
  std::uint64_t end = 0;
  Fault fault = Fault::kNone;
  std::uint64_t at = 0;
};

Expected walk_again(const Buffer& bytes, std::uint64_t count, std::uint64_t max) {
  Expected out;
  const std::uint64_t size = bytes.size();
  while (out.starts.size() < count) {
    const std::uint64_t at = out.end;
    if (at + 8 > size) return out.fault = Fault::kEnds, out;
    std::uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | bytes[at + static_cast<std::uint64_t>(i)];
    if (length > max) return out.fault = Fault::kTooLong, out.at = length, out;
    if (at + 8 + length > size) return out.fault = Fault::kEnds, out;  // max is small: no overflow
    for (std::uint64_t i = 0; i < length;) {
      const std::size_t taken = decoded(bytes.data() + at + 8 + i, length - i);
      if (taken == 0) return out.fault = Fault::kUtf8, out.at = at + 8 + i, out;
      i += taken;
    }
    out.starts.push_back(at);
    out.end = at + 8 + length;
  }
  return out;
}

// The walk over pieces, as Python does it: what is left of one goes in front of the next.
Expected walk_pieces(const Buffer& bytes, std::uint64_t count, std::uint64_t max, Engine& random) {
  Expected out;
  Buffer rest;
  std::uint64_t given = 0;
  do {
    const std::uint64_t piece = std::min(1 + below(random, 64), bytes.size() - given);
    rest.insert(rest.end(), bytes.begin() + static_cast<std::ptrdiff_t>(given),
                bytes.begin() + static_cast<std::ptrdiff_t>(given + piece));
    given += piece;
    const Buffer exact(rest.begin(), rest.end());  // no spare capacity: ASan sees the end
    const auto walked =
        format::walk_gguf_strings(exact, 0, count - out.starts.size(), max, out.starts.size(), 1);
    require(walked.marks.size() == walked.count, "a stride of 1 marks every string");
    for (const std::uint64_t mark : walked.marks) out.starts.push_back(out.end + mark);
    out.fault = walked.fault;
    out.at = walked.at + (walked.fault == Fault::kUtf8 ? out.end : 0);
    out.end += walked.end;
    rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(walked.end));
  } while (out.fault == Fault::kEnds && given < bytes.size());
  return out;
}

void check(const Buffer& bytes, std::uint64_t count, std::uint64_t max, Engine& random,
           std::vector<std::uint64_t>& seen) {
  const Expected expected = walk_again(bytes, count, max);
  ++seen[static_cast<std::size_t>(expected.fault)];
  const std::uint64_t stride = 1 + below(random, 5), first = below(random, 5);
  const auto walked = format::walk_gguf_strings(bytes, 0, count, max, first, stride);
  require(walked.count == expected.starts.size() && walked.end == expected.end, "count and end");
  require(walked.fault == expected.fault && walked.at == expected.at, "fault and place");
  std::vector<std::uint64_t> marks;
  for (std::uint64_t i = 0; i < expected.starts.size(); ++i)
    if ((first + i) % stride == 0) marks.push_back(expected.starts[i]);
  require(walked.marks == marks, "marks");
  if (bytes.empty()) return;
  const Expected pieces = walk_pieces(bytes, count, max, random);
  require(pieces.starts == expected.starts && pieces.end == expected.end, "pieces: starts, end");
  require(pieces.fault == expected.fault && pieces.at == expected.at, "pieces: fault, place");
}

void mutate(Buffer& bytes, Engine& random) {
  if (bytes.empty()) return;
  const auto at = static_cast<std::ptrdiff_t>(below(random, bytes.size()));
  switch (below(random, 5)) {
    case 0:
      bytes[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(random());
      break;
    case 1:
      bytes[static_cast<std::size_t>(at)] ^= static_cast<std::uint8_t>(1U << below(random, 8));
      break;
    case 2:
      bytes.resize(static_cast<std::size_t>(at));
      break;
    case 3:
      bytes.erase(bytes.begin() + at);
      break;
    default: {
      const std::uint64_t values[] = {0,     1,         299,        300,         301,
                                      ~0ULL, ~0ULL - 7, 1ULL << 63, bytes.size()};
      const std::uint64_t value = values[below(random, std::size(values))];
      if (bytes.size() - static_cast<std::size_t>(at) >= 8)
        std::memcpy(bytes.data() + at, &value, sizeof(value));
    }
  }
}

Buffer sample(Engine& random) {
  const std::string texts[] = {"",
                               "a",
                               "hello world",
                               "\xc3\xbc",
                               "\xe2\x96\x81the",
                               "\xf0\x9f\x99\x82",
                               "\xed\x9f\xbf\xee\x80\x80",
                               std::string(300, 'x')};
  Buffer out;
  for (std::uint64_t n = below(random, 12); n > 0; --n)
    append(out, texts[below(random, std::size(texts))]);
  return out;
}

TEST(hostile_bytes) {
  Engine random(number_from("BITNET_TEST_SEED", 20261122));
  std::vector<std::uint64_t> seen(4);
  for (std::uint64_t i = 0; i < mutations(); ++i) {
    Buffer mutant = sample(random);
    for (std::uint64_t n = below(random, 4); n > 0; --n) mutate(mutant, random);
    const Buffer exact(mutant.begin(), mutant.end());
    check(exact, below(random, 14), 300, random, seen);
  }
  std::printf("  %llu mutants: %llu whole, %llu cut, %llu too long, %llu no UTF-8\n",
              static_cast<unsigned long long>(mutations()),
              static_cast<unsigned long long>(seen[0]), static_cast<unsigned long long>(seen[1]),
              static_cast<unsigned long long>(seen[2]), static_cast<unsigned long long>(seen[3]));
  if (mutations() >= 1000)
    for (const std::uint64_t count : seen) require(count > 0, "every outcome is reached");
  // nothing is read behind an offset that lies outside
  const Buffer few(8);
  require(format::walk_gguf_strings(few, 9, 1, 8, 0, 1).fault == Fault::kEnds, "outside");
  require(format::walk_gguf_strings(few, ~0ULL, 1, 8, 0, 1).fault == Fault::kEnds, "far outside");
}

}  // namespace
}  // namespace bitnet::test
