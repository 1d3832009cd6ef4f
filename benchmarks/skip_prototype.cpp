// Products that skip zeros, for docs/notes/sparsity.md alone: what a decode of one token gains
// where most inputs of DOWN are zero and most gates make their row of UP needless.
//
//   g++ -O3 -std=c++20 -pthread -march=native benchmarks/skip_prototype.cpp -o skip_prototype
//   ./skip_prototype [down|up] [1|2 threads] [seconds]      (-march=haswell: the AVX2 variant)
//
// DOWN, N = 2560 rows, K = 6912, 2 bits a weight; field f of a byte is its bits 2f+1..2f:
//   quads U    [N / 64 U][K / 4][U][16 lanes][4 k]: a line is 4 consecutive k of 64 rows, field f
//   of
//              lane l is row 16 f + l. U = 1 is the package's own tile of AVX-512, `2bit`.
//   columns U  [N / 256 U][K][U][64]: a line is one k of 256 rows, field f of byte r is row 64 f +
//   r.
//              Four (AVX2: two) columns of the list are interleaved in registers.
// UP, N = 6912, K = 2560:
//   quads 1    as above, dense
//   tiles      [N / 16][K / 16][16 rows][4 k], field f is k = 16 s + 4 f + j: skips 16 rows
//   rows       canonical: [N][K / 128][32], field 3 - f of byte j is k = 128 b + 32 f + j: skips a
//   row
//
// Every layout has as many bytes, so that one pool of random codes serves as weights of all; each
// call meets bytes that left the caches long ago. Calls include making the list. All variants take
// turns; a call during which its thread lost the CPU is thrown away. Sums are checked by scalar
// code.
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kRows = 2560, kInputs = 6912;  // of DOWN; UP has them the other way round
constexpr int64_t kBytes = kRows * kInputs / 4;
constexpr int64_t kCopies = 122;  // 540 MB
constexpr int64_t kLine = 64;

// Into which level lines of the list are fetched ahead. Zen 4 has more misses on the way into its
// second level than into its first.
enum Fetched { kNone, kL1, kL2 };

// g++ 12 drops the intrinsic where nothing else depends on it. An "m" operand might be a sum, and
// would send all sums to memory.
template <Fetched to>
inline void prefetch(const void* p) {
  if constexpr (to == kL1) asm volatile("prefetcht0 (%0)" : : "r"(p));
  if constexpr (to == kL2) asm volatile("prefetcht1 (%0)" : : "r"(p));
}

// f.operator()<0>() .. <N - 1>(): constant indices keep sums in registers
template <int N, class F>
[[gnu::always_inline]] inline void repeat(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, N>());
}
#define INLINE __attribute__((always_inline))

// What a token multiplies: offsets of lines and four (columns: one) int8 each.
struct List {
  std::vector<uint32_t> at = std::vector<uint32_t>(2 * kInputs + 512);
  std::vector<int8_t> x = std::vector<int8_t>(4 * kInputs + 512);
  int64_t n = 0;

  // The list goes on with the next panel's lines, for prefetches behind the end.
  void extend(int64_t panel_bytes, int64_t ahead) {
    for (int64_t i = 0; i < ahead; ++i) at[n + i] = at[i % std::max<int64_t>(n, 1)] + panel_bytes;
  }
};

// W: bytes of x that stand or fall together, 4 or 1
template <int W>
void make_list(const int8_t* x, int64_t k, uint32_t stride, bool all, List& list) {
  int64_t n = 0;
#ifdef __AVX512F__
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < k / W; i += 16) {
    __m512i v;
    if constexpr (W == 4) {
      v = _mm512_loadu_si512(x + 4 * i);
    } else {
      v = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
    }
    const __mmask16 some = all ? 0xffff : _mm512_test_epi32_mask(v, v);
    const __m512i at = _mm512_mullo_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(i)),
                                          _mm512_set1_epi32(stride));
    _mm512_storeu_si512(&list.at[n], _mm512_maskz_compress_epi32(some, at));
    const __m512i kept = _mm512_maskz_compress_epi32(some, v);
    if constexpr (W == 4) {
      _mm512_storeu_si512(&list.x[4 * n], kept);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&list.x[n]), _mm512_cvtepi32_epi8(kept));
    }
    n += __builtin_popcount(some);
  }
#else
  for (int64_t i = 0; i < k / W; ++i) {
    int32_t v = 0;
    std::memcpy(&v, x + W * i, W);
    list.at[n] = i * stride;
    std::memcpy(&list.x[W * n], &v, W);
    n += all || v != 0;
  }
#endif
  if constexpr (W == 1) {  // whole groups of four
    for (; n % 4 != 0; ++n) {
      list.at[n] = n > 0 ? list.at[n - 1] : 0;
      list.x[n] = 0;
    }
  }
  list.n = n;
}

