// Memory that a thread keeps from call to call, so that a step of the
// same size allocates nothing: a block that only grows, and pieces
// carved from it. Must not know what is kept in it.
#pragma once

#include <memory>

#include "ops/door.h"

namespace bitnet::ops {

// Takes pieces of one block, two times over: count first (block null), then hand out.
class Carver {
 public:
  explicit Carver(char* block) : block_(block) {}
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

// A block that only grows.
class Workspace {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      size_ = 0;       // what a failed allocation leaves
      block_.reset();  // first, so that both are never there at once
      block_ = std::make_unique<Scratch<char>>(bytes);
      size_ = bytes;
    }
    return block_->get();
  }

 private:
  std::unique_ptr<Scratch<char>> block_;
  int64_t size_ = 0;
};

}  // namespace bitnet::ops
