// Element types in memory.
#pragma once

#include <cstdint>

namespace bitnet {

// Inside the kernels everything is float32.  Activations and weights of
// heads are kF32, kBF16 or kF16; the rest is for keys and values of a cache and nothing else: kInt8
// with a scale for every position, kF8E4M3 and kF8E5M2 the 8-bit floats of the Open Compute Project
// (E4M3FN, without infinities, to 448; E5M2, IEEE's way, to 57344).
enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kInt8 = 3, kF8E4M3 = 4, kF8E5M2 = 5 };

constexpr int64_t element_size(DType type) {
  if (type == DType::kF32) return 4;
  return type == DType::kBF16 || type == DType::kF16 ? 2 : 1;
}

}  // namespace bitnet
