// The one exported symbol of each ISA object file: a getter of its table. A new ISA has its row
// here and one in kernels/dispatch.cpp. Must not know which CPU runs: kernels/dispatch.cpp decides
// what may be called.
#pragma once

#include "kernels/kernel_table.h"

namespace bitnet {

namespace scalar {
const KernelTable* table();
}
#if defined(__x86_64__) || defined(_M_X64)
namespace avx2 {
const KernelTable* table();
}
namespace avx_vnni {
const KernelTable* table();
}
namespace avx512_vnni {
const KernelTable* table();
}
namespace amx_int8 {
const KernelTable* table();
}
#endif
#if defined(__aarch64__)
namespace neon_dotprod {
const KernelTable* table();
}
#endif

}  // namespace bitnet
