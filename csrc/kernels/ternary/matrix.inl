// Many tokens x whole tiles by a matrix unit U. Sixteen k-steps of a tile (64 k),
// decoded into one dot of a decoder, are an operand of 64 k x 16 rows as they lie.
// One of the dots is the raw bytes and needs no decoding. Uses tiles.inl and
// epilogue.inl.
//
// The work is ordered by tile of the layout, block of 32 tokens, block of K, pass over two
// of the dots. Each such segment is a run of operands. The operands of the next segment
// are decoded between the last products of this one, so that the unit never waits for
// them.

constexpr bool kHasMatrixUnit = MatrixUnit::kFromTokens > 0;
constexpr int64_t kMatrixTokens = 32;          // two tiles of tokens
constexpr int64_t kOperandSteps = 16;          // k-steps of an operand: 64 k
constexpr int64_t kOperandBytes = 1024;        // of one operand tile
constexpr int64_t kBlockOperands = 14;         // so many of the tokens' operands stay in L1
constexpr int64_t kRingSlots = 4;              // decoded operands in flight
constexpr int64_t kDecodeAhead = 3;            // operands between decoding and use; a segment has 3
constexpr int64_t kFewTokensAhead = 16 << 10;  // bytes, where a tile is read once for few tokens
// Of a product that is cut up by rows: tokens that stay in L2 while the rows pass, and rows.
constexpr int64_t kMatrixChunk = 128, kMatrixMinRows = 256;

// Calls f<MatrixUnit>() where there is one. Only a template's discarded branch is left alone by
// every compiler: clang 19 compiles what another one calls.
template <class U = MatrixUnit, class F>
void with_matrix_unit(F&& f) {
  if constexpr (U::kFromTokens > 0) f.template operator()<U>();
}

// Up to 32 tokens of a job.  In rows one operand of a token is 64 bytes behind the last; in tiles,
// 64 bytes times the tokens of the tile.
struct MatrixTokens {
  const int8_t* x;
  int64_t row, step;
};

// The tokens from `token`, a multiple of 32, on.
inline MatrixTokens matrix_tokens_at(const int8_t* x, int64_t x_stride, int64_t k, int64_t token,
                                     int64_t count) {
  if (x_stride != kTokenStep) return {x + token * x_stride, x_stride, kTokenStep};
  return {x + token * layout::padded_k(k), kTokenStep, count * kTokenStep};
}

// What a call works with: stays in L1 beside a block of weights. sums: [dot][token][lane].
template <class D>
struct alignas(4096) MatrixScratch {
  uint8_t ring[kRingSlots][D::kDots - 1][kOperandBytes];
  int32_t sums[D::kDots][kMatrixTokens][16];
};

// The progress of a call: operands used, and lines of the next tile that have been prefetched.
struct MatrixWalk {
  uint32_t operand = 0;
  const uint8_t *ahead = nullptr, *ahead_end = nullptr;
  int64_t ahead_bytes = 0;  // per operand

  void ask_ahead() {
    const uint8_t* stop = ahead + ahead_bytes < ahead_end ? ahead + ahead_bytes : ahead_end;
    for (; ahead < stop; ahead += 64) prefetch_l2(ahead);
  }
};

// The state from which the dots of a k-step, from First on, are decoded. For base-3 it is a power,
// made by a chain of sums; for the fifth link a product is shorter than the chain.
template <class U, class D, int First>
[[gnu::always_inline]] inline typename D::Prepared prepare_from(TileStep v) {
  if constexpr (D::kFields == 5 && First == 4) {
    typename D::Prepared p;
    p.q[4] = U::times_81(v);
    p.q[5] = add_bytes(p.q[4], add_bytes(p.q[4], p.q[4]));
    return p;
  } else {
    return D::prepare(v);
  }
}

