// Which row of the list each kind of product takes on this CPU (kernels/products.h,
// ProductChoices): priors of CPUs that were timed decide, or a measurement at the first product of
// the kind. Every row gives the same bits, so a wrong choice costs only time.
#pragma once

#include <vector>

#include "kernels/kernel_table.h"

namespace bitnet::engine {

// Fills in the choice for products like this one. The first call for a kind may measure, on its own
// thread, in some milliseconds; callers that come meanwhile take the usual row. Not to be called
// inside a parallel region, where other threads would wait.
void tune(const KernelTable& kernels, const ProductShape& shape);

struct RowTime {
  const ProductAlgorithm* row;
  double seconds[2];  // the shortest of two independent series of turns
};

// Every row that could make products like this one, timed now on a sample. The first one is taken
// unless another is faster. Empty if there is nothing to choose, or no memory.
std::vector<RowTime> time_products(const KernelTable& kernels, const ProductShape& shape);

// The fastest of these; the first if the fastest gains less than 5 %, or gains in one series alone.
const ProductAlgorithm* fastest(const std::vector<RowTime>& times);

}  // namespace bitnet::engine
