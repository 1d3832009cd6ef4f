// The avx2 kernel table: its vocabulary, then the algorithms over it (generic/table.inl). Compiled
// with its own flags (CMakeLists.txt); exports one symbol, table(). Must not know whether this CPU
// may run it: kernels/dispatch.cpp does.
#define BITNET_ISA avx2
#include "format/layout.h"
#include "kernels/features.h"
#include "kernels/isa_tables.h"
#include "kernels/simd_avx2.h"
#include "kernels/simd_avx2_head.h"
#include "kernels/simd_ymm_cache.h"

namespace bitnet::BITNET_ISA {
namespace {
constexpr const char* kDescription = "AVX2, FMA, F16C; ternary dot by vpmaddubsw";
constexpr uint64_t kRequired = kAvx2 | kFma | kF16c;
}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/generic/table.inl"
