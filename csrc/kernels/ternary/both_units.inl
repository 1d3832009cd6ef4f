// Additions from tables need loads, products need multipliers, so one loop has both: beside every
// row's lines of tables (tables.inl) a k-step of a tile is multiplied with a few further tokens.
// Uses tiles.inl and direct.inl.

// What a table product needs of a TileJob or a GroupJob.
struct TableInput {
  const uint8_t* tiles;
  int64_t tile_bytes, tile_count, k_steps;
  const int8_t* x;                  // of the first token
  int64_t x_stride, token, tokens;  // tokens by tables,
  int64_t beside;                   // and so many behind them by the multipliers
  void* scratch;
};

// sums[row] (+)= a line of each of kTablesAtOnce tables.
template <class U>
[[gnu::always_inline]] inline typename U::Sums row_of_lines(const uint16_t* lines, const char* at,
                                                            typename U::Sums sum) {
  repeat<kTablesAtOnce / 4>([&]<int q>() BITNET_INLINE_LAMBDA {
    uint64_t four;  // loads are what this is short of: no more of them for less to take apart
    __builtin_memcpy(&four, lines + 4 * q, 8);
    repeat<4>([&]<int i>() BITNET_INLINE_LAMBDA {
      constexpr int64_t table = (4 * q + i) * kTableSums * U::kTokens * 2;
      const uint64_t line = i == 3 ? four >> 48 : four >> (16 * i) & 0xffff;
      sum = U::add(sum, U::load(reinterpret_cast<const int16_t*>(at + table + 8 * line)));
      U::keep_order(sum);
    });
  });
  return sum;
}
template <class U, bool kFirst>
[[gnu::noinline]] void add_lines(const uint16_t* lines, const int16_t* tables, int64_t rows,
                                 int16_t* sums) {
  const char* at = reinterpret_cast<const char*>(tables);
  for (int64_t n = 0; n < rows; ++n, lines += kTablesAtOnce, sums += U::kTokens)
    U::store(sums, row_of_lines<U>(lines, at, kFirst ? U::zero() : U::load(sums)));
}

// A tile, tokens, and the k-steps of both that are next.
template <class D>
struct TileProduct {
  const uint8_t* w;
  const int8_t* x;
  int64_t x_stride;
  bool first;  // nothing in `sums`
  TileSums<D> sums;
};

// The same of `count` rows and of as many k-steps of T tokens; without rows (kRows false), of the
// k-steps alone.
template <class U, class D, int T, bool kRows, bool kFirst>
[[gnu::noinline]] void add_both(const uint16_t* lines, const int16_t* tables, int64_t count,
                                int16_t* sums, TileProduct<D>& product) {
  const char* at = reinterpret_cast<const char*>(tables);
  const uint8_t* w = product.w;
  const int8_t* x = product.x;
  const int64_t x_stride = product.x_stride;
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
    const auto prepared = D::prepare(load_step(w + n * kStepBytes));
    add_step<D, 0, D::kDots, T>(prepared, x + n * layout::kTileStepK, x_stride, acc);
  }
  repeat<D::kDots * T>([&]<int i>() BITNET_INLINE_LAMBDA {
    store_sum(product.sums.at[i % T][i / T], acc[i / T][i % T]);
  });
}

// What is multiplied meanwhile: tokens [0, tokens) of x, kBeside at a time, with one tile after the
// other. F says what becomes of sums, folds.take(sums, tile, token, step), after every
// `run_steps` k-steps of a tile and at its end; `step` is the first of them.
template <class U, class D, class F>
class Meanwhile {
 public:
  static constexpr int T = U::kBeside;

  Meanwhile(const TableInput& in, const F& folds)
      : in_(in), folds_(folds), left_tiles_(in.beside == 0 ? 0 : in.tile_count) {
    begin_run();
  }
  bool done() const { return left_tiles_ == 0; }

  // Adds lines to the sums of `rows` rows, as add_lines does.
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
  void begin_run() {
    const int64_t left = in_.k_steps - step_, steps = folds_.run_steps();
    begin_ = step_;
    run_end_ = step_ + (left < steps ? left : steps);
    product_.first = true;
    product_.w = in_.tiles + tile_ * in_.tile_bytes + step_ * kStepBytes;
    product_.x = in_.x + (in_.tokens + token_) * in_.x_stride + step_ * layout::kTileStepK;
    product_.x_stride = in_.x_stride;
  }
  void advance(int64_t count) {
    step_ += count;
    if (step_ < run_end_) {
      product_.first = false;
      product_.w += count * kStepBytes;
      product_.x += count * layout::kTileStepK;
      return;
    }
    folds_.template take<D>(product_.sums, tile_, in_.token + in_.tokens + token_, begin_);
    if (step_ == in_.k_steps) {
      step_ = 0;
      token_ += T;
      if (token_ == in_.beside) {
        token_ = 0;
        ++tile_;
        --left_tiles_;
      }
    }
    if (!done()) begin_run();
  }

  const TableInput& in_;
  const F& folds_;
  int64_t left_tiles_, tile_ = 0, token_ = 0, step_ = 0, begin_ = 0, run_end_ = 0;
  TileProduct<D> product_;
};

// The same where registers or multipliers do not suffice for both.
template <class U>
struct TablesAlone {
  template <class F>
  TablesAlone(const TableInput&, const F&) {}
  template <bool kFirst>
  void add_rows(const uint16_t* lines, const int16_t* tables, int64_t rows, int16_t* sums) {
    add_lines<U, kFirst>(lines, tables, rows, sums);
  }
  void finish() {}
};
template <class U, class D, class F>
struct MeanwhileChoice {
  using Type = TablesAlone<U>;
};
template <class U, class D, class F>
  requires(U::kBeside > 0)
struct MeanwhileChoice<U, D, F> {
  using Type = Meanwhile<U, D, F>;
};
template <class U, class D, class F>
using MeanwhileOf = typename MeanwhileChoice<U, D, F>::Type;
