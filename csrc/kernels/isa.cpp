// The kernels of one ISA: the algorithms over its SIMD primitives, and the table of them.
// CMakeLists.txt compiles this file once for each row of isas.txt, with the row's flags and
//   BITNET_ISA              name and namespace
//   BITNET_ISA_PRIMITIVES   "kernels/isa/<isa>.h"
//   BITNET_ISA_FEATURES     bits of features.h, 0 where its instructions are emulated
//   BITNET_ISA_DESCRIPTION  one line for people
// Exports one symbol, table().  Must not know which CPU runs: dispatch.cpp does.
#include "format/layout.h"
#include "kernels/features.h"
#include "kernels/kernel_table.h"
#include BITNET_ISA_PRIMITIVES

namespace bitnet::BITNET_ISA {
namespace {

// Each uses what stands above it, so the formatter must not sort them.
// clang-format off
#include "kernels/isa/defaults_float.inl"
#include "kernels/rows/rows.inl"
#include "kernels/rows/hadamard.inl"
#include "kernels/rows/sampling.inl"
#include "kernels/rows/noise.inl"
#include "kernels/delta/rule.inl"
#include "kernels/ternary/tiles.inl"
#include "kernels/ternary/canonical.inl"
#include "kernels/ternary/gemv.inl"
#include "kernels/ternary/pairs.inl"
#include "kernels/ternary/direct.inl"
#include "kernels/ternary/panel.inl"
#include "kernels/ternary/epilogue.inl"
#include "kernels/ternary/matrix.inl"
#include "kernels/ternary/row_indices.inl"
#include "kernels/ternary/tables_with_dot.inl"
#include "kernels/ternary/tables.inl"
#include "kernels/ternary/group_gemm.inl"
#include "kernels/ternary/algorithms.inl"
#include "kernels/ternary/columns.inl"
#include "kernels/attention/chunk.inl"
#include "kernels/attention/softmax.inl"
#include "kernels/attention/float_rows.inl"
#include "kernels/attention/float_block.inl"
#include "kernels/attention/bf16_chains.inl"
#include "kernels/attention/bf16_unit.inl"
#include "kernels/attention/bf16.inl"
#include "kernels/attention/bf16_tiles.inl"
#include "kernels/attention/int8_rows.inl"
#include "kernels/attention/int8_panels.inl"
#include "kernels/attention/attention.inl"
#include "kernels/head/dense.inl"
#include "kernels/head/matrix.inl"
#include "kernels/head/int8.inl"
#include "kernels/head/high_bytes.inl"
#include "kernels/head/int4.inl"
#include "kernels/probes.inl"
// clang-format on

#define BITNET_STRING_(x) #x
#define BITNET_STRING(x) BITNET_STRING_(x)

constexpr KernelTable kTable = {
    .name = BITNET_STRING(BITNET_ISA),
    .description = BITNET_ISA_DESCRIPTION,
    .required = BITNET_ISA_FEATURES,
    BITNET_KERNELS(kTileLanes),
};

}  // namespace

__attribute__((visibility("default"))) const KernelTable* table() { return &kTable; }

}  // namespace bitnet::BITNET_ISA
