// Bound programs (engine/program/program.h) over torch's tensors, by the numbers that their handles
// hold. A program keeps its tensors alive until it is released.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/program/program.h"
#include "ops/cache_checks.h"

namespace bitnet::ops {

// One binding: of a text to tensors where they lie now, for the kernels that run now.
class BoundProgram {
 public:
  BoundProgram(const Check& check, const std::string& text, const std::vector<std::string>& names,
               const std::vector<Tensor>& tensors);

  int64_t id() const { return id_; }  // no other binding has had it
  const engine::Program& program() const { return *program_; }
  // Whether no tensor's memory has been exchanged since, and the kernels are the same.
  bool current(const std::vector<Tensor>& tensors) const;
  // What a step reads must not lie in what it writes.
  void keep_apart(const Check& check, const Mutated& mutated) const;

 private:
  struct Span {
    const void* data;
    int64_t bytes;
    const char* name;
  };
  int64_t id_;
  std::vector<Span> spans_;  // of the tensors, in their order
  std::unique_ptr<engine::Program> program_;
};

// A program that a step runs, and its tensors: both stay, whoever releases the handle meanwhile.
struct ProgramInUse {
  std::shared_ptr<const void> tensors;
  std::shared_ptr<const BoundProgram> bound;
};

// The program of a handle, bound anew where it is not current. Any thread may call it.
ProgramInUse bound_program(const Check& check, const Tensor& handle);

}  // namespace bitnet::ops
