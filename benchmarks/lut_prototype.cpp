// A table look-up GEMV for ternary weights, the best exact form found, for docs/notes/lut.md alone.
//
// Two weights make one 4-bit index into nine sums of two activations; 16 bits hold a sum, so a
// table is two registers, of low and of high bytes. 128 rows share a line: byte r of it holds the
// index of row r (low bits) and of row r + 64 (high bits). 2 bits a weight, as the package's own
// layout. Built and run by bench_lut.py; it is no part of the package.
#include <immintrin.h>

#include <cstdint>
#include <vector>

namespace {

constexpr int kRows = 128;      // of a block
constexpr int kFlush = 64;      // pairs whose sums fit 16 bits: 64 * 254 < 32768
constexpr int kTableBytes = 32;  // low bytes, high bytes

void make_tables(const int8_t* x, int64_t k, uint8_t* tables) {
  for (int64_t p = 0; p < k / 2; ++p) {
    for (int i = 0; i < 16; ++i) {
      const int sum = i < 9 ? (i / 3 - 1) * x[2 * p] + (i % 3 - 1) * x[2 * p + 1] : 0;
      tables[kTableBytes * p + i] = static_cast<uint8_t>(sum & 255);
      tables[kTableBytes * p + 16 + i] = static_cast<uint8_t>(sum >> 8);
    }
  }
}

#if defined(__AVX512BW__)
constexpr int kWidth = 64;
using V = __m512i;
V load(const void* p) { return _mm512_loadu_si512(p); }
V table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
V low_bits(V v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
V shifted(V v) { return _mm512_srli_epi16(v, 4); }
V look_up(V t, V i) { return _mm512_shuffle_epi8(t, i); }
V interleave_low(V a, V b) { return _mm512_unpacklo_epi8(a, b); }
V interleave_high(V a, V b) { return _mm512_unpackhi_epi8(a, b); }
V add(V a, V b) { return _mm512_add_epi16(a, b); }
V zero() { return _mm512_setzero_si512(); }
void store(void* p, V v) { _mm512_storeu_si512(p, v); }
#else
constexpr int kWidth = 32;
using V = __m256i;
V load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
V table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
V low_bits(V v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
V shifted(V v) { return _mm256_srli_epi16(v, 4); }
V look_up(V t, V i) { return _mm256_shuffle_epi8(t, i); }
V interleave_low(V a, V b) { return _mm256_unpacklo_epi8(a, b); }
V interleave_high(V a, V b) { return _mm256_unpackhi_epi8(a, b); }
V add(V a, V b) { return _mm256_add_epi16(a, b); }
V zero() { return _mm256_setzero_si256(); }
void store(void* p, V v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
#endif

constexpr int kParts = kRows / 2 / kWidth;  // registers of a line: 1 or 2

// Sums of one block of 128 rows. 16-bit sums are added to 32 bits every kFlush pairs.
void block(const uint8_t* indices, const uint8_t* tables, int64_t pairs, int32_t* out) {
  alignas(64) int16_t spilled[kWidth / 2];
  for (int r = 0; r < kRows; ++r) out[r] = 0;
  for (int64_t begin = 0; begin < pairs; begin += kFlush) {
    const int64_t end = begin + kFlush < pairs ? begin + kFlush : pairs;
    V sums[kParts][4];
    for (auto& part : sums) {
      for (V& sum : part) sum = zero();
    }
    for (int64_t p = begin; p < end; ++p) {
      const V low = table(tables + kTableBytes * p), high = table(tables + kTableBytes * p + 16);
      for (int q = 0; q < kParts; ++q) {
        const V both = load(indices + kRows / 2 * p + kWidth * q);
        const V a = low_bits(both), b = low_bits(shifted(both));
        const V al = look_up(low, a), ah = look_up(high, a);
        const V bl = look_up(low, b), bh = look_up(high, b);
        sums[q][0] = add(sums[q][0], interleave_low(al, ah));
        sums[q][1] = add(sums[q][1], interleave_high(al, ah));
        sums[q][2] = add(sums[q][2], interleave_low(bl, bh));
        sums[q][3] = add(sums[q][3], interleave_high(bl, bh));
      }
    }
    for (int q = 0; q < kParts; ++q) {
      for (int s = 0; s < 4; ++s) {
        store(spilled, sums[q][s]);
        for (int i = 0; i < kWidth / 2; ++i) {
          // unpack works within lanes of 16 bytes
          const int lane = i / 8, byte = 16 * lane + 8 * (s % 2) + i % 8;
          out[kWidth * q + byte + (s / 2) * (kRows / 2)] += spilled[i];
        }
      }
    }
  }
}

}  // namespace

extern "C" {

// codes int8 [n, k], n a multiple of 128, k even -> indices uint8 [n / 128, k / 2, 64]
void lut_pack(const int8_t* codes, int64_t n, int64_t k, uint8_t* indices) {
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t p = 0; p < k / 2; ++p) {
      const int index = 3 * (codes[r * k + 2 * p] + 1) + codes[r * k + 2 * p + 1] + 1;
      uint8_t& byte = indices[((r / kRows) * (k / 2) + p) * (kRows / 2) + r % (kRows / 2)];
      const int shift = r % kRows < kRows / 2 ? 0 : 4;
      byte = static_cast<uint8_t>((byte & ~(15 << shift)) | (index << shift));
    }
  }
}

// sums int32 [n] of indices and x int8 [k]; tables: room for 16 k bytes
void lut_gemv(const uint8_t* indices, const int8_t* x, int64_t n, int64_t k, uint8_t* tables,
              int32_t* sums) {
  make_tables(x, k, tables);
  for (int64_t b = 0; b < n / kRows; ++b) {
    block(indices + b * (k / 2) * (kRows / 2), tables, k / 2, sums + b * kRows);
  }
}
}
