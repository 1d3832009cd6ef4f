// Bindings of format/layout.h: the layouts of ternary weights and the shapes of their tensors.
#include <pybind11/pybind11.h>

#include <string>

#include "format/layout.h"
#include "kernels/dispatch.h"

namespace py = pybind11;
namespace layout = bitnet::layout;

namespace {

struct Row {
  const char* name;
  bool cpu_specific;
  int64_t fields, k_step, k_multiple, max_k, dimensions;
};

constexpr Row kRows[] = {
    {"canonical", false, layout::kFields, layout::kBlockWeights, layout::kBlockWeights, INT64_MAX,
     2},
    {"2bit", true, layout::kTwoBitFields, layout::kTileStepK, layout::kTilePadK, layout::kTileMaxK,
     3},
    {"1.6bit", true, layout::kTritFields, layout::kTileStepK, layout::kTilePadK, layout::kTileMaxK,
     4},
};

py::dict layouts() {
  py::dict rows;
  for (const Row& layout : kRows) {
    py::dict row;
    row["cpu_specific"] = layout.cpu_specific;
    row["bits"] = 8.0 / static_cast<double>(layout.fields);
    row["fields"] = layout.fields;
    row["k_step"] = layout.k_step;
    row["k_multiple"] = layout.k_multiple;
    row["max_in_features"] = layout.max_k;
    row["dimensions"] = layout.dimensions;
    rows[layout.name] = row;
  }
  return rows;
}

py::tuple packed_shape(const std::string& name, int64_t n, int64_t k, int64_t lanes) {
  constexpr int64_t kMost = int64_t{1} << 40;  // keeps every size below inside int64
  if (n < 0 || n > kMost || k < 0 || k > kMost || lanes < 0 || lanes > 16)
    throw py::value_error("packed_shape: expected features from 0 to 2^40 and at most 16 lanes");
  if (lanes == 0) lanes = bitnet::kernels().tile_lanes;
  for (const Row& row : kRows) {
    if (name != row.name) continue;
    if (!row.cpu_specific) return py::make_tuple(n, layout::row_bytes_for(k));
    const int64_t tiles = layout::tiles_for(n, lanes, row.fields), steps = layout::tile_lines(k);
    if (row.dimensions == 3) return py::make_tuple(tiles, steps, row.k_step * lanes);
    return py::make_tuple(tiles, steps, lanes, row.k_step);
  }
  throw py::value_error("packed_shape: expected the name of a layout (layouts()), got '" + name +
                        "'");
}

}  // namespace

void bind_layout(py::module_& m) {
  m.def("layouts", &layouts, "The layouts of ternary weights by name, and their geometry.");
  m.def("packed_shape", &packed_shape, py::arg("layout"), py::arg("out_features"),
        py::arg("in_features"), py::arg("lanes") = 0,
        "Shape of the uint8 tensor of an N x K matrix; lanes: 0 for those of the ISA in use.");
}
