// attention, kv_cache_update: checks of their tensors; engine/attention.h and engine/kv_cache.h do
// the rest.
#include "engine/attention.h"

#include <cmath>

#include "engine/kv_cache.h"
#include "ops/cache_checks.h"
#include "ops/register.h"

namespace bitnet::ops {
namespace {

using Cache = engine::CacheShape;

Cache check_caches(const Check& check, const Tensor& key_cache, const Tensor& value_cache) {
  check_cache_dtype(check, key_cache, "key_cache");
  check.dim(key_cache, "key_cache", 4);
  check.contiguous(key_cache, "key_cache");
  check.dtype(value_cache, "value_cache", key_cache.scalar_type());
  check.same_shape(value_cache, "value_cache", key_cache, "key_cache");
  check.contiguous(value_cache, "value_cache");
  if (overlap(key_cache, value_cache))
    check.fail("value_cache", "in its own memory", "memory shared with key_cache");
  return {cache_type_of(key_cache), key_cache.size(0), key_cache.size(1), key_cache.size(2),
          key_cache.size(3)};
}

}  // namespace

void kv_cache_update(Tensor key_cache, Tensor value_cache, const Tensor& key_in,
                     const Tensor& value_in, const Tensor& start_positions,
                     std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  const Check check("kv_cache_update");
  const Cache cache = check_caches(check, key_cache, value_cache);
  const CacheScales scales =
      check_cache_scales(check, key_cache, value_cache, key_scale, value_scale, false);
  check.float_dtype(key_in, "key");
  check.dim(key_in, "key", 4);
  check.shape(key_in, "key", {cache.batch, key_in.size(1), cache.kv_heads, cache.dim});
  check.dtype(value_in, "value", key_in.scalar_type());
  check.same_shape(value_in, "value", key_in, "key");
  std::vector<int64_t> start;
  check_positions(check, start_positions, cache.batch, cache.length, key_in.size(1), start);
  const Tensor key = as_contiguous(key_in),
               value = as_contiguous(value_in);  // both before any write
  const Mutated mutated(key_cache, value_cache, key_scale, value_scale);
  mutated.keep_apart(check, key, "key");
  mutated.keep_apart(check, value, "value");
  mutated.keep_apart(check, start_positions, "start_positions");
  if (key.numel() == 0 && scales.key == nullptr) return;  // heads of no features, maybe very many
  const auto write = [&](const Tensor& from, Tensor& to, float* to_scales) {
    engine::write_cache(rows_view(from), from.size(1), cache, start.data(), to.mutable_data_ptr(),
                        to_scales);
  };
  write(key, key_cache, scales.key);
  write(value, value_cache, scales.value);
}

Tensor attention(const Tensor& query_in, const Tensor& key_cache, const Tensor& value_cache,
                 const Tensor& start_positions, double scale, std::optional<Tensor> key_scale,
                 std::optional<Tensor> value_scale) {
  const Check check("attention");
  const Cache cache = check_caches(check, key_cache, value_cache);
  const CacheScales scales =
      check_cache_scales(check, key_cache, value_cache, key_scale, value_scale, false);
  check.float_dtype(query_in, "query");
  check.dim(query_in, "query", 4);
  const int64_t tokens = query_in.size(1), heads = query_in.size(2), dim = cache.dim;
  check.shape(query_in, "query", {cache.batch, tokens, heads, dim});
  if (!(cache.kv_heads >= 1 && heads % cache.kv_heads == 0))
    check.fail("query",
               "with a multiple of the cache's " + std::to_string(cache.kv_heads) + " heads",
               std::to_string(heads));
  if (!std::isfinite(scale)) check.fail("scale", "finite", std::to_string(scale));
  std::vector<int64_t> start;
  check_positions(check, start_positions, cache.batch, cache.length, tokens, start);
  const Tensor query = as_contiguous(query_in);
  Tensor out = empty(shape_of(query), query.scalar_type());
  if (query.numel() == 0) return out;
  engine::attend({cache.batch, tokens, heads, cache.kv_heads, cache.length, dim, dtype_of(query),
                  cache.type, static_cast<float>(scale)},
                 start.data(),
                 {query.const_data_ptr(), key_cache.const_data_ptr(), value_cache.const_data_ptr(),
                  out.mutable_data_ptr(), scales.key, scales.value});
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(bitnet, CPU, m) {
  BITNET_OP(m, attention);
  BITNET_OP(m, kv_cache_update);
}

}  // namespace bitnet::ops
