"""Numbers from samples: percentiles, paired ratios.

Ratios are taken within a pair, since a busy machine slows both of it. It must not know what was
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median, 10th and 90th percentile of `count` samples, in the samples' unit."""

    median: float
    p10: float
    p90: float
    count: int

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        return Summary(self.median * factor, self.p10 * factor, self.p90 * factor, self.count)


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1) of at least one sample, linear between neighbours."""
    if not samples or not 0 <= q <= 1:
        raise ValueError(
            f"percentile: expected samples and 0 <= q <= 1, got {len(samples)} and {q}"
        )
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(samples: Sequence[float]) -> Summary:
    """Median, p10 and p90; medians because a neighbour's time slice is an outlier, not a fact."""
    return Summary(
        percentile(samples, 0.5), percentile(samples, 0.1), percentile(samples, 0.9), len(samples)
    )


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """numerators[r] / denominators[r] of samples taken in the same round r.

    Pairs share the state of the machine (clock, neighbours, where a hypervisor put the cores),
    which changes between rounds by more than the ratio does.
    """
    if len(numerators) != len(denominators):
        raise ValueError(
            f"paired_ratios: expected equally many samples, got {len(numerators)} "
            f"and {len(denominators)}"
        )
    return [n / d for n, d in zip(numerators, denominators, strict=True)]
