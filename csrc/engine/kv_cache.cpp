// Cache writes; see kv_cache.h.
#include "engine/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "kernels/dispatch.h"
#include "runtime/parallel.h"

namespace bitnet::engine {
namespace {

// Elements [first, first + count) of a row into its place in a panel; first and count are multiples
// of a word's elements, but for the last piece.
template <class T>
void put_in_panel(bool keys, const T* codes, int64_t first, int64_t count, int64_t dim,
                  int64_t position, char* panel) {
  constexpr int64_t kWord = 4, kEach = kWord / static_cast<int64_t>(sizeof(T));
  const auto put = [](char* to, const T* from, size_t bytes) { std::memcpy(to, from, bytes); };
  if (keys) {
    for (int64_t i = 0; i < count; i += kEach) {
      const int64_t word = (first + i) / kEach * kPanelPositions + position;
      put(panel + word * kWord, codes + i, kWord);
    }
    return;
  }
  // Neighbouring positions share a word: only its own part of it is written.
  char* to = panel + (position / kEach * dim + first) * kWord +
             position % kEach * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; ++i) put(to + i * kWord, codes + i, sizeof(T));
}

void store_in_panel(const KernelTable& kernels, const CachePool& pool, bool keys, int64_t slot,
                    int64_t head, const float* row) {
  const PoolView& view = keys ? pool.keys : pool.values;
  const int64_t block = slot / pool.block_size, at = slot % pool.block_size;
  const int64_t position = at % kPanelPositions;
  char* panel = view.at(block, at - position, head);
  if (pool.scaled()) {
    int8_t codes[kMaxInt8Dim];
    const PoolView& scales = keys ? pool.key_scales : pool.value_scales;
    *reinterpret_cast<float*>(scales.at(block, at, head)) =
        kernels.head_quantize_int8(row, pool.dim, codes);
    return put_in_panel(keys, codes, 0, pool.dim, pool.dim, position, panel);
  }
  constexpr int64_t kPiece = 256;
  for (int64_t i = 0; i < pool.dim; i += kPiece) {
    uint16_t codes[kPiece];
    const int64_t count = std::min(kPiece, pool.dim - i);
    kernels.store_cache_row(pool.type, row + i, count, codes);
    put_in_panel(keys, codes, i, count, pool.dim, position, panel);
  }
}

void store_row(const KernelTable& kernels, const CachePool& pool, const PoolView& rows,
               const PoolView& scales, int64_t slot, int64_t head, const float* row) {
  const int64_t block = slot / pool.block_size, position = slot % pool.block_size;
  char* to = rows.at(block, position, head);
  if (!pool.scaled()) return kernels.store_cache_row(pool.type, row, pool.dim, to);
  *reinterpret_cast<float*>(scales.at(block, position, head)) =
      kernels.head_quantize_int8(row, pool.dim, reinterpret_cast<int8_t*>(to));
}

// What put_in_panel has put there.
template <class T>
void take_from_panel(const char* panel, int64_t dim, int64_t position, T* codes) {
  constexpr int64_t kWord = 4, kEach = kWord / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < dim; i += kEach)
    std::memcpy(codes + i, panel + (i / kEach * kPanelPositions + position) * kWord, kWord);
}

// One head's key as attention reads it.
void load_key(const KernelTable& kernels, const CachePool& pool, int64_t block, int64_t at,
              int64_t head, float* row) {
  alignas(4) int8_t codes[kMaxInt8Dim];
  const int64_t position = at % kPanelPositions;
  const char* from = pool.keys.at(block, pool.in_panels() ? at - position : at, head);
  if (pool.scaled()) {
    if (pool.in_panels()) {
      take_from_panel(from, pool.dim, position, codes);
      from = reinterpret_cast<const char*>(codes);
    }
    const float scale = *reinterpret_cast<const float*>(pool.key_scales.at(block, at, head));
    for (int64_t i = 0; i < pool.dim; ++i)
      row[i] = static_cast<float>(reinterpret_cast<const int8_t*>(from)[i]) * scale;
    return;
  }
  if (!pool.in_panels()) return kernels.load_row(pool.type, from, pool.dim, row);
  auto* halves = reinterpret_cast<uint16_t*>(row) + pool.dim;  // widened from the front on
  take_from_panel(from, pool.dim, position, halves);
  kernels.load_row(pool.type, halves, pool.dim, row);
}

// The bfloat16 next to x that is not below it, or, with `down`, not above.
uint16_t rounded_away(float x, bool down) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fc0;
  const bool negative = (bits >> 31) != 0;
  if ((bits & 0xffff) != 0 && negative == down) bits += 0x10000;  // away from zero
  return static_cast<uint16_t>(bits >> 16);
}

}  // namespace

void bound_page(const KernelTable& kernels, const CachePool& pool, int64_t page, int64_t head,
                float* row) {
  const int64_t dim = pool.dim, pages = pool.block_size / kAttentionChunk, block = page / pages;
  float *key = row, *max = row + dim, *min = max + dim;
  for (int64_t p = 0; p < kAttentionChunk; ++p) {
    load_key(kernels, pool, block, page % pages * kAttentionChunk + p, head, key);
    for (int64_t i = 0; i < dim; ++i) {
      const float x = key[i];  // a NaN stays
      max[i] = p == 0 || x > max[i] || x != x ? x : max[i];
      min[i] = p == 0 || x < min[i] || x != x ? x : min[i];
    }
  }
  auto* to = reinterpret_cast<uint16_t*>(pool.bounds.at(block, page % pages, head));
  for (int64_t i = 0; i < dim; ++i) {
    to[i] = rounded_away(max[i], false);
    to[dim + i] = rounded_away(min[i], true);
  }
}

void find_filled_pages(const int64_t* slots, int64_t count, std::vector<int64_t>& pages) {
  pages.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] % kAttentionChunk == kAttentionChunk - 1)
      pages.push_back(slots[i] / kAttentionChunk);
  }
}

void store_cache_rows(const KernelTable& kernels, const CachePool& pool, int64_t slot, int64_t head,
                      const float* key, const float* value) {
  if (pool.in_panels()) {
    store_in_panel(kernels, pool, true, slot, head, key);
    return store_in_panel(kernels, pool, false, slot, head, value);
  }
  store_row(kernels, pool, pool.keys, pool.key_scales, slot, head, key);
  store_row(kernels, pool, pool.values, pool.value_scales, slot, head, value);
}

void write_cache(const Rows& keys, const Rows& values, const int64_t* slots, int64_t heads,
                 const CachePool& pool) {
  const KernelTable& kernels = active_kernels();
  const int64_t dim = pool.dim;
  parallel_rows(keys.count, 2 * dim, 2 * dim, [&](int64_t i, float* row) {
    kernels.load_row(keys.type, keys.at(i), dim, row);
    kernels.load_row(values.type, values.at(i), dim, row + dim);
    store_cache_rows(kernels, pool, slots[i / heads], i % heads, row, row + dim);
  });
}

void bound_pages(const int64_t* slots, int64_t count, int64_t heads, const CachePool& pool) {
  std::vector<int64_t> pages;
  find_filled_pages(slots, count, pages);
  const KernelTable& kernels = active_kernels();
  const int64_t dim = pool.dim, units = static_cast<int64_t>(pages.size()) * heads;
  parallel_rows(units, kAttentionChunk * dim, 3 * dim, [&](int64_t i, float* row) {
    bound_page(kernels, pool, pages[static_cast<size_t>(i / heads)], i % heads, row);
  });
}

}  // namespace bitnet::engine
