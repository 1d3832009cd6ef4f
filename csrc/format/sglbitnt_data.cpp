// SGLBITNT tensor data: the scans that find invalid codes, non-finite values and wrong padding, and
// the census of codes. Plain 64-bit words, so they run at memory speed on any CPU.
// Must not know: torch, Python, threads, SIMD, how the headers are laid out.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "format/fields.h"
#include "format/layout.h"

namespace bitnet::format {
namespace {

constexpr std::uint64_t kLowBits = 0x5555555555555555U;  // bit 0 of each 2-bit code

// 8 bytes at `at`, fewer at the end: zeros fill up, which are good data in every dtype.
std::uint64_t word_at(Bytes data, std::uint64_t at) {
  std::uint64_t word = 0;
  std::memcpy(&word, data.data() + at, std::min<std::uint64_t>(8, data.size() - at));
  return word;
}

// Offset of the first 8-byte word for which bad(word) != 0, or size(). Four words a round and one
// branch keep up with memory.
template <class Bad>
std::uint64_t first_bad_word(Bytes data, Bad bad) {
  std::uint64_t i = 0;
  for (; data.size() - i >= 32; i += 32) {
    std::uint64_t w[4];
    std::memcpy(w, data.data() + i, sizeof(w));
    if ((bad(w[0]) | bad(w[1]) | bad(w[2]) | bad(w[3])) != 0) break;
  }
  while (i < data.size() && bad(word_at(data, i)) == 0) i += 8;
  return std::min<std::uint64_t>(i, data.size());
}

Bytes data_of(Bytes file, const TensorRecord& tensor) {
  return file.subspan(tensor.offset_bytes, tensor.size_bytes);
}

void check_codes(Bytes data, const TensorRecord& tensor) {
  const auto both_bits = [](std::uint64_t w) { return w & (w >> 1) & kLowBits; };
  std::uint64_t at = first_bad_word(data, both_bits);
  if (at == data.size()) return;
  at += static_cast<std::uint64_t>(std::countr_zero(both_bits(word_at(data, at)))) / 8;
  fail(ErrorCode::kInvalidCode, tensor.offset_bytes + at, where_of(tensor),
       "codes 0, 1 and 2 (weights -1, 0, +1), got code 3 in byte " + str(at) + " of the data");
}

// Masks that repeat over the lanes of a word of floats.
struct FloatLanes {
  std::uint64_t item_bytes;
  std::uint64_t exponent;
  std::uint64_t top_bit;
};

FloatLanes lanes_of(DType dtype) {
  if (dtype == DType::kF32) return {4, 0x7f8000007f800000U, 0x8000000080000000U};
  const std::uint64_t exponent = dtype == DType::kF16 ? 0x7c007c007c007c00U : 0x7f807f807f807f80U;
  return {2, exponent, 0x8000800080008000U};
}

// An exponent of all ones means NaN or infinity. XOR with the mask leaves 0 in such a lane only;
// adding 0x7f..f then sets the top bit of every other lane. A lane holds at most 0x7f8.. before the
// addition, so nothing carries into the next one.
void check_finite(Bytes data, const TensorRecord& tensor) {
  const FloatLanes lanes = lanes_of(tensor.dtype);
  const auto not_finite = [=](std::uint64_t w) {
    return ~(((w & lanes.exponent) ^ lanes.exponent) + ~lanes.top_bit) & lanes.top_bit;
  };
  std::uint64_t at = first_bad_word(data, not_finite);
  if (at == data.size()) return;
  const auto bit = static_cast<std::uint64_t>(std::countr_zero(not_finite(word_at(data, at))));
  at += bit / (8 * lanes.item_bytes) * lanes.item_bytes;
  fail(ErrorCode::kNonFinite, tensor.offset_bytes + at, where_of(tensor),
       "finite values, got NaN or infinity at element " + str(at / lanes.item_bytes));
}

using BlockMask = std::array<std::uint8_t, layout::kBlockBytes>;

// For the last block of a row: which bits of byte j belong to padding (positions >= used).
BlockMask padding_mask(std::int64_t used) {
  BlockMask mask{};
  for (std::int64_t i = used; i < layout::kBlockWeights; ++i) {
    mask[i % layout::kBlockBytes] |= static_cast<std::uint8_t>(3U << layout::shift_of(i));
  }
  return mask;
}

void check_padding(Bytes data, const TensorRecord& tensor, const BlockMask& mask) {
  const std::uint64_t row_bytes = tensor.dims[1];
  for (std::uint64_t row = 0; row < tensor.dims[0]; ++row) {
    const std::uint64_t last_block = (row + 1) * row_bytes - mask.size();
    for (std::uint64_t j = 0; j < mask.size(); ++j) {
      if ((data[last_block + j] & mask[j]) != (layout::kZeroByte & mask[j])) {
        fail(ErrorCode::kPaddingCode, tensor.offset_bytes + last_block + j, where_of(tensor),
             "padding code 1 (weight 0) beyond K, got another in row " + str(row));
      }
    }
  }
}

}  // namespace

void check_data(std::span<const std::uint8_t> file, const TensorRecord& tensor) {
  check_sum(file, tensor);
  const Bytes data = data_of(file, tensor);
  if (tensor.packed()) {
    check_codes(data, tensor);
  } else {
    check_finite(data, tensor);
  }
  if (tensor.version < 2) return;
  if (tensor.packed()) check_in_features(file, tensor, tensor.in_features);
  check_scales_and_gaps(file, tensor);
}

void check_in_features(std::span<const std::uint8_t> file, const TensorRecord& tensor,
                       std::uint64_t in_features) {
  const char* remedy = "; config and tensor disagree: convert the model again";
  if (!tensor.packed()) {
    fail(ErrorCode::kInFeatures, tensor.offset_bytes, where_of(tensor),
         "a packed tensor with K " + str(in_features) + ", got a dense tensor", remedy);
  }
  if (tensor.version >= 2 && in_features != tensor.in_features) {
    fail(ErrorCode::kInFeatures, tensor.offset_bytes, where_of(tensor),
         "K " + str(in_features) + " as the config says, got " + str(tensor.in_features), remedy);
  }
  const std::uint64_t max = layout::kFields * std::uint64_t{tensor.dims[1]};
  if (in_features > max || max - in_features >= layout::kBlockWeights) {
    fail(ErrorCode::kInFeatures, tensor.offset_bytes, where_of(tensor),
         "K from " + str(max - layout::kBlockWeights + 1) + " to " + str(max) + " for rows of " +
             str(tensor.dims[1]) + " bytes, got " + str(in_features),
         remedy);
  }
  const auto used = static_cast<std::int64_t>(in_features % layout::kBlockWeights);
  if (used != 0) check_padding(data_of(file, tensor), tensor, padding_mask(used));
}

CodeCounts count_codes(std::span<const std::uint8_t> file, const TensorRecord& tensor) {
  const Bytes data = tensor.packed() ? data_of(file, tensor) : Bytes{};
  CodeCounts counts;  // rows are multiples of 32 bytes: whole words only
  for (std::uint64_t i = 0; i < data.size(); i += 8) {
    const std::uint64_t w = word_at(data, i);
    const std::uint64_t low = w & kLowBits;
    const std::uint64_t high = (w >> 1) & kLowBits;
    counts.zero += static_cast<std::uint64_t>(std::popcount(low & ~high));
    counts.plus += static_cast<std::uint64_t>(std::popcount(high & ~low));
    counts.minus += static_cast<std::uint64_t>(std::popcount(~(low | high) & kLowBits));
  }
  return counts;
}

}  // namespace bitnet::format
