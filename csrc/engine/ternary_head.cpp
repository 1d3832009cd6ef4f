// The output head and the embedding over packed ternary weights with scales of groups; see head.h.
// Logits are products of group_product.h with 16-bit tokens: exact integers a group, one fused
// multiply-add each.
#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/head.h"
#include "kernels/dispatch.h"

namespace bitnet::engine {
namespace {

constexpr ActivationFormat kFormat = ActivationFormat::kInt16Group;
constexpr int64_t kTokens = 16;  // of a call: their values stay in L1

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Sizes {
  int64_t codes, groups;  // bytes of the codes; of a sum or a scale for every group and token
};

Sizes sizes_of(const HeadView& head, int64_t tokens) {
  return {aligned(tokens * planes_of(kFormat) * layout::padded_k(head.k)),
          aligned(tokens * head.groups() * 4)};
}

// The code of weight (r, k) of a row block.
int code_of(const Weight& w, const uint8_t* block, int64_t r, int64_t k) {
  if (w.format == WeightFormat::kCanonical) {
    const int64_t in_block = k % layout::kBlockWeights;
    const uint8_t byte =
        block[r * layout::row_bytes_for(w.k) + k / layout::kBlockWeights * layout::kBlockBytes +
              in_block % layout::kFieldWeights];
    return byte >> layout::shift_of(in_block) & 3;
  }
  const int64_t lanes = w.block_rows / layout::layout_of(w.format).fields, field = r / lanes;
  const uint8_t byte = block[(k / layout::kTileStepK * lanes + r % lanes) * layout::kTileStepK +
                             k % layout::kTileStepK];
  if (w.format == WeightFormat::kTwoBit) return byte >> (2 * field) & 3;
  static constexpr int kPowers[] = {1, 3, 9, 27, 81};
  return (byte * kPowers[field] % 256) * 3 / 256;
}

float f16_value(uint16_t bits) {
  float value;
  active_kernels().load_row(DType::kF16, &bits, 1, &value);
  return value;
}

}  // namespace

int64_t ternary_input_bytes(const HeadView& head, int64_t tokens) {
  const Sizes sizes = sizes_of(head, tokens);
  return sizes.codes + 2 * sizes.groups;
}

QuantizedTokens bind_ternary_input(const HeadView& head, int64_t tokens, void* memory) {
  const Sizes sizes = sizes_of(head, tokens);
  auto* bytes = static_cast<char*>(memory);
  QuantizedTokens x{};
  x.tokens = tokens;
  x.k = head.k;
  x.padded_k = layout::padded_k(head.k);
  x.codes = reinterpret_cast<int8_t*>(bytes);
  x.groups = reinterpret_cast<int32_t*>(bytes + sizes.codes);
  x.format = kFormat;
  x.group = head.group;
  x.group_scales = reinterpret_cast<float*>(bytes + sizes.codes + sizes.groups);
  return x;
}

// Row blocks one after the other: the last one reaches past the head's rows, so that its values
// need a place of their own.
void ternary_rows(const KernelTable& kernels, const HeadView& head, int64_t row_begin,
                  int64_t row_end, const QuantizedTokens& x, int64_t tokens, float* out,
                  int64_t out_stride) {
  const Weight& w = head.ternary;
  const int64_t rows = w.block_rows, whole = row_end / rows;
  alignas(64) float values[kTokens * layout::kMaxBlockRows];
  for (int64_t m = 0; m < tokens; m += kTokens) {
    const int64_t count = std::min(kTokens, tokens - m);
    float* to = out + m * out_stride;
    const int64_t first = row_begin / rows;
    if (first < whole)
      multiply_groups(kernels, w, head.ternary_scales, x, {first, whole, m, count}, to, out_stride);
    if (whole * rows >= row_end) continue;
    multiply_groups(kernels, w, head.ternary_scales, x, {whole, whole + 1, m, count}, values, rows);
    const int64_t from = std::max(whole * rows, row_begin);
    for (int64_t t = 0; t < count; ++t) {
      std::copy_n(values + t * rows + (from - whole * rows), row_end - from,
                  to + t * out_stride + (from - row_begin));
    }
  }
}

void embed_ternary(const HeadView& head, int64_t id, float* out) {
  const Weight& w = head.ternary;
  const GroupScales& scales = head.ternary_scales;
  const int64_t block = id / w.block_rows, r = id % w.block_rows;
  const int64_t groups = head.groups();
  const uint8_t* bytes = w.data + block * w.block_bytes;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = scales.blocked ? (block * groups + g) * w.block_rows + r : id * groups + g;
    const float scale = scales.type == DType::kF16
                            ? f16_value(static_cast<const uint16_t*>(scales.data)[at])
                            : static_cast<const float*>(scales.data)[at];
    const int64_t end = std::min((g + 1) * head.group, w.k);
    for (int64_t k = g * head.group; k < end; ++k) {
      out[k] = static_cast<float>(code_of(w, bytes, r, k) - 1) * scale;
    }
  }
}

}  // namespace bitnet::engine
