// prepack and unprepack: between the canonical rows and the private tile layouts of the kernels
// that run (format/layout.h).  Plain loops over bytes that the compiler vectorises for the
// baseline.
// Must not know activations or an ISA: of the kernels it asks their number of lanes alone.
#include <atomic>
#include <cstring>

#include "format/layout.h"
#include "ops/checks.h"
#include "ops/ops.h"
#include "ops/weights.h"

namespace bitnet::ops {
namespace {

constexpr int64_t kField = layout::kFieldWeights;  // weights that share a bit position: 32 bytes

struct TileShape {
  int64_t lanes, fields, lines;
  int64_t rows() const { return lanes * fields; }
  int64_t bytes() const { return lines * lanes * layout::kTileStepK; }
};

// The byte of one lane's codes, c[0] of the first rows of the tile.
int join_codes(const uint8_t (&c)[4]) { return c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6; }
int join_codes(const uint8_t (&c)[5]) {
  return layout::trit_byte(81 * c[0] + 27 * c[1] + 9 * c[2] + 3 * c[3] + c[4]);
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
  if (shape.fields != layout::kTritFields) return (byte >> (2 * f)) & 3;
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

WeightFormat format_of(const Check& check, const std::string& format) {
  if (format == "2bit") return WeightFormat::kTwoBit;
  if (format != "1.6bit") check.fail("format", "'2bit' or '1.6bit'", "'" + format + "'");
  return WeightFormat::kTrits;
}

}  // namespace

Tensor prepack(const Tensor& weight, int64_t in_features, std::string format) {
  const Check check("prepack");
  const bool trits = format_of(check, format) == WeightFormat::kTrits;
  check.packed_for(weight, "weight", in_features);
  if (in_features > layout::kTileMaxK)
    check.fail("in_features", "at most 32768 in a private layout; use the canonical one",
               std::to_string(in_features));
  const TileShape shape{kernels().tile_lanes, trits ? layout::kTritFields : layout::kTwoBitFields,
                        layout::tile_lines(in_features)};
  const int64_t n = weight.size(0), row_bytes = weight.size(1);
  const int64_t tiles = layout::tiles_for(n, shape.lanes, shape.fields);
  const Shape sizes = trits ? Shape{tiles, shape.lines, shape.lanes, layout::kTileStepK}
                            : Shape{tiles, shape.lines, shape.lanes * layout::kTileStepK};
  Tensor out = empty(sizes, ScalarType::Byte);
  const auto* source = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* target = static_cast<uint8_t*>(out.mutable_data_ptr());
  const std::vector<uint8_t> zero_row(static_cast<size_t>(row_bytes), layout::kZeroByte);
  std::atomic<bool> valid{true};
  parallel_ranges(tiles, shape.rows() * in_features, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = t * shape.rows(), rows = std::min(shape.rows(), n - row);
      if (has_code_3(source + row * row_bytes, rows * row_bytes)) valid = false;
      (trits ? pack_tile<5> : pack_tile<4>)(source, n, row_bytes, row, shape, zero_row.data(),
                                            target + t * shape.bytes());
    }
  });
  if (!valid) check.fail("weight", "with codes 0, 1, 2 only", "a code 3");
  return out;
}

Tensor unprepack(const Tensor& weight, int64_t out_features, int64_t in_features) {
  const Check check("unprepack");
  const Weight w = weight_view(check, weight, "weight", in_features, out_features);
  if (w.format == WeightFormat::kCanonical)
    check.fail("weight", "in a private layout (3 or 4 dimensions)", shape_text(shape_of(weight)));
  const TileShape shape{
      kernels().tile_lanes,
      w.format == WeightFormat::kTrits ? layout::kTritFields : layout::kTwoBitFields, w.lines};
  const int64_t row_bytes = layout::row_bytes_for(in_features);
  Tensor out = empty({out_features, row_bytes}, ScalarType::Byte);
  auto* target = static_cast<uint8_t*>(out.mutable_data_ptr());
  std::atomic<bool> valid{true};
  parallel_ranges(out_features, in_features, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* tile = w.data + n / w.unit_rows * w.unit_bytes;
      if (!unpack_tile_row(tile, shape, n % w.unit_rows, in_features, target + n * row_bytes))
        valid = false;
    }
  });
  if (!valid) check.fail("weight", "with codes 0, 1, 2 only", "a code 3");
  return out;
}

}  // namespace bitnet::ops
