// Many tokens x whole tiles of a matrix unit U: sixteen k-steps of a 2-bit tile (64 k) masked
// with one field are an operand of 64 k x 16 rows as they lie; the last dot is that of the raw
// bytes. Over tiles.inl.  Included inside an ISA's anonymous namespace; never mentions an ISA.
//
// Tiles 0..3 of the unit accumulate, 4 and 5 hold tokens, 6 and 7 decoded rows.

constexpr int64_t kMatrixTokens = 32;    // two tiles of tokens
constexpr int64_t kOperandSteps = 16;    // k-steps of an operand: 64 k
constexpr int64_t kOperandBytes = 1024;  // of one operand tile
constexpr int64_t kBlockOperands = 14;   // so many of the tokens' operands stay in L1
constexpr int64_t kRingSlots = 4;        // decoded operands in flight
constexpr int64_t kDecodeAhead = 3;      // operands between decoding and use

// The sums of one tile and up to 32 tokens, [dot][token][lane], and decoded operands.
struct alignas(64) MatrixScratch {
  int32_t sums[4][kMatrixTokens][16];
  uint8_t ring[kRingSlots][3][kOperandBytes];
};

// Fields F .. F + N - 1 of sixteen k-steps, each an operand.
template <class U, int F, int N>
inline void decode_fields(const uint8_t* w, int64_t ahead, uint8_t (*slot)[kOperandBytes]) {
  for (int64_t i = 0; i < kOperandSteps; ++i) {
    const auto v = U::Decoder::prepare(load_step(w + i * 64));
    U::prefetch(w + i * 64 + ahead);
    store_step(slot[0] + i * 64, U::Decoder::template codes<F>(v));
    if constexpr (N > 1) store_step(slot[1] + i * 64, U::Decoder::template codes<F + 1>(v));
    if constexpr (N > 2) store_step(slot[2] + i * 64, U::Decoder::template codes<F + 2>(v));
  }
}

// Walks steps [0, steps): decodes kDecodeAhead steps before `use(step, slot)` takes them.
template <class U, int F, int N, class Use>
inline void walk_operands(const uint8_t* w, int64_t steps, int64_t ahead, MatrixScratch& scratch,
                          const Use& use) {
  for (int64_t s = 0; s < steps + kDecodeAhead; ++s) {
    if (s < steps)
      decode_fields<U, F, N>(w + s * kOperandBytes, ahead, scratch.ring[s % kRingSlots]);
    const int64_t done = s - kDecodeAhead;
    if (done >= 0) use(done, scratch.ring[done % kRingSlots]);
  }
}

template <class U, int N>
inline void begin_sum(bool first, const int32_t* sums) {
  if (first) {
    U::template zero<N>();
  } else {
    U::template load<N>(sums, 64);
  }
}

// Two tiles of tokens x dots D and D + 1 over `steps` steps.  The last dot of all is the raw byte.
template <class U, int D>
void block_2x2(const uint8_t* w, int64_t steps, bool first, const int8_t* x, int64_t x_stride,
               int64_t ahead, MatrixScratch& scratch) {
  auto& sums = scratch.sums;
  begin_sum<U, 0>(first, sums[D][0]);
  begin_sum<U, 1>(first, sums[D + 1][0]);
  begin_sum<U, 2>(first, sums[D][16]);
  begin_sum<U, 3>(first, sums[D + 1][16]);
  walk_operands<U, D, D == 0 ? 2 : 1>(w, steps, ahead, scratch, [&](int64_t s, auto& slot) {
    U::template load_once<4>(x + s * 64, x_stride);
    U::template load_once<5>(x + 16 * x_stride + s * 64, x_stride);
    U::template load<6>(slot[0], 64);
    U::template load<7>(D == 0 ? slot[1] : w + s * kOperandBytes, 64);
    U::template multiply<0, 4, 6>();
    U::template multiply<1, 4, 7>();
    U::template multiply<2, 5, 6>();
    U::template multiply<3, 5, 7>();
  });
  U::template store<0>(sums[D][0], 64);
  U::template store<1>(sums[D + 1][0], 64);
  U::template store<2>(sums[D][16], 64);
  U::template store<3>(sums[D + 1][16], 64);
}

