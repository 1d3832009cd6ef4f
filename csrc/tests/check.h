// What the C++ tests are written with: CHECK, a running case that is named when the process dies on
// a signal, and the summary that becomes the exit status. A failed check does not end the test: the
// first twenty are shown, all are counted. Must not know kernels.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace bitnet::test {

struct Tally {
  int64_t cases = 0, checks = 0, failures = 0;
  char running[256] = "start";
};

inline Tally tally;

// Names the case that begins: a guard page or an illegal instruction can then be told from its
// name.
[[gnu::format(printf, 1, 2)]] inline void begin_case(const char* format, ...) {
  ++tally.cases;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(tally.running, sizeof tally.running, format, arguments);
  va_end(arguments);
}

[[gnu::format(printf, 3, 4), gnu::cold]] inline void fail(int line, const char* what,
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

inline void name_case_and_die(int signal) {
  const auto say = [](const char* text) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) std::_Exit(1);
  };
  say("FAILED: ");
  say(strsignal(signal));
  say(" in case: ");
  say(tally.running);
  say("\n");
  std::_Exit(1);
}

inline void name_case_on_signals() {
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) {
    std::signal(signal, name_case_and_die);
  }
}

// Prints the totals; the exit status.  A test that checked nothing has failed.
inline int finish(const char* name) {
  std::printf("%s: %lld cases, %lld checks, %lld failures\n", name,
              static_cast<long long>(tally.cases), static_cast<long long>(tally.checks),
              static_cast<long long>(tally.failures));
  return tally.failures == 0 && tally.checks > 0 ? 0 : 1;
}

}  // namespace bitnet::test
