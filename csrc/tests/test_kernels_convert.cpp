// Conversions of every kernel table, to the bit: every pattern of the 16- and 8-bit floats read,
// floats stored at and beside every tie (8-bit floats: all bf16 and f16 numbers besides), int8
// quantisation with ties at every length.  The reference is small_floats.h.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/check.h"
#include "tests/random.h"
#include "tests/small_floats.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

// Codes as they lie in memory, and as numbers.
std::vector<uint8_t> to_memory(const Format& format, const std::vector<uint16_t>& codes) {
  std::vector<uint8_t> bytes;
  for (const uint16_t code : codes) {
    bytes.push_back(static_cast<uint8_t>(code));
    if (format.width == 16) bytes.push_back(static_cast<uint8_t>(code >> 8));
  }
  return bytes;
}
std::vector<uint16_t> store(const KernelTable& kernels, const Format& format,
                            const std::vector<float>& x) {
  const std::size_t size = format.width == 16 ? 2 : 1;
  std::vector<uint8_t> bytes(x.size() * size);
  kernels.store_row(format.type, x.data(), static_cast<int64_t>(x.size()), bytes.data());
  std::vector<uint16_t> codes;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const int high = size == 2 ? bytes[2 * i + 1] << 8 : 0;
    codes.push_back(static_cast<uint16_t>(bytes[size * i] | high));
  }
  return codes;
}
std::vector<float> load(const KernelTable& kernels, const Format& format,
                        const std::vector<uint16_t>& codes) {
  std::vector<float> x(codes.size());
  kernels.load_row(format.type, to_memory(format, codes).data(), static_cast<int64_t>(x.size()),
                   x.data());
  return x;
}

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

// ---- reading ------------------------------------------------------------------------------------

uint32_t expected_float(const Format& format, uint16_t code) {
  const int positive = code & (format.sign() - 1);
  const uint32_t sign = code & format.sign() ? 0x80000000u : 0;
  if (positive < format.codes()) return sign | bits(static_cast<float>(format.value(positive)));
  if (!format.infinite) return sign | 0x7ff00000u;  // the only NaN; its fraction is kept
  if (positive == format.codes()) return sign | 0x7f800000u;
  // NaN: the payload moves up; f16 hardware, which E5M2 goes through, makes it quiet, bf16 is a
  // shift and keeps it as it is.
  const auto payload = static_cast<uint32_t>(positive - format.codes());
  const uint32_t quiet = format.type == DType::kBF16 ? 0 : 0x400000u;
  return sign | 0x7f800000u | quiet | (payload << (23 - format.fraction));
}

void reads_every_pattern(const KernelTable& kernels, const Format& format) {
  begin_case("%s load_row %s, all patterns", kernels.name, format.name);
  std::vector<uint16_t> codes(static_cast<std::size_t>(format.patterns()));
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
  const std::vector<float> got = load(kernels, format, codes);
  for (const uint16_t code : codes) {
    const uint32_t want = expected_float(format, code);
    CHECK(bits(got[code]) == want, "0x%04x: 0x%08x, not 0x%08x", code, bits(got[code]), want);
  }
}

// ---- storing ------------------------------------------------------------------------------------

// Every value of the format, every tie, and the floats on both sides of each; then random floats of
// all exponents.
std::vector<float> storing_samples(const Format& format) {
  std::vector<float> samples = {0.0f, INFINITY, 3.4028235e38f, 1e-45f};
  for (int code = 0; code < format.codes(); ++code) {
    const double low = format.value(code), high = format.value(code + 1);
    for (const double center : {low, (low + high) / 2}) {
      const auto x = static_cast<float>(center);
      if (std::isinf(x)) continue;  // the last tie of bf16 is no float
      samples.insert(samples.end(), {x, std::nextafter(x, 0.0f), std::nextafter(x, INFINITY)});
    }
  }
  for (const Format& half : {kFormats[0], kFormats[1]}) {
    for (int code = 0; format.width == 8 && code < half.codes(); ++code) {
      samples.push_back(static_cast<float>(half.value(code)));
    }
  }
  Random random(3);
  for (int i = 0; i < 200000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random.next()) & 0x7fffffffu);
    if (!std::isnan(x)) samples.push_back(x);
  }
  const std::size_t positive = samples.size();
  for (std::size_t i = 0; i < positive; ++i) samples.push_back(-samples[i]);
  return samples;
}

