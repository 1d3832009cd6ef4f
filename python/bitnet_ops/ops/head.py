"""The ops on output heads and embeddings, dense or quantised. It must not know ternary weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops.ops._operator import operator

__all__ = [
    "quantize_head",
    "lm_head",
    "embedding",
]


def _rows(weight: Tensor, shape: Sequence[int] | None) -> int:
    if shape:
        return shape[0]
    return weight.shape[0] * 16 if weight.dtype == torch.uint8 else weight.shape[0]


@operator
def quantize_head(weight: Tensor, format: str, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise the rows of an output head (or a tied embedding) for `lm_head` and `embedding`.

    "int8": one scale a row, `scale = absmax / 127`, `code = round_half_even(w * (127 / absmax))`.
    "int4": one scale per `group_size` features of a row, `scale = bfloat16(absmax / 7)`, `code =
    clamp(round_half_even(w * (1 / scale)), -8, 7)`, in tiles of 16 rows
    (docs/reference/layouts.md); rows and features are padded with code 0. absmax is at least 1e-30.

    Args:
        weight: F [V, K], finite, 1 <= K <= 65536.
        format: "int8" or "int4".
        group_size: of int4, 64 or 128; int8 has one group, the row.
    Returns:
        (packed, scale): int8 [V, K] and float32 [V], or, with G groups of group_size features,
        uint8 [ceil(V / 16), G * group_size / 8, 64] and bfloat16 [ceil(V / 16), G, 16].
    Raises:
        RuntimeError: another dtype, rank, format or group size, a NaN or an infinity.
    Source: absmax quantisation as in arXiv 2208.07339 (rows) and GGUF's Q4_0 (groups).
    """
    n, k = weight.shape
    if format == "int8":
        return (
            weight.new_empty((n, k), dtype=torch.int8),
            weight.new_empty((n,), dtype=torch.float32),
        )
    tiles, groups = (n + 15) // 16, (k + group_size - 1) // group_size
    return (
        weight.new_empty((tiles, groups * group_size // 8, 64), dtype=torch.uint8),
        weight.new_empty((tiles, groups, 16), dtype=torch.bfloat16),
    )


@operator
def lm_head(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Logits of an output head: `x @ weight.T`, the weight dense, int8 or int4.

    A dense head sums in float32. For int8 and int4 a token becomes 16-bit integers `w = round(x *
    32512 / absmax)` with `x_scale = absmax / 32512`, and integer sums are exact. int8:
    `float32(sum) * (scale * x_scale)`. int4: from 0, `acc = fma(float32(sum of a group), its scale,
    acc)`, groups ascending; then `acc * x_scale`. A token with a NaN or an infinity has NaN as
    every logit of an int8 or int4 head.

    Args:
        x: F [..., K].
        weight: F [V, K], or what `quantize_head` returned; contiguous. The embedding matrix where
            the head is tied.
        scale: what `quantize_head` returned beside an int8 or int4 weight, else None.
        shape: (V, K) of the weight. An int4 one does not record it: without it all its padded rows
            are taken, and any x that fills as many groups. A ternary one needs it.
    Returns:
        float32 [..., V].
    Raises:
        RuntimeError: a wrong dtype or shape, a K other than the shape's, a scale that
            does not belong to the weight.
    Source: transformers BitNetForCausalLM.
    """
    return x.new_empty([*x.shape[:-1], _rows(weight, shape)], dtype=torch.float32)


@operator
def embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Rows of an embedding matrix stored like a head: the weight itself, or `code * scale`.

    Args:
        ids: int64 [...], from 0 to V - 1.
        weight, scale, shape: as for `lm_head`; of an int4 weight without a shape the padded
            features are given.
    Returns:
        float32 [..., K].
    Raises:
        RuntimeError: a wrong dtype or shape, an id out of range.
    Source: torch.nn.functional.embedding.
    """
    width = weight.shape[1] * 8 if weight.dtype == torch.uint8 else weight.shape[1]
    return ids.new_empty([*ids.shape, shape[1] if shape else width], dtype=torch.float32)
