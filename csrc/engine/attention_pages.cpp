// Choosing pages; see attention_pages.h.
#include "engine/attention_pages.h"

#include <algorithm>
#include <atomic>

namespace bitnet::engine {

PageChooser::Memory PageChooser::take(const AttentionCut& cut, BumpAllocator& memory) {
  const int64_t dim = cut.shape().dim, pages = cut.max_pages();
  const int64_t tokens = std::max(cut.max_choosing(), cut.shape().kv_heads);
  return {.queries = memory.take<float>(cut.rows_per_token() * dim),
          .sums = memory.take<float>(tokens * 2 * dim),
          .scores = memory.take<float>(tokens * attention_padded(pages)),
          .tokens = memory.take<uint64_t>(pages),
          .ids = memory.take<int32_t>(pages),
          .pages = PageMemory::take(memory, pages)};
}

int64_t PageChooser::floats(const AttentionCut& cut) {
  BumpAllocator memory(nullptr);
  if (cut.choices() > 0) take(cut, memory);
  return memory.used() / static_cast<int64_t>(sizeof(float));
}

PageChooser::PageChooser(const AttentionCut& cut, const KernelTable& kernels, const CachePool& pool,
                         const void* query, float* shared, int64_t* pages_read,
                         float* thread_memory)
    : cut_(cut),
      kernels_(kernels),
      pool_(pool),
      query_(query),
      shared_(shared),
      pages_read_(pages_read) {
  BumpAllocator memory(reinterpret_cast<char*>(thread_memory));
  memory_ = take(cut, memory);
}

void PageChooser::choose(int64_t begin, int64_t end) const {
  const auto last = static_cast<size_t>(end);
  for (auto i = static_cast<size_t>(begin); i < last;) {
    size_t j = i + 1;
    while (j < last && cut_.choosing(i).tokens == 1 &&
           cut_.choosing(j).token == cut_.choosing(i).token)
      ++j;
    choose_together(i, j);
    i = j;
  }
}

// A page's bounds of all KV heads lie side by side, so several heads together read one stream.
void PageChooser::choose_together(size_t first, size_t last) const {
  const int64_t dim = cut_.shape().dim, per_block = pool_.block_size / kAttentionChunk;
  const int64_t stride = attention_padded(cut_.max_pages());
  const int64_t tokens = cut_.choosing(first).tokens;
  float* sums = memory_.sums;
  for (size_t i = first; i < last; ++i) {
    for (int64_t t = 0; t < tokens; ++t, sums += 2 * dim) {
      const int64_t at =
          ((cut_.choosing(i).token + t) * cut_.shape().kv_heads + cut_.choosing(i).kv_head) *
          cut_.rows_per_token() * dim;
      kernels_.load_row(cut_.shape().query_type,
                        offset_bytes(query_, at * element_size(cut_.shape().query_type)),
                        cut_.rows_per_token() * dim, memory_.queries);
      add_queries(memory_.queries, cut_.rows_per_token(), dim, cut_.shape().scale, sums);
    }
  }
  const int64_t* blocks = cut_.sequences().blocks(cut_.choosing(first).sequence);
  const auto bounds_of = [&](int64_t page) {  // of the first KV head
    return pool_.bounds.at(blocks[page / per_block], page % per_block,
                           cut_.choosing(first).kv_head);
  };
  constexpr int64_t kPages = 4;  // at once
  const int64_t others = (cut_.choosing(first).position + tokens - 1) / kAttentionChunk;
  const char *now[kPages], *next[kPages];
  const void* rows[kPages];
  for (int64_t p = 0; p < std::min(kPages, others); ++p) next[p] = bounds_of(p);
  for (int64_t page = 0; page < others; page += kPages) {
    const int64_t count = std::min(kPages, others - page);
    const int64_t ahead = std::min(kPages, others - page - count);
    std::copy_n(next, count, now);
    for (int64_t p = 0; p < ahead; ++p) next[p] = bounds_of(page + count + p);
    for (size_t i = first; i < last; ++i) {
      const int64_t row = static_cast<int64_t>(i - first);
      const int64_t offset = row * pool_.bounds.head_bytes;
      for (int64_t p = 0; p < count; ++p) rows[p] = now[p] + offset;
      for (int64_t p = 0; p < ahead; ++p) {
        for (int64_t at = 0; at < 4 * dim; at += 64) __builtin_prefetch(next[p] + offset + at);
      }
      kernels_.score_rows(memory_.sums + row * tokens * 2 * dim, tokens, rows, count, 2 * dim,
                          memory_.scores + row * tokens * stride + page, stride);
    }
  }
  for (size_t i = first; i < last; ++i) {
    float* scores = memory_.scores + static_cast<int64_t>(i - first) * tokens * stride;
    list_choice(cut_.choosing(i), scores, cut_.choice_of(cut_.choosing(i), shared_));
  }
}

// scores: a row for each token of the group, attention_padded(cut_.max_pages()) apart.
void PageChooser::list_choice(const Group& group, float* scores, Piece* choice) const {
  const int64_t pages = (group.position + group.tokens - 1) / kAttentionChunk + 1;
  std::fill_n(memory_.tokens, pages, uint64_t{0});
  int64_t read = 0;
  for (int64_t t = 0; t < group.tokens; ++t) {
    const int64_t count =
        choose_pages(kernels_, cut_.shape().policy, cut_.rows_per_token(),
                     scores + t * attention_padded(cut_.max_pages()),
                     (group.position + t) / kAttentionChunk + 1, memory_.pages, memory_.ids);
    for (int64_t i = 0; i < count; ++i) memory_.tokens[memory_.ids[i]] |= uint64_t{1} << t;
    read += count;
  }
  int32_t pieces = 0;
  for (int64_t page = 0; page < pages; ++page) {
    if (memory_.tokens[page] == 0) continue;
    choice[++pieces] = {static_cast<int32_t>(page), Piece::kAll, memory_.tokens[page]};
  }
  choice[0] = {pieces, Piece::kAll};
  std::atomic_ref<int64_t>(pages_read_[static_cast<size_t>(group.sequence)])
      .fetch_add(read, std::memory_order_relaxed);
}

}  // namespace bitnet::engine
