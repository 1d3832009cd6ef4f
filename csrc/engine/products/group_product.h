// Products of weights that have a scale for every group of 128 or 64 along K with tokens in any
// ActivationFormat: sums of groups are exact integers, their floats are added by one fused
// multiply-add each, in ascending order, on every ISA.
#pragma once

#include "engine/quantized_tokens.h"
#include "engine/weights.h"

namespace bitnet::engine {

// float32 [n_rows, groups]; or as the kernels read them, beside row blocks: float32 or float16
// [row_blocks, groups, block_rows], whose rows past n_rows mean nothing.
struct GroupScales {
  const void* data = nullptr;
  DType type = DType::kF32;
  bool blocked = false;
  int64_t group = kGroupWeights;  // weights of a group, or kSmallGroup
};

// y = sum over g of float(sum of the group's codes) * (scale[n, g] * x.group_scales[g, m]), each
// step one fused multiply-add; or, with one scale a token, the same without it, times x.scales[m].
// x has groups of as many features.  Row i of the part and its token m is values[m * stride + i],
// stride at least the rows of its row blocks.  Writes whole row blocks, rows past n_rows included,
// except in the canonical layout.  scratch: of ProductJob; with it, by tables of sums.
void multiply_groups(const KernelTable& kernels, const Weight& weight, const GroupScales& scales,
                     const QuantizedTokens& x, const ProductPart& part, float* values,
                     int64_t stride, void* scratch = nullptr);

}  // namespace bitnet::engine
