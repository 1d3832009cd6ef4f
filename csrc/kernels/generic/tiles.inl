// The ternary product over private tiles (format/layout.h).  Included inside an ISA's anonymous
// namespace; never mentions an ISA.  See tile_gemm in kernel_table.h for the contract.
//
// A decoder D turns a line into D::kDots code vectors; the dot products of each with the tokens are
// summed separately and D::finish makes the sums of the D::kFields row groups of them, so a code
// vector may be a masked field that keeps its factor, or the raw byte.  The sums of a tile and up
// to kMaxGroup tokens are kept in `sums` [token][dot][lane]; registers hold the part that is being
// added, for at most D::kFlush lines.

constexpr int kMaxGroup = 6;  // tokens that share the decoding of a line
constexpr int64_t kPanelTokens = 64;
constexpr int64_t kLineBytes = kTileLanes * layout::kTileStepK;
constexpr int64_t kTileBlock = 16;  // a tile has a multiple of so many lines

template <class D>
struct TileSums {
  alignas(64) int32_t at[kMaxGroup][D::kDots][kTileLanes];
};

// f.template operator()<0>() ... <N - 1>().  Indices that are constants from the start keep arrays
// of vectors in registers; g++ 12 leaves them in memory where nested loops are unrolled later.
template <int N, int I = 0, class F>
[[gnu::always_inline]] inline void repeat(const F& f) {
  if constexpr (I < N) {
    f.template operator()<I>();
    repeat<N, I + 1>(f);
  }
}

#define BITNET_INLINE_LAMBDA __attribute__((always_inline))

template <int FN, int T>
[[gnu::always_inline]] inline void clear_parts(TilePart (&part)[FN][T]) {
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA { part[I / T][I % T] = tile_part_zero(); });
}

// part[f - F0][t] += dot f of the split line with token t, for f from F on.
template <class D, int F, int F0, int FN, int T>
[[gnu::always_inline]] inline void add_fields(const typename D::Split& split, const TileX (&x)[T],
                                              TilePart (&part)[FN][T]) {
  if constexpr (F < F0 + FN) {
    const TileCodes c = D::template codes<F>(split);
    repeat<T>([&]<int t>()
                  BITNET_INLINE_LAMBDA { part[F - F0][t] = tile_dot(part[F - F0][t], c, x[t]); });
    add_fields<D, F + 1, F0, FN, T>(split, x, part);
  }
}

template <class D, int F0, int FN, int T>
[[gnu::always_inline]] inline void add_line(const typename D::Split& split, const int8_t* x,
                                            int64_t x_stride, TilePart (&part)[FN][T]) {
  TileX a[T];
  repeat<T>([&]<int t>() BITNET_INLINE_LAMBDA { a[t] = broadcast_x(x + t * x_stride); });
  add_fields<D, F0, F0, FN, T>(split, a, part);
}

// parts += lines [0, count) of dots F0 .. F0 + FN - 1 x T tokens; U lines at a time, each with
// parts of its own so that one sum need not wait for the last.  kPrefetch: this pass meets the
// weights first.
template <class D, int F0, int FN, int T, int U, bool kPrefetch>
[[gnu::always_inline]] inline void add_lines(const uint8_t* w, int64_t count, const int8_t* x,
                                             int64_t x_stride, int64_t ahead,
                                             TilePart (&part)[U][FN][T]) {
#pragma GCC unroll 1
  for (int64_t s = 0; s < count; s += U) {
    if constexpr (kPrefetch) {
      // one request per cache line of 64 bytes
      if (U * kLineBytes >= 64 || s * kLineBytes % 64 == 0) {
#pragma GCC unroll 4
        for (int64_t b = 0; b < U * kLineBytes; b += 64) prefetch(w + s * kLineBytes + ahead + b);
      }
    }
    repeat<U>([&]<int u>() BITNET_INLINE_LAMBDA {
      const auto split = D::split(load_line(w + (s + u) * kLineBytes));
      add_line<D, F0, FN, T>(split, x + (s + u) * layout::kTileStepK, x_stride, part[u]);
    });
  }
}

