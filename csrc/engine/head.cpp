// The head's products and its quantised forms; see head.h. Layouts are those of format/layout.h.
#include "engine/head.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <span>

#include "kernels/dispatch.h"
#include "runtime/parallel.h"
#include "runtime/tuning.h"

namespace bitnet::engine {
namespace {

// Bytes that begin a new buffer at the next multiple of 64.
constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t tile_bytes(const HeadView& head) {
  return head.groups() * head.group / layout::kHeadStepFeatures * layout::kHeadStepBytes;
}

float bf16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

void embed_int8(const HeadView& head, int64_t id, float* out) {
  const auto* q = static_cast<const int8_t*>(head.weight) + id * head.k;
  const float scale = static_cast<const float*>(head.scale)[id];
  for (int64_t i = 0; i < head.k; ++i) out[i] = static_cast<float>(q[i]) * scale;
}

void embed_int4(const HeadView& head, int64_t id, float* out) {
  const int64_t tile = id / layout::kHeadTileRows, r = id % layout::kHeadTileRows;
  const auto* bytes = static_cast<const uint8_t*>(head.weight) + tile * tile_bytes(head) + 4 * r;
  const auto* scale =
      static_cast<const uint16_t*>(head.scale) + tile * head.groups() * layout::kHeadTileRows + r;
  for (int64_t k = 0; k < head.k; ++k) {
    const int64_t j = k % layout::kHeadStepFeatures;
    const uint8_t byte = bytes[k / layout::kHeadStepFeatures * layout::kHeadStepBytes + j % 4];
    const int code = (j < 4 ? byte & 15 : byte >> 4) - 8;
    out[k] = static_cast<float>(code) * bf16_value(scale[k / head.group * layout::kHeadTileRows]);
  }
}

// out [k] = row `id` as float32.
void embed_row(const KernelTable& kernels, const HeadView& head, int64_t id, float* out) {
  switch (head.format) {
    case HeadFormat::kDense:
      return kernels.load_row(head.type, offset_bytes(head.weight, id * head.row_bytes()), head.k,
                              out);
    case HeadFormat::kInt8:
      return embed_int8(head, id, out);
    case HeadFormat::kInt4:
      return embed_int4(head, id, out);
    case HeadFormat::kTernary:
      return embed_ternary(head, id, out);
  }
}

// Codes 0..15 of one row (a multiple of 8 of them) into row r of its tile.
void store_head4_row(const uint8_t* codes, int64_t count, int64_t r, uint8_t* tile) {
  for (int64_t k = 0; k < count; k += layout::kHeadStepFeatures) {
    uint32_t low, high;
    std::memcpy(&low, codes + k, 4);
    std::memcpy(&high, codes + k + 4, 4);
    const uint32_t word = low | high << 4;
    std::memcpy(tile + k / layout::kHeadStepFeatures * layout::kHeadStepBytes + 4 * r, &word, 4);
  }
}

// Quantises the rows of one tile; `codes` and `scales` are scratch for one row.
bool quantize_tile(const KernelTable& kernels, const Rows& w, int64_t tile, int64_t group,
                   float* buffer, uint8_t* codes, uint16_t* scales, uint8_t* packed,
                   uint16_t* packed_scales) {
  const int64_t groups = (w.width + group - 1) / group;
  bool finite = true;
  for (int64_t r = 0; r < layout::kHeadTileRows; ++r) {
    const int64_t n = tile * layout::kHeadTileRows + r;
    if (n < w.count) {
      kernels.load_row(w.type, w.at(n), w.width, buffer);
      finite &= kernels.head_quantize_int4(buffer, w.width, group, codes, scales) == 0.0f;
    } else {
      std::fill_n(codes, groups * group, uint8_t{8});
      std::fill_n(scales, groups, uint16_t{0});
    }
    store_head4_row(codes, groups * group, r, packed);
    for (int64_t g = 0; g < groups; ++g) {
      packed_scales[g * layout::kHeadTileRows + r] = scales[g];
    }
  }
  return finite;
}

// A value and its row as one number, which is larger for a larger value and, of equal values, for
// the lower row; 0 is below all of them. Floats sort like their bits if those of negative ones are
// inverted; -0 counts as 0. Not for NaN.
uint64_t sortable(float value, int64_t row) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);
  const uint64_t sorts = bits >> 31 != 0 ? ~bits : bits | uint32_t{1} << 31;
  return sorts << 32 | static_cast<uint32_t>(~row);
}
float value_of(uint64_t number) {
  const auto sorts = static_cast<uint32_t>(number >> 32);
  return std::bit_cast<float>(sorts >> 31 != 0 ? sorts & ~(uint32_t{1} << 31) : ~sorts);
}
int64_t row_of(uint64_t number) { return static_cast<uint32_t>(~number); }

