// Every row of the kernel table that works on floats, as data: buffers in, buffers out, one call.
// The tests of equality and of guard pages enumerate this list.  A row of the table that is missing
// here fails test_kernels_rows.  Must not know ISAs or expected values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/tables.h"

namespace bitnet::test {

// How a buffer's bytes are filled and compared; scratch (floats) may hold anything afterwards.
// kU16, kF8E4M3, kF8E5M2: compared bit by bit.
enum class Kind { kF32, kI32, kI8, kU16, kBF16, kF16, kF8E4M3, kF8E5M2, kScratch };
inline int64_t size_of(Kind kind) {
  if (kind == Kind::kU16 || kind == Kind::kBF16 || kind == Kind::kF16) return 2;
  return kind == Kind::kI8 || kind == Kind::kF8E4M3 || kind == Kind::kF8E5M2 ? 1 : 4;
}

struct Shape {
  Kind kind;
  int64_t count;
};

// One call.  `in` and `out` point at buffers of the shapes that shapes(n) gives.
struct Call {
  const KernelTable& kernels;
  int64_t n;
  const std::vector<const void*>& in;
  const std::vector<void*>& out;

  const float* f(std::size_t i) const { return static_cast<const float*>(in[i]); }
  float* y(std::size_t i = 0) const { return static_cast<float*>(out[i]); }
};

struct RowOp {
  std::string name;
  const char* row;  // field of KernelTable
  std::function<std::vector<Shape>(int64_t n)> inputs, outputs;
  std::function<void(const Call&)> run;
  int64_t smallest_n = 0;
  // Output 0 starts as a copy of this input: operations in place.  -1: none.
  int in_place_of = -1;
};

inline Kind stored_as(DType type) {
  if (type == DType::kF8E4M3) return Kind::kF8E4M3;
  if (type == DType::kF8E5M2) return Kind::kF8E5M2;
  return type == DType::kF32 ? Kind::kF32 : Kind::kU16;
}
inline const char* name_of(DType type) {
  constexpr const char* kNames[] = {"f32", "bf16", "f16", "int8", "e4m3", "e5m2"};
  return kNames[static_cast<int>(type)];
}
// Of activations, and of the rows of a cache.
inline constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
inline constexpr DType kCacheTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3,
                                        DType::kF8E5M2};

// `floats` float rows in, one out.
inline std::function<std::vector<Shape>(int64_t)> float_rows(int floats) {
  return [floats](int64_t n) {
    return std::vector<Shape>(static_cast<std::size_t>(floats), Shape{Kind::kF32, n});
  };
}

inline void add_integer_ops(std::vector<RowOp>& ops) {
  for (const bool pad : {false, true}) {
    const auto padded = [pad](int64_t n) { return pad ? (n + 127) / 128 * 128 : n; };
    ops.push_back({pad ? "quantize_row padded" : "quantize_row", "quantize_row", float_rows(1),
                   [padded](int64_t n) {
                     return std::vector<Shape>{
                         {Kind::kI8, padded(n)}, {Kind::kI32, 1}, {Kind::kF32, 1}};
                   },
                   [padded](const Call& c) {
                     *c.y(2) = c.kernels.quantize_row(c.f(0), c.n, padded(c.n),
                                                      static_cast<int8_t*>(c.out[0]), kTokenStep,
                                                      static_cast<int32_t*>(c.out[1]));
                   }});
  }
  // every 64 codes 96 apart; what lies between is not touched, so it is set to one value first
  const auto strided = [](int64_t n) { return (n + 127) / 128 * 2 * 96; };
  ops.push_back({"quantize_row strided", "quantize_row", float_rows(1),
                 [strided](int64_t n) {
                   return std::vector<Shape>{
                       {Kind::kI8, strided(n)}, {Kind::kI32, 1}, {Kind::kF32, 1}};
                 },
                 [strided](const Call& c) {
                   auto* q = static_cast<int8_t*>(c.out[0]);
                   for (int64_t i = 0; i < strided(c.n); ++i) q[i] = 77;
                   *c.y(2) = c.kernels.quantize_row(c.f(0), c.n, (c.n + 127) / 128 * 128, q, 96,
                                                    static_cast<int32_t*>(c.out[1]));
                 }});
}

inline int64_t padded_codes(int64_t n) { return (n + 127) / 128 * 128; }

