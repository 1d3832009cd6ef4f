// Selection by a bracket and by digits; see selection.h.
//
// A long row is sampled first: one vector of every few tells two values between which the cut lies,
// with four standard deviations of room.  One pass then sums what is above both and lists what is
// between.  The list is narrowed to one bucket of its keys after the other, ten bits at a time.  A
// bracket that does not hold the cut costs time alone: the pass is repeated without bounds.
#include "engine/selection.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/dispatch.h"

namespace bitnet::engine {
namespace {

constexpr int64_t kListed = 8192;       // so few values are listed without a bracket
constexpr int64_t kSampleBlocks = 256;  // of 16 values, at most
constexpr int64_t kBuckets = 1024;
constexpr int64_t kSorted = 32;  // so few are sorted
constexpr int64_t kBlock = kSelectionBlock;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What an element adds to the sum that has to reach the target: 1, or its value.
enum class Weight { kOne, kValue };

// Integers in the order of the floats; -0 is 0.
int32_t key_of(float value) {
  const auto bits = std::bit_cast<int32_t>(value + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
float value_of(int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }

float next_below(float value) { return std::nextafter(value, -kInfinity); }

double weight_of(Weight weight, int32_t key) {
  return weight == Weight::kOne ? 1.0 : static_cast<double>(value_of(key));
}

// Values and where they stand, ascending; count at least 1.
struct List {
  int32_t* ids;
  int32_t* keys;
  int64_t count;
};

struct KeyRange {
  int32_t least, most;
};

KeyRange range_of(const List& list) {
  KeyRange range = {list.keys[0], list.keys[0]};
  for (int64_t i = 1; i < list.count; ++i) {
    range.least = std::min(range.least, list.keys[i]);
    range.most = std::max(range.most, list.keys[i]);
  }
  return range;
}

// Sums of the weights in buckets of keys, the greatest keys first.
struct Histogram {
  KeyRange range;
  int shift;
  double sums[kBuckets];

  int64_t bucket(int32_t key) const { return static_cast<int64_t>(distance(key) >> shift); }
  uint32_t distance(int32_t key) const {
    return static_cast<uint32_t>(range.most) - static_cast<uint32_t>(key);
  }
  int64_t used() const { return bucket(range.least) + 1; }
  float largest(int64_t b) const { return value_of(key(static_cast<uint64_t>(b) << shift)); }
  float smallest(int64_t b) const {
    return value_of(key((static_cast<uint64_t>(b + 1) << shift) - 1));
  }
  // The key so far below the greatest, or the least one.
  int32_t key(uint64_t distance_below) const {
    return static_cast<int32_t>(
        std::max<int64_t>(int64_t{range.most} - static_cast<int64_t>(distance_below), range.least));
  }
};

void fill(Histogram& h, const List& list, KeyRange range, Weight weight) {
  h.range = range;
  h.shift = std::max(0, static_cast<int>(std::bit_width(h.distance(range.least))) - 10);
  std::fill_n(h.sums, h.used(), 0.0);
  for (int64_t i = 0; i < list.count; ++i) {
    h.sums[h.bucket(list.keys[i])] += weight_of(weight, list.keys[i]);
  }
}

// The first bucket with which `before` and the sums reach `target`, or the last one; `before` then
// holds what lies above it.
int64_t bucket_where_reached(const Histogram& h, double target, double& before) {
  int64_t b = 0;
  for (const int64_t last = h.used() - 1; b < last; ++b) {
    const double reached = before + h.sums[b];
    if (reached >= target) break;
    before = reached;
  }
  return b;
}

struct Found {
  Cut cut;
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

// Where what a cut keeps of a list goes to; sums null: nowhere.
struct KeptSums {
  double* sums = nullptr;  // of blocks
  void add(int32_t key, int32_t id) const {
    if (sums != nullptr) sums[id / kBlock] += static_cast<double>(value_of(key));
  }
};

// Thins the list out to one bucket; sums, if not null: of blocks, get what lies in buckets above.
// Without branches that depend on values: which ones cannot be foreseen.
int64_t keep_bucket(List& list, const Histogram& h, int64_t bucket, double* sums) {
  double above = 0.0;  // of one block: ids ascend, and a sum in memory is slow to come back
  int32_t block = 0;
  int64_t kept = 0;
  for (int64_t i = 0; i < list.count; ++i) {
    const int32_t id = list.ids[i], key = list.keys[i];
    const int64_t at = h.bucket(key);
    if (sums != nullptr) {
      const auto now = static_cast<int32_t>(id / kBlock);
      if (now != block) {
        sums[block] += above;
        above = 0.0;
        block = now;
      }
      const int32_t mask = -static_cast<int32_t>(at < bucket);  // others become the key of 0
      above += static_cast<double>(value_of(key & mask));
    }
    list.ids[kept] = id;
    list.keys[kept] = key;
    kept += at == bucket;
  }
  if (sums != nullptr) sums[block] += above;
  return kept;
}

Found in_sorted(List& list, Weight weight, double target, double before, const KeptSums& kept) {
  struct Entry {
    int32_t key, id;
  } entries[kSorted];
  for (int64_t i = 0; i < list.count; ++i) entries[i] = {list.keys[i], list.ids[i]};
  std::sort(entries, entries + list.count, [](const Entry& a, const Entry& b) {
    return a.key != b.key ? a.key > b.key : a.id < b.id;
  });
  for (int64_t i = 0; i < list.count; ++i) {
    before += weight_of(weight, entries[i].key);
    kept.add(entries[i].key, entries[i].id);
    if (before >= target || i + 1 == list.count)
      return {{value_of(entries[i].key), entries[i].id}, before >= target};
  }
  return {};  // not reached: a list has an element
}

// Uses the list up.
Found in_list(List& list, Weight weight, double target, double before,
              const KeptSums& kept_sums = {}) {
  Histogram h;
  for (;;) {
    const KeyRange range = range_of(list);
    if (range.least == range.most) {
      const double each = weight_of(weight, range.least);
      const int64_t i = equals_until(before, each, list.count, target);
      for (int64_t j = 0; j <= i; ++j) kept_sums.add(list.keys[j], list.ids[j]);
      return {{value_of(range.least), list.ids[i]},
              before + static_cast<double>(i + 1) * each >= target};
    }
    if (list.count <= kSorted) return in_sorted(list, weight, target, before, kept_sums);
    fill(h, list, range, weight);
    const int64_t b = bucket_where_reached(h, target, before);
    const int64_t kept = keep_bucket(list, h, b, kept_sums.sums);
    list.count = kept;
    if (kept == 0) return {};  // not reached: the bucket of the least key is not empty
  }
}

// Values from low to high; infinite where there is no bound.
struct Bracket {
  float low, high;
};

// What a thinned sample says of the whole: `share` of the weights below `ceiling` lies above the
// cut.
struct Question {
  Weight weight;
  double share;
  float ceiling;
  double deviations = 4;  // of room on each side
};

// Every few vectors of the row, without what a sample would miss or what would stretch its range of
// keys: values from the ceiling on, and -infinity.  ids are not used.
List sample_of(const Values& v, float ceiling, const SelectionMemory& memory) {
  const int64_t blocks = v.count / 16, step = (blocks + kSampleBlocks - 1) / kSampleBlocks;
  List sample = {memory.ids, memory.keys, 0};
  for (int64_t b = 0; b < blocks; b += step) {
    for (int64_t i = 16 * b; i < 16 * b + 16; ++i) {
      const float value = v.at(i);
      sample.keys[sample.count] = key_of(value);
      sample.count += value > -kInfinity && value < ceiling;
    }
  }
  return sample;
}

double each_of(const Histogram& h, Weight weight, int64_t b) {
  return weight == Weight::kOne ? 1.0 : static_cast<double>(h.largest(b));
}

// The variance of the estimated sum above the cut, a ratio of two sums over the sample.
double variance(const Histogram& h, const Question& q, int64_t cut_bucket) {
  const double above = (1 - q.share) * (1 - q.share), below = q.share * q.share;
  double sum = 0.0;
  for (int64_t b = 0; b < h.used(); ++b) {
    sum += h.sums[b] * each_of(h, q.weight, b) * (b <= cut_bucket ? above : below);
  }
  return sum;
}

Bracket estimated(const Values& v, const Question& q, const SelectionMemory& memory) {
  const List sample = sample_of(v, q.ceiling, memory);
  Bracket bracket = {-kInfinity, kInfinity};
  if (sample.count == 0) return bracket;
  const KeyRange range = range_of(sample);
  if (range.least == range.most) return {value_of(range.least), value_of(range.most)};
  Histogram h;
  fill(h, sample, range, q.weight);
  double sum = 0.0;
  for (int64_t b = 0; b < h.used(); ++b) sum += h.sums[b];
  const auto bucket_at = [&h](double target) {
    double before = 0.0;
    return bucket_where_reached(h, target, before);
  };
  const double middle = q.share * sum;
  const int64_t at = bucket_at(middle);
  const double room = q.deviations * std::sqrt(variance(h, q, at)) + 8 * each_of(h, q.weight, at);
  if (middle > room) bracket.high = h.largest(bucket_at(middle - room));
  if (middle + room < sum) bracket.low = h.smallest(bucket_at(middle + room));
  return bracket;
}

int64_t between(const Values& v, int64_t begin, int64_t end, float low, float high, int32_t* ids) {
  return kernels().split_row(v.data + begin, end - begin, v.scale, low, high, false, ids).between;
}

// The nth (from 0) of the values that equal `value`, or -1 if there are not so many.
int64_t nth_equal(const Values& v, float value, int64_t n, int32_t* ids) {
  for (int64_t begin = 0; begin < v.count; begin += kBlock) {
    const int64_t here = between(v, begin, std::min(begin + kBlock, v.count), value, value, ids);
    if (here > n) return begin + ids[n];
    n -= here;
  }
  return -1;
}

// What lies above the bracket counts as `weight` says.
double amount_above(const Split& s, Weight weight) {
  return weight == Weight::kOne ? static_cast<double>(s.above) : s.sum_above;
}

// A bracket of one value; where the cut is not in it, `reached` is false.
Found among_equals(const Values& v, Weight weight, double target, float value, int32_t* ids) {
  const bool sum = weight == Weight::kValue;
  const double before = amount_above(
      kernels().split_row(v.data, v.count, v.scale, kInfinity, value, sum, nullptr), weight);
  if (before >= target) return {};
  const double each = sum ? static_cast<double>(value) : 1.0;
  const int64_t at = nth_equal(v, value, equals_until(before, each, v.count, target), ids);
  return {{value, at}, at >= 0};
}

List listed(const Values& v, int64_t count, const SelectionMemory& memory) {
  for (int64_t i = 0; i < count; ++i) memory.keys[i] = key_of(v.at(memory.ids[i]));
  return {memory.ids, memory.keys, count};
}

// Where the cut is not in the bracket, `reached` is false.
Found in_bracket(const Values& v, Weight weight, double target, Bracket bracket,
                 const SelectionMemory& memory) {
  if (bracket.low == bracket.high) return among_equals(v, weight, target, bracket.low, memory.ids);
  const bool sum = weight == Weight::kValue;
  const Split s =
      kernels().split_row(v.data, v.count, v.scale, bracket.low, bracket.high, sum, memory.ids);
  const double before = amount_above(s, weight);
  if (before >= target || s.between == 0) return {};
  List list = listed(v, s.between, memory);
  return in_list(list, weight, target, before);
}

// Lists, in memory.ids, the elements from `low` to `high`; block_sums: of those above.  How many.
int64_t split_blocks(const Values& v, float low, float high, const SelectionMemory& memory,
                     double* block_sums) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < v.count; begin += kBlock) {
    const int64_t b = begin / kBlock;
    block_sums[b] = 0.0;
    if (v.block_bounds != nullptr && v.block_bounds[b] * v.scale < low) continue;
    int32_t* const ids = memory.ids + count;
    const bool sum = high < kInfinity;
    const Split s = kernels().split_row(v.data + begin, std::min(kBlock, v.count - begin), v.scale,
                                        low, high, sum, ids);
    block_sums[b] = s.sum_above;
    for (int64_t i = 0; i < s.between; ++i) ids[i] += static_cast<int32_t>(begin);
    count += s.between;
  }
  return count;
}

// False only if no element exceeds `value`.
bool may_exceed(const Values& v, float value) {
  if (v.block_bounds == nullptr) return true;
  const int64_t blocks = (v.count + kBlock - 1) / kBlock;
  return *std::max_element(v.block_bounds, v.block_bounds + blocks) * v.scale > value;
}

}  // namespace

Cut cut_at_count(const Values& values, int64_t count, const SelectionMemory& memory) {
  const auto target = static_cast<double>(count);
  if (values.count > kListed) {
    const double share = std::min(target / static_cast<double>(values.count), 1.0);
    const Bracket bracket = estimated(values, {Weight::kOne, share, kInfinity}, memory);
    const Found found = in_bracket(values, Weight::kOne, target, bracket, memory);
    if (found.reached) return found.cut;
  }
  return in_bracket(values, Weight::kOne, target, {-kInfinity, kInfinity}, memory).cut;
}

Cut cut_at_sum(const Values& values, double target, double total, const SelectionMemory& memory) {
  if (values.count > kListed) {
    // Values that are much by themselves are few, and often enough.
    const auto much = static_cast<float>(total / 1024);
    List list =
        listed(values, between(values, 0, values.count, much, kInfinity, memory.ids), memory);
    double head = 0.0;
    for (int64_t i = 0; i < list.count; ++i) head += static_cast<double>(value_of(list.keys[i]));
    if (head >= target) return in_list(list, Weight::kValue, target, 0.0).cut;
    const double share = std::clamp((target - head) / (total - head), 0.0, 1.0);
    const Bracket bracket = estimated(values, {Weight::kValue, share, much}, memory);
    const Found found = in_bracket(values, Weight::kValue, target, bracket, memory);
    if (found.reached) return found.cut;
  }
  return in_bracket(values, Weight::kValue, target, {-kInfinity, kInfinity}, memory).cut;
}

bool sums_exactly(int64_t count, double target) {
  // Values below `least` sum to less than what the target leaves over: none of them is kept.  Those
  // from 2^-29 on are multiples of 2^-52, and so is every sum of them; sums below 2 are exact.
  const double least = (1.0 - 1e-6 - target) / static_cast<double>(count);
  return least >= 0x1p-29;
}

Cut cut_and_block_sums(const Values& v, double target, const SelectionMemory& memory,
                       double* block_sums) {
  const int64_t blocks = (v.count + kBlock - 1) / kBlock;
  const auto in = [&](float low, float high) {
    List list = listed(v, split_blocks(v, low, high, memory, block_sums), memory);
    const double before = std::accumulate(block_sums, block_sums + blocks, 0.0);
    if (before >= target || list.count == 0) return Found{};
    return in_list(list, Weight::kValue, target, before, {block_sums});
  };
  // As in cut_at_sum, with a longer list of what is much and less room: a bracket that does not
  // hold the cut is rare enough.
  if (v.count > kListed) {
    const float much = may_exceed(v, 0x1p-9f) ? 0x1p-14f : kInfinity;  // a flat row has nothing
    List list = listed(v, split_blocks(v, much, kInfinity, memory, block_sums), memory);
    double head = 0.0;
    for (int64_t i = 0; i < list.count; ++i) head += static_cast<double>(value_of(list.keys[i]));
    if (head >= target) return in_list(list, Weight::kValue, target, 0.0, {block_sums}).cut;
    const double share = std::clamp((target - head) / (1.0 - head), 0.0, 1.0);
    const Bracket bracket = estimated(v, {Weight::kValue, share, much, 3}, memory);
    const Found found = in(bracket.low, bracket.high);
    if (found.reached) return found.cut;
  }
  return in(-kInfinity, kInfinity).cut;
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
  const float next = std::nextafter(cut.value, kInfinity);
  const int64_t first = between(values, 0, middle, cut.value, kInfinity, ids);
  const int64_t second = between(values, middle, values.count, next, kInfinity, ids + first);
  for (int64_t i = first; i < first + second; ++i) ids[i] += static_cast<int32_t>(middle);
  return first + second;
}

}  // namespace bitnet::engine