inline int32_t four(const int8_t* x) {
  int32_t v;
  std::memcpy(&v, x, 4);
  return v;
}

// ---- quads: S lines, `apart` bytes from one to the next, for each quad of [begin, end)
// -------------
//
// Sums of a line: [field][16]; of AVX-512 field f is 4^f times too large (no shifts in the loop).

#ifdef __AVX512F__
constexpr bool kScaled = true;

// In place: g++ 12 copies the sums of the intrinsic, and spills them.
inline void dot(__m512i& sum, __m512i codes, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
}

template <int S, class Fetch>
[[gnu::noinline]] void quads(const uint8_t* w, int64_t apart, const List& list, int64_t begin,
                             int64_t end, int32_t* sums, const Fetch& fetch) {
  __m512i acc[4 * S];
  repeat<4 * S>([&]<int i>() INLINE { acc[i] = _mm512_loadu_si512(sums + 16 * i); });
  const __m512i masks[4] = {_mm512_set1_epi8(3), _mm512_set1_epi8(12), _mm512_set1_epi8(48),
                            _mm512_set1_epi8(static_cast<char>(192))};
#pragma GCC unroll 1
  for (int64_t i = begin; i < end; ++i) {
    const __m512i x = _mm512_set1_epi32(four(&list.x[4 * i]));
    fetch(i);
    const uint8_t* from = w + list.at[i];
    __m512i v[S];
    repeat<S>([&]<int s>() INLINE { v[s] = _mm512_loadu_si512(from + s * apart); });
    repeat<4 * S>([&]<int i>()
                      INLINE { dot(acc[i], _mm512_and_si512(v[i / 4], masks[i % 4]), x); });
  }
  repeat<4 * S>([&]<int i>() INLINE { _mm512_storeu_si512(sums + 16 * i, acc[i]); });
}

// One line of every column of [begin, end), a multiple of 4. Sums: [field][4 vectors][16], row
// 64 f + 16 (lane / 4) + 4 v + lane % 4.
template <class Fetch>
[[gnu::noinline]] void columns(const uint8_t* w, const List& list, int64_t begin, int64_t end,
                               int32_t* sums, const Fetch& fetch) {
  __m512i acc[16];
  repeat<16>([&]<int i>() INLINE { acc[i] = _mm512_loadu_si512(sums + 16 * i); });
  const __m512i masks[4] = {_mm512_set1_epi8(3), _mm512_set1_epi8(12), _mm512_set1_epi8(48),
                            _mm512_set1_epi8(static_cast<char>(192))};
#pragma GCC unroll 1
  for (int64_t i = begin; i < end; i += 4) {
    const __m512i x = _mm512_set1_epi32(four(&list.x[i]));
    fetch(i);
    const __m512i a = _mm512_loadu_si512(w + list.at[i]);
    const __m512i b = _mm512_loadu_si512(w + list.at[i + 1]);
    const __m512i c = _mm512_loadu_si512(w + list.at[i + 2]);
    const __m512i d = _mm512_loadu_si512(w + list.at[i + 3]);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
    const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
    const __m512i v[4] = {_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd),
                          _mm512_unpacklo_epi16(AB, CD), _mm512_unpackhi_epi16(AB, CD)};
    repeat<16>([&]<int i>() INLINE { dot(acc[i], _mm512_and_si512(v[i % 4], masks[i / 4]), x); });
  }
  repeat<16>([&]<int i>() INLINE { _mm512_storeu_si512(sums + 16 * i, acc[i]); });
}
constexpr int64_t column_sum_at(int64_t row) {  // row of 256
  const int64_t f = row / 64, r = row % 64;
  return 64 * f + 16 * (r % 16 / 4) + 4 * (r / 16) + r % 4;
}
constexpr int64_t kMostQuads = 1 << 30, kMostColumns = 1 << 30;  // sums have 32 bits
#else
constexpr bool kScaled = false;
inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i field(__m256i v, int f) {
  return _mm256_and_si256(_mm256_srli_epi16(v, 2 * f), _mm256_set1_epi8(3));
}
inline void add(int32_t* to, __m256i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi32(load(to), v));
}