template <class D, int F0, int FN, int T, int U, bool kPrefetch>
[[gnu::always_inline]] inline void add_block(const uint8_t* w, int64_t count, bool first,
                                             const int8_t* x, int64_t x_stride, int64_t ahead,
                                             TileSums<D>& sums) {
  TilePart part[U][FN][T];
  repeat<U>([&]<int u>() BITNET_INLINE_LAMBDA { clear_parts(part[u]); });
  add_lines<D, F0, FN, T, U, kPrefetch>(w, count, x, x_stride, ahead, part);
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA {
    constexpr int f = I / T, t = I % T;
    TileSum sum = part_sum(part[0][f][t]);
    repeat<U - 1>([&]<int u>()
                      BITNET_INLINE_LAMBDA { sum = add_sum(sum, part_sum(part[u + 1][f][t])); });
    int32_t* to = sums.at[t][F0 + f];
    store_sum(to, first ? sum : add_sum(sum, load_sum(to)));
  });
}

// Decoding on the fly: all dots in one pass where the parts fit the registers, else two passes over
// a block that is then in L1.
template <class D, int T>
[[gnu::noinline]] void group_direct(const uint8_t* w, int64_t lines, const int8_t* x,
                                    int64_t x_stride, int64_t ahead, TileSums<D>& sums) {
  constexpr int U = T == 1 ? D::kUnroll : 1;
  constexpr bool kOnePass = D::kDots * T <= kTileParts;
  constexpr int kHalf = kOnePass ? D::kDots : (D::kDots + 1) / 2;
  constexpr int64_t kBlock = kOnePass ? D::kFlush : (D::kFlush < 128 ? D::kFlush : 128);
  int64_t s = 0;
  do {  // lines > 0
    const int64_t left = lines - s < kBlock ? lines - s : kBlock;
    const int64_t count = kBlock == kTileBlock ? kTileBlock : left;
    const uint8_t* ws = w + s * kLineBytes;
    const int8_t* xs = x + s * layout::kTileStepK;
    add_block<D, 0, kHalf, T, U, true>(ws, count, s == 0, xs, x_stride, ahead, sums);
    if constexpr (!kOnePass) {
      add_block<D, kHalf, D::kDots - kHalf, T, U, false>(ws, count, s == 0, xs, x_stride, 0, sums);
    }
    s += kBlock;
  } while (s < lines);
}

// One token x S tiles, `apart` bytes from one to the next, two lines of each in turn: as many
// streams of reading, which some CPUs serve faster than one.  Sums stay in registers where they
// fit.
template <class D, int S>
[[gnu::noinline]] void token_streams(const uint8_t* w, int64_t apart, int64_t lines,
                                     const int8_t* x, int64_t ahead, TileSums<D>* sums) {
  constexpr int kParts = S * D::kDots;
  constexpr bool kInRegisters = 2 * kParts <= kTileParts;
  TileSum total[kParts];
  repeat<kParts>([&]<int i>() BITNET_INLINE_LAMBDA { total[i] = set1_sum(0); });
  for (int64_t b = 0; b < lines; b += kTileBlock) {
    TilePart part[S][D::kDots][1];
    repeat<S>([&]<int s>() BITNET_INLINE_LAMBDA { clear_parts(part[s]); });
    const uint8_t* wb = w + b * kLineBytes;
    const int8_t* xb = x + b * layout::kTileStepK;
#pragma GCC unroll 1
    for (int64_t l = 0; l < kTileBlock; l += 2) {
      repeat<S>([&]<int s>() BITNET_INLINE_LAMBDA {
        const uint8_t* ws = wb + s * apart + l * kLineBytes;
        for (int64_t at = 0; at < 2 * kLineBytes; at += 64) prefetch(ws + ahead + at);
        repeat<2>([&]<int k>() BITNET_INLINE_LAMBDA {
          const auto split = D::split(load_line(ws + k * kLineBytes));
          add_line<D, 0, D::kDots, 1>(split, xb + (l + k) * layout::kTileStepK, 0, part[s]);
        });
      });
    }
    repeat<kParts>([&]<int i>() BITNET_INLINE_LAMBDA {
      const TileSum sum = part_sum(part[i / D::kDots][i % D::kDots][0]);
      if constexpr (kInRegisters) {
        total[i] = add_sum(total[i], sum);
      } else {
        int32_t* to = sums[i / D::kDots].at[0][i % D::kDots];
        store_sum(to, b == 0 ? sum : add_sum(sum, load_sum(to)));
      }
    });
  }
  if constexpr (kInRegisters) {
    repeat<kParts>([&]<int i>() BITNET_INLINE_LAMBDA {
      store_sum(sums[i / D::kDots].at[0][i % D::kDots], total[i]);
    });
  }
}

