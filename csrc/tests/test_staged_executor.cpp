// The team of one region, on plain threads: every unit of every stage runs exactly once and sees
// all of the stage before, however the shares reach the threads; a waiting thread gives its core
// away. Built with BITNET_SANITIZE=thread it proves the ordering; must not know kernels.
#include "runtime/team.h"

#include <ctime>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
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
  int64_t max_chunk(int64_t) const { return limit; }
  void look_ahead(int64_t, int64_t) const {}
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

// Runs `waves` with one thread for every span; a span list that leaves shares out is a thread that
// never comes.
void run_spans(int64_t shares, const std::vector<Span>& spans, Team& team, const Waves& waves) {
  team.start(shares, waves);
  std::vector<std::thread> threads;
  for (size_t i = 1; i < spans.size(); ++i) {
    threads.emplace_back([&, i] { team.work(spans[i].begin, spans[i].end, waves); });
  }
  team.work(spans[0].begin, spans[0].end, waves);
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

void every_way_to_deal_shares_to_threads() {
  const auto team = std::make_unique<Team>();
  const std::vector<std::pair<int64_t, std::vector<Span>>> ways = {
      {1, {{0, 1}}},
      {2, {{0, 1}, {1, 2}}},
      {2, {{0, 2}}},
      {3, {{0, 2}, {2, 3}}},
      {4, {{0, 1}, {1, 2}, {2, 3}, {3, 4}}},
      {7, {{0, 3}, {3, 4}, {4, 7}}},
      {5, {{0, 1}}},          // four shares whose threads never come
      {5, {{4, 5}, {1, 2}}},  // share 0 never comes
      {Team::kMaxShares, {{0, 1}, {1, 200}, {200, Team::kMaxShares}}},
  };
  for (const auto& [shares, spans] : ways) {
    for (const int64_t limit : {1, 3, 64}) {
      begin_case("%lld shares on %zu threads, chunks of %lld", static_cast<long long>(shares),
                 spans.size(), static_cast<long long>(limit));
      const Waves waves(wave_sizes(), shares, limit);
      run_spans(shares, spans, *team, waves);
      check_waves(waves, "spans");
    }
  }
}

// Hardly any work between two barriers: the hand-over from stage to stage happens all the time,
// with threads that come to a stage when it is over.
void short_stages() {
  const auto team = std::make_unique<Team>();
  std::vector<int64_t> sizes;
  for (int64_t s = 0; s < 4000; ++s) sizes.push_back(1 + s % 3);
  for (const int64_t threads : {2, 3, 4}) {
    begin_case("short stages, %lld threads", static_cast<long long>(threads));
    const Waves waves(sizes, threads, 1);
    std::vector<Span> spans;
    for (int64_t s = 0; s < threads; ++s) spans.push_back({s, s + 1});
    run_spans(threads, spans, *team, waves);
    check_waves(waves, "short");
  }
}

// A pool that runs the shares one after the other on one thread must not hang.
void shares_in_sequence_on_one_thread() {
  begin_case("shares in sequence");
  const auto team = std::make_unique<Team>();
  const Waves waves(wave_sizes(), 3, 8);
  team->start(3, waves);
  for (int64_t s = 0; s < 3; ++s) team->work(s, s + 1, waves);
  check_waves(waves, "sequence");
}

void no_stages_and_empty_stages() {
  const auto team = std::make_unique<Team>();
  for (const auto& sizes : {std::vector<int64_t>{}, {0}, {0, 0, 3, 0}, {5, 0, 0}}) {
    begin_case("%zu stages", sizes.size());
    const Waves waves(sizes, 2, 2);
    run_spans(2, {{0, 1}, {1, 2}}, *team, waves);
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
  int64_t max_chunk(int64_t) const { return 1; }
  void prepare(int64_t, int64_t) const {}
  void look_ahead(int64_t, int64_t) const {}
  void run(int64_t stage, int64_t begin, int64_t, int64_t) const {
    if (stage == 0 && begin == 0) std::this_thread::sleep_for(delay);
  }
};

void a_waiting_thread_sleeps() {
  begin_case("sleep");
  const auto team = std::make_unique<Team>();
  const Slow slow{std::chrono::milliseconds(300)};
  double cpu = 0.0;  // of both threads: either may be the one that gets the slow unit
  team->start(2, slow);
  std::thread other([&] {
    team->work(1, 2, slow);
    cpu += thread_cpu_seconds();
  });
  const double before = thread_cpu_seconds();
  team->work(0, 1, slow);
  const double mine = thread_cpu_seconds() - before;
  other.join();
  CHECK(cpu + mine < 0.1, "waiting 0.3 s took %.3f s of processor time", cpu + mine);
}

// A share that stands still loses all but the chunk it holds to the others.
struct Stuck {
  mutable std::atomic<int64_t> by_first{0}, by_others{0};
  int64_t stages() const { return 1; }
  int64_t units(int64_t) const { return 100; }
  int64_t max_chunk(int64_t) const { return 1000; }
  void prepare(int64_t, int64_t) const {}
  void look_ahead(int64_t, int64_t) const {}
  void run(int64_t, int64_t begin, int64_t end, int64_t slot) const {
    (slot == 0 ? by_first : by_others) += end - begin;
    if (slot != 0) return;
    for (int i = 0; i < 1000 && by_first + by_others < 100; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

void others_take_over_from_a_share_that_stands_still() {
  begin_case("stealing");
  const auto team = std::make_unique<Team>();
  const Stuck stuck;
  team->start(2, stuck);
  std::thread first([&] { team->work(0, 1, stuck); });
  while (stuck.by_first == 0) std::this_thread::yield();
  team->work(1, 2, stuck);
  first.join();
  CHECK(stuck.by_first + stuck.by_others == 100, "units lost");
  CHECK(stuck.by_first <= 50 / 8, "the stuck share did %lld units",
        static_cast<long long>(stuck.by_first.load()));
}

}  // namespace
}  // namespace bitnet::test

int main() {
  using namespace bitnet::test;
  name_case_on_signals();
  every_way_to_deal_shares_to_threads();
  short_stages();
  shares_in_sequence_on_one_thread();
  no_stages_and_empty_stages();
  a_waiting_thread_sleeps();
  others_take_over_from_a_share_that_stands_still();
  return finish("test_team");
}