// Sums of 16 bits hold 64 products of pairs at most, so callers pause after 64 quads or 128
// columns.
template <int S, class Fetch>
[[gnu::noinline]] void quads(const uint8_t* w, int64_t apart, const List& list, int64_t begin,
                             int64_t end, int32_t* sums, const Fetch& fetch) {
#pragma GCC unroll 1
  for (int s = 0; s < S; ++s) {  // lines of S > 1 lie in the first-level cache by then
    __m256i acc[2][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t i = begin; i < end; ++i) {
      const __m256i x = _mm256_set1_epi32(four(&list.x[4 * i]));
      if (s == 0) fetch(i);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i v = load(w + list.at[i] + s * apart + 32 * h);
#pragma GCC unroll 4
        for (int f = 0; f < 4; ++f) {
          acc[h][f] = _mm256_add_epi16(acc[h][f], _mm256_maddubs_epi16(field(v, f), x));
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      add(sums + 64 * s + 16 * (i % 4) + 8 * (i / 4),
          _mm256_madd_epi16(acc[i / 4][i % 4], _mm256_set1_epi16(1)));
    }
  }
}

template <class Fetch>
[[gnu::noinline]] void columns(const uint8_t* w, const List& list, int64_t begin, int64_t end,
                               int32_t* sums, const Fetch& fetch) {
  for (int h = 0; h < 2; ++h) {
    __m256i acc[2][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t i = begin; i < end; i += 2) {
      int16_t two;
      std::memcpy(&two, &list.x[i], 2);
      const __m256i x = _mm256_set1_epi16(two);
      if (h == 0 && i % 4 == 0) fetch(i);
      const __m256i a = load(w + list.at[i] + 32 * h), b = load(w + list.at[i + 1] + 32 * h);
      const __m256i v[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
#pragma GCC unroll 4
        for (int f = 0; f < 4; ++f) {
          acc[j][f] = _mm256_add_epi16(acc[j][f], _mm256_maddubs_epi16(field(v[j], f), x));
        }
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f) {
        int32_t* to = sums + 64 * f + 32 * h + 8 * j;
        add(to, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(acc[j][f])));
        add(to + 16, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(acc[j][f], 1)));
      }
    }
  }
}
constexpr int64_t column_sum_at(int64_t row) { return row; }
constexpr int64_t kMostQuads = 64, kMostColumns = 128;
#endif

// ---- a whole product over such a layout -------------------------------------------------------

struct Share {  // of a thread
  int id, threads;
};

// Panels of U lines, S of them at a time; all = dense, in order, by the same loop. Where U = 1 the
// S lines belong to panels a share's S-th apart: as many streams. U > S: blocks of `ahead` items, U
// / S passes over each, which fetch the next block's lines in the order of memory.
template <int U, int S, Fetched kTo>
void down_quads(const uint8_t* w, const int8_t* x, bool all, int64_t ahead, int64_t rows, int64_t k,
                Share share, List& list, int32_t* sums) {
  make_list<4>(x, k, U * kLine, all, list);
  const int64_t panel_bytes = k / 4 * U * kLine;
  list.extend(panel_bytes, ahead);
  const int64_t panels = rows / 64 / U / share.threads, first = share.id * panels;
  constexpr int kStreams = U == 1 ? S : 1, kPasses = U == 1 ? 1 : U / S;
  const int64_t apart = U == 1 ? panels / S * panel_bytes : kLine;
  const int64_t block = std::min(kMostQuads, kPasses > 1 ? ahead : kMostQuads);
  for (int64_t p = first; p < first + panels / kStreams; ++p) {
    const uint8_t* wp = w + p * panel_bytes;
    alignas(64) int32_t mine[(U == 1 ? S : U) * 64] = {};
    for (int64_t b = 0; b < list.n; b += block) {
      const int64_t end = std::min(list.n, b + block);
      for (int pass = 0; pass < kPasses; ++pass) {
        quads<S>(wp + pass * S * kLine, apart, list, b, end, mine + pass * S * 64, [&](int64_t i) {
          if (kTo == kNone) return;
          int64_t item = i + ahead, line = 0;
          if (kPasses > 1) {
            const int64_t at = pass * block + i - b;
            item = b + block + at / kPasses;
            line = at % kPasses * S;
            if (item > list.n + ahead - 1) return;
          }
          const uint8_t* to = wp + list.at[item] + line * kLine;
#pragma GCC unroll 32
          for (int s = 0; s < S; ++s) prefetch<kTo>(to + s * apart);
        });
      }
    }
    for (int s = 0; s < (U == 1 ? S : U); ++s) {
      const int64_t row = U == 1 ? 64 * (p + s * (panels / S)) : 64 * (U * p + s);
      std::memcpy(sums + row, mine + 64 * s, 64 * sizeof *sums);
    }
  }
}

template <int U, Fetched kTo>
void down_columns(const uint8_t* w, const int8_t* x, bool all, int64_t ahead, Share share,
                  List& list, int32_t* sums) {
  make_list<1>(x, kInputs, U * kLine, all, list);
  const int64_t panel_bytes = kInputs * U * kLine;
  list.extend(panel_bytes, ahead + 4);
  const int64_t panels = kRows / 256 / U / share.threads, first = share.id * panels;
  const int64_t block = std::min(kMostColumns, U > 1 ? ahead : kMostColumns);
  for (int64_t p = first; p < first + panels; ++p) {
    const uint8_t* wp = w + p * panel_bytes;
    int32_t* mine = sums + p * U * 256;
    std::memset(mine, 0, U * 256 * sizeof *mine);
    for (int64_t b = 0; b < list.n; b += block) {
      const int64_t end = std::min(list.n, b + block);
      for (int pass = 0; pass < U; ++pass) {
        columns(wp + pass * kLine, list, b, end, mine + pass * 256, [&](int64_t i) {
          if (kTo == kNone) return;
          if (U == 1) {
            for (int j = 0; j < 4; ++j) prefetch<kTo>(wp + list.at[i + ahead + j]);
            return;
          }
          for (int j = 0; j < 4; ++j) {
            const int64_t at = pass * block + i - b + j, item = b + block + at / U;
            if (item < list.n + ahead) prefetch<kTo>(wp + list.at[item] + at % U * kLine);
          }
        });
      }
    }
  }
}

