// Files of POSIX and of Windows; see system_file.h.
#include "format/system_file.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <system_error>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

namespace bitnet::format {
namespace {

std::uint64_t page_bytes() {
#if defined(_WIN32)
  SYSTEM_INFO info;
  ::GetSystemInfo(&info);
  return info.dwPageSize;
#else
  return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
#endif
}

// Whole pages only: those at the ends may hold what others still need.
template <class Hint>
void hint_pages(const std::uint8_t* begin, const std::uint8_t* end, Hint hint) {
  const std::uint64_t page = page_bytes();
  const std::uint64_t from = (reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page;
  const std::uint64_t to = reinterpret_cast<std::uintptr_t>(end) / page * page;
  if (from < to) hint(reinterpret_cast<void*>(from), to - from);
}

#if defined(_WIN32)
HANDLE handle_of(SystemFile file) { return reinterpret_cast<HANDLE>(file); }

std::wstring wide(const std::string& utf8) {
  const int size = static_cast<int>(utf8.size());
  std::wstring text(utf8.size(), L'\0');  // never more units than bytes
  text.resize(static_cast<std::size_t>(
      ::MultiByteToWideChar(CP_UTF8, 0, utf8.data(), size, text.data(), size)));
  return text;
}
#endif

}  // namespace

#if defined(_WIN32)

// Others may write, rename and delete the file, as they may on POSIX.
SystemFile open_to_read(const std::string& path) {
  constexpr DWORD kShared = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
  return reinterpret_cast<SystemFile>(::CreateFileW(wide(path).c_str(), GENERIC_READ, kShared,
                                                    nullptr, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL,
                                                    nullptr));
}

void close_file(SystemFile file) { ::CloseHandle(handle_of(file)); }

std::optional<std::uint64_t> size_of(SystemFile file) {
  LARGE_INTEGER size;
  if (::GetFileType(handle_of(file)) != FILE_TYPE_DISK ||
      ::GetFileSizeEx(handle_of(file), &size) == 0)
    return std::nullopt;
  return static_cast<std::uint64_t>(size.QuadPart);
}

// The view keeps the mapping, whose handle is needed no more.
const std::uint8_t* map_file(SystemFile file, std::uint64_t size_bytes) {
  const HANDLE mapping =
      ::CreateFileMappingW(handle_of(file), nullptr, PAGE_WRITECOPY, 0, 0, nullptr);
  if (mapping == nullptr) return nullptr;
  const void* view = ::MapViewOfFile(mapping, FILE_MAP_COPY, 0, 0, size_bytes);
  const DWORD error = ::GetLastError();
  ::CloseHandle(mapping);
  ::SetLastError(error);
  return static_cast<const std::uint8_t*>(view);
}

void unmap(const std::uint8_t* data, std::uint64_t) { ::UnmapViewOfFile(data); }

// Of memory that is not locked, this takes the pages out of the working set.
void give_back_pages(const std::uint8_t* begin, const std::uint8_t* end) {
  hint_pages(begin, end, [](void* data, std::uint64_t size) { ::VirtualUnlock(data, size); });
}

std::string last_error() {
  return std::system_category().message(static_cast<int>(::GetLastError()));
}

#else

// O_NONBLOCK: a named pipe must be rejected, not waited for.
SystemFile open_to_read(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

void close_file(SystemFile file) { ::close(static_cast<int>(file)); }

std::optional<std::uint64_t> size_of(SystemFile file) {
  struct stat info{};
  if (::fstat(static_cast<int>(file), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  return static_cast<std::uint64_t>(info.st_size);
}

const std::uint8_t* map_file(SystemFile file, std::uint64_t size_bytes) {
  void* map = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                     static_cast<int>(file), 0);
  return map == MAP_FAILED ? nullptr : static_cast<const std::uint8_t*>(map);
}

void unmap(const std::uint8_t* data, std::uint64_t size_bytes) {
  ::munmap(const_cast<std::uint8_t*>(data), size_bytes);
}

void give_back_pages(const std::uint8_t* begin, const std::uint8_t* end) {
  hint_pages(begin, end,
             [](void* data, std::uint64_t size) { ::madvise(data, size, MADV_DONTNEED); });
}

std::string last_error() { return std::strerror(errno); }

#endif

}  // namespace bitnet::format
