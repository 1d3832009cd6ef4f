// The table of CPU makes and the override by the environment; see tuning.h.  Distances measured:
// docs/log.md.  Must not know kernels.
#include "runtime/tuning.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace bitnet {
namespace {

struct Cpu {
  std::string vendor;
  unsigned family = 0, model = 0;
};

Cpu this_cpu() {
  Cpu cpu;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
    for (const unsigned word : {b, d, c}) {
      for (int shift = 0; shift < 32; shift += 8) {
        cpu.vendor += static_cast<char>(word >> shift & 0xff);
      }
    }
  }
  if (__get_cpuid(1, &a, &b, &c, &d) != 0) {
    cpu.family = a >> 8 & 0xf;
    cpu.model = (a >> 4 & 0xf) | (a >> 12 & 0xf0);
    if (cpu.family == 0xf) cpu.family += a >> 20 & 0xff;
  }
#endif
  return cpu;
}

constexpr const char* kVariable = "BITNET_OPS_TUNING";
constexpr const char* kKeys[] = {"prefetch", "tables", "measure", "product", "spread", "back_off"};
constexpr const char* kNamesOfKeys = "prefetch, tables, measure, product, spread or back_off";
// Those that were variables of their own once, and are still read from them.
constexpr const char* kOlderKeys[] = {"prefetch", "tables", "spread", "back_off"};

bool is_among(const auto& keys, const std::string& name) {
  return std::ranges::any_of(keys, [&](const char* key) { return name == key; });
}

// BITNET_OPS_TABLES for "tables".
std::string variable_of(const std::string& key) {
  std::string name = "BITNET_OPS_" + key;
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// What a person has set, and where; `part` is "key=" in a list of them.
struct Setting {
  std::string variable, part, value;
};

std::string text_of(const std::string& variable) {
  const char* text = std::getenv(variable.c_str());
  return text == nullptr ? "" : text;
}

// Calls f(key, value) for each part of the variable; a part without "=" is a key without a value.
template <class F>
void for_each_part(const std::string& text, const F& f) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, comma - begin);
    const std::size_t sign = std::min(part.find('='), part.size());
    f(part.substr(0, sign), sign < part.size() ? part.substr(sign + 1) : "");
    begin = comma + 1;
  }
}

Setting find(const std::string& key) {
  Setting found{kVariable, key + "=", ""};
  for_each_part(text_of(kVariable), [&](const std::string& name, const std::string& value) {
    if (name == key) found.value = value;
  });
  if (!found.value.empty() || !is_among(kOlderKeys, key)) return found;
  return {variable_of(key), "", text_of(variable_of(key))};
}

[[noreturn]] void reject(const Setting& from, const std::string& expected, const char* remedy) {
  throw std::runtime_error(from.variable + ": expected " + from.part + expected + ", got '" +
                           from.part + from.value + "'; " + remedy);
}

void check_keys() {
  for_each_part(text_of(kVariable), [&](const std::string& name, const std::string& value) {
    if (!is_among(kKeys, name) || value.empty())
      reject({kVariable, "", name}, std::string("key=value, the key ") + kNamesOfKeys,
             "several parts are separated by commas");
  });
  for (const std::string key : kKeys) {
    const std::string variable = variable_of(key), value = text_of(variable);
    if (!is_among(kOlderKeys, key) && !value.empty())
      reject({variable, "", value}, "no variable of this name",
             ("set " + std::string(kVariable) + "=" + key + "=" + value).c_str());
  }
}

void override_distance(Tuning& row) {
  const Setting distance = find("prefetch");
  if (distance.value.empty()) return;
  char* end = nullptr;
  const long value = std::strtol(distance.value.c_str(), &end, 10);
  const std::string level = end;
  const bool known = level.empty() || level == ":L1" || level == ":L2";
  if (end == distance.value.c_str() || !known || value < 0 || value > 65536)
    reject(distance, "bytes from 0 to 65536",
           ":L1 or :L2 may follow, for where heads are fetched to");
  row.prefetch_bytes = row.head_bytes = value;
  if (!level.empty()) row.head_into_l2 = level == ":L2";
}

// Whether `key` is set, and then to 1; other values than 0 and 1 are rejected.
std::optional<bool> flag(const char* key, const char* what) {
  const Setting found = find(key);
  if (found.value.empty()) return std::nullopt;
  if (found.value != "0" && found.value != "1") reject(found, "0 or 1", what);
  return found.value == "1";
}

// By vendor, and by what was timed: Zen 3 and 4, Sapphire and Emerald Rapids.
Tuning row_of(const Cpu& cpu) {
  constexpr unsigned kZen3 = 0x19, kZen5 = 0x1a;  // the family of Zen 4 is that of Zen 3
  constexpr unsigned kSapphireRapids = 0x8f, kEmeraldRapids = 0xcf;
  if (cpu.vendor == "AuthenticAMD") {
    if (cpu.family == kZen3)
      return {"AMD Zen 3 or 4", 6144, 512, true, true, ProductChoice::kPrior};
    const bool newer = cpu.family >= kZen5;
    return {newer ? "AMD Zen 5 and later" : "AMD before Zen 3",
            6144,
            newer ? 6144 : 512,
            !newer,
            true,
            ProductChoice::kMeasured};
  }
  if (cpu.vendor == "GenuineIntel" && cpu.family == 6) {
    if (cpu.model == kSapphireRapids || cpu.model == kEmeraldRapids)
      return {"Intel Sapphire or Emerald Rapids", 2048, 2048, false, false, ProductChoice::kPrior};
  }
  return {cpu.vendor == "GenuineIntel" ? "Intel" : "unknown",
          2048,
          2048,
          false,
          false,
          ProductChoice::kMeasured};
}

Tuning choose() {
  Tuning row = row_of(this_cpu());
  check_keys();
  override_distance(row);
  row.sum_tables = flag("tables", "it says whether products of many tokens may use tables of sums")
                       .value_or(true);
  const auto measured = flag("measure", "it says whether products are measured at their first use");
  if (measured) row.products = *measured ? ProductChoice::kMeasured : ProductChoice::kUsual;
  row.product = setting("product");
  return row;
}

}  // namespace

std::string setting(const std::string& key) { return find(key).value; }

const Tuning& tuning() {
  static const Tuning row = choose();
  return row;
}

}  // namespace bitnet
