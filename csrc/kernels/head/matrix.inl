// Heads at several tokens by a matrix unit U: 16-bit tokens as two planes of int8, with
// exact sums. int8 rows are an operand as they lie (16 rows x 64 features), tokens the
// other one; lines of int4 tiles become operands by a mask and a shift. Uses
// ternary/matrix.inl.

constexpr int64_t kHeadUnitTokens = 16;  // columns, or rows, of an operand
constexpr int64_t kHeadUnitRows = 32;    // rows of weights that meet them at once
constexpr int64_t kHeadUnitMaxK = 4096;  // so that packed tokens fit on a thread's stack
constexpr int64_t kHeadUnitSteps = kHeadUnitMaxK / 64;

// Tokens of a pass, an operand for every 64 features of each plane, and the sums of 32 rows: of
// rows 0..15 by the high plane and the low one, of rows 16..31 likewise.
struct alignas(4096) HeadScratch {
  uint8_t tokens[kHeadUnitSteps][2][kOperandBytes];
  int32_t sums[4][16][16];
  uint8_t operand[2][kOperandBytes];
  float values[2][16][16];
  float scales[16];
};

// `columns`: as the right operand, [features / 4][tokens][4]; else as the left one, rows of 64.
inline void pack_head_tokens(const HeadToken* x, int64_t tokens, int64_t steps, bool columns,
                             HeadScratch& scratch) {
  for (int64_t t = 0; t < kHeadUnitTokens; ++t) scratch.scales[t] = t < tokens ? x[t].scale : 0.0f;
  alignas(64) uint8_t rows[kHeadUnitTokens][64] = {};  // those of no token stay zeros
  for (int64_t s = 0; s < steps; ++s) {
    for (int p = 0; p < 2; ++p) {
      for (int64_t t = 0; t < tokens; ++t)
        __builtin_memcpy(rows[t], (p == 0 ? x[t].high : x[t].low) + 64 * s, 64);
      if (columns) {
        transpose_16(rows, 64, reinterpret_cast<float*>(scratch.tokens[s][p]), 16);
      } else {
        __builtin_memcpy(scratch.tokens[s][p], rows, sizeof rows);
      }
    }
  }
}

template <class U>
inline void zero_four() {
  repeat<4>([&]<int i>() BITNET_INLINE_LAMBDA { U::template zero<i>(); });
}
template <class U>
inline void store_four(HeadScratch& scratch) {
  repeat<4>([&]<int i>() BITNET_INLINE_LAMBDA { U::template store<i>(scratch.sums[i][0], 64); });
}

// ---- int8 ---------------------------------------------------------------------------------------

// 32 rows x packed tokens; the last features of a row are brought beside zeros where they are few.
template <class U>
[[gnu::noinline]] void head8_unit(const int8_t* w, int64_t k, HeadScratch& scratch) {
  zero_four<U>();
  const auto step = [&](const void* first, const void* second, int64_t stride, int64_t s)
                        BITNET_INLINE_LAMBDA {
                          U::template load_once<4>(first, stride);
                          U::template load<6>(scratch.tokens[s][0], 64);
                          U::template multiply_signed<0, 4, 6>();
                          U::template load<7>(scratch.tokens[s][1], 64);
                          U::template multiply_signed<1, 4, 7>();
                          U::template load_once<5>(second, stride);
                          U::template multiply_signed<2, 5, 6>();
                          U::template multiply_signed<3, 5, 7>();
                        };
  const int64_t whole = k / 64, left = k % 64;
  const int8_t* ahead = w + kHeadUnitRows * k;  // the next 32 rows, a line of each at every step
  for (int64_t s = 0; s < whole; ++s) {
    for (int64_t i = 0; i < kHeadUnitRows; ++i) prefetch_l2(ahead + (s * kHeadUnitRows + i) * 64);
    step(w + 64 * s, w + 16 * k + 64 * s, k, s);
  }
  if (left != 0) {
    __builtin_memset(scratch.operand, 0, sizeof scratch.operand);
    for (int64_t r = 0; r < kHeadUnitRows; ++r) {
      for (int64_t i = 0; i < left; ++i) {
        scratch.operand[r / 16][r % 16 * 64 + i] = static_cast<uint8_t>(w[r * k + 64 * whole + i]);
      }
    }
    step(scratch.operand[0], scratch.operand[1], 64, whole);
  }
  store_four<U>(scratch);
}

// As head_int8, for as many rows as fill whole operands; returns their number.
template <class U>
int64_t matrix_head8(const int8_t* w, const float* scale, int64_t k, int64_t rows,
                     const HeadToken* x, int64_t tokens, float* out, int64_t out_stride) {
  const int64_t done = rows / kHeadUnitRows * kHeadUnitRows;
  if (done == 0 || k > kHeadUnitMaxK) return 0;
  HeadScratch scratch;
  typename U::Config config;
  U::configure(config);
  for (int64_t m = 0; m < tokens; m += kHeadUnitTokens) {
    const int64_t count = tokens - m < kHeadUnitTokens ? tokens - m : kHeadUnitTokens;
    pack_head_tokens(x + m, count, (k + 63) / 64, true, scratch);
    for (int64_t n = 0; n < done; n += kHeadUnitRows) {
      head8_unit<U>(w + n * k, k, scratch);
      for (int64_t r = 0; r < kHeadUnitRows; ++r) {
        const int32_t* high = scratch.sums[r / 16 * 2][r % 16];
        const int32_t* low = scratch.sums[r / 16 * 2 + 1][r % 16];
        float* y = scratch.values[r / 16][r % 16];
        for (int64_t t = 0; t < kHeadUnitTokens; ++t) {
          const double sum = 256.0 * high[t] + low[t];  // exact
          y[t] = static_cast<float>(sum) * (scale[n + r] * scratch.scales[t]);
        }
      }
      for (int64_t g = 0; g < 2; ++g) {
        auto* columns = reinterpret_cast<float*>(scratch.sums);
        transpose_16(scratch.values[g], 64, columns, 16);
        for (int64_t t = 0; t < count; ++t)
          store_n(out + (m + t) * out_stride + n + 16 * g, load_n(columns + 16 * t, 16), 16);
      }
    }
  }
  U::release();
  return done;
}