// ---- UP ---------------------------------------------------------------------------------------

// Rows (kUnit = 1) or tiles of 16 rows whose `wanted` is not 0, an equal share for each thread.
Share cut(int64_t n, Share share) {
  return {static_cast<int>(n * share.id / share.threads),
          static_cast<int>(n * (share.id + 1) / share.threads)};
}

#ifdef __AVX512F__
using Vector = __m512i;
constexpr int kVector = 64;
#else
using Vector = __m256i;
constexpr int kVector = 32;
#endif

// [line][field][64] from x, for canonical rows: field 0 is the highest bits
void spread(const int8_t* x, int8_t* to) {
  for (int64_t i = 0; i < kRows / 128; ++i) {
    for (int f = 0; f < 4; ++f) {
      const int64_t at = kVector == 64 ? 256 * (i / 2) + 64 * f + 32 * (i % 2) : 128 * i + 32 * f;
      std::memcpy(to + at, x + 128 * i + 32 * f, 32);
    }
  }
}

// Four canonical rows and one token; prefetches four others, row after row.
template <Fetched kTo>
void four_rows(const uint8_t* const* w, const uint8_t* const* next, const int8_t* spread_x,
               int32_t* sums) {
  constexpr int64_t kRowBytes = kRows / 4;
#ifdef __AVX512F__
  __m512i acc[4][4];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i / 4][i % 4] = _mm512_setzero_si512();
  const __m512i masks[4] = {_mm512_set1_epi8(static_cast<char>(192)), _mm512_set1_epi8(48),
                            _mm512_set1_epi8(12), _mm512_set1_epi8(3)};
  for (int64_t at = 0; at < kRowBytes; at += 64) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int f = 0; f < 4; ++f) x[f] = _mm512_loadu_si512(spread_x + 4 * at + 64 * f);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int64_t line = at / 16 + r;
      prefetch<kTo>(next[line / (kRowBytes / 64)] + line % (kRowBytes / 64) * 64);
      const __m512i v = _mm512_loadu_si512(w[r] + at);
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f) {
        dot(acc[r][f], _mm512_and_si512(v, masks[f]), x[f]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {  // field f is 4^(3 - f) times too large
    const __m512i a =
        _mm512_add_epi32(_mm512_srai_epi32(acc[r][0], 6), _mm512_srai_epi32(acc[r][1], 4));
    const __m512i b = _mm512_add_epi32(_mm512_srai_epi32(acc[r][2], 2), acc[r][3]);
    sums[r] = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
  }
#else
  __m256i acc[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) acc[i] = _mm256_setzero_si256();
  for (int64_t at = 0; at < kRowBytes; at += 32) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int64_t line = at / 64 * 4 + r;
      if (at % 64 == 0) {
        prefetch<kTo>(next[line / (kRowBytes / 64)] + line % (kRowBytes / 64) * 64);
      }
      const __m256i v = load(w[r] + at);
      const auto part = [&](int f) {
        return _mm256_maddubs_epi16(field(v, 3 - f), load(spread_x + 4 * at + 32 * f));
      };
      const __m256i pairs =
          _mm256_add_epi16(_mm256_add_epi16(part(0), part(1)), _mm256_add_epi16(part(2), part(3)));
      // 4 * 508 a step and 20 steps do not fit 16 bits
      acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    alignas(32) int32_t spilled[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(spilled), acc[r]);
    int32_t sum = 0;
    for (int i = 0; i < 8; ++i) sum += spilled[i];
    sums[r] = sum;
  }
#endif
}

// groups of 4 rows, the ones `ahead` groups behind are prefetched
template <Fetched kTo>
void up_rows(const uint8_t* w, const int8_t* x, const int8_t* wanted, int64_t ahead, Share share,
             List& list, int32_t* sums) {
  constexpr int64_t kRowBytes = kRows / 4;
  alignas(64) int8_t spread_x[kRows];
  spread(x, spread_x);
  make_list<1>(wanted, kInputs, 1, false, list);
  list.extend(0, 4 * ahead + 4);
  const int64_t groups = list.n / 4;
  const Share mine = cut(groups, share);
  for (int64_t g = mine.id; g < mine.threads; ++g) {
    const uint8_t *rows[4], *next[4];
    int32_t out[4];
    for (int r = 0; r < 4; ++r) {
      rows[r] = w + kRowBytes * list.at[4 * g + r];
      next[r] = w + kRowBytes * list.at[4 * (g + ahead) + r];
    }
    four_rows<kTo>(rows, next, spread_x, out);
    for (int r = 0; r < 4; ++r) sums[list.at[4 * g + r]] = out[r];
  }
}

