// Scratch memory: uninitialised arrays, a block that only grows, and a bump allocator over it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace bitnet {

inline const void* offset_bytes(const void* p, int64_t n) {
  return static_cast<const char*>(p) + n;
}
inline void* offset_bytes(void* p, int64_t n) { return static_cast<char*>(p) + n; }

// `count` elements of `size` bytes, aligned to 64; std::runtime_error where there is no memory.
// A thread keeps a few small blocks that it has released, so that a small op that is called again
// and again allocates nothing but its result; any thread may release a block.
void* allocate_scratch(int64_t count, size_t size);
void release_scratch(void* memory, int64_t count, size_t size);

// Uninitialised memory, 64-byte aligned.  Allocated before a parallel region, never inside.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(allocate_scratch(count, sizeof(T)))), count_(count) {}
  Scratch(Scratch&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release_scratch(data_, count_, sizeof(T)); }
  T* get() { return data_; }
  const T* get() const { return data_; }

 private:
  T* data_;
  int64_t count_;
};

// Hands out pieces of one block. Used two times over: with a null block it only counts.
class BumpAllocator {
 public:
  explicit BumpAllocator(char* block) : block_(block) {}
  // 64-byte aligned, so that two threads never write to one cache line.
  template <class T>
  T* take(int64_t count) {
    char* piece = block_ == nullptr ? nullptr : block_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* block_;
  int64_t used_ = 0;
};

// A block that only grows, so that calls of the same size allocate nothing.
class Workspace {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_ || block_ == nullptr) {  // nothing is asked for, too
      size_ = 0;                               // what a failed allocation leaves
      block_.reset();                          // first, so that both are never there at once
      block_ = std::make_unique<Scratch<char>>(bytes);
      size_ = bytes;
    }
    return block_->get();
  }

 private:
  std::unique_ptr<Scratch<char>> block_;
  int64_t size_ = 0;
};

}  // namespace bitnet
