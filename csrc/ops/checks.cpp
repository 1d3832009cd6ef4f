// The checks of checks.h. A message is built only when one fails: a good call pays for comparisons
// alone.
#include "ops/checks.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>

#include "format/layout.h"

namespace bitnet::ops {

std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "dtype number " + std::to_string(static_cast<int>(type));
  }
}

void Check::fail(const std::string& argument, const std::string& constraint,
                 const std::string& got) const {
  throw std::runtime_error(std::string(op_) + ": expected " + prefix_ + argument + " " +
                           constraint + ", got " + got);
}

void Check::dtype(const Tensor& t, const char* argument, ScalarType type) const {
  if (!t.defined()) fail(argument, "to be a tensor", "None");  // torch passes None for Tensor
  if (!t.is_cpu()) fail(argument, "on the CPU", "another device");
  if (t.scalar_type() != type)
    fail(argument, "of dtype " + dtype_name(type), dtype_name(t.scalar_type()));
}

void Check::float_dtype(const Tensor& t, const char* argument) const {
  if (!t.defined()) fail(argument, "to be a tensor", "None");  // torch passes None for Tensor
  if (!t.is_cpu()) fail(argument, "on the CPU", "another device");
  const ScalarType type = t.scalar_type();
  const bool ok =
      type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  if (!ok) fail(argument, "of dtype float32, bfloat16 or float16", dtype_name(type));
}

void Check::dim(const Tensor& t, const char* argument, int64_t dim) const {
  if (!t.defined()) fail(argument, "to be a tensor", "None");
  if (t.dim() != dim)
    fail(argument, "with " + std::to_string(dim) + " dimensions", "shape " + shape_text(t.sizes()));
}

void Check::min_dim(const Tensor& t, const char* argument, int64_t dim) const {
  if (t.dim() < dim)
    fail(argument, "with at least " + std::to_string(dim) + " dimension(s)",
         "shape " + shape_text(t.sizes()));
}

void Check::shape(const Tensor& t, const char* argument, const Shape& expected) const {
  if (!has_shape(t, expected))
    fail(argument, "of shape " + shape_text(expected), shape_text(t.sizes()));
}

void Check::same_shape(const Tensor& t, const char* argument, const Tensor& like,
                       const char* like_name) const {
  if (!has_shape(t, like.sizes()))
    fail(argument, "of the shape of " + std::string(like_name) + " " + shape_text(like.sizes()),
         shape_text(t.sizes()));
}

void Check::contiguous(const Tensor& t, const char* argument) const {
  if (!t.is_contiguous())
    fail(argument, "contiguous (call .contiguous() once, when loading)",
         "a strided view of shape " + shape_text(t.sizes()));
}

void Check::packed(const Tensor& t, const char* argument) const {
  dtype(t, argument, ScalarType::Byte);
  dim(t, argument, 2);
  contiguous(t, argument);
  if (!(t.size(1) % layout::kBlockBytes == 0 && t.size(1) > 0))
    fail(argument, "with rows of whole 32-byte blocks (packed by torch.ops.bitnet.pack)",
         "rows of " + std::to_string(t.size(1)) + " bytes");
}

void Check::packed_for(const Tensor& t, const char* argument, int64_t k) const {
  packed(t, argument);
  if (!(k >= 1 && k <= kMaxInFeatures))
    fail(argument, "for 1 to 4194304 input features", std::to_string(k));
  if (t.size(1) != layout::row_bytes_for(k))
    fail(argument,
         "packed for the " + std::to_string(k) + " input features of the activations (" +
             std::to_string(layout::row_bytes_for(k)) + " bytes a row)",
         std::to_string(t.size(1)) + " bytes a row");
}

void Check::in_features(std::optional<int64_t> given, int64_t k, const char* argument) const {
  if (given.has_value() && *given != k)
    fail(argument, "with the " + std::to_string(*given) + " input features of the weight (shape)",
         std::to_string(k));
}

void Check::weight_scale(const Tensor& t, const char* argument, int64_t n) const {
  dtype(t, argument, ScalarType::Float);
  const int64_t count = t.numel();
  if (!(count == 1 || count == n))
    fail(argument, "with 1 element or one per output row (" + std::to_string(n) + ")",
         std::to_string(count) + " elements");
  contiguous(t, argument);
}

void Check::vector(const Tensor& t, const char* argument, int64_t n) const {
  float_dtype(t, argument);
  shape(t, argument, {n});
}

engine::GatedRow activation_row(const Check& check, const std::string& activation) {
  const engine::GatedRow row = engine::gated_row(active_kernels(), activation);
  if (row == nullptr)
    check.fail("activation", "'relu2', 'silu' or 'gelu_pytorch_tanh'", "'" + activation + "'");
  return row;
}

// torch's own macro for such a check has another name in torch 2.10 to 2.12.
static AtenTensorHandle another_handle(AtenTensorHandle of) {
  AtenTensorHandle made = nullptr;
  if (aoti_torch_new_tensor_handle(of, &made) != 0) throw std::bad_alloc();
  return made;
}

Tensor as_contiguous(const Tensor& t) {
  if (t.is_contiguous()) return Tensor::borrow(t);
  try {
    const auto copy = torch::stable::contiguous(torch::stable::Tensor(another_handle(t.handle())));
    return Tensor(another_handle(copy.get()));
  } catch (const std::exception&) {  // its text is of torch's own source files
    throw std::runtime_error(
        "bitnet: expected memory for a contiguous copy of an argument of shape " +
        shape_text(t.sizes()) + ", got none; pass fewer elements at once");
  }
}

FloatVector::FloatVector(const Tensor& t) : dense_(as_contiguous(t)) {
  if (dense_.scalar_type() == ScalarType::Float) {
    values_ = data<float>(dense_);
    return;
  }
  const int64_t count = dense_.numel();
  values_ = converted_.emplace(count).get();
  active_kernels().load_row(dtype_of(dense_), dense_.const_data_ptr(), count, converted_->get());
}

void check_block(const Check& check, const std::string& argument, int64_t block, int64_t k) {
  if (block >= 16 && (block & (block - 1)) == 0 && k % block == 0) return;
  check.fail(
      argument,
      "with rows of a power of two from 16 on that divides " + std::to_string(k) + " features",
      std::to_string(block));
}

}  // namespace bitnet::ops