// tiles of 16 rows
template <Fetched kTo>
void up_tiles(const uint8_t* w, const int8_t* x, const int8_t* wanted, int64_t ahead, Share share,
              List& list, int32_t* sums) {
  constexpr int64_t kTileBytes = 16 * kRows / 4;
  int64_t n = 0;
  for (int64_t t = 0; t < kInputs / 16; ++t) {
    list.at[n] = t;
    n += wanted[16 * t] != 0;  // the caller sets all 16 alike
  }
  list.at[n] = list.at[n > 0 ? n - 1 : 0];
  const Share mine = cut(n, share);
  for (int64_t i = mine.id; i < mine.threads; ++i) {
    const uint8_t* tile = w + kTileBytes * list.at[i];
    const uint8_t* next = w + kTileBytes * list.at[i + 1];
    int32_t* out = sums + 16 * list.at[i];
#ifdef __AVX512F__
    __m512i acc[4];
    const __m512i masks[4] = {_mm512_set1_epi8(3), _mm512_set1_epi8(12), _mm512_set1_epi8(48),
                              _mm512_set1_epi8(static_cast<char>(192))};
#pragma GCC unroll 4
    for (int f = 0; f < 4; ++f) acc[f] = _mm512_setzero_si512();
    for (int64_t at = 0; at < kTileBytes; at += 64) {
      prefetch<kTo>(at + ahead < kTileBytes ? tile + at + ahead : next + at + ahead - kTileBytes);
      const __m512i v = _mm512_loadu_si512(tile + at);
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f) {
        dot(acc[f], _mm512_and_si512(v, masks[f]), _mm512_set1_epi32(four(x + at / 4 + 4 * f)));
      }
    }
    const __m512i a = _mm512_add_epi32(acc[0], _mm512_srai_epi32(acc[1], 2));
    const __m512i b = _mm512_add_epi32(_mm512_srai_epi32(acc[2], 4), _mm512_srai_epi32(acc[3], 6));
    _mm512_storeu_si512(out, _mm512_add_epi32(a, b));
#else
    __m256i acc[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t at = 0; at < kTileBytes; at += 64) {
      prefetch<kTo>(at + ahead < kTileBytes ? tile + at + ahead : next + at + ahead - kTileBytes);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i v = load(tile + at + 32 * h);
        const auto part = [&](int f) {
          return _mm256_maddubs_epi16(field(v, f), _mm256_set1_epi32(four(x + at / 4 + 4 * f)));
        };
        const __m256i pairs = _mm256_add_epi16(_mm256_add_epi16(part(0), part(1)),
                                               _mm256_add_epi16(part(2), part(3)));
        acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      }
    }
    for (int h = 0; h < 2; ++h) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * h), acc[h]);
    }
#endif
  }
}

// ---- reading alone ----------------------------------------------------------------------------

void read_all(const uint8_t* w, Share share, int32_t* sums) {
  const int64_t bytes = kBytes / share.threads, quarter = bytes / 4;
  const uint8_t* from = w + share.id * bytes;
  Vector seen[4] = {};
  for (int64_t at = 0; at < quarter; at += kVector) {
    for (int s = 0; s < 4; ++s) {
      Vector v;
      std::memcpy(&v, from + s * quarter + at, sizeof v);
      seen[s] |= v;
    }
  }
  seen[0] |= seen[1] | seen[2] | seen[3];
  std::memcpy(sums, &seen[0], 4);
}

// ---- scalar references ------------------------------------------------------------------------

int code(uint8_t byte, int64_t f) { return byte >> (2 * f) & 3; }

int quad_code(const uint8_t* w, int U, int64_t k_count, int64_t n, int64_t k) {
  const int64_t r = n % 64, line = (n / (64 * U) * (k_count / 4) + k / 4) * U + n / 64 % U;
  return code(w[line * kLine + r % 16 * 4 + k % 4], r / 16);
}
int column_code(const uint8_t* w, int U, int64_t n, int64_t k) {
  const int64_t r = n % 256, line = (n / (256 * U) * kInputs + k) * U + n / 256 % U;
  return code(w[line * kLine + r % 64], r / 64);
}
int row_code(const uint8_t* w, int64_t n, int64_t k) {
  return code(w[n * (kRows / 4) + k / 128 * 32 + k % 32], 3 - k % 128 / 32);
}
int tile_code(const uint8_t* w, int64_t n, int64_t k) {
  return code(w[n / 16 * (4 * kRows) + k / 16 * kLine + n % 16 * 4 + k % 4], k % 16 / 4);
}

