// The SGLBITNT reader, version 2, against hostile bytes: truncation at every byte and every bit
// flipped with the file flush against a guard page, then structure-aware mutation with a fixed
// seed. Checksums would stop nearly every mutant at the door, so most are stamped anew after the
// mutation. Meant to be built with -fsanitize=address,undefined as well. Must not
// know: torch, Python.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "format/sglbitnt.h"
#include "format/xxh64.h"
#include "tests/hostile.h"

namespace bitnet::test {
namespace {

using Seen = std::array<std::uint64_t, static_cast<std::size_t>(format::ErrorCode::kCount)>;
constexpr std::uint32_t kK = 200;  // of the packed tensors: 2 blocks, 56 padding codes

// --- a file, where its numbers are, and its checksums -------------------------------------------

struct Field {
  std::size_t offset, size;
};

// The checksum at `at` covers [begin, begin + size); size 0: to the end of the file.
struct Stamp {
  std::size_t at, begin, size;
};

struct Seed {
  Buffer bytes;
  std::vector<Field> fields;
  std::vector<Stamp> stamps;  // in an order in which they can be made

  template <class T>
  void number(Buffer& to, std::size_t base, T value) {
    fields.push_back({base + to.size(), sizeof(T)});
    const auto* p = reinterpret_cast<const std::uint8_t*>(&value);
    to.insert(to.end(), p, p + sizeof(T));
  }
};

void pad(Buffer& bytes) { bytes.resize((bytes.size() + 63) / 64 * 64, 0); }

void stamp(Buffer& bytes, const std::vector<Stamp>& stamps) {
  for (const Stamp& s : stamps) {
    const std::size_t end = s.size == 0 ? bytes.size() : s.begin + s.size;
    if (s.at + 8 > bytes.size() || s.begin > end || end > bytes.size()) continue;
    const std::uint64_t sum = format::xxh64(Bytes(bytes).subspan(s.begin, end - s.begin));
    std::memcpy(bytes.data() + s.at, &sum, sizeof(sum));
  }
}

struct Spec {
  const char* name;
  std::uint32_t dtype;
  std::vector<std::uint32_t> dims;
  std::uint32_t kind = 0, scale_dtype = 1, group = 128;
};

// Rows of weights 0 and +1, padding codes 1.
Buffer packed_rows(std::uint32_t rows) {
  Buffer data(rows * 64, 0x55);
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (i % 64 < 32) data[i] = 0x59;
  }
  return data;
}

// Appends data to the file and offset, length and checksum to the index, which will lie at `base`.
void place(Seed& seed, Buffer& index, std::size_t base, const Buffer& data) {
  pad(seed.bytes);
  const std::size_t at = seed.bytes.size();
  seed.bytes.insert(seed.bytes.end(), data.begin(), data.end());
  seed.number(index, base, std::uint64_t{at});
  seed.number(index, base, std::uint64_t{data.size()});
  seed.stamps.push_back({base + index.size(), at, data.size()});
  seed.number(index, base, std::uint64_t{0});
}

void add(Seed& seed, Buffer& index, std::size_t base, const Spec& spec) {
  const std::string name = spec.name;
  seed.number(index, base, static_cast<std::uint32_t>(name.size()));
  index.insert(index.end(), name.begin(), name.end());
  seed.number(index, base, spec.dtype);
  seed.number(index, base, static_cast<std::uint32_t>(spec.dims.size()));
  std::size_t items = 1;
  for (const std::uint32_t dim : spec.dims) {
    seed.number(index, base, dim);
    items *= dim;
  }
  seed.number(index, base, spec.kind);
  if (spec.kind == 1) seed.number(index, base, 0.5F);
  if (spec.kind >= 2) seed.number(index, base, spec.scale_dtype);
  if (spec.kind == 3) seed.number(index, base, spec.group);
  const std::size_t item = spec.dtype == 1 ? 4 : 2;
  // dense fills are finite, and one bit away from NaN
  const std::uint8_t fill = spec.dtype == 2 ? 0x7b : 0x7f;
  place(seed, index, base,
        spec.dtype == 0 ? packed_rows(spec.dims[0]) : Buffer(items * item, fill));
  if (spec.kind < 2) return;
  const std::size_t scales =
      spec.dims[0] * (spec.kind == 3 ? (spec.dims[1] + spec.group - 1) / spec.group : 1);
  place(seed, index, base, Buffer(scales * (spec.scale_dtype == 1 ? 4 : 2), 0x3b));
}

Seed make_seed(const std::string& config, const std::vector<Spec>& specs) {
  Seed measure, seed;
  measure.bytes.resize(64);
  Buffer scratch;
  for (const Spec& spec : specs) add(measure, scratch, 0, spec);
  pad(measure.bytes);
  const std::size_t config_at = measure.bytes.size();
  const std::size_t index_at = (config_at + config.size() + 63) / 64 * 64;

  seed.bytes.resize(64);
  Buffer index;
  for (const Spec& spec : specs) add(seed, index, index_at, spec);
  pad(seed.bytes);
  seed.bytes.insert(seed.bytes.end(), config.begin(), config.end());
  pad(seed.bytes);
  seed.bytes.insert(seed.bytes.end(), index.begin(), index.end());
  Buffer header = {'S', 'G', 'L', 'B', 'I', 'T', 'N', 'T'};
  seed.number(header, 0, std::uint32_t{2});
  seed.number(header, 0, static_cast<std::uint32_t>(specs.size()));
  seed.number(header, 0, std::uint64_t{seed.bytes.size()});
  seed.number(header, 0, std::uint64_t{config_at});
  seed.number(header, 0, static_cast<std::uint32_t>(config.size()));
  seed.number(header, 0, std::uint32_t{0});
  header.resize(64, 0);
  std::copy(header.begin(), header.end(), seed.bytes.begin());
  seed.stamps.push_back({40, config_at, config.size()});
  if (!index.empty()) seed.stamps.push_back({48, index_at, 0});
  if (index.empty()) {
    const std::uint64_t none = format::xxh64({});
    std::memcpy(seed.bytes.data() + 48, &none, 8);
  }
  seed.stamps.push_back({56, 0, 56});
  stamp(seed.bytes, seed.stamps);
  return seed;
}

std::vector<Seed> make_seeds() {
  std::vector<Seed> seeds;
  seeds.push_back(make_seed("{}", {}));
  seeds.push_back(make_seed("{\"hidden_size\":200}", {{"w", 0, {2, kK}, 1}}));
  seeds.push_back(make_seed("{\"a\":\"\xc3\xa9\"}", {{"packed.\xc3\xa9", 0, {3, kK}, 3, 2},
                                                     {"rows", 0, {2, kK}, 2, 1},
                                                     {"groups", 0, {1, kK}, 3, 1},
                                                     {"small groups", 0, {2, kK}, 3, 2, 64},
                                                     {"f32", 1, {5}},
                                                     {"f16", 2, {1, 2, 3}},
                                                     {"bf16", 3, {1, 1, 1, 1, 1, 1, 1, 7}}}));
  std::vector<Spec> many;
  static std::array<std::string, 30> names;
  for (std::size_t i = 0; i < names.size(); ++i) {
    names[i] = std::string(1, static_cast<char>('!' + i));
    many.push_back({names[i].c_str(), 2, {1}});
  }
  seeds.push_back(make_seed("{}", many));
  return seeds;
}

// --- the reader on one buffer -------------------------------------------------------------------

unsigned code_at(Bytes row, std::uint64_t i) {
  return row[i / 128 * 32 + i % 32] >> (6 - 2 * (i % 128 / 32)) & 3U;
}

std::uint64_t next64(std::uint64_t at) { return (at + 63) / 64 * 64; }

void require_zeros(Bytes file, std::uint64_t begin, std::uint64_t end) {
  for (std::uint64_t i = begin; i < end; ++i) require(file[i] == 0, "gaps are zeros");
}

// An accepted file once more, byte by byte: every byte belongs to something.
void require_consistent(Bytes file, const format::ParsedFile& parsed) {
  std::uint64_t at = 64;
  std::set<std::string> names;
  for (const format::TensorRecord& t : parsed.tensors) {
    require(t.offset_bytes == at && at % 64 == 0, "data lie where the previous ones end");
    require(format::xxh64(file.subspan(at, t.size_bytes)) == t.checksum, "data have their sum");
    require(names.insert(std::string(t.name)).second, "names are unique");
    require_zeros(file, at + t.size_bytes, next64(at + t.size_bytes));
    at = next64(at + t.size_bytes);
    if (t.packed()) {
      require(t.dims[1] == (t.in_features + 127) / 128 * 32, "row bytes follow from K");
      require(t.size_bytes == std::uint64_t{t.dims[0]} * t.dims[1], "rows fill the data");
      for (std::uint64_t row = 0; row < t.dims[0]; ++row) {
        const Bytes codes = file.subspan(t.offset_bytes + row * t.dims[1], t.dims[1]);
        for (std::uint64_t i = 0; i < 4 * std::uint64_t{t.dims[1]}; ++i) {
          const unsigned code = code_at(codes, i);
          require(i < t.in_features ? code != 3 : code == 1, "codes and padding are right");
        }
      }
    }
    if (t.scales_bytes == 0) continue;
    require(t.scales_offset == at, "scales lie behind their data");
    require(t.packed() && t.scale_kind >= format::ScaleKind::kRow, "only packed data have scales");
    require_zeros(file, at + t.scales_bytes, next64(at + t.scales_bytes));
    at = next64(at + t.scales_bytes);
  }
  require(parsed.config_offset == at, "the config follows the data");
}

bool accepted(Bytes file, Seen& seen) {
  try {
    const format::ParsedFile parsed = format::parse(file);
    for (const format::TensorRecord& tensor : parsed.tensors) {
      format::check_data(file, tensor);
      format::count_codes(file, tensor);
      if (tensor.packed()) format::check_in_features(file, tensor, kK);
    }
    if (parsed.version == 2) require_consistent(file, parsed);
    return true;
  } catch (const format::FormatError& error) {
    require(std::strstr(error.what(), "expected ") != nullptr, "an error says what was expected");
    require(std::strstr(error.what(), "got ") != nullptr, "an error says what was found");
    ++seen[static_cast<std::size_t>(error.code())];
    return false;
  }
}

std::uint64_t test_truncation(const std::vector<Seed>& seeds, Seen& seen) {
  std::uint64_t runs = 0;
  for (const Seed& seed : seeds) {
    Guard guard(seed.bytes.size());
    for (std::size_t size = 0; size < seed.bytes.size(); ++size, ++runs)
      require(!accepted(guard.put(Bytes(seed.bytes).first(size)), seen), "a cut file is rejected");
  }
  return runs;
}

// Without new checksums every flip is found; with them only what the rules know.
std::uint64_t test_bit_flips(const std::vector<Seed>& seeds, Seen& seen) {
  std::uint64_t runs = 0;
  for (const Seed& seed : seeds) {
    Guard guard(seed.bytes.size());
    for (std::size_t bit = 0; bit < 8 * seed.bytes.size(); ++bit, ++runs) {
      Buffer bytes = seed.bytes;
      bytes[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
      require(!accepted(guard.put(bytes), seen), "a flipped bit is found");
      stamp(bytes, seed.stamps);
      accepted(guard.put(bytes), seen);
    }
  }
  return runs;
}

// --- structure-aware mutation -------------------------------------------------------------------

void set_field(Buffer& bytes, const Seed& seed, Engine& random) {
  constexpr std::array<std::uint64_t, 20> kValues = {
      0,          1,          2,          3,           4,
      63,         64,         65,         127,         128,
      129,        1024,       1025,       65536,       1ULL << 20,
      0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 0xffffffffffffffff};
  if (seed.fields.empty()) return;
  const Field field = seed.fields[below(random, seed.fields.size())];
  if (field.offset + field.size > bytes.size()) return;
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + field.offset, field.size);
  switch (random() % 4) {
    case 0:
      value = kValues[below(random, kValues.size())];
      break;
    case 1:
      value = bytes.size() + random() % 129 - 64;
      break;
    case 2:
      value += 64 * (random() % 9) - 256;
      break;
    default:
      value += random() % 9 - 4;
  }
  std::memcpy(bytes.data() + field.offset, &value, field.size);
}

void mutate(Buffer& bytes, const Seed& seed, Engine& random) {
  const std::size_t at = below(random, bytes.size());
  const std::size_t size = below(random, std::min<std::size_t>(bytes.size() - at, 96));
  switch (random() % 8) {
    case 0:
      bytes[at] ^= static_cast<std::uint8_t>(1U << random() % 8);
      return;
    case 1:
      bytes.erase(bytes.begin() + at, bytes.begin() + at + size);
      return;
    case 2: {
      const Buffer piece(bytes.begin() + at, bytes.begin() + at + size);
      bytes.insert(bytes.begin() + below(random, bytes.size() + 1), piece.begin(), piece.end());
      return;
    }
    case 3: {  // three dimensions whose product overflows, or any other three fields
      const std::size_t first = below(random, seed.fields.size());
      for (std::size_t i = first; i < std::min(first + 3, seed.fields.size()); ++i) {
        const std::uint32_t huge = 0x7fffffff;
        if (seed.fields[i].offset + 4 <= bytes.size())
          std::memcpy(bytes.data() + seed.fields[i].offset, &huge, 4);
      }
      return;
    }
    default:
      set_field(bytes, seed, random);
  }
}

// The file length is in the header: half of the mutants get the true one.
void fix_length(Buffer& bytes, Engine& random) {
  if (bytes.size() < 64 || random() % 2 != 0) return;
  const std::uint64_t size = bytes.size();
  std::memcpy(bytes.data() + 16, &size, 8);
}

std::uint64_t fuzz(const std::vector<Seed>& seeds, std::uint64_t mutations, Engine& random,
                   Seen& seen) {
  std::uint64_t still_valid = 0;
  for (std::uint64_t i = 0; i < mutations; ++i) {
    const Seed& seed = seeds[below(random, seeds.size())];
    Buffer mutant = seed.bytes;
    for (std::size_t n = 1 + random() % 2; n > 0 && !mutant.empty(); --n)
      mutate(mutant, seed, random);
    fix_length(mutant, random);
    if (random() % 8 != 0) stamp(mutant, seed.stamps);
    const Buffer exact(mutant.begin(), mutant.end());  // no spare capacity: ASan sees the end
    still_valid += accepted(exact, seen);
  }
  return still_valid;
}

// A fuzzer that never reaches a rule proves nothing about it.
void report(const Seen& seen, bool all) {
  const std::set<std::string> of_version_1 = {"io", "packed_shape", "has_scale"};
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const std::string name = format::error_code_name(static_cast<format::ErrorCode>(i));
    if (of_version_1.count(name) != 0) continue;
    std::printf("  %-16s %llu\n", name.c_str(), static_cast<unsigned long long>(seen[i]));
    require(!all || seen[i] > 0, ("never reached: " + name).c_str());
  }
}

TEST(hostile_bytes) {
  Engine random(number_from("BITNET_TEST_SEED", 20261121));
  const std::vector<Seed> seeds = make_seeds();
  Seen seen{};
  for (const Seed& seed : seeds) require(accepted(seed.bytes, seen), "seeds are valid");
  const std::uint64_t cut = test_truncation(seeds, seen);
  const std::uint64_t flipped = test_bit_flips(seeds, seen);
  const std::uint64_t valid = fuzz(seeds, mutations(), random, seen);
  std::printf("  %llu truncations, %llu bit flips, %llu mutations (%llu still valid)\n",
              static_cast<unsigned long long>(cut), static_cast<unsigned long long>(flipped),
              static_cast<unsigned long long>(mutations()), static_cast<unsigned long long>(valid));
  report(seen, mutations() >= kMutations);
}

}  // namespace
}  // namespace bitnet::test
