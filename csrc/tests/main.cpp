// bitnet_tests [--list] [-PART...] [FILTER...]: runs the tests whose name, suite.test, contains one
// of the filters; without a filter all; never those whose name contains a PART. --list prints their
// names instead.
//
// Several suites run in a process each, so that what one leaves behind (a forced ISA, variables of
// the environment, threads) meets no other, and a crash ends one suite alone. A single suite runs
// in this process, for debuggers.
#include <algorithm>
#include <chrono>

#include "tests/check.h"
#include "tests/system.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

void name_case_and_die(const char* crash) {
  const auto say = [](const char* text) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) std::_Exit(1);
  };
  say("FAILED: ");
  say(crash);
  say(" in case: ");
  say(tally.running);
  say("\n");
  std::_Exit(1);
}

// Products by tables of sums wherever an ISA has them, whether or not they gain on this CPU; those
// by multiplication are tested as kernels, and in products that are too small for tables.
void use_tables() {
  if (std::getenv("BITNET_OPS_TUNING") == nullptr) set_variable("BITNET_OPS_TUNING", "measure=0");
}

// What runs, and whether it is what BITNET_TEST_EXPECT promises.
bool announce() {
  std::string names;
  for (const KernelTable* kernels : available_tables()) {
    names += (names.empty() ? "" : ",") + std::string(kernels->name);
  }
  std::printf("available %s; under test", names.c_str());
  for (const KernelTable* kernels : tables_under_test()) std::printf(" %s", kernels->name);
  std::printf("%s\n", under_emulator() ? "; thinned for an emulator" : "");
  const char* expected = std::getenv("BITNET_TEST_EXPECT");
  if (expected == nullptr || names == expected) return true;
  std::fprintf(stderr, "FAILED: expected the ISAs %s, got %s\n", expected, names.c_str());
  return false;
}

// A test that checked nothing has failed, unless it says that this machine has nothing to check.
bool passes(const Test& test) {
  using Clock = std::chrono::steady_clock;
  tally = {};
  begin_case("start of %s.%s", test.suite.c_str(), test.name.c_str());
  const Clock::time_point start = Clock::now();
  test.run();
  const std::chrono::duration<double> seconds = Clock::now() - start;
  const bool passed = tally.failures == 0 && (tally.checks > 0 || tally.not_here);
  std::printf("%s %s.%s: %lld cases, %lld checks, %lld failures, %.2f s\n",
              passed ? "ok  " : "FAIL", test.suite.c_str(), test.name.c_str(),
              static_cast<long long>(tally.cases), static_cast<long long>(tally.checks),
              static_cast<long long>(tally.failures), seconds.count());
  std::fflush(stdout);
  return passed;
}

bool all_pass(const std::vector<Test>& tests) {
  on_crash(name_case_and_die);
  return std::ranges::count_if(tests, passes) == std::ssize(tests);
}

bool pass_in_a_process(const std::vector<Test>& tests) {
  return succeeds_in_a_process(tests[0].suite + ".", "", [&] { return all_pass(tests); });
}

// The tests that a filter chooses and none leaves out, by suite.
std::vector<std::vector<Test>> chosen(std::vector<std::string> filters) {
  std::vector<std::string> left_out;
  std::erase_if(filters, [&](const std::string& filter) {
    if (filter.starts_with('-')) left_out.push_back(filter.substr(1));
    return filter.starts_with('-');
  });
  std::vector<Test> tests = all_tests();
  std::erase_if(tests, [&](const Test& test) {
    const std::string name = test.suite + "." + test.name;
    const auto part = [&](const std::string& filter) { return name.find(filter) != name.npos; };
    return (!filters.empty() && std::ranges::none_of(filters, part)) ||
           std::ranges::any_of(left_out, part);
  });
  std::ranges::stable_sort(tests, {}, &Test::suite);
  std::vector<std::vector<Test>> suites;
  for (const Test& test : tests) {
    if (suites.empty() || suites.back().front().suite != test.suite) suites.emplace_back();
    suites.back().push_back(test);
  }
  return suites;
}

int run(std::vector<std::string> arguments) {
  const bool list = std::erase(arguments, "--list") > 0;
  const std::vector<std::vector<Test>> suites = chosen(arguments);
  if (suites.empty()) {
    std::fprintf(stderr, "bitnet_tests: expected a part of a test's name (see --list)\n");
    return 2;
  }
  if (list) {
    for (const std::vector<Test>& suite : suites) {
      for (const Test& test : suite)
        std::printf("%s.%s\n", suite[0].suite.c_str(), test.name.c_str());
    }
    return 0;
  }
  use_tables();
  if (!announce()) return 1;
  if (suites.size() == 1) return all_pass(suites[0]) ? 0 : 1;
  std::string failed;
  for (const std::vector<Test>& suite : suites) {
    if (!pass_in_a_process(suite)) failed += " " + suite[0].suite;
  }
  if (failed.empty()) return 0;
  std::fprintf(stderr, "FAILED suites:%s\n", failed.c_str());
  return 1;
}

}  // namespace
}  // namespace bitnet::test

int main(int argc, char** argv) { return bitnet::test::run({argv + 1, argv + argc}); }
