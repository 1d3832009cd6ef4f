// What the C++ tests are written with: TEST, which registers one, CHECK, a running case that is
// named when the process dies on a signal, and not_here for what a machine cannot show. A failed
// check does not end the test: the first twenty are shown, all are counted. main.cpp runs them.
// Must not know kernels.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace bitnet::test {

// One test. Its suite is the name of its file without "test_" and ".cpp".
struct Test {
  std::string suite, name;
  void (*run)();
};

// In the order of registration: that of their definitions within a file.
inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* file, const char* name, void (*run)()) {
    std::string suite = file;
    suite = suite.substr(suite.rfind('/') + 1);
    suite = suite.substr(5, suite.size() - 9);
    all_tests().push_back({suite, name, run});
  }
};

#define TEST(name)                                                                         \
  static void test_##name();                                                               \
  static const ::bitnet::test::Registration register_##name{__FILE__, #name, test_##name}; \
  static void test_##name()

struct Tally {
  int64_t cases = 0, checks = 0, failures = 0;
  bool not_here = false;
  char running[256] = "start";
};

inline Tally tally;

// What formats are checked by: MinGW-w64 brings a printf of its own.
#if defined(__MINGW_PRINTF_FORMAT)
#define BITNET_PRINTF __MINGW_PRINTF_FORMAT
#else
#define BITNET_PRINTF printf
#endif

// Names the case that begins: a guard page or an illegal instruction can then be told from its
// name.
[[gnu::format(BITNET_PRINTF, 1, 2)]] inline void begin_case(const char* format, ...) {
  ++tally.cases;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(tally.running, sizeof tally.running, format, arguments);
  va_end(arguments);
}

// This machine lacks what the test is about; a test that checks nothing and does not say so fails.
inline void not_here(const char* what) {
  tally.not_here = true;
  std::printf("  not here: %s\n", what);
}

[[gnu::format(BITNET_PRINTF, 3, 4), gnu::cold]] inline void fail(int line, const char* what,
                                                                 const char* format, ...) {
  constexpr int64_t kShown = 20;
  if (++tally.failures > kShown) return;
  std::fprintf(stderr, "FAILED line %d: %s [%s]: ", line, what, tally.running);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}

// CHECK(condition, "format", values...): counts, reports, goes on.
#define CHECK(condition, ...)                                  \
  do {                                                         \
    ++::bitnet::test::tally.checks;                            \
    if (!(condition)) [[unlikely]] {                           \
      ::bitnet::test::fail(__LINE__, #condition, __VA_ARGS__); \
    }                                                          \
  } while (false)

}  // namespace bitnet::test
