// The kernels of one ISA: the algorithms over its SIMD primitives, and the table of them.
// CMakeLists.txt compiles this file once for each row of isas.txt, with the row's flags and
//   BITNET_ISA              name and namespace
//   BITNET_ISA_PRIMITIVES   "kernels/simd_<isa>.h"
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
#include "kernels/generic/defaults.inl"
#include "kernels/generic/rows.inl"
#include "kernels/generic/sampling.inl"
#include "kernels/generic/tiles.inl"
#include "kernels/generic/canonical.inl"
#include "kernels/generic/gemv.inl"
#include "kernels/generic/direct.inl"
#include "kernels/generic/panel.inl"
#include "kernels/generic/canonical_panel.inl"
#include "kernels/generic/epilogue.inl"
#include "kernels/generic/matrix.inl"
#include "kernels/generic/matrix_rows.inl"
#include "kernels/generic/canonical_gemm.inl"
#include "kernels/generic/tile_gemm.inl"
#include "kernels/generic/group_gemm.inl"
#include "kernels/generic/attention.inl"
#include "kernels/generic/attention_block.inl"
#include "kernels/generic/attention_pairs.inl"
#include "kernels/generic/attention_unit.inl"
#include "kernels/generic/attention_pair_chunks.inl"
#include "kernels/generic/attention_int8.inl"
#include "kernels/generic/attention_quads.inl"
#include "kernels/generic/matrix_head.inl"
#include "kernels/generic/head.inl"
#include "kernels/generic/side_paths.inl"
#include "kernels/generic/probes.inl"
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
