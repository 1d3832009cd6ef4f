// Allocation of scratch memory, the blocks that a thread keeps, the message of memory that is not
// there.
#include "runtime/memory.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace bitnet {
namespace {

constexpr std::align_val_t kAlignment{64};

// Blocks of 64 bytes times a power of two, a few of each size: the first bytes of a kept one point
// to the next. Without constructor or destructor, so that a thread's are found by one address.
class KeptBlocks {
 public:
  static constexpr int kSizes = 12;  // 64 bytes to 128 KiB
  static constexpr int kMaxOfEach = 4;

  // At the thread's end: other objects of it may still release theirs, which are kept no more.
  void end() {
    for (int i = 0; i < kSizes; ++i) {
      while (void* block = take(i)) ::operator delete(block, kAlignment);
      count_[i] = kMaxOfEach;
    }
  }
  void* take(int i) {
    void* block = first_[i];
    if (block == nullptr) return nullptr;
    first_[i] = *static_cast<void**>(block);
    --count_[i];
    return block;
  }
  bool keep(int i, void* block) {
    if (count_[i] == kMaxOfEach) return false;
    if (!ends_) end_with_thread();
    *static_cast<void**>(block) = first_[i];
    first_[i] = block;
    ++count_[i];
    return true;
  }

 private:
  void end_with_thread();

  void* first_[kSizes] = {};
  int count_[kSizes] = {};
  bool ends_ = false;
};

constinit thread_local KeptBlocks t_kept;

struct Ending {
  ~Ending() { t_kept.end(); }
};

void KeptBlocks::end_with_thread() {
  thread_local Ending ending;
  ends_ = true;
}

// Which size has room for so many bytes; kSizes: none. Under the address sanitizer every block is
// new, so that it sees what is used too late.
int size_of(size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  static_cast<void>(bytes);
  return KeptBlocks::kSizes;
#else
  return std::min<int>(KeptBlocks::kSizes, std::bit_width((std::max<size_t>(bytes, 1) - 1) / 64));
#endif
}

bool bytes_of(int64_t count, size_t size, size_t* bytes) {
  return !__builtin_mul_overflow(static_cast<size_t>(std::max<int64_t>(count, 1)), size, bytes);
}

}  // namespace

void* allocate_scratch(int64_t count, size_t size) {
  size_t bytes = 0;
  if (bytes_of(count, size, &bytes)) {
    const int kept = size_of(bytes);
    if (kept < KeptBlocks::kSizes) {
      if (void* block = t_kept.take(kept)) return block;
      bytes = size_t{64} << kept;
    }
    void* memory = ::operator new(bytes, kAlignment, std::nothrow);
    if (memory != nullptr) return memory;
  }
  throw std::runtime_error("bitnet: expected memory to work in for " + std::to_string(count) +
                           " elements of " + std::to_string(size) +
                           " bytes, got none; pass fewer tokens at once");
}

void release_scratch(void* memory, int64_t count, size_t size) {
  size_t bytes = 0;
  if (memory == nullptr || !bytes_of(count, size, &bytes)) return;
  const int kept = size_of(bytes);
  if (kept == KeptBlocks::kSizes || !t_kept.keep(kept, memory))
    ::operator delete(memory, kAlignment);
}

}  // namespace bitnet
