// CPUID, XCR0 and auxiliary-vector reading; see features.h.
// Compiled for the baseline CPU, since it runs before
// anything is known. Must not know kernels.
#include "kernels/features.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace bitnet {
namespace {

constexpr FeatureName kNames[] = {
    {kAvx2, "avx2"},
    {kFma, "fma"},
    {kF16c, "f16c"},
    {kAvxVnni, "avx_vnni"},
    {kAvx512F, "avx512f"},
    {kAvx512Bw, "avx512bw"},
    {kAvx512Vl, "avx512vl"},
    {kAvx512Dq, "avx512dq"},
    {kAvx512Vnni, "avx512_vnni"},
    {kAvx512Vbmi, "avx512_vbmi"},
    {kAvx512Bf16, "avx512_bf16"},
    {kAmxTile, "amx_tile"},
    {kAmxInt8, "amx_int8"},
    {kAmxBf16, "amx_bf16"},
    {kNeon, "neon"},
    {kNeonDotprod, "neon_dotprod"},
    {kNeonI8mm, "neon_i8mm"},
    {0, nullptr},
};

#if defined(__x86_64__)

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Leaf cpuid(unsigned leaf, unsigned subleaf) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

uint64_t read_xcr0() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Of AMX, what the system has: of all systems Linux alone has been tried, and is asked.
#if defined(__linux__)
constexpr long kArchGetXcompSupp = 0x1021, kArchGetXcompPerm = 0x1022, kArchReqXcompPerm = 0x1023;
constexpr long kXfeatureTileData = 18;

// Whether tile data is among the features that `request` reports.
bool reports_tile_data(long request) {
  uint64_t features = 0;
  return syscall(SYS_arch_prctl, request, &features) == 0 && (features >> kXfeatureTileData & 1);
}

bool system_has_tiles() { return reports_tile_data(kArchGetXcompSupp); }
bool tiles_granted() { return reports_tile_data(kArchGetXcompPerm); }
bool ask_for_tiles() { return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0; }
#else
bool system_has_tiles() { return false; }
bool tiles_granted() { return false; }
bool ask_for_tiles() { return false; }
#endif

uint64_t detect() {
  const Leaf basic = cpuid(1, 0);
  const bool osxsave = (basic.c >> 27) & 1;
  if (!osxsave) return 0;
  const uint64_t xcr0 = read_xcr0();
  const bool os_avx = (xcr0 & 0x6) == 0x6;
  const bool os_avx512 = os_avx && (xcr0 & 0xe0) == 0xe0;
  const bool os_amx = (xcr0 & 0x60000) == 0x60000;
  const Leaf ext = cpuid(7, 0);
  const Leaf ext1 = ext.a >= 1 ? cpuid(7, 1) : Leaf{};
  uint64_t f = 0;
  const auto add = [&f](bool has, uint64_t bit) { f |= has ? bit : 0; };
  if (os_avx) {
    add((ext.b >> 5) & 1, kAvx2);
    add((basic.c >> 12) & 1, kFma);
    add((basic.c >> 29) & 1, kF16c);
    add((ext1.a >> 4) & 1, kAvxVnni);
  }
  if (os_avx512) {
    add((ext.b >> 16) & 1, kAvx512F);
    add((ext.b >> 30) & 1, kAvx512Bw);
    add((ext.b >> 31) & 1, kAvx512Vl);
    add((ext.b >> 17) & 1, kAvx512Dq);
    add((ext.c >> 11) & 1, kAvx512Vnni);
    add((ext.c >> 1) & 1, kAvx512Vbmi);
    add((ext1.a >> 5) & 1, kAvx512Bf16);
  }
  const bool cpu_amx = (ext.d >> 24) & 1;
  if (os_amx && cpu_amx && system_has_tiles()) {
    add(true, kAmxTile);
    add((ext.d >> 25) & 1, kAmxInt8);
    add((ext.d >> 22) & 1, kAmxBf16);
  }
  return f;
}

#elif defined(__aarch64__)

uint64_t detect() {
  uint64_t f = kNeon;
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) f |= kNeonDotprod;
#ifdef HWCAP2_I8MM
  if (getauxval(AT_HWCAP2) & HWCAP2_I8MM) f |= kNeonI8mm;
#endif
#endif
  return f;
}

#else
uint64_t detect() { return 0; }
#endif

}  // namespace

const FeatureName* feature_names() { return kNames; }

// For whole-suite tests alone (scripts/test_emulated --all): features whose instructions the
// kernels of this build do without.
#if !defined(BITNET_PRETENDED_FEATURES)
#define BITNET_PRETENDED_FEATURES 0
#endif

uint64_t cpu_features() {
  static const uint64_t features = detect() | BITNET_PRETENDED_FEATURES;
  return features;
}

#if defined(__x86_64__)

namespace {

std::atomic<bool> g_amx_rejected{false};

// A pretended unit needs nobody's permission, but is asked for all the same.
constexpr bool kPretendedTiles = (uint64_t{BITNET_PRETENDED_FEATURES} & kAmxTile) != 0;
std::atomic<bool> g_pretended_granted{false};

bool amx_granted() { return kPretendedTiles ? g_pretended_granted.load() : tiles_granted(); }

bool ask_for_amx() {
  if (kPretendedTiles) return g_pretended_granted = true;
  return ask_for_tiles();
}

}  // namespace

AmxPermission amx_permission() {
  if ((cpu_features() & kAmxTile) == 0) return AmxPermission::kNone;
  if (amx_granted()) return AmxPermission::kGranted;
  return g_amx_rejected ? AmxPermission::kRejected : AmxPermission::kNotRequested;
}

bool request_amx_permission() {
  if (amx_permission() == AmxPermission::kNotRequested && !ask_for_amx()) g_amx_rejected = true;
  return amx_permission() == AmxPermission::kGranted;
}

#else

AmxPermission amx_permission() { return AmxPermission::kNone; }
bool request_amx_permission() { return false; }

#endif

}  // namespace bitnet
