// Claims, the barrier and sleeping; see staged_executor.h for the rules. Memory that a stage wrote
// becomes visible to the next stage through the group counters, the root and open_: each releases
// what it acquired before. Claims order nothing.
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

constexpr int kStageShift = 48, kEndShift = 24, kInverseShift = 40;
constexpr uint64_t kUnitMask = (uint64_t{1} << kEndShift) - 1;

constexpr uint64_t tag_of(int64_t stage) { return static_cast<uint64_t>(stage) + 1; }
constexpr int64_t end_of(uint64_t word) {
  return static_cast<int64_t>(word >> kEndShift & kUnitMask);
}
constexpr int64_t left_of(uint64_t word) { return static_cast<int64_t>(word & kUnitMask); }
constexpr uint64_t without_front(uint64_t word, int64_t units) {
  return word - static_cast<uint64_t>(units);
}
constexpr uint64_t without_back(uint64_t word, int64_t units) {
  return word - (static_cast<uint64_t>(units) << kEndShift | static_cast<uint64_t>(units));
}

int64_t units_to_take(const ClaimRule& rule, int64_t left) {
  return std::min(std::clamp(left / rule.parts, rule.min, rule.max), left);
}

}  // namespace

// Threads spin as long as a neighbour's last claim takes, because waking a sleeper takes as long
// again. That is short against a time slice, which a neighbour loses when another process gets its
// core. With more threads than cores nothing spins: the thread waited for may need this core.
void StagedExecutor::reset(int64_t partitions) {
  if (partitions != partitions_) groups_ = CoreGroups(partitions);
  partitions_ = partitions;
  const auto divisor = static_cast<uint64_t>(partitions);
  inverse_ = ((uint64_t{1} << kInverseShift) + divisor - 1) / divisor;
  spin_ns_ = partitions > allowed_cpus() ? 0 : 50'000;
  ended_.store(0, std::memory_order_relaxed);
  met_.store(false, std::memory_order_relaxed);
  for (int64_t p = 0; p < partitions; ++p) {
    cpus_[p].store(-1, std::memory_order_relaxed);
    ranges_[p].value.store(0, std::memory_order_relaxed);
  }
  done_.store(0, std::memory_order_relaxed);
  opened_.store(0, std::memory_order_relaxed);
  for (int64_t g = 0; g < groups_.count(); ++g) {
    group_lines_[g].done.store(0, std::memory_order_relaxed);
    group_lines_[g].drained.store(0, std::memory_order_relaxed);
  }
}

StagedExecutor::Shift::Shift(StagedExecutor& executor_in, int64_t begin)
    : executor(executor_in), slot(begin), timed(executor_in.sampled_ && begin == 0) {
  if (timed) cpu_ns_before = thread_cpu_ns();
  const int32_t of_caller = executor.caller_cpu_.load(std::memory_order_relaxed);
  if (slot != 0 && of_caller >= 0 && of_caller == current_cpu())
    executor.met_.store(true, std::memory_order_relaxed);
}

// Scales the caller's time by its share of the work.
StagedExecutor::Shift::~Shift() {
  executor.cpus_[slot].store(-1, std::memory_order_relaxed);
  if (!timed || own_ns <= 0) return;
  const double parts = static_cast<double>(stages_ns) / own_ns;
  const auto busy = static_cast<double>(thread_cpu_ns() - cpu_ns_before - spun_ns);
  executor.busy_ns_ = static_cast<int64_t>(busy * parts);
  executor.alone_ns_ =
      std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(stages_ns) * parts));
}

void StagedExecutor::publish(OpenStage open) {
  open_.store(static_cast<uint64_t>(open.stage) << 32 | static_cast<uint64_t>(open.units),
              std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    opened_.store(static_cast<uint32_t>(tag_of(open.stage)), std::memory_order_seq_cst);
    wake_waiting(opened_);
  }
  if (open.stage < stages_ || backed_off_.load(std::memory_order_seq_cst) == 0) return;
  ended_.store(1, std::memory_order_seq_cst);
  wake_all(ended_);
}

int64_t StagedExecutor::slot_on(int32_t cpu, int64_t slots, int64_t own) const {
  for (int64_t p = 0; cpu >= 0 && p < slots; ++p) {
    if (p != own && cpus_[p].load(std::memory_order_relaxed) == cpu) return p;
  }
  return -1;
}

