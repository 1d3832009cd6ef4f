// One token x the columns of a matrix, but those that meet a 0 (format/layout.h). Uses tiles.inl.
//
// A line is one k of 256 rows. Four lines, interleaved, are what a k-step of `2bit` tiles is: each
// lane holds four k of a row, so the decoder is that of tiles. Lines of the list lie anywhere in a
// panel, where no hardware prefetcher expects them, so they are asked for long before.

constexpr int64_t kColumnLine = layout::kColumnBytes;
constexpr int kColumnPieces = static_cast<int>(kColumnLine / kStepBytes);  // registers of a line
constexpr int kColumnSteps = 4;      // that four registers, one of each line, become
constexpr int64_t kColumnGroup = 4;  // lines of a step
static_assert(kColumnLine % kStepBytes == 0 &&
              TwoBit::kFields * kColumnLine == layout::kColumnRows);

// Lines that are asked for ahead. 64 to 256 were equal within 5 % on Zen 4.
constexpr int64_t kColumnsAhead = 128;

// Of a panel: [piece][step][dot][lane].
struct ColumnSums {
  alignas(64) int32_t at[kColumnPieces][kColumnSteps][TwoBit::kDots][kTileLanes];
};

// Prefetches lines of the list from `ahead` items behind item i on; behind the list's end those of
// the next panel.
struct ColumnFetch {
  const ColumnJob& job;
  const uint8_t *panel, *next;  // next: `panel` itself if it is the last

  void line(int64_t item) const {
    const uint8_t* from = panel;
    if (item >= job.count) {
      item -= job.count;
      from = next;
    }
    if (item < job.count) prefetch_l2(from + job.at[item] * kColumnLine);
  }
  void group(int64_t i) const {
    for (int64_t j = 0; j < kColumnGroup; ++j) line(i + kColumnsAhead + j);
  }
};

// Adds one piece of the lines [begin, end) to the sums: HN halves of its four steps, from half H
// on.
template <int H, int HN, bool kFetch>
[[gnu::noinline]] void add_columns(const ColumnFetch& fetch, const uint8_t* piece, int64_t begin,
                                   int64_t end, int32_t (*sums)[TwoBit::kDots][kTileLanes]) {
  constexpr int kSteps = HN * kColumnSteps / 2;
  TileAcc acc[kSteps][TwoBit::kDots][1];
  repeat<kSteps>([&]<int s>() BITNET_INLINE_LAMBDA { clear_accs(acc[s]); });
#pragma GCC unroll 1
  for (int64_t i = begin; i < end; i += kColumnGroup) {
    if constexpr (kFetch) fetch.group(i);
    const int32_t* at = fetch.job.at + i;
    const TileStep a = load_step(piece + at[0] * kColumnLine);
    const TileStep b = load_step(piece + at[1] * kColumnLine);
    const TileStep c = load_step(piece + at[2] * kColumnLine);
    const TileStep d = load_step(piece + at[3] * kColumnLine);
    repeat<HN>([&]<int h>() BITNET_INLINE_LAMBDA {
      TileStep two[2];
      zip_lines<H + h>(a, b, c, d, two);
      repeat<2>([&]<int s>() BITNET_INLINE_LAMBDA {
        const auto prepared = TwoBit::prepare(two[s]);
        add_step<TwoBit, 0, TwoBit::kDots, 1>(prepared, fetch.job.x + i, 0, acc[2 * h + s]);
      });
    });
  }
  repeat<kSteps * TwoBit::kDots>([&]<int I>() BITNET_INLINE_LAMBDA {
    constexpr int s = I / TwoBit::kDots, f = I % TwoBit::kDots;
    int32_t* to = sums[H * kColumnSteps / 2 + s][f];
    store_sum(to, add_sum(load_sum(to), tile_acc_sum(acc[s][f][0])));
  });
}

// out[256] = the panel's sums. Lane l of step s is row 16 (l / 4) + 4 s + l % 4 of its piece.
inline void finish_columns(const ColumnSums& sums, int32_t x_sum, int32_t* out) {
  alignas(64) int32_t lanes[kTileLanes];
  for (int piece = 0; piece < kColumnPieces; ++piece) {
    for (int step = 0; step < kColumnSteps; ++step) {
      TileSum s[TwoBit::kDots];
#pragma GCC unroll 8
      for (int f = 0; f < TwoBit::kDots; ++f) s[f] = load_sum(sums.at[piece][step][f]);
      TwoBit::finish(s);
      for (int f = 0; f < TwoBit::kFields; ++f) {
        store_sum(lanes, sub_sum(s[f], set1_sum(x_sum * TwoBit::kZeroCode)));
        int32_t* to = out + f * kColumnLine + piece * kStepBytes + 4 * step;
        for (int64_t l = 0; l < kTileLanes; l += 4)
          __builtin_memcpy(to + 4 * l, lanes + l, 4 * sizeof *lanes);
      }
    }
  }
}

inline void column_product(const ColumnJob& job) {
  // If a line is one register, its sums stay in registers. Else several passes read a few lines at
  // a time, which stay in L1 between the passes.
  constexpr bool kAtOnce = kColumnPieces == 1;
  constexpr int64_t kFew = 16 * kColumnGroup, kFlush = TwoBit::kFlush * kColumnGroup;
  constexpr int64_t kBlock = kAtOnce || kFlush < kFew ? kFlush : kFew;
  const int64_t count = (job.count + kColumnGroup - 1) / kColumnGroup * kColumnGroup;
  const int64_t panel_bytes = job.k * kColumnLine;
  for (int64_t i = 0; i < kColumnsAhead && i < job.count; ++i)
    prefetch_l2(job.columns + job.at[i] * kColumnLine);
  for (int64_t p = 0; p < job.panels; ++p) {
    const uint8_t* panel = job.columns + p * panel_bytes;
    const ColumnFetch fetch{job, panel, p + 1 == job.panels ? panel : panel + panel_bytes};
    ColumnSums sums{};
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t end = count - begin < kBlock ? count : begin + kBlock;
      repeat<kColumnPieces>([&]<int piece>() BITNET_INLINE_LAMBDA {
        const uint8_t* from = panel + piece * kStepBytes;
        if constexpr (kColumnHalves == 2) {
          add_columns<0, 2, piece == 0>(fetch, from, begin, end, sums.at[piece]);
        } else {
          add_columns<0, 1, piece == 0>(fetch, from, begin, end, sums.at[piece]);
          add_columns<1, 1, false>(fetch, from, begin, end, sums.at[piece]);
        }
      });
    }
    finish_columns(sums, job.x_sum, job.out + p * layout::kColumnRows);
  }
}

inline int64_t list_nonzero(const int8_t* q, int64_t n, int32_t* at, int8_t* x) {
  int64_t count = 0, i = 0;
  for (; i + kTokenStep <= n; i += kTokenStep)
    count += list_step(q + i, static_cast<int32_t>(i), at + count, x + count);
  for (; i < n; ++i) {
    at[count] = static_cast<int32_t>(i);
    x[count] = q[i];
    count += q[i] != 0;
  }
  for (int64_t pad = count; pad % kColumnGroup != 0; ++pad) {
    at[pad] = 0;
    x[pad] = 0;
  }
  return count;
}
