// The table of CPU makes and the override by the environment; see tuning.h.  Distances measured:
// docs/log.md; ports: docs/counts.md.  Must not know kernels.
#include "runtime/tuning.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace bitnet {
namespace {

std::string cpu_vendor() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
    std::string vendor;
    for (const unsigned word : {b, d, c}) {
      for (int shift = 0; shift < 32; shift += 8) {
        vendor += static_cast<char>(word >> shift & 0xff);
      }
    }
    return vendor;
  }
#endif
  return "";
}

int64_t parse_distance(const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 0 || value > 65536) {
    throw std::runtime_error(
        std::string("BITNET_OPS_PREFETCH: expected bytes from 0 to 65536, got '") + text + "'");
  }
  return value;
}

Tuning choose() {
  const std::string vendor = cpu_vendor();
  Tuning row{"unknown", 2048, true};
  if (vendor == "AuthenticAMD") row = {"AMD", 6144, false};
  if (vendor == "GenuineIntel") row = {"Intel", 2048, true};
  if (const char* wanted = std::getenv("BITNET_OPS_PREFETCH"); wanted != nullptr && *wanted != 0) {
    row.prefetch_bytes = parse_distance(wanted);
  }
  return row;
}

}  // namespace

const Tuning& tuning() {
  static const Tuning row = choose();
  return row;
}

}  // namespace bitnet
