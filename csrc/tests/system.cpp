// POSIX and Windows, for tests; see system.h.
#include "tests/system.h"

#if defined(_WIN32)
#include <process.h>
#include <windows.h>
#else
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace bitnet::test {
namespace {

void (*g_report)(const char*) = nullptr;

}  // namespace

std::filesystem::path new_path(const char8_t* name) {
  std::random_device random;
  std::filesystem::path path;
  do {
    path = std::filesystem::temp_directory_path() / name;
    path += std::to_string(random());
  } while (std::filesystem::exists(path));
  return path;
}

std::string utf8_of(const std::filesystem::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}

#if defined(_WIN32)

void set_variable(const char* name, const char* value) { _putenv_s(name, value); }

std::size_t page_bytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}

void* reserve_pages(std::size_t bytes) {
  return VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS);
}

bool make_accessible(void* pages, std::size_t bytes) {
  return VirtualAlloc(pages, bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr;
}

void free_pages(void* pages, std::size_t) { VirtualFree(pages, 0, MEM_RELEASE); }

void on_crash(void (*report)(const char* name)) {
  g_report = report;
  SetUnhandledExceptionFilter([](EXCEPTION_POINTERS* crash) -> LONG {
    char name[32];
    std::snprintf(name, sizeof name, "exception 0x%08lx", crash->ExceptionRecord->ExceptionCode);
    g_report(name);
    return EXCEPTION_EXECUTE_HANDLER;
  });
}

bool succeeds_in_a_process(const std::string& filter, const std::string& value,
                           const std::function<bool()>& body) {
  constexpr const char* kMark = "BITNET_TEST_CHILD";
  static const char* inherited = std::getenv(kMark);
  static const std::string mark = inherited == nullptr ? "" : inherited;
  const std::string own = filter + "=" + value;
  if (mark == own) std::exit(body() ? 0 : 1);
  if (mark.starts_with(filter + "=")) return true;  // another call's process
  std::fflush(nullptr);
  set_variable(kMark, own.c_str());
  const intptr_t status = _spawnl(_P_WAIT, _pgmptr, "bitnet_tests", filter.c_str(), nullptr);
  set_variable(kMark, "");
  return status == 0;
}

#else

void set_variable(const char* name, const char* value) { setenv(name, value, 1); }

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

void* reserve_pages(std::size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

bool make_accessible(void* pages, std::size_t bytes) {
  return mprotect(pages, bytes, PROT_READ | PROT_WRITE) == 0;
}

void free_pages(void* pages, std::size_t bytes) { munmap(pages, bytes); }

void on_crash(void (*report)(const char* name)) {
  g_report = report;
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE})
    std::signal(signal, [](int number) { g_report(strsignal(number)); });
}

bool succeeds_in_a_process(const std::string&, const std::string&,
                           const std::function<bool()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) std::exit(body() ? 0 : 1);
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

#endif

}  // namespace bitnet::test