// The other thread may itself be blocked, by a page from a disk for example. If it has made no
// progress since the last back-off, this thread works.
bool StagedExecutor::backs_off(Shift& shift) {
  constexpr int kMaxMoves = 2;
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
  // only if there are CPUs for all threads, and not for ever: the system may move it back
  if (spin_ns_ != 0 && shift.moves < kMaxMoves && may_spread() && leave_cpu(cpu)) {
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
  backed_off_.fetch_add(1, std::memory_order_seq_cst);
  if (open_stage(std::memory_order_seq_cst).stage < stages_)
    wait_at_most(ended_, 0, shift.pause_ns);
  backed_off_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

// Must not spin when the thread waited for may be on this CPU.
void StagedExecutor::spin_for(int64_t stage, Shift& shift) {
  constexpr int64_t kClockEverySpins = 32, kFirstLook = 64, kLookEverySpins = 1024;
  const int64_t began = steady_ns(), deadline = began + spin_ns_;
  int64_t now = began;
  for (int64_t spins = 1; open_stage().stage < stage; ++spins) {
    if (spins % kClockEverySpins == 0 && (now = steady_ns()) >= deadline) break;
    if ((spins == kFirstLook || spins % kLookEverySpins == 0) && shift.cpu >= 0 &&
        slot_on(current_cpu(), partitions_, shift.slot) >= 0) {
      break;
    }
    relax();
  }
  if (shift.timed) shift.spun_ns += steady_ns() - began;
}

StagedExecutor::OpenStage StagedExecutor::wait_for(int64_t stage, Shift& shift) {
  OpenStage open = open_stage();
  if (open.stage >= stage) return open;
  if (spin_ns_ != 0) spin_for(stage, shift);
  while ((open = open_stage()).stage < stage) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = opened_.load(std::memory_order_seq_cst);
    if (open_stage(std::memory_order_seq_cst).stage < stage) wait_while(opened_, seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return open;
}

// The thread that completes a counter resets it: no other thread adds to it before the next stage
// is open. A thread that did all units of a counter alone need not touch it.
bool StagedExecutor::arrive(OpenStage open, int64_t group, int64_t done) {
  const auto completes = [](std::atomic<int64_t>& count, int64_t units, int64_t all) {
    if (units == all) return true;
    if (count.fetch_add(units, std::memory_order_acq_rel) + units != all) return false;
    count.store(0, std::memory_order_relaxed);
    return true;
  };
  if (groups_.count() > 1) {
    const int64_t all =
        begin_of(groups_.begin(group + 1), open.units) - begin_of(groups_.begin(group), open.units);
    if (!completes(group_lines_[group].done, done, all)) return false;
    done = all;
  }
  return completes(done_, done, open.units);
}

// n / partitions_ = n * inverse_ >> 40, exactly, for n below 2^24 and up to 256 partitions. The
// product fits 64 bits. The inverse is too large by less than 2^8, which adds less than 2^-8 to
// the quotient; its fraction is at most 255/256, so the sum does not reach the next integer.
int64_t StagedExecutor::begin_of(int64_t partition, int64_t units) const {
  const auto quotient = [&](int64_t n) {
    return static_cast<int64_t>(static_cast<uint64_t>(n) * inverse_ >> kInverseShift);
  };
  const int64_t each = quotient(units), more = units - each * partitions_;
  return each * partition + quotient(more * partition + partitions_ - 1);
}

[[gnu::noinline]] uint64_t StagedExecutor::whole_range(OpenStage open, int64_t partition) const {
  const bool all = partitions_ == 1;
  const int64_t begin = all ? 0 : begin_of(partition, open.units);
  const int64_t end = all ? open.units : begin_of(partition + 1, open.units);
  return tag_of(open.stage) << kStageShift | static_cast<uint64_t>(end) << kEndShift |
         static_cast<uint64_t>(end - begin);
}

// A thread may still believe that a finished stage is open: that stage has no units left.
inline uint64_t StagedExecutor::in_stage(OpenStage open, uint64_t word, int64_t partition) const {
  const uint64_t tag = word >> kStageShift;
  if (tag == tag_of(open.stage)) return word;
  return tag < tag_of(open.stage) ? whole_range(open, partition) : 0;
}

bool StagedExecutor::claim_front(Turn& turn, int64_t partition) {
  std::atomic<uint64_t>& range = ranges_[partition].value;
  uint64_t word = range.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t now = in_stage(turn.open, word, partition);
    const int64_t left = left_of(now);
    if (left == 0) return false;
    const int64_t take = units_to_take(turn.rule, left), begin = end_of(now) - left;
    if (range.compare_exchange_weak(word, without_front(now, take), std::memory_order_relaxed)) {
      turn.claimed = {begin, begin + take};
      turn.group = groups_.of(partition);
      return true;
    }
  }
}

bool StagedExecutor::claim_back(Turn& turn, int64_t first, int64_t last) {
  for (;;) {
    int64_t slowest = 0, max_left = 0;
    uint64_t read = 0, now = 0;
    for (int64_t p = first; p < last; ++p) {
      const uint64_t word = ranges_[p].value.load(std::memory_order_relaxed);
      const uint64_t candidate = in_stage(turn.open, word, p);
      if (left_of(candidate) <= max_left) continue;
      slowest = p;
      max_left = left_of(candidate);
      read = word;
      now = candidate;
    }
    if (max_left == 0) return false;
    const int64_t take = units_to_take(turn.rule, max_left), end = end_of(now);
    if (ranges_[slowest].value.compare_exchange_strong(read, without_back(now, take),
                                                       std::memory_order_relaxed)) {
      turn.claimed = {end - take, end};
      turn.group = groups_.of(slowest);
      return true;
    }
  }
}

bool StagedExecutor::claim(Turn& turn) {
  for (; turn.begin < turn.end; ++turn.begin) {
    if (claim_front(turn, turn.begin)) return true;
  }
  return partitions_ > 1 && claim_from_others(turn);
}

// Reads one word, not all ranges, of a group that has no units left.
bool StagedExecutor::claim_from_others(Turn& turn) {
  const int64_t groups = groups_.count();
  if (groups == 1) return claim_back(turn, 0, partitions_);
  const auto tag = static_cast<uint32_t>(tag_of(turn.open.stage));
  const int64_t own = groups_.of(turn.end - 1);
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t g = own + i < groups ? own + i : own + i - groups;
    std::atomic<uint32_t>& drained = group_lines_[g].drained;
    if (drained.load(std::memory_order_relaxed) >= tag) continue;
    if (claim_back(turn, groups_.begin(g), groups_.begin(g + 1))) return true;
    drained.store(tag, std::memory_order_relaxed);
  }
  return false;
}

}  // namespace bitnet
