// What every op implementation uses at the door: tensors, scratch
// memory, work splitting. Must not know SIMD or an algorithm. The
// only other place that includes torch is ops.cpp.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/kernel_table.h"

namespace bitnet::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::vector<int64_t>;

// A new uninitialised contiguous CPU tensor.
Tensor empty(const Shape& shape, ScalarType type);

Shape shape_of(const Tensor& t);
std::string shape_text(const Shape& shape);
int64_t product(const Shape& shape, size_t begin, size_t end);

// Element type of an activation tensor; float32, bfloat16 or float16 were checked before.
DType dtype_of(const Tensor& t);
ScalarType scalar_type_of(DType type);

// `count` elements of `size` bytes, aligned to 64; std::runtime_error where there is no memory.
void* allocate_scratch(int64_t count, size_t size);

// Uninitialised scratch memory, 64-byte aligned.  Allocated before a parallel region, never inside.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(static_cast<T*>(allocate_scratch(count, sizeof(T)))) {}
  Scratch(Scratch&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { ::operator delete(data_, std::align_val_t{64}); }
  T* get() { return data_; }
  const T* get() const { return data_; }

 private:
  T* data_;
};

// The threads that a region opened now would have: torch's, 1 in a fork of a process that used
// them.
int64_t thread_count();

// How many shares to cut `work` units into: at most one per thread of torch's pool, each at least
// `min_work` units, at least one, and no more than `items`.
int64_t shares_for(int64_t items, int64_t work, int64_t min_work);

// First item of share s when `items` are dealt out contiguously to `shares`.
constexpr int64_t share_begin(int64_t items, int64_t shares, int64_t s) {
  return items / shares * s + std::min(s, items % shares);
}

void run_shares_raw(int64_t shares, void (*body)(int64_t begin, int64_t end, void* context),
                    void* context);

// Runs f(share) for every share on torch's own pool (torch_parallel_for, so torch.set_num_threads
// is honoured and there is one OpenMP runtime).  f must not throw, allocate or call torch.
template <class F>
void run_shares(int64_t shares, const F& f) {
  if (shares == 1) return f(0);
  run_shares_raw(
      shares,
      [](int64_t begin, int64_t end, void* context) {
        for (int64_t s = begin; s < end; ++s) (*static_cast<const F*>(context))(s);
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// f(begin, end) over contiguous parts of [0, items); cost_per_item and min_work in the same unit.
template <class F>
void parallel_ranges(int64_t items, int64_t cost_per_item, int64_t min_work, const F& f) {
  if (items <= 0) return;
  const int64_t shares = shares_for(items, items * std::max<int64_t>(cost_per_item, 1), min_work);
  run_shares(shares, [&](int64_t s) {
    f(share_begin(items, shares, s), share_begin(items, shares, s + 1));
  });
}

// Work below which a second thread costs more than it saves (a region is about 1 microsecond).
inline constexpr int64_t kMinElements = 1 << 14;  // element-wise float work
inline constexpr int64_t kMinMacs = 1 << 18;      // ternary multiply-adds

inline const void* offset_bytes(const void* p, int64_t n) {
  return static_cast<const char*>(p) + n;
}
inline void* offset_bytes(void* p, int64_t n) { return static_cast<char*>(p) + n; }

}  // namespace bitnet::ops
