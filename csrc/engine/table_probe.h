// Whether products by tables of sums are faster than multiplied ones on this CPU: its row of
// runtime/tuning.h says so, or one measurement of some milliseconds does. Their results are equal.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/kernel_table.h"

namespace bitnet::engine {

// Tokens of the measured product. Fewer share their lines and the division of their work less, so
// their gain is less, by an amount that nobody measured on the CPU in question.
constexpr int64_t kProbeTokens = 64;

struct TableProbe {
  double gain = 0;     // time when multiplied / time by tables; 0: no memory to measure in
  double seconds = 0;  // that the measurement took
};

// The measurement of these kernels, if one is finished.
std::optional<TableProbe> table_probe(const KernelTable& table);

// Whether large products of these kernels with so many tokens are to use tables. The first call may
// measure, on its own thread; callers that come meanwhile are told to multiply. Not to be called
// inside a parallel region, where other threads would wait for the measurement.
bool tables_gain(const KernelTable& table, int64_t tokens);

}  // namespace bitnet::engine