template <class D, int T>
void finish_group(const TileSums<D>& sums, const int32_t* x_sum, int32_t* out, int64_t out_stride) {
  for (int t = 0; t < T; ++t) {
    TileSum s[D::kDots];
#pragma GCC unroll 8
    for (int f = 0; f < D::kDots; ++f) s[f] = load_sum(sums.at[t][f]);
    D::finish(s);
    const TileSum zeros = set1_sum(x_sum[t] * D::kZeroCode);
#pragma GCC unroll 8
    for (int f = 0; f < D::kFields; ++f) {
      store_sum(out + t * out_stride + f * kTileLanes, sub_sum(s[f], zeros));
    }
  }
}

// T tokens x every tile.
template <class D, int T>
void tiles_direct(const TileJob& job, int64_t token) {
  TileSums<D> sums;
  const int64_t tile_bytes = job.lines * kLineBytes;
  for (int64_t i = 0; i < job.tile_count; ++i) {
    group_direct<D, T>(job.tiles + i * tile_bytes, job.lines, job.x + token * job.x_stride,
                       job.x_stride, job.prefetch_bytes, sums);
    finish_group<D, T>(sums, job.x_sum + token,
                       job.out + token * job.out_stride + i * D::kFields * kTileLanes,
                       job.out_stride);
  }
}

// One token x every tile, in S streams of equally many consecutive tiles, then what is left over.
template <class D, int S>
void tiles_in_streams(const TileJob& job) {
  TileSums<D> sums[S];
  const int64_t tile_bytes = job.lines * kLineBytes, each = job.tile_count / S;
  const auto finish = [&](const TileSums<D>& tile, int64_t i) {
    finish_group<D, 1>(tile, job.x_sum, job.out + i * D::kFields * kTileLanes, job.out_stride);
  };
  for (int64_t i = 0; i < each; ++i) {
    token_streams<D, S>(job.tiles + i * tile_bytes, each * tile_bytes, job.lines, job.x,
                        job.prefetch_bytes / S, sums);  // as much in flight as from one stream
    for (int s = 0; s < S; ++s) finish(sums[s], i + s * each);
  }
  for (int64_t i = each * S; i < job.tile_count; ++i) {
    token_streams<D, 1>(job.tiles + i * tile_bytes, 0, job.lines, job.x, job.prefetch_bytes, sums);
    finish(sums[0], i);
  }
}

// Calls f.template operator()<T>() for a T that is known at run time.
template <int kLargest, class F>
[[gnu::always_inline]] inline void with_group(int64_t tokens, const F& f) {
  if constexpr (kLargest > 1) {
    if (tokens < kLargest) return with_group<kLargest - 1>(tokens, f);
  }
  f.template operator()<kLargest>();
}

// Cuts tokens into the fewest groups of at most kLargest, as equal as can be, so that more tokens
// never cost less.
template <int kLargest, class F>
inline void for_groups(int64_t tokens, const F& f) {
  const int64_t groups = (tokens + kLargest - 1) / kLargest;
  for (int64_t g = 0, at = 0; g < groups; ++g) {
    const int64_t size = (tokens - at + groups - g - 1) / (groups - g);
    with_group<kLargest>(size, [&]<int T>() { f.template operator()<T>(at); });
    at += size;
  }
}

// ---- a block of lines decoded to memory, for many tokens
// -----------------------------------------

template <class D>
struct Panel {
  alignas(64) uint8_t codes[D::kFields][D::kPanelLines][kLineBytes];  // decoded lines
  alignas(64) int32_t sums[kPanelTokens][D::kFields][kTileLanes];
};

template <class D, int F = 0>
[[gnu::always_inline]] inline void store_fields(const typename D::Split& split, int64_t line,
                                                Panel<D>& panel) {
  if constexpr (F < D::kFields) {
    store_line(panel.codes[F][line], D::template codes<F>(split));
    store_fields<D, F + 1>(split, line, panel);
  }
}

template <class D>
void fill_panel(const uint8_t* w, int64_t count, int64_t ahead, Panel<D>& panel) {
  for (int64_t s = 0; s < count; ++s) {
    if (s * kLineBytes % 64 == 0) prefetch(w + s * kLineBytes + ahead);
    store_fields<D>(D::split(load_line(w + s * kLineBytes)), s, panel);
  }
}

// part[f][t] += c[f] times token t, for t from `first` on.
template <int first, int FN, int T>
[[gnu::always_inline]] inline void add_token(const TileCodes (&c)[FN], const int8_t* x,
                                             int64_t x_stride, TilePart (&part)[FN][T]) {
  if constexpr (first < T) {
    const TileX a = broadcast_x(x + first * x_stride);
    repeat<FN>([&]<int f>()
                   BITNET_INLINE_LAMBDA { part[f][first] = tile_dot(part[f][first], c[f], a); });
    add_token<first + 1>(c, x, x_stride, part);
  }
}

