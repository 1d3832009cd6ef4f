"""The LoRA arguments of the whole-model ops: made, read back as plain factors, and spoilt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_spec import Rejections
from op_values import strided

Factors = tuple[Tensor, Tensor, float]  # A [rank, K], B [N, rank], scaling


def lora_arguments(
    g: torch.Generator,
    layers: int,
    shapes: Sequence[tuple[int, int]],
    indices: Sequence[int],
    *,
    ranks: Sequence[int] = (0, 1, 3, 16, 20),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
) -> dict[str, Any]:
    """An adapter of each dtype with ranks drawn from `ranks`; shapes: [N, K] of a layer's seven."""
    table = torch.randint(len(ranks), (len(dtypes), layers, len(shapes)), generator=g)
    drawn = torch.tensor(list(ranks))[table]
    weights = []
    for dtype, of_layers in zip(dtypes, drawn.tolist(), strict=True):
        parts = [torch.empty(0)]
        for of_layer in of_layers:
            for rank, (n, k) in zip(of_layer, shapes, strict=True):
                tiles = torch.zeros(-(-n // 16) * 16, rank)
                tiles[:n] = torch.randn(n, rank, generator=g) / 8
                parts.append(torch.randn(rank, k, generator=g).flatten() / 8)
                parts.append(tiles.view(-(-n // 16), 16, rank).mT.flatten())
        weights.append(torch.cat(parts).to(dtype))
    return {
        "lora_weights": weights,
        "lora_ranks": drawn,
        "lora_scalings": torch.rand(drawn.shape, generator=g),
        "lora_indices": torch.tensor(indices),
    }


def lora_factors(
    a: Any, layer: int, shapes: Sequence[tuple[int, int]]
) -> list[list[Factors | None]]:
    """By adapter and projection what lies beside those of `layer`."""
    found = []
    for i, flat in enumerate(a.lora_weights or ()):
        at, of_layer = 0, []
        for other, ranks in enumerate(a.lora_ranks[i].tolist()):
            for place, (rank, (n, k)) in enumerate(zip(ranks, shapes, strict=True)):
                rows = -(-n // 16) * 16
                first, second = flat[at:].split([rank * k, len(flat) - at - rank * k])
                at += rank * (k + rows)
                if other == layer:
                    tiles = second[: rank * rows].view(rows // 16, rank, 16)
                    b = tiles.mT.reshape(rows, rank)[:n].contiguous()
                    scaling = float(a.lora_scalings[i, layer, place])
                    of_layer.append((first.view(rank, k), b, scaling) if rank else None)
        found.append(of_layer)
    return found


def with_side_paths(
    o: Any, a: Any, factors: list[list[Factors | None]], place: int, x: Tensor, y: Tensor
) -> Tensor:
    """y [B, T, N] of projection `place` with what the sequences' adapters add for x [B, T, K]."""
    rows = []
    for own_x, own_y, adapter in zip(x, y, a.lora_indices.tolist(), strict=True):
        factor = factors[adapter][place] if adapter >= 0 else None
        if factor is not None:
            side = o.lm_head(o.lm_head(own_x, factor[0], None), factor[1], None)
            own_y = (own_y.float() + side * factor[2]).to(y.dtype)
        rows.append(own_y)
    return torch.stack(rows) if rows else y


def _with(**changes: Any) -> dict[str, Any]:
    """Changes to a call that has adapters."""
    return {name: lambda a, v=new: v(a) if callable(v) else v for name, new in changes.items()}


LORA_REJECTIONS: Rejections = [
    (_with(lora_ranks=None), "lora_ranks", "with lora_weights, got none"),
    (_with(lora_weights=None), "lora_ranks", "left out without lora_weights, got a tensor"),
    (_with(lora_indices=None), "lora_indices", "with lora_weights, got none"),
    (_with(lora_ranks=lambda a: a["lora_ranks"].int()), "lora_ranks", "of dtype int64"),
    (_with(lora_ranks=lambda a: a["lora_ranks"][:, :, :6]), "lora_ranks", "of shape [3, 1, 7]"),
    (_with(lora_ranks=lambda a: strided(a["lora_ranks"])), "lora_ranks", "contiguous"),
    (_with(lora_ranks=lambda a: a["lora_ranks"] - 99), "lora_ranks", "from 0 to 65536"),
    (_with(lora_ranks=lambda a: a["lora_ranks"] + 1), "lora_weights", "of shape ["),
    (_with(lora_ranks=lambda a: a["lora_ranks"] + 2**62), "lora_ranks", "from 0 to 65536"),
    (_with(lora_scalings=lambda a: a["lora_scalings"].double()), "lora_scalings", "of dtype float"),
    (_with(lora_scalings=lambda a: a["lora_scalings"][:2]), "lora_scalings", "of shape [3, 1, 7]"),
    (
        _with(lora_weights=lambda a: [w.double() for w in a["lora_weights"]]),
        "lora_weights", "of dtype float32, bfloat16 or float16",
    ),
    (_with(lora_weights=lambda a: a["lora_weights"][:2]), "lora_ranks", "of shape [2, 1, 7]"),
    (
        _with(lora_weights=lambda a: [strided(w) for w in a["lora_weights"]]),
        "lora_weights", "contiguous",
    ),
    (
        _with(lora_weights=lambda a: [w[1:] for w in a["lora_weights"]]),
        "lora_weights", "of shape [",
    ),
    (_with(lora_indices=lambda a: a["lora_indices"] + 3), "lora_indices", "from -1 (none) to 2"),
    (_with(lora_indices=lambda a: a["lora_indices"] - 3), "lora_indices", "from -1 (none) to 2"),
    (_with(lora_indices=lambda a: a["lora_indices"].float()), "lora_indices", "of dtype int64"),
    (_with(lora_indices=lambda a: a["lora_indices"][:1]), "lora_indices", "of shape ["),
]  # fmt: skip
