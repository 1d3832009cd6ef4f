// Buffers between two inaccessible pages.  A buffer lies flush against the page behind it or the
// page before it, or a few elements away; bytes outside of it are poison, checked by intact().  So
// a read past an end is a signal, and a write past it is a signal or a failed check.  Must not know
// kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/system.h"

namespace bitnet::test {

// Where a buffer lies in its arena: `gap` elements from the guard page at the chosen end.
struct Placement {
  bool at_end;
  int gap;
};

// Flush at both ends, and starts that are not aligned to any vector.
inline constexpr Placement kPlacements[] = {{true, 0}, {false, 0}, {true, 1},  {false, 1},
                                            {true, 7}, {false, 5}, {true, 13}, {false, 31}};
inline constexpr int kPlacementCount = static_cast<int>(sizeof kPlacements / sizeof kPlacements[0]);

class Arena {
 public:
  explicit Arena(std::size_t capacity_bytes) {
    page_ = page_bytes();
    size_ = (capacity_bytes + kMargin + page_ - 1) / page_ * page_;
    void* pages = reserve_pages(size_ + 2 * page_);
    begin_ = static_cast<uint8_t*>(pages) + page_;
    if (pages == nullptr || !make_accessible(begin_, size_)) {
      std::perror("guarded.h: no pages");
      std::exit(1);
    }
    std::memset(begin_, kPoison, size_);
    used_ = begin_;
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { free_pages(begin_ - page_, size_ + 2 * page_); }

  // Room for `count` elements, all poison.  The former buffer of this arena is gone.
  template <class T>
  T* place(int64_t count, Placement where) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    const std::size_t gap = static_cast<std::size_t>(where.gap) * sizeof(T);
    if (bytes + gap > size_) {
      std::fprintf(stderr, "guarded.h: %zu bytes do not fit an arena of %zu\n", bytes + gap, size_);
      std::exit(1);
    }
    // Poison goes where the former buffer lay and around the new one.
    std::memset(used_, kPoison, used_bytes_);
    used_ = where.at_end ? begin_ + size_ - gap - bytes : begin_ + gap;
    used_bytes_ = bytes;
    return reinterpret_cast<T*>(used_);
  }
  template <class T>
  T* place_copy(const T* source, int64_t count, Placement where) {
    T* p = place<T>(count, where);
    if (count > 0) std::memcpy(p, source, static_cast<std::size_t>(count) * sizeof(T));
    return p;
  }
  // Is the poison around the present buffer as it was, up to 128 bytes on each side?
  bool intact() const {
    const uint8_t* end = used_ + used_bytes_;
    const uint8_t* from = used_ - begin_ > kMargin ? used_ - kMargin : begin_;
    const uint8_t* to = begin_ + size_ - end > kMargin ? end + kMargin : begin_ + size_;
    for (const uint8_t* p = from; p < to; ++p) {
      if ((p < used_ || p >= end) && *p != kPoison) return false;
    }
    return true;
  }

 private:
  static constexpr std::ptrdiff_t kMargin = 128;
  static constexpr uint8_t kPoison = 0xa7;  // as bf16, f16 or float: a small negative number

  std::size_t page_ = 0, size_ = 0, used_bytes_ = 0;
  uint8_t* begin_ = nullptr;
  uint8_t* used_ = nullptr;
};

}  // namespace bitnet::test