// Raises `best` to at least `found`; returns the lower one of both.
uint64_t raise_to(uint64_t found, std::atomic<uint64_t>& best) {
  uint64_t before = best.load(std::memory_order_relaxed);
  while (before < found) {
    if (best.compare_exchange_weak(before, found)) return before;
  }
  return found;
}

}  // namespace

int64_t HeadView::row_bytes() const {
  if (format == HeadFormat::kDense) return k * element_size(type);
  if (format == HeadFormat::kInt8) return k + 4;
  if (format == HeadFormat::kTernary) return ternary.block_bytes / ternary.block_rows;
  return groups() * (group / 2 + 2);
}

int64_t head_input_bytes(const HeadView& head, int64_t tokens) {
  if (head.format == HeadFormat::kDense) return aligned(tokens * head.k * 4);
  if (head.format == HeadFormat::kTernary) return ternary_input_bytes(head, tokens);
  const int64_t padded = layout::head_padded_k(head.k);
  return aligned(tokens * static_cast<int64_t>(sizeof(HeadToken))) +
         tokens * (4 * padded + aligned(padded / 64 * 4));
}

Prefetch head_prefetch() {
  return {tuning().head_bytes, tuning().prefetch_bytes, tuning().head_into_l2};
}

HeadInput bind_head_input(const HeadView& head, int64_t tokens, void* memory) {
  HeadInput input{head.k, layout::head_padded_k(head.k), nullptr, nullptr};
  if (head.format == HeadFormat::kDense) {
    input.dense = static_cast<float*>(memory);
    return input;
  }
  if (head.format == HeadFormat::kTernary) {
    input.ternary = bind_ternary_input(head, tokens, memory);
    return input;
  }
  const int64_t padded = input.padded_k;
  input.tokens = static_cast<HeadToken*>(memory);
  char* next =
      static_cast<char*>(memory) + aligned(tokens * static_cast<int64_t>(sizeof(HeadToken)));
  for (int64_t m = 0; m < tokens; ++m) {
    auto* wide = reinterpret_cast<int16_t*>(next);
    auto* high = reinterpret_cast<int8_t*>(next + 2 * padded);
    auto* sums = reinterpret_cast<int32_t*>(next + 4 * padded);
    input.tokens[m] = {wide, high, high + padded, sums, 0, 0.0f};
    next += 4 * padded + aligned(padded / 64 * 4);
  }
  return input;
}

void prepare_head_token(const KernelTable& kernels, const HeadView& head, const float* x, int64_t m,
                        const HeadInput& input) {
  if (head.format == HeadFormat::kDense) {
    std::memcpy(input.dense + m * head.k, x, static_cast<size_t>(head.k) * sizeof(float));
    return;
  }
  if (head.format == HeadFormat::kTernary) return input.ternary.quantize(kernels, x, m);
  HeadToken& token = input.tokens[m];
  // The buffers are the caller's; HeadToken is how the kernels see them, hence its const.
  auto* sums = const_cast<int32_t*>(token.sums);
  token.scale = kernels.head_quantize_token(
      x, head.k, input.padded_k, const_cast<int16_t*>(token.wide), const_cast<int8_t*>(token.high),
      const_cast<int8_t*>(token.low), sums);
  token.sum = 0;
  for (int64_t i = 0; i < input.padded_k / 64; ++i) token.sum += sums[i];
}

