// Reads the system's description of caches and memory nodes, and cuts a region's threads into
// groups; see core_groups.h.
#include "runtime/core_groups.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "runtime/oversubscription.h"

namespace bitnet {
namespace {

// The first line of a file, "" if there is none.
std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The CPUs that share the last-level cache of a CPU, as the system writes them.
std::string sharers_of_last_cache(const std::string& cpu) {
  constexpr int kMaxCaches = 8;
  std::string level, sharers;
  for (int i = 0; i < kMaxCaches; ++i) {
    const std::string cache = cpu + "/cache/index" + std::to_string(i);
    const std::string found = line_of(cache + "/level");
    if (found.empty()) break;
    if (found < level) continue;
    level = found;
    sharers = line_of(cache + "/shared_cpu_list");
  }
  return sharers;
}

int32_t node_of(const std::string& cpu, int32_t nodes) {
  for (int32_t node = 0; node < nodes; ++node) {
    if (std::ifstream(cpu + "/node" + std::to_string(node) + "/cpulist").good()) return node;
  }
  return -1;
}

}  // namespace

std::vector<int32_t> cache_domains(const std::vector<int32_t>& cpus, const std::string& root) {
  const std::string devices = root + "sys/devices/system/";
  int32_t nodes = 0;  // numbers of nodes may have gaps
  for (int32_t node = 0; node < 64; ++node) {
    if (!line_of(devices + "node/node" + std::to_string(node) + "/cpulist").empty())
      nodes = node + 1;
  }
  std::map<std::string, int32_t> numbers;
  std::set<std::string> cores;
  std::vector<int32_t> domains, of_siblings;
  for (const int32_t id : cpus) {
    const std::string cpu = devices + "cpu/cpu" + std::to_string(id);
    const int32_t node = nodes > 1 ? node_of(cpu, nodes) : 0;
    const std::string sharers = sharers_of_last_cache(cpu);
    if (sharers.empty() && nodes <= 1) return {};
    const auto number = static_cast<int32_t>(numbers.size());
    const std::string key = std::to_string(node) + ":" + sharers;
    const std::string core = line_of(cpu + "/topology/thread_siblings_list");
    const bool first = core.empty() || cores.insert(core).second;
    (first ? domains : of_siblings).push_back(numbers.try_emplace(key, number).first->second);
  }
  domains.insert(domains.end(), of_siblings.begin(), of_siblings.end());
  return domains;
}

CoreGroups::CoreGroups(int64_t partitions) {
  if (partitions <= kMaxInGroup) {
    cut(partitions, {});
    return;
  }
  static const std::vector<int32_t> domains = cache_domains(allowed_cpu_list(), "/");
  cut(partitions, domains);
}

CoreGroups::CoreGroups(int64_t partitions, const std::vector<int32_t>& domains) {
  cut(partitions, domains);
}

// Cuts every run of neighbours of one domain evenly. A run that is too short for a group joins the
// next run; the last one joins the run before.
void CoreGroups::cut(int64_t partitions, const std::vector<int32_t>& domains) {
  count_ = 0;
  if (partitions <= kMaxInGroup) {
    begins_[count_ = 1] = static_cast<int16_t>(partitions);
    return;
  }
  const bool known = static_cast<int64_t>(domains.size()) >= partitions;
  const auto same = [&](int64_t p) {
    return !known || domains[static_cast<size_t>(p)] == domains[static_cast<size_t>(p - 1)];
  };
  for (int64_t begin = 0; begin < partitions;) {
    int64_t end = std::min(begin + kMinInGroup, partitions);
    while (end < partitions && (same(end) || partitions - end < kMinInGroup)) ++end;
    const int64_t groups = (end - begin + kMaxInGroup - 1) / kMaxInGroup;
    for (int64_t g = 0; g < groups; ++g) {
      begins_[count_] = static_cast<int16_t>(begin + (end - begin) * g / groups);
      ++count_;
    }
    begin = end;
  }
  begins_[count_] = static_cast<int16_t>(partitions);
  for (int64_t g = 0; g < count_; ++g)
    std::fill(of_ + begins_[g], of_ + begins_[g + 1], static_cast<uint8_t>(g));
}

}  // namespace bitnet