// tile_dot keeps its part in place by itself.  Not inlined: in one large function g++ 12 gives up
// on keeping parts in registers.
template <class D, int F0, int FN, int T>
[[gnu::noinline]] void add_panel(const Panel<D>& panel, int64_t count, bool first, const int8_t* x,
                                 int64_t x_stride, int32_t (*sums)[D::kFields][kTileLanes]) {
  TilePart part[FN][T];
  clear_parts(part);
  for (int64_t s = 0; s < count; ++s) {
    TileCodes c[FN];
    repeat<FN>([&]<int f>() BITNET_INLINE_LAMBDA { c[f] = load_line(panel.codes[F0 + f][s]); });
    add_token<0>(c, x + s * layout::kTileStepK, x_stride, part);
  }
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA {
    int32_t* to = sums[I % T][F0 + I / T];
    const TileSum sum = part_sum(part[I / T][I % T]);
    store_sum(to, first ? sum : add_sum(sum, load_sum(to)));
  });
}

// D: a decoder whose codes carry no factor, so that its dots are its fields.
template <class D>
void tile_panel(const TileJob& job, int64_t tile, int64_t token, int64_t tokens, Panel<D>& panel) {
  constexpr int kHalf = (D::kFields + 1) / 2;
  constexpr int kGroup = kPanelParts / kHalf < kMaxGroup ? kPanelParts / kHalf : kMaxGroup;
  const uint8_t* w = job.tiles + tile * job.lines * kLineBytes;
  const int8_t* x = job.x + token * job.x_stride;
  for (int64_t s = 0; s < job.lines; s += D::kPanelLines) {
    const int64_t count = job.lines - s < D::kPanelLines ? job.lines - s : D::kPanelLines;
    fill_panel<D>(w + s * kLineBytes, count, job.prefetch_bytes, panel);
    for_groups<kGroup>(tokens, [&]<int T>(int64_t t) {
      const int8_t* xs = x + t * job.x_stride + s * layout::kTileStepK;
      add_panel<D, 0, kHalf, T>(panel, count, s == 0, xs, job.x_stride, panel.sums + t);
      add_panel<D, kHalf, D::kFields - kHalf, T>(panel, count, s == 0, xs, job.x_stride,
                                                 panel.sums + t);
    });
  }
  int32_t* out = job.out + token * job.out_stride + tile * D::kFields * kTileLanes;
  for (int64_t t = 0; t < tokens; ++t) {
    const TileSum zeros = set1_sum(job.x_sum[token + t] * D::kZeroCode);
#pragma GCC unroll 8
    for (int f = 0; f < D::kFields; ++f) {
      store_sum(out + t * job.out_stride + f * kTileLanes,
                sub_sum(load_sum(panel.sums[t][f]), zeros));
    }
  }
}

template <class D>
void tiles_panel(const TileJob& job) {
  Panel<D> panel;
  for (int64_t i = 0; i < job.tile_count; ++i) {
    for (int64_t t = 0; t < job.tokens; t += kPanelTokens) {
      tile_panel<D>(job, i, t, job.tokens - t < kPanelTokens ? job.tokens - t : kPanelTokens,
                    panel);
    }
  }
}

// D1 decodes for one token, DN on the fly for several, DP to memory from kPanelFrom tokens on.
template <class D1, class DN, class DP>
void any_tile_gemm(const TileJob& job) {
  if (job.tokens == 1) {
    if constexpr (kTileStreams > 0) {
      return tiles_in_streams<D1, kTileStreams>(job);
    } else {
      return tiles_direct<D1, 1>(job, 0);
    }
  }
  if constexpr (kPanelFrom > 0) {
    if (job.tokens >= kPanelFrom) return tiles_panel<DP>(job);
  }
  constexpr int kGroup = DN::kGroup;
  for_groups<kGroup>(job.tokens, [&]<int T>(int64_t token) { tiles_direct<DN, T>(job, token); });
}

void tile_gemm(const TileJob& job) {
#if defined(BITNET_MATRIX_UNIT)  // the vocabulary knows an instruction for whole tiles
  if (job.tokens >= kMatrixFrom) return matrix_tile_gemm(job);
#endif
  any_tile_gemm<TwoBit, TwoBit, TwoBitPlain>(job);
}
void trit_tile_gemm(const TileJob& job) { any_tile_gemm<Trits, TritDigits, TritDigits>(job); }
