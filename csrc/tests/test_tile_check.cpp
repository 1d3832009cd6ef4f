// The model of AMX's tile products against its definition: bfloat16 by the processor's own fused
// multiply-adds in the state that flushes denormals, bytes by sums of int64; and the check itself,
// which must see a product in another order, a lost flush, and a wrong sign.
#include "kernels/tile_check.h"

#include <bit>
#include <cmath>
#include <initializer_list>

#include "tests/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bitnet::test {
namespace {

constexpr TileInstruction kAll[] = {TileInstruction::kBf16, TileInstruction::kSignedSigned,
                                    TileInstruction::kSignedUnsigned,
                                    TileInstruction::kUnsignedSigned};

void bytes_by_int64(TileInstruction instruction, TileOperands& t) {
  const auto number = [](uint32_t word, int i, bool is_signed) -> int64_t {
    const int64_t byte = word >> (8 * i) & 255;
    return is_signed && byte > 127 ? byte - 256 : byte;
  };
  for (int m = 0; m < t.rows; ++m) {
    for (int n = 0; n < 16; ++n) {
      int64_t sum = static_cast<int32_t>(t.c[m][n]);
      for (int i = 0; i < 4 * t.depth; ++i) {
        sum += number(t.a[m][i / 4], i % 4, instruction != TileInstruction::kUnsignedSigned) *
               number(t.b[i / 4][n], i % 4, instruction != TileInstruction::kSignedUnsigned);
      }
      t.c[m][n] = static_cast<uint32_t>(sum);
    }
  }
}

#if defined(__x86_64__)

float half_of(uint32_t word, int half) {
  return std::bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000u);
}

// Two chains, or with kOneChain what the order would be if pairs were added one after the other.
template <bool kFlush, bool kOneChain>
[[gnu::target("fma")]] void floats_by_fma(TileInstruction, TileOperands& t) {
  const unsigned before = _mm_getcsr();
  if (kFlush) _mm_setcsr(0x1f80 | 0x8040);
  for (int m = 0; m < t.rows; ++m) {
    for (int n = 0; n < 16; ++n) {
      __m128 even = _mm_setzero_ps(), odd = _mm_setzero_ps(),
             c = _mm_set_ss(std::bit_cast<float>(t.c[m][n]));
      for (int k = 0; k < t.depth; ++k) {
        const auto add = [&](__m128 to, int half) __attribute__((target("fma"))) {
          return _mm_fmadd_ss(_mm_set_ss(half_of(t.a[m][k], half)),
                              _mm_set_ss(half_of(t.b[k][n], half)), to);
        };
        if (kOneChain) {
          c = add(add(c, 1), 0);
        } else {
          even = add(even, 0);
          odd = add(odd, 1);
        }
      }
      if (!kOneChain) c = _mm_add_ss(c, _mm_add_ss(even, odd));
      t.c[m][n] = std::bit_cast<uint32_t>(_mm_cvtss_f32(c));
    }
  }
  _mm_setcsr(before);
}

void floats(int64_t products) {
  if (!__builtin_cpu_supports("fma")) return not_here("a fused multiply-add");
  const auto check = [](TileProduct product, int64_t products) {
    return check_product(TileInstruction::kBf16, products, 1, product);
  };
  begin_case("bfloat16 by fused multiply-adds");
  const TileCheck same = check(floats_by_fma<true, false>, products);
  CHECK(same.outputs > 200000 && same.different == 0, "%lld of %lld: %s",
        static_cast<long long>(same.different), static_cast<long long>(same.outputs), same.first);
  begin_case("orders and states that are not the instruction's");
  const TileCheck order = check(floats_by_fma<true, true>, 20);
  CHECK(order.different > order.outputs / 20 && order.first[0] != 0, "another order: %lld of %lld",
        static_cast<long long>(order.different), static_cast<long long>(order.outputs));
  const TileCheck state = check(floats_by_fma<false, false>, 20);
  CHECK(state.different > 100, "denormals kept: %lld", static_cast<long long>(state.different));
}

#else
void floats(int64_t) { not_here("an x86 CPU"); }
#endif

void bytes() {
  for (const TileInstruction instruction : kAll) {
    if (instruction == TileInstruction::kBf16) continue;
    const TileCheck check = check_product(instruction, 100, 2, bytes_by_int64);
    begin_case("%s by int64", check.instruction);
    CHECK(check.outputs > 50000 && check.different == 0, "%lld of %lld: %s",
          static_cast<long long>(check.different), static_cast<long long>(check.outputs),
          check.first);
    const auto other = [](TileInstruction i, TileOperands& t) {
      bytes_by_int64(i == TileInstruction::kSignedSigned ? TileInstruction::kUnsignedSigned
                                                         : TileInstruction::kSignedSigned,
                     t);
    };
    const TileCheck wrong = check_product(instruction, 5, 2, other);
    CHECK(wrong.different > wrong.outputs / 2, "another sign: %lld of %lld",
          static_cast<long long>(wrong.different), static_cast<long long>(wrong.outputs));
  }
}

// On a CPU with AMX the hardware itself; elsewhere every row says that it was not asked.
void hardware() {
  begin_case("the unit of this CPU");
  TileCheck checks[kTileInstructions];
  check_tile_unit(20, 3, checks);
  for (const TileCheck& check : checks) {
    CHECK(check.available == (check.outputs > 0), "%s: %lld outputs", check.instruction,
          static_cast<long long>(check.outputs));
    CHECK(check.different == 0, "%s: %s", check.instruction, check.first);
  }
}

TEST(bytes) { bytes(); }
TEST(floats) { floats(300); }
TEST(hardware) { hardware(); }

}  // namespace
}  // namespace bitnet::test