// What norm_quantize_row writes: the row, its codes, their sum and their scale.
inline auto norm_results(bool codes_only) {
  return [codes_only](int64_t n) {
    return std::vector<Shape>{{codes_only ? Kind::kScratch : Kind::kF32, n},
                              {Kind::kI8, padded_codes(n)},
                              {Kind::kI32, 1},
                              {Kind::kF32, 1}};
  };
}
inline void run_norm(const Call& c, const NormJob& job) {
  *c.y(3) = c.kernels.norm_quantize_row(job, padded_codes(c.n), static_cast<int8_t*>(c.out[1]),
                                        kTokenStep, static_cast<int32_t*>(c.out[2]));
}

// With and without a norm, in place, and where only the codes are wanted.
inline void add_norm_quantize_op(std::vector<RowOp>& ops, DType type, bool norm, bool in_place,
                                 bool codes_only = false) {
  ops.push_back({std::string("norm_quantize_row ") + name_of(type) + (norm ? "" : " no weight") +
                     (in_place ? " in place" : "") + (codes_only ? " codes only" : ""),
                 "norm_quantize_row", float_rows(2), norm_results(codes_only),
                 [=](const Call& c) {
                   const NormJob job{in_place ? c.y() : c.f(0),
                                     c.n,
                                     type,
                                     norm ? c.f(1) : nullptr,
                                     1e-5f,
                                     c.y(),
                                     codes_only};
                   run_norm(c, job);
                 },
                 0, in_place ? 0 : -1});
}

// Of gate and up.
inline void add_gated_norm_op(std::vector<RowOp>& ops, bool norm, bool codes_only) {
  ops.push_back({std::string("norm_quantize_row bf16 gated") + (norm ? "" : " no weight") +
                     (codes_only ? " codes only" : ""),
                 "norm_quantize_row",
                 [](int64_t n) {
                   return std::vector<Shape>{{Kind::kU16, n}, {Kind::kU16, n}, {Kind::kF32, n}};
                 },
                 norm_results(codes_only),
                 [=](const Call& c) {
                   const NormJob job{nullptr, c.n,   DType::kBF16, norm ? c.f(2) : nullptr,
                                     1e-5f,   c.y(), codes_only,   c.in[0],
                                     c.in[1]};
                   run_norm(c, job);
                 }});
}

// Two tokens of n rows.  A block that is added to starts as input 4.
inline void add_store_op(std::vector<RowOp>& ops, StoreKind kind, const char* name, DType type,
                         int64_t step, bool bias) {
  const auto inputs = [=](int64_t n) {
    return std::vector<Shape>{{Kind::kI32, 2 * n},
                              {Kind::kF32, step == 0 ? 1 : n},
                              {Kind::kF32, bias ? n : 0},
                              {Kind::kF32, 2},
                              {Kind::kF32, 2 * n}};
  };
  const Kind stored = kind == StoreKind::kSums                           ? Kind::kI32
                      : kind != StoreKind::kStore || type == DType::kF32 ? Kind::kF32
                      : type == DType::kBF16                             ? Kind::kBF16
                                                                         : Kind::kF16;
  const auto outputs = [=](int64_t n) { return std::vector<Shape>{{stored, 2 * n}}; };
  const auto run = [=](const Call& c) {
    c.kernels.store_block({.sums = static_cast<const int32_t*>(c.in[0]),
                           .sums_stride = c.n,
                           .rows = c.n,
                           .tokens = 2,
                           .w_scale = c.f(1),
                           .w_scale_step = step,
                           .x_scale = c.f(3),
                           .bias = bias ? c.f(2) : nullptr,
                           .kind = kind,
                           .type = type,
                           .out = c.out[0],
                           .out_stride_bytes = c.n * size_of(stored)});
  };
  ops.push_back({std::string("store_block ") + name + " " + name_of(type) + " step " +
                     std::to_string(step) + (bias ? " bias" : ""),
                 "store_block", inputs, outputs, run, 0, kind == StoreKind::kAdd ? 4 : -1});
}

inline void add_store_ops(std::vector<RowOp>& ops) {
  add_store_op(ops, StoreKind::kSums, "sums", DType::kF32, 0, false);
  for (const DType type : kTypes) {
    for (const int64_t step : {0, 1}) {
      for (const bool bias : {false, true}) {
        add_store_op(ops, StoreKind::kStore, "store", type, step, bias);
        add_store_op(ops, StoreKind::kRound, "round", type, step, bias);
        add_store_op(ops, StoreKind::kAdd, "add", type, step, bias);
      }
    }
  }
}

