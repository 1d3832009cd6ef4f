// The amx_int8 kernel table: its vocabulary, then the algorithms over it (generic/table.inl).
// Compiled with its own flags (CMakeLists.txt); exports one symbol, table(). Must not know whether
// this CPU may run it: kernels/dispatch.cpp does.
#define BITNET_ISA amx_int8
#include "format/layout.h"
#include "kernels/features.h"
#include "kernels/isa_tables.h"
#include "kernels/simd_amx_int8.h"

namespace bitnet::BITNET_ISA {
namespace {
constexpr const char* kDescription =
    "AMX int8 tiles from 5 tokens on, over AVX-512 with VNNI for fewer";
constexpr uint64_t kRequired = kAvx2 | kFma | kF16c | kAvx512F | kAvx512Bw | kAvx512Vl | kAvx512Dq |
                               kAvx512Vnni | kAmxTile | kAmxInt8;
}  // namespace
}  // namespace bitnet::BITNET_ISA

#include "kernels/generic/table.inl"
