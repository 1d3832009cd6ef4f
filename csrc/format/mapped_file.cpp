// Opening and mapping a model file; see mapped_file.h. A message
// gets the path put in front of it here and nowhere else. Must not
// know: torch, Python, the rules of the format.
#include "format/mapped_file.h"

#include <utility>

#include "format/errors.h"
#include "format/system_file.h"

namespace bitnet::format {
namespace {

[[noreturn]] void fail_io(const std::string& path, const std::string& expected_got,
                          const std::string& remedy) {
  throw FormatError(ErrorCode::kIo, 0, path + ": expected " + expected_got + remedy);
}

// Closes on every way out, unless someone else does.
struct OpenFile {
  SystemFile file;
  ~OpenFile() {
    if (file != kNoFile) close_file(file);
  }
  SystemFile keep() { return std::exchange(file, kNoFile); }
};

// Runs `body`, putting the path in front of what the format rules have to say.
template <class Body>
auto naming_path(const std::string& path, Body body) {
  try {
    return body();
  } catch (const FormatError& error) {
    throw FormatError(error.code(), error.offset_bytes(), path + ": " + error.what());
  }
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  if (path.find('\0') != std::string::npos) {
    fail_io(path.substr(0, path.find('\0')), "a path without zero bytes, got one",
            "; check the path");
  }
  OpenFile open{open_to_read(path)};
  if (open.file == kNoFile) {
    fail_io(path, "a readable file, got error " + last_error(),
            "; check the path and its permissions");
  }
  const std::optional<std::uint64_t> size = size_of(open.file);
  if (!size) {
    fail_io(path, "a regular file, got a directory, pipe or device", "; name the .bin file itself");
  }
  size_bytes_ = *size;
  if (size_bytes_ == 0) return;  // length 0 cannot be mapped; the parser reports it as truncated
  data_ = map_file(open.file, size_bytes_);
  if (data_ == nullptr) {
    fail_io(path, str(size_bytes_) + " bytes of address space, got error " + last_error(),
            "; free memory or raise the limit (ulimit -v)");
  }
  file_ = open.keep();
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) unmap(data_, size_bytes_);
  if (file_ != kNoFile) close_file(file_);
}

void MappedFile::check_length(const std::string& path) const {
  if (file_ == kNoFile) return;  // nothing is mapped
  const std::optional<std::uint64_t> now = size_of(file_);
  if (!now || *now >= size_bytes_) return;  // nothing can be said, or nothing is wrong
  throw FormatError(ErrorCode::kTruncated, *now,
                    path + ": expected the " + str(size_bytes_) +
                        " bytes that the file had when it was opened, got " + str(*now) +
                        "; it was shortened while in use: write a new file and rename it instead");
}

void MappedFile::release(std::uint64_t offset_bytes, std::uint64_t size_bytes) const {
  if (data_ == nullptr) return;
  give_back_pages(data_ + offset_bytes, data_ + offset_bytes + size_bytes);
}

SglbitntFile::SglbitntFile(const std::string& path, bool check_codes)
    : path_(path), mapping_(path), parsed_(naming_path(path, [&] { return parse(bytes()); })) {
  if (!check_codes) return;
  naming_path(path_, [&] {
    for (const TensorRecord& tensor : tensors()) format::check_data(bytes(), tensor);
  });
}

void SglbitntFile::check_length() const { mapping_.check_length(path_); }

void SglbitntFile::check_data(std::size_t index) const {
  check_length();
  naming_path(path_, [&] { format::check_data(bytes(), parsed_.tensors.at(index)); });
}

void SglbitntFile::check_sum(std::size_t index) const {
  check_length();
  naming_path(path_, [&] { format::check_sum(bytes(), parsed_.tensors.at(index)); });
}

void SglbitntFile::release(std::size_t index) const {
  const TensorRecord& tensor = parsed_.tensors.at(index);
  mapping_.release(tensor.offset_bytes, tensor.size_bytes);
}

void SglbitntFile::check_in_features(std::size_t index, std::uint64_t in_features) const {
  check_length();
  naming_path(path_,
              [&] { format::check_in_features(bytes(), parsed_.tensors.at(index), in_features); });
}

CodeCounts SglbitntFile::count_codes(std::size_t index) const {
  check_length();
  return format::count_codes(bytes(), parsed_.tensors.at(index));
}

}  // namespace bitnet::format
