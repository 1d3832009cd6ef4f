// What the tests of hostile bytes share: a fixed source of mutations, how many of them, and bytes
// that end where memory does.  Must not know formats.
//
// Environment: BITNET_TEST_MUTATIONS (default 200,000) and BITNET_TEST_SEED choose others.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <span>
#include <vector>

#include "tests/check.h"
#include "tests/guarded.h"

namespace bitnet::test {

using Buffer = std::vector<std::uint8_t>;
using Bytes = std::span<const std::uint8_t>;
using Engine = std::mt19937_64;

inline constexpr std::uint64_t kMutations = 200000;  // enough to reach every rule

inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}
inline std::uint64_t mutations() {
  const bool quick = std::getenv("BITNET_TEST_QUICK") != nullptr;
  return number_from("BITNET_TEST_MUTATIONS", quick ? kMutations / 10 : kMutations);
}

inline std::uint64_t below(Engine& random, std::uint64_t n) { return n == 0 ? 0 : random() % n; }

// What is wrong about one file is wrong about the next hundred thousand: the first ends the test.
inline void require(bool condition, const char* what) {
  CHECK(condition, "%s", what);
  if (!condition) std::exit(1);
}

// Flush against an inaccessible page: reading one byte too many is a signal.
class Guard {
 public:
  explicit Guard(std::size_t capacity) : arena_(capacity) {}
  Bytes put(Bytes bytes) {
    const auto size = static_cast<int64_t>(bytes.size());
    return {arena_.place_copy(bytes.data(), size, {true, 0}), bytes.size()};
  }

 private:
  Arena arena_;
};

}  // namespace bitnet::test
