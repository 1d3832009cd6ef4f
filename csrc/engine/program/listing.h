// The text of a model program: one block a line, `kind key=value key=value ...`. This file splits
// the text and looks keys up; what a key means is known to the block that reads it (engine/blocks).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bitnet::engine {

// What is wrong with a program, without the name of the op: "expected <what> <constraint>, got
// <value>".
class ProgramError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Line {
  int64_t number = 0;  // from 1
  std::string kind;
  std::vector<std::pair<std::string, std::string>> keys;  // in the order of the text
};

// Empty lines and what stands behind a # are left out. Throws ProgramError for a word without "=",
// for an empty key or value and for a key that stands twice in a line.
std::vector<Line> parse_listing(std::string_view text);

// The keys of one line, each read once by its name. Every reader throws ProgramError, which names
// the line and the key. `finish` rejects keys that nobody has read.
class Keys {
 public:
  explicit Keys(const Line& line) : line_(line), read_(line.keys.size(), false) {}

  const std::string& kind() const { return line_.kind; }
  bool has(std::string_view key) const { return find(key) != nullptr; }
  // A word; the one without `otherwise` has to be there.
  std::string word(std::string_view key);
  std::string word(std::string_view key, const char* otherwise);
  // From min to max.
  int64_t integer(std::string_view key, int64_t min, int64_t max);
  int64_t integer(std::string_view key, int64_t min, int64_t max, int64_t otherwise);
  // Finite.
  float number(std::string_view key);
  float number(std::string_view key, float otherwise);
  void finish() const;

  [[noreturn]] void fail(std::string_view key, const std::string& constraint,
                         const std::string& got) const;

 private:
  const std::string* find(std::string_view key) const;
  const std::string& require(std::string_view key);
  void mark(std::string_view key);

  const Line& line_;
  std::vector<bool> read_;
};

}  // namespace bitnet::engine
