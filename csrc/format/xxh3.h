// XXH3-128 with seed 0 and the standard secret, the 128-bit xxHash (github.com/Cyan4973/xxHash,
// doc/xxhash_spec.md): several bytes a cycle in plain code. It finds accidents and mixed up parts;
// it is no proof against a forger.
// Must not know: files, formats.
#pragma once

#include <cstdint>
#include <span>

#pragma GCC visibility push(default)

namespace bitnet::format {

struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;  // the canonical form writes it first, big-endian
};

Hash128 xxh3_128(std::span<const std::uint8_t> bytes);

}  // namespace bitnet::format

#pragma GCC visibility pop
