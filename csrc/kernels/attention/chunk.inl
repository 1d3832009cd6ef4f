// What attention over every kind of cache shares: which positions of a chunk a row sees, which rows
// are processed together, what is prefetched. Contracts and arithmetic: kernel_table.h.

// How far ahead memory is prefetched. The hardware's prefetcher stops at 4 KiB pages.
constexpr int64_t kPrefetchBytes = 8192;

inline const void* row_at(const void* base, int64_t stride_bytes, int64_t row) {
  return static_cast<const char*>(base) + row * stride_bytes;
}

template <DType kType>
inline const void* element_at(const void* row, int64_t i) {
  return static_cast<const char*>(row) + i * element_size(kType);
}

// What to prefetch: what comes next, if that is known, else what is read anyway.
inline const char* ask_first(const void* next, const char* otherwise) {
  return next == nullptr ? otherwise : static_cast<const char*>(next);
}

// `bytes` from `offset` on of a run of memory that continues elsewhere (or nowhere, if null).
[[gnu::always_inline]] inline void prefetch_run(const void* run, int64_t length, const void* next,
                                                int64_t offset, int64_t bytes) {
  const char* from = static_cast<const char*>(run) + offset;
  if (offset >= length) {
    if (next == nullptr) return;
    from = static_cast<const char*>(next) + (offset - length);
  }
  for (int64_t i = 0; i < bytes; i += 64) prefetch_l2(from + i);
}

// The end of the positions of the chunk that a row sees.
inline int64_t positions_seen(const AttentionChunk& c, int64_t row) {
  const int64_t visible = c.first_visible + row / c.rows_per_token;
  return visible < c.positions ? visible : c.positions;
}

// The first position that it sees.
inline int64_t positions_hidden(const AttentionChunk& c, int64_t row) {
  const int64_t hidden = c.first_hidden + row / c.rows_per_token;
  return hidden > 0 ? hidden : 0;
}

// The positions that all of R rows see; if there are none, an empty range at the first row's end.
struct CommonRange {
  int64_t begin, end;
};
inline CommonRange seen_by_all(int64_t last_hidden, int64_t first_seen) {
  return {last_hidden < first_seen ? last_hidden : first_seen, first_seen};
}

// Fewer rows than this do not repay laying out the keys and values.
constexpr int64_t kBlockMinRows = 2 * kBlockRows > 12 ? 2 * kBlockRows : 12;

// attend.template operator()<R>(row) for the rows from `row` on, R together: four, but the last
// five are three and two, not four and one.
template <class Attend>
[[gnu::always_inline]] inline void attend_in_groups(int64_t row, int64_t rows,
                                                    const Attend& attend) {
  while (row < rows) {
    const int64_t left = rows - row;
    const int64_t take = left >= 6 || left == 4 ? 4 : left == 5 ? 3 : left;
    if (take == 4) attend.template operator()<4>(row);
    if (take == 3) attend.template operator()<3>(row);
    if (take == 2) attend.template operator()<2>(row);
    if (take == 1) attend.template operator()<1>(row);
    row += take;
  }
}
