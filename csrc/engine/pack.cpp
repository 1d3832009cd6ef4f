// Packing, quantising and repacking of weights; see pack.h. Plain loops over bytes that the
// compiler vectorises for the baseline.
#include "engine/pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "format/layout.h"
#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

// Returns false if a value is not -1, 0 or 1.
bool pack_row(const int8_t* codes, int64_t k, uint8_t* packed) {
  std::memset(packed, layout::kZeroByte, static_cast<size_t>(layout::row_bytes_for(k)));
  bool valid = true;
  for (int64_t i = 0; i < k; ++i) {
    valid &= codes[i] >= -1 && codes[i] <= 1;
    const int64_t in_block = i % layout::kBlockWeights;
    uint8_t& byte =
        packed[i / layout::kBlockWeights * layout::kBlockBytes + in_block % layout::kBlockBytes];
    const int shift = layout::shift_of(in_block);
    byte = static_cast<uint8_t>((byte & ~(3 << shift)) | (((codes[i] + 1) & 3) << shift));
  }
  return valid;
}

// Returns false if a code is 3 or a padding code is not 1.
bool unpack_row(const uint8_t* packed, int64_t k, int8_t* codes) {
  bool valid = true;
  for (int64_t i = 0; i < layout::padded_k(k); ++i) {
    const int64_t in_block = i % layout::kBlockWeights;
    const uint8_t byte =
        packed[i / layout::kBlockWeights * layout::kBlockBytes + in_block % layout::kBlockBytes];
    const int code = (byte >> layout::shift_of(in_block)) & 3;
    if (i < k) {
      valid &= code != 3;
      codes[i] = static_cast<int8_t>(code - 1);
    } else {
      valid &= code == 1;
    }
  }
  return valid;
}

// |w| summed in 8 double lanes, so that the result does not depend on a vector width.
double sum_abs(const float* w, int64_t n) {
  double lanes[8] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i % 8] += std::fabs(static_cast<double>(w[i]));
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// clamp(round_half_even(w * inv_scale), -1, 1); adding and subtracting 1.5 * 2^23 rounds.
int8_t ternary_code(float w, float inv_scale) {
  constexpr float kMagic = 12582912.0f;
  const float clamped = std::fmin(std::fmax(w * inv_scale, -2.0f), 2.0f);
  const float rounded = (clamped + kMagic) - kMagic;
  return static_cast<int8_t>(std::fmin(std::fmax(rounded, -1.0f), 1.0f));
}

// ---- tiles -------------------------------------------------------------------------------------

constexpr int64_t kField = layout::kFieldWeights;  // weights that share a bit position: 32 bytes

struct TileShape {
  int64_t lanes, fields, lines;
  int64_t rows() const { return lanes * fields; }
  int64_t bytes() const { return lines * lanes * layout::kTileStepK; }
};

// The byte of one lane's codes, c[0] of the first rows of the tile.
int join_codes(const uint8_t (&c)[4]) { return c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6; }
int join_codes(const uint8_t (&c)[5]) {
  return layout::base3_byte(81 * c[0] + 27 * c[1] + 9 * c[2] + 3 * c[3] + c[4]);
}

// Byte j of lane l in 8 consecutive lines, from field F of one block of kFields rows.
template <int kFields>
void pack_lane(const uint8_t* const (&rows)[kFields], int shift, uint8_t* lines,
               int64_t line_bytes) {
  uint8_t bytes[kField];
  for (int64_t i = 0; i < kField; ++i) {
    uint8_t c[kFields];
    for (int f = 0; f < kFields; ++f) c[f] = static_cast<uint8_t>((rows[f][i] >> shift) & 3);
    bytes[i] = static_cast<uint8_t>(join_codes(c));
  }
  for (int64_t i = 0; i < kField; i += 4) std::memcpy(lines + i / 4 * line_bytes, bytes + i, 4);
}

// The whole tile whose first row is `row`; rows past n are zeros.
template <int kFields>
void pack_tile(const uint8_t* weight, int64_t n, int64_t row_bytes, int64_t row,
               const TileShape& shape, const uint8_t* zero_row, uint8_t* tile) {
  const int64_t line_bytes = shape.lanes * layout::kTileStepK;
  for (int64_t lane = 0; lane < shape.lanes; ++lane) {
    const uint8_t* rows[kFields];
    for (int f = 0; f < kFields; ++f) {
      const int64_t r = row + shape.lanes * f + lane;
      rows[f] = r < n ? weight + r * row_bytes : zero_row;
    }
    // 32 weights are 8 lines; K padded to 64 may end in the middle of a block of 128
    for (int64_t line = 0; line < shape.lines; line += 8) {
      const int64_t block = line / 32;
      const uint8_t* here[kFields];
      for (int f = 0; f < kFields; ++f) here[f] = rows[f] + block * layout::kBlockBytes;
      const int shift = layout::shift_of(line % 32 * layout::kTileStepK);
      pack_lane<kFields>(here, shift, tile + line * line_bytes + lane * layout::kTileStepK,
                         line_bytes);
    }
  }
}

