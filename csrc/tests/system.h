// What tests ask of the system: variables of the environment, processes, crashes, pages that cannot
// be accessed, paths for files. Must not know what is tested.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>

namespace bitnet::test {

void set_variable(const char* name, const char* value);

// A path in the system's folder for temporary files at which there is nothing yet.
std::filesystem::path new_path(const char8_t* name);
std::string utf8_of(const std::filesystem::path& path);
#if defined(_WIN32)
inline constexpr bool kMappedFilesCanBeCut = false;
#else
inline constexpr bool kMappedFilesCanBeCut = true;
#endif

std::size_t page_bytes();
// Memory of which nothing can be accessed; nullptr: there is none.
void* reserve_pages(std::size_t bytes);
bool make_accessible(void* pages, std::size_t bytes);
void free_pages(void* pages, std::size_t bytes);

// Calls `report` with the name of what ends this process.
void on_crash(void (*report)(const char* name));

// Whether `body` returns true in a process of its own. `filter` chooses the test or the suite that
// calls this, and `value` tells its calls apart: where there is no fork, the program runs once more
// with the filter and comes here again.
bool succeeds_in_a_process(const std::string& filter, const std::string& value,
                           const std::function<bool()>& body);

}  // namespace bitnet::test
