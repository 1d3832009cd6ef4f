// The neon_dotprod kernel table: its vocabulary, then the algorithms over it (generic/table.inl).
// Compiled with its own flags (CMakeLists.txt); exports one symbol, table(). Must not know whether
// this CPU may run it: kernels/dispatch.cpp does.
#define BITNET_ISA neon_dotprod
#include "format/layout.h"
#include "kernels/features.h"
#include "kernels/isa_tables.h"
#include "kernels/simd_neon_dotprod.h"
#include "kernels/simd_neon_dotprod_cache.h"
#include "kernels/simd_neon_dotprod_head.h"

namespace bitnet::BITNET_ISA {
namespace {
constexpr const char* kDescription = "ARMv8.2 NEON with dotprod; ternary dot by sdot";
constexpr uint64_t kRequired = kNeon | kNeonDotprod;
}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/generic/table.inl"
