// Making ternary weights: from float master weights to int8 codes, from codes to canonical packed
// rows and back, and between these and the CPU-specific tiles (format/layout.h). Rare calls.
#pragma once

#include "engine/row_ops.h"
#include "engine/weights.h"

namespace bitnet::engine {

// codes int8 [n, k] -> packed [n, row bytes].  Returns a row with another value than -1, 0, 1, or
// -1.
int64_t pack(const int8_t* codes, int64_t n, int64_t k, uint8_t* packed);
// The reverse.  Returns a row with a code 3 or a padding code that is not 1, or -1.
int64_t unpack(const uint8_t* packed, int64_t n, int64_t k, int8_t* codes);
// codes int8 [count, width] and their scale, the mean magnitude.  False if that is not finite.
bool quantize_weights(const Rows& weight, int8_t* codes, float* scale);

// Canonical rows into the tiles that `to` views.  False if there is a code 3.
bool repack(const uint8_t* canonical, const Weight& to, int64_t lanes, uint8_t* tiles);
// The reverse, into canonical rows.
bool restore(const Weight& from, int64_t lanes, uint8_t* canonical);

}  // namespace bitnet::engine
