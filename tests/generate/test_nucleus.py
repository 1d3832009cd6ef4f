"""top_p without top_k keeps what a plain sort keeps, ties included, and in less time.

The oracle is a float64 softmax: what it keeps and drops beyond float32's rounding, the op must. A
stable sort of the op's own unfiltered probabilities, held against that softmax, says the rest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bitnet_ops.generate.sampling import Sampler, SamplingParams, filtered

LARGE = 128_256


# The error of a float32 exp and division, relative: a few times 2^-24.
ROUNDING = 1e-6


def unfiltered(logits: Tensor) -> Tensor:
    """All probabilities [V]."""
    p, ids = filtered(logits, SamplingParams(temperature=1.0))
    return torch.zeros(len(logits)).index_put((ids,), p)


def sums_before(probabilities: Tensor) -> np.ndarray:
    """[V], by id: the sum of the more probable, of equals of the lower ids."""
    p = probabilities.double().numpy()
    order = np.argsort(-p, kind="stable")
    before = np.empty_like(p)
    before[order] = np.cumsum(p[order]) - p[order]
    return before


def certain(softmax: Tensor, top_p: float) -> tuple[set[int], set[int]]:
    """(ids that stay, ids that go) whichever way the float32 probabilities are rounded."""
    p = softmax.numpy()
    ascending = np.sort(p)
    above = np.append(np.cumsum(ascending[::-1])[::-1], 0.0)  # the sum from a place on
    least = above[np.searchsorted(ascending, p * (1 + 2 * ROUNDING), side="right")]
    most = above[np.searchsorted(ascending, p * (1 - 2 * ROUNDING), side="left")] - p
    stay, go = most < top_p - ROUNDING, least > top_p + ROUNDING
    return set(np.flatnonzero(stay).tolist()), set(np.flatnonzero(go).tolist())


def logits_of(kind: str, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g)
    if kind == "peaked":
        x[torch.randint(0, n, (min(n, 20),), generator=g)] += 12
    kinds = {
        "normal": x,
        "wide": x * 5,
        "peaked": x,
        "nearly flat": x * 1e-3,
        "flat": torch.zeros(n),
        "ties": x.mul(2).round(),
        "rare ties": x.mul(200).round() / 100,
        "impossible": torch.where(x > 0.5, x, float("-inf")),
        "certain": torch.zeros(n).index_fill(0, torch.tensor([n // 2]), 200.0),
    }
    return kinds[kind]


@pytest.mark.parametrize("n", [1, 2, 7, 500, 5000, 40_000])
@pytest.mark.parametrize(
    "kind",
    ["normal", "wide", "peaked", "nearly flat", "flat", "ties", "rare ties", "impossible"],
)
def test_it_keeps_what_a_sort_keeps(kind: str, n: int) -> None:
    for seed in range(3):
        logits = logits_of(kind, n, seed)
        if not bool(torch.isfinite(logits).any()):
            continue
        softmax, own = torch.softmax((logits - logits.max()).double(), -1), unfiltered(logits)
        assert torch.allclose(own.double(), softmax, rtol=ROUNDING, atol=1e-37)
        before = sums_before(own)
        for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9):
            p, ids = filtered(logits, SamplingParams(temperature=1.0, top_p=top_p))
            kept = set(ids.tolist())
            stay, go = certain(softmax, top_p)
            assert stay <= kept and not go & kept, (seed, top_p)
            # Zeros behind a sum that never reaches top_p cannot be drawn. Two orders of summing
            # 40,000 float64 differ by 1e-12; nothing else may.
            expected = set(np.flatnonzero((before < top_p) & (own.numpy() > 0)).tolist())
            assert len(expected ^ kept) <= (1 if top_p > 0.99 else 0), (seed, top_p)
            assert ids.tolist() == sorted(ids.tolist())
            chosen = torch.softmax(logits - logits.max(), -1)[ids]
            torch.testing.assert_close(p, chosen / chosen.sum(), rtol=1e-6, atol=0)


def test_of_equals_the_lower_ids_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 1.0, 3.0, 1.0])
    p3 = float(torch.softmax(logits, -1)[1])
    p1 = float(torch.softmax(logits, -1)[0])
    for count, expected in ((1, {1, 4, 0}), (2, {1, 4, 0, 2}), (3, {1, 4, 0, 2, 3})):
        top_p = 2 * p3 + (count - 0.5) * p1
        _, ids = filtered(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert set(ids.tolist()) == expected


def test_a_certain_token_is_alone() -> None:
    logits = logits_of("certain", 1001, 0)
    assert filtered(logits, SamplingParams(temperature=1.0, top_p=0.99))[1].tolist() == [500]
    assert Sampler(SamplingParams(temperature=1.0, top_p=0.99, seed=1))(logits) == 500


def test_draws_follow_the_distribution_of_the_sort() -> None:
    """20000 draws against the probabilities of the kept tokens, by the chi-squared statistic."""
    logits = torch.tensor([0.05, 0.3, 0.25, 0.2, 0.1, 0.1]).log()
    sampler, n = Sampler(SamplingParams(temperature=1.0, top_p=0.8, seed=3)), 20000
    counts = np.bincount([sampler(logits) for _ in range(n)], minlength=6)
    expected = np.array([0, 0.3, 0.25, 0.2, 0.1, 0]) / 0.85 * n
    assert counts[0] == counts[5] == 0
    observed, expected = counts[1:5], expected[1:5]
    assert float(((observed - expected) ** 2 / expected).sum()) < 16.27  # P = 0.001


def fastest(call: Callable[[], object], rounds: int = 40) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.quantiles(times, n=10)[0]


@pytest.mark.parametrize("kind", ["normal", "peaked"])
def test_it_takes_a_fraction_of_a_sort(kind: str) -> None:
    logits = logits_of(kind, LARGE, 0)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    ours = fastest(lambda: filtered(logits, params))
    assert ours < 0.5 * fastest(lambda: logits.sort(descending=True, stable=True))
