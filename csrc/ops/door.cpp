// Calls into torch's stable C interface; see door.h. Errors
// of torch become exceptions here, and a parallel region
// gets its threads. Must not know an op.
#include "ops/door.h"

#include <stdexcept>

#include "runtime/regions.h"

namespace bitnet::ops {
namespace {

void require_ok(AOTITorchError code, const char* what) {
  if (code != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(std::string("bitnet: torch refused to ") + what);
  }
}

int32_t aoti_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return aoti_torch_dtype_uint8();
    case ScalarType::Char:
      return aoti_torch_dtype_int8();
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

}  // namespace

Tensor empty(const Shape& shape, ScalarType type) {
  Shape strides(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  require_ok(
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                               aoti_dtype(type), aoti_torch_device_type_cpu(), 0, &handle),
      "allocate an output tensor");
  return Tensor(handle);
}

Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

int64_t product(const Shape& shape, size_t begin, size_t end) {
  int64_t n = 1;
  for (size_t i = begin; i < end; ++i) n *= shape[i];
  return n;
}

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kF16;
    default:
      return DType::kF32;
  }
}

ScalarType scalar_type_of(DType type) {
  if (type == DType::kBF16) return ScalarType::BFloat16;
  return type == DType::kF16 ? ScalarType::Half : ScalarType::Float;
}

int64_t shares_for(int64_t items, int64_t work, int64_t min_work) {
  const int64_t worthwhile = work / min_work;
  if (items <= 1 || worthwhile <= 1) return 1;  // no call into torch for small work
  return std::max<int64_t>(1, std::min({items, worthwhile, thread_count()}));
}

int64_t thread_count() {
  uint32_t threads = 1;
  require_ok(torch_get_num_threads(&threads), "tell its number of threads");
  return usable_threads(static_cast<int64_t>(threads));
}

void run_shares_raw(int64_t shares, void (*body)(int64_t, int64_t, void*), void* context) {
  count_region();
  require_ok(torch_parallel_for(0, shares, 1, body, context), "run a parallel region");
}

}  // namespace bitnet::ops