void head_rows(const KernelTable& kernels, const HeadView& head, int64_t row_begin, int64_t row_end,
               const HeadInput& input, int64_t tokens, float* out, int64_t out_stride) {
  switch (head.format) {
    case HeadFormat::kDense:
      return kernels.head_dense(input.dense, tokens, head.type, head.weight, head.k, row_begin,
                                row_end, head.ahead, out, out_stride);
    case HeadFormat::kInt8:
      return kernels.head_int8(static_cast<const int8_t*>(head.weight),
                               static_cast<const float*>(head.scale), head.k, row_begin, row_end,
                               input.tokens, tokens, head.ahead, out, out_stride);
    case HeadFormat::kInt4:
      return kernels.head_int4(static_cast<const uint8_t*>(head.weight),
                               static_cast<const uint16_t*>(head.scale), head.groups(), head.group,
                               row_begin, row_end, input.tokens, tokens, head.ahead, out,
                               out_stride);
    case HeadFormat::kTernary:
      return ternary_rows(kernels, head, row_begin, row_end, input.ternary, tokens, out,
                          out_stride);
  }
}

void measure_bytes(const HeadView& head, int64_t m, const HeadInput& input) {
  HeadToken& token = input.tokens[m];
  int32_t sum = 0, squares = 0;  // of at most 65536 bytes
  for (int64_t i = 0; i < head.k; ++i) {
    sum += token.high[i];
    squares += int{token.low[i]} * token.low[i];
  }
  token.high_sum = sum;
  token.low_length = 1.000001f * std::sqrt(static_cast<float>(squares));  // rounded up
}

bool has_bounds(const KernelTable& kernels, const HeadView& head, int64_t tokens) {
  return head.format == HeadFormat::kInt8 && head.rows <= UINT32_MAX &&
         tokens >= kernels.head_bound_tokens;
}

int64_t largest_rows(const KernelTable& kernels, const HeadView& head, int64_t row_begin,
                     int64_t row_end, const HeadInput& input, int64_t tokens,
                     const Largest& largest, float* out, int64_t out_stride) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t rows = row_end - row_begin;
  kernels.head_bound(static_cast<const int8_t*>(head.weight), static_cast<const float*>(head.scale),
                     head.k, row_begin, row_end, input.tokens, tokens, out, out_stride);
  int64_t count = 0;
  for (int64_t m = 0; m < tokens; ++m) {
    float* const bounds = out + m * out_stride;
    const Noise noise = largest.noise == nullptr ? Noise{} : largest.noise[m];
    const bool noisy = noise.temperature > 0, best_only = largest.count == 1 || noisy;
    const auto heap = best_only ? std::span<float>()
                                : std::span(largest.heaps + m * largest.count,
                                            static_cast<size_t>(largest.count));
    const auto best_so_far = [&] {
      const uint64_t best = largest.best[m].load(std::memory_order_relaxed);
      return best == 0 ? kNone : value_of(best);
    };
    float threshold = best_only ? best_so_far() : heap.front();
    // v with its noise. A bound of the logit becomes a bound of the sum, which grows with the
    // logit.
    const auto add_noise = [&](const float* v, int64_t n, int64_t row, float* to) {
      kernels.add_noise_row(v, n, noise.temperature, noise.key, row, threshold, to);
    };
    if (noisy) add_noise(bounds, rows, row_begin, bounds);
    if (kernels.max_row(bounds, rows) < threshold) {
      std::fill_n(bounds, rows, kNone);
      continue;
    }
    HeadInput token = input;
    token.tokens += m;
    for (int64_t n = 0; n < rows; ++n) {
      float& logit = bounds[n];
      if (logit < threshold) {
        logit = kNone;
        continue;
      }
      head_rows(kernels, head, row_begin + n, row_begin + n + 1, token, 1, &logit, 0);
      ++count;
      if (logit != logit) continue;
      if (best_only) {
        float value = logit;
        if (noisy) add_noise(&logit, 1, row_begin + n, &value);
        const uint64_t lower = raise_to(sortable(value, row_begin + n), largest.best[m]);
        if (lower != 0) bounds[row_of(lower) - row_begin] = kNone;
        threshold = best_so_far();
      } else if (logit > threshold) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>());
        heap.back() = logit;
        std::push_heap(heap.begin(), heap.end(), std::greater<>());
        threshold = heap.front();
      }
    }
  }
  return count;
}

