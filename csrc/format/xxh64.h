// XXH64 with seed 0, the 64-bit xxHash (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): as fast as
// memory in plain code, where CRC-32 by tables takes a second a gigabyte. It finds accidents; it
// is no proof against a forger.
// Must not know: files, formats.
#pragma once

#include <cstdint>
#include <span>

#pragma GCC visibility push(default)

namespace bitnet::format {

std::uint64_t xxh64(std::span<const std::uint8_t> bytes);

}  // namespace bitnet::format

#pragma GCC visibility pop
