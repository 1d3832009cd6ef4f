"""The mathematics of ternary weights in plain torch: absmean ternarisation and scale conventions.

In this project a weight is `code * scale`: the scale multiplies, is float32, and there is one per
original projection. Checkpoints differ (one family stores the reciprocal); what they hold is
brought to that convention here. No layout, no files, no compiled code.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Lower bound of the mean magnitude, as in transformers: an all-zero matrix stays finite.
MIN_SCALE = 1e-5

# transformers' quantization_config.linear_class -> whether the stored weight_scale is a reciprocal.
STORES_RECIPROCAL = {"bitlinear": True, "autobitlinear": False}


def absmean_scale(weight: Tensor) -> Tensor:
    """The scale of master weights: `max(mean(|W|), 1e-5)`, float32 [1].

    Args:
        weight: float32, bfloat16 or float16 of any shape, at least one element.
    Raises:
        ValueError: no elements, or a mean that is not finite.
    Source: arXiv 2402.17764; transformers WeightQuant. The mean is accumulated in float64, so that
        it does not depend on the order of summation.
    """
    if weight.numel() == 0:
        raise ValueError(f"absmean_scale: expected a non-empty weight, got {tuple(weight.shape)}")
    mean = weight.detach().abs().sum(dtype=torch.float64) / weight.numel()
    if not torch.isfinite(mean):
        raise ValueError(
            f"absmean_scale: expected finite weights, got a mean magnitude of {mean.item()}"
        )
    return mean.clamp(min=MIN_SCALE).to(torch.float32).reshape(1)


def ternarize(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round master weights to -1, 0, 1: `codes = clamp(round_half_even(W * (1 / scale)), -1, 1)`.

    Args:
        weight: float32, bfloat16 or float16, any shape.
        scale: float32 [1]; None computes `absmean_scale(weight)`.
    Returns:
        (codes int8 of weight's shape, scale float32 [1]).
    Raises:
        ValueError: as `absmean_scale`.
    """
    if scale is None:
        scale = absmean_scale(weight)
    inv_scale = 1.0 / scale
    codes = (weight.detach().to(torch.float32) * inv_scale).round().clamp(-1, 1)
    return codes.to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights that codes and scale stand for: `codes * scale`, float32.

    Args:
        codes: int8 [N, K] of -1, 0, 1.
        scale: float32 [1], or [N] for one scale per row.
    """
    return codes.to(torch.float32) * scale.reshape(-1, 1)


def multiplying_scale(weight_scale: Tensor, linear_class: str) -> Tensor:
    """Bring a checkpoint's weight_scale to the multiplying convention, float32 [1].

    "bitlinear" (transformers' default) stores 1 / absmean and divides; "autobitlinear" stores the
    absmean and multiplies. A reciprocal is inverted in float32, whatever dtype it was stored in.

    Args:
        weight_scale: one element of any float dtype.
        linear_class: "bitlinear" or "autobitlinear".
    Raises:
        ValueError: another class, more than one element, a value that is not finite and positive.
    """
    if linear_class not in STORES_RECIPROCAL:
        known = " or ".join(map(repr, STORES_RECIPROCAL))
        raise ValueError(f"multiplying_scale: expected linear_class {known}, got {linear_class!r}")
    if weight_scale.numel() != 1:
        raise ValueError(
            "multiplying_scale: expected a weight_scale of one element, got shape "
            f"{tuple(weight_scale.shape)}"
        )
    scale = weight_scale.detach().to(torch.float32).reshape(1)
    if STORES_RECIPROCAL[linear_class]:
        scale = 1.0 / scale
    if not (torch.isfinite(scale).item() and scale.item() > 0):
        raise ValueError(
            "multiplying_scale: expected a finite weight_scale above zero, got "
            f"{weight_scale.item()}"
        )
    return scale
