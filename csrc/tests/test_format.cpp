// The SGLBITNT reader, version 1, against hostile bytes: truncation at every byte and every bit
// flipped with the file flush against a guard page, then structure-aware mutation with a fixed
// seed. Meant to be built with -fsanitize=address,undefined as well. What the reader accepts is
// walked again by code of this file; what it allocates is counted. Must not know: torch, Python.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "format/mapped_file.h"
#include "format/sglbitnt.h"
#include "tests/hostile.h"
#include "tests/system.h"

// --- every allocation of the process is counted -------------------------------------------------

namespace {
thread_local std::size_t allocated_bytes = 0;  // since the last reset; frees are not subtracted
}

#ifndef __SANITIZE_ADDRESS__  // which has its own, for all that it finds
// noinline: g++ 12 takes a free() that it sees beside a call of operator new for a mistake.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocated_bytes += size;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
#endif

namespace bitnet::test {
namespace {

// --- a file and where its numbers are -----------------------------------------------------------

using Seen = std::array<std::uint64_t, 64>;

struct Field {
  std::size_t offset;
  std::size_t size;  // 4 or 8
};

struct Seed {
  Buffer bytes;
  std::vector<Field> fields;
  std::vector<std::size_t> record_starts;

  void raw(const void* data, std::size_t size) {
    const auto* p = static_cast<const std::uint8_t*>(data);
    bytes.insert(bytes.end(), p, p + size);
  }
  template <class T>
  void number(T value) {
    fields.push_back({bytes.size(), sizeof(T)});
    raw(&value, sizeof(T));
  }
  void text(const std::string& s) {
    number(static_cast<std::uint32_t>(s.size()));
    raw(s.data(), s.size());
  }
  void header(const std::string& config, std::uint32_t count) {
    raw("SGLBITNT", 8);
    number(std::uint32_t{1});
    text(config);
    number(count);
  }
  void tensor(const std::string& name, std::uint32_t dtype, std::vector<std::uint32_t> dims) {
    record_starts.push_back(bytes.size());
    text(name);
    number(dtype);
    number(static_cast<std::uint32_t>(dims.size()));
    std::uint64_t size_bytes = dtype == 0 ? 1 : dtype == 1 ? 4 : 2;
    for (const std::uint32_t dim : dims) {
      number(dim);
      size_bytes *= dim;
    }
    number(std::uint32_t{dtype == 0});
    if (dtype == 0) number(0.5F);
    number(size_bytes);
    // codes 0 and 1; the dense fills are finite, and one bit away from NaN
    bytes.insert(bytes.end(), size_bytes, dtype == 0 ? 0x15 : dtype == 2 ? 0x7b : 0x7f);
  }
};

std::vector<Seed> make_seeds() {
  std::vector<Seed> seeds(4);
  seeds[0].header("{}", 0);
  seeds[1].header("{\"hidden_size\":100}", 1);
  seeds[1].tensor("w", 0, {2, 32});
  seeds[2].header("{\"a\":\"\xc3\xa9\"}", 4);
  seeds[2].tensor("packed.\xc3\xa9", 0, {3, 64});
  seeds[2].tensor("f32", 1, {5});
  seeds[2].tensor("f16", 2, {1, 2, 3});
  seeds[2].tensor("bf16", 3, {1, 1, 1, 1, 1, 1, 1, 7});
  seeds[3].header("{}", 40);
  for (int i = 0; i < 40; ++i) seeds[3].tensor(std::string(1, static_cast<char>('!' + i)), 2, {1});
  return seeds;
}

// --- the reader on one buffer -------------------------------------------------------------------

// What an honest reader may need for `size` bytes: records and their order, and one error message.
std::size_t allowance(std::size_t size) {
  constexpr std::size_t kMinTensorBytes = 31;  // of version 1; a record of version 2 is longer
  return size / kMinTensorBytes * (sizeof(format::TensorRecord) + 4) + 8192;
}

// An accepted file must tile its bytes exactly; recomputed here with 128-bit sizes.
void require_consistent(Bytes file, const format::ParsedFile& parsed) {
  std::uint64_t at = 8 + 4 + 4 + parsed.config.size() + 4;
  std::set<std::string> names;
  for (const format::TensorRecord& t : parsed.tensors) {
    unsigned __int128 size = t.dtype == format::DType::kU8    ? 1
                             : t.dtype == format::DType::kF32 ? 4
                                                              : 2;
    for (std::uint32_t i = 0; i < t.ndim; ++i) size *= t.dims[i];
    at += 4 + t.name.size() + 4 + 4 + 4 * t.ndim + 4 + (t.packed() ? 4 : 0) + 8;
    require(t.offset_bytes == at, "data follow the record's header");
    require(t.size_bytes == size, "size is the product of the dimensions");
    require(!t.packed() || (t.scale > 0.0F && t.scale < 1e39), "scale is positive and finite");
    require(names.insert(std::string(t.name)).second, "names are unique");
    at += t.size_bytes;
  }
  require(at == file.size(), "the file ends with the last tensor");
}

// Weight i of a row by FORMAT.md's own words.
unsigned code_at(Bytes row, std::uint64_t i) {
  return row[i / 128 * 32 + i % 32] >> (6 - 2 * (i % 128 / 32)) & 3U;
}

// Accepted data once more, one value at a time.
void require_good_data(Bytes file, const format::TensorRecord& t, std::uint64_t in_features) {
  const Bytes data = file.subspan(t.offset_bytes, t.size_bytes);
  if (t.packed()) {
    for (std::uint64_t row = 0; row < t.dims[0]; ++row) {
      for (std::uint64_t i = 0; i < 4 * std::uint64_t{t.dims[1]}; ++i) {
        const unsigned code = code_at(data.subspan(row * t.dims[1], t.dims[1]), i);
        require(i < in_features ? code != 3 : code == 1, "codes and padding are right");
      }
    }
    return;
  }
  const bool f32 = t.dtype == format::DType::kF32;
  const unsigned shift = f32 ? 23 : t.dtype == format::DType::kF16 ? 10 : 7;
  const unsigned ones = t.dtype == format::DType::kF16 ? 31 : 255;
  for (std::size_t i = 0; i < data.size(); i += f32 ? 4 : 2) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, data.data() + i, f32 ? 4 : 2);
    require((bits >> shift & ones) != ones, "values are finite");
  }
}

