// The parser of listing.h.
#include "engine/program/listing.h"

#include <charconv>
#include <cmath>
#include <locale>
#include <sstream>

namespace bitnet::engine {
namespace {

constexpr std::string_view kSpace = " \t\r";

std::string shown(std::string_view text) {
  constexpr size_t kMax = 60;
  std::string words(text.substr(0, kMax));
  return text.size() > kMax ? words + "..." : words;
}

std::string place(const Line& line) {
  return "line " + std::to_string(line.number) + " (" + shown(line.kind) + ")";
}

// The next word of `text`, which is taken off it; empty behind the last.
std::string_view next_word(std::string_view& text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return text = {};
  const size_t end = std::min(text.find_first_of(kSpace, begin), text.size());
  const std::string_view word = text.substr(begin, end - begin);
  text.remove_prefix(end);
  return word;
}

Line parse_line(std::string_view text, int64_t number) {
  Line line{number, std::string(next_word(text)), {}};
  for (std::string_view word = next_word(text); !word.empty(); word = next_word(text)) {
    const size_t equals = word.find('=');
    if (equals == 0 || equals == std::string_view::npos || equals + 1 == word.size())
      throw ProgramError("expected " + place(line) +
                         " of the program with keys as key=value, got " + shown(word));
    const std::string_view key = word.substr(0, equals);
    for (const auto& [other, value] : line.keys) {
      if (other == key)
        throw ProgramError("expected key " + shown(key) + " of " + place(line) + " once, got " +
                           shown(value) + " and " + shown(word.substr(equals + 1)));
    }
    line.keys.emplace_back(key, word.substr(equals + 1));
  }
  return line;
}

// The whole of `text` as a number.
bool read_all(const std::string& text, int64_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

// By a stream, for from_chars of a double asks for a newer libstdc++ than the kernel form may.
bool read_all(const std::string& text, double& value) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  return stream >> value && stream.peek() == std::istringstream::traits_type::eof();
}

}  // namespace

std::vector<Line> parse_listing(std::string_view text) {
  std::vector<Line> lines;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(kSpace) != std::string_view::npos)
      lines.push_back(parse_line(line, number));
  }
  return lines;
}

const std::string* Keys::find(std::string_view key) const {
  for (const auto& [name, value] : line_.keys) {
    if (name == key) return &value;
  }
  return nullptr;
}

void Keys::mark(std::string_view key) {
  for (size_t i = 0; i < line_.keys.size(); ++i) {
    if (line_.keys[i].first == key) read_[i] = true;
  }
}

const std::string& Keys::require(std::string_view key) {
  const std::string* value = find(key);
  if (value == nullptr) fail(key, "to be given", "nothing");
  mark(key);
  return *value;
}

std::string Keys::word(std::string_view key) { return require(key); }

std::string Keys::word(std::string_view key, const char* otherwise) {
  return has(key) ? require(key) : otherwise;
}

int64_t Keys::integer(std::string_view key, int64_t min, int64_t max) {
  const std::string& text = require(key);
  int64_t value = 0;
  if (!read_all(text, value) || value < min || value > max)
    fail(key, "from " + std::to_string(min) + " to " + std::to_string(max), text);
  return value;
}

int64_t Keys::integer(std::string_view key, int64_t min, int64_t max, int64_t otherwise) {
  return has(key) ? integer(key, min, max) : otherwise;
}

float Keys::number(std::string_view key) {
  const std::string& text = require(key);
  double value = 0;
  if (!read_all(text, value) || !std::isfinite(static_cast<float>(value)))
    fail(key, "a finite number", text);
  return static_cast<float>(value);
}

float Keys::number(std::string_view key, float otherwise) {
  return has(key) ? number(key) : otherwise;
}

void Keys::finish() const {
  for (size_t i = 0; i < read_.size(); ++i) {
    if (!read_[i])
      throw ProgramError("expected " + place(line_) +
                         " of the program with keys that it knows, got " +
                         shown(line_.keys[i].first));
  }
}

void Keys::fail(std::string_view key, const std::string& constraint, const std::string& got) const {
  throw ProgramError("expected key " + std::string(key) + " of " + place(line_) + " " + constraint +
                     ", got " + shown(got));
}

}  // namespace bitnet::engine
