// The angles of rotary position embeddings, as rope_table and
// decode_step both need them, each step rounded as the Hugging
// Face models round it. Must not know tensors.
#pragma once

#include <cmath>
#include <cstdint>

namespace bitnet::ops {

// inv_freq[i] = theta^(-2 i / head_dim) for i < head_dim / 2, each step rounded to float32 as in
// the Hugging Face models.
inline void rope_frequencies(int64_t head_dim, double theta, float* inv_freq) {
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    inv_freq[i] = 1.0f / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
  }
}

// row [2 * half]: cosines, then sines.  The angle is a float32 product of float32 factors.
inline void rope_angles(int64_t position, const float* inv_freq, int64_t half, float* row) {
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<float>(position) * inv_freq[i];
    row[i] = static_cast<float>(std::cos(angle));
    row[half + i] = static_cast<float>(std::sin(angle));
  }
}

}  // namespace bitnet::ops
