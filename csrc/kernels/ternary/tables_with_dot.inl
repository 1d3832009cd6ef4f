// Tables keep the loads busy, products the multipliers, so one loop does both: with each row that
// adds its lines of tables, a k-step of a tile is multiplied with a few further tokens. Uses
// tiles.inl and row_indices.inl.

// Tokens [token, token + tokens) of tiles [tile, tile + tiles).
struct TilePart {
  int64_t tile, tiles, token, tokens;
};

// What a table product needs of a job.
struct TableInput {
  const uint8_t* tiles;
  int64_t tile_bytes, k_steps;
  const int8_t* x;  // of the job's token `token`
  int64_t x_stride, token;
  TilePart tables;  // made by tables, from the first tile and token on
  TilePart beside;  // made by the multipliers meanwhile
  void* scratch;
};

// sums[row] (+)= a line of each of kTablesAtOnce tables.
template <class U>
[[gnu::always_inline]] inline typename U::Sums row_of_lines(const uint16_t* lines, const char* at,
                                                            typename U::Sums sum) {
  repeat<kTablesAtOnce / 4>([&]<int q>() BITNET_INLINE_LAMBDA {
    uint64_t four;  // loads are the bottleneck, so one load gets four line numbers
    __builtin_memcpy(&four, lines + 4 * q, 8);
    repeat<4>([&]<int i>() BITNET_INLINE_LAMBDA {
      constexpr int64_t table = (4 * q + i) * kTableSums * U::kTokens * 2;
      const uint64_t line = i == 3 ? four : four & 0xffff;
      sum = U::add(sum, U::load(reinterpret_cast<const int16_t*>(at + table + 8 * line)));
      U::keep_order(sum);
      four >>= 16;
      __asm__("" : "+r"(four));  // in place: g++ would shift a copy each time
    });
  });
  return sum;
}
template <class U, bool kFirst>
[[gnu::noinline]] void add_lines(const uint16_t* lines, const int16_t* tables, int64_t rows,
                                 int16_t* sums) {
  constexpr int kAtOnce = 2;  // rows for each step of the addresses
  const char* at = reinterpret_cast<const char*>(tables);
  const auto add = [&](int64_t i) BITNET_INLINE_LAMBDA {
    int16_t* to = sums + i * U::kTokens;
    U::store(to, row_of_lines<U>(lines + i * kTablesAtOnce, at, kFirst ? U::zero() : U::load(to)));
  };
  int64_t n = 0;
  for (; n + kAtOnce <= rows; n += kAtOnce) {
    repeat<kAtOnce>([&]<int i>() BITNET_INLINE_LAMBDA { add(i); });
    lines += kAtOnce * kTablesAtOnce, sums += kAtOnce * U::kTokens;
  }
  for (; n < rows; ++n, lines += kTablesAtOnce, sums += U::kTokens) add(0);
}

// ---- k-steps for multipliers --------------------------------------------------------------------

// The k-steps of a tile of four fields, as they are.
template <class U>
struct StepsOfFour : As<U, TwoBit>::Type {
  using D = typename As<U, TwoBit>::Type;
  static constexpr int64_t kBytes = kStepBytes;
  static constexpr bool kDecoded = false;
  static auto load(const uint8_t* w) { return D::prepare(load_step(w)); }
};