// ---- int4 ---------------------------------------------------------------------------------------

// 64 features of a tile as an operand: codes 0..15.  Step is TileStep: a template, because only an
// ISA with a matrix unit has steps of whole lines and high_fields.
template <class Step>
[[gnu::always_inline]] inline void decode_head4(const uint8_t* w, uint8_t* operand) {
  repeat<8>([&]<int i>() BITNET_INLINE_LAMBDA {
    const Step raw = load_step(w + i * layout::kHeadStepBytes);
    store_step(operand + 2 * i * 64, and_bytes(raw, 15));
    store_step(operand + (2 * i + 1) * 64, and_bytes(high_fields(raw), 15));
  });
}

// As head_int4, for whole pairs of tiles; returns their number of rows.
template <class U>
int64_t matrix_head4(const uint8_t* weight, const uint16_t* scale, int64_t groups, int64_t group,
                     int64_t rows, const HeadToken* x, int64_t tokens, float* out,
                     int64_t out_stride) {
  const int64_t done = rows / kHeadUnitRows * kHeadUnitRows, steps = group / 64;
  if (done == 0 || groups * group > kHeadUnitMaxK) return 0;
  const int64_t step_bytes = 64 / layout::kHeadStepFeatures * layout::kHeadStepBytes;
  const int64_t tile_bytes = groups * steps * step_bytes;
  const int64_t tile_scales = groups * layout::kHeadTileRows;
  HeadScratch scratch;
  for (int64_t m = 0; m < tokens; m += kHeadUnitTokens) {
    const int64_t count = tokens - m < kHeadUnitTokens ? tokens - m : kHeadUnitTokens;
    pack_head_tokens(x + m, count, groups * steps, false, scratch);
    typename U::Config config;
    for (int i = 0; i < 6; ++i) config.rows[i] = static_cast<uint8_t>(count);
    U::configure(config);
    for (int64_t n = 0; n < done; n += kHeadUnitRows) {
      const int64_t tile = n / layout::kHeadTileRows;
      const uint8_t* w = weight + tile * tile_bytes;
      const uint16_t* factors = scale + tile * tile_scales;
      __builtin_memset(scratch.values, 0, sizeof scratch.values);
      for (int64_t g = 0; g < groups; ++g) {
        zero_four<U>();
        for (int64_t s = g * steps; s < (g + 1) * steps; ++s) {
          for (int64_t i = 0; i < 2 * step_bytes; i += 64)
            prefetch_l2(w + 2 * tile_bytes + 2 * s * step_bytes + i);
          decode_head4<TileStep>(w + s * step_bytes, scratch.operand[0]);
          decode_head4<TileStep>(w + tile_bytes + s * step_bytes, scratch.operand[1]);
          U::template load<4>(scratch.tokens[s][0], 64);
          U::template load<6>(scratch.operand[0], 64);
          U::template multiply<0, 4, 6>();
          U::template load<5>(scratch.tokens[s][1], 64);
          U::template multiply<1, 5, 6>();
          U::template load<7>(scratch.operand[1], 64);
          U::template multiply<2, 4, 7>();
          U::template multiply<3, 5, 7>();
        }
        store_four<U>(scratch);
        const F32x16 factor[2] = {load_bf16_n(factors + g * 16, 16),
                                  load_bf16_n(factors + tile_scales + g * 16, 16)};
        for (int64_t t = 0; t < count; ++t) {
          const int32_t* part = x[m + t].sums + g * steps;
          const TileSum excess = set1_sum(8 * (steps == 1 ? part[0] : part[0] + part[1]));
          repeat<2>([&]<int h>() BITNET_INLINE_LAMBDA {
            const TileSum high = times_256(load_sum(scratch.sums[2 * h][t]));
            const TileSum sum = add_sum(high, load_sum(scratch.sums[2 * h + 1][t]));
            float* y = scratch.values[h][t];
            store_n(y, fma(U::floats(sub_sum(sum, excess)), factor[h], load_n(y, 16)), 16);
          });
        }
      }
      for (int64_t t = 0; t < count; ++t) {
        float* to = out + (m + t) * out_stride + n;
        const F32x16 x_scale = set1(scratch.scales[t]);
        store_n(to, mul(load_n(scratch.values[0][t], 16), x_scale), 16);
        store_n(to + 16, mul(load_n(scratch.values[1][t], 16), x_scale), 16);
      }
    }
  }
  U::release();
  return done;
}
