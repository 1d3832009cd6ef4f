"""Wrappers of the ops on output heads and embeddings, dense or quantised.

Conventions and errors are those of bitnet_ops.ops, which exports them. It must not know ternary
weights.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from bitnet_ops.ops._grad import refuse_grad as _refuse_grad

_ops = torch.ops.bitnet

_QUANTIZE_HEAD = _ops.quantize_head.default
_LM_HEAD = _ops.lm_head.default
_EMBEDDING = _ops.embedding.default


def quantize_head(weight: Tensor, format: str, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise the rows of an output head (or a tied embedding) for `lm_head` and `embedding`.

    "int8": one scale a row, `scale = absmax / 127`, `code = round_half_even(w * (127 / absmax))`.
    "int4": one scale per `group_size` features of a row, `scale = bfloat16(absmax / 7)`, `code =
    clamp(round_half_even(w * (1 / scale)), -8, 7)`, in tiles of 16 rows (FORMAT.md, "Head formats
    in memory"); rows and features are padded with code 0. absmax is at least 1e-30.

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
    if torch.is_grad_enabled():
        _refuse_grad("quantize_head", weight=weight)
    return cast("tuple[Tensor, Tensor]", _QUANTIZE_HEAD(weight, format, group_size))


def lm_head(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
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
        out_features: V, which an int4 weight does not record; None means its padded rows.
        in_features: K, likewise; None takes any x that fills as many groups.
    Returns:
        float32 [..., V].
    Raises:
        RuntimeError: a wrong dtype or shape, a K other than in_features, a scale that
            does not belong to the weight.
    Source: transformers BitNetForCausalLM.
    """
    if torch.is_grad_enabled():
        _refuse_grad("lm_head", x=x, weight=weight, scale=scale)
    return cast(Tensor, _LM_HEAD(x, weight, scale, out_features, in_features))


def embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    """Rows of an embedding matrix stored like a head: the weight itself, or `code * scale`.

    Args:
        ids: int64 [...], from 0 to V - 1.
        weight, scale: as for `lm_head`.
        out_features: V, which an int4 weight does not record; None means its padded rows.
        in_features: K, likewise; None means the padded features.
    Returns:
        float32 [..., K].
    Raises:
        RuntimeError: a wrong dtype or shape, an id out of range.
    Source: torch.nn.functional.embedding.
    """
    if torch.is_grad_enabled():
        _refuse_grad("embedding", weight=weight, scale=scale)
    return cast(Tensor, _EMBEDDING(ids, weight, scale, out_features, in_features))
