// Operators with the schemas of ours that do nothing but give up their arguments and make their
// results: what torch itself takes for a call. Built and run by bench_calls.py; no part of the
// package.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <vector>
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif

namespace {

void give_up(StableIValue tensor) {
  aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(tensor));
}

// kinds: T a tensor, t an optional tensor, l a list of integers, s a string, f a number.
void give_up_all(const char* kinds, StableIValue* stack) {
  for (; *kinds != '\0'; ++kinds, ++stack) {
    auto* box = torch::stable::detail::to<StableIValue*>(*stack);
    if (*kinds == 'T') give_up(*stack);
    if (*kinds == 't' && box != nullptr) give_up(*box);
    if (*kinds == 't' && box != nullptr) delete box;
    if (*kinds == 'l') static_cast<void>(torch::stable::detail::to<std::vector<int64_t>>(*stack));
    if (*kinds == 's') torch_delete_string(torch::stable::detail::to<StringHandle>(*stack));
  }
}

StableIValue result(int64_t elements, int32_t dtype) {
  const int64_t sizes[] = {1, elements}, strides[] = {elements, 1};
  AtenTensorHandle handle = nullptr;
  aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle);
  return torch::stable::detail::from(handle);
}

void gemv(StableIValue* stack, uint64_t, uint64_t) {
  give_up_all("TTttl", stack);
  stack[0] = result(128, aoti_torch_dtype_float32());
}
void linear(StableIValue* stack, uint64_t, uint64_t) {
  give_up_all("TTTtls", stack);
  stack[0] = result(128, aoti_torch_dtype_float32());
}
void quantize_activations(StableIValue* stack, uint64_t, uint64_t) {
  give_up_all("Tsf", stack);
  stack[0] = result(256, aoti_torch_dtype_int8());
  stack[1] = result(1, aoti_torch_dtype_float32());
}
void rms_norm(StableIValue* stack, uint64_t, uint64_t) {
  give_up_all("TTf", stack);
  stack[0] = result(256, aoti_torch_dtype_float32());
}

}  // namespace

STABLE_TORCH_LIBRARY(bitnet_floor, m) {
  m.def(
      "gemv(Tensor weight, Tensor x, Tensor? x_scale=None, Tensor? weight_scale=None, "
      "int[] shape=[]) -> Tensor");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, int[] shape=[], str "
      "activation_format=\"int8\") -> Tensor");
  m.def(
      "quantize_activations(Tensor x, str activation_format=\"int8\", int group_size=128) -> "
      "(Tensor q, Tensor scale)");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(bitnet_floor, CPU, m) {
  m.impl("gemv", &gemv);
  m.impl("linear", &linear);
  m.impl("quantize_activations", &quantize_activations);
  m.impl("rms_norm", &rms_norm);
}

// For a run under valgrind: instructions are counted between the two, and written out as `name`.
extern "C" __attribute__((visibility("default"))) void count_start() {
#if defined(CALLGRIND_START_INSTRUMENTATION)
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
#endif
}
extern "C" __attribute__((visibility("default"))) void count_stop(const char* name) {
#if defined(CALLGRIND_START_INSTRUMENTATION)
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
#else
  (void)name;
#endif
}
