// Output head and embedding, which share one storage: its formats in memory, the preparation of
// tokens, logits, rows of the embedding, and the quantisation of heads.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/products/group_product.h"
#include "engine/row_ops.h"
#include "engine/sample.h"
#include "format/layout.h"

namespace bitnet::engine {

enum class HeadFormat : int32_t { kDense, kInt8, kInt4, kTernary };

// Borrowed memory.  Layouts: format/layout.h.
struct HeadView {
  HeadFormat format;
  DType type;          // of a dense head's weights
  const void* weight;  // dense [rows, k], int8 [rows, k], uint8 [tiles, lines, 64]
  const void* scale;   // null, float32 [rows], bfloat16 bits [tiles, groups, 16]
  int64_t rows, k;     // V and K
  int64_t group;       // int4 and ternary: 64 or 128 features
  Prefetch ahead;      // head_prefetch()
  // Of kTernary: a matrix with group scales. Its tokens are 16-bit integers with group scales.
  Weight ternary = {};
  GroupScales ternary_scales = {};

  // The smallest number of rows that a thread may take.
  int64_t unit_rows() const {
    if (format == HeadFormat::kTernary) return ternary.block_rows;
    return format == HeadFormat::kInt4 ? layout::kHeadTileRows : 1;
  }
  int64_t groups() const { return group == 0 ? 0 : (k + group - 1) / group; }
  int64_t row_bytes() const;  // read for one row
};

// Distance and cache level of a head's prefetches on this CPU.
Prefetch head_prefetch();

// Tokens prepared for a head, in memory of the caller (head_input_bytes, aligned to 64).
struct HeadInput {
  int64_t k, padded_k;
  float* dense;                  // [tokens, k], for a dense head
  HeadToken* tokens;             // [tokens], for a quantised head
  QuantizedTokens ternary = {};  // for a ternary head
};

// The functions down to head_rows do not allocate, throw or open a parallel region, so that a model
// step can call them inside its own region.
int64_t head_input_bytes(const HeadView& head, int64_t tokens);
HeadInput bind_head_input(const HeadView& head, int64_t tokens, void* memory);

// Prepares token m from its last hidden state x [k].  Different tokens may be prepared at once.
void prepare_head_token(const KernelTable& kernels, const HeadView& head, const float* x, int64_t m,
                        const HeadInput& input);

// out[m * out_stride + n - row_begin] = logit of row n for n in [row_begin, row_end); row_begin is
// a multiple of unit_rows().  Different ranges may be computed at once.
void head_rows(const KernelTable& kernels, const HeadView& head, int64_t row_begin, int64_t row_end,
               const HeadInput& input, int64_t tokens, float* out, int64_t out_stride);

// Fills in what head_bound needs of token m in addition.
void measure_bytes(const HeadView& head, int64_t m, const HeadInput& input);
// Whether it can be worth bounding the logits of so many tokens by their high bytes.
bool has_bounds(const KernelTable& kernels, const HeadView& head, int64_t tokens);

// The largest logits of every token so far: the best one of all threads, or the `count` largest of
// one thread. For a token with noise: the logit that is best with its noise.
struct Largest {
  int64_t count;
  const Noise* noise;           // [tokens]; null: none
  std::atomic<uint64_t>* best;  // [tokens], if count is 1 or with noise; 0 at first
  float* heaps;                 // [tokens][count], else: the smallest in front
};

// Computes, of rows [row_begin, row_end), the logits that can be among a token's largest. `out` is
// as in head_rows: such a logit (or the best one alone), NaN if a logit is NaN, -infinity
// elsewhere. A row that was best so far is overwritten once a better one is found. Returns how many
// logits were computed.
int64_t largest_rows(const KernelTable& kernels, const HeadView& head, int64_t row_begin,
                     int64_t row_end, const HeadInput& input, int64_t tokens,
                     const Largest& largest, float* out, int64_t out_stride);

// Logits [x.count, head.rows] of all tokens.
void lm_head(const HeadView& head, const Rows& x, float* logits);
// out [count, k] float32: rows ids[i], dense weights or code * scale, rounded once.
void embed(const HeadView& head, const int64_t* ids, int64_t count, float* out);

// The functions above for ternary heads (engine/ternary_head.cpp).
int64_t ternary_input_bytes(const HeadView& head, int64_t tokens);
QuantizedTokens bind_ternary_input(const HeadView& head, int64_t tokens, void* memory);
void ternary_rows(const KernelTable& kernels, const HeadView& head, int64_t row_begin,
                  int64_t row_end, const QuantizedTokens& x, int64_t tokens, float* out,
                  int64_t out_stride);
void embed_ternary(const HeadView& head, int64_t id, float* out);

// codes int8 [count, width], scales [count]. Returns a row that has a NaN or an infinity, or -1.
int64_t quantize_head_int8(const Rows& weight, int8_t* codes, float* scales);
// Tiles of 16 rows, groups of 64 or 128 features (format/layout.h). Returns the first row of a tile
// that contains a NaN or an infinity, or -1.
int64_t quantize_head_int4(const Rows& weight, int64_t group, uint8_t* tiles, uint16_t* scales);

}  // namespace bitnet::engine
