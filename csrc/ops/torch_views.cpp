// Calls into torch's stable C interface; see torch_views.h. Errors of torch become exceptions here,
// and the engine gets torch's threads.
#include "ops/torch_views.h"

#include <pthread.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "runtime/parallel.h"
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
    throw std::runtime_error(std::string("bitnet: torch failed to ") + what);
  }
}

// torch's own pool (so torch.set_num_threads is honoured and the process has one OpenMP runtime).
const ThreadPool kTorchThreads = {
    [] {
      uint32_t threads = 1;
      require_ok(torch_get_num_threads(&threads), "tell its number of threads");
      return static_cast<int64_t>(threads);
    },
    [](int64_t partitions, void (*body)(int64_t, int64_t, void*), void* context) {
      require_ok(torch_parallel_for(0, partitions, 1, body, context), "run a parallel region");
    },
};
[[maybe_unused]] const bool g_threads_given = (set_thread_pool(kTorchThreads), true);

}  // namespace

Tensor empty(const Shape& shape, ScalarType type) {
  int64_t strides[Shape::kMaxDimensions];
  int64_t step = 1;
  bool overflow = false;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    overflow |= __builtin_mul_overflow(step, std::max<int64_t>(shape[i], 1), &step);
  }
  AtenTensorHandle handle = nullptr;
  if (overflow || aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                           strides, code_of(type), aoti_torch_device_type_cpu(), 0,
                                           &handle) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("bitnet: expected memory for a result of shape " + shape_text(shape) +
                             ", got none; ask for less at once");
  }
  return Tensor(handle);
}

Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.data(), sizes.data() + sizes.size());
}

bool has_shape(const Tensor& t, std::span<const int64_t> shape) {
  return std::ranges::equal(t.sizes(), shape);
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

int64_t rows_of(std::span<const int64_t> sizes) {
  int64_t rows = 1;
  for (const int64_t size : sizes.first(sizes.size() - 1)) rows *= size;
  return rows;
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

engine::Rows rows_view(const Tensor& t) {
  const auto sizes = t.sizes();
  return {dtype_of(t), rows_of(sizes), sizes.back(), const_cast<void*>(t.const_data_ptr())};
}

engine::Rows rows_like(const engine::Rows& like, Tensor& t) {
  engine::Rows rows = like;
  rows.data = t.mutable_data_ptr();
  return rows;
}

}  // namespace bitnet::ops
