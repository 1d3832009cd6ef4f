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
#include "kernels/generic/canonical.inl"
#include "kernels/generic/tiles.inl"
#include "kernels/generic/gemv.inl"
#include "kernels/generic/direct.inl"
#include "kernels/generic/panel.inl"
#include "kernels/generic/matrix.inl"
#include "kernels/generic/tile_gemm.inl"
#include "kernels/generic/epilogue.inl"
#include "kernels/generic/attention.inl"
#include "kernels/generic/attention_block.inl"
#include "kernels/generic/attention_int8.inl"
#include "kernels/generic/head.inl"
#include "kernels/generic/probes.inl"
// clang-format on

#define BITNET_STRING_(x) #x
#define BITNET_STRING(x) BITNET_STRING_(x)

// A row left out here is a null pointer at run time, so every field is named:
// -Wmissing-field-initializers and the table test keep it so.
constexpr KernelTable kTable = {
    .name = BITNET_STRING(BITNET_ISA),
    .description = BITNET_ISA_DESCRIPTION,
    .required = BITNET_ISA_FEATURES,
    .ternary_gemm = ternary_gemm,
    .tile_lanes = kTileLanes,
    .tile_gemm = tile_gemm,
    .trit_tile_gemm = trit_tile_gemm,
    .sum_i8 = sum_i8,
    .quantize_row = quantize_row,
    .store_block = store_block,
    .product_blocking = product_blocking,
    .load_row = load_row,
    .store_row = store_row,
    .round_row = round_row,
    .rms_norm_row = rms_norm_row,
    .add_row = add_row,
    .relu2_mul_row = relu2_mul_row,
    .silu_mul_row = silu_mul_row,
    .rope_head = rope_head,
    .attend_chunk = attend_chunk,
    .quantize_query = quantize_query,
    .merge_attention = merge_attention,
    .finish_attention = finish_attention,
    .head_dense = head_dense,
    .head_int8 = head_int8,
    .head_int4 = head_int4,
    .head_quantize_token = head_quantize_token,
    .head_quantize_int8 = head_quantize_int8,
    .head_quantize_int4 = head_quantize_int4,
    .probe_read = probe_read,
    .probe_int8_peak = probe_int8_peak,
};

}  // namespace

__attribute__((visibility("default"))) const KernelTable* table() { return &kTable; }

}  // namespace bitnet::BITNET_ISA
