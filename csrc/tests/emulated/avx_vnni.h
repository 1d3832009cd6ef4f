// The dot products of AVX-VNNI by AVX2, for the tests: the kernels of avx_vnni at a fifth of their
// speed on a CPU that has all of them but these. By the operation sections of VPDPBUSD and
// VPDPWSSD.
#pragma once

#include <immintrin.h>

#define BITNET_EMULATE_DOTS
#undef _mm256_dpbusd_epi32
#undef _mm256_dpwssd_epi32
#define _mm256_dpbusd_epi32 ::emulated::dot_bytes
#define _mm256_dpwssd_epi32 ::emulated::dot_words

namespace {
namespace emulated {

[[maybe_unused]] inline __m256i dot_words(__m256i acc, __m256i a, __m256i b) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
}
// Products of unsigned and signed bytes: of the lower byte of every word, then of the upper one.
[[maybe_unused]] inline __m256i dot_bytes(__m256i acc, __m256i a, __m256i b) {
  const __m256i low_a = _mm256_and_si256(a, _mm256_set1_epi16(0xff));
  const __m256i low_b = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
  acc = dot_words(acc, low_a, low_b);
  return dot_words(acc, _mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
}

}  // namespace emulated
}  // namespace
