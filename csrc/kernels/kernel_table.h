// THE CONTRACT between the engine and the kernels: one struct of function pointers per ISA (the
// list of products: products.h). Must not know threads or allocation: kernels take raw pointers and
// a range of rows, the caller splits the work and owns every buffer.
//
// Common preconditions: pointers are non-null where a length is positive; no alignment is required;
// outputs never overlap inputs unless a row says "in place"; lengths are in elements, `_bytes` in
// bytes. Integer results are equal on every ISA.  Float results are bit-identical on every ISA:
// sums run in 16 lanes (lane = index mod 16, ascending, fused multiply-add, tails padded with
// zeros), the lanes are added as a tree (8+8, 4+4, 2+2, 1+1), and exp is one shared polynomial.
// Attention over bfloat16 caches has an order of its own, that of a matrix unit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/layout.h"
#include "kernels/dtype.h"
#include "kernels/products.h"

namespace bitnet {

// How far ahead heads prefetch their weights, and into which cache: into_l2 on CPUs that allow too
// few loads into L1 at once to keep the memory busy. Never changes results.
struct Prefetch {
  // Bytes, of one token and of several, which do more work for every line; 0: the line itself.
  int64_t one, several = 0;
  bool into_l2 = false;

  int64_t bytes(int64_t tokens) const { return tokens == 1 ? one : several; }
};

// One token as the quantised heads take it: x[k] = scale * wide[k], wide = 256 * high + low.  What
// an ISA does not use is still there: the memory is the caller's and looks the same everywhere.
struct HeadToken {
  const int16_t* wide;
  const int8_t* high;
  const int8_t* low;
  const int32_t* sums;  // of wide, per 64 features
  int64_t sum;          // of all of them
  float scale;
  // For head_bound: the sum of `high`; the square root of the sum of squares of `low`, rounded up.
  int32_t high_sum = 0;
  float low_length = 0;
};

// A product of panels of columns (format/layout.h) with the codes of one token that are not 0.
struct ColumnJob {
  const uint8_t* columns;  // the first panel; the others follow
  int64_t k;               // columns of a panel, at most layout::kTileMaxK
  int64_t panels;
  // The list, as list_nonzero makes it: `count` columns and their codes, and up to a multiple of 4
  // others with code 0.
  const int32_t* at;
  const int8_t* x;
  int64_t count;
  int32_t x_sum;  // of the codes
  int32_t* out;   // [panels, layout::kColumnRows]
};

// A row on its way into a product: x rounded to `type` and, with a weight, normalised and rounded
// again, is y, which is what is quantised.
struct NormJob {
  const float* x;  // [n]
  int64_t n;
  DType type;           // kF32, kBF16 or kF16
  const float* weight;  // [n], of the norm; null: none
  float eps;
  float* y;  // [n], may be x
  // Only the codes are wanted: y is memory for what comes between, in any form.
  bool codes_only = false;
  // [n] of kBF16, which `type` then is: x is relu2_mul_row of them, and the pointer x is not used.
  const void *gate = nullptr, *up = nullptr;
};

// A row of values against two bounds, low and high.
struct Split {
  int64_t above;     // how many lie above the high one, or 0 where their sum was asked for
  int64_t between;   // how many from the low one to the high one
  double sum_above;  // of those above, or 0 where it was not asked for
};

// Positions that attention takes at once.  Part of the definition of its result: see attend_chunk.
constexpr int64_t kAttentionChunk = 64;
// AttentionChunk::first_hidden of tokens that see the chunk from its first position on.
constexpr int64_t kNothingHidden = INT64_MIN / 2;

// Of bfloat16 caches: how many elements, or positions, a chain of sums takes before it is added to
// what came before; and the smallest magnitude of what is written, multiplied or weighed.  Every
// product of two such numbers is a multiple of 2^-124, so no sum of them is ever denormal, and
// units that flush denormals agree with those that do not.
constexpr int64_t kPairGroup = 32;
constexpr float kMinCached = 0x1p-55f;

// The state of a query row: acc [dim rounded up to 16], then max, sum, and 14 zeros.
constexpr int64_t attention_padded(int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr int64_t attention_state_floats(int64_t dim) { return attention_padded(dim) + 16; }
// What attend_chunk needs for `rows` query rows: keys, values, queries and scores in a layout of
// its own, whichever of them an ISA uses.
constexpr int64_t attention_scratch_floats(int64_t rows, int64_t dim) {
  return 16 + 2 * kAttentionChunk * attention_padded(dim) +
         (rows + 4) * (attention_padded(dim) + kAttentionChunk + 1);
}

// Elements of a quantised query row, and the longest one: 128 * 32512 * 512 < 2^31.
constexpr int64_t wide_padded(int64_t dim) { return (dim + 31) / 32 * 32; }
constexpr int64_t kMaxInt8Dim = 512;

// What int8 keys and values take besides: key j is key_scale[j] * keys[j], values likewise.
struct Int8Attention {
  const int16_t* query;      // [rows, wide_padded(dim)], from quantize_query
  const float* query_scale;  // [rows], what it returned
  const float* key_scale;    // [positions]
  const float* value_scale;  // [positions]
  // Those that this thread reads next, a hint; null where none.
  const float *next_key_scale = nullptr, *next_value_scale = nullptr;
};

// How the keys and values of a head's positions lie.  kRows: a row of dim elements for each.
// kPanels, of kBF16 and kInt8 where dim is a multiple of kPanelPositions: so many positions are a
// panel of as many rows' size, in words of 32 bits with what one step of a dot product adds up, w =
// 2 or 4 elements.  A panel of keys is [dim / w][positions][w], one of values [positions / w] [dim]
// [w]: matrix and dot product units read either as it lies.
enum class CacheLayout { kRows, kPanels };
constexpr int64_t kPanelPositions = 16;
constexpr int64_t kChunkPanels = kAttentionChunk / kPanelPositions;

// Where the panels of a chunk begin.
struct ChunkPanels {
  const void *keys[kChunkPanels], *values[kChunkPanels];  // those of [0, positions) whole
  // Those that this thread reads next, a hint; null where none.
  const void *next_keys[kChunkPanels], *next_values[kChunkPanels];
};

// Query rows that share a KV head, and one chunk of its positions.
struct AttentionChunk {
  const float* query;      // [rows, dim], with kBF16 of such numbers; not used with kInt8
  int64_t rows, dim;       // both at least 1
  int64_t rows_per_token;  // row r belongs to token r / rows_per_token
  DType type;              // of keys and values, any
  const void* keys;        // kRows: the chunk's first position; the next ones stride_bytes apart
  const void* values;
  int64_t stride_bytes;
  int64_t positions;      // in the chunk, 1 .. kAttentionChunk; all readable
  int64_t first_visible;  // at least 1: token t sees the first min(positions, first_visible + t)
  float scale;
  const void* next;  // what this thread reads after the chunk, a hint for prefetching; may be null
  // add_pairs (pair_unit.h), or the matrix unit's products of bfloat16 (tile_check.h), may be used:
  // a matter of time, not of sums.
  bool pair_unit = false, matrix_unit = false;
  Int8Attention int8 = {};  // with kInt8
  CacheLayout layout = CacheLayout::kRows;
  ChunkPanels panels = {};  // kPanels, instead of keys, values, stride_bytes and next
  // A sliding window: token t does not see the first max(0, first_hidden + t), but some of the
  // rest. Of what lies before the first position that any token sees nothing is read but in the
  // panel and among the 16 scales that hold that position; panels before that one may be null.
  int64_t first_hidden = kNothingHidden;
  // The last call with this scratch had the same queries: what it has made of them is still there.
  bool same_queries = false;
};

// Columns of a recurrent state that lie together: a head's [key_dim, value_dim] is value_dim / 32
// slabs [key_dim][32].
constexpr int64_t kStateColumns = 32;

// The gated delta rule on one slab of a head's state and the tokens of one sequence, in order.
struct DeltaJob {
  float* state;  // [key_dim][kStateColumns], read and written
  int64_t key_dim;
  int64_t tokens;
  const float *q, *k;  // of token t at + t * row_stride: [key_dim]
  const float* v;      // likewise: [kStateColumns]
  int64_t row_stride;
  const float *decay, *beta;  // of token t at + t * gate_stride
  int64_t gate_stride;
  float* out;  // of token t at + t * out_stride: [kStateColumns]
  int64_t out_stride;
  float* errors;  // e of token t, for delta_replay, at + t * error_stride; null: not wanted
  int64_t error_stride;
};

struct KernelTable {
  const char* name;         // what BITNET_OPS_ISA and force_isa() take
  const char* description;  // one line for people
  uint64_t required;        // feature bits (kernels/features.h), all needed

  // ---- integer core -------------------------------------------------------------------------
  // The products of this ISA, best first (kernels/products.h); the last row takes what is left.
  int64_t tile_lanes;
  const ProductAlgorithm* products;
  ProductChoices* choices;  // among them
  // A group's step of a product for sums that are there: out = fma(float(sum), w_scale * x_scale,
  // out), of row i and token m: sums[m * sums_stride + i], w_scale[i], x_scale[m] (null: 1), out[m
  // * out_stride + i].
  void (*add_group)(const int32_t* sums, int64_t sums_stride, int64_t rows, int64_t tokens,
                    const float* w_scale, const float* x_scale, float* out, int64_t out_stride);
  // out = the exact sums of the listed codes times their columns; those past N mean nothing.
  void (*column_product)(const ColumnJob& job);
  // Lists those of q[n] that are not 0, ascending: where they are, and what; then zeros, up to a
  // multiple of 4.  Returns how many are not 0.  at and x have room for n + 64; what follows the
  // list there may be overwritten.
  int64_t (*list_nonzero)(const int8_t* q, int64_t n, int32_t* at, int8_t* x);
  // Sum of n int8 values; n <= 2^24 keeps it inside int32.
  int32_t (*sum_i8)(const int8_t* x, int64_t n);
  // q[i] = clamp(round_half_even(x[i] * s), -128, 127) with s = 127 * (1 / max(absmax, 1e-5));
  // zeros from n to n_padded; *sum = sum of q.  Element i at q + i / 64 * step_stride + i % 64.
  // Returns the dequantisation factor 1 / s.  A row holding NaN or an infinity gives q = 0, *sum =
  // 0 and returns NaN.
  float (*quantize_row)(const float* x, int64_t n, int64_t n_padded, int8_t* q, int64_t step_stride,
                        int32_t* sum);
  // Finishes a block of a product: scales, adds a bias, rounds, stores.
  void (*store_block)(const EpilogueJob& job);

  // ---- element types ------------------------------------------------------------------------
  // Every type but kInt8.  Loading is exact, storing rounds half to even.  Beyond the largest
  // number of a 16-bit type lies infinity, as in a cast of torch.  8-bit floats saturate: a finite
  // number becomes their largest one, whose error attention can live with; an infinity stays one in
  // E5M2 and becomes 448 in E4M3, which has none; NaN is 0x7f beside its sign.  So E4M3 is torch's
  // cast (since 2.13; before, what lies beyond was NaN), and E5M2 but for finite numbers from 61440
  // on.
  void (*load_row)(DType type, const void* src, int64_t n, float* dst);
  void (*store_row)(DType type, const float* src, int64_t n, void* dst);
  void (*round_row)(DType type, float* x, int64_t n);  // in place: store, load
  // store_row as caches want it: in bfloat16, a number below kMinCached becomes 0.  Queries of
  // bfloat16 caches are rounded so, too.
  void (*store_cache_row)(DType type, const float* src, int64_t n, void* dst);

  // ---- norms and activations ----------------------------------------------------------------
  // y = x * (1 / sqrt(mean(x^2) + eps)), rounded to `type`, times weight.  y may be x.
  void (*rms_norm_row)(const float* x, const float* weight, int64_t n, float eps, DType type,
                       float* y);
  // y = round_row(x), then rms_norm_row and round_row of it where there is a weight; q, *sum and
  // the result as of quantize_row(y, n).  All of it in three passes, or two without a weight.
  float (*norm_quantize_row)(const NormJob& job, int64_t n_padded, int8_t* q, int64_t step_stride,
                             int32_t* sum);
  void (*add_row)(const float* a, const float* b, int64_t n, float* y);  // y may be a or b
  void (*relu2_mul_row)(const float* gate, const float* up, int64_t n, float* y);  // y may be gate
  void (*silu_mul_row)(const float* gate, const float* up, int64_t n, float* y);   // y may be gate
  void (*gelu_mul_row)(const float* gate, const float* up, int64_t n, float* y);   // y may be gate
  // y = up / (1 + e^-gate)
  void (*sigmoid_mul_row)(const float* gate, const float* up, int64_t n,
                          float* y);  // y may be gate
  // For every `block` elements, with H the Walsh-Hadamard matrix in Sylvester's order: y =
  // H (signs * x) / sqrt(block), or with signs_last y = signs * (H x / sqrt(block)). Stages have
  // distances 1, 2, 4, 8 and so on, and the factor comes last. block: a power of two, at least 16,
  // that divides n. y may be x.
  void (*hadamard_row)(const float* x, const float* signs, int64_t n, int64_t block,
                       bool signs_last, float* y);
  // Half-split rotation of one head: x [dim], cos_sin [dim] (cos, then sin); dim even.  y may not
  // be x.
  void (*rope_head)(const float* x, const float* cos_sin, int64_t dim, float* y);

  // ---- attention ----------------------------------------------------------------------------
  // Attention runs in chunks of positions, [c * kAttentionChunk, (c + 1) * kAttentionChunk),
  // whatever the split into tokens, threads or calls; so a token's result never depends on that
  // split. Arithmetic for one query row and one chunk: s_j = scale * dot(query, key_j); max = the
  // largest s_j; w_j = exp(s_j - max); sum = the sum of w_j in 16 lanes (lane = j mod 16); acc[i] =
  // the sum of w_j * value_j[i], j ascending, one fused multiply-add each.  Chunks are merged in
  // ascending order: top = max of both; a = exp(before - top), b = exp(now - top); sum =
  // fma(now.sum, b, sum * a); acc[i] = fma(now.acc[i], b, acc[i] * a).  out = acc / sum. A chunk
  // that holds nothing but -inf weighs nothing; a NaN makes the result NaN.  Keys and values of the
  // smaller floating-point types are what load_row makes of them.  Positions that a token does not
  // see take no part, whatever they hold; a token's first chunk is the first it sees any of.
  //
  // With kBF16 everything that is multiplied is a bfloat16, and sums take the order of the matrix
  // instruction TDPBF16PS.  dot(query, key): from d = 0, for every kPairGroup elements d = d + (t0
  // + t1), t0 and t1 the sums of the products of the even and of the odd elements among them, from
  // 0, ascending, one fused multiply-add each.  acc[i] likewise over the positions of the chunk,
  // even and odd ones, of value_j[i] times w_j; w_j = exp(s_j - max) rounded as store_cache_row
  // does, and sum is that of the rounded ones.  max, the lanes of sum and the merge as above.
  //
  // With kInt8 (dim <= kMaxInt8Dim) both sums are of integers and exact: s_j = float(dot(wide,
  // keys[j])) * ((query_scale * scale) * key_scale[j]); max, w_j and sum as above; u_j = w_j *
  // value_scale[j]; a = max(max |u_j|, 1e-30); p_j = round_half_even(u_j * (32512 / a)); acc[i] =
  // float(sum of p_j * values[j][i]) * (a / 32512).  If a u_j is infinite or NaN, acc is NaN.
  //
  // attend_chunk writes the states of all rows (layout above) for one chunk.  scratch:
  // attention_scratch_floats(chunk.rows, chunk.dim).
  void (*attend_chunk)(const AttentionChunk& chunk, float* scratch, float* states);
  // What an instruction for pairs of bfloat16 makes of sums[16], in `steps` steps: sum = fma(lower
  // halves, fma(upper halves, sum)) of words a[16 * step + lane] and b[16 * step + lane].  Returns
  // false, and does nothing, without such an instruction; the CPU has to have it where `required`
  // does not name it: pair_unit.h.
  bool (*add_pairs)(const float* a, const float* b, int64_t steps, float* sums);
  // One query row for int8 keys: wide[i] = round_half_even(x[i] * (32512 / a)) with a = max(absmax,
  // 1e-30), zeros from n to n_padded.  Returns a / 32512; a row holding NaN or an infinity gives
  // zeros and returns NaN.
  float (*quantize_query)(const float* x, int64_t n, int64_t n_padded, int16_t* wide);
  // states = states merged with the states of the chunk after them, both [rows] of head size dim.
  void (*merge_attention)(int64_t rows, int64_t dim, const float* later, float* states);
  // out[dim] = acc / sum of one state.
  void (*finish_attention)(int64_t dim, const float* state, float* out);

  // ---- Gated DeltaNet -----------------------------------------------------------------------
  // y[i] = silu(x[0][i] * weight[i] + ... + x[taps - 1][i] * weight[(taps - 1) * stride + i]), one
  // fused multiply-add each, ascending; silu(s) = s / (1 + e^-s).
  void (*conv_silu_row)(const float* const* x, int64_t taps, const float* weight, int64_t stride,
                        int64_t n, float* y);
  // decay = e^(-e^a_log * softplus(a + dt_bias)), beta = 1 / (1 + e^-b); softplus(x) = max(x, 0) +
  // ln(1 + e^-|x|).
  void (*delta_gates_row)(const float* a, const float* b, const float* a_log, const float* dt_bias,
                          int64_t n, float* decay, float* beta);
  // For every token: e = beta * (v - decay * S^T k); S = fma(k, e^T, decay * S); out = S^T q. Sums
  // over the rows of S, ascending from 0, one fused multiply-add each. So a token's result does not
  // depend on how tokens are divided among calls.
  void (*delta_rule)(const DeltaJob& job);
  // The same update of a slab with an e that is there: S = fma(k, e^T, decay * S).
  void (*delta_replay)(const float* k, const float* errors, float decay, int64_t key_dim,
                       float* state);

  // ---- output head --------------------------------------------------------------------------
  // Logits of rows [row_begin, row_end) for every token: out[m * out_stride + n - row_begin].  Each
  // weight is read from memory once, whatever the number of tokens. dense: dot(x, row) in the lane
  // order; x [tokens, k] float32, weight [*, k] contiguous.
  void (*head_dense)(const float* x, int64_t tokens, DType type, const void* weight, int64_t k,
                     int64_t row_begin, int64_t row_end, Prefetch ahead, float* out,
                     int64_t out_stride);
  // The same products with rows of bfloat16 wherever they lie: out[m * out_stride + n] of rows[n].
  void (*score_rows)(const float* x, int64_t tokens, const void* const* rows, int64_t count,
                     int64_t k, float* out, int64_t out_stride);
  // The same products times `scale` for a short k, `rank`, and rows that lie in tiles of 16:
  // element j of row n at tiles[(n / 16 * rank + j) * 16 + n % 16].  The last tile is whole,
  // row_begin a multiple of 16.
  void (*dense_tiles)(const float* x, int64_t tokens, DType type, const void* tiles, int64_t rank,
                      float scale, int64_t row_begin, int64_t row_end, float* out,
                      int64_t out_stride);
  // int8 and int4 sum integers exactly and round where they say so, never in between.
  // int8: float(sum_k w[n][k] * wide[k]) * (scale[n] * x.scale); weight [*, k], k <=
  // layout::kHeadMaxK.
  void (*head_int8)(const int8_t* weight, const float* scale, int64_t k, int64_t row_begin,
                    int64_t row_end, const HeadToken* x, int64_t tokens, Prefetch ahead, float* out,
                    int64_t out_stride);
  // An upper bound of the same by the high bytes of several tokens, the length of their low bytes
  // and the rows' lengths: out is at least what head_int8 gives, and NaN where that may be NaN.
  // From `head_bound_tokens` tokens on it takes about half as long as head_int8.
  void (*head_bound)(const int8_t* weight, const float* scale, int64_t k, int64_t row_begin,
                     int64_t row_end, const HeadToken* x, int64_t tokens, float* out,
                     int64_t out_stride);
  int64_t head_bound_tokens;
  // int4: layout "head int4" of format/layout.h; acc = fma(float(sum of a group), its scale, acc),
  // groups ascending, from 0; then acc * x.scale.  row_begin: a multiple of 16.
  void (*head_int4)(const uint8_t* weight, const uint16_t* scale, int64_t groups, int64_t group,
                    int64_t row_begin, int64_t row_end, const HeadToken* x, int64_t tokens,
                    Prefetch ahead, float* out, int64_t out_stride);
  // Quantises one token to 16 bits: wide and the result as of quantize_query, n_padded a multiple
  // of 128; wide = 256 * high + low, all in int8; sums[j] = sum of wide[64 j .. 64 j + 63].
  float (*head_quantize_token)(const float* x, int64_t n, int64_t n_padded, int16_t* wide,
                               int8_t* high, int8_t* low, int32_t* sums);
  // One row of head weights, or of a cache: q[i] = round_half_even(w[i] * (127 / a)), a =
  // max(absmax, 1e-30).  Returns a / 127, or NaN if the row holds NaN or an infinity (q = 0).
  float (*head_quantize_int8)(const float* w, int64_t n, int8_t* q);
  // One row in ceil(n / group) groups; codes 0..15 stand for -8..7, padding has code 8.  See
  // head/int4.inl for the choice of the scale, a bfloat16.  Returns 0, or NaN as above (codes 8).
  float (*head_quantize_int4)(const float* w, int64_t n, int64_t group, uint8_t* codes,
                              uint16_t* scale);

  // ---- sampling -----------------------------------------------------------------------------
  // Sums here are float64: 16 lanes and the tree, as everywhere.
  // The largest of x, NaN if there is a NaN, -inf of none.
  float (*max_row)(const float* x, int64_t n);
  // w[i] = exp((x[i] - top) * inv_temperature), 0 where that exponent is -87 or less or a NaN;
  // returns the sum.  No x exceeds top.  w may be x.
  double (*exp_row)(const float* x, int64_t n, float top, float inv_temperature, float* w);
  // Of the values v[i] * scale, rounded to float32, none a NaN.  values [n] becomes those between,
  // in their order; what follows them there may be overwritten.  It may be v.  null: they are not
  // looked for, and `between` is 0.
  Split (*split_row)(const float* v, int64_t n, float scale, float low, float high, bool sum,
                     float* values);
  // The indices of those between, ascending, ids [n]; what follows them may be overwritten. Returns
  // how many.
  int64_t (*find_row)(const float* v, int64_t n, float scale, float low, float high, int32_t* ids);

  // out[i] = fma(temperature, g, x[i]) with Gumbel noise g of id first + i (rows/noise.inl); or, if
  // that is below `threshold`, perhaps -inf. temperature is at least 0; out may be x.
  void (*add_noise_row)(const float* x, int64_t n, float temperature, uint64_t key, int64_t first,
                        float threshold, float* out);

  // ---- limits, for benchmarks -----------------------------------------------------------------
  // Reads n_bytes / 128 * 128 bytes as `streams` (1, 2 or 4) sequential streams, prefetching each
  // by software `distance` bytes ahead (0: not at all).  Returns the xor of all 8-byte words.
  uint64_t (*probe_read)(const uint8_t* data, int64_t n_bytes, int64_t streams, int64_t distance);
  // The int8 multiply-add loop of the unit that large products run on: the vector unit, out of
  // registers, or the matrix unit, out of L1.  Returns the multiply-adds executed.
  int64_t (*probe_int8_peak)(int64_t iterations, int32_t* sink);
};

// The rows of an ISA's table: each function has the name of its row.  One left out would be a null
// pointer at run time; -Wmissing-field-initializers and the table test see that.
#define BITNET_KERNELS(lanes)                                                                   \
  .tile_lanes = lanes, .products = kProducts, .choices = &choices, .add_group = add_group,      \
  .column_product = column_product, .list_nonzero = list_nonzero, .sum_i8 = sum_i8,             \
  .quantize_row = quantize_row, .store_block = store_block, .load_row = load_row,               \
  .store_row = store_row, .round_row = round_row, .store_cache_row = store_cache_row,           \
  .rms_norm_row = rms_norm_row, .norm_quantize_row = norm_quantize_row, .add_row = add_row,     \
  .relu2_mul_row = relu2_mul_row, .silu_mul_row = silu_mul_row, .gelu_mul_row = gelu_mul_row,   \
  .sigmoid_mul_row = sigmoid_mul_row, .hadamard_row = hadamard_row, .rope_head = rope_head,     \
  .attend_chunk = attend_chunk, .add_pairs = add_pairs, .quantize_query = quantize_query,       \
  .merge_attention = merge_attention, .finish_attention = finish_attention,                     \
  .conv_silu_row = conv_silu_row, .delta_gates_row = delta_gates_row, .delta_rule = delta_rule, \
  .delta_replay = delta_replay, .head_dense = head_dense, .score_rows = score_rows,             \
  .dense_tiles = dense_tiles, .head_int8 = head_int8, .head_bound = head_bound,                 \
  .head_bound_tokens = kHeadBoundFrom, .head_int4 = head_int4,                                  \
  .head_quantize_token = head_quantize_token, .head_quantize_int8 = head_quantize_int8,         \
  .head_quantize_int4 = head_quantize_int4, .max_row = max_row, .exp_row = exp_row,             \
  .split_row = split_row, .find_row = find_row, .add_noise_row = add_noise_row,                 \
  .probe_read = probe_read, .probe_int8_peak = probe_int8_peak

}  // namespace bitnet
