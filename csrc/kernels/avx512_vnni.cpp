// The avx512_vnni kernel table: its vocabulary, then the algorithms over it (generic/table.inl).
// Compiled with its own flags (CMakeLists.txt); exports one symbol, table(). Must not know whether
// this CPU may run it: kernels/dispatch.cpp does.
#define BITNET_ISA avx512_vnni
#include "format/layout.h"
#include "kernels/features.h"
#include "kernels/isa_tables.h"
#include "kernels/simd_avx512_vnni.h"
#include "kernels/simd_avx512_vnni_cache.h"
#include "kernels/simd_avx512_vnni_head.h"

namespace bitnet::BITNET_ISA {
namespace {
constexpr const char* kDescription = "AVX-512 with VNNI; ternary dot by vpdpbusd, 512 bit";
constexpr uint64_t kRequired =
    kAvx2 | kFma | kF16c | kAvx512F | kAvx512Bw | kAvx512Vl | kAvx512Dq | kAvx512Vnni;
}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/generic/table.inl"