// ---- timing -----------------------------------------------------------------------------------

struct Variant {
  std::string layout;
  double zeros;
  int64_t ahead;  // of prefetches
  Fetched to;
  // token t; dense where zeros < 0
  std::function<void(const uint8_t*, int t, Share, List&, int32_t*)> run;
  // code of the layout, and where the sum of a row is, scaled by 4^
  std::function<int(const uint8_t*, int64_t n, int64_t k)> code_of;
  std::function<int64_t(int64_t n)> sum_at;
  std::function<int(int64_t n)> shift;
  std::function<bool(int t, int64_t n)> needed;
  std::vector<double> us, to_dense;
  double now = 0;
};

double clock_us(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return 1e6 * t.tv_sec + 1e-3 * t.tv_nsec;
}

constexpr int kTokens = 8;
using Tokens = std::vector<std::vector<int8_t>>;

Tokens make_tokens(int64_t k, int64_t group, double zeros, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> chance(0, 1);
  Tokens tokens(kTokens, std::vector<int8_t>(k + 64));
  for (auto& x : tokens) {
    for (int64_t i = 0; i < k; i += group) {
      const bool zero = chance(random) < zeros;
      for (int64_t j = i; j < i + group; ++j) {
        x[j] = zero ? 0 : static_cast<int8_t>(1 + random() % 127);
        if (random() % 2) x[j] = static_cast<int8_t>(-x[j]);
      }
    }
  }
  return tokens;
}

class Bench {
 public:
  Bench(const std::string& product, int threads) : threads_(threads) {
    void* p =
        mmap(nullptr, kCopies * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) std::exit(1);
    madvise(p, kCopies * kBytes, MADV_HUGEPAGE);
    pool_ = static_cast<uint8_t*>(p);
    std::mt19937 random(1);
    for (int64_t i = 0; i < kBytes; ++i) {
      pool_[i] = random() % 3 | random() % 3 << 2 | random() % 3 << 4 | random() % 3 << 6;
    }
    for (int64_t c = 1; c < kCopies; ++c) std::memcpy(pool_ + c * kBytes, pool_, kBytes);
    product == "up" ? add_up() : add_down();
    for (int i = 1; i < threads_; ++i) helpers_.emplace_back([this, i] { help(i); });
    pin(0);
  }

  void check() {
    for (Variant& v : variants_) {
      if (!v.code_of) continue;
      std::vector<int32_t> sums(kInputs + 64, 0);
      for (int i = 0; i < threads_; ++i) v.run(pool_, 3, {i, threads_}, lists_[i], sums.data());
      const auto& x = *v_tokens_[&v - variants_.data()];
      std::mt19937 random(7);
      for (int i = 0; i < 300; ++i) {
        const int64_t n = random() % rows_;
        if (v.needed && !v.needed(3, n)) continue;
        int64_t want = 0;
        for (int64_t k = 0; k < k_; ++k) want += v.code_of(pool_, n, k) * x[3][k];
        const int shift = v.shift ? v.shift(n) : 0;
        if (sums[v.sum_at(n)] != want << shift) {
          std::printf("WRONG: %s zeros %.3f row %ld\n", v.layout.c_str(), v.zeros, long(n));
          std::exit(1);
        }
      }
    }
    std::printf("sums checked: %zu variants\n", variants_.size());
  }

  void measure(double seconds) {
    const double begin = clock_us(CLOCK_MONOTONIC);
    while (clock_us(CLOCK_MONOTONIC) - begin < 1e6 * seconds) {
      for (Variant& v : variants_) v.now = call(v);
      const double dense = variants_[0].now;
      for (Variant& v : variants_) {
        if (v.now > 0) v.us.push_back(v.now);
        if (v.now > 0 && dense > 0) v.to_dense.push_back(v.now / dense);
      }
    }
  }

  void print() const {
    std::printf("%-20s %6s %5s %5s  %8s %8s  %8s  %s\n", "layout", "zeros", "into", "ahead",
                "best us", "median", "of dense", "rounds");
    for (const Variant& v : variants_) {
      if (v.us.empty()) continue;
      std::vector<double> us = v.us, ratio = v.to_dense;
      std::sort(us.begin(), us.end());
      std::sort(ratio.begin(), ratio.end());
      std::printf("%-20s %6.3f %5s %5ld  %8.1f %8.1f  %8.3f  %zu\n", v.layout.c_str(), v.zeros,
                  v.to == kNone ? "-"
                  : v.to == kL1 ? "L1"
                                : "L2",
                  long(v.ahead), us[0], us[us.size() / 2],
                  ratio.empty() ? 0. : ratio[ratio.size() / 2], us.size());
    }
  }

