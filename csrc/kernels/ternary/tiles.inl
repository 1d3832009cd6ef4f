// The ternary product over tiles of the layouts for CPUs (format/layout.h). Contract: products.h.
//
// A decoder D turns a k-step into D::kDots code vectors. The dot products of each with the tokens
// are summed separately, and D::finish computes the sums of the D::kFields row groups from them. So
// a code vector may be a masked field that keeps its factor, or the raw byte. The sums of a tile
// and up to kMaxTokens tokens are kept in `sums` [token][dot][lane]; registers hold the part that
// is being added, for at most D::kFlush k-steps.

constexpr int kMaxTokens = 6;  // tokens that share the decoding of a k-step
constexpr int64_t kPanelTokens = 64;
constexpr int64_t kStepBytes = kTileLanes * layout::kTileStepK;
constexpr int64_t kStepMultiple = 16;  // a tile has a multiple of so many k-steps

// Decoders with a second form, D::Wide, of fewer dots and more other operations: it is faster at
// several tokens if these operations use other ports.
template <class D>
constexpr int kWideFrom = 0;
template <class D>
  requires requires { typename D::Wide; }
constexpr int kWideFrom<D> = D::kWideFrom;
template <class D, int T>
concept HasWide = requires { typename D::Wide; } && T >= kWideFrom<D>;
// D::Wide, or D where it has none: clang looks a name up even where HasWide forbids its use.
template <class D>
struct WideOr {
  using Type = D;
};
template <class D>
  requires requires { typename D::Wide; }
struct WideOr<D> {
  using Type = typename D::Wide;
};

template <class D>
struct TileSums {
  alignas(64) int32_t at[kMaxTokens][D::kDots][kTileLanes];
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

template <int FN, int T>
[[gnu::always_inline]] inline void clear_accs(TileAcc (&acc)[FN][T]) {
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA { acc[I / T][I % T] = set1_sum(0); });
}

// acc[f - F0][t] += dot f of the prepared k-step with token t, for f from F on.
template <class D, int F, int F0, int FN, int T>
[[gnu::always_inline]] inline void add_fields(const typename D::Prepared& prepared,
                                              const TileX (&x)[T], TileAcc (&acc)[FN][T]) {
  if constexpr (F < F0 + FN) {
    const TileCodes c = D::template codes<F>(prepared);
    repeat<T>([&]<int t>()
                  BITNET_INLINE_LAMBDA { acc[F - F0][t] = tile_dot(acc[F - F0][t], c, x[t]); });
    add_fields<D, F + 1, F0, FN, T>(prepared, x, acc);
  }
}

// The dots F.. of a prepared k-step.
template <class D, int F, int FN>
[[gnu::always_inline]] inline void take_codes(const typename D::Prepared& prepared,
                                              TileCodes (&c)[FN]) {
  repeat<FN>([&]<int f>() BITNET_INLINE_LAMBDA { c[f] = D::template codes<F + f>(prepared); });
}

// acc[f][t] += c[f] times token t, for t from `first` on: one token in registers at a time.
template <int first, int FN, int T>
[[gnu::always_inline]] inline void add_token(const TileCodes (&c)[FN], const int8_t* x,
                                             int64_t x_stride, TileAcc (&acc)[FN][T]) {
  if constexpr (first < T) {
    const TileX a = broadcast_x(x + first * x_stride);
    repeat<FN>([&]<int f>()
                   BITNET_INLINE_LAMBDA { acc[f][first] = tile_dot(acc[f][first], c[f], a); });
    add_token<first + 1>(c, x, x_stride, acc);
  }
}

template <class D, int F0, int FN, int T>
[[gnu::always_inline]] inline void add_step(const typename D::Prepared& prepared, const int8_t* x,
                                            int64_t x_stride, TileAcc (&acc)[FN][T]) {
  if constexpr (kFewRegisters && FN <= 2) {  // all tokens in registers would spill a sum
    TileCodes c[FN];
    take_codes<D, F0>(prepared, c);
    add_token<0>(c, x, x_stride, acc);
  } else {
    TileX a[T];
    repeat<T>([&]<int t>() BITNET_INLINE_LAMBDA { a[t] = broadcast_x(x + t * x_stride); });
    add_fields<D, F0, F0, FN, T>(prepared, a, acc);
  }
}

template <class D, int T>
void finish_tile(const TileSums<D>& sums, const int32_t* x_sum, int32_t* out, int64_t out_stride) {
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

// Calls f.template operator()<T>() for a T that is known at run time.
template <int kLargest, class F>
[[gnu::always_inline]] inline void with_tokens(int64_t tokens, const F& f) {
  if constexpr (kLargest > 1) {
    if (tokens < kLargest) return with_tokens<kLargest - 1>(tokens, f);
  }
  f.template operator()<kLargest>();
}

// Cuts tokens into the fewest groups of at most kLargest, nearly equal, so that more tokens never
// cost less. kTogether tokens cost as much as one, so they stay together.
template <int kLargest, int kTogether = 1, class F>
inline void for_token_groups(int64_t tokens, const F& f) {
  const int64_t groups = (tokens + kLargest - 1) / kLargest;
  for (int64_t g = 0, at = 0; g < groups; ++g) {
    const int64_t left = groups - g, parts = (tokens - at + kTogether - 1) / kTogether;
    const int64_t whole = (parts + left - 1) / left * kTogether;
    const int64_t size = whole < tokens - at ? whole : tokens - at;
    with_tokens<kLargest>(size, [&]<int T>() { f.template operator()<T>(at); });
    at += size;
  }
}
