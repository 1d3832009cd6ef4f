// Torch tensors as the engine's pointers, sizes and types, and back.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "engine/row_ops.h"
#include "kernels/dispatch.h"
#include "ops/tensor.h"

namespace bitnet::ops {

// A new uninitialised contiguous CPU tensor.
Tensor empty(const Shape& shape, ScalarType type);

Shape shape_of(const Tensor& t);
bool has_shape(const Tensor& t, std::span<const int64_t> shape);
std::string shape_text(std::span<const int64_t> shape);
// The product of all sizes but the last.
int64_t rows_of(std::span<const int64_t> sizes);

// Element type of an activation tensor; float32, bfloat16 or float16 were checked before.
DType dtype_of(const Tensor& t);

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
// A new tensor of the shape and type of the one that `like` is a view of.
engine::Rows rows_like(const engine::Rows& like, Tensor& t);

}  // namespace bitnet::ops
