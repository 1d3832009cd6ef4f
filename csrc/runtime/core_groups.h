// Groups of a region's threads: those on cores that share a cache, at most eight. If threads are
// not bound to cores, the groups are a guess, which only speed depends on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bitnet {

// A number for each CPU of `cpus`: CPUs with the same number share their last-level cache and
// memory node. The first CPU of every physical core comes first, the others behind. Empty if the
// system does not say. `root` is "/" except in tests.
std::vector<int32_t> cache_domains(const std::vector<int32_t>& cpus, const std::string& root);

// The partitions of a region in groups of neighbours, if partition p is on the p-th core. A group
// has at most kMaxInGroup partitions and, unless it is the only one, at least kMinInGroup.
class CoreGroups {
 public:
  static constexpr int64_t kMaxInGroup = 8, kMinInGroup = 4, kMaxPartitions = 256;
  static constexpr int64_t kMaxGroups = kMaxPartitions / kMinInGroup;

  // For the CPUs of the affinity mask. Reads the system's description of them once, when a region
  // first has more partitions than a group.
  explicit CoreGroups(int64_t partitions);
  // With fewer domains than partitions, all partitions count as one domain.
  CoreGroups(int64_t partitions, const std::vector<int32_t>& domains);

  int64_t count() const { return count_; }
  int64_t begin(int64_t group) const {
    return begins_[group];
  }  // begin(count()) is the number of partitions
  int64_t of(int64_t partition) const { return count_ == 1 ? 0 : of_[partition]; }

 private:
  void cut(int64_t partitions, const std::vector<int32_t>& domains);

  int64_t count_ = 1;
  int16_t begins_[kMaxGroups + 1] = {};
  uint8_t of_[kMaxPartitions] = {};
};

}  // namespace bitnet