// k-steps [From, To) of the dots First .. First + N - 1, but for the raw one.  A slot's operands
// are those dots in turn: of a pass over two of them, of all of them without the raw one.
template <class U, class D, int First, int N, int From, int To>
[[gnu::always_inline]] inline void decode_lines(const uint8_t* w, uint8_t (*slot)[kOperandBytes]) {
  repeat<To - From>([&]<int i>() BITNET_INLINE_LAMBDA {
    constexpr int64_t at = (From + i) * 64;
    const auto v = prepare_from<U, D, First>(load_step(w + at));
    repeat<N>([&]<int n>() BITNET_INLINE_LAMBDA {
      constexpr int dot = First + n, raw = D::kRawDot;
      constexpr int place = N == 2 ? n : dot - (dot > raw ? 1 : 0);
      if constexpr (dot != raw) store_step(slot[place] + at, D::template codes<dot>(v));
    });
  });
}

// The operand of a dot: decoded, or the bytes as they are.
template <class D, int N, int dot>
[[gnu::always_inline]] inline const uint8_t* operand_of(const uint8_t* w,
                                                        uint8_t (*slot)[kOperandBytes]) {
  if constexpr (dot == D::kRawDot) return w;
  return slot[N == 2 ? dot % 2 : dot - (dot > D::kRawDot ? 1 : 0)];
}

template <class U, int N>
[[gnu::always_inline]] inline void begin_sum(bool first, const int32_t* sums) {
  if (first) {
    U::template zero<N>();
  } else {
    U::template load<N>(sums, 64);
  }
}

// One operand of pass P for two tiles of tokens, decoding one of pass Next between the products.
template <class U, class D, int P, int Next>
[[gnu::always_inline]] inline void step_2x2(const MatrixTokens& t, const int8_t* a,
                                            const uint8_t* w, uint8_t (*slot)[kOperandBytes],
                                            const uint8_t* next,
                                            uint8_t (*next_slot)[kOperandBytes]) {
  U::template load_once<4>(a, t.row);
  U::template load<6>(operand_of<D, 2, 2 * P>(w, slot), 64);
  U::template multiply<0, 4, 6>();
  decode_lines<U, D, 2 * Next, 2, 0, 5>(next, next_slot);
  U::template load<7>(operand_of<D, 2, 2 * P + 1>(w, slot), 64);
  U::template multiply<1, 4, 7>();
  decode_lines<U, D, 2 * Next, 2, 5, 10>(next, next_slot);
  U::template load_once<5>(a + 16 * t.row, t.row);
  U::template multiply<2, 5, 6>();
  decode_lines<U, D, 2 * Next, 2, 10, 16>(next, next_slot);
  U::template multiply<3, 5, 7>();
}

// A segment: 17 to 32 tokens x pass P over `steps` >= 3 operands.  The ring holds the first three;
// at the end it holds those of the next pass from `next` on.
template <class U, class D, int P>
[[gnu::noinline]] void segment_2x2(const uint8_t* w, int64_t steps, bool first,
                                   const MatrixTokens& tokens, const int8_t* a, const uint8_t* next,
                                   MatrixWalk& walk, MatrixScratch<D>& scratch) {
  constexpr int kNext = (P + 1) % (D::kDots / 2);
  auto &low = scratch.sums[2 * P], &high = scratch.sums[2 * P + 1];
  begin_sum<U, 0>(first, low[0]);
  begin_sum<U, 1>(first, high[0]);
  begin_sum<U, 2>(first, low[16]);
  begin_sum<U, 3>(first, high[16]);
  const MatrixTokens t = tokens;
  uint32_t r = walk.operand;
  const auto slot = [&](uint32_t i) { return scratch.ring[i % kRingSlots]; };
  const uint8_t* last = w + (steps - kDecodeAhead) * kOperandBytes;
  for (; w < last; ++r, a += t.step, w += kOperandBytes) {
    walk.ask_ahead();
    step_2x2<U, D, P, P>(t, a, w, slot(r), w + kDecodeAhead * kOperandBytes,
                         slot(r + kDecodeAhead));
  }
  for (int i = 0; i < kDecodeAhead;
       ++i, ++r, a += t.step, w += kOperandBytes, next += kOperandBytes) {
    walk.ask_ahead();
    step_2x2<U, D, P, kNext>(t, a, w, slot(r), next, slot(r + kDecodeAhead));
  }
  walk.operand = r;
  U::template store<0>(low[0], 64);
  U::template store<1>(high[0], 64);
  U::template store<2>(low[16], 64);
  U::template store<3>(high[16], 64);
}

