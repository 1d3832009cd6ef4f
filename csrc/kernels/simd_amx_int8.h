// Vocabulary of the amx_int8 ISA: the avx512_vnni words, and whole tiles of tokens x rows by the
// matrix unit.  Sixteen lines of a private 2 bit tile (64 k) masked with one field are an AMX tile
// of 64 k x 16 rows as they lie; the last field is the raw lines, whose sum is that of all four.
// Must not know threads: the tile configuration is taken and given back in every call.
#pragma once

#include "kernels/simd_avx512_vnni.h"

#define BITNET_MATRIX_UNIT

namespace bitnet::BITNET_ISA {
namespace {

constexpr int64_t kMatrixFrom = 5;     // tokens; fewer are as fast by vpdpbusd
constexpr int64_t kMatrixTokens = 32;  // two tiles of tokens
constexpr int64_t kStepLines = 16;     // lines of a step: 64 k
constexpr int64_t kStepBytes = 1024;   // of one operand tile
constexpr int64_t kBlockSteps = 14;    // the tokens' part of so many steps stays in L1
constexpr int64_t kRingSlots = 4;      // decoded operands in flight
constexpr int64_t kDecodeAhead = 3;    // steps between decoding and use

// What ldtilecfg reads.  Tiles 0..3 accumulate, 4 and 5 hold tokens, 6 and 7 decoded rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if defined(BITNET_EMULATE_TILES)
inline void configure_tiles(const TileConfig& c) { emulated::tile_configure(c.rows, c.row_bytes); }
inline void release_tiles() { emulated::tile_release(); }
template <int N>
inline void zero_tile() {
  emulated::tile_zero(N);
}
template <int N>
inline void load_tile(const void* p, int64_t stride) {
  emulated::tile_load(N, p, stride);
}
template <int N>
inline void load_tile_once(const void* p, int64_t stride) {
  emulated::tile_load(N, p, stride);
}
template <int N>
inline void store_tile(void* p, int64_t stride) {
  emulated::tile_store(N, p, stride);
}
template <int C, int A, int B>
inline void multiply_tiles() {
  emulated::tile_dpbsud(C, A, B);
}
#else
// The memory clobbers keep decoding stores and tile loads in order; g++ 12's own intrinsics lack
// them.
inline void configure_tiles(const TileConfig& c) {
  __asm__ volatile("ldtilecfg %0" : : "m"(c) : "memory");
}
inline void release_tiles() { __asm__ volatile("tilerelease" : : : "memory"); }
template <int N>
inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(N));
}
template <int N>
inline void load_tile(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
// For what is not needed in L1 again soon: the tokens must not push out the decoded ring.
template <int N>
inline void load_tile_once(const void* p, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N>
inline void store_tile(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
// C[m][n] += sum over k of A[m][k] (signed) * B[k][n] (unsigned)
template <int C, int A, int B>
inline void multiply_tiles() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
#endif

// The sums of one private tile and up to 32 tokens, [dot][token][lane], and decoded operands.
struct alignas(64) MatrixScratch {
  int32_t sums[4][kMatrixTokens][16];
  uint8_t ring[kRingSlots][3][kStepBytes];
};

// Fields F .. F + N - 1 of one step, each an operand tile.
template <int F, int N>
inline void decode_step(const uint8_t* w, int64_t ahead, uint8_t (*slot)[kStepBytes]) {
  for (int64_t line = 0; line < kStepLines; ++line) {
    const TileLine v = load_line(w + line * 64);
    _mm_prefetch(reinterpret_cast<const char*>(w + line * 64 + ahead), _MM_HINT_T1);
    store_line(slot[0] + line * 64, and_bytes(v, 3 << (2 * F)));
    if constexpr (N > 1) store_line(slot[1] + line * 64, and_bytes(v, 3 << (2 * F + 2)));
    if constexpr (N > 2) store_line(slot[2] + line * 64, and_bytes(v, 3 << (2 * F + 4)));
  }
}

// Walks steps [0, steps): decodes kDecodeAhead steps before `use(step, slot)` takes them.
template <int F, int N, class Use>
inline void walk_steps(const uint8_t* w, int64_t steps, int64_t ahead, MatrixScratch& scratch,
                       const Use& use) {
  for (int64_t s = 0; s < steps + kDecodeAhead; ++s) {
    if (s < steps) decode_step<F, N>(w + s * kStepBytes, ahead, scratch.ring[s % kRingSlots]);
    const int64_t done = s - kDecodeAhead;
    if (done >= 0) use(done, scratch.ring[done % kRingSlots]);
  }
}

template <int N>
inline void begin_sum(bool first, const int32_t* sums) {
  if (first) {
    zero_tile<N>();
  } else {
    load_tile<N>(sums, 64);
  }
}

// Two tiles of tokens x dots D and D + 1 over `steps` steps.  The last dot of all is the raw byte.
template <int D>
void block_2x2(const uint8_t* w, int64_t steps, bool first, const int8_t* x, int64_t x_stride,
               int64_t ahead, MatrixScratch& scratch) {
  auto& sums = scratch.sums;
  begin_sum<0>(first, sums[D][0]);
  begin_sum<1>(first, sums[D + 1][0]);
  begin_sum<2>(first, sums[D][16]);
  begin_sum<3>(first, sums[D + 1][16]);
  walk_steps<D, D == 0 ? 2 : 1>(w, steps, ahead, scratch, [&](int64_t s, auto& slot) {
    load_tile_once<4>(x + s * 64, x_stride);
    load_tile_once<5>(x + 16 * x_stride + s * 64, x_stride);
    load_tile<6>(slot[0], 64);
    load_tile<7>(D == 0 ? slot[1] : w + s * kStepBytes, 64);
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  });
  store_tile<0>(sums[D][0], 64);
  store_tile<1>(sums[D + 1][0], 64);
  store_tile<2>(sums[D][16], 64);
  store_tile<3>(sums[D + 1][16], 64);
}

// One tile of tokens x all four dots over all steps.
void block_1x4(const uint8_t* w, int64_t steps, const int8_t* x, int64_t x_stride, int64_t ahead,
               MatrixScratch& scratch) {
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  walk_steps<0, 3>(w, steps, ahead, scratch, [&](int64_t s, auto& slot) {
    load_tile_once<4>(x + s * 64, x_stride);
    load_tile<5>(slot[0], 64);
    load_tile<6>(slot[1], 64);
    load_tile<7>(slot[2], 64);
    multiply_tiles<0, 4, 5>();
    multiply_tiles<1, 4, 6>();
    multiply_tiles<2, 4, 7>();
    load_tile<5>(w + s * kStepBytes, 64);
    multiply_tiles<3, 4, 5>();
  });
  store_tile<0>(scratch.sums[0][0], 64);
  store_tile<1>(scratch.sums[1][0], 64);
  store_tile<2>(scratch.sums[2][0], 64);
  store_tile<3>(scratch.sums[3][0], 64);
}

void finish_matrix(const MatrixScratch& scratch, const int32_t* x_sum, int64_t tokens, int32_t* out,
                   int64_t out_stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    TileSum s[4];
    for (int f = 0; f < 4; ++f) s[f] = load_sum(scratch.sums[f][t]);
    TwoBit::finish(s);
    const TileSum zeros = set1_sum(x_sum[t]);
    for (int f = 0; f < 4; ++f) store_sum(out + t * out_stride + 16 * f, sub_sum(s[f], zeros));
  }
}

// Up to 32 tokens x every tile of the job.
void matrix_tokens(const TileJob& job, int64_t token, int64_t tokens, MatrixScratch& scratch) {
  const int64_t steps = job.lines / kStepLines, tile_bytes = job.lines * 64;
  const int8_t* x = job.x + token * job.x_stride;
  const bool small = tokens <= 16;
  TileConfig config;
  const auto low = static_cast<uint8_t>(small ? tokens : 16);
  const auto high = static_cast<uint8_t>(small ? 16 : tokens - 16);
  config.rows[0] = config.rows[1] = config.rows[4] = low;
  config.rows[2] = config.rows[3] = small ? low : high;
  config.rows[5] = high;
  configure_tiles(config);
  for (int64_t i = 0; i < job.tile_count; ++i) {
    const uint8_t* w = job.tiles + i * tile_bytes;
    if (small) {
      block_1x4(w, steps, x, job.x_stride, tile_bytes, scratch);
    } else {
      for (int64_t s = 0; s < steps; s += kBlockSteps) {
        const int64_t count = steps - s < kBlockSteps ? steps - s : kBlockSteps;
        const uint8_t* ws = w + s * kStepBytes;
        block_2x2<0>(ws, count, s == 0, x + s * 64, job.x_stride, tile_bytes, scratch);
        block_2x2<2>(ws, count, s == 0, x + s * 64, job.x_stride, tile_bytes, scratch);
      }
    }
    finish_matrix(scratch, job.x_sum + token, tokens, job.out + token * job.out_stride + i * 64,
                  job.out_stride);
  }
}

// The tile configuration belongs to the thread and is given back: oneDNN in the same process has
// its own.
void matrix_tile_gemm(const TileJob& job) {
  MatrixScratch scratch;
  for (int64_t t = 0; t < job.tokens; t += kMatrixTokens) {
    matrix_tokens(job, t, job.tokens - t < kMatrixTokens ? job.tokens - t : kMatrixTokens, scratch);
  }
  release_tiles();
}

}  // namespace
}  // namespace bitnet::BITNET_ISA
