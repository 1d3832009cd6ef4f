// Which threads of a region belong together: those of cores that share a cache, at most eight. A
// guess where threads are not bound, and then only of speed. Must not know what threads do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bitnet {

// A number for each CPU of `cpus`, one of each physical core first and the others behind: CPUs of
// the same number share their last cache and memory node. Empty where the system does not tell.
// `root` stands for "/" and is another directory in tests.
std::vector<int32_t> cache_domains(const std::vector<int32_t>& cpus, const std::string& root);

// The partitions of a region in groups of neighbours, partition p being on the p-th core. A group
// has no more than kMostInGroup and, unless it is the only one, no less than kFewestInGroup.
class CoreGroups {
 public:
  static constexpr int64_t kMostInGroup = 8, kFewestInGroup = 4, kMostPartitions = 256;
  static constexpr int64_t kMostGroups = kMostPartitions / kFewestInGroup;

  // On the CPUs of the affinity mask when the library was loaded. Reads what the system tells of
  // them once, when a region has more partitions than a group.
  explicit CoreGroups(int64_t partitions);
  // Where there are fewer domains than partitions they say nothing: all are one.
  CoreGroups(int64_t partitions, const std::vector<int32_t>& domains);

  int64_t count() const { return count_; }
  int64_t begin(int64_t group) const { return begins_[group]; }  // of group count(): partitions
  int64_t of(int64_t partition) const { return count_ == 1 ? 0 : of_[partition]; }

 private:
  void cut(int64_t partitions, const std::vector<int32_t>& domains);

  int64_t count_ = 1;
  int16_t begins_[kMostGroups + 1] = {};
  uint8_t of_[kMostPartitions] = {};
};

}  // namespace bitnet