// A tile for 17 to 32 tokens: blocks of K, each in all passes; then `next`, the next tile.
template <class U, class D>
void tile_2x2(const uint8_t* w, int64_t steps, const MatrixTokens& t, const uint8_t* next,
              MatrixWalk& walk, MatrixScratch<D>& scratch) {
  constexpr int kPasses = D::kDots / 2;
  const int64_t blocks = (steps + kBlockOperands - 1) / kBlockOperands;
  for (int64_t b = 0, s = 0; b < blocks; ++b) {
    const int64_t end = steps * (b + 1) / blocks;
    const uint8_t *from = w + s * kOperandBytes, *behind = w + end * kOperandBytes;
    repeat<kPasses>([&]<int P>() BITNET_INLINE_LAMBDA {
      const uint8_t* then = P + 1 < kPasses ? from : b + 1 < blocks ? behind : next;
      segment_2x2<U, D, P>(from, end - s, b == 0, t, t.x + s * t.step, then, walk, scratch);
    });
    s = end;
  }
}

// Up to 16 tokens x all dots of a tile.
template <class U, class D>
[[gnu::noinline]] void tile_1xn(const uint8_t* w, int64_t steps, const MatrixTokens& tokens,
                                const uint8_t* next, int64_t ahead, MatrixWalk& walk,
                                MatrixScratch<D>& scratch) {
  constexpr int N = D::kDots, kOperandTiles = 7 - N;
  repeat<N>([&]<int d>() BITNET_INLINE_LAMBDA { U::template zero<d>(); });
  const MatrixTokens t = tokens;
  const int8_t* a = t.x;
  uint32_t r = walk.operand;
  const uint8_t* decode = w + kDecodeAhead * kOperandBytes;
  for (int64_t s = 0; s < steps; ++s, ++r, a += t.step, w += kOperandBytes) {
    if (s == steps - kDecodeAhead) decode = next;
    uint8_t (*slot)[kOperandBytes] = scratch.ring[r % kRingSlots];
    uint8_t (*to)[kOperandBytes] = scratch.ring[(r + kDecodeAhead) % kRingSlots];
    for (int64_t i = 0; ahead != 0 && i < kOperandBytes; i += 64) prefetch_l2(decode + ahead + i);
    U::template load_once<N>(a, t.row);
    repeat<N>([&]<int d>() BITNET_INLINE_LAMBDA {
      constexpr int b = N + 1 + d % kOperandTiles;
      U::template load<b>(operand_of<D, N, d>(w, slot), 64);
      decode_lines<U, D, 0, N, d * 16 / N, (d + 1) * 16 / N>(decode, to);
      U::template multiply<d, N, b>();
    });
    decode += kOperandBytes;
  }
  walk.operand = r;
  repeat<N>([&]<int d>() BITNET_INLINE_LAMBDA { U::template store<d>(scratch.sums[d][0], 64); });
}

// ---- what becomes of the sums -------------------------------------------------------------------

// A job and where its results go; put() takes a tile's sums of `count` tokens.
template <class D>
struct MatrixResult {
  const ProductJob& job;
  const EpilogueJob* epilogue;  // null: sums to job.sums
  void (*put)(const MatrixResult&, const MatrixScratch<D>&, int64_t tile, int64_t token,
              int64_t count);
};

