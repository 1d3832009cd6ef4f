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

bool needs_amx(const KernelTable& kernels) { return (kernels.required & kAmxTile) != 0; }

std::string join_available() {
  std::string text;
  for (const KernelTable* kernels : available_tables()) {
    if (!text.empty()) text += ", ";
    text += kernels->name;
  }
  return text;
}

const KernelTable* choose(const std::string& name, const char* origin) {
  for (const Getter get : kBestFirst) {
    const KernelTable* kernels = get();
    if (!runs_here(*kernels)) continue;
    if ((name.empty() || name == kernels->name) && make_ready(*kernels)) return kernels;
  }
  throw std::runtime_error(std::string(origin) +
                           ": expected one of the ISAs available on this CPU (" + join_available() +
                           "), or nothing for automatic choice; got '" + name + "'");
}

}  // namespace

bool runs_here(const KernelTable& kernels) {
  if ((kernels.required & cpu_features()) != kernels.required) return false;
  return !needs_amx(kernels) || amx_permission() != AmxPermission::kRejected;
}

bool make_ready(const KernelTable& kernels) {
  return !needs_amx(kernels) || request_amx_permission();
}

std::vector<const KernelTable*> all_tables() {
  std::vector<const KernelTable*> tables;
  for (const Getter get : kBestFirst) tables.push_back(get());
  return tables;
}

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables;
  for (const KernelTable* kernels : all_tables()) {
    if (runs_here(*kernels)) tables.push_back(kernels);
  }
  return tables;
}

const KernelTable& active_kernels() {
  const KernelTable* kernels = g_current.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    // Two threads may both choose here; they choose alike.
    const char* wanted = std::getenv("BITNET_OPS_ISA");
    kernels = choose(wanted == nullptr ? "" : wanted, "BITNET_OPS_ISA");
    g_current.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

void force_isa(const std::string& name) {
  g_current.store(choose(name, "force_isa"), std::memory_order_release);
}

}  // namespace bitnet
