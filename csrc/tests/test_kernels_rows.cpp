// Every float row of every kernel table: bit for bit what the scalar table gives, on all lengths
// and on denormals, huge values, ties, NaN and infinities, with each buffer against a guard page.
// A NaN equals any NaN: which of two operands' payload survives is the compiler's choice on x86.
// And every table, the scalar one too, against contract.h, with values that arithmetic treats
// specially planted one by one.
#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/contract.h"
#include "tests/guarded.h"
#include "tests/random.h"
#include "tests/row_ops.h"
#include "tests/tables.h"

namespace bitnet::test {
namespace {

using Bytes = std::vector<uint8_t>;

int64_t bytes_of(Shape shape) { return shape.count * size_of(shape.kind); }

template <class T>
T element(const uint8_t* bytes, int64_t i) {
  T value;
  std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

Bytes random_bytes(Random& random, Shape shape, Flavour flavour) {
  Bytes bytes(static_cast<std::size_t>(bytes_of(shape)));
  for (int64_t i = 0; i < shape.count; ++i) {
    uint64_t bits = random.next();
    if (shape.kind == Kind::kF32) bits = std::bit_cast<uint32_t>(random_float(random, flavour));
    // 16 bits: a bf16 of that flavour; as f16 these bits are as good as any.
    if (shape.kind == Kind::kU16)
      bits = std::bit_cast<uint32_t>(random_float(random, flavour)) >> 16;
    for (const DType type : {DType::kF8E4M3, DType::kF8E5M2}) {
      if (shape.kind != stored_as(type)) continue;
      const float x = random_float(random, flavour);
      scalar_kernels().store_row(type, &x, 1, &bits);
    }
    std::memcpy(&bytes[static_cast<std::size_t>(i * size_of(shape.kind))], &bits,
                static_cast<std::size_t>(size_of(shape.kind)));
  }
  return bytes;
}

bool is_nan(Kind kind, const uint8_t* bytes, int64_t i) {
  if (kind == Kind::kBF16) return (element<uint16_t>(bytes, i) & 0x7fff) > 0x7f80;
  if (kind == Kind::kF16) return (element<uint16_t>(bytes, i) & 0x7fff) > 0x7c00;
  return kind == Kind::kF32 && std::isnan(element<float>(bytes, i));
}

// Index of the first element in which the two differ, or -1.
int64_t first_difference(Shape shape, const uint8_t* a, const uint8_t* b) {
  if (bytes_of(shape) == 0 || shape.kind == Kind::kScratch ||
      std::memcmp(a, b, static_cast<std::size_t>(bytes_of(shape))) == 0) {
    return -1;
  }
  for (int64_t i = 0; i < shape.count; ++i) {
    const int64_t size = size_of(shape.kind);
    if (std::memcmp(a + i * size, b + i * size, static_cast<std::size_t>(size)) == 0) continue;
    if (!is_nan(shape.kind, a, i) || !is_nan(shape.kind, b, i)) return i;
  }
  return -1;
}

std::string hex(Shape shape, const uint8_t* bytes, int64_t i) {
  char text[32];
  const uint32_t bits = size_of(shape.kind) == 1   ? element<uint8_t>(bytes, i)
                        : size_of(shape.kind) == 2 ? element<uint16_t>(bytes, i)
                                                   : element<uint32_t>(bytes, i);
  std::snprintf(text, sizeof text, "0x%x", bits);
  return text;
}

// One call on memory without guards, which holds `before` where results go.
std::vector<Bytes> run_plainly(const RowOp& op, const KernelTable& kernels, int64_t n,
                               const std::vector<Bytes>& inputs, uint8_t before = 0) {
  std::vector<const void*> in;
  std::vector<Bytes> results;
  std::vector<void*> out;
  for (const Bytes& bytes : inputs) in.push_back(bytes.data());
  for (const Shape shape : op.outputs(n)) {
    results.emplace_back(static_cast<std::size_t>(bytes_of(shape)), before);
  }
  if (op.in_place_of >= 0) results[0] = inputs[static_cast<std::size_t>(op.in_place_of)];
  for (Bytes& bytes : results) out.push_back(bytes.data());
  op.run({kernels, n, in, out});
  return results;
}

class RowTest {
 public:
  RowTest() {
    for (int i = 0; i < 7; ++i) arenas_.push_back(std::make_unique<Arena>(1 << 20));
  }

  // One op, length and flavour: the scalar table on plain memory, then each table between guards.
  void run(const RowOp& op, const std::vector<const KernelTable*>& tables, int64_t n,
           Flavour flavour) {
    Random random(static_cast<uint64_t>(n) * 64 + static_cast<uint64_t>(flavour));
    std::vector<Bytes> inputs;
    for (const Shape shape : op.inputs(n)) inputs.push_back(random_bytes(random, shape, flavour));
    begin_case("scalar, no guards, %s n=%lld %s", op.name.c_str(), static_cast<long long>(n),
               name_of(flavour));
    const std::vector<Bytes> want = run_plainly(op, scalar_kernels(), n, inputs);
    for (const KernelTable* kernels : tables) {
      const Placement where = kPlacements[tally.cases % kPlacementCount];
      begin_case("%s %s n=%lld %s", kernels->name, op.name.c_str(), static_cast<long long>(n),
                 name_of(flavour));
      guarded(op, *kernels, n, inputs, want, where);
    }
  }

 private:
  void guarded(const RowOp& op, const KernelTable& kernels, int64_t n,
               const std::vector<Bytes>& inputs, const std::vector<Bytes>& want, Placement where) {
    const std::vector<Shape> in_shapes = op.inputs(n), out_shapes = op.outputs(n);
    std::vector<const void*> in;
    std::vector<void*> out;
    std::size_t arena = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      in.push_back(place(*arenas_[arena++], in_shapes[i], inputs[i], where));
    }
    for (std::size_t i = 0; i < want.size(); ++i) {
      const bool copy = i == 0 && op.in_place_of >= 0;
      const Bytes& start = copy ? inputs[static_cast<std::size_t>(op.in_place_of)] : want[i];
      out.push_back(place(*arenas_[arena++], out_shapes[i], start, where));
      // What is already there must not pass for a result.
      if (!copy && !start.empty()) std::memset(out.back(), 0xee, start.size());
    }
    op.run({kernels, n, in, out});
    for (std::size_t i = 0; i < want.size(); ++i) {
      const auto* got = static_cast<const uint8_t*>(out[i]);
      const int64_t at = first_difference(out_shapes[i], got, want[i].data());
      CHECK(at < 0, "output %d element %lld: %s, scalar %s", static_cast<int>(i),
            static_cast<long long>(at), hex(out_shapes[i], got, at).c_str(),
            hex(out_shapes[i], want[i].data(), at).c_str());
    }
    for (std::size_t i = 0; i < arena; ++i) CHECK(arenas_[i]->intact(), "wrote outside of buffer");
  }

  // A buffer's address is aligned for its element type, as the contract's pointers are.
  static void* place(Arena& arena, Shape shape, const Bytes& bytes, Placement where) {
    switch (size_of(shape.kind)) {
      case 1:
        return arena.place_copy(bytes.data(), shape.count, where);
      case 2:
        return arena.place_copy(reinterpret_cast<const uint16_t*>(bytes.data()), shape.count,
                                where);
      default:
        return arena.place_copy(reinterpret_cast<const uint32_t*>(bytes.data()), shape.count,
                                where);
    }
  }

  std::vector<std::unique_ptr<Arena>> arenas_;
};

// Rows of the table that are not float rows; test_kernels_gemm, _tiles, _head, test_kernels,
// _tables, test_engine, test_group_product, test_pair_unit and test_kernels_columns have them.
void check_that_list_is_complete(const std::vector<RowOp>& ops) {
  begin_case("list of row ops");
  std::set<std::string> rows = {"tile_lanes",   "products",          "choices",    "sum_i8",
                                "head_int8",    "head_int4",         "probe_read", "add_group",
                                "head_bound",   "head_bound_tokens", "add_pairs",  "column_product",
                                "list_nonzero", "probe_int8_peak"};
  for (const RowOp& op : ops) rows.insert(op.row);
  const std::size_t pointers =
      (sizeof(KernelTable) - offsetof(KernelTable, tile_lanes)) / sizeof(void*);
  CHECK(rows.size() == pointers, "%zu rows are tested, the table has %zu", rows.size(), pointers);
}

// norm_quantize_row against the rows of the table that it stands for.
void check_fused_norm(const KernelTable& kernels, int64_t n, DType type, bool norm,
                      Flavour flavour) {
  begin_case("%s norm_quantize_row %s%s n=%lld %s in steps", kernels.name, name_of(type),
             norm ? "" : " no weight", static_cast<long long>(n), name_of(flavour));
  Random random(static_cast<uint64_t>(n) * 8 + static_cast<uint64_t>(flavour));
  const auto size = static_cast<std::size_t>(n), padded = (size + 127) / 128 * 128;
  std::vector<float> x(size), weight(size), y(size), want;
  for (float& v : x) v = random_float(random, flavour);
  for (float& v : weight) v = random.unit();
  std::vector<int8_t> q(padded), want_q(padded);
  int32_t sum = 0, want_sum = 0;
  const auto codes = static_cast<int64_t>(padded);
  const float* w = norm ? weight.data() : nullptr;
  const float got = kernels.norm_quantize_row({x.data(), n, type, w, 1e-5f, y.data()}, codes,
                                              q.data(), kTokenStep, &sum);
  want = x;
  kernels.round_row(type, want.data(), n);
  if (norm) kernels.rms_norm_row(want.data(), w, n, 1e-5f, type, want.data());
  if (norm) kernels.round_row(type, want.data(), n);
  const float expected =
      kernels.quantize_row(want.data(), n, codes, want_q.data(), kTokenStep, &want_sum);
  CHECK(std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected), "scale %a, not %a",
        static_cast<double>(got), static_cast<double>(expected));
  CHECK(q == want_q && sum == want_sum, "other codes");
  std::fill(q.begin(), q.end(), int8_t{77});
  sum = 77;
  std::vector<float> between(size);
  const float codes_only = kernels.norm_quantize_row(
      {x.data(), n, type, w, 1e-5f, between.data(), true}, codes, q.data(), kTokenStep, &sum);
  CHECK(std::bit_cast<uint32_t>(codes_only) == std::bit_cast<uint32_t>(expected),
        "scale of codes alone %a, not %a", static_cast<double>(codes_only),
        static_cast<double>(expected));
  CHECK(q == want_q && sum == want_sum, "other codes alone");
  const auto as_bytes = [](const std::vector<float>& row) {
    return reinterpret_cast<const uint8_t*>(row.data());
  };
  CHECK(first_difference({Kind::kF32, n}, as_bytes(y), as_bytes(want)) < 0, "another row");
}

// ---- planted values -----------------------------------------------------------------------------

// What lies in a 16- or 8-bit float in place of such a value: its own largest, its own subnormals.
uint16_t planted_code(DType type, float value) {
  const Format& format = contract::format_of(type);
  const int sign = std::signbit(value) ? format.sign() : 0;
  const float size = std::fabs(value);
  if (size == kLargest) return static_cast<uint16_t>(sign | (format.codes() - 1));
  if (size == kSmallest) return static_cast<uint16_t>(sign | 1 << format.fraction);
  if (size > 0 && size < kSmallest) return static_cast<uint16_t>(sign | (size < 1e-44f ? 1 : 2));
  return contract::encode(type, value);
}

bool is_attention(const RowOp& op) { return std::string(op.row) == "attend_chunk"; }

// The type in the op's name.
DType type_in(const RowOp& op) {
  for (const Format& format : kFormats) {
    if (op.name.find(std::string(" ") + format.name) != std::string::npos) return format.type;
  }
  return DType::kF32;
}

// Element i of an input: `value` as far as the input can hold it.
void put(const RowOp& op, std::size_t input, Kind kind, Bytes& bytes, int64_t i, float value,
         bool planted) {
  const DType type = type_in(op);
  const bool pairs = is_attention(op) && type == DType::kBF16;
  const bool hidden = pairs && std::fabs(value) < kMinCached;  // caches have no such numbers
  if (hidden) value = 0.0f;
  const auto at = [&](auto x) {
    std::memcpy(&bytes[static_cast<std::size_t>(i) * sizeof x], &x, sizeof x);
  };
  if (kind == Kind::kI8)
    return at(static_cast<int8_t>(planted ? (value < 0 ? -128 : 127) : 100 * value));
  if (kind == Kind::kI32)
    return at(planted ? (value < 0 ? INT32_MIN : INT32_MAX) : static_cast<int32_t>(1e7f * value));
  if (kind == Kind::kF32) {
    if (pairs && input == 0) value = contract::value_of(type, planted_code(type, value));
    return at(value);
  }
  const uint16_t code = planted ? planted_code(type, value) : contract::encode(type, value);
  if (size_of(kind) == 1) return at(static_cast<uint8_t>(code));
  at(code);
}

// Whether the contract says what becomes of the value.
bool may_be_planted(const RowOp& op, float value) {
  const std::string row = op.row;
  if (row == "exp_row") return !(value > 0);
  return !std::isnan(value) || (row != "split_row" && row != "find_row");
}

// NaN, infinities and zeros with their sign exactly, other numbers within share * |want| + floor.
bool close(double got, double want, double share, double floor) {
  if (std::isnan(want) || std::isinf(want)) return std::isnan(want) ? std::isnan(got) : got == want;
  if (want == 0 && floor < 1e-40) return got == 0 && std::signbit(got) == std::signbit(want);
  return std::fabs(got - want) <= share * std::fabs(want) + floor;
}

// The state of a query row: what becomes of it is acc / sum.
bool same_state(const RowOp& op, int64_t dim, const float* got, const float* want) {
  const DType type = type_in(op);
  const bool int8 = op.name.find("int8") != std::string::npos;
  const double share = type == DType::kBF16 || int8 ? 0x1p-7 : 0x1p-16;
  const int64_t padded = attention_padded(dim);
  const double sum = want[padded + 1], got_sum = got[padded + 1];
  double largest = int8 ? 0.0 : 1.0;
  for (int64_t i = 0; int8 && i < dim; ++i)
    largest = std::max(largest, std::fabs(static_cast<double>(want[i]) / sum));
  for (int64_t i = 0; i < dim; ++i) {
    if (!close(got[i] / got_sum, want[i] / sum, share, share * largest)) return false;
  }
  for (int64_t i = padded + 2; i < padded + 16; ++i) {
    if (got[i] != 0) return false;
  }
  return std::isnan(sum) || (close(got_sum, sum, share, 0x1p-16) &&
                             close(got[padded], want[padded], 0x1p-16, 0x1p-16));
}

// Rows whose exp, or logarithm, the contract takes from libm.
const std::set<std::string> kWithExp = {"exp_row",         "silu_mul_row",  "gelu_mul_row",
                                        "sigmoid_mul_row", "conv_silu_row", "delta_gates_row",
                                        "merge_attention", "add_noise_row"};

void check_output(const RowOp& op, std::size_t output, Shape shape, int64_t n, const Bytes& got,
                  const Bytes& want) {
  const std::string row = op.row;
  const auto number = [](const Bytes& bytes, int64_t i) { return element<float>(bytes.data(), i); };
  if (shape.kind == Kind::kScratch) return;
  if (is_attention(op)) {
    const bool long_context = op.name.find(" positions") != std::string::npos;
    const bool int8 = op.name.find("int8") != std::string::npos;
    const int64_t dim = long_context ? (int8 ? 40 : 20) : n;
    const int64_t floats = attention_state_floats(dim);
    for (int64_t r = 0; r < shape.count / floats; ++r) {
      const auto* from = reinterpret_cast<const float*>(got.data()) + r * floats;
      const auto* wanted = reinterpret_cast<const float*>(want.data()) + r * floats;
      CHECK(same_state(op, dim, from, wanted), "row %lld", static_cast<long long>(r));
    }
  } else if (row == "exp_row" && output == 1) {
    const double sum = double{number(got, 0)} + double{number(got, 1)};
    CHECK(close(sum, double{number(want, 0)} + double{number(want, 1)}, 0x1p-20, 1e-44), "%g", sum);
  } else if (kWithExp.contains(row)) {
    const double floor = row == "merge_attention" || row == "add_noise_row" ? 0x1p-20 : 1e-44;
    for (int64_t i = 0; i < shape.count; ++i) {
      CHECK(close(number(got, i), number(want, i), 0x1p-18, floor), "element %lld: %a, not %a",
            static_cast<long long>(i), number(got, i), number(want, i));
    }
  } else {
    const int64_t at = first_difference(shape, got.data(), want.data());
    CHECK(at < 0, "output %zu element %lld: %s, not %s", output, static_cast<long long>(at),
          hex(shape, got.data(), at).c_str(), hex(shape, want.data(), at).c_str());
  }
}

void check_planted(const RowOp& op, const KernelTable& contract,
                   const std::vector<const KernelTable*>& tables, int64_t n) {
  const std::vector<Shape> in = op.inputs(n), out = op.outputs(n);
  Random random(static_cast<uint64_t>(n));
  std::vector<Bytes> inputs;
  for (std::size_t k = 0; k < in.size(); ++k) {
    inputs.emplace_back(static_cast<std::size_t>(bytes_of(in[k])));
    for (int64_t i = 0; i < in[k].count; ++i)
      put(op, k, in[k].kind, inputs[k], i, random.unit(), false);
  }
  for (std::size_t k = 0; k < in.size(); ++k) {
    std::set<int64_t> places = {0, std::min<int64_t>(15, in[k].count - 1), in[k].count - 1};
    if (!is_attention(op)) places.insert({in[k].count / 2, std::max<int64_t>(0, in[k].count - 14)});
    for (const int64_t i : places) {
      for (const float value : kPlanted) {
        if (i < 0 || i >= in[k].count || !may_be_planted(op, value)) continue;
        const Bytes before = inputs[k];
        put(op, k, in[k].kind, inputs[k], i, value, true);
        const std::vector<Bytes> want = run_plainly(op, contract, n, inputs);
        for (const KernelTable* kernels : tables) {
          begin_case("%s %s n=%lld %g at %lld of input %zu", kernels->name, op.name.c_str(),
                     static_cast<long long>(n), static_cast<double>(value),
                     static_cast<long long>(i), k);
          const std::vector<Bytes> got = run_plainly(op, *kernels, n, inputs, 0xee);
          for (std::size_t o = 0; o < out.size(); ++o)
            check_output(op, o, out[o], n, got[o], want[o]);
        }
        inputs[k] = before;
      }
    }
  }
}

TEST(planted_values) {
  const KernelTable contract = contract::table();
  for (const RowOp& op : all_row_ops()) {
    std::vector<int64_t> lengths = {17};
    const bool few = under_emulator() || (kSanitized && !at_night());
    if (!is_attention(op) && !few) lengths = {1, 16, 17, 35};
    for (const int64_t n : lengths) check_planted(op, contract, tables_under_test(), n);
  }
}

TEST(every_row_op) {
  const std::vector<RowOp> ops = all_row_ops();
  check_that_list_is_complete(ops);
  std::vector<int64_t> lengths = {0, 1, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 70, 100, 257, 1000};
  if (at_night()) lengths.insert(lengths.end(), {2, 7, 9, 24, 32, 48, 63, 65, 128, 2560});
  if (best_alone()) lengths = {0, 1, 16, 17, 100};
  if (!quick() && !under_emulator()) {
    lengths = {127, 128, 129, 255, 256, 257, 640, 1000, 2560, 4096, 6912};
    for (int64_t n = 0; n <= 70; ++n) lengths.push_back(n);
  }
  RowTest test;
  for (const RowOp& op : ops) {
    for (const int64_t n : lengths) {
      for (const Flavour flavour : kFlavours) {
        if (n >= op.smallest_n) test.run(op, tables_under_test(), n, flavour);
      }
    }
  }
}

TEST(fused_norm) {
  for (const KernelTable* kernels : tables_under_test()) {
    for (const int64_t n : {1, 15, 16, 17, 32, 48, 96, 100, 2560}) {
      for (const Flavour flavour : kFlavours) {
        for (const DType type : kTypes) {
          check_fused_norm(*kernels, n, type, true, flavour);
          check_fused_norm(*kernels, n, type, false, flavour);
        }
      }
    }
  }
}

}  // namespace
}  // namespace bitnet::test
