// A tensor as torch's stable C interface hands it over, and shapes. torch::stable::Tensor allocates
// a reference count for every argument and calls into torch at every question; a small op spends
// more on that than on its work. Here a tensor is its handle, owned or borrowed, and what ops ask
// of it is asked once.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>

namespace bitnet::ops {

using torch::headeronly::ScalarType;

// Sizes of dimensions, without an allocation: of as many as torch's own operators take.
class Shape {
 public:
  static constexpr size_t kMaxDimensions = 64;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) : Shape(sizes.begin(), sizes.end()) {}
  // Throws std::runtime_error for too many.
  Shape(const int64_t* begin, const int64_t* end);
  Shape(const Shape& other) : Shape(other.begin(), other.end()) {}
  Shape& operator=(const Shape& other) {
    std::copy(other.begin(), other.end(), sizes_);
    count_ = other.count_;
    return *this;
  }

  size_t size() const { return count_; }
  const int64_t* data() const { return sizes_; }
  const int64_t* begin() const { return sizes_; }
  const int64_t* end() const { return sizes_ + count_; }
  int64_t operator[](size_t i) const { return sizes_[i]; }
  int64_t& back() { return sizes_[count_ - 1]; }
  int64_t back() const { return sizes_[count_ - 1]; }
  void pop_back() { --count_; }
  void push_back(int64_t size);

 private:
  int64_t sizes_[kMaxDimensions];
  size_t count_ = 0;
};

// torch's numbers of types are its own to choose, and it goes through a list for one.
ScalarType type_of(int32_t code);
// float32's for a type that no op returns.
int32_t code_of(ScalarType type);

class Tensor {
 public:
  Tensor() = default;  // to be assigned to, no more
  // Takes the handle over.
  explicit Tensor(AtenTensorHandle handle) : handle_(handle), owned_(true) {}
  // The same tensor, for as long as `other` lives.
  static Tensor borrow(const Tensor& other);
  Tensor(Tensor&& other) noexcept
      : handle_(other.handle_), owned_(std::exchange(other.owned_, false)), facts_(other.facts_) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(owned_, other.owned_);
    std::swap(facts_, other.facts_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (owned_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle handle() const { return handle_; }
  // For torch, of a tensor that is owned.
  AtenTensorHandle release() {
    owned_ = false;
    return handle_;
  }

  // torch passes None for a Tensor as one that is not defined; it has no dimensions here.
  bool defined() const { return facts().defined; }
  bool is_cpu() const { return facts().cpu; }
  ScalarType scalar_type() const { return type_of(facts().code); }
  size_t element_size() const;
  int64_t dim() const { return static_cast<int64_t>(facts().sizes.size()); }
  std::span<const int64_t> sizes() const { return facts().sizes; }
  int64_t size(int64_t d) const { return facts().sizes[static_cast<size_t>(d)]; }
  int64_t stride(int64_t d) const;
  int64_t numel() const;
  bool is_contiguous() const;
  const void* const_data_ptr() const;
  void* mutable_data_ptr() const;

 private:
  struct Facts {
    std::span<const int64_t> sizes;  // torch's own memory
    int32_t code = -1;               // of the type
    bool known = false, defined = false, cpu = false;
  };
  const Facts& facts() const {
    if (!facts_.known) ask();
    return facts_;
  }
  void ask() const;

  AtenTensorHandle handle_ = nullptr;
  bool owned_ = false;
  mutable Facts facts_;
};

}  // namespace bitnet::ops
