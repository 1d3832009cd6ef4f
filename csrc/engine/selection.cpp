// Selection by brackets; see selection.h.
//
// A sorted sample of a list gives two values between which the cut probably lies: a bracket. One
// pass measures what lies above the bracket and copies what lies in it, which is the next list and
// much shorter (Floyd and Rivest's SELECT, by sums as well as by counts). If the bracket does not
// hold the cut, that costs only time, since the pass shows on which side of it the cut is. Passes
// compare and sum whole vectors; equal values only have to be counted.
#include "engine/selection.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/dispatch.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kBlock = kSelectionBlock;
constexpr int64_t kSorted = 128;     // lists of up to so many values are sorted
constexpr int64_t kSample = 256;     // the largest sample for a bracket
constexpr double kDeviations = 2.5;  // standard deviations on each side of its estimate
// In rows longer than kLong, values from kLarge on are few and often reach the target alone.
constexpr int64_t kLong = 8192;
constexpr float kLarge = 0x1p-14f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What reaches the target: a number of values, or their sum.
enum class Measure { kCount, kSum };

double measure_of(Measure measure, float value) {
  return measure == Measure::kCount ? 1.0 : static_cast<double>(value);
}

float next_below(float value) { return std::nextafter(value, -kInfinity); }
float next_above(float value) { return std::nextafter(value, kInfinity); }

// f(begin, n) for each block of v that may hold a value >= low, until it returns false.
template <class F>
void for_blocks(const Values& v, float low, const F& f) {
  for (int64_t begin = 0; begin < v.count; begin += kBlock) {
    if (v.block_bounds != nullptr && v.block_bounds[begin / kBlock] * v.scale < low) continue;
    if (!f(begin, std::min(kBlock, v.count - begin))) return;
  }
}

// From one value to another, both included.
struct Bracket {
  float low, high;
  bool holds(float x) const { return low <= x && x <= high; }
};

struct Parts {
  double above;    // the measure of what lies above a bracket
  int64_t count;   // how many values lie in it
  double between;  // their measure
};

// Copies the values of v that lie in the bracket, in their order.
Parts split(const Values& v, Measure measure, const Bracket& bracket, float* to) {
  const bool sums = measure == Measure::kSum;
  Parts parts = {};
  for_blocks(v, bracket.low, [&](int64_t begin, int64_t n) {
    const Split s =
        active_kernels().split_row(v.data + begin, n, v.scale, bracket.low, bracket.high,
                                   sums && bracket.high < kInfinity, to + parts.count);
    parts.above += sums ? s.sum_above : static_cast<double>(s.above);
    parts.count += s.between;
    return true;
  });
  parts.between = static_cast<double>(parts.count);
  if (bracket.low == bracket.high) {
    parts.between *= measure_of(measure, bracket.low);
  } else if (sums) {
    parts.between = active_kernels()
                        .split_row(to, parts.count, 1.0f, kInfinity, -kInfinity, true, nullptr)
                        .sum_above;
  }
  return parts;
}

// Two values of v, within the bounds, between which the cut probably lies: `share` of what lies
// within the bounds is above the cut. Or, with `single`, one value near it, twice.
Bracket guess(const Values& v, Measure measure, const Bracket& bounds, double share, bool single) {
  float sample[kSample];
  double sums[kSample], sum = 0.0, variance = 0.0;
  int64_t n = 0;
  const int64_t size = std::clamp(v.count / 256, int64_t{64}, kSample);
  for (int64_t i = 0; i < size; ++i) {
    const float x = v.at((2 * i + 1) * v.count / (2 * size));
    if (bounds.holds(x)) sample[n++] = x;
  }
  if (n == 0) return bounds;
  std::sort(sample, sample + n, std::greater<>());
  for (int64_t i = 0; i < n; ++i) sums[i] = sum += measure_of(measure, sample[i]);
  // The first with which the sum reaches a goal, or n.
  const auto reaching = [&](double goal) { return std::lower_bound(sums, sums + n, goal) - sums; };
  const double goal = share * sum;
  const int64_t at = std::min<int64_t>(reaching(goal), n - 1);
  const float middle = sample[at];
  if (single) return {middle, middle};
  for (int64_t i = 0; i < n; ++i) {  // of the share above the middle, a ratio of two sums
    const double x = measure_of(measure, sample[i]) * (i < at ? 1.0 - share : share);
    variance += x * x;
  }
  const double room = kDeviations * std::sqrt(variance) + 2.0 * measure_of(measure, middle);
  const int64_t low = reaching(goal + room), high = reaching(goal - room);
  return {low < n ? sample[low] : bounds.low, high > 0 ? sample[high - 1] : bounds.high};
}

