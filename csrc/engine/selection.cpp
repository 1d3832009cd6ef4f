// Selection by a bracket and by pivots; see selection.h.
//
// A long row is sampled first: one vector of every few tells two values between which the cut lies,
// with some standard deviations of room.  One pass then sums what is above both and lists what is
// between.  The list is narrowed by pivots, some of its own values: sums above them, found by
// bisection, tell between which two of them the cut lies.  All of this is passes that compare and
// sum whole vectors; a value that many share is a case of its own, since equals need only be
// counted.  A bracket that does not hold the cut costs time alone: there is a wider one, and then
// none.
#include "engine/selection.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/dispatch.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kListed = 8192;       // so few values are listed without a bracket
constexpr int64_t kSampleBlocks = 256;  // of 16 values, at most
constexpr int64_t kPivots = 64;
constexpr int64_t kSorted = 128;  // so few are sorted
constexpr int64_t kBlock = kSelectionBlock;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What an element adds to the sum that has to reach the target: 1, or its value.
enum class Weight { kOne, kValue };

double weight_of(Weight weight, float value) {
  return weight == Weight::kOne ? 1.0 : static_cast<double>(value);
}

float next_below(float value) { return std::nextafter(value, -kInfinity); }
float next_above(float value) { return std::nextafter(value, kInfinity); }

// What lies above counts as `weight` says.
double amount_of(const Split& s, Weight weight) {
  return weight == Weight::kOne ? static_cast<double>(s.above) : s.sum_above;
}

double amount_above(const float* values, int64_t n, float bound, Weight weight) {
  const bool sum = weight == Weight::kValue;
  return amount_of(kernels().split_row(values, n, 1.0f, kInfinity, bound, sum, nullptr), weight);
}

// A few of n values, evenly chosen by place, descending, and what is above each that was asked for.
struct Pivots {
  float values[kPivots];
  double above[kPivots];  // -1: not known
  int64_t count;

  Pivots(const float* all, int64_t n) : count(std::min(n, kPivots)) {
    for (int64_t i = 0; i < count; ++i) values[i] = all[(2 * i + 1) * n / (2 * count)];
    std::sort(values, values + count, std::greater<>());
    std::fill_n(above, count, -1.0);
  }

  // The first above which there is the target, or their count.  That one's amount and that of the
  // one before it are known then.
  template <class Above>
  int64_t first_reaching(double target, const Above& amount) {
    int64_t from = 0, to = count;
    while (from < to) {
      const int64_t at = (from + to) / 2;
      if (above[at] < 0) above[at] = amount(values[at]);
      if (above[at] >= target) {
        to = at;
      } else {
        from = at + 1;
      }
    }
    return to;
  }
};

// Values, ascending by where they stand; ids null: where they stand in the list.
struct List {
  const float* values;
  const int32_t* ids;
  int64_t count;
  int32_t id(int64_t i) const { return ids == nullptr ? static_cast<int32_t>(i) : ids[i]; }
};

struct Found {
  Cut cut;  // the index is an id of a list, where there is one
  bool reached;
};

// Of n equal weights the first with which the sum reaches the target: weights have 24 bits, so that
// a multiple of one is exact.
int64_t equals_until(double before, double weight, int64_t n, double target) {
  if (!(weight > 0)) return n - 1;
  const double needed = std::ceil((target - before) / weight);
  int64_t i =
      needed < static_cast<double>(n) ? std::max<int64_t>(static_cast<int64_t>(needed), 1) : n;
  while (i > 1 && before + static_cast<double>(i - 1) * weight >= target) --i;
  while (i < n && before + static_cast<double>(i) * weight < target) ++i;
  return i - 1;
}

// Of few elements the one with which the sum reaches the target, or the last.
Found in_sorted(const List& list, Weight weight, double target, double before) {
  struct Entry {
    float value;
    int32_t id;
  } entries[kSorted];
  for (int64_t i = 0; i < list.count; ++i) entries[i] = {list.values[i], list.id(i)};
  std::sort(entries, entries + list.count, [](const Entry& a, const Entry& b) {
    return a.value != b.value ? a.value > b.value : a.id < b.id;
  });
  for (int64_t i = 0; i < list.count; ++i) {
    before += weight_of(weight, entries[i].value);
    if (before >= target || i + 1 == list.count)
      return {{entries[i].value, entries[i].id}, before >= target};
  }
  return {};  // not reached: a list has an element
}

// The least element, of equals the last.
Cut last_of(const List& list) {
  Cut last = {kInfinity, -1};
  for (int64_t i = 0; i < list.count; ++i) {
    if (list.values[i] <= last.value) last = {list.values[i], list.id(i)};
  }
  return last;
}