// The sums of a block's token m.
template <class D>
[[gnu::always_inline]] inline void matrix_sums(const MatrixScratch<D>& scratch, int64_t m,
                                               int32_t x_sum, TileSum (&s)[D::kDots]) {
  repeat<D::kDots>([&]<int d>() BITNET_INLINE_LAMBDA { s[d] = load_sum(scratch.sums[d][m]); });
  D::finish(s);
  const TileSum zeros = set1_sum(x_sum * D::kZeroCode);
  repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA { s[f] = sub_sum(s[f], zeros); });
}

// Stores sums: to job.sums, or to the output of an epilogue that wants sums, which ends with the
// last row.
template <class D>
void put_sums(const MatrixResult<D>& to, const MatrixScratch<D>& scratch, int64_t tile,
              int64_t token, int64_t count) {
  const ProductJob& job = to.job;
  const bool own = to.epilogue == nullptr;
  const int64_t row = tile * D::kFields * 16;
  const int64_t left = own ? D::kFields * 16 : to.epilogue->rows - row;
  char* out = static_cast<char*>(own ? job.sums : to.epilogue->out) + row * 4;
  const int64_t stride = own ? job.out_stride * 4 : to.epilogue->out_stride_bytes;
  for (int64_t m = 0; m < count; ++m) {
    TileSum s[D::kDots];
    matrix_sums(scratch, m, job.x_sum[token + m], s);
    auto* sums = reinterpret_cast<int32_t*>(out + (token + m) * stride);
    repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
      if (left >= 16 * (f + 1)) return store_sum(sums + 16 * f, s[f]);
      alignas(64) int32_t last[16];
      store_sum(last, s[f]);
      for (int64_t i = 0; 16 * f + i < left; ++i) sums[16 * f + i] = last[i];
    });
  }
}

// As store_block would, from registers.
template <class U, class D, StoreKind kKind, DType kType>
void put_values(const MatrixResult<D>& to, const MatrixScratch<D>& scratch, int64_t tile,
                int64_t token, int64_t count) {
  const EpilogueJob& job = *to.epilogue;
  const int64_t row = tile * D::kFields * 16, rows = job.rows - row;
  const bool plain = rows >= D::kFields * 16 && job.w_scale_step == 0 && job.bias == nullptr;
  for (int64_t m = 0; m < count; ++m) {
    TileSum s[D::kDots];
    matrix_sums(scratch, m, to.job.x_sum[token + m], s);
    void* out = static_cast<char*>(job.out) + (token + m) * job.out_stride_bytes;
    const F32x16 xs = set1(job.x_scale[token + m]);
    const F32x16 one_scale = mul(set1(job.w_scale[0]), xs);
    if (plain) {
      repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
        store_lanes<kKind, kType>(mul(U::floats(s[f]), one_scale), out, row + 16 * f, 16);
      });
      continue;
    }
    repeat<D::kFields>([&]<int f>() BITNET_INLINE_LAMBDA {
      const int64_t i = row + 16 * f, left = rows - 16 * f;
      if (left <= 0) return;
      const F32x16 scale =
          job.w_scale_step == 0 ? one_scale : mul(load_n(job.w_scale + i, left), xs);
      F32x16 v = mul(U::floats(s[f]), scale);
      if (job.bias != nullptr) v = add(v, load_n(job.bias + i, left));
      store_lanes<kKind, kType>(v, out, i, left);
    });
  }
}

template <class U, class D, StoreKind kKind>
auto put_typed(DType type) {
  if (type == DType::kBF16) return &put_values<U, D, kKind, DType::kBF16>;
  if (type == DType::kF16) return &put_values<U, D, kKind, DType::kF16>;
  return &put_values<U, D, kKind, DType::kF32>;
}

template <class U, class D>
auto put_as(StoreKind kind, DType type) {
  if (kind == StoreKind::kStore) return put_typed<U, D, StoreKind::kStore>(type);
  if (kind == StoreKind::kRound) return put_typed<U, D, StoreKind::kRound>(type);
  return put_typed<U, D, StoreKind::kAdd>(type);
}