  void stop() {
    job_ = nullptr;
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& t : helpers_) t.join();
  }

 private:
  static constexpr int kCalls = 3;  // one after the other, each with other weights

  static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }

  // Wall time of a thread's part, and whether it had its CPU all the time.
  void part(int id) {
    ready_.fetch_add(1);
    for (int spins = 0; ready_.load() < threads_; ++spins) {
      if (spins % 4096 == 4095) std::this_thread::yield();
    }
    const double cpu = clock_us(CLOCK_THREAD_CPUTIME_ID), wall = clock_us(CLOCK_MONOTONIC);
    for (int c = 0; c < kCalls; ++c) {
      const int64_t copy = (at_ + c) % kCopies;
      job_->run(pool_ + copy * kBytes, (at_ + c) % kTokens, {id, threads_}, lists_[id], sums_[id]);
    }
    begins_[id] = wall;
    ends_[id] = clock_us(CLOCK_MONOTONIC);
    lost_[id] = ends_[id] - wall - (clock_us(CLOCK_THREAD_CPUTIME_ID) - cpu);
  }

  void help(int id) {
    pin(id);
    for (uint32_t seen = 0;;) {
      round_.wait(seen);
      seen = round_.load();
      if (job_ == nullptr) return;
      part(id);
      done_.fetch_add(1);
    }
  }

  // us of one call; 0: other processes had a CPU
  double call(Variant& v) {
    for (int tries = 0; tries < 4; ++tries) {
      job_ = &v;
      ready_.store(0);
      done_.store(0);
      round_.fetch_add(1);
      round_.notify_all();
      part(0);
      while (done_.load() < threads_ - 1) std::this_thread::yield();
      at_ += kCalls;
      double first = begins_[0], begin = first, end = ends_[0], lost = lost_[0];
      for (int i = 1; i < threads_; ++i) {
        first = std::min(first, begins_[i]);
        begin = std::max(begin, begins_[i]);
        end = std::max(end, ends_[i]);
        lost = std::max(lost, lost_[i]);
      }
      if (lost < 15 && begin - first < 15) return (end - first) / kCalls;
    }
    return 0;
  }

  const Tokens* tokens(int64_t group, double zeros) {
    all_tokens_.push_back(std::make_unique<Tokens>(make_tokens(k_, group, zeros, 11)));
    return all_tokens_.back().get();
  }

  void add(Variant v, const Tokens* x) {
    variants_.push_back(std::move(v));
    v_tokens_.push_back(x);
  }

  template <int U, int S, Fetched kTo>
  void add_quads(const char* name, double zeros, const Tokens* x, int64_t ahead) {
    Variant v{name, zeros, ahead, kTo, {}, {}, {}, {}, {}, {}, {}};
    const int64_t rows = rows_, k = k_;
    v.run = [=](const uint8_t* w, int t, Share s, List& list, int32_t* sums) {
      down_quads<U, S, kTo>(w, (*x)[t].data(), zeros < 0, ahead, rows, k, s, list, sums);
    };
    v.code_of = [=](const uint8_t* w, int64_t n, int64_t i) { return quad_code(w, U, k, n, i); };
    v.sum_at = [](int64_t n) { return n; };
    v.shift = [](int64_t n) { return kScaled ? 2 * (n % 64 / 16) : 0; };
    add(std::move(v), x);
  }

  template <int U, Fetched kTo>
  void add_columns(const char* name, double zeros, const Tokens* x, int64_t ahead) {
    Variant v{name, zeros, ahead, kTo, {}, {}, {}, {}, {}, {}, {}};
    v.run = [=](const uint8_t* w, int t, Share s, List& list, int32_t* sums) {
      down_columns<U, kTo>(w, (*x)[t].data(), zeros < 0, ahead, s, list, sums);
    };
    v.code_of = [=](const uint8_t* w, int64_t n, int64_t i) { return column_code(w, U, n, i); };
    v.sum_at = [](int64_t n) { return n / 256 * 256 + column_sum_at(n % 256); };
    v.shift = [](int64_t n) { return kScaled ? 2 * (n % 256 / 64) : 0; };
    add(std::move(v), x);
  }

  void add_read() {
    Variant v{"read", -1, 0, kNone, {}, {}, {}, {}, {}, {}, {}};
    v.run = [](const uint8_t* w, int, Share s, List&, int32_t* sums) { read_all(w, s, sums); };
    add(std::move(v), nullptr);
  }

#ifdef __AVX512F__
  static constexpr int kWide = 5;
#else
  static constexpr int kWide = 1;
