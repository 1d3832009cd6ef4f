// Two things that MinGW-w64's own libraries get wrong, put right for what is linked with this file.
// Must not know who needs them.
#if defined(__MINGW32__)
#include <cxxabi.h>

#include <bit>
#include <cstdint>

// Its fmaf rounds twice and is off by a bit for every fourth triple of numbers. The product is
// exact in double. The sum, rounded to the odd one of its two neighbours, rounds to float as the
// exact sum does: a double has more than twice a float's bits.
extern "C" float fmaf(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b), addend = c;
  const double sum = product + addend, part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);  // NaN of what is not finite
  auto bits = std::bit_cast<uint64_t>(sum);
  if ((error > 0 || error < 0) && bits % 2 == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
  return static_cast<float>(std::bit_cast<double>(bits));
}

// A thread's thread_local objects lie in memory that one thread-specific key frees, and another key
// runs their destructors. Keys end in the order in which they were made, and the first object used
// makes the first of them: destructors would read freed memory. Here the other key is made first.
namespace {

struct Early {
  Early() {
    abi::__cxa_thread_atexit([](void*) {}, nullptr, nullptr);
  }
};

[[gnu::init_priority(101)]] const Early g_early;  // the first number that is not the compiler's

}  // namespace
#endif