void lm_head(const HeadView& head, const Rows& x, float* logits) {
  const KernelTable& kernels = active_kernels();
  Scratch<char> memory(head_input_bytes(head, x.count));
  const HeadInput input = bind_head_input(head, x.count, memory.get());
  parallel_rows(x.count, head.k, head.k, [&](int64_t m, float* row) {
    kernels.load_row(x.type, x.at(m), head.k, row);
    prepare_head_token(kernels, head, row, m, input);
  });
  const int64_t unit = head.unit_rows(), units = (head.rows + unit - 1) / unit;
  parallel_ranges(units, unit * head.k * x.count, kMinElements, [&](int64_t begin, int64_t end) {
    head_rows(kernels, head, begin * unit, std::min(end * unit, head.rows), input, x.count,
              logits + begin * unit, head.rows);
  });
}

void embed(const HeadView& head, const int64_t* ids, int64_t count, float* out) {
  const KernelTable& kernels = active_kernels();
  parallel_ranges(count, head.k, kMinElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) embed_row(kernels, head, ids[i], out + i * head.k);
  });
}

int64_t quantize_head_int8(const Rows& w, int8_t* codes, float* scales) {
  const KernelTable& kernels = active_kernels();
  std::atomic<int64_t> bad_row{-1};
  parallel_rows(w.count, w.width, w.width, [&](int64_t n, float* row) {
    kernels.load_row(w.type, w.at(n), w.width, row);
    scales[n] = kernels.head_quantize_int8(row, w.width, codes + n * w.width);
    if (scales[n] != scales[n]) bad_row = n;
  });
  return bad_row;
}

int64_t quantize_head_int4(const Rows& w, int64_t group, uint8_t* packed, uint16_t* scales) {
  const int64_t tiles = layout::head_tiles(w.count), groups = (w.width + group - 1) / group;
  const int64_t tile_bytes = groups * group / layout::kHeadStepFeatures * layout::kHeadStepBytes;
  const KernelTable& kernels = active_kernels();
  std::atomic<int64_t> bad_row{-1};
  // a row as float32, its codes, and its scales
  const int64_t row_bytes = w.width * 4, code_bytes = (groups * group + 63) / 64 * 64;
  const int64_t own = (row_bytes + 63) / 64 * 64 + code_bytes + groups * 2;
  parallel_rows<char>(
      tiles, layout::kHeadTileRows * w.width, (own + 63) / 64 * 64, [&](int64_t t, char* memory) {
        BumpAllocator scratch(memory);
        auto* row = scratch.take<float>(w.width);
        auto* codes = scratch.take<uint8_t>(groups * group);
        auto* row_scales = scratch.take<uint16_t>(groups);
        if (!quantize_tile(kernels, w, t, group, row, codes, row_scales, packed + t * tile_bytes,
                           scales + t * groups * layout::kHeadTileRows))
          bad_row = t * layout::kHeadTileRows;
      });
  return bad_row;
}

}  // namespace bitnet::engine
