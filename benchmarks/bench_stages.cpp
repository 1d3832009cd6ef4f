// What the barrier of the staged executor costs: bench_stages [threads] [stages]. Nanoseconds that
// a stage takes longer than its work, one unit of half a microsecond a thread, and those of a
// change of one line by all threads: what benchmarks/many_cores.py assumes for machines that were
// not at hand. Of several runs the best and the median, since other processes disturb.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/staged_executor.h"

namespace bitnet::test {
namespace {

// A chain of multiplications, which no other thread can make longer.
uint64_t work_of_a_unit(uint64_t x) {
  for (int i = 0; i < 400; ++i) x = x * 6364136223846793005u + 1442695040888963407u;
  return x;
}

struct Chain {
  int64_t n_stages, n_units;
  mutable std::vector<Scratch<uint64_t>> sinks;  // of each slot

  Chain(int64_t stages_in, int64_t units_in) : n_stages(stages_in), n_units(units_in) {
    for (int64_t i = 0; i < units_in; ++i) sinks.emplace_back(8);
  }
  int64_t stages() const { return n_stages; }
  int64_t units(int64_t) const { return n_units; }
  ClaimRule claim(int64_t) const { return {1, 1}; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t slot) const {
    uint64_t& sink = *sinks[static_cast<size_t>(slot)].get();
    for (int64_t i = begin; i < end; ++i) sink = work_of_a_unit(sink);
  }
};

struct Times {
  double best, median;
};

// f(thread) on so many threads, which begin at about the same time; ns of the whole.
template <class F>
Times time_of(int64_t threads, const F& f) {
  constexpr int kRuns = 15;
  std::vector<double> took;
  for (int run = 0; run < kRuns; ++run) {
    std::atomic<int64_t> missing{threads};
    const auto all = [&](int64_t thread) {
      missing.fetch_sub(1);
      while (missing.load() > 0) std::this_thread::yield();
      f(thread);
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; ++t) others.emplace_back(all, t);
    missing.fetch_sub(1);
    while (missing.load() > 0) std::this_thread::yield();
    const int64_t begin = steady_ns();
    f(0);
    for (std::thread& other : others) other.join();
    took.push_back(static_cast<double>(steady_ns() - begin));
  }
  std::sort(took.begin(), took.end());
  return {took.front(), took[kRuns / 2]};
}

void print(const char* what, Times times, double count, double less) {
  std::printf("  %-32s best %7.1f  median %7.1f ns\n", what, times.best / count - less,
              times.median / count - less);
}

void report(int64_t threads, int64_t stages) {
  const auto count = static_cast<double>(stages);
  const Chain chain(stages, threads);
  const double unit = time_of(1,
                              [&](int64_t) {
                                for (int64_t i = 0; i < stages; ++i) chain.run(0, 0, 1, 0);
                              })
                          .best /
                      count;
  const auto executor = std::make_unique<StagedExecutor>();
  std::atomic<int64_t> left{0};
  std::printf("%lld threads, units of %.0f ns\n", static_cast<long long>(threads), unit);
  // nobody starts it while one is still in it
  const Times stage = time_of(threads, [&](int64_t t) {
    if (t == 0) {
      executor->start(threads, chain);
      left.store(threads);
    }
    while (left.load() == 0) std::this_thread::yield();
    executor->work(t, t + 1, chain);
    left.fetch_sub(1);
    while (left.load() != 0) std::this_thread::yield();
  });
  print("a stage but its unit", stage, count, unit);
  alignas(64) std::atomic<int64_t> line{0};
  const Times changes = time_of(threads, [&](int64_t) {
    for (int64_t i = 0; i < 50 * stages; ++i) line.fetch_add(1, std::memory_order_acq_rel);
  });
  print("a change of one line", changes, 50 * count * static_cast<double>(threads), 0.0);
}

}  // namespace
}  // namespace bitnet::test

int main(int argc, char** argv) {
  const int64_t threads = argc > 1 ? std::clamp(std::atoll(argv[1]), 1ll, 256ll) : 2;
  const int64_t stages = argc > 2 ? std::clamp(std::atoll(argv[2]), 1ll, 60000ll) : 2000;
  bitnet::test::report(1, stages);
  if (threads > 1) bitnet::test::report(threads, stages);
  return 0;
}
