"""What the types of KV caches are called in messages, and where a cast to one saturates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

KV_TYPES_TEXT = "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8"

E4M3, E5M2 = EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# From here on a magnitude would not be rounded to the largest number.
OVERFLOW = {E4M3: 464.0, E5M2: 61440.0}
# What an infinity becomes: E4M3FN has none.
INFINITE = {E4M3: 448.0}
BF16_MIN = 2.0**-55  # what is smaller becomes 0 in a bfloat16 cache


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """F [...] as a cache of that dtype holds it: torch's cast but for what saturates or vanishes.

    There torch's cast makes an infinity (E5M2) or, up to 2.12, NaN (E4M3, of an infinity too).
    """
    if dtype == torch.bfloat16:
        x = torch.where(x.float().abs() < BF16_MIN, torch.zeros_like(x), x)
    cast = x.to(dtype)
    if dtype not in LARGEST:
        return cast
    size, largest = x.float().abs(), torch.tensor(LARGEST[dtype])
    saturated = size >= OVERFLOW[dtype]
    if dtype not in INFINITE:
        saturated &= size != math.inf
    return torch.where(saturated, largest.copysign(x.float()), cast.float()).to(dtype)
