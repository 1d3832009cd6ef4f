"""Were these master weights trained to be ternary? A statistic that says so, and a measurement.

Zeros, kurtosis and the distance to ternary do not tell: masters trained for b1.58 are bell-shaped
like any (docs/guide/training.md has the figures). What training leaves is a pile-up at the rounding
threshold |w| = absmean / 2, where weights flip to and fro. A smooth density is locally straight: in
ordinary weights a narrow window around the threshold holds as much as the two halves beside it, an
excess of 1, whatever the distribution. The measurement runs the model with its masters rounded and
unrounded: a model trained for b1.58 is the better for rounding. It must not know files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops.convert.verify.plain_forward import PlainOracle
from bitnet_ops.nn.packing import absmean_scale

WINDOW = 0.05  # half width of the window around the threshold, in units of the absmean
MIN_EXCESS = 1.02  # of the pooled statistic
MIN_SIGMA = 4.0  # standard errors above 1
_CHUNK = 1 << 22
_BF16_STEP = 2.0**-8  # bf16 values lie 2^-8 to 2^-7 of their size apart


@dataclass(frozen=True)
class TensorStatistics:
    """One projection's masters; shares of its weights, `scale` is the absmean."""

    name: str
    weights: int
    scale: float
    zero_share: float  # that ternarise to 0
    kurtosis: float  # 3 for a normal distribution
    distance: float  # |W - ternary(W)|^2 / |W|^2
    near: int  # weights within WINDOW of the threshold
    beside: int  # weights in the two halves beside that window, together as wide

    @property
    def excess(self) -> float:
        return self.near / max(self.beside, 1)


def measure_tensor(name: str, masters: Tensor) -> TensorStatistics:
    """The statistics of one matrix, in pieces; bf16 and fp16 values are spread over their step.

    Without the spreading the coarse grid of bf16 would put a few per cent more or fewer values into
    a window, by where its edges fall.
    """
    scale = float(absmean_scale(masters))
    generator = torch.Generator().manual_seed(0)
    step = 0.0 if masters.dtype == torch.float32 else _BF16_STEP
    near = beside = zeros = 0
    square = fourth = error = 0.0
    for piece in masters.detach().reshape(-1).split(_CHUNK):
        u = piece.abs().double() / scale
        ternary = u.round().clamp(max=1)
        zeros += int((ternary == 0).sum())
        square += float(u.square().sum())
        fourth += float(u.pow(4).sum())
        error += float((u - ternary).square().sum())
        if step:
            u *= 1 + step * (torch.rand(u.shape, generator=generator, dtype=u.dtype) - 0.5)
        distance = (u - 0.5).abs()
        near += int((distance < WINDOW).sum())
        beside += int(((distance >= WINDOW) & (distance < 2 * WINDOW)).sum())
    count = masters.numel()
    square = max(square, 1e-300)
    return TensorStatistics(
        name, count, scale, zeros / count, count * fourth / square**2, error / square, near, beside
    )


@dataclass
class MastersStatistics:
    """All projections of a model; `excess` pools them, which weighs each by its size."""

    tensors: list[TensorStatistics] = field(default_factory=list)

    @property
    def excess(self) -> float:
        return sum(t.near for t in self.tensors) / max(self._beside, 1)

    @property
    def standard_error(self) -> float:
        """Of the excess, if weights were drawn independently."""
        near = max(sum(t.near for t in self.tensors), 1)
        return self.excess * math.sqrt(1 / near + 1 / max(self._beside, 1))

    @property
    def _beside(self) -> int:
        return sum(t.beside for t in self.tensors)

    @property
    def trained(self) -> bool:
        """Whether the pile-up at the threshold is there; without it nothing speaks for training."""
        above = self.excess - 1
        return above >= MIN_EXCESS - 1 and above >= MIN_SIGMA * self.standard_error

    def mean(self, field_name: str) -> float:
        """The mean of a field of the tensors, weighed by their size."""
        total = sum(t.weights for t in self.tensors)
        return sum(getattr(t, field_name) * t.weights for t in self.tensors) / max(total, 1)

    def line(self) -> str:
        """The statistics in one sentence."""
        return (
            f"excess at the threshold {self.excess:.3f} +- {self.standard_error:.3f} (1 in "
            f"ordinary weights; at least {MIN_EXCESS} and {MIN_SIGMA:g} errors above 1 asked for), "
            f"{100 * self.mean('zero_share'):.1f} % zeros, kurtosis {self.mean('kurtosis'):.2f}, "
            f"distance to ternary {self.mean('distance'):.3f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, every tensor included."""
        rows = [{**dataclasses.asdict(t), "excess": t.excess} for t in self.tensors]
        means = {key: self.mean(key) for key in ("zero_share", "kurtosis", "distance")}
        return {
            "excess": self.excess,
            "standard_error": self.standard_error,
            "trained": self.trained,
            **means,
            "tensors": rows,
        }


# The measurement ----------------------------------------------------------------------------------


class UnroundedOracle(PlainOracle):
    """The plain forward on masters as they are: no ternary rounding."""

    name = "plain fp32 forward, masters unrounded"

    def projection(self, weight_name: str) -> tuple[Tensor, float | Tensor]:
        return self._read(weight_name).float(), 1.0


@dataclass(frozen=True)
class TextMeasurement:
    """Losses on a text, nats per token: masters rounded to ternary, and unrounded."""

    tokens: int
    loss_ternary: float
    loss_unrounded: float

    @property
    def trained(self) -> bool:
        """A model that was trained through the rounding is no worse for it."""
        return self.loss_ternary <= self.loss_unrounded

    def line(self) -> str:
        return (
            f"loss on the text ({self.tokens} tokens): {self.loss_ternary:.4f} nats per token "
            f"rounded to ternary, {self.loss_unrounded:.4f} unrounded"
        )


def measure_text(
    ternary: PlainOracle, unrounded: PlainOracle, sequences: list[list[int]]
) -> TextMeasurement:
    """Both losses on `sequences` of token ids."""
    losses = [_loss(oracle.logits(sequences), sequences) for oracle in (ternary, unrounded)]
    return TextMeasurement(sum(map(len, sequences)), *losses)


def _loss(logits: Iterable[Tensor], sequences: list[list[int]]) -> float:
    total, count = 0.0, 0
    for rows, ids in zip(logits, sequences, strict=True):
        total += float(F.cross_entropy(rows[:-1], torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return total / max(count, 1)