void stores_nearest(const KernelTable& kernels, const Format& format,
                    const std::vector<float>& samples, const std::vector<uint16_t>& want) {
  begin_case("%s store_row %s", kernels.name, format.name);
  const std::vector<uint16_t> got = store(kernels, format, samples);
  const std::vector<float> reread = load(kernels, format, got);
  std::vector<float> rounded = samples;
  kernels.round_row(format.type, rounded.data(), static_cast<int64_t>(samples.size()));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    CHECK(got[i] == want[i], "%a: 0x%04x, not 0x%04x", samples[i], got[i], want[i]);
    CHECK(bits(rounded[i]) == bits(reread[i]), "round_row(%a) gives %a", samples[i], rounded[i]);
  }
}

void stores_nan(const KernelTable& kernels) {
  begin_case("%s store_row of NaN", kernels.name);
  Random random(4);
  std::vector<float> nans;
  for (int i = 0; i < 5000; ++i) {
    const auto r = static_cast<uint32_t>(random.next());
    const float x = std::bit_cast<float>(r | 0x7f800000u);
    if (std::isnan(x)) nans.push_back(x);
  }
  std::vector<uint16_t> codes[4];
  for (int i = 0; i < 4; ++i) codes[i] = store(kernels, kFormats[i], nans);
  const auto& [bf16, f16, e4m3, e5m2] = codes;
  for (std::size_t i = 0; i < nans.size(); ++i) {
    CHECK(bf16[i] == 0x7fc0, "0x%08x: 0x%04x", bits(nans[i]), bf16[i]);
    // As F16C and fcvtn do: sign and upper payload stay, the NaN is made quiet.
    const uint32_t b = bits(nans[i]);
    const auto want = static_cast<uint16_t>((b >> 16 & 0x8000u) | 0x7e00u | (b >> 13 & 0x1ffu));
    CHECK(f16[i] == want, "0x%08x: 0x%04x, not 0x%04x", b, f16[i], want);
    const uint32_t eight = (b >> 24 & 0x80u) | 0x7fu;
    CHECK(e4m3[i] == eight && e5m2[i] == eight, "0x%08x: 0x%02x, 0x%02x", b, e4m3[i], e5m2[i]);
  }
}

// ---- int8 quantisation --------------------------------------------------------------------------

// The definition in doubles: each quotient and product of two floats is exact enough there to be
// rounded right when it becomes a float.  Returns the scale.
float check_quantize(const KernelTable& kernels, const std::vector<float>& x) {
  const auto n = static_cast<int64_t>(x.size());
  std::vector<int8_t> q(x.size() + 3, 99);
  int32_t sum = -1;
  const float scale = kernels.quantize_row(x.data(), n, n + 2, q.data(), kTokenStep, &sum);
  double absmax = 0;
  bool finite = true;
  for (const float v : x) {
    absmax = std::max(absmax, std::fabs(static_cast<double>(v)));
    finite = finite && std::isfinite(v);
  }
  const auto reciprocal = static_cast<float>(1.0 / std::max(absmax, static_cast<double>(1e-5f)));
  const auto s = static_cast<float>(127.0 * static_cast<double>(reciprocal));  // rounded twice
  int64_t total = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto product = static_cast<float>(static_cast<double>(x[i]) * s);
    const double want = finite ? std::clamp(round_half_even(product), -128.0, 127.0) : 0;
    total += static_cast<int64_t>(want);
    CHECK(q[i] == want, "x[%d] = %a: %d, not %g", static_cast<int>(i), x[i], q[i], want);
  }
  CHECK(sum == total, "sum %d, not %lld", sum, static_cast<long long>(total));
  CHECK(q[x.size()] == 0 && q[x.size() + 1] == 0 && q[x.size() + 2] == 99, "padding");
  const auto inverse = static_cast<float>(1.0 / static_cast<double>(s));
  CHECK(finite ? scale == inverse : std::isnan(scale), "scale %a, not %a", scale, inverse);
  return scale;
}

