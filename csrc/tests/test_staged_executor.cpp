// The executor of one region, on plain threads: every unit of every stage runs exactly once and
// sees all of the stage before, however the partitions reach the threads; a waiting thread gives
// its core away, and two on one core are as fast as one. Built with BITNET_SANITIZE=thread it
// proves the ordering.
#include "runtime/staged_executor.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "tests/check.h"

namespace bitnet::test {
namespace {

// Unit i of stage s adds the sum of a window of stage s - 1 to itself: plain memory, so that a
// missing happens-before is a data race, and a unit that ran twice or early a wrong number.
struct Waves {
  std::vector<int64_t> sizes;
  int64_t limit = 4;
  mutable std::vector<std::vector<int64_t>> cells;
  mutable std::vector<std::vector<int64_t>> prepared;  // [slot][stage]

  Waves(std::vector<int64_t> sizes_in, int64_t slots, int64_t limit_in)
      : sizes(std::move(sizes_in)), limit(limit_in) {
    for (const int64_t n : sizes) cells.emplace_back(static_cast<size_t>(n), 0);
    prepared.assign(static_cast<size_t>(slots), std::vector<int64_t>(sizes.size(), 0));
  }
  int64_t stages() const { return static_cast<int64_t>(sizes.size()); }
  int64_t units(int64_t stage) const { return sizes[static_cast<size_t>(stage)]; }
  ClaimRule claim(int64_t) const { return {1, limit}; }
  void prefetch_next(int64_t, int64_t) const {}
  int64_t expected(int64_t stage, int64_t unit) const {
    int64_t sum = stage + unit;
    for (int64_t before = stage - 1; before >= 0; --before) {  // the last stage that has units
      const auto& cells_before = cells[static_cast<size_t>(before)];
      if (cells_before.empty()) continue;
      for (size_t i = 0; i < cells_before.size(); i += 1 + cells_before.size() / 7) {
        sum += cells_before[i];
      }
      break;
    }
    return sum % 1'000'003 + 1;
  }
  void prepare(int64_t stage, int64_t slot) const {
    ++prepared[static_cast<size_t>(slot)][static_cast<size_t>(stage)];
  }
  void run(int64_t stage, int64_t begin, int64_t end, int64_t slot) const {
    CHECK_ONE(prepared[static_cast<size_t>(slot)][static_cast<size_t>(stage)] == 1);
    CHECK_ONE(end - begin >= 1 && end - begin <= limit);
    for (int64_t i = begin; i < end; ++i) {
      cells[static_cast<size_t>(stage)][static_cast<size_t>(i)] += expected(stage, i);
    }
  }
  // CHECK counts in plain variables; threads only note a failure.
  static void CHECK_ONE(bool ok) {
    if (!ok) wrong.fetch_add(1);
  }
  static inline std::atomic<int64_t> wrong{0};
};

struct Span {
  int64_t begin, end;
};

// Runs `waves` with one thread for every span; a span list that leaves partitions out is a thread
// that never comes.
void run_spans(int64_t partitions, const std::vector<Span>& spans, StagedExecutor& executor,
               const Waves& waves) {
  executor.start(partitions, waves);
  std::vector<std::thread> threads;
  for (size_t i = 1; i < spans.size(); ++i) {
    threads.emplace_back([&, i] { executor.work(spans[i].begin, spans[i].end, waves); });
  }
  executor.work(spans[0].begin, spans[0].end, waves);
  for (std::thread& thread : threads) thread.join();
}

void check_waves(const Waves& waves, const char* what) {
  CHECK(Waves::wrong.exchange(0) == 0, "%s: a unit ran unprepared or in too large a chunk", what);
  for (int64_t s = 0; s < waves.stages(); ++s) {
    for (int64_t i = 0; i < waves.units(s); ++i) {
      const int64_t got = waves.cells[static_cast<size_t>(s)][static_cast<size_t>(i)];
      CHECK(got == waves.expected(s, i), "%s: stage %lld unit %lld is %lld", what,
            static_cast<long long>(s), static_cast<long long>(i), static_cast<long long>(got));
    }
  }
}

std::vector<int64_t> wave_sizes() {
  std::vector<int64_t> sizes;
  for (int64_t s = 0; s < 200; ++s) sizes.push_back(s * 7 % 53);  // some 0, some 1
  return sizes;
}

TEST(every_way_to_deal_partitions_to_threads) {
  const auto executor = std::make_unique<StagedExecutor>();
  const std::vector<std::pair<int64_t, std::vector<Span>>> ways = {
      {1, {{0, 1}}},
      {2, {{0, 1}, {1, 2}}},
      {2, {{0, 2}}},
      {3, {{0, 2}, {2, 3}}},
      {4, {{0, 1}, {1, 2}, {2, 3}, {3, 4}}},
      {7, {{0, 3}, {3, 4}, {4, 7}}},
      {5, {{0, 1}}},                       // four partitions whose threads never come
      {5, {{4, 5}, {1, 2}}},               // partition 0 never comes
      {20, {{0, 5}, {5, 15}, {15, 20}}},   // threads with partitions of two groups
      {64, {{63, 64}, {0, 1}, {20, 29}}},  // groups of which nobody comes
      {StagedExecutor::kMaxPartitions, {{0, 1}, {1, 200}, {200, StagedExecutor::kMaxPartitions}}},
  };
  for (const auto& [partitions, spans] : ways) {
    for (const int64_t limit : {1, 3, 64}) {
      begin_case("%lld partitions on %zu threads, chunks of %lld",
                 static_cast<long long>(partitions), spans.size(), static_cast<long long>(limit));
      const Waves waves(wave_sizes(), partitions, limit);
      run_spans(partitions, spans, *executor, waves);
      check_waves(waves, "spans");
    }
  }
}

// Hardly any work between two barriers: the hand-over from stage to stage happens all the time,
// with threads that come to a stage when it is over.
TEST(short_stages) {
  const auto executor = std::make_unique<StagedExecutor>();
  std::vector<int64_t> sizes;
  for (int64_t s = 0; s < 4000; ++s) sizes.push_back(1 + s % 3);
  for (const int64_t threads : {2, 3, 4}) {
    begin_case("short stages, %lld threads", static_cast<long long>(threads));
    const Waves waves(sizes, threads, 1);
    std::vector<Span> spans;
    for (int64_t s = 0; s < threads; ++s) spans.push_back({s, s + 1});
    run_spans(threads, spans, *executor, waves);
    check_waves(waves, "short");
  }
}

// A pool that runs the partitions one after the other on one thread must not hang.
TEST(partitions_in_sequence_on_one_thread) {
  begin_case("partitions in sequence");
  const auto executor = std::make_unique<StagedExecutor>();
  const Waves waves(wave_sizes(), 3, 8);
  executor->start(3, waves);
  for (int64_t s = 0; s < 3; ++s) executor->work(s, s + 1, waves);
  check_waves(waves, "sequence");
}

TEST(no_stages_and_empty_stages) {
  const auto executor = std::make_unique<StagedExecutor>();
  for (const auto& sizes : {std::vector<int64_t>{}, {0}, {0, 0, 3, 0}, {5, 0, 0}}) {
    begin_case("%zu stages", sizes.size());
    const Waves waves(sizes, 2, 2);
    run_spans(2, {{0, 1}, {1, 2}}, *executor, waves);
    check_waves(waves, "empty");
  }
}

double thread_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// One unit of the first stage takes long; the other thread has to wait for it.
struct Slow {
  std::chrono::milliseconds delay;
  int64_t stages() const { return 2; }
  int64_t units(int64_t) const { return 2; }
  ClaimRule claim(int64_t) const { return {1, 1}; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t stage, int64_t begin, int64_t, int64_t) const {
    if (stage == 0 && begin == 0) std::this_thread::sleep_for(delay);
  }
};

TEST(waiting_threads_sleep) {
  const auto executor = std::make_unique<StagedExecutor>();
  const Slow slow{std::chrono::milliseconds(300)};
  for (const int64_t threads : {2, 64}) {
    begin_case("%lld threads sleep", static_cast<long long>(threads));
    std::vector<double> cpu(static_cast<size_t>(threads));  // any may get the slow unit
    executor->start(threads, slow);
    const auto work = [&](int64_t t) {
      const double before = thread_cpu_seconds();
      executor->work(t, t + 1, slow);
      cpu[static_cast<size_t>(t)] = thread_cpu_seconds() - before;
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; ++t) others.emplace_back(work, t);
    work(0);
    for (std::thread& other : others) other.join();
    const double all = std::accumulate(cpu.begin(), cpu.end(), 0.0);
    CHECK(all < 0.1, "waiting 0.3 s took %.3f s of processor time", all);
  }
}

// A partition that stands still loses all but the chunk it holds to the others.
struct Stuck {
  mutable std::atomic<int64_t> by_first{0}, by_others{0};
  int64_t stages() const { return 1; }
  int64_t units(int64_t) const { return 100; }
  ClaimRule claim(int64_t) const { return {1, 1000}; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t slot) const {
    (slot == 0 ? by_first : by_others) += end - begin;
    if (slot != 0) return;
    for (int i = 0; i < 1000 && by_first + by_others < 100; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

TEST(others_take_over_from_a_partition_that_stands_still) {
  begin_case("stealing");
  const auto executor = std::make_unique<StagedExecutor>();
  const Stuck stuck;
  executor->start(2, stuck);
  std::thread first([&] { executor->work(0, 1, stuck); });
  while (stuck.by_first == 0) std::this_thread::yield();
  executor->work(1, 2, stuck);
  first.join();
  CHECK(stuck.by_first + stuck.by_others == 100, "units lost");
  CHECK(stuck.by_first <= 50 / 8, "the stuck partition did %lld units",
        static_cast<long long>(stuck.by_first.load()));
}

// Claims of at least and at most so many units, one part in `parts` of what is left in between.
struct Claims {
  ClaimRule rule;
  mutable std::vector<int64_t> sizes;
  int64_t stages() const { return 1; }
  int64_t units(int64_t) const { return 100; }
  ClaimRule claim(int64_t) const { return rule; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t) const { sizes.push_back(end - begin); }
};

TEST(claims_follow_their_rule) {
  begin_case("claims");
  const auto executor = std::make_unique<StagedExecutor>();
  const Claims claims{{4, 30, 3}, {}};
  executor->start(1, claims);
  executor->work(0, 1, claims);
  const std::vector<int64_t> expected = {30, 23, 15, 10, 7, 5, 4, 4, 2};
  CHECK(claims.sizes == expected, "%zu claims, the first of %lld", claims.sizes.size(),
        static_cast<long long>(claims.sizes.front()));
}

// What the first claim of a thread takes that takes all of its partition: where a partition begins.
struct FirstClaim {
  int64_t n_units;
  mutable UnitRange first;
  int64_t stages() const { return 1; }
  int64_t units(int64_t) const { return n_units; }
  ClaimRule claim(int64_t) const { return {1, n_units, 1}; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t) const {
    if (first.size() == 0) first = {begin, end};
  }
};

TEST(partitions_begin_where_they_should) {
  const auto executor = std::make_unique<StagedExecutor>();
  for (const int64_t partitions : {1, 2, 3, 7, 9, 64, 255, 256}) {
    for (const int64_t units : {partitions, partitions + 1, 5 * partitions - 1, int64_t{1'000'003},
                                StagedExecutor::kMaxUnits}) {
      begin_case("%lld units, %lld partitions", static_cast<long long>(units),
                 static_cast<long long>(partitions));
      for (int64_t p = 0; p < partitions; ++p) {
        const FirstClaim plan{units, {}};
        executor->start(partitions, plan);
        executor->work(p, p + 1, plan);
        const int64_t begin = partition_begin(units, partitions, p);
        const int64_t end = partition_begin(units, partitions, p + 1);
        CHECK(plan.first.begin == begin && plan.first.end == end, "partition %lld is %lld to %lld",
              static_cast<long long>(p), static_cast<long long>(plan.first.begin),
              static_cast<long long>(plan.first.end));
      }
    }
  }
}

// A thread that takes a stage for open which is over, as are five more when it goes on, must not
// claim: not of those either, whose units are not what it knows.
struct Late {
  static inline thread_local bool late = false;
  std::vector<int64_t> sizes = {1, 40, 3, 0, 64, 2, 500};
  mutable std::vector<std::atomic<int64_t>> runs = std::vector<std::atomic<int64_t>>(7);
  mutable std::atomic<int64_t> reached{0}, by_late{0};
  mutable std::atomic<bool> entered{false};
  int64_t stages() const { return static_cast<int64_t>(sizes.size()); }
  int64_t units(int64_t stage) const { return sizes[static_cast<size_t>(stage)]; }
  ClaimRule claim(int64_t stage) const {
    if (late && stage == 0) {
      entered = true;
      while (reached < 6) std::this_thread::yield();
    }
    return {1, 4};
  }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t stage, int64_t begin, int64_t end, int64_t) const {
    while (!entered) std::this_thread::yield();
    runs[static_cast<size_t>(stage)] += end - begin;
    if (late && stage < 6) by_late += end - begin;
    reached = stage;
  }
};

TEST(a_late_thread_claims_of_no_stage_that_is_over) {
  const auto executor = std::make_unique<StagedExecutor>();
  for (const int64_t partitions : {4, 30}) {
    begin_case("a late thread of %lld partitions", static_cast<long long>(partitions));
    const Late plan;
    executor->start(partitions, plan);
    std::thread other([&] {
      Late::late = true;
      executor->work(partitions - 1, partitions, plan);
    });
    executor->work(0, 1, plan);
    other.join();
    for (size_t s = 0; s < plan.sizes.size(); ++s)
      CHECK(plan.runs[s] == plan.sizes[s], "stage %zu: %lld units", s,
            static_cast<long long>(plan.runs[s].load()));
    CHECK(plan.by_late == 0, "it did %lld units", static_cast<long long>(plan.by_late.load()));
  }
}

// The most stages of a plan, the most units of a stage that is shared, and one unit more.
struct Limits {
  int64_t n_stages, n_units;
  mutable std::atomic<int64_t> done{0};
  int64_t stages() const { return n_stages; }
  int64_t units(int64_t) const { return n_units; }
  ClaimRule claim(int64_t) const { return {1, int64_t{1} << 20}; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t) const { done += end - begin; }
};

TEST(plans_at_the_limits) {
  constexpr int64_t kMax = StagedExecutor::kMaxUnits;
  const auto executor = std::make_unique<StagedExecutor>();
  for (const auto& [stages, units] : {std::pair{StagedExecutor::kMaxStages, int64_t{2}},
                                      std::pair{int64_t{3}, kMax},
                                      {int64_t{3}, kMax + 1}}) {
    begin_case("%lld stages of %lld units", static_cast<long long>(stages),
               static_cast<long long>(units));
    const Limits plan{stages, units};
    executor->start(2, plan);
    std::thread other([&] { executor->work(1, 2, plan); });
    executor->work(0, 1, plan);
    other.join();
    CHECK(plan.done == stages * units, "%lld units done", static_cast<long long>(plan.done.load()));
  }
}

// Many more threads than CPUs, as in a container that grants two of 64: most back off.
TEST(many_threads_on_few_cpus) {
  const auto executor = std::make_unique<StagedExecutor>();
  std::vector<int64_t> sizes;
  for (int64_t s = 0; s < 300; ++s) sizes.push_back(1 + s * 5 % 37);
  for (const int64_t threads : {16, 33, 64}) {
    begin_case("%lld threads", static_cast<long long>(threads));
    const Waves waves(sizes, threads, 2);
    std::vector<Span> spans;
    for (int64_t s = 0; s < threads; ++s) spans.push_back({s, s + 1});
    run_spans(threads, spans, *executor, waves);
    check_waves(waves, "many");
  }
}

// Stages of 64 units of some microseconds each.
struct Busy {
  mutable std::atomic<uint64_t> sink{0};
  int64_t stages() const { return 300; }
  int64_t units(int64_t) const { return 64; }
  ClaimRule claim(int64_t) const { return {1, 8}; }
  void prepare(int64_t, int64_t) const {}
  void prefetch_next(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t) const {
    uint64_t sum = 0;
    for (int64_t i = begin * 400; i < end * 400; ++i) sum = sum * 31 + static_cast<uint64_t>(i);
    sink.fetch_add(sum, std::memory_order_relaxed);
  }
};

#if defined(__linux__)
// Processor time of all threads, which other processes change little.
double cpu_seconds_of(int64_t threads, const Busy& busy, StagedExecutor& executor) {
  const auto now = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const double begin = now();
  executor.start(threads, busy);
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t)
    others.emplace_back([&, t] { executor.work(t, t + 1, busy); });
  executor.work(0, 1, busy);
  for (std::thread& other : others) other.join();
  return now() - begin;
}

// Two threads bound to one CPU get about as much done as one: a thread that spun for the other
// would take its time away, up to 50 us a stage. The best of some runs, for other processes may
// disturb.
TEST(two_threads_on_one_cpu) {
  begin_case("two threads on one CPU");
  cpu_set_t before, one;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0, "no affinity mask");
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0, "not bound");
  const auto executor = std::make_unique<StagedExecutor>();
  const Busy busy;
  double alone = 1e9, both = 1e9;
  for (int run = 0; run < 7; ++run) {
    alone = std::min(alone, cpu_seconds_of(1, busy, *executor));
    both = std::min(both, cpu_seconds_of(2, busy, *executor));
  }
  sched_setaffinity(0, sizeof before, &before);
  std::printf("one CPU: one thread %.2f ms, two %.2f ms\n", alone * 1e3, both * 1e3);
  CHECK(both < 2 * alone, "one thread %.3f ms, two on its CPU %.3f ms", alone * 1e3, both * 1e3);
}
#else
TEST(two_threads_on_one_cpu) { not_here("nothing is known of a thread's CPU"); }
#endif

// A caller backs off after a trial without a gain, each time longer, until there is a gain.
TEST(backs_off_while_others_gain_nothing) {
  begin_case("back-offs");
  constexpr int64_t kMs = 1'000'000;
  Oversubscription caller;
  int64_t now = 0;
  const auto regions = [&](int count, int64_t alone) {
    for (int i = 0; i < count; ++i) caller.sample(now += 5 * kMs, 5 * kMs, alone);
  };
  const auto backs_off = [&] { return caller.threads(8, now) == 1; };
  regions(100, 9 * kMs);
  CHECK(!backs_off(), "backed off although two threads gain");
  regions(9, 4 * kMs);
  CHECK(!backs_off(), "backed off after 45 ms without a gain");
  regions(1, 9 * kMs);
  regions(9, 4 * kMs);
  CHECK(!backs_off(), "backed off although one window in between gained");
  int64_t last = 0;
  for (int trial = 0; trial < 6; ++trial) {
    const int64_t begin = now;
    while (!backs_off()) regions(1, 4 * kMs);
    CHECK(now - begin <= 50 * kMs, "not backed off after 50 ms without a gain");
    int64_t length = 0;
    while (backs_off()) now += kMs, length += kMs;
    CHECK(length >= last && length >= 200 * kMs && length <= 1000 * kMs, "backed off for %lld ms",
          static_cast<long long>(length / kMs));
    last = length;
  }
  CHECK(last == 1000 * kMs, "the last back-off has %lld ms", static_cast<long long>(last / kMs));
  regions(1, 9 * kMs);
  CHECK(!backs_off(), "backed off after a gain");
}

}  // namespace
}  // namespace bitnet::test
