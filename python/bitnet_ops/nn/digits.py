"""Matrices of 27 levels a group as ternary ones: three balanced ternary digits of every weight.

A layer that was not trained ternary must not be rounded to -1, 0, 1. Written as 9 d2 + 3 d1 + d0
with digits in {-1, 0, 1} a weight has 27 levels, and the matrix [N, 3 K] of its digits, side by
side along K, is an ordinary ternary matrix with scales of groups: every kernel, layout and thread
count that there is multiplies it, by the input beside itself three times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.nn.packing import PackedWeight
from bitnet_ops.nn.storage import GROUP_SIZES

DIGITS = 3


def digit_group(in_features: int) -> int:
    """The size of the groups of a matrix with so many columns, which it divides.

    Raises ValueError where no such size does.
    """
    for size in sorted(GROUP_SIZES, reverse=True):
        if in_features % size == 0:
            return size
    sizes = " or ".join(map(str, sorted(GROUP_SIZES)))
    raise ValueError(
        f"digits: expected columns a multiple of {sizes}, got {in_features}; groups of digits "
        "would cross from one digit to the next"
    )


def to_digits(weight: Tensor, group_size: int | None = None, digits: int = DIGITS) -> PackedWeight:
    """The matrix F [N, K] as `digits` ternary digits a weight: canonical rows, N x digits * K.

    Scales float32 [N, digits * K / group_size]: digit i of group g has 3^i times the group's step,
    largest magnitude / ((3^digits - 1) / 2). group_size None: `digit_group`. Raises ValueError for
    a size that does not divide K, or values that are not finite.
    """
    size = digit_group(weight.shape[1]) if group_size is None else group_size
    if size not in GROUP_SIZES or weight.shape[1] % size:
        raise ValueError(
            f"digits: expected group_size one of {', '.join(map(str, GROUP_SIZES))} that divides "
            f"{weight.shape[1]}, got {size}"
        )
    groups = weight.float().unflatten(1, (-1, size))
    largest = groups.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise ValueError("digits: expected finite weights, got a NaN or an infinity")
    step = largest / ((3**digits - 1) // 2)
    level = torch.round(groups / step.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))
    level = level.flatten(1).to(torch.int16)
    codes, scales = [], []
    for i in range(digits):
        digit = torch.remainder(level + 1, 3) - 1
        level = (level - digit) // 3
        codes.append(digit.to(torch.int8))
        scales.append(step * 3**i)
    packed, scale = ops.pack(torch.cat(codes, dim=1)), torch.cat(scales, dim=1).contiguous()
    return PackedWeight(packed, scale, len(weight), digits * weight.shape[1], "canonical", size)


def from_digits(packed: PackedWeight, digits: int = DIGITS) -> Tensor:
    """The matrix float32 [N, K] whose digits `packed` holds."""
    return packed.dequantize().unflatten(1, (digits, -1)).sum(1)


def repeated(x: Tensor, digits: int = DIGITS) -> Tensor:
    """What a matrix of digits multiplies: x F [..., K] beside itself, F [..., digits * K]."""
    return x if digits == 1 else torch.cat([x] * digits, dim=-1)