// True if the file is accepted; FormatError is the only exception there may be.
bool accepted(Bytes file, std::uint64_t in_features, Seen& seen) {
  try {
    const format::ParsedFile parsed = format::parse(file);
    require(allocated_bytes <= allowance(file.size()),
            "parsing allocates no more than the file earns");
    require_consistent(file, parsed);
    for (const format::TensorRecord& tensor : parsed.tensors) {
      format::check_data(file, tensor);
      const format::CodeCounts counts = format::count_codes(file, tensor);
      const std::uint64_t codes = counts.minus + counts.zero + counts.plus;
      require(codes == (tensor.packed() ? 4 * tensor.size_bytes : 0), "every code is counted");
      if (tensor.packed()) format::check_in_features(file, tensor, in_features);
      require_good_data(file, tensor, in_features);
    }
    return true;
  } catch (const format::FormatError& error) {
    require(std::strstr(error.what(), "expected ") != nullptr, "an error says what was expected");
    require(std::strstr(error.what(), "got ") != nullptr, "an error says what was found");
    ++seen[static_cast<std::size_t>(error.code())];
    return false;
  }
}

bool run(Bytes file, std::uint64_t in_features, Seen& seen) {
  allocated_bytes = 0;
  return accepted(file, in_features, seen);
}

// --- truncation and bit flips -------------------------------------------------------------------

std::uint64_t test_truncation(const std::vector<Seed>& seeds, Seen& seen) {
  std::uint64_t runs = 0;
  for (const Seed& seed : seeds) {
    Guard guard(seed.bytes.size());
    for (std::size_t size = 0; size < seed.bytes.size(); ++size, ++runs) {
      const Bytes cut = guard.put(Bytes(seed.bytes).first(size));
      require(!run(cut, 1, seen), "a file cut at any byte is rejected");
    }
  }
  return runs;
}

