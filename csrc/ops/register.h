// How an op's function is given to torch. Each file of ops/ registers its own at its end; the
// schemas are those of the catalogue, ops.cpp.
#pragma once

#include <utility>

#include "ops/namespace.h"
#include "ops/torch_views.h"
#include "runtime/float_state.h"

namespace bitnet::ops {

// An op as torch calls it: in the default floating-point environment, whatever the caller's is.
template <auto kFunction>
struct Op;
template <class Result, class... Args, Result (*kFunction)(Args...)>
struct Op<kFunction> {
  static Result call(Args... args) {
    const bitnet::DefaultFloatState floats;
    return kFunction(std::forward<Args>(args)...);
  }
};

}  // namespace bitnet::ops

// Within BITNET_LIBRARY_IMPL(m): the function `name` is torch.ops.bitnet.<name>.
#define BITNET_OP(m, name) m.impl(#name, TORCH_BOX(&::bitnet::ops::Op<&::bitnet::ops::name>::call))
