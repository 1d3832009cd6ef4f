// Two tokens and more x tiles where one instruction multiplies two rows with two tokens at eight k
// (usmmla of Arm). Overloads of what direct.inl and panel.inl do, for decoders that have Pairs.
// Uses tiles.inl.
//
// Two k-steps become two code vectors of two rows each (Pairs::rows: the lower and the upper half
// of the lanes), before they are decoded. A sum holds two rows of two tokens until its tile ends.

template <class D>
concept TakesPairs = requires { typename D::Pairs; };

// So many tokens share a sum.
template <class D>
constexpr int kTokensTogether = TakesPairs<D> ? 2 : 1;

constexpr int pairs_of(int tokens) { return (tokens + 1) / 2; }

// The decoders for several tokens: those of pairs where the ISA has them.
template <class U>
struct SeveralTokens {
  using TwoBits = TwoBit;
  using TwoBitsPlain = TwoBitPlain;
  using Thirds = Base3;
  using ThirdsDigits = Base3Digits;
};
template <class U>
  requires U::kHere
struct SeveralTokens<U> {
  using TwoBits = typename U::TwoBit;
  using TwoBitsPlain = typename U::TwoBitPlain;
  using Thirds = typename U::Base3;
  using ThirdsDigits = typename U::Base3Digits;
};
using Several = SeveralTokens<TokenPairs>;

// Eight k of T tokens.
template <class U, int T>
[[gnu::always_inline]] inline void load_pairs(const int8_t* x, int64_t x_stride,
                                              typename U::X (&a)[pairs_of(T)]) {
  repeat<pairs_of(T)>([&]<int p>() BITNET_INLINE_LAMBDA {
    const int8_t* at = x + 2 * p * x_stride;
    if constexpr (2 * p + 1 < T) {
      a[p] = U::load(at, at + x_stride);
    } else {
      a[p] = U::load(at);
    }
  });
}

template <class U, int P>
[[gnu::always_inline]] inline void add_pairs(TileCodes c, const typename U::X (&a)[P],
                                             TileAcc (&acc)[P]) {
  repeat<P>([&]<int p>() BITNET_INLINE_LAMBDA {
    acc[p] = U::dot(acc[p], c, a[p]);
    pin(acc[p]);
  });
}

// The sums of dots F0 .. F0 + FN - 1, token by token, as sums of lanes.
template <class U, int F0, int T, int FN, int P, int N>
[[gnu::always_inline]] inline void store_pairs(const TileAcc (&acc)[2][FN][P], bool first,
                                               int32_t (*sums)[N][kTileLanes]) {
  repeat<FN * T>([&]<int I>() BITNET_INLINE_LAMBDA {
    constexpr int f = I / T, t = I % T;
    const TileSum sum = U::template sum<t % 2>(acc[0][f][t / 2], acc[1][f][t / 2]);
    int32_t* to = sums[t][F0 + f];
    store_sum(to, first ? sum : add_sum(sum, load_sum(to)));
  });
}

// k_steps: a multiple of kStepMultiple.
template <TakesPairs D, int T>
[[gnu::noinline]] void tile_direct(const uint8_t* w, int64_t k_steps, const int8_t* x,
                                   int64_t x_stride, int64_t ahead, TileSums<D>& sums) {
  using U = typename D::Pairs;
  constexpr int P = pairs_of(T);
  static_assert(2 * D::kDots * P <= kTileAccs);
  TileAcc acc[2][D::kDots][P];
  clear_accs(acc[0]);
  clear_accs(acc[1]);
#pragma GCC unroll 1
  for (int64_t s = 0; s < k_steps; s += 2) {
    const uint8_t* at = w + s * kStepBytes;
    if (s * kStepBytes % 64 == 0) prefetch(at + ahead);
    const TileStep first = load_step(at), second = load_step(at + kStepBytes);
    typename U::X a[P];
    load_pairs<U, T>(x + s * layout::kTileStepK, x_stride, a);
    repeat<2>([&]<int h>() BITNET_INLINE_LAMBDA {
      const auto prepared = D::prepare(U::template rows<h>(first, second));
      repeat<D::kDots>([&]<int f>() BITNET_INLINE_LAMBDA {
        add_pairs<U>(D::template codes<f>(prepared), a, acc[h][f]);
      });
    });
  }
  store_pairs<U, 0, T>(acc, true, sums.at);
}

template <class D>
struct Panel;  // panel.inl

template <TakesPairs D>
void fill_panel(const uint8_t* w, int64_t count, int64_t ahead, Panel<D>& panel) {
  for (int64_t s = 0; s < count; s += 2) {
    const uint8_t* at = w + s * kStepBytes;
    if (s * kStepBytes % 64 == 0) prefetch(at + ahead);
    const TileStep first = load_step(at), second = load_step(at + kStepBytes);
    repeat<2>([&]<int h>() BITNET_INLINE_LAMBDA {
      store_fields<D>(D::prepare(D::Pairs::template rows<h>(first, second)), s + h, panel);
    });
  }
}

template <TakesPairs D, int F0, int FN, int T>
[[gnu::noinline]] void add_panel(const uint8_t (*codes)[D::kFields][kStepBytes], int64_t count,
                                 bool first, const int8_t* x, int64_t x_stride,
                                 int32_t (*sums)[D::kFields][kTileLanes]) {
  using U = typename D::Pairs;
  constexpr int P = pairs_of(T);
  TileAcc acc[2][FN][P];
  clear_accs(acc[0]);
  clear_accs(acc[1]);
  for (int64_t s = 0; s < count; s += 2) {
    typename U::X a[P];
    load_pairs<U, T>(x + s * layout::kTileStepK, x_stride, a);
    repeat<2 * FN>([&]<int I>() BITNET_INLINE_LAMBDA {
      constexpr int h = I / FN, f = I % FN;
      add_pairs<U>(load_step(codes[s + h][F0 + f]), a, acc[h][f]);
    });
  }
  store_pairs<U, F0, T>(acc, first, sums);
}