// What is from `low` to `high`, in memory that the list may be in already.
List narrowed(const List& list, float low, float high, const SelectionMemory& memory) {
  int32_t* const at = memory.found;
  const int64_t count = kernels().find_row(list.values, list.count, 1.0f, low, high, at);
  for (int64_t i = 0; i < count; ++i) {
    memory.narrow_ids[i] = list.id(at[i]);
    memory.narrow_values[i] = list.values[at[i]];
  }
  return {memory.narrow_values, memory.narrow_ids, count};
}

// Of the list's elements that equal `value` the one with which the sum reaches the target.
Cut among_listed(const List& list, Weight weight, double target, double before, float value,
                 const SelectionMemory& memory) {
  const int64_t n = kernels().find_row(list.values, list.count, 1.0f, value, value, memory.found);
  const int64_t last = equals_until(before, weight_of(weight, value), n, target);
  return {value, list.id(memory.found[last])};
}

// `before`: what lies above the list, with which the target is reached.
Found in_list(List list, Weight weight, double target, double before,
              const SelectionMemory& memory) {
  const auto sum = [&](float bound) {
    return before + amount_above(list.values, list.count, bound, weight);
  };
  while (list.count > kSorted) {
    Pivots pivots(list.values, list.count);
    const int64_t at = pivots.first_reaching(target, sum);
    const float low = at < pivots.count ? next_above(pivots.values[at]) : -kInfinity;
    float high = at > 0 ? pivots.values[at - 1] : kInfinity;
    double above_high = at > 0 ? pivots.above[at - 1] : before;
    if (at > 1 && pivots.values[at - 2] == high) {  // perhaps one of many equals
      const double with_equals = sum(next_below(high));
      if (with_equals >= target || high == -kInfinity)  // nothing is below that
        return {among_listed(list, weight, target, above_high, high, memory), true};
      above_high = with_equals;
      high = next_below(high);
    }
    before = above_high;
    list = narrowed(list, low, high, memory);
  }
  return in_sorted(list, weight, target, before);
}

// The least and the largest value that the cut may have.
struct Bracket {
  float low, high;
};

// The cut is where `share` of the sum of what lies below `ceiling` is above it.
struct Question {
  Weight weight;
  double share;
  float ceiling;
  double deviations;  // of room on each side
};

// Every few vectors of the row.  How many values.
int64_t take_sample(const Values& v, float* sample) {
  const int64_t blocks = v.count / 16, step = (blocks + kSampleBlocks - 1) / kSampleBlocks;
  int64_t count = 0;
  for (int64_t b = 0; b < blocks; b += step, count += 16) {
    for (int64_t i = 0; i < 16; ++i) sample[count + i] = v.at(16 * b + i);
  }
  return count;
}

// The variance of the estimated sum above the cut, a ratio of two sums over the sample.
double variance(const float* sample, int64_t n, const Question& q, float cut, double body) {
  const double share_of_below = q.share * q.share, share_of_above = (1 - q.share) * (1 - q.share);
  if (q.weight == Weight::kOne)
    return body * (q.share * share_of_above + (1 - q.share) * share_of_below);
  float above[4] = {}, below[4] = {};  // of squares; n is a multiple of 16
  for (int64_t i = 0; i < n; i += 4) {
    for (int64_t j = 0; j < 4; ++j) {
      const float x = sample[i + j], square = x < q.ceiling ? x * x : 0.0f;
      above[j] += x > cut ? square : 0.0f;
      below[j] += x > cut ? 0.0f : square;
    }
  }
  const auto sum = [](const float* x) { return static_cast<double>(x[0] + x[1] + x[2] + x[3]); };
  return sum(above) * share_of_above + sum(below) * share_of_below;
}

// Where between pivot `at` and the one before it, which know their sums, the sum is about `goal`;
// a NaN, if one is infinite.
float between_pivots(const Pivots& pivots, int64_t at, double goal) {
  const double low = pivots.values[at], high = pivots.values[at - 1];
  const double step = (pivots.above[at] - goal) / (pivots.above[at] - pivots.above[at - 1]);
  return static_cast<float>(low + (high - low) * std::clamp(step, 0.0, 1.0));
}

