// attention, kv_cache_update: checks of their tensors, memory,
// and the tasks of attention_core.h dealt out to torch's
// threads. Must not know how a score is computed.
#include <atomic>
#include <cmath>

#include "ops/attention_core.h"
#include "ops/cache_checks.h"
#include "ops/ops.h"

namespace bitnet::ops {
namespace {

struct Cache {
  DType type;
  int64_t batch, kv_heads, length, dim;
  // Row of a position of head `h` of sequence `b`.
  int64_t row_at(int64_t b, int64_t h, int64_t position) const {
    return (b * kv_heads + h) * length + position;
  }
};

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

// Multiply-adds of one half of attention, about.
int64_t attention_work(const Cache& cache, const int64_t* start, int64_t tokens, int64_t heads) {
  int64_t positions = 0;
  for (int64_t b = 0; b < cache.batch; ++b) positions += start[b] + tokens;
  return positions * tokens * heads * cache.dim;
}

void write_rows(const Tensor& from, Tensor& to, float* scales, const Cache& cache,
                const int64_t* start) {
  const KernelTable& table = kernels();
  const DType type = dtype_of(from);
  const int64_t tokens = from.size(1), heads = cache.kv_heads, dim = cache.dim;
  const void* source = from.const_data_ptr();
  void* target = to.mutable_data_ptr();
  const int64_t rows = cache.batch * tokens * heads;
  const int64_t shares = shares_for(rows, rows * dim, kMinElements);
  Scratch<float> scratch(shares * dim);
  run_shares(shares, [&](int64_t s) {
    float* row = scratch.get() + s * dim;
    for (int64_t i = share_begin(rows, shares, s); i < share_begin(rows, shares, s + 1); ++i) {
      const int64_t h = i % heads, t = i / heads % tokens, b = i / heads / tokens;
      table.load_row(type, offset_bytes(source, i * dim * element_size(type)), dim, row);
      const int64_t at = cache.row_at(b, h, start[b] + t);
      store_cache_row(table, cache.type, row, dim, at, target, scales);
    }
  });
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
  write_rows(key, key_cache, scales.key, cache, start.data());
  write_rows(value, value_cache, scales.value, cache, start.data());
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
  const KernelTable& table = kernels();
  const int64_t most = shares_for(cache.kv_heads * cache.batch * tokens * cache.length,
                                  attention_work(cache, start.data(), tokens, heads), kMinElements);
  const AttentionPlan plan({cache.batch, tokens, heads, cache.kv_heads, cache.length, dim,
                            dtype_of(query), cache.type, static_cast<float>(scale)},
                           start.data(), most);
  const AttentionBuffers buffers = {query.const_data_ptr(),
                                    key_cache.const_data_ptr(),
                                    value_cache.const_data_ptr(),
                                    out.mutable_data_ptr(),
                                    scales.key,
                                    scales.value};
  const int64_t shares = std::min(most, plan.tasks()), own = plan.thread_floats();
  Scratch<float> shared(plan.shared_floats()), threads(shares * own);
  plan.prepare(shared.get());
  std::atomic<int64_t> next{0};
  run_shares(shares, [&](int64_t s) {
    float* mine = threads.get() + s * own;
    if (plan.split()) {  // equal tasks: a sequential stream for each thread
      const int64_t end = share_begin(plan.tasks(), shares, s + 1);
      for (int64_t i = share_begin(plan.tasks(), shares, s); i < end; ++i)
        plan.run(table, buffers, i, shared.get(), mine);
    } else {  // later tokens see more positions: the dear ones first
      for (int64_t i = next++; i < plan.tasks(); i = next++)
        plan.run(table, buffers, plan.tasks() - 1 - i, shared.get(), mine);
    }
  });
  return out;
}

}  // namespace bitnet::ops
