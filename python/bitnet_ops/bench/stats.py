"""Numbers from samples: percentiles, and ratios of samples taken in the same round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Summary:
    """Median, 10th and 90th percentile of `count` samples, in the samples' unit."""

    median: float
    p10: float
    p90: float
    count: int

    def to_dict(self, factor: float = 1.0) -> dict[str, float]:
        """Median, p10 and p90 in another unit, of which the samples' has `factor`."""
        return {name: digits(getattr(self, name) * factor) for name in ("median", "p10", "p90")}


def summarize(samples: Sequence[float]) -> Summary:
    """Median, p10 and p90 of at least one sample, linear between neighbours.

    Medians, because a neighbour's time slice is an outlier, not a fact.
    """
    median, p10, p90 = np.percentile(samples, (50, 10, 90)).tolist()
    return Summary(median, p10, p90, len(samples))


def percentile(samples: Sequence[float], rank: float) -> float:
    """The percentile `rank`, 0 to 100, of at least one sample, linear between neighbours."""
    return float(np.percentile(samples, rank))


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """numerators[r] / denominators[r] of samples taken in the same round r.

    Pairs share the state of the machine (clock, neighbours, where a hypervisor put the cores),
    which changes between rounds by more than the ratio does.
    """
    return [n / d for n, d in zip(numerators, denominators, strict=True)]


def digits(value: float) -> float:
    """Five significant digits: more would be noise in a file that people read."""
    return float(f"{value:.5g}")