Bracket estimated(const Values& v, const Question& q, const SelectionMemory& memory) {
  const float* const sample = memory.values;
  const int64_t n = take_sample(v, memory.values);
  const double head =
      q.ceiling < kInfinity ? amount_above(sample, n, next_below(q.ceiling), q.weight) : 0.0;
  const auto above = [&](float bound) {  // never below 0, though sums round
    return std::max(amount_above(sample, n, bound, q.weight) - head, 0.0);
  };
  const double body = above(-kInfinity), middle = q.share * body;
  if (!(body > 0)) return {-kInfinity, kInfinity};
  Pivots pivots(sample, n);
  const float cut = pivots.values[std::min(pivots.first_reaching(middle, above), pivots.count - 1)];
  const double room =
      q.deviations * std::sqrt(variance(sample, n, q, cut, body)) + 8 * weight_of(q.weight, cut);
  const int64_t low = pivots.first_reaching(middle + room, above);
  const int64_t below_high = pivots.first_reaching(middle - room, above);
  Bracket bracket = {-kInfinity, kInfinity};
  if (low < pivots.count) bracket.low = next_above(pivots.values[low]);
  if (below_high > 0) bracket.high = pivots.values[below_high - 1];
  if (below_high > 0 && pivots.values[low - 1] == bracket.high &&
      above(next_below(bracket.high)) >= middle + room)
    return {bracket.high, bracket.high};  // all of it are equals
  // Nearer than a pivot, unless many share a value.
  if (low > 0 && low < pivots.count) {
    const float nearer = between_pivots(pivots, low, middle + 1.2 * room);
    if (nearer > bracket.low && above(nearer) >= middle + room) bracket.low = nearer;
  }
  if (below_high > 0 && below_high < pivots.count) {
    const float nearer = between_pivots(pivots, below_high, middle - 1.2 * room);
    if (nearer < bracket.high && above(nearer) < middle - room) bracket.high = nearer;
  }
  return bracket;
}

int64_t blocks_of(const Values& v) { return (v.count + kBlock - 1) / kBlock; }

// f(begin, n) of block b.
template <class F>
auto with_block(const Values& v, int64_t b, const F& f) {
  const int64_t begin = b * kBlock;
  return f(begin, std::min(kBlock, v.count - begin));
}

// split_row of block b; nothing, if none of it reaches `low`.
Split split_block(const Values& v, int64_t b, Weight weight, Bracket bracket, float* values) {
  if (v.block_bounds != nullptr && v.block_bounds[b] * v.scale < bracket.low) return {};
  const bool sum = weight == Weight::kValue && bracket.high < kInfinity;
  return with_block(v, b, [&](int64_t begin, int64_t n) {
    return kernels().split_row(v.data + begin, n, v.scale, bracket.low, bracket.high, sum, values);
  });
}

// The element of block b that is number `at` of those in the bracket.
int64_t index_in_block(const Values& v, int64_t b, Bracket bracket, int64_t at,
                       const SelectionMemory& memory) {
  return with_block(v, b, [&](int64_t begin, int64_t n) {
    kernels().find_row(v.data + begin, n, v.scale, bracket.low, bracket.high, memory.found);
    return begin + memory.found[at];
  });
}

// Adds what the cut keeps of a list to the sums of blocks, which have begun at memory.starts.  The
// index of the cut is one of the list.
void add_kept(const List& list, const Cut& cut, int64_t blocks, const SelectionMemory& memory,
              double* block_sums) {
  const Values values = {list.values, list.count, 1.0f};
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = memory.starts[b], end = memory.starts[b + 1];
    if (end - begin > 16) {
      block_sums[b] += kept_sum(values, cut, begin, end);
      continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (cut.keeps(list.values[i], i)) block_sums[b] += static_cast<double>(list.values[i]);
    }
  }
}

// A bracket of one value; block_sums as of cut_at_sum.
Found among_equals(const Values& v, Weight weight, double target, float value,
                   const SelectionMemory& memory, double* block_sums) {
  int64_t count = 0;
  double before = 0.0;
  for (int64_t b = 0; b < blocks_of(v); ++b) {
    const Split s = split_block(v, b, weight, {value, value}, memory.values);
    before += amount_of(s, weight);
    if (block_sums != nullptr) block_sums[b] = s.sum_above;
    memory.starts[b] = static_cast<int32_t>(s.between);
    count += s.between;
  }
  const double each = weight_of(weight, value);
  if (before >= target || before + static_cast<double>(count) * each < target) return {};
  int64_t kept = equals_until(before, each, count, target) + 1;
  for (int64_t b = 0;; ++b) {
    const int64_t here = std::min<int64_t>(kept, memory.starts[b]);
    if (block_sums != nullptr) block_sums[b] += static_cast<double>(here) * each;
    if (here == kept)
      return {{value, index_in_block(v, b, {value, value}, kept - 1, memory)}, true};
    kept -= here;
  }
}

