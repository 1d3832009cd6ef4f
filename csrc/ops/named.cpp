// The tensors of named.h.
#include "ops/named.h"

#include <algorithm>

namespace bitnet::ops {

Named::Named(const Check& check, const char* argument, std::string_view names,
             const std::vector<Tensor>& tensors)
    : argument_(argument) {
  std::vector<std::string> lines = lines_of(names);
  if (lines.size() != tensors.size())
    check.fail(argument,
               "with a name for each of its " + std::to_string(tensors.size()) + " tensors",
               std::to_string(lines.size()) + " names");
  for (size_t i = 0; i < lines.size(); ++i) {
    if (find(lines[i]) != nullptr)
      check.fail(argument, "with names that are all different", lines[i] + " twice");
    add(std::move(lines[i]), tensors[i]);
  }
  for (const Entry& entry : all_) entry.asked = false;
}

const Tensor* Named::find(std::string_view name) const {
  for (const Entry& entry : all_) {
    if (entry.name != name) continue;
    entry.asked = true;
    return entry.tensor;
  }
  return nullptr;
}

const Tensor& Named::get(const Check& check, std::string_view name) const {
  const Tensor* found = find(name);
  if (found == nullptr) check.fail(argument_, "with a tensor named " + std::string(name), "none");
  return *found;
}

void Named::finish(const Check& check) const {
  for (const Entry& entry : all_) {
    if (!entry.asked)
      check.fail(argument_, "with names that the program and the op know", entry.name);
  }
}

void Named::keep_apart(const Check& check, const Mutated& mutated) const {
  for (const Entry& entry : all_) mutated.keep_apart(check, *entry.tensor, entry.name.c_str());
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace bitnet::ops
