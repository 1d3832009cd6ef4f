// paged_attention, paged_cache_update: checks of their tensors; engine/attention.h and
// engine/kv_cache.h do the rest.
#include "engine/attention.h"

#include <cmath>

#include "engine/kv_cache.h"
#include "ops/cache_checks.h"
#include "ops/paged_batch.h"
#include "ops/register.h"

namespace bitnet::ops {
namespace {

void check_heads(const Check& check, int64_t heads, int64_t kv_heads, double scale) {
  if (!(kv_heads >= 1 && heads % kv_heads == 0))
    check.fail("query", "with a multiple of the cache's " + std::to_string(kv_heads) + " heads",
               std::to_string(heads));
  if (!std::isfinite(scale)) check.fail("scale", "finite", std::to_string(scale));
}

// `text`: as the keys of a program's line say it; or the window alone.
engine::AttentionPolicy policy_of(const Check& check, const std::string& text, int64_t window) {
  if (text.empty()) return {.window = window};
  if (window != 0) check.fail("window", "0 where policy says it", std::to_string(window));
  try {
    const std::vector<engine::Line> lines = engine::parse_listing("policy " + text);
    if (lines.size() != 1) check.fail("policy", "of one line", std::to_string(lines.size()));
    engine::Keys keys(lines[0]);
    const engine::AttentionPolicy policy = engine::read_policy(keys);
    keys.finish();
    return policy;
  } catch (const engine::ProgramError& error) {
    constexpr size_t kExpected = std::string_view("expected ").size();
    throw std::runtime_error("paged_attention: expected policy with " +
                             std::string(error.what()).substr(kExpected));
  }
}

}  // namespace

void paged_cache_update(Tensor key_pool, Tensor value_pool, const Tensor& key_in,
                        const Tensor& value_in, const Tensor& slot_mapping,
                        std::optional<Tensor> key_scale, std::optional<Tensor> value_scale,
                        std::string layout_name, std::optional<Tensor> key_bounds) {
  const Check check("paged_cache_update");
  check_pool(check, key_pool, value_pool, kPaged);
  const CacheLayout layout = check_layout(check, key_pool, value_pool, layout_name, kPaged);
  check_pool_scales(check, key_pool, value_pool, key_scale, value_scale);
  check.float_dtype(key_in, "key");
  check.dim(key_in, "key", 3);
  const int64_t tokens = key_in.size(0), heads = key_pool.size(kPaged.head);
  check.shape(key_in, "key", {tokens, heads, key_pool.size(3)});
  check.dtype(value_in, "value", key_in.scalar_type());
  check.same_shape(value_in, "value", key_in, "key");
  std::vector<int64_t> slots;
  copy_slots(check, slot_mapping, tokens, key_pool.size(0) * key_pool.size(1), slots);
  const Tensor key = as_contiguous(key_in), value = as_contiguous(value_in);
  Mutated mutated(key_pool, value_pool, key_scale, value_scale, "key_pool", "value_pool");
  const bool bounded = key_bounds.has_value() && key_bounds->defined();
  if (bounded) {
    check_bounds(check, *key_bounds, key_pool, value_pool, kPaged);
    mutated.add(*key_bounds, "key_bounds");
  }
  mutated.keep_apart(check, key, "key");
  mutated.keep_apart(check, value, "value");
  mutated.keep_apart(check, slot_mapping, "slot_mapping");
  if (key_pool.numel() == 0 || tokens == 0) return;
  engine::CachePool pool =
      pool_view(key_pool, value_pool, key_scale, value_scale, kPaged, 0, layout);
  engine::write_cache(rows_view(key), rows_view(value), slots.data(), heads, pool);
  if (!bounded) return;
  pool.bounds = bounds_view(*key_bounds, kPaged);
  engine::bound_pages(slots.data(), tokens, heads, pool);
}

Tensor paged_attention(const Tensor& query_in, const Tensor& key_pool, const Tensor& value_pool,
                       const Tensor& query_start_loc, const Tensor& seq_lens,
                       const Tensor& block_table, double scale, std::optional<Tensor> key_scale,
                       std::optional<Tensor> value_scale, std::string layout_name, int64_t window,
                       std::string policy_text, std::optional<Tensor> key_bounds) {
  const Check check("paged_attention");
  check_pool(check, key_pool, value_pool, kPaged);
  const CacheLayout layout = check_layout(check, key_pool, value_pool, layout_name, kPaged);
  check_pool_scales(check, key_pool, value_pool, key_scale, value_scale);
  check.float_dtype(query_in, "query");
  check.dim(query_in, "query", 3);
  const int64_t tokens = query_in.size(0), heads = query_in.size(1), dim = key_pool.size(3);
  const int64_t kv_heads = key_pool.size(kPaged.head);
  check.shape(query_in, "query", {tokens, heads, dim});
  check_heads(check, heads, kv_heads, scale);
  check_window(check, window, "window");
  const engine::AttentionPolicy policy = policy_of(check, policy_text, window);
  PagedBatch sequences;
  sequences.set(check, query_start_loc, seq_lens, block_table, tokens, key_pool.size(0),
                key_pool.size(1));
  const bool bounded = key_bounds.has_value() && key_bounds->defined();
  if (policy.chooses() && !bounded)
    check.fail("key_bounds", "with a policy that chooses pages", "none");
  if (bounded) check_bounds(check, *key_bounds, key_pool, value_pool, kPaged);
  const Tensor query = as_contiguous(query_in);
  Tensor out = empty(shape_of(query), query.scalar_type());
  if (query.numel() == 0) return out;
  engine::CachePool pool =
      pool_view(key_pool, value_pool, key_scale, value_scale, kPaged, 0, layout);
  if (policy.chooses()) pool.bounds = bounds_view(*key_bounds, kPaged);
  engine::attend({heads, kv_heads, dim, dtype_of(query), static_cast<float>(scale), pool, policy},
                 sequences.view(), {query.const_data_ptr(), out.mutable_data_ptr(), pool});
  return out;
}

BITNET_LIBRARY_IMPL(m) {
  BITNET_OP(m, paged_attention);
  BITNET_OP(m, paged_cache_update);
}

}  // namespace bitnet::ops
