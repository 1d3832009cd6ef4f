// What a mapped file asks of the system: POSIX or Windows. Must not know: what is in the file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace bitnet::format {

using SystemFile = std::intptr_t;  // a descriptor, or a handle of Windows
inline constexpr SystemFile kNoFile = -1;

// `path` is UTF-8 where the system has no bytes for paths. kNoFile: last_error() says why. Does not
// wait for a named pipe.
SystemFile open_to_read(const std::string& path);
void close_file(SystemFile file);
// Nothing for what is no regular file.
std::optional<std::uint64_t> size_of(SystemFile file);

// The whole file, copy-on-write; nullptr: last_error() says why. `size_bytes` is not 0.
const std::uint8_t* map_file(SystemFile file, std::uint64_t size_bytes);
void unmap(const std::uint8_t* data, std::uint64_t size_bytes);
// Gives back the memory of the whole pages in a range of a mapping; a hint.
void give_back_pages(const std::uint8_t* begin, const std::uint8_t* end);

std::string last_error();

}  // namespace bitnet::format