// The k-steps of a tile of five fields. To decode them takes too long for the loop, so each is made
// once into two steps of 2 bit: fields 0 to 3, and the fifth. The decoder has digits in bits 7-6.
template <class U>
struct StepsOfFive {
  using D = typename As<U, Base3Digits>::Type;
  static constexpr int kFields = 5, kDots = 5, kZeroCode = D::kZeroCode;
  static constexpr int64_t kBytes = 2 * kStepBytes, kFlush = TwoBit::kFlush;
  static constexpr bool kDecoded = true;
  struct Prepared {
    TileStep four, fifth;
  };
  static void decode(const uint8_t* w, int64_t k_steps, uint8_t* to) {
    for (int64_t s = 0; s < k_steps; ++s, to += kBytes) {
      const auto v = D::prepare(load_step(w + s * kStepBytes));
      const TileStep low = U::joined(U::template shifted<6>(D::template codes<0>(v)),
                                     U::template shifted<4>(D::template codes<1>(v)));
      const TileStep high =
          U::joined(U::template shifted<2>(D::template codes<2>(v)), D::template codes<3>(v));
      store_step(to, U::joined(low, high));
      store_step(to + kStepBytes, U::template shifted<6>(D::template codes<4>(v)));
    }
  }
  static Prepared load(const uint8_t* w) { return {load_step(w), load_step(w + kStepBytes)}; }
  template <int F>
  static TileCodes codes(const Prepared& v) {
    if constexpr (F == 4) {
      return v.fifth;
    } else {
      return TwoBit::codes<F>(v.four);
    }
  }
  static void finish(TileSum (&s)[5]) {
    TileSum four[4] = {s[0], s[1], s[2], s[3]};
    TwoBit::finish(four);
    repeat<4>([&]<int i>() BITNET_INLINE_LAMBDA { s[i] = four[i]; });
  }
};

// ---- rows and k-steps ---------------------------------------------------------------------------

// The tile, tokens and k-steps that the multipliers are at.
template <class D>
struct TileProduct {
  const uint8_t* w;
  const int8_t* x;
  int64_t x_stride;
  bool first;            // nothing in `sums`
  const uint8_t* ahead;  // of the next tile: prefetched meanwhile, a piece at each step
  int64_t ahead_step;
  TileSums<D> sums;
};

// Adds lines for `count` rows and multiplies as many k-steps with T tokens; with kRows false only
// the latter.
template <class U, class D, int T, bool kRows, bool kFirst>
[[gnu::noinline]] void add_both(const uint16_t* lines, const int16_t* tables, int64_t count,
                                int16_t* sums, TileProduct<D>& product) {
  const char* at = reinterpret_cast<const char*>(tables);
  const uint8_t* w = product.w;
  const int8_t* x = product.x;
  const uint8_t* ahead = product.ahead;
  const int64_t x_stride = product.x_stride, ahead_step = product.ahead_step;
  TileAcc acc[D::kDots][T];
  if (product.first) {
    clear_accs(acc);
  } else {
    repeat<D::kDots * T>([&]<int i>() BITNET_INLINE_LAMBDA {
      acc[i / T][i % T] = load_sum(product.sums.at[i % T][i / T]);
    });
  }
#pragma GCC unroll 1
  for (int64_t n = 0; n < count; ++n) {
    if constexpr (kRows) {
      U::store(sums, row_of_lines<U>(lines, at, kFirst ? U::zero() : U::load(sums)));
      lines += kTablesAtOnce, sums += U::kTokens;
    }
    prefetch_l2(ahead);
    ahead += ahead_step;
    const auto prepared = D::load(w + n * D::kBytes);
    add_step<D, 0, D::kDots, T>(prepared, x + n * layout::kTileStepK, x_stride, acc);
  }
  repeat<D::kDots * T>([&]<int i>() BITNET_INLINE_LAMBDA {
    store_sum(product.sums.at[i % T][i / T], acc[i / T][i % T]);
  });
}

// Rows by tables, and products meanwhile. This form makes no products: there are not enough
// registers or multipliers for both.
template <class U, class D, class F>
struct InterleavedDot {
  static constexpr int64_t scratch_bytes(int64_t) { return 0; }
  InterleavedDot(const TableInput&, const F&, char*) {}
  // sums[row] (+)= one line of each table.
  template <bool kFirst>
  void add_rows(const uint16_t* lines, const int16_t* tables, int64_t rows, int16_t* sums) {
    add_lines<U, kFirst>(lines, tables, rows, sums);
  }
  // Makes the products that are left.
  void finish() {}
};

// This form makes those of in.beside: kDotTokens tokens at a time, one tile after the other. After
// every `run_steps` k-steps of a tile and at its end, F gets the sums: folds.take(sums, tile,
// token, tokens, step), where `step` is the first of these k-steps.
template <class U, class D, class F>
  requires(U::kDotTokens > 0)
