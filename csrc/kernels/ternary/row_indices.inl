// Tables of sums (the method of the Four Russians), and which of them a row of weights adds. Four
// weights of a row are one of 81 combinations. For four inputs, a table holds the 81 sums that they
// can make, as 16-bit numbers, for the tokens of a register; a row adds one line of the table where
// a product would multiply four weights with every token. Uses tiles.inl.

constexpr int64_t kTableSums = 81;
constexpr int64_t kTableSpanK = 64;  // k for which lines are found at once, whole k-steps
constexpr int kTablesAtOnce = 8;     // tables that a row adds together: 32 k
constexpr int64_t kLinesAhead = 4;   // how many tiles ahead to prefetch
// Lines of padding around the tables: the fourth value of 2 bits, which no valid weight has, would
// reach them.
constexpr int64_t kTableDamaged = 40;

// A decoder that an ISA without tables need not have.
template <class U, class D>
struct As {
  using Type = D;
};

// ---- the lines of rows --------------------------------------------------------------------------

// The codes of field F in a register of bytes: 0, 1 or 2 times kFactor, plus an offset. The four of
// a lane are weighed by powers of three.
template <class U>
struct LinesOfFour {
  static constexpr int kFields = 4, kOffset = 0;
  template <int F>
  static constexpr int kFactor = 1 << (2 * F);
  using Prepared = TileStep;
  static Prepared prepare(TileStep v) { return v; }
  template <int F>
  static TileCodes codes(const Prepared& v) {
    return U::masked(v, 3 << (2 * F));
  }
};
template <class U>
struct LinesOfFive {
  using D = typename As<U, Base3Digits>::Type;
  static constexpr int kFields = 5, kOffset = (D::kZeroCode - 1) * 40;
  template <int F>
  static constexpr int kFactor = D::kFactor;
  using Prepared = typename D::Prepared;
  static Prepared prepare(TileStep v) { return D::prepare(v); }
  template <int F>
  static TileCodes codes(const Prepared& v) {
    return D::template codes<F>(v);
  }
};

// Calls f(place, row) for all rows, `place` being where the row's lines and sums are. Within a
// field of a tile, places are in the order in which U stores lines.
template <class U, class F>
[[gnu::always_inline]] inline void for_placed_rows(int64_t rows, const F& f) {
  for (int64_t n = 0; n < rows; n += kTileLanes) {
    repeat<kTileLanes>([&]<int i>() BITNET_INLINE_LAMBDA {
      constexpr int kRow = U::row_at(i);
      f(n + i, n + kRow);
    });
  }
}

// Rows of `tiles` tiles: the lines of k-steps [0, 8) to lines[place][8], those of the next eight to
// lines[rows + place][8]. A line's number is in units of 8 bytes, as an address takes it.
template <class U, class D>
[[gnu::noinline]] void find_row_indices(const uint8_t* w, int64_t tile_bytes, int64_t tiles,
                                        int64_t rows, uint16_t* lines) {
  constexpr int kUnits = U::kTokens * 2 / 8;
  constexpr int64_t kSpanBytes = 2 * kTablesAtOnce * kStepBytes;
  for (int64_t i = 0; i < tiles; ++i, w += tile_bytes) {
    // hardware does not prefetch tiles, which lie apart; the last ones prefetch the next k
    const int64_t next = i + kLinesAhead - tiles;
    const uint8_t* ahead =
        next < 0 ? w + kLinesAhead * tile_bytes : w + (next - i) * tile_bytes + kSpanBytes;
    for (int64_t b = 0; b < kSpanBytes; b += 64) prefetch(ahead + b);
    repeat<2>([&]<int h>() BITNET_INLINE_LAMBDA {
      const uint8_t* from = w + h * kTablesAtOnce * kStepBytes;
      uint16_t* to = lines + (h * rows + i * D::kFields * kTileLanes) * kTablesAtOnce;
      repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
        constexpr int kFactor = D::template kFactor<f>;
        TileSum pairs[kTablesAtOnce / 2];
        const auto codes = [&](int g) BITNET_INLINE_LAMBDA {
          return D::template codes<f>(D::prepare(load_step(from + g * kStepBytes)));
        };
        for (int i = 0; i < kTablesAtOnce / 2; ++i)
          pairs[i] = U::two_lines(codes(2 * i), codes(2 * i + 1));
        constexpr int kLeft = kFactor < kUnits ? __builtin_ctz(kUnits / kFactor) : 0;
        constexpr int kRight = kFactor > kUnits ? __builtin_ctz(kFactor / kUnits) : 0;
        U::template store_lines<kLeft, kRight>(pairs, to + f * kTileLanes * kTablesAtOnce);
      });
    });
  }
}

// ---- tables -------------------------------------------------------------------------------------

// The codes of a block of tokens, 64 k: a word of four for every token, [k / 4][token].
template <class U>
void gather_words(const int8_t* x, int64_t x_stride, int64_t tokens, float* words) {
  for (int64_t t = 0; t < U::kTokens; t += 16) {
    if (t + 16 <= tokens) {
      transpose_16(x + t * x_stride, x_stride, words + t, U::kTokens);
      continue;
    }
    alignas(64) int8_t edge[16][kTableSpanK] = {};
    for (int64_t i = t; i < tokens; ++i)
      __builtin_memcpy(edge[i - t], x + i * x_stride, kTableSpanK);
    transpose_16(edge, kTableSpanK, words + t, U::kTokens);
  }
}

// Builds the table of four inputs and returns the sum of their magnitudes. Not inlined: compared
// with its 81 lines a call costs nothing.
template <class U>
[[gnu::noinline]] typename U::Sums build_table(const float* words, int16_t* table) {
  using Sums = typename U::Sums;
  Sums x[4];
  repeat<4>([&]<int j>() BITNET_INLINE_LAMBDA { x[j] = U::template codes<j>(words); });
  Sums low[9];  // of the first two inputs
  repeat<9>([&]<int i>() BITNET_INLINE_LAMBDA {
    const Sums second = i / 3 == 0 ? U::negative(x[1]) : i / 3 == 1 ? U::zero() : x[1];
    low[i] = i % 3 == 0 ? U::sub(second, x[0]) : i % 3 == 1 ? second : U::add(second, x[0]);
  });
  repeat<9>([&]<int h>() BITNET_INLINE_LAMBDA {
    const Sums fourth = h / 3 == 0 ? U::negative(x[3]) : h / 3 == 1 ? U::zero() : x[3];
    const Sums high = h % 3 == 0   ? U::sub(fourth, x[2])
                      : h % 3 == 1 ? fourth
                                   : U::add(fourth, x[2]);
    repeat<9>([&]<int i>() BITNET_INLINE_LAMBDA {
      U::store(table + (9 * h + i) * U::kTokens, U::add(high, low[i]));
    });
  });
  return U::add(U::add(U::magnitude(x[0]), U::magnitude(x[1])),
                U::add(U::magnitude(x[2]), U::magnitude(x[3])));
}
