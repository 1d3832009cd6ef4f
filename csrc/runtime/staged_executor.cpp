// Claims, the barrier and sleeping; see team.h for the rules. Plain memory that a stage wrote is
// handed to the next by state_ alone: released when a thread leaves, acquired when one waits or
// enters. Must not know torch, kernels or what a unit of work is.
#include "runtime/team.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace bitnet {
namespace {

using Clock = std::chrono::steady_clock;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

constexpr uint64_t pack(int64_t begin, int64_t end) {
  return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
}
constexpr Chunk unpack(uint64_t value) {
  return {static_cast<int64_t>(value >> 32), static_cast<int64_t>(value & 0xffffffffu)};
}

}  // namespace

// Long enough for the end of a neighbour's last chunk, since waking a sleeper takes as long again;
// short against a time slice, which is what a neighbour loses when another process gets its core.
// With more threads than cores the one waited for may need this very core: no spinning then.
int64_t Team::spin_budget(int64_t shares) {
  static const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return shares > cores ? 0 : 50'000;
}

void Team::deal(int64_t units) {
  int64_t begin = 0;
  for (int64_t s = 0; s < shares_; ++s) {
    const int64_t end = begin + units / shares_ + (s < units % shares_ ? 1 : 0);
    ranges_[s].value.store(pack(begin, end), std::memory_order_relaxed);
    begin = end;
  }
}

void Team::publish(int64_t stage, int64_t units) {
  state_.store(static_cast<uint64_t>(stage) << kStageShift | static_cast<uint64_t>(units),
               std::memory_order_release);
  opened_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) opened_.notify_all();
}

int64_t Team::wait_for(int64_t stage) {
  const auto open_stage = [this] { return stage_of(state_.load(std::memory_order_acquire)); };
  int64_t open = open_stage();
  if (open >= stage) return open;
  constexpr int64_t kClockEverySpins = 32;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(spin_ns_);
  for (int64_t spins = 1; (open = open_stage()) < stage; ++spins) {
    if (spins % kClockEverySpins == 0 && Clock::now() >= deadline) break;
    relax();
  }
  while ((open = open_stage()) < stage) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = opened_.load(std::memory_order_seq_cst);
    if (open_stage() < stage) opened_.wait(seen, std::memory_order_seq_cst);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return open;
}

bool Team::enter(int64_t stage) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (stage_of(state) == stage && (state & kUnitsMask) != 0) {
    if (state_.compare_exchange_weak(state, state + kOneInside, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

bool Team::leave(int64_t done) {
  const uint64_t change = kOneInside + static_cast<uint64_t>(done);
  const uint64_t state = state_.fetch_sub(change, std::memory_order_acq_rel) - change;
  return (state & ((uint64_t{1} << kStageShift) - 1)) == 0;
}

// An eighth of what is left at a time: few claims while there is much, single units at the end.
bool Team::claim_front(Range& range, int64_t limit, Chunk& chunk) {
  uint64_t value = range.value.load(std::memory_order_relaxed);
  for (;;) {
    const Chunk left = unpack(value);
    if (left.size() <= 0) return false;
    const int64_t take = std::clamp<int64_t>(left.size() / 8, 1, limit);
    if (range.value.compare_exchange_weak(value, pack(left.begin + take, left.end),
                                          std::memory_order_relaxed)) {
      chunk = {left.begin, left.begin + take};
      return true;
    }
  }
}

bool Team::claim_back(int64_t limit, Chunk& chunk) {
  for (;;) {
    Range* slowest = nullptr;
    uint64_t value = 0;
    int64_t most = 0;
    for (int64_t s = 0; s < shares_; ++s) {
      const uint64_t candidate = ranges_[s].value.load(std::memory_order_relaxed);
      if (unpack(candidate).size() > most) {
        most = unpack(candidate).size();
        slowest = &ranges_[s];
        value = candidate;
      }
    }
    if (slowest == nullptr) return false;
    const Chunk left = unpack(value);
    const int64_t take = std::clamp<int64_t>(left.size() / 8, 1, limit);
    if (slowest->value.compare_exchange_strong(value, pack(left.begin, left.end - take),
                                               std::memory_order_relaxed)) {
      chunk = {left.end - take, left.end};
      return true;
    }
  }
}

bool Team::claim(int64_t begin, int64_t end, int64_t limit, Chunk& chunk) {
  for (int64_t s = begin; s < end; ++s) {
    if (claim_front(ranges_[s], limit, chunk)) return true;
  }
  return claim_back(limit, chunk);
}

}  // namespace bitnet
