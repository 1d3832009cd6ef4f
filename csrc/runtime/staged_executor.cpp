// Claims, the barrier and sleeping; see staged_executor.h for the rules. Plain memory that a stage
// wrote is handed to the next by state_ alone: released when a thread leaves, acquired when one
// waits or enters.
#include "runtime/staged_executor.h"

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
constexpr UnitRange unpack(uint64_t value) {
  return {static_cast<int64_t>(value >> 32), static_cast<int64_t>(value & 0xffffffffu)};
}

int64_t units_to_take(const ClaimRule& rule, int64_t left) {
  return std::min(std::clamp(left / rule.parts, rule.least, rule.most), left);
}

}  // namespace

// Long enough for the end of a neighbour's last claim, since waking a sleeper takes as long again;
// short against a time slice, which is what a neighbour loses when another process gets its core.
// With more threads than cores the one waited for may need this very core: no spinning then.
int64_t StagedExecutor::spin_budget(int64_t partitions) {
  static const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return partitions > cores ? 0 : 50'000;
}

void StagedExecutor::deal(int64_t units) {
  for (int64_t p = 0; p < partitions_; ++p) {
    ranges_[p].value.store(
        pack(partition_begin(units, partitions_, p), partition_begin(units, partitions_, p + 1)),
        std::memory_order_relaxed);
  }
}

void StagedExecutor::publish(int64_t stage, int64_t units) {
  state_.store(static_cast<uint64_t>(stage) << kStageShift | static_cast<uint64_t>(units),
               std::memory_order_release);
  opened_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) opened_.notify_all();
}

int64_t StagedExecutor::wait_for(int64_t stage) {
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

bool StagedExecutor::enter(int64_t stage) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (stage_of(state) == stage && (state & kUnitsMask) != 0) {
    if (state_.compare_exchange_weak(state, state + kOneInside, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

bool StagedExecutor::leave(int64_t done) {
  const uint64_t change = kOneInside + static_cast<uint64_t>(done);
  const uint64_t state = state_.fetch_sub(change, std::memory_order_acq_rel) - change;
  return (state & ((uint64_t{1} << kStageShift) - 1)) == 0;
}

bool StagedExecutor::claim_front(Range& range, const ClaimRule& rule, UnitRange& claimed) {
  uint64_t value = range.value.load(std::memory_order_relaxed);
  for (;;) {
    const UnitRange left = unpack(value);
    if (left.size() <= 0) return false;
    const int64_t take = units_to_take(rule, left.size());
    if (range.value.compare_exchange_weak(value, pack(left.begin + take, left.end),
                                          std::memory_order_relaxed)) {
      claimed = {left.begin, left.begin + take};
      return true;
    }
  }
}

bool StagedExecutor::claim_back(const ClaimRule& rule, UnitRange& claimed) {
  for (;;) {
    Range* slowest = nullptr;
    uint64_t value = 0;
    int64_t most = 0;
    for (int64_t p = 0; p < partitions_; ++p) {
      const uint64_t candidate = ranges_[p].value.load(std::memory_order_relaxed);
      if (unpack(candidate).size() > most) {
        most = unpack(candidate).size();
        slowest = &ranges_[p];
        value = candidate;
      }
    }
    if (slowest == nullptr) return false;
    const UnitRange left = unpack(value);
    const int64_t take = units_to_take(rule, left.size());
    if (slowest->value.compare_exchange_strong(value, pack(left.begin, left.end - take),
                                               std::memory_order_relaxed)) {
      claimed = {left.end - take, left.end};
      return true;
    }
  }
}

bool StagedExecutor::claim(int64_t begin, int64_t end, const ClaimRule& rule, UnitRange& claimed) {
  for (int64_t p = begin; p < end; ++p) {
    if (claim_front(ranges_[p], rule, claimed)) return true;
  }
  return claim_back(rule, claimed);
}

}  // namespace bitnet