inline void add_type_ops(std::vector<RowOp>& ops) {
  for (const DType type : kCacheTypes) {
    const auto typed = [type](int64_t n) { return std::vector<Shape>{{stored_as(type), n}}; };
    const std::string suffix = std::string(" ") + name_of(type);
    ops.push_back({"load_row" + suffix, "load_row", typed, float_rows(1),
                   [type](const Call& c) { c.kernels.load_row(type, c.in[0], c.n, c.y()); }});
    ops.push_back({"store_row" + suffix, "store_row", float_rows(1), typed,
                   [type](const Call& c) { c.kernels.store_row(type, c.f(0), c.n, c.out[0]); }});
    ops.push_back(
        {"store_cache_row" + suffix, "store_cache_row", float_rows(1), typed,
         [type](const Call& c) { c.kernels.store_cache_row(type, c.f(0), c.n, c.out[0]); }});
    ops.push_back({"round_row" + suffix, "round_row", float_rows(1), float_rows(1),
                   [type](const Call& c) { c.kernels.round_row(type, c.y(), c.n); }, 0, 0});
  }
  add_gated_norm_op(ops, true, true);
  add_gated_norm_op(ops, true, false);
  add_gated_norm_op(ops, false, true);
  for (const DType type : kTypes) {
    add_norm_quantize_op(ops, type, true, false);
    add_norm_quantize_op(ops, type, false, false);
    add_norm_quantize_op(ops, type, true, true);
    add_norm_quantize_op(ops, type, true, false, true);
    add_norm_quantize_op(ops, type, false, true, true);
    const std::string suffix = std::string(" ") + name_of(type);
    ops.push_back({"rms_norm_row" + suffix, "rms_norm_row", float_rows(2), float_rows(1),
                   [type](const Call& c) {
                     c.kernels.rms_norm_row(c.f(0), c.f(1), c.n, 1e-5f, type, c.y());
                   }});
    ops.push_back(
        {"rms_norm_row in place" + suffix, "rms_norm_row", float_rows(2), float_rows(1),
         [type](const Call& c) { c.kernels.rms_norm_row(c.y(), c.f(1), c.n, 1e-5f, type, c.y()); },
         0, 0});
  }
}

inline void add_elementwise_ops(std::vector<RowOp>& ops) {
  using Row = void (*)(const float*, const float*, int64_t, float*);
  const auto add = [&ops](const char* name, Row KernelTable::* row) {
    const std::string text = name;
    ops.push_back({text, name, float_rows(2), float_rows(1),
                   [row](const Call& c) { (c.kernels.*row)(c.f(0), c.f(1), c.n, c.y()); }});
    ops.push_back({text + " in place", name, float_rows(2), float_rows(1),
                   [row](const Call& c) { (c.kernels.*row)(c.y(), c.f(1), c.n, c.y()); }, 0, 0});
  };
  add("add_row", &KernelTable::add_row);
  add("relu2_mul_row", &KernelTable::relu2_mul_row);
  add("silu_mul_row", &KernelTable::silu_mul_row);
  add("gelu_mul_row", &KernelTable::gelu_mul_row);
  add("sigmoid_mul_row", &KernelTable::sigmoid_mul_row);
  ops.push_back({"add_row in place of b", "add_row", float_rows(2), float_rows(1),
                 [](const Call& c) { c.kernels.add_row(c.f(0), c.y(), c.n, c.y()); }, 0, 1});
  const auto pair = [](int64_t n) { return std::vector<Shape>{{Kind::kF32, 2 * n}}; };
  ops.push_back(
      {"rope_head", "rope_head",
       [](int64_t n) { return std::vector<Shape>{{Kind::kF32, 2 * n}, {Kind::kF32, 2 * n}}; }, pair,
       [](const Call& c) { c.kernels.rope_head(c.f(0), c.f(1), 2 * c.n, c.y()); }});
}

