// How an op's function is given to torch. Each file of ops/ registers its own at its end; the
// schemas are those of the catalogue, ops.cpp. torch's own TORCH_BOX is not used: it wraps every
// tensor in a reference count, copies the results' handles, and leaks every string.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/namespace.h"
#include "ops/tensor.h"
#include "runtime/float_state.h"

namespace bitnet::ops {

// `int[]?` of a schema, where none says as little as an empty list does. `int[] x=[]` is not
// enough: a module that torch compiled for C++ (AOTInductor) passes none for an empty list.
struct OptionalInts : std::vector<int64_t> {};

// An argument as torch passes it, taken over from it.
template <class T>
struct Argument {
  static T take(StableIValue value) { return torch::stable::detail::to<T>(value); }
};
template <>
struct Argument<Tensor> {
  static Tensor take(StableIValue value) {
    return Tensor(torch::stable::detail::to<AtenTensorHandle>(value));
  }
};
template <>
struct Argument<std::vector<Tensor>> {
  static std::vector<Tensor> take(StableIValue value) {
    return of(torch::stable::detail::to<std::vector<AtenTensorHandle>>(value));
  }
  static std::vector<Tensor> of(const std::vector<AtenTensorHandle>& handles) {
    return std::vector<Tensor>(handles.begin(), handles.end());
  }
};
template <>
struct Argument<std::optional<Tensor>> {
  static std::optional<Tensor> take(StableIValue value) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    return handle.has_value() ? std::optional<Tensor>(std::in_place, *handle) : std::nullopt;
  }
};
template <>
struct Argument<std::optional<std::vector<Tensor>>> {
  static std::optional<std::vector<Tensor>> take(StableIValue value) {
    const auto given =
        torch::stable::detail::to<std::optional<std::vector<AtenTensorHandle>>>(value);
    if (!given.has_value()) return std::nullopt;
    return Argument<std::vector<Tensor>>::of(*given);
  }
};
template <>
struct Argument<OptionalInts> {
  static OptionalInts take(StableIValue value) {
    return {torch::stable::detail::to<std::optional<std::vector<int64_t>>>(value).value_or(
        std::vector<int64_t>())};
  }
};
template <>
struct Argument<std::string> {
  static std::string take(StableIValue value) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* characters = nullptr;
    const bool told = torch_string_length(handle, &length) == AOTI_TORCH_SUCCESS &&
                      torch_string_c_str(handle, &characters) == AOTI_TORCH_SUCCESS;
    std::string text = told ? std::string(characters, length) : std::string();
    if (torch_delete_string(handle) != AOTI_TORCH_SUCCESS || !told)
      throw std::runtime_error("bitnet: torch failed to tell a string");
    return text;
  }
};

// Results become torch's, in their places from `stack` on.
inline void put(StableIValue* stack, Tensor result) {
  *stack = torch::stable::detail::from(result.release());
}
template <class... T>
void put(StableIValue* stack, std::tuple<T...> results) {
  std::apply([&](T&... result) { (put(stack++, std::move(result)), ...); }, results);
}

// An op as torch calls it: in the default floating-point environment, whatever the caller's is.
template <auto kFunction>
struct Op;
template <class Result, class... Args, Result (*kFunction)(Args...)>
struct Op<kFunction> {
  static void boxed(StableIValue* stack, uint64_t arguments, uint64_t /*results*/) {
    if (arguments != sizeof...(Args))
      throw std::runtime_error("bitnet: expected an op to be called with " +
                               std::to_string(sizeof...(Args)) +
                               " arguments, as it was built, got " + std::to_string(arguments));
    const DefaultFloatState floats;
    call(stack, std::index_sequence_for<Args...>{});
  }

 private:
  template <size_t... kPlaces>
  static void call(StableIValue* stack, std::index_sequence<kPlaces...>) {
    // braces: taken in the order of the schema
    std::tuple<std::remove_cvref_t<Args>...> taken{
        Argument<std::remove_cvref_t<Args>>::take(stack[kPlaces])...};
    if constexpr (std::is_void_v<Result>) {
      kFunction(static_cast<Args&&>(std::get<kPlaces>(taken))...);
    } else {
      put(stack, kFunction(static_cast<Args&&>(std::get<kPlaces>(taken))...));
    }
  }
};

}  // namespace bitnet::ops

// Within BITNET_LIBRARY_IMPL(m): the function `name` is torch.ops.bitnet.<name>.
#define BITNET_OP(m, name) m.impl(#name, &::bitnet::ops::Op<&::bitnet::ops::name>::boxed)
