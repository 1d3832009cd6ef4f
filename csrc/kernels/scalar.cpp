// The scalar kernel table: its vocabulary, then the algorithms over it (generic/table.inl).
// Compiled with its own flags (CMakeLists.txt); exports one symbol, table(). Must not know whether
// this CPU may run it: kernels/dispatch.cpp does.
#define BITNET_ISA scalar
#include "format/layout.h"
#include "kernels/features.h"
#include "kernels/isa_tables.h"
#include "kernels/simd_scalar.h"
#include "kernels/simd_scalar_cache.h"
#include "kernels/simd_scalar_head.h"

namespace bitnet::BITNET_ISA {
namespace {
constexpr const char* kDescription = "plain C++, any CPU";
constexpr uint64_t kRequired = 0;
}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/generic/table.inl"
