// Calls into torch's stable C interface; see door.h. Errors
// of torch become exceptions here, and a parallel region
// gets its threads. Must not know an op.
#include "ops/door.h"

#include <pthread.h>

#include <stdexcept>
#include <string>

#include "runtime/float_state.h"
#include "runtime/regions.h"

// Of the OpenMP runtime that torch was loaded with, if it has one and that knows OpenMP 5.0.
extern "C" __attribute__((weak)) int omp_pause_resource_all(int kind);

namespace bitnet::ops {
namespace {

// A fork copies no threads, and GNU's OpenMP runtime does not notice: in the child the first region
// of a thread whose pool torch itself had used would wait for ever.  That a pool was used cannot be
// asked, but the forking thread can let go of its pool before: child and parent make a new one when
// they need it, which costs some 100 us.  Pools that our own regions used stay, for there the child
// is told to run on one thread (regions.h).
void let_go_of_pool() {
  constexpr int kSoft = 1;  // omp_pause_soft
  if (region_count() == 0 && omp_pause_resource_all != nullptr) omp_pause_resource_all(kSoft);
}
[[maybe_unused]] const int g_registered = pthread_atfork(let_go_of_pool, nullptr, nullptr);

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
  bool overflow = false;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    overflow |= __builtin_mul_overflow(step, std::max<int64_t>(shape[i], 1), &step);
  }
  AtenTensorHandle handle = nullptr;
  if (overflow ||
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                               aoti_dtype(type), aoti_torch_device_type_cpu(), 0,
                               &handle) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("bitnet: expected memory for a result of shape " + shape_text(shape) +
                             ", got none; ask for less at once");
  }
  return Tensor(handle);
}

void* allocate_scratch(int64_t count, size_t size) {
  size_t bytes = 0;
  if (!__builtin_mul_overflow(static_cast<size_t>(std::max<int64_t>(count, 1)), size, &bytes)) {
    void* memory = ::operator new(bytes, std::align_val_t{64}, std::nothrow);
    if (memory != nullptr) return memory;
  }
  throw std::runtime_error("bitnet: expected memory to work in for " + std::to_string(count) +
                           " elements of " + std::to_string(size) +
                           " bytes, got none; pass fewer tokens at once");
}

Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
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
  struct Region {
    void (*body)(int64_t, int64_t, void*);
    void* context;
  } region{body, context};
  const auto run = [](int64_t begin, int64_t end, void* raw) {
    const DefaultFloatState floats;  // of a pool's thread, which has its own
    const auto* r = static_cast<const Region*>(raw);
    r->body(begin, end, r->context);
  };
  count_region();
  require_ok(torch_parallel_for(0, shares, 1, run, &region), "run a parallel region");
}

}  // namespace bitnet::ops
