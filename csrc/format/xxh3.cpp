// XXH3-128 as its specification has it; see xxh3.h. Eight lanes that hardly depend on each other
// are what makes it fast; inputs up to 240 bytes have forms of their own. Must not know: files,
// formats, or what a wrong hash means.
#include "format/xxh3.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace bitnet::format {
namespace {

__extension__ typedef unsigned __int128 uint128;

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1U;
constexpr std::uint64_t kPrime32_2 = 0x85EBCA77U;
constexpr std::uint64_t kPrime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87U;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9U;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63U;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5U;
constexpr std::uint64_t kPrimeMx1 = 0x165667919E3779F9U;
constexpr std::uint64_t kPrimeMx2 = 0x9FB21C651E98DF25U;

constexpr std::size_t kLanes = 8;
constexpr std::size_t kStripe = 64;        // bytes: one word a lane
constexpr std::size_t kSecretStep = 8;     // bytes of the secret from one stripe to the next
constexpr std::size_t kSecretBytes = 192;  // of the standard secret
constexpr std::size_t kMinSecretBytes = 136;
constexpr std::size_t kStripesOfBlock = (kSecretBytes - kStripe) / kSecretStep;

// clang-format off
constexpr std::uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
// clang-format on

using Lanes = std::array<std::uint64_t, kLanes>;
using Bytes = std::span<const std::uint8_t>;

std::uint64_t load64(const std::uint8_t* p) {
  std::uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

std::uint64_t load32(const std::uint8_t* p) {
  std::uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

Hash128 product(std::uint64_t a, std::uint64_t b) {
  const uint128 wide = static_cast<uint128>(a) * b;
  return {static_cast<std::uint64_t>(wide), static_cast<std::uint64_t>(wide >> 64)};
}

std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
  const Hash128 wide = product(a, b);
  return wide.low ^ wide.high;
}

std::uint64_t avalanche(std::uint64_t h) {
  h = (h ^ (h >> 37)) * kPrimeMx1;
  return h ^ (h >> 32);
}

std::uint64_t avalanche_of_xxh64(std::uint64_t h) {
  h = (h ^ (h >> 33)) * kPrime64_2;
  h = (h ^ (h >> 29)) * kPrime64_3;
  return h ^ (h >> 32);
}

// --- up to 16 bytes -------------------------------------------------------------------------

Hash128 of_none() {
  return {avalanche_of_xxh64(load64(kSecret + 64) ^ load64(kSecret + 72)),
          avalanche_of_xxh64(load64(kSecret + 80) ^ load64(kSecret + 88))};
}

Hash128 of_1_to_3(Bytes in) {
  const std::uint32_t first = in[0], middle = in[in.size() >> 1], last = in[in.size() - 1];
  const std::uint32_t low =
      (first << 16) | (middle << 24) | last | (static_cast<std::uint32_t>(in.size()) << 8);
  const std::uint32_t high = std::rotl(__builtin_bswap32(low), 13);
  return {avalanche_of_xxh64(low ^ load32(kSecret) ^ load32(kSecret + 4)),
          avalanche_of_xxh64(high ^ load32(kSecret + 8) ^ load32(kSecret + 12))};
}

Hash128 of_4_to_8(Bytes in) {
  const std::uint64_t word = load32(in.data()) + (load32(in.data() + in.size() - 4) << 32);
  const std::uint64_t keyed = word ^ load64(kSecret + 16) ^ load64(kSecret + 24);
  Hash128 h = product(keyed, kPrime64_1 + (in.size() << 2));
  h.high += h.low << 1;
  h.low ^= h.high >> 3;
  h.low = (h.low ^ (h.low >> 35)) * kPrimeMx2;
  return {h.low ^ (h.low >> 28), avalanche(h.high)};
}

Hash128 of_9_to_16(Bytes in) {
  const std::uint64_t flip_low = load64(kSecret + 32) ^ load64(kSecret + 40);
  const std::uint64_t flip_high = load64(kSecret + 48) ^ load64(kSecret + 56);
  const std::uint64_t low = load64(in.data());
  std::uint64_t high = load64(in.data() + in.size() - 8);
  Hash128 h = product(low ^ high ^ flip_low, kPrime64_1);
  h.low += static_cast<std::uint64_t>(in.size() - 1) << 54;
  high ^= flip_high;
  h.high += high + (high & 0xFFFFFFFFU) * (kPrime32_2 - 1);
  h.low ^= __builtin_bswap64(h.high);
  const std::uint64_t top = h.high;
  h = product(h.low, kPrime64_2);
  return {avalanche(h.low), avalanche(h.high + top * kPrime64_2)};
}

// --- 17 to 240 bytes ------------------------------------------------------------------------

std::uint64_t mixed(const std::uint8_t* in, const std::uint8_t* secret) {
  return folded(load64(in) ^ load64(secret), load64(in + 8) ^ load64(secret + 8));
}

void mix(Hash128& h, const std::uint8_t* a, const std::uint8_t* b, const std::uint8_t* secret) {
  h.low = (h.low + mixed(a, secret)) ^ (load64(b) + load64(b + 8));
  h.high = (h.high + mixed(b, secret + 16)) ^ (load64(a) + load64(a + 8));
}

Hash128 finish(const Hash128& h, std::size_t size) {
  const std::uint64_t high = h.low * kPrime64_1 + h.high * kPrime64_4 + size * kPrime64_2;
  return {avalanche(h.low + h.high), 0 - avalanche(high)};
}

Hash128 of_17_to_128(Bytes in) {
  const std::uint8_t *begin = in.data(), *end = begin + in.size();
  Hash128 h{in.size() * kPrime64_1, 0};
  for (std::size_t i = (in.size() - 1) / 32 + 1; i-- > 0;)
    mix(h, begin + 16 * i, end - 16 * (i + 1), kSecret + 32 * i);
  return finish(h, in.size());
}

Hash128 of_129_to_240(Bytes in) {
  const std::uint8_t *begin = in.data(), *end = begin + in.size();
  Hash128 h{in.size() * kPrime64_1, 0};
  for (std::size_t i = 0; i < 128; i += 32) mix(h, begin + i, begin + i + 16, kSecret + i);
  h = {avalanche(h.low), avalanche(h.high)};
  for (std::size_t i = 128; i + 32 <= in.size(); i += 32)
    mix(h, begin + i, begin + i + 16, kSecret + 3 + i - 128);
  mix(h, end - 16, end - 32, kSecret + kMinSecretBytes - 17 - 16);
  return finish(h, in.size());
}

// --- longer ---------------------------------------------------------------------------------

void accumulate(Lanes& lanes, const std::uint8_t* in, const std::uint8_t* secret) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::uint64_t word = load64(in + 8 * i);
    const std::uint64_t keyed = word ^ load64(secret + 8 * i);
    lanes[i ^ 1] += word;
    lanes[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
  }
}

void scramble(Lanes& lanes, const std::uint8_t* secret) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::uint64_t lane = lanes[i] ^ (lanes[i] >> 47) ^ load64(secret + 8 * i);
    lanes[i] = lane * kPrime32_1;
  }
}

