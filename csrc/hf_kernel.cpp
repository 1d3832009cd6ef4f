// What Python asks of the op library besides operators, in C, for the copy that stands alone
// (scripts/build_hf_kernel); in the package the module _runtime answers it.
#include <cstdint>
#include <cstring>
#include <iterator>

#include "format/layout.h"
#include "kernels/dispatch.h"
#include "kernels/kernel_table.h"
#include "runtime/regions.h"

#define BITNET_EXPORTED __attribute__((visibility("default")))

extern "C" {

// Writes at most 4 sizes of the uint8 tensor of an N x K matrix; returns how many, 0 for an unknown
// layout.
BITNET_EXPORTED int64_t bitnet_packed_shape(const char* name, int64_t out_features,
                                            int64_t in_features, int64_t* sizes) {
  for (const auto& layout : bitnet::layout::kWeightLayouts) {
    if (std::strcmp(name, layout.name) != 0) continue;
    const auto shape = layout.shape(out_features, in_features, bitnet::active_kernels().tile_lanes);
    for (int64_t i = 0; i < shape.dimensions; ++i) sizes[i] = shape.size[i];
    return shape.dimensions;
  }
  return 0;
}

// The name of the layout at that place, null behind the last one.
BITNET_EXPORTED const char* bitnet_layout_name(int64_t place) {
  const auto count = static_cast<int64_t>(std::size(bitnet::layout::kWeightLayouts));
  return place < 0 || place >= count ? nullptr : bitnet::layout::kWeightLayouts[place].name;
}

// The number of dimensions of a layout, 0 for an unknown one.
BITNET_EXPORTED int64_t bitnet_layout_dimensions(const char* name) {
  for (const auto& layout : bitnet::layout::kWeightLayouts) {
    if (std::strcmp(name, layout.name) == 0) return layout.dimensions;
  }
  return 0;
}

// In the child of a fork: whether ops run on one thread from now on.
BITNET_EXPORTED int bitnet_mark_forked() { return bitnet::mark_forked() ? 1 : 0; }

// The instruction set in use.
BITNET_EXPORTED const char* bitnet_isa() { return bitnet::active_kernels().name; }
}
