// One helper per repeated check, one message style:
//   <op>: expected <argument> <constraint>, got <value>
// Ask first, `if (!ok) check.fail(...)`: the text of a message is built only when it is needed.
// Messages carry no source paths; they reach Python as RuntimeError.
#pragma once

#include <optional>
#include <string>

#include "ops/torch_views.h"

namespace bitnet::ops {

// Input features of a ternary product: far inside the int32 bound of kernel_table.h.
inline constexpr int64_t kMaxInFeatures = int64_t{1} << 22;

// Names the op whose arguments are being checked; `prefix` goes before the name of every argument,
// for checks that several ops share.
class Check {
 public:
  explicit Check(const char* op, const char* prefix = "") : op_(op), prefix_(prefix) {}

  [[noreturn]] void fail(const std::string& argument, const std::string& constraint,
                         const std::string& got) const;
  void dtype(const Tensor& t, const char* argument, ScalarType type) const;
  void float_dtype(const Tensor& t, const char* argument) const;  // float32, bfloat16, float16
  void dim(const Tensor& t, const char* argument, int64_t dim) const;
  void min_dim(const Tensor& t, const char* argument, int64_t dim) const;
  void shape(const Tensor& t, const char* argument, const Shape& expected) const;
  void same_shape(const Tensor& t, const char* argument, const Tensor& like,
                  const char* like_name) const;
  void contiguous(const Tensor& t, const char* argument) const;

  // uint8 [N, row bytes], contiguous, on the CPU; rows must be whole blocks of 32 bytes.
  void packed(const Tensor& t, const char* argument) const;
  // packed, and made for `k` input features.
  void packed_for(const Tensor& t, const char* argument, int64_t k) const;
  // The K of the caller's shape, where given, against the `k` that the activations have: rows are
  // padded to blocks, so that the bytes of a weight fit 128 different k.
  void in_features(std::optional<int64_t> given, int64_t k, const char* argument = "x") const;
  // float32 with 1 or n elements, contiguous.
  void weight_scale(const Tensor& t, const char* argument, int64_t n) const;
  // F [n], any strides.
  void vector(const Tensor& t, const char* argument, int64_t n) const;

 private:
  const char* op_;
  const char* prefix_;
};

std::string dtype_name(ScalarType type);

// Of a Walsh-Hadamard transform: a power of two from 16 on that divides k.
void check_block(const Check& check, const std::string& argument, int64_t block, int64_t k);

// The gated product of the argument `activation`, "relu2" or "silu".
engine::GatedRow activation_row(const Check& check, const std::string& activation);

// t itself, which has to stay, or a contiguous copy of it.
Tensor as_contiguous(const Tensor& t);

// A 1-D float tensor as float32 values, whatever its type and strides: its own memory, which has to
// stay, where they lie there so.
class FloatVector {
 public:
  explicit FloatVector(const Tensor& t);
  const float* get() const { return values_; }

 private:
  Tensor dense_;
  std::optional<Scratch<float>> converted_;
  const float* values_;
};

}  // namespace bitnet::ops