#endif

  void add_down() {
    rows_ = kRows;
    k_ = kInputs;
    const Tokens* full = tokens(4, 0);
    add_quads<1, 2, kL1>("dense, quads 64 B", -1, full, 40);  // as today: the base of ratios
    add_read();
    add_quads<5, kWide, kL1>("dense, quads 320 B", -1, full, 16);
    add_quads<20, kWide, kL1>("dense, quads 1280 B", -1, full, 16);
    add_columns<1, kL1>("dense, columns 64 B", -1, full, 64);
    add_columns<5, kL1>("dense, columns 320 B", -1, full, 40);
    for (double zeros : {0., .3, .5, .62, .72, .85}) {
      const Tokens* x = tokens(4, zeros);
      add_quads<1, 2, kNone>("quads 64 B", zeros, x, 0);
      add_quads<1, 2, kL1>("quads 64 B", zeros, x, 32);
      for (int64_t ahead : {32, 64, 128}) add_quads<1, 2, kL2>("quads 64 B", zeros, x, ahead);
      add_quads<5, kWide, kNone>("quads 320 B", zeros, x, 64);
      add_quads<5, kWide, kL1>("quads 320 B", zeros, x, 16);
      for (int64_t ahead : {16, 32, 64}) add_quads<5, kWide, kL2>("quads 320 B", zeros, x, ahead);
      add_quads<20, kWide, kL1>("quads 1280 B", zeros, x, 16);
      for (int64_t ahead : {8, 16, 32}) add_quads<20, kWide, kL2>("quads 1280 B", zeros, x, ahead);
    }
    for (double zeros : {0., .3, .5, .62, .72, .8, .85, .887, .92}) {
      const Tokens* x = tokens(1, zeros);
      add_columns<1, kNone>("columns 64 B", zeros, x, 0);
      add_columns<1, kL1>("columns 64 B", zeros, x, 64);
      for (int64_t ahead : {64, 128, 256}) add_columns<1, kL2>("columns 64 B", zeros, x, ahead);
      for (int64_t ahead : {40, 60, 120}) add_columns<5, kL2>("columns 320 B", zeros, x, ahead);
    }
  }

  template <class Function>
  void add_gated(const char* name, Function function, const Tokens* x, double zeros, int64_t ahead,
                 int64_t unit, Fetched to) {
    Variant v{name, zeros, ahead, to, {}, {}, {}, {}, {}, {}, {}};
    const int64_t k = k_;
    k_ = kInputs;  // gates, not inputs
    const Tokens* wanted = tokens(unit, zeros);
    k_ = k;
    v.run = [=](const uint8_t* w, int t, Share s, List& list, int32_t* sums) {
      function(w, (*x)[t].data(), (*wanted)[t].data(), ahead, s, list, sums);
    };
    v.code_of = unit == 1 ? row_code : tile_code;
    v.sum_at = [](int64_t n) { return n; };
    v.needed = [=](int t, int64_t n) { return (*wanted)[t][n] != 0; };
    add(std::move(v), x);
  }

  void add_up() {
    rows_ = kInputs;
    k_ = kRows;
    const Tokens* full = tokens(4, 0);
    add_quads<1, 2, kL1>("dense, quads 64 B", -1, full, 40);
    add_read();
    for (double zeros : {0., .05, .25, .5}) {
      for (int64_t ahead : {4096, 8192}) {
        add_gated("tiles of 16 rows", up_tiles<kL1>, full, zeros, ahead, 16, kL1);
        add_gated("tiles of 16 rows", up_tiles<kL2>, full, zeros, ahead, 16, kL2);
      }
    }
    for (double zeros : {0., .3, .5, .62, .7, .78, .85}) {
      add_gated("canonical rows", up_rows<kNone>, full, zeros, 1, 1, kNone);
      add_gated("canonical rows", up_rows<kL1>, full, zeros, 1, 1, kL1);
      for (int64_t ahead : {1, 2, 4, 8}) {
        add_gated("canonical rows", up_rows<kL2>, full, zeros, ahead, 1, kL2);
      }
    }
  }

  int threads_;
  int64_t rows_ = 0, k_ = 0;
  uint8_t* pool_;
  std::vector<Variant> variants_;
  std::vector<const Tokens*> v_tokens_;
  std::vector<std::unique_ptr<Tokens>> all_tokens_;
  List lists_[2];
  alignas(64) int32_t sums_[2][kInputs + 64] = {};
  std::vector<std::thread> helpers_;
  std::atomic<uint32_t> round_{0};
  std::atomic<int> ready_{0}, done_{0};
  Variant* job_ = nullptr;
  int64_t at_ = 0;
  double begins_[2], ends_[2], lost_[2];
};

}  // namespace

int main(int argc, char** argv) {
  const std::string product = argc > 1 ? argv[1] : "down";
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
  const double seconds = argc > 3 ? std::atof(argv[3]) : 5;
  if ((product != "down" && product != "up") || threads < 1 || threads > 2) {
    std::fprintf(stderr, "skip_prototype: expected down|up and 1|2 threads\n");
    return 2;
  }
  auto bench = std::make_unique<Bench>(product, threads);
  bench->check();
  bench->measure(seconds);
  bench->print();
  bench->stop();
}
