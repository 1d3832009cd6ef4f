// What the hardware does, asked of itself. For benchmarks: how fast memory is read (probe_read) and
// int8 multiplied (probe_int8_peak), both on the threads of the kernels, and the latency between
// two cores (ping_pong_ns; on a virtual machine it tells whether they share a cache, which decides
// bandwidth and the cost of a parallel region). And the products of AMX and of vdpbf16ps against
// their models (check_amx). Must not know torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/pair_unit.h"
#include "kernels/tile_check.h"
#include "runtime/parallel.h"

namespace py = pybind11;

void bind_probe(py::module_& m);  // called by bindings.cpp

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kClockEverySpins = 1 << 12;

bool pin_to(int cpu) {
#if defined(__linux__)
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;  // 0 = the calling thread alone
#else
  return cpu >= 0;
#endif
}

constexpr int64_t kMaxDistance = 1 << 16;
constexpr int64_t kMaxIterations = int64_t{1} << 30;  // about a minute

uint64_t probe_read(uintptr_t data_ptr, int64_t nbytes, int64_t streams, int64_t distance) {
  if (nbytes < 0 || (streams != 1 && streams != 2 && streams != 4) || distance < 0 ||
      distance > kMaxDistance) {
    throw std::invalid_argument(
        "probe_read: expected nbytes at least 0, 1, 2 or 4 streams and a distance from 0 to 65536 "
        "bytes, got " +
        std::to_string(nbytes) + ", " + std::to_string(streams) + " and " +
        std::to_string(distance));
  }
  const bitnet::KernelTable& kernels = bitnet::active_kernels();
  const auto* data = reinterpret_cast<const uint8_t*>(data_ptr);
  constexpr int64_t kPage = 4096;
  std::atomic<uint64_t> checksum{0};
  bitnet::parallel_ranges(
      nbytes / kPage, kPage, bitnet::kMinElements, [&](int64_t begin, int64_t end) {
        checksum ^=
            kernels.probe_read(data + begin * kPage, (end - begin) * kPage, streams, distance);
      });
  return checksum.load();
}

int64_t probe_int8_peak(int64_t iterations) {
  if (iterations < 0 || iterations > kMaxIterations) {
    throw std::invalid_argument("probe_int8_peak: expected iterations from 0 to " +
                                std::to_string(kMaxIterations) + ", got " +
                                std::to_string(iterations));
  }
  const bitnet::KernelTable& kernels = bitnet::active_kernels();
  const int64_t partitions = bitnet::partitions_for(1 << 20, int64_t{1} << 40, 1);
  std::atomic<int64_t> macs{0};
  std::atomic<int32_t> sink{0};
  bitnet::run_partitions(partitions, [&](int64_t) {
    int32_t local = 0;
    if (iterations > 0) macs += kernels.probe_int8_peak(iterations, &local);
    sink ^= local;
  });
  return macs.load();
}

// One cache line that two threads hand to each other.  A thread gives up at the deadline, so that a
// partner which gets no processor costs a bounded time.
struct Line {
  alignas(64) std::atomic<int64_t> turn{0};
  alignas(64) std::atomic<bool> pinned{true};
  std::atomic<bool> gave_up{false};
  Clock::time_point deadline;

  bool wait_for(int64_t value) {
    for (int64_t spins = 1; turn.load(std::memory_order_acquire) != value; ++spins) {
      if (spins % kClockEverySpins == 0 && Clock::now() > deadline) gave_up = true;
      if (gave_up.load(std::memory_order_relaxed)) return false;
    }
    return true;
  }
  void pass_to(int64_t value) { turn.store(value, std::memory_order_release); }
};