// A code 3 has both bits of its pair set.
bool has_code_3(const uint8_t* bytes, int64_t n) {
  int seen = 0;
  for (int64_t i = 0; i < n; ++i) seen |= bytes[i] & (bytes[i] >> 1) & 0x55;
  return seen != 0;
}

// The code of (row, k) of a tile.
int tile_code(const uint8_t* tile, const TileShape& shape, int64_t row, int64_t k) {
  const int64_t lane = row % shape.lanes, step = layout::kTileStepK;
  int byte = tile[(k / step * shape.lanes + lane) * step + k % step];
  const int64_t f = row / shape.lanes;
  if (shape.fields != layout::layout_of(WeightFormat::kBase3).fields) return (byte >> (2 * f)) & 3;
  for (int64_t i = 0; i < f; ++i) byte = byte * 3 & 0xff;
  return byte * 3 >> 8;
}

bool unpack_tile_row(const uint8_t* tile, const TileShape& shape, int64_t row, int64_t k,
                     uint8_t* out) {
  std::memset(out, layout::kZeroByte, static_cast<size_t>(layout::row_bytes_for(k)));
  bool valid = true;
  for (int64_t i = 0; i < k; ++i) {
    const int code = tile_code(tile, shape, row, i);
    valid &= code < 3;
    const int64_t in_block = i % layout::kBlockWeights;
    uint8_t& byte = out[i / layout::kBlockWeights * layout::kBlockBytes + in_block % kField];
    const int shift = layout::shift_of(in_block);
    byte = static_cast<uint8_t>((byte & ~(3 << shift)) | (code << shift));
  }
  return valid;
}

}  // namespace

int64_t pack(const int8_t* codes, int64_t n, int64_t k, uint8_t* packed) {
  std::atomic<int64_t> bad_row{-1};
  parallel_ranges(n, k, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (!pack_row(codes + r * k, k, packed + r * layout::row_bytes_for(k))) bad_row = r;
    }
  });
  return bad_row;
}

int64_t unpack(const uint8_t* packed, int64_t n, int64_t k, int8_t* codes) {
  std::atomic<int64_t> bad_row{-1};
  parallel_ranges(n, k, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (!unpack_row(packed + r * layout::row_bytes_for(k), k, codes + r * k)) bad_row = r;
    }
  });
  return bad_row;
}

bool quantize_weights(const Rows& weight, int8_t* codes, float* scale) {
  const KernelTable& kernels = active_kernels();
  const int64_t n = weight.count, k = weight.width;
  Scratch<double> row_sums(n);
  parallel_rows(n, k, k, [&](int64_t r, float* row) {
    kernels.load_row(weight.type, weight.at(r), k, row);
    row_sums.get()[r] = sum_abs(row, k);
  });
  double total = 0.0;
  for (int64_t r = 0; r < n; ++r) total += row_sums.get()[r];
  if (!std::isfinite(total)) return false;
  *scale = std::fmax(static_cast<float>(total / static_cast<double>(n * k)), 1e-5f);
  const float inv_scale = 1.0f / *scale;
  parallel_rows(n, k, k, [&](int64_t r, float* row) {
    kernels.load_row(weight.type, weight.at(r), k, row);
    for (int64_t i = 0; i < k; ++i) codes[r * k + i] = ternary_code(row[i], inv_scale);
  });
  return true;
}

bool repack(const uint8_t* canonical, const Weight& to, int64_t lanes, uint8_t* tiles) {
  const TileShape shape{lanes, layout::layout_of(to.format).fields, to.k_steps};
  const int64_t n = to.n_rows, row_bytes = layout::row_bytes_for(to.k);
  const std::vector<uint8_t> zero_row(static_cast<size_t>(row_bytes), layout::kZeroByte);
  std::atomic<bool> valid{true};
  parallel_ranges(
      to.row_blocks, shape.rows() * to.k, kMinElements, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int64_t row = t * shape.rows(), rows = std::min(shape.rows(), n - row);
          if (has_code_3(canonical + row * row_bytes, rows * row_bytes)) valid = false;
          (to.format == WeightFormat::kBase3 ? pack_tile<5>
                                             : pack_tile<4>)(canonical, n, row_bytes, row, shape,
                                                             zero_row.data(),
                                                             tiles + t * shape.bytes());
        }
      });
  return valid;
}

bool restore(const Weight& from, int64_t lanes, uint8_t* canonical) {
  const TileShape shape{lanes, layout::layout_of(from.format).fields, from.k_steps};
  const int64_t row_bytes = layout::row_bytes_for(from.k);
  std::atomic<bool> valid{true};
  parallel_ranges(from.n_rows, from.k, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* tile = from.data + n / from.block_rows * from.block_bytes;
      if (!unpack_tile_row(tile, shape, n % from.block_rows, from.k, canonical + n * row_bytes))
        valid = false;
    }
  });
  return valid;
}

}  // namespace bitnet::engine
