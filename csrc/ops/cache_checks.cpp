// The checks of caches; see cache_checks.h.  Overlap is told by the bytes that two tensors span, so
// that a mutated cache never aliases what is read in the same call.  Must not know attention or
// what a cache's numbers mean.
#include "ops/cache_checks.h"

namespace bitnet::ops {
namespace {

// First and last byte that a strided tensor may touch.
std::pair<const char*, const char*> span_of(const Tensor& t) {
  const auto* begin = static_cast<const char*>(t.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + (last + 1) * static_cast<int64_t>(t.element_size())};
}

float* check_scale(const Check& check, const Tensor& cache, std::optional<Tensor>& scale,
                   const char* argument, bool layers) {
  const bool given = scale.has_value() && scale->defined(),
             int8 = cache_type_of(cache) == DType::kInt8;
  if (int8 && !given) check.fail(argument, "of dtype float32 with int8 caches", "none");
  if (!int8 && given)
    check.fail(argument, "to be left out with caches that are not int8", "a tensor");
  if (!int8) return nullptr;
  check.dtype(*scale, argument, ScalarType::Float);
  Shape expected = shape_of(cache);
  expected.pop_back();
  check.shape(*scale, argument, expected);
  if (layers && !dense_layers(*scale))
    check.fail(argument, "contiguous within every layer", "other strides");
  if (!layers) check.contiguous(*scale, argument);
  return static_cast<float*>(scale->mutable_data_ptr());
}

}  // namespace

void check_cache_dtype(const Check& check, const Tensor& cache, const char* argument) {
  if (!cache.defined()) check.float_dtype(cache, argument);  // it says so
  switch (cache.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::BFloat16:
    case ScalarType::Half:
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
    case ScalarType::Char:
      return;
    default:
      check.fail(argument,
                 "of dtype float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8",
                 dtype_name(cache.scalar_type()));
  }
}

DType cache_type_of(const Tensor& cache) {
  switch (cache.scalar_type()) {
    case ScalarType::Char:
      return DType::kInt8;
    case ScalarType::Float8_e4m3fn:
      return DType::kF8E4M3;
    case ScalarType::Float8_e5m2:
      return DType::kF8E5M2;
    default:
      return dtype_of(cache);
  }
}

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_begin, a_end] = span_of(a);
  const auto [b_begin, b_end] = span_of(b);
  return a_begin < b_end && b_begin < a_end;
}

bool dense_layers(const Tensor& t) {
  int64_t step = 1;
  bool dense = true;
  for (int64_t d = t.dim() - 1; d >= 1; --d) {
    dense = dense && (t.size(d) == 1 || t.stride(d) == step);
    step *= t.size(d);
  }
  return t.numel() == 0 || (dense && (t.size(0) == 1 || t.stride(0) >= step));
}

void check_positions(const Check& check, const Tensor& positions, int64_t batch, int64_t length,
                     int64_t tokens, std::vector<int64_t>& copy) {
  check.dtype(positions, "start_positions", ScalarType::Long);
  check.shape(positions, "start_positions", {batch});
  check.contiguous(positions, "start_positions");
  const auto* p = static_cast<const int64_t*>(positions.const_data_ptr());
  copy.assign(p, p + batch);
  for (size_t b = 0; b < copy.size(); ++b) {
    if (!(copy[b] >= 0 && copy[b] <= length - tokens))
      check.fail("start_positions",
                 "in [0, " + std::to_string(length - tokens) + "] for " + std::to_string(tokens) +
                     " token(s) in a cache of length " + std::to_string(length),
                 std::to_string(copy[b]) + " for sequence " + std::to_string(b));
  }
}

CacheScales check_cache_scales(const Check& check, const Tensor& key_cache,
                               const Tensor& value_cache, std::optional<Tensor>& key_scale,
                               std::optional<Tensor>& value_scale, bool layers) {
  const CacheScales scales = {check_scale(check, key_cache, key_scale, "key_scale", layers),
                              check_scale(check, value_cache, value_scale, "value_scale", layers)};
  if (scales.key == nullptr) return scales;
  const int64_t dim = key_cache.size(key_cache.dim() - 1);
  if (dim > kMaxInt8Dim)
    check.fail("key_cache",
               "with heads of at most " + std::to_string(kMaxInt8Dim) + " features for int8",
               std::to_string(dim));
  for (const Tensor* cache : {&key_cache, &value_cache}) {
    if (overlap(*key_scale, *cache) || overlap(*value_scale, *cache))
      check.fail("key_scale", "and value_scale in memory of their own", "memory of a cache");
  }
  if (overlap(*key_scale, *value_scale))
    check.fail("value_scale", "in its own memory", "memory shared with key_scale");
  return scales;
}

Mutated::Mutated(const Tensor& key_cache, const Tensor& value_cache,
                 const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  add(key_cache, "key_cache");
  add(value_cache, "value_cache");
  if (cache_type_of(key_cache) != DType::kInt8) return;
  add(*key_scale, "key_scale");
  add(*value_scale, "value_scale");
}

void Mutated::add(const Tensor& t, const char* argument) {
  if (t.numel() == 0) return;
  const auto [begin, end] = span_of(t);
  spans_[count_++] = {begin, end, argument};
}

void Mutated::keep_apart(const Check& check, const Tensor& t, const char* argument) const {
  if (t.numel() == 0) return;
  const auto [begin, end] = span_of(t);
  keep_apart(check, begin, end - begin, argument);
}

void Mutated::keep_apart(const Check& check, const void* data, int64_t bytes,
                         const char* argument) const {
  const char* begin = static_cast<const char*>(data);
  for (int i = 0; i < count_; ++i) {
    if (bytes > 0 && begin < spans_[i].end && spans_[i].begin < begin + bytes)
      check.fail(argument, "in its own memory",
                 std::string("memory shared with ") + spans_[i].argument + "; pass a copy (clone)");
  }
}

}  // namespace bitnet::ops