// ---- a job --------------------------------------------------------------------------------------

// Accumulators first, then the tokens' tiles, then decoded rows.
template <class U>
inline void configure_for(int64_t tokens, int dots) {
  typename U::Config config;
  const bool two = tokens > 16;
  const auto low = static_cast<uint8_t>(two ? 16 : tokens);
  const auto high = static_cast<uint8_t>(two ? tokens - 16 : tokens);
  const int one_tile = two ? 2 : dots;  // accumulators of the first tile of tokens
  for (int i = 0; i < one_tile; ++i) config.rows[i] = low;
  if (two) config.rows[2] = config.rows[3] = config.rows[5] = high;
  config.rows[two ? 4 : dots] = low;
  U::configure(config);
}

// Every tile x the tokens [token, end), in blocks of 32 or one block of fewer.
template <class U, class D>
void matrix_blocks(const MatrixResult<D>& to, int64_t token, int64_t end, bool from_memory,
                   MatrixScratch<D>& scratch) {
  const ProductJob& job = to.job;
  const int64_t steps = job.k_steps / kOperandSteps, tile_bytes = job.block_bytes;
  const int64_t each = end - token < kMatrixTokens ? end - token : kMatrixTokens;
  const int64_t passes = (end - token) / each * D::kDots / 2;
  const bool small = each <= 16;
  MatrixWalk walk;
  if (from_memory) walk.ahead_bytes = (kOperandSteps + passes - 1) / passes * 64;
  configure_for<U>(each, D::kDots);
  repeat<kDecodeAhead>([&]<int i>() BITNET_INLINE_LAMBDA {
    const uint8_t* w = job.weights + i * kOperandBytes;
    if (small) {
      decode_lines<U, D, 0, D::kDots, 0, 16>(w, scratch.ring[i]);
    } else {
      decode_lines<U, D, 0, 2, 0, 16>(w, scratch.ring[i]);
    }
  });
  for (int64_t i = 0; i < job.blocks; ++i) {
    const uint8_t* w = job.weights + i * tile_bytes;
    const uint8_t* behind = i + 1 < job.blocks ? w + tile_bytes : w;
    walk.ahead = w + tile_bytes;
    walk.ahead_end = walk.ahead_bytes == 0 ? walk.ahead : walk.ahead + tile_bytes;
    for (int64_t m = token; m < end; m += each) {
      const MatrixTokens t = matrix_tokens_at(job.x, job.x_stride, 4 * job.k_steps, m, each);
      if (small) {
        tile_1xn<U, D>(w, steps, t, behind, from_memory ? kFewTokensAhead : 0, walk, scratch);
      } else {
        tile_2x2<U, D>(w, steps, t, m + each < end ? w : behind, walk, scratch);
      }
      to.put(to, scratch, i, m, each);
    }
  }
}

// Blocks of 32 tokens, then the tokens left over, whose tiles are then in L2. The unit's
// configuration belongs to the thread and is restored: oneDNN in the same process has its own.
template <class U, class D>
void matrix_product(const ProductJob& job, const EpilogueJob* epilogue) {
  static_assert(kTileLanes == 16 && D::kDots % 2 == 0);
  MatrixScratch<D> scratch;
  const bool sums = epilogue == nullptr || epilogue->kind == StoreKind::kSums;
  const MatrixResult<D> to{job, epilogue,
                           sums ? &put_sums<D> : put_as<U, D>(epilogue->kind, epilogue->type)};
  const int64_t whole = job.tokens / kMatrixTokens * kMatrixTokens;
  if (whole > 0) matrix_blocks<U>(to, 0, whole, true, scratch);
  if (whole < job.tokens) matrix_blocks<U>(to, whole, job.tokens, whole == 0, scratch);
  U::release();
}
