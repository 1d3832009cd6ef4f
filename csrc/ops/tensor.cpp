// What ops ask of a tensor; see tensor.h. A call that torch rejects becomes an exception.
#include "ops/tensor.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

namespace bitnet::ops {
namespace {

void require_ok(AOTITorchError code, const char* what) {
  if (code != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(std::string("bitnet: torch failed to tell a tensor's ") + what);
}

}  // namespace

Shape::Shape(const int64_t* begin, const int64_t* end) {
  for (const int64_t* size = begin; size != end; ++size) push_back(*size);
}

void Shape::push_back(int64_t size) {
  if (count_ == kMaxDimensions)
    throw std::runtime_error("bitnet: expected a tensor of at most " +
                             std::to_string(kMaxDimensions) + " dimensions, got more");
  sizes_[count_++] = size;
}

Tensor Tensor::borrow(const Tensor& other) {
  Tensor tensor;
  tensor.handle_ = other.handle_;
  tensor.facts_ = other.facts_;
  return tensor;
}

void Tensor::ask() const {
  Facts facts;
  require_ok(aoti_torch_is_defined(handle_, &facts.defined), "existence");
  if (facts.defined) {
    int32_t device = 0;
    int64_t* sizes = nullptr;
    int64_t dimensions = 0;
    require_ok(aoti_torch_get_dtype(handle_, &facts.code), "dtype");
    require_ok(aoti_torch_get_device_type(handle_, &device), "device");
    require_ok(aoti_torch_get_sizes(handle_, &sizes), "sizes");
    require_ok(aoti_torch_get_dim(handle_, &dimensions), "dimensions");
    facts.cpu = device == aoti_torch_device_type_cpu();
    facts.sizes = {sizes, static_cast<size_t>(dimensions)};
  }
  facts.known = true;
  facts_ = facts;
}

ScalarType type_of(int32_t code) {
  // The type plus one, 0: not asked yet.
  static std::array<std::atomic<int8_t>, 64> known;
  const bool kept = code >= 0 && code < static_cast<int32_t>(known.size());
  if (kept) {
    const int8_t type = known[static_cast<size_t>(code)].load(std::memory_order_relaxed);
    if (type != 0) return static_cast<ScalarType>(type - 1);
  }
  const auto type = torch::stable::detail::to<ScalarType>(torch::stable::detail::from(code));
  if (kept) {
    known[static_cast<size_t>(code)].store(static_cast<int8_t>(static_cast<int8_t>(type) + 1),
                                           std::memory_order_relaxed);
  }
  return type;
}

size_t Tensor::element_size() const { return aoti_torch_dtype_element_size(facts().code); }

int64_t Tensor::stride(int64_t d) const {
  int64_t stride = 0;
  require_ok(aoti_torch_get_stride(handle_, d, &stride), "strides");
  return stride;
}

int64_t Tensor::numel() const {
  int64_t count = 0;
  require_ok(aoti_torch_get_numel(handle_, &count), "number of elements");
  return count;
}

bool Tensor::is_contiguous() const {
  bool contiguous = false;
  require_ok(aoti_torch_is_contiguous(handle_, &contiguous), "strides");
  return contiguous;
}

const void* Tensor::const_data_ptr() const {
  const void* data = nullptr;
  require_ok(torch_get_const_data_ptr(handle_, &data), "memory");
  return data;
}

void* Tensor::mutable_data_ptr() const {
  void* data = nullptr;
  require_ok(torch_get_mutable_data_ptr(handle_, &data), "memory");
  return data;
}

int32_t code_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return aoti_torch_dtype_uint8();
    case ScalarType::Char:
      return aoti_torch_dtype_int8();
    case ScalarType::Short:
      return aoti_torch_dtype_int16();
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    case ScalarType::Long:
      return aoti_torch_dtype_int64();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_float32();
  }
}

}  // namespace bitnet::ops
