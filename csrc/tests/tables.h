// The kernel tables under test: those this CPU can execute and, where the build has them, the
// emulated ones (csrc/tests/emulated).  Must not know what a kernel computes.
//
// Environment: BITNET_TEST_EXPECT, when set, is the comma-separated list of ISAs that must be
// available here, best first: a script that picks the CPU says so and a missing ISA is a failure.
// BITNET_TEST_EMULATOR=1 says that machine code itself is emulated and sweeps take larger strides.
// BITNET_TEST_TABLES=emulated leaves the native ones out, scalar apart: another run has had them;
// best leaves out all but the best that is available: others have had what its code computes, and
// this CPU has no more than its instructions. BITNET_TEST_QUICK=1 asks for those strides on this
// machine (scripts/quick).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/products/plan.h"
#include "kernels/dispatch.h"
#include "kernels/isa_tables.h"
#include "kernels/kernel_table.h"
#include "kernels/pair_unit.h"
#include "kernels/tile_check.h"
#include "tests/check.h"

namespace bitnet {

namespace test {

inline bool under_emulator() { return std::getenv("BITNET_TEST_EMULATOR") != nullptr; }

inline bool is_emulated(const KernelTable& kernels) {
  return std::string(kernels.name).ends_with("_emulated");
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// A sweep of each kind at larger strides: what its size proves is proven natively, in full.
inline bool quick() { return kSanitized || std::getenv("BITNET_TEST_QUICK") != nullptr; }

// Sweeps divide their density by this: emulation costs a factor of 10 to 100, sanitizers one of 10
// to 30.
inline int64_t thinning(const KernelTable& kernels) {
  return quick() || under_emulator() || is_emulated(kernels) ? 16 : 1;
}

// BITNET_CI_ALL=1: what is thinned keeps what only a run by day leaves out besides.
inline bool at_night() {
  const char* all = std::getenv("BITNET_CI_ALL");
  return all != nullptr && std::string(all) == "1";
}

inline bool left_to_the_night(const KernelTable& kernels) {
  return thinning(kernels) > 1 && !at_night();
}

inline bool tables_chosen(const std::string& word) {
  const char* chosen = std::getenv("BITNET_TEST_TABLES");
  return chosen != nullptr && chosen == word;
}

inline bool best_alone() { return tables_chosen("best"); }

inline std::vector<const KernelTable*> tables_under_test() {
  std::vector<const KernelTable*> tables = available_tables();
  std::erase_if(tables, [](const KernelTable* kernels) { return !make_ready(*kernels); });
  if (best_alone()) tables.resize(1);
  if (tables_chosen("emulated")) tables = {all_tables().back()};
  if (under_emulator()) return tables;  // one emulation inside another would prove nothing new
#define BITNET_PUSH(isa) tables.push_back(isa::table());
  BITNET_EMULATED_ISAS(BITNET_PUSH)
#undef BITNET_PUSH
  return tables;
}

template <class F>
void on_every_table(const F& f) {
  for (const KernelTable* kernels : tables_under_test()) f(*kernels);
}

// Whether AttentionChunk::pair_unit may be set: on this CPU, or where the instruction is emulated.
inline bool may_use_pair_unit(const KernelTable& kernels) {
  float sums[16] = {};
  const bool here = is_emulated(kernels) || pair_unit_in_order();
  return here && kernels.add_pairs(sums, sums, 0, sums);
}

// The same of AttentionChunk::matrix_unit.
inline bool may_use_matrix_unit(const KernelTable& kernels) {
  return std::string(kernels.name).starts_with("amx_int8") &&
         (is_emulated(kernels) || tile_unit_in_order());
}

// The rows of a table's list.
inline std::vector<const ProductAlgorithm*> products_of(const KernelTable& kernels) {
  std::vector<const ProductAlgorithm*> rows;
  for (int64_t i = 0; i < kMaxProducts && kernels.products[i].name != nullptr; ++i)
    rows.push_back(kernels.products + i);
  return rows;
}

// By the row that is usual for the job.
inline void run_usual(const KernelTable& kernels, const ProductJob& job,
                      const EpilogueJob* epilogue = nullptr) {
  engine::algorithm_for(kernels, engine::shape_of(job)).run(job, epilogue);
}

inline bool has_tables(const KernelTable& kernels) { return engine::tables_of(kernels) != nullptr; }

// f of each table that has tables of sums, and of the others where nothing is left to the night.
template <class F>
void on_tables_of_sums(const F& f) {
  bool any = false;
  for (const KernelTable* kernels : tables_under_test()) {
    if (left_to_the_night(*kernels) && !has_tables(*kernels)) continue;
    any = true;
    f(*kernels);
  }
  if (!any) not_here("an ISA with tables of sums");
}

// So many rows of tiles, and a caller that has memory.
inline ProductShape shape_for_tables(int64_t tokens, int64_t rows) {
  return {.format = layout::WeightFormat::kTwoBit,
          .tokens = tokens,
          .k = 256,
          .row_blocks = rows,
          .block_rows = 1,
          .scratch = true};
}

// The same kernels, whose tables of sums want more memory than there is; one at a time.
inline KernelTable without_scratch(const KernelTable& kernels) {
  static ProductAlgorithm rows[kMaxProducts];
  static const ProductAlgorithm* tables;
  tables = engine::tables_of(kernels);
  KernelTable starved = kernels;
  if (tables == nullptr) return starved;
  std::copy_n(kernels.products, kMaxProducts, rows);
  rows[tables - kernels.products].blocking = [](const ProductShape& shape) {
    ProductBlocking blocking = tables->blocking(shape);
    blocking.scratch_bytes = int64_t{1} << 55;
    return blocking;
  };
  starved.products = rows;
  return starved;
}

// The table that every other one must equal: the last of the list, plain C++.
inline const KernelTable& scalar_kernels() { return *all_tables().back(); }

}  // namespace test
}  // namespace bitnet
