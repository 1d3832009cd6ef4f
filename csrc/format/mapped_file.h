// A model file in memory: the mapping, and an SGLBITNT file read through it. Pages may be handed
// back once their tensor has been copied. Must not know: torch, Python, the rules of the format
// (sglbitnt.h has them).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/sglbitnt.h"

#pragma GCC visibility push(default)

namespace bitnet::format {

// A regular file mapped copy-on-write: nothing written through the mapping reaches the file, and a
// stray write costs a private page instead of a crash. Renaming a new file over it is safe. Memory
// of a file that was shortened in place cannot be read (SIGBUS), as with any mmap: `check_length`
// comes before every use, so that only who shortens it during one breaks a reader.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // FormatError(kIo)
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::uint8_t> bytes() const { return {data_, size_bytes_}; }
  // The file is as long as when it was opened; FormatError(kTruncated) where it is shorter.
  void check_length(const std::string& path) const;
  // Gives back the memory behind a range that has been read; it is read again at the next access.
  // What was written through the mapping there is lost.
  void release(std::uint64_t offset_bytes, std::uint64_t size_bytes) const;

 private:
  const std::uint8_t* data_ = nullptr;
  std::uint64_t size_bytes_ = 0;
  std::intptr_t file_ = -1;  // of system_file.h, kept for check_length
};

// Every error is a FormatError whose text starts with the path.
class SglbitntFile {
 public:
  SglbitntFile(const std::string& path, bool check_codes);  // check_codes: scan all data as well
  std::span<const std::uint8_t> bytes() const { return mapping_.bytes(); }
  std::string_view config() const { return parsed_.config; }
  const std::vector<TensorRecord>& tensors() const { return parsed_.tensors; }
  std::uint32_t version() const { return parsed_.version; }
  void check_sum(std::size_t index) const;
  void check_data(std::size_t index) const;  // one tensor's part of what check_codes does
  void check_in_features(std::size_t index, std::uint64_t in_features) const;
  void release(std::size_t index) const;  // of MappedFile, for one tensor's data
  void check_length() const;              // of MappedFile; the checks here call it themselves
  CodeCounts count_codes(std::size_t index) const;

 private:
  std::string path_;
  MappedFile mapping_;
  ParsedFile parsed_;
};

}  // namespace bitnet::format

#pragma GCC visibility pop
