// The last lines of every ISA file: instantiates the generic algorithms over the vocabulary already
// included and fills the table. Expects BITNET_ISA, kDescription and kRequired; must not know what
// they say.

namespace bitnet::BITNET_ISA {
namespace {

// Fixes v in its register at this point.  Without it g++ 12 reassociates the integer sums of a tile
// across its fields, and so many intermediate sums live at once that it spills the accumulators.
template <class T>
[[gnu::always_inline]] inline void pin(T& v) {
#if defined(BITNET_EMULATE)
  (void)v;
#elif defined(BITNET_SCALAR_WORDS)
  if constexpr (sizeof(v) <= 8) __asm__ volatile("" : "+r"(v));
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(v));
#else
  __asm__ volatile("" : "+v"(v));
#endif
}

// Makes the compiler take v for changed, so that it computes again what depends on v alone.
// Needless where `dot` is one instruction that adds into its accumulator, as on Arm.
template <class T>
[[gnu::always_inline]] inline void renew(T& v) {
#if defined(BITNET_EMULATE) || defined(__aarch64__)
  (void)v;
#elif defined(BITNET_SCALAR_WORDS)
  __asm__ volatile("" : "+m"(v));
#else
  pin(v);
#endif
}

#include "kernels/generic/linear.inl"
#include "kernels/generic/probes.inl"
#include "kernels/generic/rows.inl"
#include "kernels/generic/tiles.inl"
// Uses load_as and exp_f32 of rows.inl: the comment keeps the formatter from sorting it up.
#include "kernels/generic/attention.inl"
// Uses attention.inl.
#include "kernels/generic/attention_block.inl"
// Uses attention.inl, and attend_chunk of attention_block.inl uses it.
#include "kernels/generic/attention_int8.inl"
// Uses load_as of rows.inl, row_at of attention.inl and quantize_query of attention_int8.inl.
#include "kernels/generic/head.inl"

#define BITNET_STRING_(x) #x
#define BITNET_STRING(x) BITNET_STRING_(x)

// A row left out here is a null pointer at run time, so every field is named:
// -Wmissing-field-initializers and the table test keep it so.
constexpr KernelTable kTable = {
    .name = BITNET_STRING(BITNET_ISA),
    .description = kDescription,
#if defined(BITNET_REQUIRE_NOTHING)  // emulated: runs anywhere
    .required = 0 * kRequired,
#else
    .required = kRequired,
#endif
    .ternary_gemm = ternary_gemm,
    .tile_lanes = kTileLanes,
    .tile_gemm = tile_gemm,
    .trit_tile_gemm = trit_tile_gemm,
    .sum_i8 = sum_i8,
    .quantize_row = quantize_row,
    .scale_row = scale_row,
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
