// attention, kv_cache_update.
#include <atomic>
#include <cmath>

#include "ops/attention_core.h"
#include "ops/checks.h"
#include "ops/ops.h"

namespace bitnet::ops {
namespace {

struct Cache {
  DType type;
  int64_t batch, kv_heads, length, dim;
  int64_t row_bytes() const { return dim * element_size(type); }
  // First byte of head `h` of sequence `b`.
  int64_t head_at(int64_t b, int64_t h) const { return (b * kv_heads + h) * length * row_bytes(); }
};

// Two contiguous tensors that share a byte.
bool overlap(const Tensor& a, const Tensor& b) {
  const auto* pa = static_cast<const char*>(a.const_data_ptr());
  const auto* pb = static_cast<const char*>(b.const_data_ptr());
  const auto bytes = [](const Tensor& t) {
    return t.numel() * static_cast<int64_t>(t.element_size());
  };
  return a.numel() > 0 && b.numel() > 0 && pa < pb + bytes(b) && pb < pa + bytes(a);
}

Cache check_caches(const Check& check, const Tensor& key_cache, const Tensor& value_cache) {
  check.float_dtype(key_cache, "key_cache");
  if (key_cache.scalar_type() == ScalarType::Half)
    check.fail("key_cache", "of dtype float32 or bfloat16", "float16");
  check.dim(key_cache, "key_cache", 4);
  check.contiguous(key_cache, "key_cache");
  check.dtype(value_cache, "value_cache", key_cache.scalar_type());
  check.same_shape(value_cache, "value_cache", key_cache, "key_cache");
  check.contiguous(value_cache, "value_cache");
  if (overlap(key_cache, value_cache))
    check.fail("value_cache", "in its own memory", "memory shared with key_cache");
  return {dtype_of(key_cache), key_cache.size(0), key_cache.size(1), key_cache.size(2),
          key_cache.size(3)};
}

// int64 [batch]; every sequence's tokens must lie inside the cache.
const int64_t* check_positions(const Check& check, const Tensor& positions, const Cache& cache,
                               int64_t tokens) {
  check.dtype(positions, "start_positions", ScalarType::Long);
  check.shape(positions, "start_positions", {cache.batch});
  check.contiguous(positions, "start_positions");
  const auto* p = static_cast<const int64_t*>(positions.const_data_ptr());
  for (int64_t b = 0; b < cache.batch; ++b) {
    if (!(p[b] >= 0 && p[b] <= cache.length - tokens))
      check.fail("start_positions",
                 "in [0, " + std::to_string(cache.length - tokens) + "] for " +
                     std::to_string(tokens) + " token(s) in a cache of length " +
                     std::to_string(cache.length),
                 std::to_string(p[b]) + " for sequence " + std::to_string(b));
  }
  return p;
}

// Multiply-adds of one half of attention, about.
int64_t attention_work(const Cache& cache, const int64_t* start, int64_t tokens, int64_t heads) {
  int64_t positions = 0;
  for (int64_t b = 0; b < cache.batch; ++b) positions += start[b] + tokens;
  return positions * tokens * heads * cache.dim;
}

void write_rows(const Tensor& from, Tensor& to, const Cache& cache, const int64_t* start) {
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
      const int64_t at = cache.head_at(b, h) + (start[b] + t) * cache.row_bytes();
      table.store_row(cache.type, row, dim, offset_bytes(target, at));
    }
  });
}

}  // namespace

void kv_cache_update(Tensor key_cache, Tensor value_cache, const Tensor& key_in,
                     const Tensor& value_in, const Tensor& start_positions) {
  const Check check("kv_cache_update");
  const Cache cache = check_caches(check, key_cache, value_cache);
  check.float_dtype(key_in, "key");
  check.dim(key_in, "key", 4);
  check.shape(key_in, "key", {cache.batch, key_in.size(1), cache.kv_heads, cache.dim});
  check.dtype(value_in, "value", key_in.scalar_type());
  check.same_shape(value_in, "value", key_in, "key");
  const int64_t* start = check_positions(check, start_positions, cache, key_in.size(1));
  const Tensor key = as_contiguous(key_in),
               value = as_contiguous(value_in);  // both before any write
  for (const Tensor* source : {&key, &value}) {
    const bool apart = !overlap(*source, key_cache) && !overlap(*source, value_cache);
    if (!apart)
      check.fail(source == &key ? "key" : "value", "in its own memory",
                 "memory shared with a cache");
  }
  write_rows(key, key_cache, cache, start);
  write_rows(value, value_cache, cache, start);
}

Tensor attention(const Tensor& query_in, const Tensor& key_cache, const Tensor& value_cache,
                 const Tensor& start_positions, double scale) {
  const Check check("attention");
  const Cache cache = check_caches(check, key_cache, value_cache);
  check.float_dtype(query_in, "query");
  check.dim(query_in, "query", 4);
  const int64_t tokens = query_in.size(1), heads = query_in.size(2), dim = cache.dim;
  check.shape(query_in, "query", {cache.batch, tokens, heads, dim});
  if (!(cache.kv_heads >= 1 && heads % cache.kv_heads == 0))
    check.fail("query",
               "with a multiple of the cache's " + std::to_string(cache.kv_heads) + " heads",
               std::to_string(heads));
  if (!std::isfinite(scale)) check.fail("scale", "finite", std::to_string(scale));
  const int64_t* start = check_positions(check, start_positions, cache, tokens);
  const Tensor query = as_contiguous(query_in);
  Tensor out = empty(shape_of(query), query.scalar_type());
  if (query.numel() == 0) return out;
  const KernelTable& table = kernels();
  const int64_t most = shares_for(cache.kv_heads * cache.batch * tokens * cache.length,
                                  attention_work(cache, start, tokens, heads), kMinElements);
  const AttentionPlan plan({cache.batch, tokens, heads, cache.kv_heads, cache.length, dim,
                            dtype_of(query), cache.type, static_cast<float>(scale)},
                           start, most);
  const AttentionBuffers buffers = {query.const_data_ptr(), key_cache.const_data_ptr(),
                                    value_cache.const_data_ptr(), out.mutable_data_ptr()};
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
