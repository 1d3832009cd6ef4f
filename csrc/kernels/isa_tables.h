// The one exported symbol of each ISA's object file: a getter of its table.  kernels/isa_list.h is
// made by CMake from isas.txt: BITNET_ISAS(X), those of this architecture, best first.  Which of
// them may be called, kernels/dispatch.cpp decides.
#pragma once

#include "kernels/isa_list.h"
#include "kernels/kernel_table.h"

namespace bitnet {

#define BITNET_DECLARE_TABLE(isa) \
  namespace isa {                 \
  const KernelTable* table();     \
  }
BITNET_ISAS(BITNET_DECLARE_TABLE)
BITNET_EMULATED_ISAS(BITNET_DECLARE_TABLE)
#undef BITNET_DECLARE_TABLE

}  // namespace bitnet