// One tile of tokens x all four dots over all steps.
template <class U>
void block_1x4(const uint8_t* w, int64_t steps, const int8_t* x, int64_t x_stride, int64_t ahead,
               MatrixScratch& scratch) {
  U::template zero<0>();
  U::template zero<1>();
  U::template zero<2>();
  U::template zero<3>();
  walk_operands<U, 0, 3>(w, steps, ahead, scratch, [&](int64_t s, auto& slot) {
    U::template load_once<4>(x + s * 64, x_stride);
    U::template load<5>(slot[0], 64);
    U::template load<6>(slot[1], 64);
    U::template load<7>(slot[2], 64);
    U::template multiply<0, 4, 5>();
    U::template multiply<1, 4, 6>();
    U::template multiply<2, 4, 7>();
    U::template load<5>(w + s * kOperandBytes, 64);
    U::template multiply<3, 4, 5>();
  });
  U::template store<0>(scratch.sums[0][0], 64);
  U::template store<1>(scratch.sums[1][0], 64);
  U::template store<2>(scratch.sums[2][0], 64);
  U::template store<3>(scratch.sums[3][0], 64);
}

template <class U>
void finish_matrix(const MatrixScratch& scratch, const int32_t* x_sum, int64_t tokens, int32_t* out,
                   int64_t out_stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    TileSum s[4];
    for (int f = 0; f < 4; ++f) s[f] = load_sum(scratch.sums[f][t]);
    U::Decoder::finish(s);
    const TileSum zeros = set1_sum(x_sum[t]);
    for (int f = 0; f < 4; ++f) store_sum(out + t * out_stride + 16 * f, sub_sum(s[f], zeros));
  }
}

// Up to 32 tokens x every tile of the job.
template <class U>
void matrix_tokens(const TileJob& job, int64_t token, int64_t tokens, MatrixScratch& scratch) {
  const int64_t steps = job.lines / kOperandSteps, tile_bytes = job.lines * 64;
  const int8_t* x = job.x + token * job.x_stride;
  const bool small = tokens <= 16;
  typename U::Config config;
  const auto low = static_cast<uint8_t>(small ? tokens : 16);
  const auto high = static_cast<uint8_t>(small ? 16 : tokens - 16);
  config.rows[0] = config.rows[1] = config.rows[4] = low;
  config.rows[2] = config.rows[3] = small ? low : high;
  config.rows[5] = high;
  U::configure(config);
  for (int64_t i = 0; i < job.tile_count; ++i) {
    const uint8_t* w = job.tiles + i * tile_bytes;
    if (small) {
      block_1x4<U>(w, steps, x, job.x_stride, tile_bytes, scratch);
    } else {
      for (int64_t s = 0; s < steps; s += kBlockOperands) {
        const int64_t count = steps - s < kBlockOperands ? steps - s : kBlockOperands;
        const uint8_t* ws = w + s * kOperandBytes;
        block_2x2<U, 0>(ws, count, s == 0, x + s * 64, job.x_stride, tile_bytes, scratch);
        block_2x2<U, 2>(ws, count, s == 0, x + s * 64, job.x_stride, tile_bytes, scratch);
      }
    }
    finish_matrix<U>(scratch, job.x_sum + token, tokens, job.out + token * job.out_stride + i * 64,
                     job.out_stride);
  }
}

// The configuration belongs to the thread and is given back: oneDNN in the same process has its
// own.
template <class U>
void tiles_matrix(const TileJob& job) {
  static_assert(U::Decoder::kLastDotIsRaw && kTileLanes == 16);
  MatrixScratch scratch;
  for (int64_t t = 0; t < job.tokens; t += kMatrixTokens) {
    matrix_tokens<U>(job, t, job.tokens - t < kMatrixTokens ? job.tokens - t : kMatrixTokens,
                     scratch);
  }
  U::release();
}