// Whole blocks that hold n elements.
inline void add_hadamard_ops(std::vector<RowOp>& ops) {
  for (const int64_t block : {16, 32, 64, 128, 512}) {
    const auto whole = [block](int64_t n) { return (n + block - 1) / block * block; };
    const auto rows = [whole](std::size_t count) {
      return [=](int64_t n) { return std::vector<Shape>(count, Shape{Kind::kF32, whole(n)}); };
    };
    for (const bool last : {false, true}) {
      const std::string name =
          "hadamard_row " + std::to_string(block) + (last ? " signs last" : "");
      ops.push_back({name, "hadamard_row", rows(2), rows(1), [=](const Call& c) {
                       c.kernels.hadamard_row(c.f(0), c.f(1), whole(c.n), block, last, c.y());
                     }});
      ops.push_back({name + " in place", "hadamard_row", rows(2), rows(1),
                     [=](const Call& c) {
                       c.kernels.hadamard_row(c.y(), c.f(1), whole(c.n), block, last, c.y());
                     },
                     0, 0});
    }
  }
}

// Three tokens on one slab. gaps: rows of tokens lie apart, by numbers of floats of their own; what
// lies between is not touched, so it is set to one value first.
inline void add_delta_rule(std::vector<RowOp>& ops, bool errors, bool gaps) {
  const int64_t between = gaps ? 5 : 0, out_stride = kStateColumns + (gaps ? 7 : 0);
  const int64_t error_stride = kStateColumns + (gaps ? 3 : 0), gate_stride = gaps ? 3 : 1;
  const auto row_stride = [=](int64_t n) { return 2 * n + kStateColumns + between; };
  const auto slab = [](int64_t n) { return Shape{Kind::kF32, n * kStateColumns}; };
  const auto of_tokens = [](int64_t stride) { return 2 * stride + kStateColumns; };
  ops.push_back({std::string("delta_rule") + (errors ? " errors" : "") + (gaps ? " gaps" : ""),
                 "delta_rule",
                 [=](int64_t n) {  // the state, tokens' q, k and v, their gates
                   return std::vector<Shape>{slab(n),
                                             {Kind::kF32, 3 * row_stride(n) - between},
                                             {Kind::kF32, 2 * (2 * gate_stride + 1)}};
                 },
                 [=](int64_t n) {
                   return std::vector<Shape>{slab(n),
                                             {Kind::kF32, of_tokens(out_stride)},
                                             {Kind::kF32, errors ? of_tokens(error_stride) : 0}};
                 },
                 [=](const Call& c) {
                   std::fill_n(c.y(1), of_tokens(out_stride), 77.0f);
                   if (errors) std::fill_n(c.y(2), of_tokens(error_stride), 77.0f);
                   c.kernels.delta_rule({.state = c.y(0),
                                         .key_dim = c.n,
                                         .tokens = 3,
                                         .q = c.f(1),
                                         .k = c.f(1) + c.n,
                                         .v = c.f(1) + 2 * c.n,
                                         .row_stride = row_stride(c.n),
                                         .decay = c.f(2),
                                         .beta = c.f(2) + 2 * gate_stride + 1,
                                         .gate_stride = gate_stride,
                                         .out = c.y(1),
                                         .out_stride = out_stride,
                                         .errors = errors ? c.y(2) : nullptr,
                                         .error_stride = error_stride});
                 },
                 1, 0});
}

// n channels, n heads, or the key dimension of one slab.
inline void add_delta_ops(std::vector<RowOp>& ops) {
  for (const int64_t gap : {-1, 0, 3}) {  // between the weights of taps; -1: there is one tap
    const int64_t taps = gap < 0 ? 1 : 4;
    ops.push_back({"conv_silu_row " + std::to_string(taps) + (gap > 0 ? " gaps" : ""),
                   "conv_silu_row",
                   [=](int64_t n) {
                     return std::vector<Shape>{{Kind::kF32, taps * n},
                                               {Kind::kF32, taps * n + (taps - 1) * gap}};
                   },
                   float_rows(1),
                   [=](const Call& c) {
                     std::vector<const float*> x;
                     for (int64_t j = 0; j < taps; ++j) x.push_back(c.f(0) + j * c.n);
                     c.kernels.conv_silu_row(x.data(), taps, c.f(1), c.n + gap, c.n, c.y());
                   }});
  }
  ops.push_back(
      {"delta_gates_row", "delta_gates_row", float_rows(4), float_rows(2), [](const Call& c) {
         c.kernels.delta_gates_row(c.f(0), c.f(1), c.f(2), c.f(3), c.n, c.y(0), c.y(1));
       }});
  for (const bool errors : {false, true})
    for (const bool gaps : {false, true}) add_delta_rule(ops, errors, gaps);
  const auto slab = [](int64_t n) { return Shape{Kind::kF32, n * kStateColumns}; };
  ops.push_back({"delta_replay", "delta_replay",
                 [=](int64_t n) {
                   return std::vector<Shape>{
                       slab(n), {Kind::kF32, n}, {Kind::kF32, kStateColumns}, {Kind::kF32, 1}};
                 },
                 [=](int64_t n) { return std::vector<Shape>{slab(n)}; },
                 [](const Call& c) { c.kernels.delta_replay(c.f(1), c.f(2), *c.f(3), c.n, c.y()); },
                 0, 0});
}

