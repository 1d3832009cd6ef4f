// The two products of LoRA, cut into units; see lora.h.
#include "engine/lora.h"

#include <algorithm>
#include <numeric>

#include "runtime/memory.h"

namespace bitnet::engine {
namespace {

// Four rows are the streams in which head_dense reads one token's weights.
constexpr int64_t kShrinkRows = 4, kShrinkTokens = 64;
constexpr int64_t kExpandTokens = 32, kExpandRows = 128;
static_assert(kExpandRows % kLoraTileRows == 0);

int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

int64_t units_of(const AdapterGroups::Group& group, const LoraWeight& lora) {
  return ceil_div(lora.rank, kShrinkRows) * ceil_div(group.end - group.begin, kShrinkTokens);
}

// Rows [begin, end) of A x the tokens at places [first, last) of the group.
void shrink_block(const KernelTable& kernels, const LoraProjection& p,
                  const AdapterGroups::Group& group, int64_t begin, int64_t end, int64_t first,
                  int64_t last) {
  const LoraWeight& lora = p.weights[group.adapter];
  float* out = p.inner + group.begin * p.max_rank + (first - group.begin) * lora.rank + begin;
  kernels.head_dense(p.x + first * p.k, last - first, lora.type, lora.a, p.k, begin, end, p.ahead,
                     out, lora.rank);
}

// Outputs [begin, begin + n) of one token: `delta` is what its adapter adds, null: it has none.
// They stay where nothing is to be added to the residual stream.
void finish(const KernelTable& kernels, const LoraProjection& p, int64_t token, int64_t begin,
            int64_t n, const float* delta) {
  alignas(64) float row[kExpandRows];
  const int64_t at = token * p.rows + begin;
  void* y = offset_bytes(p.y, at * element_size(p.type));
  kernels.load_row(p.type, y, n, row);
  if (delta != nullptr) {
    kernels.add_row(row, delta, n, row);
    if (p.residual == nullptr) return kernels.store_row(p.type, row, n, y);
    kernels.round_row(p.type, row, n);
  }
  if (p.residual != nullptr) kernels.add_row(p.residual + at, row, n, p.residual + at);
}

// Outputs [begin, begin + n) of the tokens at places [first, last).
void expand_block(const KernelTable& kernels, const AdapterGroups& groups, const LoraProjection& p,
                  int64_t first, int64_t last, int64_t begin, int64_t n) {
  alignas(64) float deltas[kExpandTokens * kExpandRows];
  for (const AdapterGroups::Group& group : groups.groups()) {
    const int64_t from = std::max(first, group.begin), to = std::min(last, group.end);
    const LoraWeight& lora = p.weights[group.adapter];
    if (from >= to) continue;
    if (lora.rank != 0) {
      const float* x = p.inner + group.begin * p.max_rank + (from - group.begin) * lora.rank;
      kernels.dense_tiles(x, to - from, lora.type, lora.b, lora.rank, lora.scaling, begin,
                          begin + n, deltas, n);
    }
    for (int64_t place = from; place < to; ++place) {
      finish(kernels, p, groups.token(place), begin, n,
             lora.rank == 0 ? nullptr : deltas + (place - from) * n);
    }
  }
  for (int64_t place = std::max(first, groups.with_adapter()); place < last; ++place) {
    finish(kernels, p, groups.token(place), begin, n, nullptr);
  }
}

}  // namespace

void AdapterGroups::build(const int64_t* adapters, int64_t count) {
  const auto at = [](int64_t i) { return static_cast<size_t>(i); };
  tokens_.resize(at(count)), places_.resize(at(count)), groups_.clear();
  std::iota(tokens_.begin(), tokens_.end(), 0);
  // -1, which is none, becomes the largest; a token's number keeps the order among equals
  const auto key = [&](int64_t token) { return static_cast<uint64_t>(adapters[token]); };
  std::ranges::sort(tokens_, [&](int64_t one, int64_t other) {
    return key(one) != key(other) ? key(one) < key(other) : one < other;
  });
  for (int64_t place = 0; place < count; ++place) {
    const int64_t token = tokens_[at(place)], adapter = adapters[token];
    places_[at(token)] = place;
    if (adapter < 0) continue;
    if (groups_.empty() || groups_.back().adapter != adapter)
      groups_.push_back({adapter, place, place});
    groups_.back().end = place + 1;
  }
}

int64_t shrink_units(const AdapterGroups& groups, const LoraProjection& p) {
  int64_t units = 0;
  for (const auto& group : groups.groups()) units += units_of(group, p.weights[group.adapter]);
  return units;
}

void shrink(const KernelTable& kernels, const AdapterGroups& groups, const LoraProjection& p,
            int64_t begin, int64_t end) {
  int64_t offset = 0;  // of the group's units among all
  for (const auto& group : groups.groups()) {
    const LoraWeight& lora = p.weights[group.adapter];
    const int64_t units = units_of(group, lora), row_blocks = ceil_div(lora.rank, kShrinkRows);
    const int64_t last = std::min(end - offset, units);
    for (int64_t unit = std::max(begin - offset, int64_t{0}); unit < last; ++unit) {
      const int64_t row = unit % row_blocks * kShrinkRows;
      const int64_t place = group.begin + unit / row_blocks * kShrinkTokens;
      shrink_block(kernels, p, group, row, std::min(row + kShrinkRows, lora.rank), place,
                   std::min(place + kShrinkTokens, group.end));
    }
    offset += units;
  }
}

int64_t expand_units(const AdapterGroups& groups, const LoraProjection& p) {
  const int64_t places = p.residual == nullptr ? groups.with_adapter() : groups.count();
  return ceil_div(places, kExpandTokens) * ceil_div(p.rows, kExpandRows);
}

void expand(const KernelTable& kernels, const AdapterGroups& groups, const LoraProjection& p,
            int64_t begin, int64_t end) {
  const int64_t places = p.residual == nullptr ? groups.with_adapter() : groups.count();
  const int64_t row_blocks = ceil_div(p.rows, kExpandRows);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit / row_blocks * kExpandTokens;
    const int64_t row = unit % row_blocks * kExpandRows;
    expand_block(kernels, groups, p, first, std::min(first + kExpandTokens, places), row,
                 std::min(kExpandRows, p.rows - row));
  }
}

}  // namespace bitnet::engine
