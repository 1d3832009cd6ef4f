// The kernel tables as a set, and their choice: no empty row, feature sets that hold, every
// available ISA selectable, every other one rejected with the list, and the environment variable
// read once.  What the kernels compute is for test_kernels_*.cpp.
#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/features.h"
#include "tests/check.h"
#include "tests/random.h"
#include "tests/system.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

// The message of what `action` throws, "" if nothing.
template <class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

void check_rejection(const std::string& message, const std::string& origin,
                     const std::string& name) {
  CHECK(message.starts_with(origin + ": expected one of"), "message: %s", message.c_str());
  CHECK(message.find("got '" + name + "'") != std::string::npos, "message: %s", message.c_str());
  for (const KernelTable* kernels : available_tables()) {
    CHECK(message.find(kernels->name) != std::string::npos, "message: %s", message.c_str());
  }
}

// In a child process, since the variable is read once.  Must run before the first call of
// active_kernels().
TEST(environment_is_read_at_first_use) {
  for (const std::string value : {"scalar", "", "nonsense"}) {
    begin_case("BITNET_OPS_ISA='%s'", value.c_str());
    const auto chooses = [&] {
      set_variable("BITNET_OPS_ISA", value.c_str());
      const std::string message = error_of([] { active_kernels(); });
      if (value == "nonsense") {
        check_rejection(message, "BITNET_OPS_ISA", value);
      } else {
        const char* want = value.empty() ? available_tables().front()->name : value.c_str();
        CHECK(message.empty() && active_kernels().name == std::string(want), "%s", message.c_str());
        set_variable("BITNET_OPS_ISA", "nonsense");
        CHECK(error_of([] { active_kernels(); }).empty(), "read a second time");
      }
      return tally.failures == 0;
    };
    CHECK(succeeds_in_a_process("dispatch.environment_is_read", value, chooses), "see above");
  }
}

TEST(tables_are_complete) {
  std::set<std::string> names;
  uint64_t known = 0;
  for (const FeatureName* f = feature_names(); f->name != nullptr; ++f) known |= f->bit;
  for (const KernelTable* kernels : tables_under_test()) {
    begin_case("table %s", kernels->name);
    CHECK(names.insert(kernels->name).second, "two tables have one name");
    CHECK(std::strlen(kernels->description) > 0, "no description");
    CHECK((kernels->required & ~known) == 0, "requires a feature without a name");
    // Every field behind the three above is a pointer, or a number that is not 0, also those of
    // tomorrow.
    constexpr std::size_t kFirst = offsetof(KernelTable, tile_lanes);
    static_assert((sizeof(KernelTable) - kFirst) % sizeof(void*) == 0);
    const void* rows[(sizeof(KernelTable) - kFirst) / sizeof(void*)];
    std::memcpy(rows, reinterpret_cast<const char*>(kernels) + kFirst, sizeof rows);
    for (const void* const& row : rows) {
      CHECK(row != nullptr, "row %d is empty", static_cast<int>(&row - rows));
    }
  }
}

TEST(availability_follows_features) {
  begin_case("available tables");
  const auto all = all_tables(), available = available_tables();
  CHECK(std::string(all.back()->name) == "scalar" && all.back()->required == 0,
        "scalar is not last");
  CHECK(available.back() == all.back(), "scalar is not available");
  for (const KernelTable* kernels : all) {
    const bool listed = std::count(available.begin(), available.end(), kernels) == 1;
    const bool runs = (kernels->required & ~cpu_features()) == 0;
    CHECK(listed == runs, "%s: listed %d, features %d", kernels->name, listed, runs);
  }
#if defined(__x86_64__)
  // The compiler's own reading of CPUID and XCR0 knows nothing of ours.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const auto has = [&](const std::string& name) {
    return std::any_of(available.begin(), available.end(),
                       [&](auto* t) { return t->name == name; });
  };
  for (const KernelTable* kernels : all) {  // a build may have left some out
    const std::string name = kernels->name;
    if (name != "avx2" && name != "avx512_vnni") continue;
    const bool theirs = name == "avx2" ? avx2 : avx512;
    CHECK(has(name) == theirs, "%s: ours %d, the compiler's %d", kernels->name, has(name), theirs);
  }
#endif
}

TEST(any_available_isa_can_be_forced) {
  const auto available = available_tables();
  force_isa("");
  CHECK(&active_kernels() == available.front(), "automatic choice is %s", active_kernels().name);
  for (const KernelTable* kernels : all_tables()) {
    begin_case("force_isa %s", kernels->name);
    if (std::count(available.begin(), available.end(), kernels) == 1) {
      force_isa(kernels->name);
      CHECK(&active_kernels() == kernels, "got %s", active_kernels().name);
      continue;
    }
    const KernelTable* before = &active_kernels();
    check_rejection(error_of([&] { force_isa(kernels->name); }), "force_isa", kernels->name);
    CHECK(&active_kernels() == before, "a rejected choice changed the table");
  }
  for (const std::string name : {"nonsense", "AVX2", " scalar", "scalar,avx2"}) {
    begin_case("force_isa '%s'", name.c_str());
    check_rejection(error_of([&] { force_isa(name); }), "force_isa", name);
  }
  force_isa("");
  CHECK(&active_kernels() == available.front(), "automatic choice is %s", active_kernels().name);
}

// The probes of the benchmarks: the checksum is the xor of all 8-byte words, the peak loop counts.
TEST(probes_count) {
  Random random(9);
  std::vector<uint8_t> data(128 * 37);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.next());
  for (const KernelTable* kernels : tables_under_test()) {
    begin_case("%s probes", kernels->name);
    for (std::size_t n = 0; n <= data.size(); n += 128) {
      uint64_t want = 0, word = 0;
      for (std::size_t i = 0; i < n; i += 8) {
        std::memcpy(&word, &data[i], 8);
        want ^= word;
      }
      for (const int64_t streams : {1, 2, 4}) {
        for (const int64_t distance : {0, 2048}) {
          const uint64_t got =
              kernels->probe_read(data.data(), static_cast<int64_t>(n), streams, distance);
          CHECK(got == want, "probe_read of %zu bytes, %lld streams: %llx", n,
                static_cast<long long>(streams), static_cast<unsigned long long>(got));
        }
      }
    }
    int32_t sink = 0;
    const int64_t one = kernels->probe_int8_peak(1, &sink),
                  many = kernels->probe_int8_peak(1000, &sink);
    CHECK(one > 0 && many == 1000 * one, "probe_int8_peak: %lld, %lld", static_cast<long long>(one),
          static_cast<long long>(many));
  }
}

}  // namespace
}  // namespace bitnet::test
