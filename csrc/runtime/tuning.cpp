// The table of CPU makes and the override by the environment; see tuning.h.  Distances measured:
// docs/log.md; ports: docs/notes/counts.md.  Must not know kernels.
#include "runtime/tuning.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace bitnet {
namespace {

struct Cpu {
  std::string vendor;
  unsigned family = 0;
};

Cpu this_cpu() {
  Cpu cpu;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
    for (const unsigned word : {b, d, c}) {
      for (int shift = 0; shift < 32; shift += 8) {
        cpu.vendor += static_cast<char>(word >> shift & 0xff);
      }
    }
  }
  if (__get_cpuid(1, &a, &b, &c, &d) != 0) {
    cpu.family = a >> 8 & 0xf;
    if (cpu.family == 0xf) cpu.family += a >> 20 & 0xff;
  }
#endif
  return cpu;
}

[[noreturn]] void reject(const char* text) {
  throw std::runtime_error(
      std::string("BITNET_OPS_PREFETCH: expected bytes from 0 to 65536, got '") + text +
      "'; :L1 or :L2 may follow, for where heads are fetched to");
}

void override_by(const char* text, Tuning& row) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  const std::string level = end;
  const bool known = level.empty() || level == ":L1" || level == ":L2";
  if (end == text || !known || value < 0 || value > 65536) reject(text);
  row.prefetch_bytes = row.head_bytes = value;
  if (!level.empty()) row.head_into_l2 = level == ":L2";
}

TableUse table_use(const std::string& text) {
  if (text == "0") return TableUse::kOff;
  if (text == "1") return TableUse::kOn;
  if (text == "measure") return TableUse::kMeasured;
  throw std::runtime_error("BITNET_OPS_TABLES: expected 0, 1 or measure, got '" + text +
                           "'; it says whether products of many tokens use tables of sums");
}

Tuning choose() {
  constexpr unsigned kZen3 = 0x19, kZen5 = 0x1a;  // the family of Zen 4 is that of Zen 3
  const Cpu cpu = this_cpu();
  Tuning row{"unknown", 2048, 2048, false, true, false, TableUse::kMeasured};
  if (cpu.vendor == "AuthenticAMD") {
    const bool newer = cpu.family >= kZen5;
    row = {newer ? "AMD Zen 5 and later" : "AMD up to Zen 4",
           6144,
           newer ? 6144 : 512,
           !newer,
           false,
           true,
           cpu.family == kZen3 ? TableUse::kOn : TableUse::kMeasured};
  }
  if (cpu.vendor == "GenuineIntel")
    row = {"Intel", 2048, 2048, false, true, false, TableUse::kMeasured};
  if (const char* wanted = std::getenv("BITNET_OPS_PREFETCH"); wanted != nullptr && *wanted != 0) {
    override_by(wanted, row);
  }
  if (const char* wanted = std::getenv("BITNET_OPS_TABLES"); wanted != nullptr && *wanted != 0)
    row.sum_tables = table_use(wanted);
  return row;
}

}  // namespace

const Tuning& tuning() {
  static const Tuning row = choose();
  return row;
}

}  // namespace bitnet