class InterleavedDot<U, D, F> {
 public:
  static constexpr int T = U::kDotTokens;
  static constexpr int64_t scratch_bytes(int64_t k_steps) {
    return k_steps * ((D::kDecoded ? D::kBytes : 0) + T * layout::kTileStepK);
  }

  InterleavedDot(const TableInput& in, const F& folds, char* scratch)
      : in_(in),
        folds_(folds),
        last_(reinterpret_cast<int8_t*>(scratch)),
        decoded_(reinterpret_cast<uint8_t*>(scratch + T * in.k_steps * layout::kTileStepK)),
        tiles_(in.beside.tokens == 0 ? 0 : in.beside.tiles) {
    const int64_t whole = in.beside.tokens / T * T, row = in.k_steps * layout::kTileStepK;
    for (int64_t t = 0; t < T && whole < in.beside.tokens; ++t) {  // must not read behind x
      const int64_t token = whole + t < in.beside.tokens ? whole + t : whole;
      __builtin_memcpy(last_ + t * row, in.x + (in.beside.token + token) * in.x_stride, row);
    }
    if (!done()) begin_run();
  }

  template <bool kFirst>
  void add_rows(const uint16_t* lines, const int16_t* tables, int64_t rows, int16_t* sums) {
    while (rows > 0 && !done()) {
      const int64_t left = run_end_ - step_, count = rows < left ? rows : left;
      add_both<U, D, T, true, kFirst>(lines, tables, count, sums, product_);
      advance(count);
      rows -= count;
      lines += count * kTablesAtOnce;
      sums += count * U::kTokens;
    }
    add_lines<U, kFirst>(lines, tables, rows, sums);
  }
  void finish() {
    while (!done()) {
      const int64_t count = run_end_ - step_;
      add_both<U, D, T, false, true>(nullptr, nullptr, count, nullptr, product_);
      advance(count);
    }
  }

 private:
  bool done() const { return tile_ == tiles_; }
  int64_t tokens() const {
    const int64_t left = in_.beside.tokens - token_;
    return left < T ? left : T;
  }
  void begin_run() {
    const int64_t left = in_.k_steps - step_, steps = folds_.run_steps();
    begin_ = step_;
    run_end_ = step_ + (left < steps ? left : steps);
    product_.first = true;
    const uint8_t* tile = in_.tiles + (in_.beside.tile + tile_) * in_.tile_bytes;
    if constexpr (D::kDecoded) {
      if (step_ == 0 && token_ == 0) D::decode(tile, in_.k_steps, decoded_);
      tile = decoded_;
    }
    product_.w = tile + step_ * D::kBytes;
    const int64_t groups = (in_.beside.tokens + T - 1) / T, part = in_.tile_bytes / groups;
    product_.ahead_step = (kStepBytes + groups - 1) / groups;
    product_.ahead = in_.tiles + (in_.beside.tile + tile_ + 1) * in_.tile_bytes +
                     token_ / T * part + step_ * product_.ahead_step;
    const bool whole = tokens() == T;
    product_.x_stride = whole ? in_.x_stride : in_.k_steps * layout::kTileStepK;
    product_.x = whole ? in_.x + (in_.beside.token + token_) * in_.x_stride : last_;
    product_.x += step_ * layout::kTileStepK;
  }
  void advance(int64_t count) {
    step_ += count;
    if (step_ < run_end_) {
      product_.first = false;
      product_.w += count * D::kBytes;
      product_.ahead += count * product_.ahead_step;
      product_.x += count * layout::kTileStepK;
      return;
    }
    folds_.template take<D>(product_.sums, in_.beside.tile + tile_,
                            in_.token + in_.beside.token + token_, tokens(), begin_);
    if (step_ == in_.k_steps) {
      step_ = 0;
      token_ += T;
      if (token_ >= in_.beside.tokens) {
        token_ = 0;
        ++tile_;
      }
    }
    if (!done()) begin_run();
  }

  const TableInput& in_;
  const F& folds_;
  int8_t* last_;  // a copy of the last tokens, filled up to T
  uint8_t* decoded_;
  int64_t tiles_, tile_ = 0, token_ = 0, step_ = 0, begin_ = 0, run_end_ = 0;
  TileProduct<D> product_;
};
