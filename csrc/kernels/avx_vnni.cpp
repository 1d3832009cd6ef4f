// The avx_vnni kernel table: its vocabulary, then the algorithms over it (generic/table.inl).
// Compiled with its own flags (CMakeLists.txt); exports one symbol, table(). Must not know whether
// this CPU may run it: kernels/dispatch.cpp does.
#define BITNET_ISA avx_vnni
#include "format/layout.h"
#include "kernels/features.h"
#include "kernels/isa_tables.h"
#include "kernels/simd_avx_vnni.h"
#include "kernels/simd_avx_vnni_head.h"
#include "kernels/simd_ymm_cache.h"

namespace bitnet::BITNET_ISA {
namespace {
constexpr const char* kDescription = "AVX2 with AVX-VNNI; ternary dot by vpdpbusd, 256 bit";
constexpr uint64_t kRequired = kAvx2 | kFma | kF16c | kAvxVnni;
}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/generic/table.inl"