// The value of a cut, how many of its equals stay, and the measure of all that stays.
struct Level {
  float value;
  int64_t equals;
  double kept;
};

// How many of n equal values reach the target; n if they do not. Floats have 24 bits, so their
// multiples are exact in float64.
int64_t equals_until(double before, double each, int64_t n, double target) {
  if (!(each > 0)) return n;
  const double needed = std::ceil((target - before) / each);
  int64_t i =
      needed < static_cast<double>(n) ? std::max<int64_t>(static_cast<int64_t>(needed), 1) : n;
  while (i > 1 && before + static_cast<double>(i - 1) * each >= target) --i;
  while (i < n && before + static_cast<double>(i) * each < target) ++i;
  return i;
}

// The level of a list of 1 to kSorted values.
Level level_of_few(const Values& v, Measure measure, double target, double before) {
  float sorted[kSorted];
  for (int64_t i = 0; i < v.count; ++i) sorted[i] = v.at(i);
  std::sort(sorted, sorted + v.count, std::greater<>());
  Level level = {sorted[0], 0, before};
  for (int64_t i = 0; i < v.count && (i == 0 || level.kept < target); ++i) {
    level = {sorted[i], sorted[i] == level.value ? level.equals + 1 : 1,
             level.kept + measure_of(measure, sorted[i])};
  }
  return level;
}

// The smallest value above a bound, with all of its equals. `above`: the measure of these and of
// all larger values.
Level min_above(const Values& v, float bound, double above) {
  Level level = {kInfinity, 0, above};
  for (int64_t i = 0; i < v.count; ++i) {
    const float x = v.at(i);
    if (x > bound && x <= level.value) level = {x, x == level.value ? level.equals + 1 : 1, above};
  }
  return level;
}

Level level_at(const Values& row, Measure measure, double target, const SelectionMemory& memory) {
  const bool peaked =
      measure == Measure::kSum && row.count > kLong && row.bound * row.scale > 0x1p-9f;
  Values list = row;
  Bracket bounds = {-kInfinity, kInfinity};  // of the cut, within the list
  double before = 0.0, above = 0.0;          // the measure above the list, and above the bounds
  // About the measure within the bounds.
  double inside = measure == Measure::kCount ? static_cast<double>(row.count) : 1.0;
  bool single = false;
  for (int64_t round = 0; list.count > kSorted; ++round) {
    const bool large_first = peaked && round == 0;
    const double share = inside > 0.0 ? std::clamp((target - above) / inside, 0.0, 1.0) : 0.0;
    const Bracket bracket =
        large_first ? Bracket{kLarge, kInfinity} : guess(list, measure, bounds, share, single);
    float* const to = list.data == memory.values ? memory.more_values : memory.values;
    Parts parts = split(list, measure, bracket, to);
    parts.above += before;
    const double reached = parts.above + parts.between;
    bool halved = false;
    if (parts.above >= target && bracket.high < bounds.high) {
      bounds.low = next_above(bracket.high);
      inside = parts.above - above;
    } else if (reached < target && bracket.low > bounds.low) {
      bounds.high = next_below(bracket.low);
      inside -= reached - above;
      above = reached;
    } else if (bracket.low == bracket.high) {
      const double each = measure_of(measure, bracket.low);
      const int64_t equals = equals_until(parts.above, each, parts.count, target);
      return {bracket.low, equals, parts.above + static_cast<double>(equals) * each};
    } else {
      halved = 2 * parts.count <= list.count;
      list = {to, parts.count, 1.0f};
      bounds = bracket;
      before = above = parts.above;
      inside = parts.between;
    }
    // After a bracket that gained little a single value is tried, which always shortens the list.
    single = !single && !halved && !large_first;
  }
  // Rounded sums may differ by one value in where the target is reached: the list may be empty.
  if (list.count == 0) return min_above(row, bounds.high, above);
  return level_of_few(list, measure, target, before);
}