// Query rows of a chunk of attention: more than one tile of them, tokens that see less than all.
struct QueryRows {
  int64_t rows, per_token, unseen;  // the first token does not see the last `unseen` positions
  int64_t hidden = kNothingHidden;  // nor the first `hidden`, as far as all tokens see something

  int64_t visible(int64_t length) const { return length - unseen < 1 ? 1 : length - unseen; }
  int64_t first_hidden(int64_t length) const {
    const int64_t max = length - 1 - (rows - 1) / per_token;  // for the last token
    return hidden == kNothingHidden ? hidden : std::min({hidden, visible(length) - 1, max});
  }
};
inline constexpr QueryRows kQueryRows[] = {
    {1, 1, 0},     {2, 2, 0},      {3, 3, 0},  {4, 4, 0},      {5, 1, 3},
    {9, 3, 20},    {12, 4, 1},     {29, 3, 5}, {1, 1, 0, 33},  {5, 1, 3, 18},
    {4, 1, 4, 59}, {9, 3, 20, -1}, {12, 1, 8}, {29, 1, 30, 5}, {29, 1, 30, 31}};

// n is the number of positions, or the dimension of the head.  The last row of keys and values ends
// with its last element, however wide the stride.
inline void add_chunk_op(std::vector<RowOp>& ops, DType type, QueryRows q, bool long_context,
                         int64_t slack) {
  const auto dim = [=](int64_t n) { return long_context ? int64_t{20} : 1 + (n - 1) % 640; };
  const auto length = [=](int64_t n) {
    return long_context ? 1 + (n - 1) % kAttentionChunk : int64_t{5};
  };
  const auto inputs = [=](int64_t n) {
    const int64_t cache = (length(n) - 1) * (dim(n) + slack) + dim(n);
    return std::vector<Shape>{
        {Kind::kF32, q.rows * dim(n)}, {stored_as(type), cache}, {stored_as(type), cache}};
  };
  const auto outputs = [=](int64_t n) {
    return std::vector<Shape>{{Kind::kF32, q.rows * attention_state_floats(dim(n))},
                              {Kind::kScratch, attention_scratch_floats(q.rows, dim(n))}};
  };
  const auto run = [=](const Call& c) {
    const AttentionChunk chunk = {.query = c.f(0),
                                  .rows = q.rows,
                                  .dim = dim(c.n),
                                  .rows_per_token = q.per_token,
                                  .type = type,
                                  .keys = c.in[1],
                                  .values = c.in[2],
                                  .stride_bytes = (dim(c.n) + slack) * element_size(type),
                                  .positions = length(c.n),
                                  .first_visible = q.visible(length(c.n)),
                                  .scale = 0.25f,
                                  .next = nullptr,
                                  .first_hidden = q.first_hidden(length(c.n))};
    c.kernels.attend_chunk(chunk, c.y(1), c.y(0));
  };
  ops.push_back({std::string("attend_chunk ") + name_of(type) + " rows " + std::to_string(q.rows) +
                     (long_context ? " positions" : " dim") + (slack ? " strided" : ""),
                 "attend_chunk", inputs, outputs, run, 1});
}

