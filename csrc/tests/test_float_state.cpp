// The floating-point state that ops compute in: the default inside, the caller's afterwards, on
// every thread by itself, also when an exception leaves.
// Must not know ops or kernels.
#include "runtime/float_state.h"

#include <cfenv>
#include <limits>
#include <stdexcept>
#include <thread>

#include "tests/check.h"

namespace bitnet::test {
namespace {

#if defined(__x86_64__)
void flush_subnormals() { _mm_setcsr(_mm_getcsr() | 0x8040); }  // FTZ and DAZ
#elif defined(__aarch64__)
void flush_subnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24)); }  // FZ
#else
void flush_subnormals() {}
#endif

struct Results {
  bool subnormal;  // the smallest normal number halved is not zero
  float third;     // 1 / 3, which two rounding modes give otherwise
  bool operator==(const Results&) const = default;
};

Results compute() {
  volatile float smallest = std::numeric_limits<float>::min(), one = 1.0F, three = 3.0F;
  const volatile float half = smallest * 0.5F;
  return {half > 0.0F, one / three};
}

void check_state(const char* what, const Results& expected) {
  const Results outside = compute();
  {
    const DefaultFloatState floats;
    CHECK(compute() == expected, "%s: inside it is not the default", what);
    const DefaultFloatState nested;
    CHECK(compute() == expected, "%s: nested it is not the default", what);
  }
  CHECK(compute() == outside, "%s: the caller's state was not put back", what);
  try {
    const DefaultFloatState floats;
    throw std::runtime_error("out");
  } catch (const std::runtime_error&) {
  }
  CHECK(compute() == outside, "%s: an exception lost the caller's state", what);
}

// Each in a thread of its own, so that no case sees another's state.
template <class Change>
void in_thread(const char* what, const Results& expected, bool differs, Change change) {
  begin_case("%s", what);
  std::thread([&] {
    change();
    CHECK((compute() != expected) == differs, "%s: the case changes nothing", what);
    check_state(what, expected);
  }).join();
}

TEST(default_inside_and_put_back_behind) {
  const Results expected = compute();
  CHECK(expected.subnormal, "the process starts in another state");
  in_thread("default", expected, false, [] {});
  in_thread("subnormals flushed", expected, true, flush_subnormals);
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    // to nearest, 1 / 3 is rounded up in float32: upward gives the same
    in_thread("rounding", expected, mode != FE_UPWARD, [mode] { std::fesetround(mode); });
  }
}

}  // namespace
}  // namespace bitnet::test
