// Tensors by their names, as an op takes them: a list of tensors, and a text with a name a line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ops/cache_checks.h"

namespace bitnet::ops {

class Named {
 public:
  // `argument`: that of the tensors, which stay.
  explicit Named(const char* argument) : argument_(argument) {}
  Named(const Check& check, const char* argument, std::string_view names,
        const std::vector<Tensor>& tensors);

  void add(std::string name, const Tensor& tensor) { all_.push_back({std::move(name), &tensor}); }
  // Null: there is none.
  const Tensor* find(std::string_view name) const;
  const Tensor& get(const Check& check, std::string_view name) const;
  // Rejects a name that nobody has asked for.
  void finish(const Check& check) const;
  // None of them lies in what an op writes.
  void keep_apart(const Check& check, const Mutated& mutated) const;

 private:
  struct Entry {
    std::string name;
    const Tensor* tensor;
    mutable bool asked = false;
  };
  const char* argument_;
  std::vector<Entry> all_;
};

// The lines of a text.
std::vector<std::string> lines_of(std::string_view text);

}  // namespace bitnet::ops
