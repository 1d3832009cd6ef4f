// Python face of csrc/format: bitnet_ops._runtime.SglbitntFile, SglbitntTensor, FormatError, on
// which bitnet_ops.formats.sglbitnt builds the public Reader; strings of GGUF files. Must not know:
// torch, the rules of the formats, what a config means.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "format/gguf_strings.h"
#include "format/mapped_file.h"
#include "format/xxh64.h"

namespace py = pybind11;
namespace format = bitnet::format;

void bind_format(py::module_& m);  // called by bindings.cpp

namespace {

const char* dtype_name(format::DType dtype) {
  constexpr const char* kNames[] = {"uint8", "float32", "float16", "bfloat16"};
  return kNames[static_cast<std::size_t>(dtype)];
}

// What Python sees of a tensor; the name is a copy, since the view dies with the mapping.
struct PyTensor {
  std::string name;
  const char* dtype;
  py::tuple shape;
  py::object scale;        // float if it is the tensor's only one, else None
  py::object in_features;  // int where the file has it, else None
  const char* scale_kind;  // "none", "tensor", "row" or "group"
  const char* scale_dtype;
  std::uint32_t group_size;
  std::uint64_t offset;
  std::uint64_t nbytes;
  std::uint64_t scales_offset;
  std::uint64_t scales_nbytes;
  std::uint64_t checksum;
};

const char* scale_kind_name(format::ScaleKind kind) {
  constexpr const char* kNames[] = {"none", "tensor", "row", "group"};
  return kNames[static_cast<std::size_t>(kind)];
}

PyTensor to_python(const format::TensorRecord& record) {
  py::tuple shape(record.ndim);
  for (std::uint32_t i = 0; i < record.ndim; ++i) shape[i] = record.dims[i];
  PyTensor out{std::string(record.name),
               dtype_name(record.dtype),
               shape,
               py::none(),
               py::none(),
               scale_kind_name(record.scale_kind),
               dtype_name(record.scale_dtype),
               record.group_size,
               record.offset_bytes,
               record.size_bytes,
               record.scales_offset,
               record.scales_bytes,
               record.checksum};
  if (record.scale_kind == format::ScaleKind::kTensor) out.scale = py::float_(record.scale);
  if (record.in_features != 0) out.in_features = py::int_(record.in_features);
  return out;
}

py::list tensors_of(const format::SglbitntFile& file) {
  py::list out;
  for (const format::TensorRecord& record : file.tensors()) out.append(to_python(record));
  return out;
}

// FormatError(message) with .code and .offset. The path inside the message may be any bytes.
void raise_in_python(const format::FormatError& error, const py::object& type) {
  const std::string text = error.what();
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "backslashreplace"));
  const py::object exception = type(message);
  exception.attr("code") = format::error_code_name(error.code());
  exception.attr("offset") = error.offset_bytes();
  PyErr_SetObject(type.ptr(), exception.ptr());
}

void bind_error(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  storage.call_once_and_store_result([&] {
    return py::object(py::exception<format::FormatError>(m, "FormatError", PyExc_ValueError));
  });
  py::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const format::FormatError& error) {
      raise_in_python(error, storage.get_stored());
    }
  });
}

void bind_tensor(py::module_& m) {
  py::class_<PyTensor>(m, "SglbitntTensor")
      .def_readonly("name", &PyTensor::name)
      .def_readonly("dtype", &PyTensor::dtype)
      .def_readonly("shape", &PyTensor::shape)
      .def_readonly("scale", &PyTensor::scale)
      .def_readonly("in_features", &PyTensor::in_features)
      .def_readonly("scale_kind", &PyTensor::scale_kind)
      .def_readonly("scale_dtype", &PyTensor::scale_dtype)
      .def_readonly("group_size", &PyTensor::group_size)
      .def_readonly("offset", &PyTensor::offset)
      .def_readonly("nbytes", &PyTensor::nbytes)
      .def_readonly("scales_offset", &PyTensor::scales_offset)
      .def_readonly("scales_nbytes", &PyTensor::scales_nbytes)
      .def_readonly("checksum", &PyTensor::checksum);
}