std::uint64_t test_bit_flips(const std::vector<Seed>& seeds, Seen& seen) {
  std::uint64_t runs = 0;
  for (const Seed& seed : seeds) {
    Guard guard(seed.bytes.size());
    Buffer bytes = seed.bytes;
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit, ++runs) {
      bytes[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
      run(guard.put(bytes), 200, seen);
      bytes[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
    }
  }
  return runs;
}

// --- structure-aware mutation -------------------------------------------------------------------

std::uint64_t interesting(Engine& random, std::size_t file_size) {
  constexpr std::array<std::uint64_t, 24> values = {0,
                                                    1,
                                                    2,
                                                    3,
                                                    4,
                                                    8,
                                                    9,
                                                    31,
                                                    32,
                                                    33,
                                                    64,
                                                    127,
                                                    128,
                                                    1024,
                                                    1025,
                                                    65536,
                                                    65537,
                                                    0x100000,
                                                    0x7fffffff,
                                                    0x80000000,
                                                    0xffffffff,
                                                    0x100000000,
                                                    0x8000000000000000,
                                                    0xffffffffffffffff};
  switch (random() % 4) {
    case 0:
      return file_size + random() % 9 - 4;
    case 1:
      return random();
    default:
      break;
  }
  const std::uint64_t value = values[below(random, values.size())];
  return random() % 4 == 0 ? value + random() % 3 - 1 : value;
}

void set_field(Buffer& bytes, const Seed& seed, Engine& random) {
  const Field field = seed.fields[below(random, seed.fields.size())];
  if (field.offset + field.size > bytes.size()) return;
  std::uint64_t value = interesting(random, bytes.size());
  if (random() % 3 == 0) {  // near the true value
    value = 0;
    std::memcpy(&value, bytes.data() + field.offset, field.size);
    value += random() % 9 - 4;
  }
  std::memcpy(bytes.data() + field.offset, &value, field.size);
}

void flip_bit(Buffer& bytes, Engine& random) {
  if (!bytes.empty())
    bytes[below(random, bytes.size())] ^= static_cast<std::uint8_t>(1U << random() % 8);
}

void resize(Buffer& bytes, Engine& random) {
  if (random() % 2 == 0) {
    bytes.resize(below(random, bytes.size() + 1));
  } else {
    const std::size_t more =
        1 + below(random, 64);  // a statement per draw: arguments have no order
    bytes.insert(bytes.end(), more, static_cast<std::uint8_t>(random()));
  }
}

void erase_or_repeat(Buffer& bytes, Engine& random) {
  const std::size_t from = below(random, bytes.size());
  const std::size_t size = below(random, std::min<std::size_t>(bytes.size() - from, 64));
  const Buffer piece(bytes.begin() + from, bytes.begin() + from + size);
  if (random() % 2 == 0) {
    bytes.erase(bytes.begin() + from, bytes.begin() + from + size);
  } else {
    bytes.insert(bytes.begin() + below(random, bytes.size() + 1), piece.begin(), piece.end());
  }
}

// A whole record twice, or a record of another seed, with the count made to agree half of the time.
void splice_record(Buffer& bytes, const Seed& seed, const Seed& donor, Engine& random) {
  if (donor.record_starts.empty() || bytes.size() < seed.bytes.size()) return;
  const std::size_t i = below(random, donor.record_starts.size());
  const bool last = i + 1 == donor.record_starts.size();
  const std::size_t end = last ? donor.bytes.size() : donor.record_starts[i + 1];
  bytes.insert(bytes.end(), donor.bytes.begin() + donor.record_starts[i],
               donor.bytes.begin() + end);
  if (random() % 2 != 0) return;
  const std::size_t count_at = seed.fields[2].offset;  // version, config length, count
  std::uint32_t count = 0;
  std::memcpy(&count, bytes.data() + count_at, sizeof(count));
  ++count;
  std::memcpy(bytes.data() + count_at, &count, sizeof(count));
}

void mutate(Buffer& bytes, const Seed& seed, const Seed& donor, Engine& random) {
  switch (random() % 8) {
    case 0:
      return flip_bit(bytes, random);
    case 1:
      return resize(bytes, random);
    case 2:
      return erase_or_repeat(bytes, random);
    case 3:
      return splice_record(bytes, seed, donor, random);
    default:
      return set_field(bytes, seed, random);
  }
}

std::uint64_t fuzz(const std::vector<Seed>& seeds, std::uint64_t mutations, Engine& random,
                   Seen& seen) {
  std::uint64_t still_valid = 0;
  for (std::uint64_t i = 0; i < mutations; ++i) {
    const Seed& seed = seeds[below(random, seeds.size())];
    const Seed& donor = seeds[below(random, seeds.size())];
    Buffer mutant = seed.bytes;
    for (std::size_t n = 1 + random() % 3; n > 0; --n) mutate(mutant, seed, donor, random);
    const Buffer exact(mutant.begin(), mutant.end());  // no spare capacity: ASan sees the end
    still_valid += run(exact, 1 + random() % 300, seen);
  }
  return still_valid;
}

// --- files on disk ------------------------------------------------------------------------------

format::ErrorCode code_of(const std::string& path) {
  try {
    const format::SglbitntFile file(path, true);
  } catch (const format::FormatError& error) {
    require(std::strstr(error.what(), "expected ") != nullptr, "an error names the expectation");
    return error.code();
  }
  return format::ErrorCode::kCount;
}

void test_cut(const format::SglbitntFile& file) {
  const std::array<std::function<void()>, 5> uses = {
      [&] { file.check_length(); },       [&] { file.check_data(0); },
      [&] { file.check_sum(0); },         [&] { file.check_in_features(0, 256); },
      [&] { (void)file.count_codes(0); },
  };
  for (const auto& use : uses) {
    bool rejected = false;
    try {
      use();
    } catch (const format::FormatError& error) {
      rejected = error.code() == format::ErrorCode::kTruncated;
    }
    require(rejected, "a file that was cut is truncated");
  }
}

void test_files(const Seed& seed) {
  const std::filesystem::path file_path = new_path(u8"bitnet_test_format_\u00e9_");
  const std::string path = utf8_of(file_path);
  std::ofstream written(file_path, std::ios::binary);
  require(code_of(path) == format::ErrorCode::kTruncated, "an empty file is truncated");
  const std::size_t size = seed.bytes.size();
  written.write(reinterpret_cast<const char*>(seed.bytes.data()),
                static_cast<std::streamsize>(size));
  written.close();
  require(written.good(), "write");
  {
    const format::SglbitntFile file(path, true);
    require(file.tensors().size() == 4, "the file has its tensors");
    require(std::equal(seed.bytes.begin(), seed.bytes.end(), file.bytes().begin()), "mapped bytes");
    file.check_in_features(0, 256);
    require(file.count_codes(0).minus + file.count_codes(0).zero == 3 * 256, "counted codes");
    // Cut while it is mapped: an error at the next use, where reading the memory would be a SIGBUS.
    std::error_code error;
    std::filesystem::resize_file(file_path, size - 1, error);
    require(!error || !kMappedFilesCanBeCut, "cut");
    if (!error) test_cut(file);
    std::filesystem::resize_file(file_path, size + 1, error);
    require(!error, "longer");
    file.check_length();
  }
  require(code_of(path + '\0' + "x") == format::ErrorCode::kIo, "a zero byte in a path");
  std::filesystem::remove(file_path);
  require(code_of(path) == format::ErrorCode::kIo, "a missing file");
  require(code_of("/") == format::ErrorCode::kIo, "a directory");
}

void report(std::uint64_t cut, std::uint64_t flipped, std::uint64_t mutations, std::uint64_t valid,
            const Seen& seen) {
  std::printf("  %llu truncations, %llu bit flips, %llu mutations (%llu still valid)\n",
              static_cast<unsigned long long>(cut), static_cast<unsigned long long>(flipped),
              static_cast<unsigned long long>(mutations), static_cast<unsigned long long>(valid));
  for (std::size_t i = 0; i < static_cast<std::size_t>(format::ErrorCode::kCount); ++i) {
    std::printf("  %-16s %llu\n", format::error_code_name(static_cast<format::ErrorCode>(i)),
                static_cast<unsigned long long>(seen[i]));
  }
}

// A fuzzer that never reaches a rule proves nothing about it. The later codes are of version 2 and
// test_format_v2.cpp.
void require_all_reached(const Seen& seen) {
  for (std::size_t i = 1; i <= static_cast<std::size_t>(format::ErrorCode::kPaddingCode); ++i) {
    require(
        seen[i] > 0,
        (std::string("never reached: ") + format::error_code_name(format::ErrorCode(i))).c_str());
  }
}

TEST(files_on_disk) { test_files(make_seeds()[2]); }

TEST(hostile_bytes) {
  Engine random(number_from("BITNET_TEST_SEED", 20250815));
  const std::vector<Seed> seeds = make_seeds();
  Seen seen{};
  for (const Seed& seed : seeds)
    require(run(seed.bytes, seed.fields.size() > 20 ? 256 : 128, seen), "seeds are valid");
  const std::uint64_t cut = test_truncation(seeds, seen);
  const std::uint64_t flipped = test_bit_flips(seeds, seen);
  const std::uint64_t valid = fuzz(seeds, mutations(), random, seen);
  report(cut, flipped, mutations(), valid, seen);
  if (mutations() >= kMutations) require_all_reached(seen);
}

}  // namespace
}  // namespace bitnet::test
