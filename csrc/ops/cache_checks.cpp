// The checks of caches; see cache_checks.h.  Overlap is told by the bytes that two tensors span, so
// that a mutated cache never aliases what is read in the same call.  Must not know attention or
// what a cache's numbers mean.
#include "ops/cache_checks.h"

#include <algorithm>
#include <cstdlib>

namespace bitnet::ops {
namespace {

// First and last byte that a strided tensor may touch.
std::pair<const char*, const char*> span_of(const Tensor& t) {
  const auto* begin = static_cast<const char*>(t.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + (last + 1) * static_cast<int64_t>(t.element_size())};
}

// float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
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

// Of a tensor that has passed check_cache_dtype.
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

// False where there is none, as there should be.
bool check_scale_given(const Check& check, const Tensor& cache, const std::optional<Tensor>& scale,
                       const char* argument) {
  const bool given = scale.has_value() && scale->defined(),
             int8 = cache_type_of(cache) == DType::kInt8;
  if (int8 && !given) check.fail(argument, "of dtype float32 with int8 caches", "none");
  if (!int8 && given)
    check.fail(argument, "to be left out with caches that are not int8", "a tensor");
  if (!int8) return false;
  check.dtype(*scale, argument, ScalarType::Float);
  Shape expected = shape_of(cache);
  expected.pop_back();
  check.shape(*scale, argument, expected);
  return true;
}

// A dimension of memory: how many elements, how far apart.
struct Extent {
  int64_t size, stride;
};

// Whether no two elements share a place: every dimension steps over all smaller ones.
bool disjoint(std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  int64_t reach = 0;  // the last place of the smaller dimensions
  for (const Extent& e : extents) {
    if (e.size == 1) continue;
    if (e.stride <= reach) return false;
    reach += (e.size - 1) * e.stride;
  }
  return true;
}

std::vector<Extent> extents_of(const Tensor& t) {
  std::vector<Extent> extents;
  for (int64_t d = 0; d < t.dim(); ++d) extents.push_back({t.size(d), t.stride(d)});
  return extents;
}

// The same for two tensors of one shape and dtype, which may alternate.
bool disjoint(const Tensor& a, const Tensor& b) {
  if (!overlap(a, b)) return true;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  const auto distance =
      static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  const auto element = static_cast<int64_t>(a.element_size());
  if (distance % element != 0) return false;
  std::vector<Extent> extents = extents_of(a);
  extents.push_back({2, std::abs(distance / element)});
  return disjoint(std::move(extents));
}

// What int8 and its scales ask.
void check_scales_apart(const Check& check, const Tensor& keys, const Tensor& values,
                        const Tensor& key_scale, const Tensor& value_scale, const char* argument) {
  const int64_t dim = keys.size(keys.dim() - 1);
  if (dim > kMaxInt8Dim)
    check.fail(argument,
               "with heads of at most " + std::to_string(kMaxInt8Dim) + " features for int8",
               std::to_string(dim));
  for (const Tensor* cache : {&keys, &values}) {
    if (overlap(key_scale, *cache) || overlap(value_scale, *cache))
      check.fail("key_scale", "and value_scale in memory of their own", "memory of a cache");
  }
}

engine::PoolView view_of(const Tensor& t, const CacheDims& dims, int64_t layer) {
  const auto bytes = [&t](int d) { return t.stride(d) * static_cast<int64_t>(t.element_size()); };
  char* data = static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
  if (dims.layer >= 0) data += layer * bytes(dims.layer);
  return {data, bytes(dims.block), bytes(dims.position), bytes(dims.head)};
}

}  // namespace

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_begin, a_end] = span_of(a);
  const auto [b_begin, b_end] = span_of(b);
  return a_begin < b_end && b_begin < a_end;
}

int64_t part_bytes(const Tensor& t, int64_t d) {
  const auto [begin, end] = span_of(t);
  return end - begin - (t.size(d) - 1) * t.stride(d) * static_cast<int64_t>(t.element_size());
}

void check_rows(const Check& check, const Tensor& t, const char* argument) {
  if (t.numel() != 0 && !disjoint(extents_of(t)))
    check.fail(argument, "with memory of its own for every element", "overlapping strides");
}

void check_pool(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                const CacheDims& dims) {
  check_cache_dtype(check, key_pool, "key_pool");
  check.dim(key_pool, "key_pool", dims.head + 2);
  check.dtype(value_pool, "value_pool", key_pool.scalar_type());
  check.same_shape(value_pool, "value_pool", key_pool, "key_pool");
  const int64_t row = key_pool.dim() - 1;
  for (const auto& [pool, name] :
       {std::pair(&key_pool, "key_pool"), std::pair(&value_pool, "value_pool")}) {
    if (pool->size(row) > 1 && pool->stride(row) != 1)
      check.fail(name, "contiguous in the last dimension",
                 "stride " + std::to_string(pool->stride(row)));
    check_rows(check, *pool, name);
  }
  if (key_pool.size(dims.position) < 1)
    check.fail("key_pool", "with blocks of at least one position", "none");
  if (!disjoint(key_pool, value_pool))
    check.fail("value_pool", "in its own memory", "memory shared with key_pool");
}

