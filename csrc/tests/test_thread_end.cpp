// What a thread's objects find when it ends: the thread's other memory as it was
// (runtime/memory.cpp releases kept blocks there).
#include <thread>

#include "tests/check.h"

namespace bitnet::test {
namespace {

constinit thread_local int t_number = 0;
int g_found = 0;

struct Ending {
  ~Ending() { g_found = t_number; }
};

TEST(destructors_see_the_threads_memory) {
  for (int number = 1; number <= 10; ++number) {
    begin_case("thread %d", number);
    std::thread([number] {
      t_number = number;
      thread_local Ending ending;
      static_cast<void>(&ending);
    }).join();
    CHECK(g_found == number, "found %d", g_found);
  }
}

}  // namespace
}  // namespace bitnet::test
