"""Random values the samples of the ops are made of: codes, packed weights, activations, heads.

Every value comes from the generator that is passed in. The layouts of files are written out here,
sharing no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.nn.storage import CPU_SPECIFIC, KV_TYPES

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (torch.float32, torch.bfloat16)  # of what squared ReLU does not overflow
KV_DTYPES = tuple(getattr(torch, name) for name in KV_TYPES)
SCALED_KV_DTYPES = tuple(getattr(torch, t.name) for t in KV_TYPES.values() if t.has_scales)
CACHE_DTYPES = tuple(dtype for dtype in KV_DTYPES if dtype not in SCALED_KV_DTYPES)
FORMATS = CPU_SPECIFIC
HEAD_FORMATS = (("int8", 128), ("int4", 64), ("int4", 128))

Arguments = tuple[Any, ...]
Built = Iterator[tuple[str, Callable[[torch.Generator], Arguments]]]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_codes(rng: torch.Generator, n: int, k: int) -> Tensor:
    return torch.randint(-1, 2, (n, k), generator=rng, dtype=torch.int8)


def pack_codes(codes: Tensor) -> Tensor:
    """The canonical layout, written bit by bit: shares no code with the package."""
    n, k = codes.shape
    blocks = -(-k // 128)
    packed = torch.full((n, blocks * 32), 0x55, dtype=torch.int32)
    for column in range(k):
        block, index = divmod(column, 128)
        field, byte = divmod(index, 32)
        shift = 6 - 2 * field
        # The byte starts with code 1 in every field; w moves its own field by w.
        packed[:, block * 32 + byte] += codes[:, column].to(torch.int32) << shift
    return packed.to(torch.uint8)


def random_packed(rng: torch.Generator, n: int, k: int) -> Tensor:
    return pack_codes(random_codes(rng, n, k))


def activations(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values with a mean that is not zero: a forgotten or doubled correction shows."""
    return (torch.randn(shape, generator=rng) * 1.5 + 0.75).to(dtype)


def int8_values(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=rng, dtype=torch.int8)


def positive(rng: torch.Generator, *shape: int) -> Tensor:
    """Scales that are not 1: an omitted or repeated one shows."""
    return torch.rand(shape, generator=rng) * 1.5 + 0.25


def gain(rng: torch.Generator, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(k, generator=rng) + 0.5).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same values, last dimension with stride 2."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def transposed(x: Tensor) -> Tensor:
    """The same values, stored with the first and last dimension exchanged."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def quantized_head(
    rng: torch.Generator, v: int, k: int, form: str, group: int
) -> tuple[Tensor, Tensor]:
    """Random codes and scales in the layout of FORMAT.md; padding holds code 0 (8 in storage)."""
    if form == "int8":
        return int8_values(rng, v, k), positive(rng, v) * 0.01
    tiles, groups = -(-v // 16), -(-k // group)
    codes = torch.full((tiles * 16, groups * group), 8, dtype=torch.int32)
    codes[:v, :k] = torch.randint(0, 16, (v, k), generator=rng, dtype=torch.int32)
    packed = torch.zeros(tiles, groups * group // 8, 64, dtype=torch.int32)
    for row in range(tiles * 16):
        for j in range(4):
            byte = codes[row, j::8] + 16 * codes[row, 4 + j :: 8]
            packed[row // 16, :, 4 * (row % 16) + j] = byte
    scale = (positive(rng, tiles, groups, 16) * 0.01).to(torch.bfloat16)
    return packed.to(torch.uint8), scale


def frequencies(head_dim: int, theta: float = 10000.0) -> Tensor:
    """inv_freq float32 [head_dim / 2] of a plain rotary embedding."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return (theta**-exponents).to(torch.float32)