Cut cut_at(const Values& v, const Level& level, const SelectionMemory& memory) {
  Cut cut = {level.value, -1};
  int64_t left = level.equals;
  for_blocks(v, level.value, [&](int64_t begin, int64_t n) {
    const int64_t found = active_kernels().find_row(v.data + begin, n, v.scale, level.value,
                                                    level.value, memory.found);
    if (found >= left) cut.index = begin + memory.found[left - 1];
    left -= found;
    return left > 0;
  });
  return cut;
}

}  // namespace

Cut cut_at_count(const Values& values, int64_t count, const SelectionMemory& memory) {
  const auto target = static_cast<double>(count);
  return cut_at(values, level_at(values, Measure::kCount, target, memory), memory);
}

Cut cut_at_sum(const Values& values, double target, const SelectionMemory& memory, double* kept) {
  const Level level = level_at(values, Measure::kSum, target, memory);
  if (kept != nullptr) *kept = level.kept;
  return cut_at(values, level, memory);
}

bool sums_exactly(int64_t count, double target) {
  // All values below `threshold` together are less than 1 - target, so none of them is kept. Floats
  // from 2^-29 on are multiples of 2^-52, and sums of such floats below 2 are exact in float64.
  const double threshold = (1.0 - 1e-6 - target) / static_cast<double>(count);
  return threshold >= 0x1p-29;
}

double kept_sum(const Values& values, const Cut& cut, int64_t begin, int64_t end) {
  const auto sum = [&](int64_t from, int64_t to, float bound) {
    return from == to ? 0.0
                      : active_kernels()
                            .split_row(values.data + from, to - from, values.scale, kInfinity,
                                       bound, true, nullptr)
                            .sum_above;
  };
  const int64_t middle = std::clamp(cut.index + 1, begin, end);
  return sum(begin, middle, next_below(cut.value)) + sum(middle, end, cut.value);
}

int64_t kept_ids(const Values& values, const Cut& cut, int32_t* ids) {
  const int64_t middle = std::clamp<int64_t>(cut.index + 1, 0, values.count);
  const auto find = [&](int64_t begin, int64_t end, float low, int32_t* to) {
    return active_kernels().find_row(values.data + begin, end - begin, values.scale, low, kInfinity,
                                     to);
  };
  const int64_t first = find(0, middle, cut.value, ids);
  const int64_t second = find(middle, values.count, next_above(cut.value), ids + first);
  for (int64_t i = first; i < first + second; ++i) ids[i] += static_cast<int32_t>(middle);
  return first + second;
}

void kept_values(const Values& values, const Cut& cut, float* to) {
  const int64_t middle = std::clamp<int64_t>(cut.index + 1, 0, values.count);
  const auto take = [&](int64_t begin, int64_t end, float low) {
    const float* const from = values.data + begin;
    to += active_kernels()
              .split_row(from, end - begin, values.scale, low, kInfinity, false, to)
              .between;
  };
  take(0, middle, cut.value);
  take(middle, values.count, next_above(cut.value));
}

}  // namespace bitnet::engine
