// The Python module bitnet_ops._runtime: dispatch state, CPU features, build facts, file reader.
// Must not include a torch header; the op library shares the dispatch state through
// libbitnet_kernels.so.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/products/plan.h"
#include "engine/products/tune.h"
#include "format/layout.h"
#include "kernels/dispatch.h"
#include "kernels/features.h"
#include "runtime/page_count.h"
#include "runtime/pages.h"
#include "runtime/regions.h"
#include "runtime/tuning.h"

namespace py = pybind11;

void bind_format(py::module_& m);  // bindings_format.cpp
void bind_probe(py::module_& m);   // bindings_probe.cpp

namespace {

std::vector<std::string> names(const std::vector<const bitnet::KernelTable*>& tables) {
  std::vector<std::string> list;
  for (const auto* kernels : tables) list.emplace_back(kernels->name);
  return list;
}

std::vector<std::string> feature_list(uint64_t bits) {
  std::vector<std::string> list;
  for (const auto* f = bitnet::feature_names(); f->name != nullptr; ++f) {
    if (bits & f->bit) list.emplace_back(f->name);
  }
  return list;
}

std::map<std::string, bool> cpu_features() {
  std::map<std::string, bool> features;
  for (const auto* f = bitnet::feature_names(); f->name != nullptr; ++f) {
    features[f->name] = (bitnet::cpu_features() & f->bit) != 0;
  }
  return features;
}

py::list kernel_table() {
  py::list rows;
  for (const auto* kernels : bitnet::all_tables()) {
    py::dict row;
    row["isa"] = kernels->name;
    row["description"] = kernels->description;
    row["required"] = feature_list(kernels->required);
    row["missing"] = feature_list(kernels->required & ~bitnet::cpu_features());
    row["available"] = bitnet::runs_here(*kernels);
    rows.append(row);
  }
  return rows;
}

const char* amx_permission() {
  switch (bitnet::amx_permission()) {
    case bitnet::AmxPermission::kNone:
      return "none";
    case bitnet::AmxPermission::kNotRequested:
      return "not requested";
    case bitnet::AmxPermission::kGranted:
      return "granted";
    default:
      return "rejected";
  }
}

py::dict layouts() {
  py::dict rows;
  for (const auto& layout : bitnet::layout::kWeightLayouts) {
    py::dict row;
    row["cpu_specific"] = layout.cpu_specific;
    row["bits"] = 8.0 / static_cast<double>(layout.fields);
    row["fields"] = layout.fields;
    row["k_step"] = layout.k_step;
    row["k_multiple"] = layout.k_multiple;
    row["max_in_features"] = layout.max_k;
    row["max_grouped_in_features"] =
        layout.cpu_specific ? bitnet::layout::kGroupedTileMaxK : layout.max_k;
    row["dimensions"] = layout.dimensions;
    rows[layout.name] = row;
  }
  return rows;
}

py::tuple packed_shape(const std::string& name, int64_t out_features, int64_t in_features,
                       int64_t lanes) {
  constexpr int64_t kMax = int64_t{1} << 40;  // keeps every size below inside int64
  if (out_features < 0 || out_features > kMax || in_features < 0 || in_features > kMax ||
      lanes < 0 || lanes > bitnet::layout::kMaxLanes)
    throw py::value_error("packed_shape: expected features from 0 to 2^40 and at most 16 lanes");
  for (const auto& layout : bitnet::layout::kWeightLayouts) {
    if (name != layout.name) continue;
    if (lanes == 0) lanes = bitnet::active_kernels().tile_lanes;
    const auto shape = layout.shape(out_features, in_features, lanes);
    py::tuple sizes(shape.dimensions);
    for (int64_t i = 0; i < shape.dimensions; ++i) sizes[i] = shape.size[i];
    return sizes;
  }
  throw py::value_error("packed_shape: expected the name of a layout (layouts()), got '" + name +
                        "'");
}

const char* choice_name(bitnet::ProductChoice choice) {
  switch (choice) {
    case bitnet::ProductChoice::kUsual:
      return "usual";
    case bitnet::ProductChoice::kPrior:
      return "known";
    case bitnet::ProductChoice::kMeasured:
      return "measured";
  }
  return "";
}

bitnet::layout::WeightFormat layout_named(const char* function, const std::string& name) {
  for (const bitnet::layout::WeightFormat format : bitnet::layout::kWeightFormats) {
    if (name == bitnet::layout::layout_of(format).name) return format;
  }
  throw py::value_error(std::string(function) +
                        ": expected the name of a layout (layouts()), got '" + name + "'");
}

// Fails unless each is a size that no arithmetic of a plan overflows with.
void check_sizes(const char* function, std::initializer_list<int64_t> sizes) {
  constexpr int64_t kMax = int64_t{1} << 20;
  for (const int64_t n : sizes) {
    if (n < 1 || n > kMax)
      throw py::value_error(std::string(function) + ": expected numbers from 1 to 2^20, got " +
                            std::to_string(n));
  }
}

// How a product of one matrix is made with the ISA in use.
py::dict product_plan(const std::string& name, int64_t out_features, int64_t in_features,
                      int64_t tokens, int64_t threads, bool grouped) {
  check_sizes("product_plan", {out_features, in_features, tokens, threads});
  const auto plan =
      bitnet::engine::plan_matrix(bitnet::active_kernels(), layout_named("product_plan", name),
                                  out_features, in_features, grouped, tokens, threads);
  py::dict row;
  row["algorithm"] = plan.algorithm->name;
  row["token_blocks"] = std::max(plan.token_blocks, int64_t{1});
  row["k_parts"] = plan.k_parts;
  row["row_parts"] = plan.row_parts;
  return row;
}

// How long a sample of products like these takes by each algorithm, now.
py::dict product_times(const std::string& name, int64_t tokens, bool grouped) {
  check_sizes("product_times", {tokens});
  const bitnet::ProductShape shape{.format = layout_named("product_times", name),
                                   .tokens = tokens,
                                   .k = 1,
                                   .row_blocks = 1,
                                   .block_rows = 1,
                                   .grouped = grouped};
  py::dict seconds;
  for (const auto& time : bitnet::engine::time_products(bitnet::active_kernels(), shape))
    seconds[time.row->name] = std::min(time.seconds[0], time.seconds[1]);
  return seconds;
}

py::dict build_info() {
  py::dict info;
  info["compiler"] = __VERSION__;
  info["cplusplus"] = static_cast<long>(__cplusplus);
#if defined(BITNET_TORCH_VERSION)
  info["torch_built_against"] = BITNET_TORCH_VERSION;
#endif
#if defined(BITNET_VERSION)
  info["version"] = BITNET_VERSION;
#endif
  info["torch_abi_floor"] = "2.10";
  info["architecture"] =
#if defined(__x86_64__)
      "x86_64";
#elif defined(__aarch64__)
      "aarch64";
#else
      "other";
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_runtime, m) {
  m.doc() = "Dispatch state, CPU features and file reader of bitnet_ops; knows no torch.";
  m.def(
      "isa", [] { return std::string(bitnet::active_kernels().name); }, "Name of the ISA in use.");
  m.def("force_isa", &bitnet::force_isa, py::arg("name"),
        "Use an available ISA by name; an empty name means automatic choice.");
  m.def(
      "available_isas", [] { return names(bitnet::available_tables()); },
      "ISAs this CPU can execute, best first.");
  m.def("all_isas", [] { return names(bitnet::all_tables()); }, "ISAs in this build, best first.");
  m.def("cpu_features", &cpu_features,
        "Features that the CPU has and the operating system enabled.");
  m.def("amx_permission", &amx_permission,
        "The process's permission to use AMX tiles: 'none' (no AMX here), 'not requested', "
        "'granted' or 'rejected'. Asked for when an ISA that needs it is chosen.");
  m.def("kernel_table", &kernel_table,
        "One row per ISA: features it needs, those missing, available.");
  m.def(
      "tile_lanes", [] { return bitnet::active_kernels().tile_lanes; },
      "32-bit lanes of the CPU-specific weight layouts of the ISA in use.");
  m.def("layouts", &layouts, "The layouts of ternary weights by name, and their geometry.");
  m.def("packed_shape", &packed_shape, py::arg("layout"), py::arg("out_features"),
        py::arg("in_features"), py::arg("lanes") = 0,
        "Shape of the uint8 tensor of an N x K matrix; lanes: 0 for those of the ISA in use.");
  m.def(
      "tuning",
      [] {
        py::dict row;
        row["cpu"] = bitnet::tuning().cpu;
        row["prefetch_bytes"] = bitnet::tuning().prefetch_bytes;
        row["head_bytes"] = bitnet::tuning().head_bytes;
        row["head_into_l2"] = bitnet::tuning().head_into_l2;
        row["products"] = choice_name(bitnet::tuning().products);
        row["sum_tables"] = bitnet::tuning().sum_tables;
        row["product"] = bitnet::engine::forced_product();
        return row;
      },
      "What is tuned to the make of the CPU, and where the choice among products comes from.");
  m.def("product_names", &bitnet::engine::product_names,
        "Names of the rows of the lists of products, of every ISA of this build.");
  m.def("product_plan", &product_plan, py::arg("layout"), py::arg("out_features"),
        py::arg("in_features"), py::arg("tokens"), py::arg("threads"), py::arg("grouped") = false,
        "How a product of one matrix is made with the ISA in use.");
  m.def("product_times", &product_times, py::arg("layout"), py::arg("tokens"),
        py::arg("grouped") = false,
        "How long a sample of products like these takes by each algorithm, now.");
  m.def("build_info", &build_info, "Compiler, torch and ABI floor of this build.");
  m.def(
      "attention_pages", [] { return bitnet::page_counts(); },
      "(read, all) pages of each sequence of this thread's last step under attention policies.");
  m.def(
      "activation_zeros", [] { return bitnet::zero_counts(); },
      "(skipped, all) inputs of products with `sparsity` in this thread's last step.");
  m.def("region_count", &bitnet::region_count, "Parallel regions opened by ops so far.");
  m.def("mark_forked", &bitnet::mark_forked,
        "In the child of a fork: ops run on one thread if the parent had used a region; returns "
        "whether.");
  m.def(
      "prepare_pages",
      [](uintptr_t data_ptr, int64_t nbytes) {
        return bitnet::prepare_pages(reinterpret_cast<const void*>(data_ptr), nbytes);
      },
      py::arg("data_ptr"), py::arg("nbytes"),
      "Ask for huge pages behind fresh memory (a hint), and for the placement of "
      "BITNET_OPS_MEMORY; the bytes in huge pages, 0 where there are none.");
  m.def(
      "memory_placement",
      [] {
        const bool interleaved = bitnet::placement() == bitnet::Placement::kInterleave;
        return std::string(interleaved ? "interleave" : "first_touch");
      },
      "What BITNET_OPS_MEMORY says; RuntimeError where that is neither of the two.");
  bind_format(m);
  bind_probe(m);
}