// The same over int8 keys and values; dims up to the longest that is exact.
inline void add_int8_chunk_op(std::vector<RowOp>& ops, QueryRows q, bool long_context,
                              int64_t slack) {
  const auto dim = [=](int64_t n) {
    return long_context ? int64_t{40} : 1 + (n - 1) % kMaxInt8Dim;
  };
  const auto length = [=](int64_t n) {
    return long_context ? 1 + (n - 1) % kAttentionChunk : int64_t{5};
  };
  const auto inputs = [=](int64_t n) {
    const int64_t cache = (length(n) - 1) * (dim(n) + slack) + dim(n);
    return std::vector<Shape>{{Kind::kF32, q.rows * dim(n)},
                              {Kind::kI8, cache},
                              {Kind::kI8, cache},
                              {Kind::kF32, length(n)},
                              {Kind::kF32, length(n)}};
  };
  const auto outputs = [=](int64_t n) {
    return std::vector<Shape>{{Kind::kF32, q.rows * attention_state_floats(dim(n))},
                              {Kind::kScratch, attention_scratch_floats(q.rows, dim(n))}};
  };
  const auto run = [=](const Call& c) {
    const int64_t padded = wide_padded(dim(c.n));
    std::vector<int16_t> wide(static_cast<std::size_t>(q.rows * padded));
    std::vector<float> factors;
    for (int64_t r = 0; r < q.rows; ++r) {
      factors.push_back(c.kernels.quantize_query(c.f(0) + r * dim(c.n), dim(c.n), padded,
                                                 wide.data() + r * padded));
    }
    const AttentionChunk chunk = {.query = nullptr,
                                  .rows = q.rows,
                                  .dim = dim(c.n),
                                  .rows_per_token = q.per_token,
                                  .type = DType::kInt8,
                                  .keys = c.in[1],
                                  .values = c.in[2],
                                  .stride_bytes = dim(c.n) + slack,
                                  .positions = length(c.n),
                                  .first_visible = q.visible(length(c.n)),
                                  .scale = 0.25f,
                                  .next = nullptr,
                                  .int8 = {wide.data(), factors.data(), c.f(3), c.f(4)},
                                  .first_hidden = q.first_hidden(length(c.n))};
    c.kernels.attend_chunk(chunk, c.y(1), c.y(0));
  };
  ops.push_back({"attend_chunk int8 rows " + std::to_string(q.rows) +
                     (long_context ? " positions" : " dim") + (slack ? " strided" : ""),
                 "attend_chunk", inputs, outputs, run, 1});
}

inline void add_int8_attention_ops(std::vector<RowOp>& ops) {
  for (const QueryRows q : kQueryRows) {
    for (const bool long_context : {true, false}) add_int8_chunk_op(ops, q, long_context, 0);
  }
  add_int8_chunk_op(ops, {4, 2, 1}, true, 6);
  add_int8_chunk_op(ops, {4, 2, 1}, false, 6);
  ops.push_back(
      {"quantize_query", "quantize_query", float_rows(1),
       [](int64_t n) { return std::vector<Shape>{{Kind::kU16, wide_padded(n)}, {Kind::kF32, 1}}; },
       [](const Call& c) {
         *c.y(1) = c.kernels.quantize_query(c.f(0), c.n, wide_padded(c.n),
                                            static_cast<int16_t*>(c.out[0]));
       }});
}

inline void add_attention_ops(std::vector<RowOp>& ops) {
  for (const DType type : kCacheTypes) {
    // Their arithmetic is the others': where an emulator makes it slow, few rows and a block.
    const bool thinned = under_emulator() && (type == DType::kF16 || type == DType::kF8E5M2);
    for (const QueryRows q : kQueryRows) {
      if (thinned && q.rows != 4 && q.rows != 29) continue;
      for (const bool long_context : {true, false}) add_chunk_op(ops, type, q, long_context, 0);
    }
    add_chunk_op(ops, type, {4, 2, 1}, true, 6);
    add_chunk_op(ops, type, {4, 2, 1}, false, 6);
  }
  const auto states = [](int64_t rows, int64_t n) {
    return Shape{Kind::kF32, rows * attention_state_floats(n)};
  };
  ops.push_back({"merge_attention", "merge_attention",
                 [=](int64_t n) { return std::vector<Shape>{states(3, n), states(3, n)}; },
                 [=](int64_t n) { return std::vector<Shape>{states(3, n)}; },
                 [](const Call& c) { c.kernels.merge_attention(3, c.n, c.f(1), c.y()); }, 1, 0});
  ops.push_back({"finish_attention", "finish_attention",
                 [=](int64_t n) { return std::vector<Shape>{states(1, n)}; }, float_rows(1),
                 [](const Call& c) { c.kernels.finish_attention(c.n, c.f(0), c.y()); }, 1});
}

