// Allocation of scratch memory; the message of memory that is not there.
#include "runtime/memory.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace bitnet {

void* allocate_scratch(int64_t count, size_t size) {
  size_t bytes = 0;
  if (!__builtin_mul_overflow(static_cast<size_t>(std::max<int64_t>(count, 1)), size, &bytes)) {
    void* memory = ::operator new(bytes, std::align_val_t{64}, std::nothrow);
    if (memory != nullptr) return memory;
  }
  throw std::runtime_error("bitnet: expected memory to work in for " + std::to_string(count) +
                           " elements of " + std::to_string(size) +
                           " bytes, got none; pass fewer tokens at once");
}

}  // namespace bitnet