bool reaches(const List& list, Weight weight, double target, double before) {
  if (list.count <= kSorted) return true;  // in_sorted will see
  const double all = weight == Weight::kOne
                         ? static_cast<double>(list.count)
                         : amount_above(list.values, list.count, -kInfinity, weight);
  return before + all >= target;
}

// Where the cut is not in the bracket, `reached` is false; without bounds it is the last element.
Found in_bracket(const Values& v, Weight weight, double target, Bracket bracket,
                 const SelectionMemory& memory, double* block_sums) {
  if (bracket.low == bracket.high)
    return among_equals(v, weight, target, bracket.low, memory, block_sums);
  const int64_t blocks = blocks_of(v);
  List list = {memory.values, nullptr, 0};
  double before = 0.0;
  for (int64_t b = 0; b < blocks; ++b) {
    const Split s = split_block(v, b, weight, bracket, memory.values + list.count);
    before += amount_of(s, weight);
    if (block_sums != nullptr) block_sums[b] = s.sum_above;
    memory.starts[b] = static_cast<int32_t>(list.count);
    list.count += s.between;
  }
  memory.starts[blocks] = static_cast<int32_t>(list.count);
  if (before >= target || list.count == 0) return {};
  Found found = {};
  if (reaches(list, weight, target, before)) {
    found = in_list(list, weight, target, before, memory);
  } else if (bracket.low == -kInfinity) {
    found.cut = last_of(list);
  } else {
    return {};
  }
  if (block_sums != nullptr) add_kept(list, found.cut, blocks, memory, block_sums);
  int64_t& index = found.cut.index;
  const int32_t* after = std::upper_bound(memory.starts, memory.starts + blocks, index);
  const int64_t b = after - memory.starts - 1;
  index = index_in_block(v, b, bracket, index - memory.starts[b], memory);
  return found;
}

Cut cut_by(const Values& v, Weight weight, double target, Question question,
           const SelectionMemory& memory, double* block_sums) {
  const auto in = [&](Bracket bracket) {
    return in_bracket(v, weight, target, bracket, memory, block_sums);
  };
  if (v.count > kListed) {
    for (const double deviations : {2.5, 10.0}) {
      question.deviations = deviations;
      const Found found = in(estimated(v, question, memory));
      if (found.reached) return found.cut;
    }
  }
  return in({-kInfinity, kInfinity}).cut;
}

}  // namespace

Cut cut_at_count(const Values& values, int64_t count, const SelectionMemory& memory) {
  const auto target = static_cast<double>(count);
  const double share = std::min(target / static_cast<double>(values.count), 1.0);
  return cut_by(values, Weight::kOne, target, {Weight::kOne, share, kInfinity, 0}, memory, nullptr);
}

bool sums_exactly(int64_t count, double target) {
  // Values below `least` sum to less than what the target leaves over: none of them is kept.  Those
  // from 2^-29 on are multiples of 2^-52, and so is every sum of them; sums below 2 are exact.
  const double least = (1.0 - 1e-6 - target) / static_cast<double>(count);
  return least >= 0x1p-29;
}

Cut cut_at_sum(const Values& values, double target, const SelectionMemory& memory,
               double* block_sums) {
  float much = kInfinity;
  double head = 0.0;
  if (values.count > kListed && values.bound * values.scale > 0x1p-9f) {
    // Values that are much by themselves are few, and often enough.
    much = 0x1p-14f;
    const Found found =
        in_bracket(values, Weight::kValue, target, {much, kInfinity}, memory, block_sums);
    if (found.reached) return found.cut;
    head =
        amount_above(memory.values, memory.starts[blocks_of(values)], -kInfinity, Weight::kValue);
  }
  const double share = std::clamp((target - head) / (1.0 - head), 0.0, 1.0);
  return cut_by(values, Weight::kValue, target, {Weight::kValue, share, much, 0}, memory,
                block_sums);
}

double kept_sum(const Values& values, const Cut& cut, int64_t begin, int64_t end) {
  const auto sum = [&](int64_t from, int64_t to, float bound) {
    return from == to ? 0.0
                      : kernels()
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
    return kernels().find_row(values.data + begin, end - begin, values.scale, low, kInfinity, to);
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
    to += kernels().split_row(from, end - begin, values.scale, low, kInfinity, false, to).between;
  };
  take(0, middle, cut.value);
  take(middle, values.count, next_above(cut.value));
}

}  // namespace bitnet::engine
