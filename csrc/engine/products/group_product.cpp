// Products with scales of groups, by layout of the weights and of the scales; see group_product.h.
// Nothing here throws or allocates.
#include "engine/products/group_product.h"

#include <algorithm>
#include <cstring>

#include "engine/products/plan.h"
#include "format/layout.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

// Its scales are the caller's.
ProductJob grouped_job(const Weight& w, const QuantizedTokens& x, const ProductPart& part,
                       float* values, int64_t stride) {
  ProductJob job = job_of(w, x, part);
  job.group_steps = x.group / layout::kTileStepK;
  job.x_sum = x.groups + part.token;
  job.x_scale = x.group_scales == nullptr ? nullptr : x.group_scales + part.token;
  job.x_group_stride = x.tokens;
  job.values = values;
  job.out_stride = stride;
  return job;
}

void run(const KernelTable& kernels, const ProductJob& job) {
  algorithm_for(kernels, shape_of(job)).run(job, nullptr);
}

// Scales as the kernels read them: one call.
void multiply_blocked(const KernelTable& kernels, const Weight& w, const GroupScales& scales,
                      const QuantizedTokens& x, const ProductPart& part, float* values,
                      int64_t out_stride, void* scratch) {
  const int64_t stride = x.group_count() * w.block_rows;
  ProductJob job = grouped_job(w, x, part, values, out_stride);
  job.scale_type = scales.type;
  job.scale = offset_bytes(scales.data, part.block_begin * stride * element_size(scales.type));
  job.scale_stride = stride;
  job.scratch = scratch;
  const ProductAlgorithm* tables = scratch == nullptr ? nullptr : tables_of(kernels);
  if (tables != nullptr) return tables->run(job, nullptr);
  run(kernels, job);
}

using Four = float __attribute__((vector_size(16)));

Four load_four(const float* from) {
  Four v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

// Elements I of a and b one behind the other; compilers have different builtins for this.
template <int... I>
Four shuffled(Four a, Four b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  using Indexes = int32_t __attribute__((vector_size(16)));
  return __builtin_shuffle(a, b, Indexes{I...});
#endif
}

// out[g * block_rows + r] = scales[r * stride + g] for r < rows and g < count, zero for the other
// rows.  By 4 x 4: element by element this took two thirds of the time of one token.
void gather_scales(const float* scales, int64_t stride, int64_t rows, int64_t count,
                   int64_t block_rows, float* out) {
  static_assert(layout::kMaxBlockRows % 4 == 0);
  const int64_t whole_rows = rows / 4 * 4, whole = count / 4 * 4;
  for (int64_t r = 0; r < whole_rows; r += 4) {
    const float* from = scales + r * stride;
    for (int64_t g = 0; g < whole; g += 4) {
      const Four a = load_four(from + g), b = load_four(from + stride + g);
      const Four c = load_four(from + 2 * stride + g), d = load_four(from + 3 * stride + g);
      const Four ab = shuffled<0, 4, 1, 5>(a, b), cd = shuffled<0, 4, 1, 5>(c, d);
      const Four ab2 = shuffled<2, 6, 3, 7>(a, b), cd2 = shuffled<2, 6, 3, 7>(c, d);
      const Four columns[4] = {shuffled<0, 1, 4, 5>(ab, cd), shuffled<2, 3, 6, 7>(ab, cd),
                               shuffled<0, 1, 4, 5>(ab2, cd2), shuffled<2, 3, 6, 7>(ab2, cd2)};
      for (int64_t i = 0; i < 4; ++i) {
        std::memcpy(out + (g + i) * block_rows + r, &columns[i], sizeof(Four));
      }
    }
  }
  for (int64_t g = 0; g < count; ++g) {
    for (int64_t r = g < whole ? whole_rows : 0; r < block_rows; ++r) {
      out[g * block_rows + r] = r < rows ? scales[r * stride + g] : 0.0f;
    }
  }
}

// Scales of rows: some groups of a row block are brought beside each other, then multiplied.
void multiply_gathered(const KernelTable& kernels, const Weight& w, const float* scales,
                       const QuantizedTokens& x, const ProductPart& part, float* values,
                       int64_t stride) {
  constexpr int64_t kGathered = 32;
  float gathered[kGathered * layout::kMaxBlockRows];
  const int64_t groups = x.group_count(), step_bytes = w.block_bytes / w.k_steps;
  const int64_t group_steps = x.group / layout::kTileStepK;
  for (int64_t block = part.block_begin; block < part.block_end; ++block) {
    const int64_t row = block * w.block_rows, rows = std::min(w.block_rows, w.n_rows - row);
    ProductJob job = grouped_job(w, x, {block, block + 1, part.token, part.tokens},
                                 values + (block - part.block_begin) * w.block_rows, stride);
    job.scale = gathered;
    for (int64_t g = 0; g < groups; g += kGathered) {
      const int64_t count = std::min(kGathered, groups - g), step = g * group_steps;
      gather_scales(scales + row * groups + g, groups, rows, count, w.block_rows, gathered);
      ProductJob now = job;
      now.weights += step * step_bytes;
      now.k_steps = std::min(count * group_steps, w.k_steps - step);
      now.x += g * x.group;
      now.x_sum += g * x.tokens;
      if (now.x_scale != nullptr) now.x_scale += g * x.tokens;
      now.add = g != 0;
      run(kernels, now);
    }
  }
}

// The codes of group g of `rows` planes, whole blocks of 128 of them: a group of 64 lies in a copy
// whose other half is zero.
struct GroupCodes {
  const int8_t* at;
  int64_t stride;
};

GroupCodes codes_of_group(const QuantizedTokens& x, int64_t token, int64_t rows, int64_t g,
                          int8_t* copies) {
  const int8_t* codes = x.token(token) + g * x.group;
  if (x.group == kGroupWeights) return {codes, x.padded_k};
  std::fill_n(copies, rows * kGroupWeights, int8_t{0});
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(codes + r * x.padded_k, x.group, copies + r * kGroupWeights + g % 2 * x.group);
  }
  return {copies, kGroupWeights};
}

