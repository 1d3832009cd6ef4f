// The choice of the kernel table; see dispatch.h.  Must not know what a kernel computes.
#include "kernels/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernels/features.h"
#include "kernels/isa_tables.h"

namespace bitnet {
namespace {

using Getter = const KernelTable* (*)();

#define BITNET_GETTER(isa) isa::table,
constexpr Getter kBestFirst[] = {BITNET_ISAS(BITNET_GETTER)};
#undef BITNET_GETTER

std::atomic<const KernelTable*> g_current{nullptr};

bool needs_amx(const KernelTable& table) { return (table.required & kAmxTile) != 0; }

std::string join_available() {
  std::string text;
  for (const KernelTable* table : available_tables()) {
    if (!text.empty()) text += ", ";
    text += table->name;
  }
  return text;
}

const KernelTable* choose(const std::string& name, const char* origin) {
  for (const Getter get : kBestFirst) {
    const KernelTable* table = get();
    if (!runs_here(*table)) continue;
    if ((name.empty() || name == table->name) && make_ready(*table)) return table;
  }
  throw std::runtime_error(std::string(origin) +
                           ": expected one of the ISAs available on this CPU (" + join_available() +
                           "), or nothing for automatic choice; got '" + name + "'");
}

}  // namespace

bool runs_here(const KernelTable& table) {
  if ((table.required & cpu_features()) != table.required) return false;
  return !needs_amx(table) || amx_permission() != AmxPermission::kRejected;
}

bool make_ready(const KernelTable& table) { return !needs_amx(table) || request_amx_permission(); }

std::vector<const KernelTable*> all_tables() {
  std::vector<const KernelTable*> tables;
  for (const Getter get : kBestFirst) tables.push_back(get());
  return tables;
}

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables;
  for (const KernelTable* table : all_tables()) {
    if (runs_here(*table)) tables.push_back(table);
  }
  return tables;
}

const KernelTable& kernels() {
  const KernelTable* table = g_current.load(std::memory_order_acquire);
  if (table == nullptr) {
    // Two threads may both choose here; they choose alike.
    const char* wanted = std::getenv("BITNET_OPS_ISA");
    table = choose(wanted == nullptr ? "" : wanted, "BITNET_OPS_ISA");
    g_current.store(table, std::memory_order_release);
  }
  return *table;
}

void force_isa(const std::string& name) {
  g_current.store(choose(name, "force_isa"), std::memory_order_release);
}

}  // namespace bitnet
