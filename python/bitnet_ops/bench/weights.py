"""Ternary matrices of a benchmark in each weight format: canonical, and the kernels' private ones.

Cold memory is carved into matrices without converting it: in the canonical and the 2-bit layout
every byte of four fields 0, 1, 2 is valid, and so is every byte up to 242 in the base-3 layout.
It must not know timing, nor what multiplies by the matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.bench.cases import require_slots
from bitnet_ops.bench.names import CANONICAL as CANONICAL
from bitnet_ops.bench.names import FORMATS as FORMATS
from bitnet_ops.bench.names import PRIVATE as PRIVATE
from bitnet_ops.bench.names import USUAL as USUAL
from bitnet_ops.bench.workspace import Workspace


def row_bytes(k: int) -> int:
    """Bytes of a packed row of K weights in the canonical layout."""
    return 32 * -(-k // 128)


@dataclass(frozen=True)
class Matrix:
    """N x K weights in some format; `extra` is what an op needs to know beside the tensor."""

    data: Tensor
    n: int
    k: int
    format: str

    @property
    def extra(self) -> dict[str, Any]:
        return {} if self.format == CANONICAL else {"out_features": self.n}

    def canonical(self) -> Tensor:
        """uint8 [N, R] in the canonical layout."""
        if self.format == CANONICAL:
            return self.data
        return ops.unprepack(self.data, self.n, self.k)


def private_shape(n: int, k: int, weight_format: str) -> tuple[int, ...]:
    """The shape of the tensor that holds N x K weights; the op's own answer, for this CPU."""
    if weight_format == CANONICAL:
        return (n, row_bytes(k))
    weight = torch.full((n, row_bytes(k)), 0b01010101, dtype=torch.uint8)
    return tuple(ops.prepack(weight, k, weight_format).shape)


def pack_random(
    n: int, k: int, weight_format: str, generator: torch.Generator | None = None
) -> Matrix:
    """A random matrix made the way a model makes it: packed, then converted."""
    codes = torch.randint(-1, 2, (n, k), dtype=torch.int8, generator=generator)
    packed = ops.pack(codes)
    if weight_format != CANONICAL:
        packed = ops.prepack(packed, k, weight_format)
    return Matrix(packed, n, k, weight_format)


def slots(
    ws: Workspace, shapes: list[tuple[int, int]], weight_format: str, *, hot: bool
) -> tuple[list[tuple[Matrix, ...]], int]:
    """Slots of cold memory with one matrix a shape (hot: one slot), and the bytes of a slot."""
    layouts = [private_shape(n, k, weight_format) for n, k in shapes]
    sizes = [math.prod(shape) for shape in layouts]
    found = ws.ternary.slots(sum(sizes))
    require_slots(found, "+".join(f"{n}x{k}" for n, k in shapes), hot)

    def carve(slot: Tensor) -> tuple[Matrix, ...]:
        pieces = slot.split(sizes)
        return tuple(
            Matrix(piece.view(layout), n, k, weight_format)
            for piece, layout, (n, k) in zip(pieces, layouts, shapes, strict=True)
        )

    return [carve(slot) for slot in (found[:1] if hot else found)], sum(sizes)
