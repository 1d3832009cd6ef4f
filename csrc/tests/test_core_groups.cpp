// The groups of cores whose threads count their arrivals together: how runs of CPUs that share a
// cache are cut, and what is read of a system, here of made-up ones in a directory of the test.
#include "runtime/core_groups.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/oversubscription.h"
#include "tests/check.h"
#include "tests/system.h"

namespace bitnet::test {
namespace {

std::vector<int64_t> begins_of(const CoreGroups& groups) {
  std::vector<int64_t> begins;
  for (int64_t g = 0; g <= groups.count(); ++g) begins.push_back(groups.begin(g));
  return begins;
}

// `sizes` CPUs of one cache after the other.
std::vector<int32_t> caches(const std::vector<int64_t>& sizes) {
  std::vector<int32_t> domains;
  for (size_t i = 0; i < sizes.size(); ++i)
    domains.insert(domains.end(), static_cast<size_t>(sizes[i]), static_cast<int32_t>(i));
  return domains;
}

std::string text_of(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) text += " " + std::to_string(value);
  return text;
}

TEST(runs_are_cut_evenly) {
  struct Case {
    const char* what;
    int64_t partitions;
    std::vector<int32_t> domains;
    std::vector<int64_t> begins;
  };
  const std::vector<Case> cases = {
      {"a few threads are one group", 8, caches({4, 4}), {0, 8}},
      {"caches of eight cores", 24, caches({8, 8, 8}), {0, 8, 16, 24}},
      {"caches of six cores", 18, caches({6, 6, 6}), {0, 6, 12, 18}},
      {"two sockets of twelve", 24, caches({12, 12}), {0, 6, 12, 18, 24}},
      {"a mask that leaves one CPU of each cache",
       12,
       caches(std::vector<int64_t>(12, 1)),
       {0, 4, 8, 12}},
      {"the rest joins what is before it", 9, caches({8, 1}), {0, 4, 9}},
      {"nothing known", 20, {}, {0, 6, 13, 20}},
      {"more threads than CPUs", 64, caches({2}), {0, 8, 16, 24, 32, 40, 48, 56, 64}},
  };
  for (const Case& c : cases) {
    begin_case("%s", c.what);
    const std::vector<int64_t> got = begins_of(CoreGroups(c.partitions, c.domains));
    CHECK(got == c.begins, "groups begin at%s, expected%s", text_of(got).c_str(),
          text_of(c.begins).c_str());
  }
}

void every_partition_is_in_its_group(const CoreGroups& groups, int64_t partitions) {
  CHECK(groups.begin(0) == 0 && groups.begin(groups.count()) == partitions, "partitions missing");
  for (int64_t g = 0; g < groups.count(); ++g) {
    const int64_t size = groups.begin(g + 1) - groups.begin(g);
    CHECK(size <= CoreGroups::kMaxInGroup, "%lld in a group", static_cast<long long>(size));
    CHECK(groups.count() == 1 || size >= CoreGroups::kMinInGroup, "%lld in a group",
          static_cast<long long>(size));
    for (int64_t p = groups.begin(g); p < groups.begin(g + 1); ++p)
      CHECK(groups.of(p) == g, "partition %lld is in group %lld", static_cast<long long>(p),
            static_cast<long long>(groups.of(p)));
  }
}

TEST(groups_of_any_size) {
  for (int64_t cores = 1; cores <= 33; ++cores) {
    for (int64_t partitions = 1; partitions <= CoreGroups::kMaxPartitions; ++partitions) {
      begin_case("%lld partitions, caches of %lld", static_cast<long long>(partitions),
                 static_cast<long long>(cores));
      std::vector<int32_t> domains;
      for (int64_t p = 0; p < partitions; ++p) domains.push_back(static_cast<int32_t>(p / cores));
      every_partition_is_in_its_group(CoreGroups(partitions, domains), partitions);
      every_partition_is_in_its_group(CoreGroups(partitions), partitions);
    }
  }
}

// A system in a directory that goes with it.
struct System {
  std::filesystem::path root;

  System() {
    root = new_path(u8"bitnet-groups-");
    CHECK(std::filesystem::create_directory(root), "no directory");
  }
  ~System() { std::filesystem::remove_all(root); }

  void file(const std::string& path, const std::string& text) const {
    const std::filesystem::path whole = root / "sys/devices/system" / path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text << '\n';
  }
  // With caches of the levels 1, 1, 2, 3 in this order, as systems have them.
  void cpu(int id, const std::string& siblings, const std::string& sharers, int node) const {
    const std::string cpu = "cpu/cpu" + std::to_string(id), number = std::to_string(node);
    file(cpu + "/topology/thread_siblings_list", siblings);
    for (int i = 0; i < 4; ++i) {
      const std::string cache = cpu + "/cache/index" + std::to_string(i);
      file(cache + "/level", std::to_string(std::max(1, i)));
      file(cache + "/shared_cpu_list", i == 3 ? sharers : siblings);
    }
    file(cpu + "/node" + number + "/cpulist", "of the node");
    file("node/node" + number + "/cpulist", "of the node");
  }
  std::vector<int32_t> domains(const std::vector<int32_t>& cpus) const {
    return cache_domains(cpus, root.string() + "/");
  }
};

TEST(caches_of_a_system_are_read) {
  const System none;
  begin_case("no system");
  CHECK(none.domains({0, 1}).empty(), "domains of nothing");

  // four cores with a sibling behind each, caches of two cores
  const System neighbours;
  for (int i = 0; i < 8; ++i) {
    const int core = i / 2 * 2, cache = i / 4 * 4;
    neighbours.cpu(i, std::to_string(core) + "-" + std::to_string(core + 1),
                   std::to_string(cache) + "-" + std::to_string(cache + 3), 0);
  }
  begin_case("siblings are neighbours");
  CHECK(neighbours.domains({0, 1, 2, 3, 4, 5, 6, 7}) ==
            (std::vector<int32_t>{0, 0, 1, 1, 0, 0, 1, 1}),
        "cores are not first");
  begin_case("a mask");
  CHECK(neighbours.domains({3, 6, 7}) == (std::vector<int32_t>{0, 1, 1}), "another mask");

  // two nodes whose CPUs the system lists with the same sharers, as some virtual machines do
  const System nodes;
  for (int i = 0; i < 4; ++i) nodes.cpu(i, std::to_string(i), "0-3", i / 2 * 2);
  begin_case("memory nodes");
  CHECK(nodes.domains({0, 1, 2, 3}) == (std::vector<int32_t>{0, 0, 1, 1}), "nodes are not apart");
}

TEST(this_system_is_read) {
  begin_case("this system");
  const std::vector<int32_t>& cpus = allowed_cpu_list();
  CHECK(static_cast<int64_t>(cpus.size()) == allowed_cpus(), "counts differ");
  CHECK(std::is_sorted(cpus.begin(), cpus.end()), "not in order");
  const std::vector<int32_t> domains = cache_domains(cpus, "/");
  CHECK(domains.empty() || domains.size() == cpus.size(), "%zu domains of %zu CPUs", domains.size(),
        cpus.size());
}

}  // namespace
}  // namespace bitnet::test