std::uint64_t merged(const Lanes& lanes, const std::uint8_t* secret, std::uint64_t start) {
  for (std::size_t i = 0; i < kLanes; i += 2)
    start += folded(lanes[i] ^ load64(secret + 8 * i), lanes[i + 1] ^ load64(secret + 8 * i + 8));
  return avalanche(start);
}

void accumulate_stripes(Lanes& lanes, const std::uint8_t* in, std::size_t count) {
  Lanes own = lanes;  // a local, so that it stays in registers
  for (std::size_t i = 0; i < count; ++i)
    accumulate(own, in + kStripe * i, kSecret + kSecretStep * i);
  lanes = own;
}

Hash128 of_many(Bytes in) {
  constexpr std::size_t kBlock = kStripe * kStripesOfBlock;
  const std::uint8_t* const last_key = kSecret + kSecretBytes - kStripe;
  const std::uint64_t size = in.size();
  Lanes lanes = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const std::size_t blocks = (in.size() - 1) / kBlock;
  for (std::size_t i = 0; i < blocks; ++i) {
    accumulate_stripes(lanes, in.data() + kBlock * i, kStripesOfBlock);
    scramble(lanes, last_key);
  }
  const std::size_t stripes = (in.size() - 1 - kBlock * blocks) / kStripe;
  accumulate_stripes(lanes, in.data() + kBlock * blocks, stripes);
  accumulate(lanes, in.data() + in.size() - kStripe, last_key - 7);
  return {merged(lanes, kSecret + 11, size * kPrime64_1),
          merged(lanes, last_key - 11, ~(size * kPrime64_2))};
}

}  // namespace

Hash128 xxh3_128(std::span<const std::uint8_t> bytes) {
  if (bytes.size() > 240) return of_many(bytes);
  if (bytes.size() > 128) return of_129_to_240(bytes);
  if (bytes.size() > 16) return of_17_to_128(bytes);
  if (bytes.size() > 8) return of_9_to_16(bytes);
  if (bytes.size() > 3) return of_4_to_8(bytes);
  return bytes.empty() ? of_none() : of_1_to_3(bytes);
}

}  // namespace bitnet::format