// absmax 127, so the factor is 1 and x + 0.5 is a tie; the same at factors 2^-40 and 2^20.
void quantizes_ties(const KernelTable& kernels) {
  for (std::size_t n = 1; n <= 70; ++n) {
    for (const int exponent : {0, -20, 40}) {
      begin_case("%s quantize_row ties n=%d 2^%d", kernels.name, static_cast<int>(n), exponent);
      for (int shift = 0; shift < 7; ++shift) {
        std::vector<float> x(n);
        for (std::size_t i = 0; i < n; ++i) {
          const int whole = (static_cast<int>(i) * 5 + shift * 36) % 253 - 126;
          x[i] = std::ldexp(static_cast<float>(whole) + 0.5f, exponent);
        }
        x[(n - 1) * static_cast<std::size_t>(shift) / 6] = std::ldexp(127.0f, exponent);
        if (exponent == -20)
          x[0] = std::ldexp(127.0f, exponent);  // > 1e-5: the factor is not clamped
        const float factor = check_quantize(kernels, x);
        CHECK(factor == std::ldexp(1.0f, exponent), "these are no ties: scale %a", factor);
      }
    }
  }
}

void quantizes_anything(const KernelTable& kernels) {
  Random random(6);
  for (int64_t n = 0; n <= 300; n += n < 70 ? 1 : 23) {
    for (const Flavour flavour : kFlavours) {
      begin_case("%s quantize_row n=%d %s", kernels.name, static_cast<int>(n), name_of(flavour));
      check_quantize(kernels, random_floats(random, flavour, n));
    }
    // One NaN or infinity anywhere makes the row void, also where lanes are padded.
    for (int64_t at = 0; at < n; at += 3) {
      for (const float special : {NAN, -NAN, INFINITY, -INFINITY}) {
        begin_case("%s quantize_row n=%d, %g at %d", kernels.name, static_cast<int>(n), special,
                   static_cast<int>(at));
        std::vector<float> x = random_floats(random, Flavour::kUnit, n);
        x[static_cast<std::size_t>(at)] = special;
        check_quantize(kernels, x);
      }
    }
  }
  for (const float absmax : {1e-5f, std::nextafter(1e-5f, 0.0f), std::nextafter(1e-5f, 1.0f), 0.0f,
                             1e-45f, 3.4028235e38f, 1.1754944e-38f}) {
    begin_case("%s quantize_row absmax=%g", kernels.name, absmax);
    check_quantize(kernels, {absmax, -absmax, absmax / 2, -absmax / 3});
  }
}

TEST(reads_every_pattern) {
  for (const Format& format : kFormats) {
    for (const KernelTable* kernels : tables_under_test()) reads_every_pattern(*kernels, format);
  }
}

TEST(stores_nearest) {
  for (const Format& format : kFormats) {
    const std::vector<float> samples = storing_samples(format);
    std::vector<uint16_t> want;
    for (const float x : samples) want.push_back(format.nearest(x));
    for (const KernelTable* kernels : tables_under_test()) {
      stores_nearest(*kernels, format, samples, want);
    }
  }
}

TEST(stores_nan) { on_every_table(stores_nan); }
TEST(quantizes_ties) { on_every_table(quantizes_ties); }
TEST(quantizes_anything) { on_every_table(quantizes_anything); }

}  // namespace
}  // namespace bitnet::test