// Read-only: Python code that wants to write must copy. Whoever holds the buffer holds the file.
py::buffer_info buffer_of(const format::SglbitntFile& file) {
  const auto bytes = file.bytes();
  return py::buffer_info(const_cast<std::uint8_t*>(bytes.data()), 1,
                         py::format_descriptor<std::uint8_t>::format(), 1, {bytes.size()}, {1},
                         /*readonly=*/true);
}

py::tuple code_counts(const format::SglbitntFile& file, std::size_t index) {
  format::CodeCounts counts;
  {
    py::gil_scoped_release release;
    counts = file.count_codes(index);
  }
  return py::make_tuple(counts.minus, counts.zero, counts.plus);
}

// The memory of `info`, which must be contiguous bytes.
std::span<const std::uint8_t> bytes_of(const py::buffer_info& info, const char* who) {
  if (info.ndim != 1 || info.itemsize != 1 || (info.size > 1 && info.strides[0] != 1))
    throw py::value_error(std::string(who) + ": expected contiguous bytes in one dimension");
  return {static_cast<const std::uint8_t*>(info.ptr), static_cast<std::size_t>(info.size)};
}

std::uint64_t xxh64(const py::buffer& data) {
  const py::buffer_info info = data.request();
  const std::span<const std::uint8_t> bytes = bytes_of(info, "xxh64");
  py::gil_scoped_release release;
  return format::xxh64(bytes);
}

// (count, end, fault, at, marks as the bytes of u64) of format::walk_gguf_strings.
py::tuple gguf_strings(const py::buffer& data, std::uint64_t offset, std::uint64_t count,
                       std::uint64_t max_bytes, std::uint64_t first, std::uint64_t stride) {
  const py::buffer_info info = data.request();
  const std::span<const std::uint8_t> bytes = bytes_of(info, "gguf_strings");
  if (stride == 0) throw py::value_error("gguf_strings: expected a stride above 0, got 0");
  format::GgufStrings walked;
  {
    py::gil_scoped_release release;
    walked = format::walk_gguf_strings(bytes, offset, count, max_bytes, first, stride);
  }
  const py::bytes marks(reinterpret_cast<const char*>(walked.marks.data()),
                        walked.marks.size() * sizeof(std::uint64_t));
  return py::make_tuple(walked.count, walked.end, static_cast<std::uint32_t>(walked.fault),
                        walked.at, marks);
}

py::list error_codes() {
  py::list out;
  for (std::size_t i = 0; i < static_cast<std::size_t>(format::ErrorCode::kCount); ++i) {
    out.append(format::error_code_name(static_cast<format::ErrorCode>(i)));
  }
  return out;
}

}  // namespace

void bind_format(py::module_& m) {
  bind_error(m);
  bind_tensor(m);
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<format::SglbitntFile>(m, "SglbitntFile", py::buffer_protocol())
      .def(py::init<const std::string&, bool>(), py::arg("path"), py::arg("check_codes") = true,
           Unlocked())
      .def_property_readonly(
          "config_json",
          [](const format::SglbitntFile& file) { return std::string(file.config()); })
      .def_property_readonly("tensors", &tensors_of)
      .def("check_in_features", &format::SglbitntFile::check_in_features, py::arg("index"),
           py::arg("in_features"), Unlocked())
      .def_property_readonly("version", &format::SglbitntFile::version)
      .def("check_sum", &format::SglbitntFile::check_sum, py::arg("index"), Unlocked())
      .def("check_data", &format::SglbitntFile::check_data, py::arg("index"), Unlocked())
      .def("release", &format::SglbitntFile::release, py::arg("index"), Unlocked())
      .def("check_length", &format::SglbitntFile::check_length)
      .def("code_counts", &code_counts, py::arg("index"))
      .def_buffer(&buffer_of);
  m.def("format_error_codes", &error_codes);
  m.def("xxh64", &xxh64, py::arg("data"));
  m.def("gguf_strings", &gguf_strings, py::arg("data"), py::arg("offset"), py::arg("count"),
        py::arg("max_bytes"), py::arg("first"), py::arg("stride"));
}
