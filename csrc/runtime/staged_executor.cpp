// Claims, the barrier and sleeping; see staged_executor.h for the rules. Plain memory that a stage
// wrote is handed to the next by state_ alone: released when a thread leaves, acquired when one
// waits or enters.
#include "runtime/staged_executor.h"

#include <algorithm>

namespace bitnet {
namespace {

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

// Spinning takes long enough for the end of a neighbour's last claim, since waking a sleeper takes
// as long again; it is short against a time slice, which is what a neighbour loses when another
// process gets its core.  With more threads than cores the one waited for may need this very core:
// no spinning then.
void StagedExecutor::reset(int64_t partitions) {
  partitions_ = partitions;
  spin_ns_ = partitions > allowed_cpus() ? 0 : 50'000;
  ended_.store(0, std::memory_order_relaxed);
  met_.store(false, std::memory_order_relaxed);
  for (int64_t p = 0; p < partitions; ++p) cpus_[p].store(-1, std::memory_order_relaxed);
}

StagedExecutor::Shift::Shift(StagedExecutor& executor_in, int64_t begin)
    : executor(executor_in), slot(begin), timed(executor_in.sampled_ && begin == 0) {
  if (timed) cpu_ns_before = thread_cpu_ns();
  const int32_t of_caller = executor.caller_cpu_.load(std::memory_order_relaxed);
  if (slot != 0 && of_caller >= 0 && of_caller == current_cpu())
    executor.met_.store(true, std::memory_order_relaxed);
}

// The time of the caller was for its own share of the work.
StagedExecutor::Shift::~Shift() {
  executor.cpus_[slot].store(-1, std::memory_order_relaxed);
  if (!timed || own_ns <= 0) return;
  const double parts = static_cast<double>(stages_ns) / own_ns;
  const auto busy = static_cast<double>(thread_cpu_ns() - cpu_ns_before - spun_ns);
  executor.busy_ns_ = static_cast<int64_t>(busy * parts);
  executor.alone_ns_ =
      std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(stages_ns) * parts));
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
  opened_.store(static_cast<uint32_t>(stage), std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) opened_.notify_all();
  if (stage < stages_ || asides_.load(std::memory_order_seq_cst) == 0) return;
  ended_.store(1, std::memory_order_seq_cst);
  wake_all(ended_);
}

int64_t StagedExecutor::slot_on(int32_t cpu, int64_t slots, int64_t own) const {
  for (int64_t p = 0; cpu >= 0 && p < slots; ++p) {
    if (p != own && cpus_[p].load(std::memory_order_relaxed) == cpu) return p;
  }
  return -1;
}

// The thread that has the CPU may itself be blocked (a page that comes from a disk): where it has
// come no further meanwhile, this one works.
bool StagedExecutor::stands_aside(Shift& shift) {
  constexpr int kMostMoves = 2;
  constexpr int64_t kFirstPauseNs = 1'000'000, kLongestPauseNs = 64'000'000;
  const int32_t cpu = current_cpu();
  if (cpu != shift.cpu) {
    shift.cpu = cpu;
    cpus_[shift.slot].store(cpu, std::memory_order_relaxed);
  }
  const int64_t other = slot_on(cpu, shift.slot, shift.slot);
  if (other < 0) {
    shift.pause_ns = 0;
    return false;
  }
  met_.store(true, std::memory_order_relaxed);
  // where there are CPUs for all; the system may want the thread where it was, so not for ever
  if (spin_ns_ != 0 && shift.moves < kMostMoves && may_spread() && leave_cpu(cpu)) {
    ++shift.moves;
    return true;
  }
  const uint64_t left = ranges_[other].value.load(std::memory_order_relaxed);
  if (shift.pause_ns != 0 && left == shift.left) {
    shift.pause_ns = 0;
    return false;
  }
  shift.left = left;
  shift.pause_ns = std::clamp(2 * shift.pause_ns, kFirstPauseNs, kLongestPauseNs);
  shift.cpu = -1;
  cpus_[shift.slot].store(-1, std::memory_order_relaxed);
  asides_.fetch_add(1, std::memory_order_seq_cst);
  if (opened_.load(std::memory_order_seq_cst) < stages_) wait_at_most(ended_, 0, shift.pause_ns);
  asides_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

// A thread that waits for one whose CPU it has itself must not spin.
void StagedExecutor::spin_for(int64_t stage, Shift& shift) {
  constexpr int64_t kClockEverySpins = 32, kFirstLook = 64, kLookEverySpins = 1024;
  const int64_t began = steady_ns(), deadline = began + spin_ns_;
  int64_t now = began;
  for (int64_t spins = 1; open_stage() < stage; ++spins) {
    if (spins % kClockEverySpins == 0 && (now = steady_ns()) >= deadline) break;
    if ((spins == kFirstLook || spins % kLookEverySpins == 0) && shift.cpu >= 0 &&
        slot_on(current_cpu(), partitions_, shift.slot) >= 0) {
      break;
    }
    relax();
  }
  if (shift.timed) shift.spun_ns += steady_ns() - began;
}

int64_t StagedExecutor::wait_for(int64_t stage, Shift& shift) {
  int64_t open = open_stage();
  if (open >= stage) return open;
  if (spin_ns_ != 0) spin_for(stage, shift);
  while ((open = open_stage()) < stage) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = opened_.load(std::memory_order_seq_cst);
    if (seen < stage) opened_.wait(seen, std::memory_order_seq_cst);
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