// Canonical rows: exact sums of one group at a time, one plane after the other. Blocks of 128
// weights of neighbouring rows lie apart, so they are copied.
void multiply_rows(const KernelTable& kernels, const Weight& w, const float* scales,
                   const QuantizedTokens& x, const ProductPart& part, float* values,
                   int64_t stride) {
  constexpr int64_t kRows = layout::kMaxBlockRows, kTokens = 16;
  int32_t sums[kTokens * kRows], planes[2 * kTokens * kRows], x_sum[2 * kTokens];
  float w_scale[kRows];
  int8_t copies[2 * kTokens * kGroupWeights];
  uint8_t weights[kRows * layout::kBlockBytes];
  const int64_t groups = x.group_count(), begin = part.block_begin * w.block_rows;
  const int64_t end = std::min(part.block_end * w.block_rows, w.n_rows);
  const int64_t per_token = x.planes(), row_bytes = layout::row_bytes_for(w.k);
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t rows = std::min(kRows, end - row);
    for (int64_t m = 0; m < part.tokens; m += kTokens) {
      const int64_t tokens = std::min(kTokens, part.tokens - m), first = part.token + m;
      float* out = values + m * stride + (row - begin);
      for (int64_t t = 0; t < tokens; ++t) std::fill_n(out + t * stride, rows, 0.0f);
      for (int64_t g = 0; g < groups; ++g) {
        const GroupCodes codes = codes_of_group(x, first, tokens * per_token, g, copies);
        for (int64_t r = 0; r < tokens * per_token; ++r) {
          x_sum[r] = kernels.sum_i8(codes.at + r * codes.stride, kGroupWeights);
        }
        const int64_t at = g * x.group / kGroupWeights * layout::kBlockBytes;
        for (int64_t i = 0; i < rows; ++i) {
          std::memcpy(weights + i * layout::kBlockBytes, w.data + (row + i) * row_bytes + at,
                      static_cast<size_t>(layout::kBlockBytes));
        }
        run(kernels, {.format = w.format,
                      .weights = weights,
                      .block_bytes = layout::kBlockBytes,
                      .k_steps = layout::kBlockBytes,
                      .blocks = rows,
                      .x = codes.at,
                      .x_stride = codes.stride,
                      .tokens = tokens * per_token,
                      .x_sum = x_sum,
                      .sums = per_token == 2 ? planes : sums,
                      .out_stride = kRows,
                      .prefetch_bytes = tuning().prefetch_bytes});
        for (int64_t i = 0; per_token == 2 && i < tokens * kRows; ++i) {
          const int32_t* both = planes + i / kRows * 2 * kRows + i % kRows;
          if (i % kRows < rows) sums[i] = 256 * both[0] + both[kRows];
        }
        for (int64_t i = 0; i < rows; ++i) w_scale[i] = scales[(row + i) * groups + g];
        kernels.add_group(
            sums, kRows, rows, tokens, w_scale,
            x.group_scales == nullptr ? nullptr : x.group_scales + g * x.tokens + first, out,
            stride);
      }
    }
  }
}

}  // namespace

void multiply_groups(const KernelTable& kernels, const Weight& weight, const GroupScales& scales,
                     const QuantizedTokens& x, const ProductPart& part, float* values,
                     int64_t stride, void* scratch) {
  if (scales.blocked) {
    multiply_blocked(kernels, weight, scales, x, part, values, stride, scratch);
  } else {
    (weight.reads_rows() ? multiply_rows : multiply_gathered)(
        kernels, weight, static_cast<const float*>(scales.data), x, part, values, stride);
  }
  if (x.group_scales != nullptr) return;
  const int64_t rows = std::min((part.block_end - part.block_begin) * weight.block_rows,
                                weight.n_rows - part.block_begin * weight.block_rows);
  for (int64_t m = 0; m < part.tokens; ++m) {
    const float x_scale = x.scales[part.token + m];
    float* y = values + m * stride;
    for (int64_t i = 0; i < rows; ++i) y[i] *= x_scale;
  }
}

}  // namespace bitnet::engine
