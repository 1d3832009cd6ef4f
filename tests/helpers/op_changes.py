"""Ways to spoil an argument of a good call, for the rejections of the specs."""

from __future__ import annotations

from typing import Any

import torch

from op_spec import Change
from op_values import strided

N, K, M = 6, 160, 3  # of the good calls: output and input features, tokens
F64, I32, BOOL, F16, BF16 = torch.float64, torch.int32, torch.bool, torch.float16, torch.bfloat16
F32 = torch.float32
FLOATS_TEXT = "of dtype float32, bfloat16 or float16, got "


def to(name: str, dtype: torch.dtype) -> Change:
    return lambda a: a[name].to(dtype)


def narrow(name: str, dim: int = -1) -> Change:
    """One element less along dim, in memory of its own."""
    return lambda a: a[name].narrow(dim, 0, a[name].shape[dim] - 1).contiguous()


def add_dim(name: str) -> Change:
    return lambda a: a[name][None]


def noncontiguous(name: str) -> Change:
    return lambda a: strided(a[name])


def value(v: Any) -> Change:
    return lambda a: v
