"""sample_tokens, token_probabilities and top_logprobs: what stays, what is drawn, at any size.

The oracles are NumPy's sorts and sums in float64 over the op's own unfiltered probabilities, whose
values test_ops.py holds against an exact softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitnet_ops import ops
from bounds import assert_equal
from isa_control import ISAS, every_configuration, forced_isa, torch_threads
from ops_sampling import gumbel, noisy, options, uniforms_of

LARGE = 128_256
Floats = npt.NDArray[np.float64]


def logits_of(kind: str, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g)
    heads = x.clone()
    heads[torch.randint(0, n, (max(1, n // 9000),), generator=g)] += 9
    kinds = {
        "normal": x,
        "wide": x * 6,
        "heads": heads,
        "uniform": torch.rand(n, generator=g),
        "nearly flat": x * 1e-3,
        "flat": torch.zeros(n),
        "ties": x.mul(2).round(),
        "rare ties": x.mul(300).round() / 100,
        "few possible": torch.where(x > 2, x, -torch.inf).index_fill(0, torch.tensor([0]), 1.0),
        "signed zeros": torch.where(x > 0, 0.0, -0.0),
        "sorted": (x * 4).sort().values,
        "certain": torch.zeros(n).index_fill(0, torch.tensor([n // 2]), 200.0),
        "heavy tail": (torch.randperm(n, generator=g) + 1).log().mul(-1.1).bfloat16().float(),
    }
    return kinds[kind]


KINDS = [
    "normal", "wide", "heads", "uniform", "nearly flat", "flat", "ties", "rare ties",
    "few possible", "signed zeros", "sorted", "certain", "heavy tail",
]  # fmt: skip


def probabilities(logits: Tensor, temperature: float = 1.0, **filters: Any) -> Floats:
    chosen = options(1, (temperature, filters.get("top_k", 0), filters.get("top_p", 1.0),
                         filters.get("min_p", 0.0)))  # fmt: skip
    return ops.token_probabilities(logits[None], *chosen)[0].double().numpy()


def descending(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.argsort(-values, kind="stable")


def kept_by_sorting(p: Floats, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Of probabilities: the fewest that reach top_p, lower ids first, and at least min_p * max."""
    order = descending(p)
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros(len(p), bool)
    kept[order[(before < top_p) | (top_p == 1)]] = True
    minimum = np.float32(min_p) * np.float32(p.max())
    return kept & (p >= minimum) & (p > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_keeps_what_a_sort_keeps(kind: str) -> None:
    for n in (5, 8192, 8193, LARGE):
        logits = logits_of(kind, n, n)
        order = descending(logits.numpy())
        for k in (1, 2, 50, 1000, n // 3, n - 1, n, n + 1):
            expected = np.zeros(n, bool)
            expected[order[: k or n]] = True
            expected &= probabilities(logits) > 0
            # Probabilities below 1e-38 beside the largest of the few are 0 in both.
            assert np.array_equal(probabilities(logits, top_k=k) > 0, expected), (n, k)


@pytest.mark.parametrize("kind", KINDS)
def test_top_p_and_min_p_keep_what_a_sort_keeps(kind: str) -> None:
    for n in (5, 8192, 8193, LARGE):
        logits = logits_of(kind, n, n)
        p = probabilities(logits)
        for top_p, min_p in ((1e-6, 0.0), (0.3, 0.0), (0.9, 0.0), (0.9, 0.1), (0.97, 1e-4),
                             (1.0, 0.2), (1.0, 1.0), (0.999, 1e-7)):  # fmt: skip
            kept = probabilities(logits, top_p=top_p, min_p=min_p) > 0
            different = int((kept != kept_by_sorting(p, top_p, min_p)).sum())
            # Two orders of summing n float64 differ by n * 2^-53, and so the last one kept.
            assert different <= (1 if top_p > 0.95 else 0), (n, top_p, min_p, different)


def points(p: Floats, order: npt.NDArray[np.int64], uniforms: Floats) -> npt.NDArray[np.int64]:
    reached = np.cumsum(p[order])
    at = np.searchsorted(reached, uniforms * reached[-1], side="right")
    return order[np.minimum(at, len(order) - 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chosen",
    [(1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (1.0, 40, 1.0, 0.0),
     (1.0, 9000, 0.9, 0.01), (1.0, 0, 0.9, 0.1), (1.0, 0, 0.9, 1e-4)],
    ids=str,
)  # fmt: skip
def test_a_draw_falls_where_the_sums_say(
    kind: str, chosen: tuple[float, int, float, float]
) -> None:
    """With uniforms between the probabilities' cumulated sums, clear of their roundings."""
    n, draws = 20_011, 64
    logits = logits_of(kind, n, 1)
    p = ops.token_probabilities(logits[None], *options(1, chosen))[0].double().numpy()
    order = np.flatnonzero(p > 0)
    if chosen[1]:  # by the probabilities before top_p: other roundings have other equals
        thinned = ops.token_probabilities(logits[None], *options(1, (*chosen[:2], 1.0, 0.0)))
        order = descending(thinned[0].numpy())[: len(order)]
    reached = np.cumsum(p[order]) / p.sum()
    g = np.random.default_rng(5)
    picked = g.integers(0, len(order), draws)
    below = np.where(picked > 0, reached[picked - 1], 0.0)
    uniforms = below + (reached[picked] - below) * g.uniform(0.2, 0.8, draws)
    clear = reached[picked] - below > 1e-9  # else two float64 sums may disagree
    tokens = ops.sample_tokens(
        logits.expand(draws, n), *options(draws, chosen), torch.from_numpy(uniforms)
    )
    # p as float32 of every filtered subset is rounded anew: 2^-24 of a sum in either direction
    inner = np.minimum(uniforms - below, reached[picked] - uniforms) > 4 * 2.0**-24
    sure = clear & inner
    assert np.array_equal(tokens.numpy()[sure], order[picked][sure])
    if kind in ("wide", "heads", "certain", "few possible"):
        assert sure.any()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_a_draw(kind: str, uniform: float) -> None:
    logits = logits_of(kind, 20_011, 2)
    at = torch.tensor([uniform], dtype=torch.float64)
    for chosen in ((1.0, 0, 0.8, 0.05), (1.0, 70, 1.0, 0.0), (1.0, 70, 0.8, 0)):
        args = options(1, chosen)
        p = ops.token_probabilities(logits[None], *args)[0].double().numpy()
        order = descending(p) if chosen[1] else np.arange(len(p))
        possible = order[p[order] > 0]
        token = int(ops.sample_tokens(logits[None], *args, at))
        assert p[token] > 0
        if uniform == 0:
            assert token == possible[0]
        elif p[possible[-1]] > 2.0**-40:
            assert token == possible[-1]


def plain_draws(logits: Tensor, temperature: float, uniforms: Tensor) -> npt.NDArray[np.int64]:
    rows = logits.expand(len(uniforms), -1)
    return ops.sample_tokens(
        rows, *options(len(rows), (temperature, 0, 1.0, 0.0)), uniforms
    ).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_draw_has_the_largest_logit_with_its_noise(kind: str) -> None:
    ends = torch.tensor([0.0, 2.0**-53, 2.0**-54, 1 - 2.0**-53], dtype=torch.float64)
    uniforms = torch.cat([ends, uniforms_of(torch.Generator().manual_seed(3), 40)])
    sure = 0
    for n in (1, 2, 17, 1023, 1025, 20_011):
        logits = logits_of(kind, n, n)
        for temperature in (0.01, 0.3, 1.0, 2.0, 1e4):
            tokens = plain_draws(logits, temperature, uniforms)
            for token, uniform in zip(tokens, uniforms.tolist(), strict=True):
                v = noisy(logits.double().numpy(), temperature, uniform)
                best = np.sort(v)[-2:]
                assert v[token] >= best[-1] - 1e-4 * max(1.0, temperature)
                if n == 1 or best[1] - best[0] > 1e-4 * max(1.0, temperature):
                    sure += 1
                    assert token == np.argmax(v), (n, temperature, uniform)
    assert sure > 1000


def surprise(counts: npt.NDArray[np.int64], p: Floats) -> float:
    """Standard deviations by which chi-square exceeds its mean; of rare tokens together."""
    expected = p * counts.sum()
    rare = expected < 10
    counts, expected = (np.append(v[~rare], v[rare].sum()) for v in (counts, expected))
    counts, expected = counts[expected > 1], expected[expected > 1]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - (len(counts) - 1)) / np.sqrt(2 * max(1, len(counts) - 1))


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 2.0])
@pytest.mark.sampled(2)
def test_plain_draws_follow_softmax(temperature: float) -> None:
    draws = 100_000
    of_a_generator = uniforms_of(torch.Generator().manual_seed(7), draws)
    neighbours = torch.arange(draws, dtype=torch.float64) * 2.0**-53
    for logits in (
        torch.tensor([1.0, 0.0, 0.5, -2.0, 1.0]),
        logits_of("heads", 300, 1),  # peaked
        logits_of("uniform", 64, 2),
        torch.tensor([0.0, 9.0]),
    ):
        p = torch.softmax(logits.double() / temperature, 0).numpy()
        for uniforms in (of_a_generator, neighbours, 1 - 2.0**-53 - neighbours):
            tokens = plain_draws(logits, temperature, uniforms)
            assert surprise(np.bincount(tokens, minlength=len(p)), p) < 5
            if len(p) < 10:  # a token says nothing about the next
                pairs = np.bincount(tokens[:-1] * len(p) + tokens[1:], minlength=len(p) ** 2)
                assert surprise(pairs, np.outer(p, p).flatten()) < 5


def test_noise_of_different_ids_is_independent() -> None:
    """Neighbours, and ids that differ by a power of 2: bits of one, and both large at once."""
    keys = np.random.default_rng(1).uniform(size=4000)
    noise = np.stack([gumbel(key, 1 << 12) for key in keys])
    large = noise > -np.log(-np.log(0.9))
    for apart in (1, 2, 3, 64, 1024, 2048):
        both = (large[:, :-apart] & large[:, apart:]).mean()
        assert abs(both - 0.01) < 5 * np.sqrt(0.01 / noise.size), apart
        lag = np.corrcoef(noise[:, :-apart].flatten(), noise[:, apart:].flatten())[0, 1]
        assert abs(lag) < 5 / np.sqrt(noise.size), apart


def test_extreme_temperatures_of_plain_draws() -> None:
    g = torch.Generator().manual_seed(2)
    uniforms = uniforms_of(g, 20_000)
    logits = torch.tensor([0.25, -3.0, 5.0, 4.999, -torch.inf, 1e30, -3e38])
    for temperature in (1e-300, 1e-30, 1e-9):
        assert (plain_draws(logits, temperature, uniforms) == 5).all()
        assert (plain_draws(logits[:5], temperature, uniforms) == 2).all()
    for temperature in (1e30, 1e300):
        tokens = plain_draws(logits[:5], temperature, uniforms)
        even = np.array([0.25, 0.25, 0.25, 0.25, 0.0])
        assert surprise(np.bincount(tokens, minlength=5), even) < 5
        assert tokens.max() < 4
    largest = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    for temperature in (1e-300, 1.0, 1e300):
        assert (plain_draws(largest, temperature, uniforms) == 0).all()


def test_rows_without_a_distribution_stay_alone() -> None:
    logits = logits_of("normal", 300, 0).expand(6, 300).clone()
    logits[1, 7], logits[2, 299], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, :299] = -torch.inf
    for chosen in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1)):
        args = options(6, chosen)
        tokens = ops.sample_tokens(logits, *args, torch.full((6,), 0.4, dtype=torch.float64))
        assert tokens[1:4].tolist() == [-1, -1, -1]
        assert tokens[0] == tokens[5] >= 0 and tokens[4] == 299
        p = ops.token_probabilities(logits, *args)
        assert bool(p[1:4].isnan().all()) and bool(p[[0, 4, 5]].isfinite().all())
    of_tokens, ids, of_ids = ops.top_logprobs(logits, torch.zeros(6, dtype=torch.int64), 3)
    assert bool(of_tokens[1:4].isnan().all()) and bool(of_ids[1:4].isnan().all())
    assert ids[1:4].flatten().tolist() == [-1] * 9
    assert of_ids[4].tolist() == [0.0, -torch.inf, -torch.inf] and ids[4].tolist() == [299, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_row_is_the_same_on_every_isa_and_thread_count(kind: str) -> None:
    rows = torch.stack([logits_of(kind, 20_011, seed) for seed in range(5)])
    filters = (1.0, 0, 0.9, 0.0), (0.8, 40, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 9000, 0.9, 0.01)
    args = options(5, *filters)
    uniforms = uniforms_of(torch.Generator().manual_seed(1), 5)
    with forced_isa("scalar"), torch_threads(1):
        expected = ops.token_probabilities(rows, *args), ops.sample_tokens(rows, *args, uniforms)
    for configuration in every_configuration():
        assert_equal(ops.token_probabilities(rows, *args), expected[0], configuration)
        assert_equal(ops.sample_tokens(rows, *args, uniforms), expected[1], configuration)


FINITE = st.floats(-60, 60, width=32)


@given(
    values=st.lists(st.one_of(FINITE, st.sampled_from([0.0, -0.0, 1.0, -torch.inf])), min_size=1,
                    max_size=80),
    temperature=st.one_of(st.floats(0.05, 20), st.sampled_from([1e-300, 1e-30, 1e30, 1e308])),
    top_k=st.integers(0, 90),
    top_p=st.floats(1e-9, 1),
    min_p=st.floats(0, 1),
    uniform=st.floats(0, 1, exclude_max=True),
    isa=st.sampled_from(ISAS),
)  # fmt: skip
@settings(max_examples=400)
def test_any_options_keep_a_prefix_of_the_order_and_draw_from_it(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float,
    uniform: float, isa: str,
) -> None:  # fmt: skip
    logits = torch.tensor([values], dtype=torch.float32)
    args = options(1, (temperature, top_k, top_p, min_p))
    with forced_isa(isa):
        token = int(ops.sample_tokens(logits, *args, torch.tensor([uniform], dtype=torch.float64)))
        p = ops.token_probabilities(logits, *args)[0].double().numpy()
        thinned = options(1, (temperature, top_k, 1.0, 0.0))
        before = ops.token_probabilities(logits, *thinned)[0].double().numpy()
    if not np.isfinite(max(values)):
        assert token == -1 and np.isnan(p).all()
        return
    assert p[token] > 0 and abs(p.sum() - 1) < 1e-5
    ranked = descending(np.array(values, np.float32))
    k = top_k or len(values)
    assert set(np.flatnonzero(before > 0)) <= set(ranked[:k])
    kept, expected = p > 0, kept_by_sorting(before, top_p, min_p)
    # A sum of float32 roundings away from top_p or from min_p either is right.
    fewer = top_p if top_p == 1 else top_p * (1 - 1e-6)
    unsure = kept_by_sorting(before, fewer, min(min_p * (1 + 1e-6), 1.0)) != (
        kept_by_sorting(before, min(top_p * (1 + 1e-6), 1.0), min_p * (1 - 1e-6))
    )
    assert np.array_equal(kept[~unsure], expected[~unsure])


@given(
    n=st.integers(1, 400), top=st.integers(0, 400), seed=st.integers(0, 2**32 - 1),
    coarse=st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_top_logprobs_are_the_first_of_a_sort(n: int, top: int, seed: int, coarse: bool) -> None:
    logits = torch.randn(2, n, generator=torch.Generator().manual_seed(seed)) * 4
    logits = logits.round() if coarse else logits
    _, ids, logprobs = ops.top_logprobs(logits, torch.tensor([-1, 0]), top := min(top, n))
    for row in range(2):
        assert ids[row].tolist() == descending(logits[row].numpy())[:top].tolist()
    expected = torch.log_softmax(logits.double(), -1).gather(1, ids).float()
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=2e-6)
