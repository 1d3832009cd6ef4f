// Opening and mapping a model file; see mapped_file.h. A message
// gets the path put in front of it here and nowhere else. Must not
// know: torch, Python, the rules of the format.
#include "format/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "format/errors.h"

namespace bitnet::format {
namespace {

[[noreturn]] void fail_io(const std::string& path, const std::string& expected_got,
                          const std::string& remedy) {
  throw FormatError(ErrorCode::kIo, 0, path + ": expected " + expected_got + remedy);
}

// Closes on every way out, unless someone else does.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  int keep() { return std::exchange(fd, -1); }
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
  // O_NONBLOCK: a named pipe must be rejected, not waited for.
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) {
    fail_io(path, std::string("a readable file, got error ") + std::strerror(errno),
            "; check the path and its permissions");
  }
  struct stat info{};
  if (::fstat(file.fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    fail_io(path, "a regular file, got a directory, pipe or device", "; name the .bin file itself");
  }
  size_bytes_ = static_cast<std::uint64_t>(info.st_size);
  if (size_bytes_ == 0) return;  // mmap rejects length 0; the parser reports it as truncated
  void* map =
      ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.fd, 0);
  if (map == MAP_FAILED) {
    fail_io(path, str(size_bytes_) + " bytes of address space, got error " + std::strerror(errno),
            "; free memory or raise the limit (ulimit -v)");
  }
  data_ = static_cast<const std::uint8_t*>(map);
  fd_ = file.keep();
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::uint8_t*>(data_), size_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void MappedFile::check_length(const std::string& path) const {
  struct stat info{};
  if (fd_ < 0 || ::fstat(fd_, &info) != 0) return;  // nothing is mapped, or nothing can be said
  const auto now = static_cast<std::uint64_t>(info.st_size);
  if (now >= size_bytes_) return;
  throw FormatError(ErrorCode::kTruncated, now,
                    path + ": expected the " + str(size_bytes_) +
                        " bytes that the file had when it was opened, got " + str(now) +
                        "; it was shortened while in use: write a new file and rename it instead");
}

void MappedFile::release(std::uint64_t offset_bytes, std::uint64_t size_bytes) const {
  // Whole pages only: those at the ends may hold what others still need.
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = (offset_bytes + page - 1) / page * page;
  const std::uint64_t end = (offset_bytes + size_bytes) / page * page;
  if (begin >= end) return;
  ::madvise(const_cast<std::uint8_t*>(data_) + begin, end - begin, MADV_DONTNEED);  // a hint
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
