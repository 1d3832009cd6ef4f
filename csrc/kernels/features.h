// What this CPU and its operating system can execute, as a set of bits. A feature counts only if
// the system saves its registers. Must not know kernels: an ISA is a set of these bits, never a
// rank.
#pragma once

#include <cstdint>

namespace bitnet {

enum Feature : uint64_t {
  kAvx2 = 1u << 0,
  kFma = 1u << 1,
  kF16c = 1u << 2,
  kAvxVnni = 1u << 3,
  kAvx512F = 1u << 4,
  kAvx512Bw = 1u << 5,
  kAvx512Vl = 1u << 6,
  kAvx512Dq = 1u << 7,
  kAvx512Vnni = 1u << 8,
  kAvx512Vbmi = 1u << 9,
  kAvx512Bf16 = 1u << 10,
  kAmxTile = 1u << 11,
  kAmxInt8 = 1u << 12,
  kAmxBf16 = 1u << 13,
  kNeon = 1u << 14,
  kNeonDotprod = 1u << 15,
  kNeonI8mm = 1u << 16,
};

struct FeatureName {
  uint64_t bit;
  const char* name;
};

// Every bit with the name compilers and /proc/cpuinfo readers know; ends with {0, nullptr}.
const FeatureName* feature_names();

// Bits the CPU has AND the operating system has enabled: XCR0 for AVX and AVX-512 state, and for
// AMX also that the system hands out tile data to processes that ask (which this does not do).
uint64_t cpu_features();

// Linux gives the 8 KiB of tile state only to processes that ask; without the grant the first tile
// instruction is a SIGILL although CPUID announces AMX.  The grant is for the whole process and
// makes every later signal frame and context larger, so nobody asks who does not use tiles.
enum class AmxPermission { kNone, kNotRequested, kGranted, kRejected };

// kNone: no AMX here. Granted is also what another library of the process has asked for.
AmxPermission amx_permission();
// Asks, if nobody has; true if granted.
bool request_amx_permission();

}  // namespace bitnet
