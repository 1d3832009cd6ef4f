// The machine's own limits, run on the same threads as the kernels: reading memory, multiplying
// int8. For benchmarks only.
#include <atomic>

#include "ops/checks.h"
#include "ops/register.h"
#include "runtime/parallel.h"

namespace bitnet::ops {
namespace {

Tensor int64_result(int64_t value) {
  Tensor out = empty({1}, ScalarType::Long);
  *static_cast<int64_t*>(out.mutable_data_ptr()) = value;
  return out;
}

constexpr int64_t kMostDistance = 1 << 16;
constexpr int64_t kMostIterations = int64_t{1} << 30;  // about a minute

}  // namespace

Tensor probe_read(const Tensor& buffer, int64_t streams, int64_t distance) {
  const Check check("_probe_read");
  check.dtype(buffer, "buffer", ScalarType::Byte);
  check.contiguous(buffer, "buffer");
  if (streams != 1 && streams != 2 && streams != 4) {
    check.fail("streams", "1, 2 or 4", std::to_string(streams));
  }
  if (distance < 0 || distance > kMostDistance) {
    check.fail("distance", "from 0 to 65536 bytes", std::to_string(distance));
  }
  const KernelTable& table = kernels();
  const auto* data = static_cast<const uint8_t*>(buffer.const_data_ptr());
  std::atomic<uint64_t> checksum{0};
  constexpr int64_t kLine = 4096;
  parallel_ranges(buffer.numel() / kLine, kLine, kMinElements, [&](int64_t begin, int64_t end) {
    checksum ^= table.probe_read(data + begin * kLine, (end - begin) * kLine, streams, distance);
  });
  return int64_result(static_cast<int64_t>(checksum.load()));
}

Tensor probe_int8_peak(const Tensor& seed, int64_t iterations) {
  const Check check("_probe_int8_peak");
  check.dtype(seed, "seed", ScalarType::Byte);
  if (iterations < 0) check.fail("iterations", "0 or more", std::to_string(iterations));
  if (iterations > kMostIterations)
    check.fail("iterations", "at most " + std::to_string(kMostIterations),
               std::to_string(iterations));
  const KernelTable& table = kernels();
  const int64_t partitions = partitions_for(1 << 20, int64_t{1} << 40, 1);
  std::atomic<int64_t> macs{0};
  std::atomic<int32_t> sink{0};
  run_partitions(partitions, [&](int64_t) {
    int32_t local = 0;
    if (iterations > 0) macs += table.probe_int8_peak(iterations, &local);
    sink ^= local;
  });
  return int64_result(macs.load());
}

BITNET_LIBRARY_IMPL(m) {
  m.impl("_probe_read", &Op<&probe_read>::boxed);
  m.impl("_probe_int8_peak", &Op<&probe_int8_peak>::boxed);
}

}  // namespace bitnet::ops
