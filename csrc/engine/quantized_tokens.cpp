// Filling token buffers; see quantized_tokens.h.
#include "engine/quantized_tokens.h"

#include <algorithm>
#include <cstring>

#include "engine/products/plan.h"
#include "format/layout.h"
#include "runtime/parallel.h"

namespace bitnet::engine {

namespace {

// A view with its arrays in `memory`.
QuantizedTokens carve(BumpAllocator& memory, const KernelTable& kernels, int64_t tokens, int64_t k,
                      int64_t group, ActivationFormat format, bool row_major) {
  const int64_t padded = layout::padded_k(k);
  const int64_t groups = group == 0 ? 0 : tokens * groups_for(k, group);
  QuantizedTokens view{tokens, k, padded,
                       // sums over groups are taken of rows as they lie
                       row_major || group != 0 ? 0 : token_tile(kernels, tokens, k),
                       memory.take<int8_t>(tokens * planes_of(format) * padded),
                       memory.take<int32_t>(tokens), memory.take<float>(tokens),
                       group == 0 ? nullptr : memory.take<int32_t>(groups), format};
  if (format != ActivationFormat::kInt8) view.group_scales = memory.take<float>(groups);
  if (group != 0) view.group = group;
  return view;
}

}  // namespace

ProductJob job_of(const Weight& weight, const QuantizedTokens& x, const ProductPart& part) {
  ProductJob job = job_of(weight, part.block_begin, part.block_end);
  job.x = x.token(part.token);
  job.x_stride = x.stride();
  job.tokens = part.tokens;
  job.planes = x.planes();
  job.x_sum = x.sums + part.token;
  return job;
}

// One block for all arrays: a small op spends more on asking for memory than on filling it.
TokenBuffer::TokenBuffer(const KernelTable& kernels, int64_t tokens, int64_t k, int64_t group,
                         ActivationFormat format, bool row_major)
    : memory_([&] {
        BumpAllocator counted(nullptr);
        carve(counted, kernels, tokens, k, group, format, row_major);
        return counted.used();
      }()) {
  BumpAllocator memory(memory_.get());
  view_ = carve(memory, kernels, tokens, k, group, format, row_major);
}

void TokenBuffer::quantize(const KernelTable& kernels, const void* x, DType type) {
  const int64_t k = view_.k, row_bytes = k * element_size(type);
  parallel_rows(view_.tokens, k, k, [&](int64_t m, float* row) {
    const void* source = offset_bytes(x, m * row_bytes);
    const auto* values = static_cast<const float*>(source);
    if (type != DType::kF32) {
      kernels.load_row(type, source, k, row);
      values = row;
    }
    view_.quantize(kernels, values, m);
  });
}

void TokenBuffer::copy_quantized(const KernelTable& kernels, const int8_t* x, const float* scales) {
  const int64_t k = view_.k;
  for (int64_t m = 0; m < view_.tokens; ++m) {
    int8_t* to = view_.token(m);
    const int8_t* from = x + m * k;
    if (view_.tile == 0) {
      std::memcpy(to, from, static_cast<size_t>(k));
      std::memset(to + k, 0, static_cast<size_t>(view_.padded_k - k));
    } else {
      for (int64_t at = 0; at < view_.padded_k; at += kTokenStep, to += view_.step_stride(m)) {
        const int64_t count = std::clamp<int64_t>(k - at, 0, kTokenStep);
        std::memcpy(to, from + at, static_cast<size_t>(count));
        std::memset(to + count, 0, static_cast<size_t>(kTokenStep - count));
      }
    }
    view_.sums[m] = kernels.sum_i8(from, k);
  }
  if (scales != nullptr) std::copy(scales, scales + view_.tokens, view_.scales);
}

// A group is quantised as a row of its own would be. Where K ends in the first half of 128, groups
// of 64 leave the second as it is: nobody reads it.
void QuantizedTokens::quantize_groups(const KernelTable& kernels, const float* x, int64_t m) const {
  for (int64_t g = 0; g < group_count(); ++g) {
    const int64_t from = g * group, n = std::min(group, k - from), at = g * tokens + m;
    int8_t* to = token(m) + from;
    if (format == ActivationFormat::kInt8Group) {
      group_scales[at] = kernels.quantize_row(x + from, n, group, to, kTokenStep, groups + at);
    } else {
      int16_t wide[kGroupWeights];
      int32_t sums_of_64[kGroupWeights / 64] = {};
      group_scales[at] =
          kernels.head_quantize_token(x + from, n, group, wide, to, to + padded_k, sums_of_64);
      groups[at] = sums_of_64[0] + sums_of_64[1];
    }
  }
}

void QuantizedTokens::sum_groups(const KernelTable& kernels, int64_t m) const {
  for (int64_t g = 0; g < group_count(); ++g) {
    groups[g * tokens + m] = kernels.sum_i8(token(m) + g * group, group);
  }
}

}  // namespace bitnet::engine