void check_window(const Check& check, int64_t window, const char* argument) {
  if (window < 0) check.fail(argument, "at least 0 (none)", std::to_string(window));
}

CacheLayout check_layout(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                         const std::string& layout, const CacheDims& dims) {
  if (layout == "rows") return CacheLayout::kRows;
  if (layout != "panels") check.fail("layout", "\"rows\" or \"panels\"", '"' + layout + '"');
  const DType type = cache_type_of(key_pool);
  if (type != DType::kBF16 && type != DType::kInt8)
    check.fail("layout", "\"rows\" unless the pool is bfloat16 or int8",
               "\"panels\" of " + std::string(dtype_name(key_pool.scalar_type())));
  const int row = key_pool.dim() - 1;
  for (const auto& [d, what] : {std::pair(dims.position, " positions"), {row, " features"}}) {
    if (key_pool.size(d) % kPanelPositions != 0)
      check.fail(
          "key_pool",
          "with a multiple of " + std::to_string(kPanelPositions) + what + " for layout \"panels\"",
          std::to_string(key_pool.size(d)));
  }
  for (const auto& [pool, name] :
       {std::pair(&key_pool, "key_pool"), std::pair(&value_pool, "value_pool")}) {
    if (pool->numel() > 0 && pool->stride(dims.position) != pool->size(row))
      check.fail(name, "with the positions of a block side by side for layout \"panels\"",
                 "stride " + std::to_string(pool->stride(dims.position)));
  }
  return CacheLayout::kPanels;
}

void check_pool_scales(const Check& check, const Tensor& key_pool, const Tensor& value_pool,
                       const std::optional<Tensor>& key_scale,
                       const std::optional<Tensor>& value_scale) {
  const bool keys = check_scale_given(check, key_pool, key_scale, "key_scale");
  const bool values = check_scale_given(check, value_pool, value_scale, "value_scale");
  if (!keys || !values) return;
  check_rows(check, *key_scale, "key_scale");
  check_rows(check, *value_scale, "value_scale");
  if (!disjoint(*key_scale, *value_scale))
    check.fail("value_scale", "in its own memory", "memory shared with key_scale");
  check_scales_apart(check, key_pool, value_pool, *key_scale, *value_scale, "key_pool");
}

void check_bounds(const Check& check, const Tensor& bounds, const Tensor& key_pool,
                  const Tensor& value_pool, const CacheDims& dims) {
  const int64_t size = key_pool.size(dims.position);
  if (size % kAttentionChunk != 0)
    check.fail("key_pool",
               "with blocks of a multiple of " + std::to_string(kAttentionChunk) +
                   " positions beside key_bounds",
               std::to_string(size));
  check.dtype(bounds, "key_bounds", ScalarType::BFloat16);
  Shape expected;
  for (int d = 0; d < key_pool.dim(); ++d) {
    const bool row = d + 1 == key_pool.dim();
    expected.push_back(d == dims.position ? size / kAttentionChunk
                                          : key_pool.size(d) * (row ? 2 : 1));
  }
  check.shape(bounds, "key_bounds", expected);
  if (bounds.stride(bounds.dim() - 1) != 1)
    check.fail("key_bounds", "contiguous in the last dimension",
               "stride " + std::to_string(bounds.stride(bounds.dim() - 1)));
  check_rows(check, bounds, "key_bounds");
  for (const Tensor* pool : {&key_pool, &value_pool}) {
    if (overlap(bounds, *pool)) check.fail("key_bounds", "in its own memory", "memory of a pool");
  }
}

engine::PoolView bounds_view(const Tensor& bounds, const CacheDims& dims) {
  return view_of(bounds, dims, 0);
}

engine::CachePool pool_view(const Tensor& keys, const Tensor& values,
                            const std::optional<Tensor>& key_scale,
                            const std::optional<Tensor>& value_scale, const CacheDims& dims,
                            int64_t layer, CacheLayout layout) {
  engine::CachePool pool{cache_type_of(keys),
                         keys.size(dims.position),
                         keys.size(keys.dim() - 1),
                         view_of(keys, dims, layer),
                         view_of(values, dims, layer),
                         {},
                         {},
                         layout};
  if (pool.scaled()) {
    pool.key_scales = view_of(*key_scale, dims, layer);
    pool.value_scales = view_of(*value_scale, dims, layer);
  }
  return pool;
}

Mutated::Mutated(const Tensor& key_cache, const Tensor& value_cache,
                 const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale,
                 const char* key_name, const char* value_name) {
  add(key_cache, key_name);
  add(value_cache, value_name);
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