// Batch b is round trips b * n .. (b + 1) * n: the caller's thread plays even turns, the other odd.
std::vector<double> play(Line& line, int cpu, int64_t batches, int64_t round_trips) {
  std::vector<double> nanoseconds;
  if (!pin_to(cpu)) line.pinned = false;
  for (int64_t b = 0; b < batches; ++b) {
    const auto start = Clock::now();
    for (int64_t i = b * round_trips; i < (b + 1) * round_trips; ++i) {
      line.pass_to(2 * i + 1);
      if (!line.wait_for(2 * i + 2)) return nanoseconds;
    }
    const std::chrono::duration<double, std::nano> elapsed = Clock::now() - start;
    nanoseconds.push_back(elapsed.count() / static_cast<double>(round_trips));
  }
  return nanoseconds;
}

void answer(Line& line, int cpu, int64_t total) {
  if (!pin_to(cpu)) line.pinned = false;
  for (int64_t i = 0; i < total; ++i) {
    if (!line.wait_for(2 * i + 1)) return;
    line.pass_to(2 * i + 2);
  }
}

std::vector<double> ping_pong_ns(int cpu_a, int cpu_b, int64_t batches, int64_t round_trips,
                                 double timeout_s) {
  if (cpu_a == cpu_b || batches < 1 || round_trips < 1 || !(timeout_s > 0 && timeout_s <= 60)) {
    throw std::invalid_argument(
        "ping_pong_ns: expected two different CPUs, positive counts and a timeout of at most 60 s");
  }
  Line line;
  line.deadline = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(timeout_s * 1e6));
  std::vector<double> nanoseconds;
  // Threads of its own: the pinning ends with them and never reaches the caller.
  {
    std::jthread second([&] { answer(line, cpu_b, batches * round_trips); });
    std::jthread first([&] { nanoseconds = play(line, cpu_a, batches, round_trips); });
  }
  if (!line.pinned) {
    throw std::invalid_argument(
        "ping_pong_ns: expected CPUs of this process's affinity mask, got " +
        std::to_string(cpu_a) + " and " + std::to_string(cpu_b));
  }
  return nanoseconds;
}

py::list check_amx(int64_t products, uint64_t seed) {
  if (products < 1 || products > 1'000'000)
    throw std::invalid_argument("check_amx: expected products from 1 to 1000000, got " +
                                std::to_string(products));
  bitnet::TileCheck checks[bitnet::kTileInstructions];
  bitnet::PairCheck pairs;
  {
    const py::gil_scoped_release unlocked;
    bitnet::check_tile_unit(products, seed, checks);
    pairs = bitnet::check_pair_unit(products, seed);
  }
  py::list rows;
  const auto add = [&rows](const char* instruction, const auto& check, const char* first) {
    py::dict row;
    row["instruction"] = instruction;
    row["available"] = check.available;
    row["outputs"] = check.outputs;
    row["different"] = check.different;
    row["first_difference"] = first;
    rows.append(row);
  };
  for (const bitnet::TileCheck& check : checks) add(check.instruction, check, check.first);
  add("vdpbf16ps", pairs, "");
  return rows;
}

}  // namespace

void bind_probe(py::module_& m) {
  m.def("probe_read", &probe_read, py::arg("data_ptr"), py::arg("nbytes"), py::arg("streams") = 1,
        py::arg("distance") = 0, py::call_guard<py::gil_scoped_release>(),
        "Read memory once on the kernels' threads; a checksum that depends on every byte.");
  m.def("probe_int8_peak", &probe_int8_peak, py::arg("iterations"),
        py::call_guard<py::gil_scoped_release>(),
        "Run the int8 product of the widest unit on the kernels' threads; the multiply-adds done.");
  m.def("check_amx", &check_amx, py::arg("products"), py::arg("seed") = 0,
        "Random products by this CPU's AMX and vdpbf16ps and by their models in plain C++: one row "
        "for each instruction, with how many outputs differ. Asks the system for tiles.");
  m.def("ping_pong_ns", &ping_pong_ns, py::arg("cpu_a"), py::arg("cpu_b"), py::arg("batches") = 25,
        py::arg("round_trips") = 100, py::arg("timeout_s") = 0.25,
        py::call_guard<py::gil_scoped_release>(),
        "Mean round trip of a cache line between two CPUs; one value a batch finished in time.");
}
