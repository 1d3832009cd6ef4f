"""torch's own int8 linears beside a case: uint8 activations, one int8 matrix, always hot."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from bitnet_ops.bench.cases import Case
from bitnet_ops.bench.harness import Timed

Call = Callable[[], object]


def with_int8(case: Case) -> Case:
    """`case` with both int8 linears of torch as baselines, where it is one ternary product."""
    if case.name not in {"gemv", "gemm", "linear"}:
        return case
    sizes = case.shape["N"], case.shape["K"], case.shape["M"]
    found = {
        "torch_int8_onednn": _lazy(lambda: onednn_linear(*sizes)),
        "torch_int8_fbgemm": _lazy(lambda: _fbgemm_linear(*sizes)),
    }
    return dataclasses.replace(case, baselines=case.baselines | found)


def _lazy(make: Callable[[], Call]) -> Timed:
    """Weights are made and packed when the run is first called, and not while others are timed."""
    made = functools.cache(make)
    return Timed(lambda _: made()(), warm=True)


def onednn_linear(n: int, k: int, m: int) -> Call:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [m, k])
    x = torch.randint(0, 128, (m, k), dtype=torch.uint8)
    scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int64)
    op = torch.ops.onednn.qlinear_pointwise.default
    weights: Any = (packed, scales, zeros, None)
    return lambda: op(x, 0.05, 0, *weights, 1.0, 0, torch.float32, "none", [], "")


def _fbgemm_linear(n: int, k: int, m: int) -> Call:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch is about to move its quantised tensors
            weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
            quantized = torch._make_per_tensor_quantized_tensor(weight, 0.01, 0)
            packed = torch.ops.quantized.linear_prepack(quantized, None)
            x = torch.quantize_per_tensor(torch.randn(m, k), 0.05, 64, torch.quint8)
    finally:
        torch.backends.quantized.engine = before
    op = torch.ops.quantized.linear.default
    return lambda: op(x, packed, 1.0, 0)
