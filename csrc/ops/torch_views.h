// Torch tensors as the engine's pointers, sizes and types, and back. Torch is included here and in
// ops.cpp alone.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/row_ops.h"
#include "kernels/dispatch.h"

namespace bitnet::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::vector<int64_t>;

// A new uninitialised contiguous CPU tensor.
Tensor empty(const Shape& shape, ScalarType type);

Shape shape_of(const Tensor& t);
// Whether that is the shape, without a copy of it.
bool has_shape(const Tensor& t, const int64_t* sizes, size_t dimensions);
std::string shape_text(const Shape& shape);
int64_t product(const Shape& shape, size_t begin, size_t end);

// Element type of an activation tensor; float32, bfloat16 or float16 were checked before.
DType dtype_of(const Tensor& t);
ScalarType scalar_type_of(DType type);

// The memory of a contiguous tensor whose dtype has been checked.
template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// A contiguous float tensor of at least one dimension as rows of its last one.
engine::Rows rows_view(const Tensor& t);

}  // namespace bitnet::ops