// n is k; rows 1..5 of a matrix of 6, for 3 tokens.
inline void add_head_ops(std::vector<RowOp>& ops) {
  for (const DType type : kTypes) {
    ops.push_back({std::string("head_dense ") + name_of(type), "head_dense",
                   [type](int64_t n) {
                     return std::vector<Shape>{{Kind::kF32, 3 * n}, {stored_as(type), 6 * n}};
                   },
                   [](int64_t) { return std::vector<Shape>{{Kind::kF32, 15}}; },
                   [type](const Call& c) {
                     c.kernels.head_dense(c.f(0), 3, type, c.in[1], c.n, 1, 6, {64, 64}, c.y(), 5);
                   }});
    // rows 16..20 of two tiles
    ops.push_back({std::string("dense_tiles ") + name_of(type), "dense_tiles",
                   [type](int64_t n) {
                     return std::vector<Shape>{{Kind::kF32, 3 * n}, {stored_as(type), 32 * n}};
                   },
                   [](int64_t) { return std::vector<Shape>{{Kind::kF32, 15}}; },
                   [type](const Call& c) {
                     c.kernels.dense_tiles(c.f(0), 3, type, c.in[1], c.n, 0.3f, 16, 21, c.y(), 5);
                   }});
  }
  // rows 5, 3, 1, 4, 0 and 2 of them
  ops.push_back({std::string("score_rows ") + name_of(DType::kBF16), "score_rows",
                 [](int64_t n) {
                   return std::vector<Shape>{{Kind::kF32, 3 * n}, {stored_as(DType::kBF16), 6 * n}};
                 },
                 [](int64_t) { return std::vector<Shape>{{Kind::kF32, 18}}; },
                 [](const Call& c) {
                   const void* rows[6];
                   for (int i = 0; const int row : {5, 3, 1, 4, 0, 2})
                     rows[i++] = static_cast<const uint16_t*>(c.in[1]) + row * c.n;
                   c.kernels.score_rows(c.f(0), 3, rows, 6, c.n, c.y(), 6);
                 }});
  const auto padded = [](int64_t n) { return (n + 127) / 128 * 128; };
  ops.push_back({"head_quantize_token", "head_quantize_token", float_rows(1),
                 [padded](int64_t n) {
                   return std::vector<Shape>{{Kind::kU16, padded(n)},
                                             {Kind::kI8, padded(n)},
                                             {Kind::kI8, padded(n)},
                                             {Kind::kI32, padded(n) / 64},
                                             {Kind::kF32, 1}};
                 },
                 [padded](const Call& c) {
                   *c.y(4) = c.kernels.head_quantize_token(
                       c.f(0), c.n, padded(c.n), static_cast<int16_t*>(c.out[0]),
                       static_cast<int8_t*>(c.out[1]), static_cast<int8_t*>(c.out[2]),
                       static_cast<int32_t*>(c.out[3]));
                 }});
  ops.push_back({"head_quantize_int8", "head_quantize_int8", float_rows(1),
                 [](int64_t n) { return std::vector<Shape>{{Kind::kI8, n}, {Kind::kF32, 1}}; },
                 [](const Call& c) {
                   *c.y(1) =
                       c.kernels.head_quantize_int8(c.f(0), c.n, static_cast<int8_t*>(c.out[0]));
                 }});
  for (const int64_t group : {64, 128}) {
    const auto groups = [group](int64_t n) { return (n + group - 1) / group; };
    ops.push_back({"head_quantize_int4 " + std::to_string(group), "head_quantize_int4",
                   float_rows(1),
                   [=](int64_t n) {
                     return std::vector<Shape>{
                         {Kind::kI8, groups(n) * group}, {Kind::kU16, groups(n)}, {Kind::kF32, 1}};
                   },
                   [group](const Call& c) {
                     *c.y(2) = c.kernels.head_quantize_int4(c.f(0), c.n, group,
                                                            static_cast<uint8_t*>(c.out[0]),
                                                            static_cast<uint16_t*>(c.out[1]));
                   }});
  }
}

// A float64 as two floats, so that NaNs compare as such.
inline void store_double(double value, float* two) {
  two[0] = static_cast<float>(value);
  two[1] = static_cast<float>(value - static_cast<double>(two[0]));
}

inline void add_split_op(std::vector<RowOp>& ops, float low, float high, bool sum, bool values,
                         bool in_place = false) {
  const auto outputs = [](int64_t n) {
    return std::vector<Shape>{{Kind::kF32, n}, {Kind::kI32, 2}, {Kind::kF32, 2}};
  };
  const auto run = [=](const Call& c) {
    const float* from = in_place ? c.y(0) : c.f(0);
    const Split s =
        c.kernels.split_row(from, c.n, 0.75f, low, high, sum, values ? c.y(0) : nullptr);
    for (int64_t i = s.between; i < c.n; ++i) c.y(0)[i] = -1;  // what lies there is not defined
    auto* counts = static_cast<int32_t*>(c.out[1]);
    counts[0] = static_cast<int32_t>(s.above);
    counts[1] = static_cast<int32_t>(s.between);
    store_double(s.sum_above, c.y(2));
  };
  const std::string name = "split_row from " + std::to_string(low) + " to " + std::to_string(high) +
                           (sum ? " sum" : "") + (values ? " values" : "");
  ops.push_back({name + (in_place ? " in place" : ""), "split_row", float_rows(1), outputs, run, 0,
                 in_place ? 0 : -1});
}

