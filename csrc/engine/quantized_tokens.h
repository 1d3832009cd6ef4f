// int8 tokens as the products read them: rows of codes padded with zeros, their sums and scales, in
// the order that the kernel table asks for.
#pragma once

#include "engine/weights.h"
#include "kernels/kernel_table.h"
#include "runtime/memory.h"

namespace bitnet::engine {

// What tokens become: int8 with one scale a token; int8 with a scale for every group of
// features; or 16 bits with such scales, as two planes of int8.
enum class ActivationFormat : int32_t { kInt8 = 0, kInt8Group = 1, kInt16Group = 2 };

// A group of scales along K: 128 weights or features, or 64.
constexpr int64_t kGroupWeights = layout::kBlockWeights;
constexpr int64_t kSmallGroup = kGroupWeights / 2;
constexpr int64_t groups_for(int64_t k, int64_t group) { return (k + group - 1) / group; }

constexpr int64_t planes_of(ActivationFormat format) {
  return format == ActivationFormat::kInt16Group ? 2 : 1;
}

// Borrowed memory.  In row-major order token m is padded_k codes at codes + m * padded_k.  In
// tiles, every `tile` tokens lie together, and of these 64 codes of each in turn.
struct QuantizedTokens {
  int64_t tokens, k, padded_k;
  int64_t tile;  // tokens of a tile; 0: row-major
  int8_t* codes;
  int32_t* sums;    // of a token's codes
  float* scales;    // what a code is worth
  int32_t* groups;  // [groups, tokens], sums over a group; null where nobody needs them
  ActivationFormat format = ActivationFormat::kInt8;
  // [groups, tokens], what the codes of a group are worth, in the formats that have such: sums and
  // scales of whole tokens are not used there, and tokens lie in row-major order.
  float* group_scales = nullptr;
  int64_t group = kGroupWeights;  // features of a group, as of the weights that meet them

  int64_t group_count() const { return groups_for(k, group); }
  int64_t planes() const { return planes_of(format); }

  int64_t stride() const { return tile == 0 ? padded_k : kTokenStep; }
  int8_t* token(int64_t m) const {
    if (tile == 0) return codes + m * planes() * padded_k;
    return codes + m / tile * tile * padded_k + m % tile * kTokenStep;
  }
  // From 64 codes of a token to its next 64; shorter in a last tile that is not full.
  int64_t step_stride(int64_t m) const {
    if (tile == 0) return kTokenStep;
    const int64_t left = tokens - m / tile * tile;
    return kTokenStep * (left < tile ? left : tile);
  }
  // Quantises normalised token m; different tokens may be quantised at once.
  void quantize(const KernelTable& kernels, const float* x, int64_t m) const {
    if (format != ActivationFormat::kInt8) return quantize_groups(kernels, x, m);
    scales[m] = kernels.quantize_row(x, k, padded_k, token(m), step_stride(m), sums + m);
    if (groups != nullptr) sum_groups(kernels, m);
  }
  // Likewise for kInt8 without groups; normalises on the way.
  void quantize_normed(const KernelTable& kernels, const NormJob& job, int64_t m) const {
    scales[m] = kernels.norm_quantize_row(job, padded_k, token(m), step_stride(m), sums + m);
  }
  void sum_groups(const KernelTable& kernels, int64_t m) const;
  // Tokens with scales of groups as integers [tokens, k] and their scales [tokens, groups]: int8
  // of kInt8Group, int16 of kInt16Group.
  template <class T>
  void copy_codes(T* to, float* to_scales) const {
    for (int64_t m = 0; m < tokens; ++m) {
      const int8_t* high = token(m);
      for (int64_t i = 0; i < k; ++i) {
        to[m * k + i] =
            static_cast<T>(sizeof(T) == 1 ? high[i] : 256 * high[i] + high[padded_k + i]);
      }
      const int64_t count = group_count();
      for (int64_t g = 0; g < count; ++g) to_scales[m * count + g] = group_scales[g * tokens + m];
    }
  }

 private:
  void quantize_groups(const KernelTable& kernels, const float* x, int64_t m) const;
};

// A job of a part of a product without scales of groups, but for its result.
ProductJob job_of(const Weight& weight, const QuantizedTokens& x, const ProductPart& part);

// With memory of their own, in the order that `kernels` asks for, or row-major where canonical
// weights read them (Weight::reads_rows).  group: 0 where nobody needs groups.
class TokenBuffer {
 public:
  TokenBuffer(const KernelTable& kernels, int64_t tokens, int64_t k, int64_t group = 0,
              ActivationFormat format = ActivationFormat::kInt8, bool row_major = false);
  const QuantizedTokens& view() const { return view_; }

  // Every token of a contiguous [tokens, k] of `type`.
  void quantize(const KernelTable& kernels, const void* x, DType type);
  // int8 [tokens, k] with scales float32 [tokens] (null: none), summed.
  void copy_quantized(const KernelTable& kernels, const int8_t* x, const float* scales);

 private:
  Scratch<char> memory_;
  QuantizedTokens view_;
};

}  // namespace bitnet::engine
