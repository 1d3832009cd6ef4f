"""The table of rotary embedding: the inverse frequencies of a model, and its attention factor.

Made once when a model is loaded, and the only place where a config's rope_scaling becomes numbers:
ops, the step, the composed path and the plain forward read it. Operations and roundings are those
of transformers 5 `modeling_rope_utils.py`, but for the power: libm takes it in double precision, so
that the table is the same on every CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig, RopeScaling


class Rotary(NamedTuple):
    """inv_freq: f32 [rotary_dim / 2]. attention_factor: multiplies cosines and sines."""

    inv_freq: Tensor
    attention_factor: float


def rotary(config: ModelConfig) -> Rotary:
    """The table of a model."""
    scaling, theta = config.rope_scaling, config.rope_theta
    powers = _powers(theta, config.rotary_dim)
    if scaling is None:
        return Rotary(1.0 / powers, 1.0)
    if scaling.kind == "linear":
        return Rotary(1.0 / powers / scaling.factor, 1.0)
    if scaling.kind == "llama3":
        return Rotary(_llama3(1.0 / powers, scaling), 1.0)
    if scaling.kind == "yarn":
        return Rotary(_yarn(powers, theta, scaling), _yarn_attention(scaling))
    extension = torch.tensor(scaling.extension, dtype=torch.float32, device="cpu")
    return Rotary(1.0 / (extension * powers), _longrope_attention(scaling))


def local_rotary(config: ModelConfig) -> Tensor | None:
    """The frequencies of the layers with a base of their own, whose attention factor is 1."""
    theta = config.scalings.local_theta
    return None if theta is None else 1.0 / _powers(theta, config.rotary_dim)


def _powers(theta: float, head_dim: int) -> Tensor:
    """theta^(2 i / head_dim), its exponent rounded to float32 first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    powers = [math.pow(theta, exponent) for exponent in exponents.tolist()]
    return torch.tensor(powers, dtype=torch.float32, device="cpu")


def _llama3(inv_freq: Tensor, s: RopeScaling) -> Tensor:
    """Long wavelengths divided by factor, short ones kept, those between on a line."""
    wavelength = 2 * math.pi / inv_freq
    longest, shortest = s.original / s.low_freq_factor, s.original / s.high_freq_factor
    stretched = torch.where(wavelength > longest, inv_freq / s.factor, inv_freq)
    width = s.high_freq_factor - s.low_freq_factor
    smooth = (s.original / wavelength - s.low_freq_factor) / width
    between = (1 - smooth) * stretched / s.factor + smooth * stretched
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, between, stretched)


def _yarn(powers: Tensor, theta: float, s: RopeScaling) -> Tensor:
    """Pairs that turn often are kept, those that turn seldom slowed by factor, a ramp between."""
    dim = 2 * len(powers)

    def pair_of(rotations: float) -> float:
        turns = math.log(s.original / (rotations * 2 * math.pi))
        return (dim * turns) / (2 * math.log(theta))

    low, high = pair_of(s.beta_fast), pair_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # there as here, against a division by zero
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (s.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention(s: RopeScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0

    if s.mscale and s.mscale_all_dim:
        return magnitude(s.mscale) / magnitude(s.mscale_all_dim)
    return magnitude(1)


def _longrope_attention(s: RopeScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    if s.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(s.factor) / math.log(s.original))
