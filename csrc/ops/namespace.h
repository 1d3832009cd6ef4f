// The namespace under which the operators are registered: `bitnet`, unless the build says another,
// so that a second copy of the library can live in the same process (scripts/build_hf_kernel).
#pragma once
#include <torch/csrc/stable/library.h>

#if !defined(BITNET_OPS_NAMESPACE)
#define BITNET_OPS_NAMESPACE bitnet
#endif

// One macro more, for torch's make a string of their argument before it is expanded.
#define BITNET_EXPANDED_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define BITNET_EXPANDED_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define BITNET_LIBRARY(m) BITNET_EXPANDED_LIBRARY(BITNET_OPS_NAMESPACE, m)
#define BITNET_LIBRARY_IMPL(m) BITNET_EXPANDED_LIBRARY_IMPL(BITNET_OPS_NAMESPACE, CPU, m)