inline void add_find_op(std::vector<RowOp>& ops, float low, float high) {
  const auto outputs = [](int64_t n) {
    return std::vector<Shape>{{Kind::kI32, n}, {Kind::kI32, 1}};
  };
  const auto run = [=](const Call& c) {
    auto* ids = static_cast<int32_t*>(c.out[0]);
    const int64_t found = c.kernels.find_row(c.f(0), c.n, 0.75f, low, high, ids);
    for (int64_t i = found; i < c.n; ++i) ids[i] = -1;  // what lies there is not defined
    *static_cast<int32_t*>(c.out[1]) = static_cast<int32_t>(found);
  };
  ops.push_back({"find_row from " + std::to_string(low) + " to " + std::to_string(high), "find_row",
                 float_rows(1), outputs, run});
}

inline void add_noise_op(std::vector<RowOp>& ops, float threshold, bool in_place) {
  const auto run = [=](const Call& c) {
    c.kernels.add_noise_row(in_place ? c.y() : c.f(0), c.n, 0.7f, 0x123456789abcdef0u, 70'001,
                            threshold, c.y());
    for (int64_t i = 0; i < c.n; ++i)  // below, either is right
      if (c.y()[i] < threshold) c.y()[i] = -__builtin_inff();
  };
  ops.push_back({"add_noise_row from " + std::to_string(threshold) + (in_place ? " in place" : ""),
                 "add_noise_row", float_rows(1), float_rows(1), run, 0, in_place ? 0 : -1});
}

inline void add_sampling_ops(std::vector<RowOp>& ops) {
  ops.push_back({"max_row", "max_row", float_rows(1),
                 [](int64_t) { return std::vector<Shape>{{Kind::kF32, 1}}; },
                 [](const Call& c) { *c.y() = c.kernels.max_row(c.f(0), c.n); }});
  const auto outputs = [](int64_t n) {
    return std::vector<Shape>{{Kind::kF32, n}, {Kind::kF32, 2}};
  };
  ops.push_back({"exp_row", "exp_row", float_rows(1), outputs, [](const Call& c) {
                   store_double(c.kernels.exp_row(c.f(0), c.n, 2.5f, 0.7f, c.y(0)), c.y(1));
                 }});
  ops.push_back({"exp_row in place", "exp_row", float_rows(1), outputs,
                 [](const Call& c) {
                   store_double(c.kernels.exp_row(c.y(0), c.n, 2.5f, 0.7f, c.y(0)), c.y(1));
                 },
                 0, 0});
  constexpr float kInfinity = __builtin_inff();
  for (const float low : {-kInfinity, -0.5f, 0.0f}) {
    for (const float high : {0.5f, kInfinity}) {
      for (const bool sum : {false, true}) {
        add_split_op(ops, low, high, sum, true);
        add_split_op(ops, low, high, sum, true, true);
      }
      add_find_op(ops, low, high);
    }
  }
  for (const float threshold : {-kInfinity, 1.0f}) {
    add_noise_op(ops, threshold, false);
    add_noise_op(ops, threshold, true);
  }
  add_find_op(ops, 0.0f, 0.0f);
  add_split_op(ops, 0.0f, 0.0f, false, true);
  add_split_op(ops, kInfinity, -0.25f, true, false);
  add_split_op(ops, kInfinity, 0.0f, false, false);
}

inline std::vector<RowOp> all_row_ops() {
  std::vector<RowOp> ops;
  add_integer_ops(ops);
  add_store_ops(ops);
  add_type_ops(ops);
  add_elementwise_ops(ops);
  add_hadamard_ops(ops);
  add_delta_ops(ops);
  add_attention_ops(ops);
  add_int8_attention_ops(ops);
  add_head_ops(ops);
  add_sampling_ops(ops);
  return ops;
}

}  // namespace bitnet::test
