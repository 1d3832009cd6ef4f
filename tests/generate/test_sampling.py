"""Sampling: ranges, neutral defaults, each filter's definition, and the distribution of draws.

Oracles: transformers' logits processors where they define the same filter; else arithmetic by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as processors

from bitnet_ops.generate.sampling import Sampler, SamplingError, SamplingParams, filtered


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def kept(probabilities: list[float], **options: Any) -> set[int]:
    options = {"temperature": 1.0, **options}
    _, ids = filtered(logits_of(probabilities), SamplingParams(**options))
    return set(ids.tolist())


def random_logits(seed: int, n: int = 500) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 3


def test_defaults_are_neutral_and_greedy() -> None:
    logits = random_logits(0)
    sampler = Sampler(SamplingParams(), seen=[int(logits.argmax())])
    assert sampler.seed is None
    assert [sampler(logits) for _ in range(3)] == [int(logits.argmax())] * 3


def test_neutral_filters_keep_the_softmax_bit_for_bit_in_order() -> None:
    logits = random_logits(1)
    p, ids = filtered(logits, SamplingParams(temperature=1.0))
    assert ids.tolist() == list(range(500))
    torch.testing.assert_close(p, torch.softmax(logits, -1), rtol=1e-6, atol=0)


def test_greedy_takes_the_first_of_equals() -> None:
    assert Sampler(SamplingParams())(torch.tensor([1.0, 5.0, 5.0, 2.0])) == 1


@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_top_k(k: int) -> None:
    assert kept([0.1, 0.4, 0.3, 0.2], top_k=k) == {0: set(), 1: {1}, 2: {1, 2}, 3: {1, 2, 3}}.get(
        k, {0, 1, 2, 3}
    )


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, {1}),
        (0.35, {1}),
        (0.45, {1, 2}),
        (0.75, {1, 2, 3}),
        (0.95, {0, 1, 2, 3}),
        (1.0, set(range(4))),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, expected: set[int]) -> None:
    assert kept([0.1, 0.4, 0.3, 0.2], top_p=top_p) == expected


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, {0, 1, 2, 3}), (0.3, {1, 2, 3}), (1.0, {1})])
def test_min_p_is_relative_to_the_best(min_p: float, expected: set[int]) -> None:
    assert kept([0.1, 0.4, 0.3, 0.2], min_p=min_p) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
        {"temperature": 2.5, "top_p": 0.95},
    ],
    ids=str,
)
def test_filters_agree_with_transformers(options: dict[str, Any]) -> None:
    options = {"temperature": 1.0, **options}
    for seed in range(5):
        logits = random_logits(seed)
        theirs = processors.TemperatureLogitsWarper(options["temperature"])(None, logits[None])
        if "top_k" in options:
            theirs = processors.TopKLogitsWarper(options["top_k"])(None, theirs)
        if "top_p" in options:
            theirs = processors.TopPLogitsWarper(options["top_p"])(None, theirs)
        if "min_p" in options:
            theirs = processors.MinPLogitsWarper(options["min_p"])(None, theirs)
        expected = torch.softmax(theirs[0], -1)
        p, ids = filtered(logits, SamplingParams(**options))
        ours = torch.zeros(500).index_put((ids,), p)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)


def test_repetition_penalty_agrees_with_transformers() -> None:
    seen = [3, 7, 7, 100]
    logits = random_logits(2)
    theirs = processors.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), logits[None])[0]
    before = logits.clone()
    token = Sampler(SamplingParams(repetition_penalty=1.7), seen)(logits)
    assert token == int(theirs.argmax())
    assert torch.equal(logits, before), "the caller's logits were changed"


def test_repetition_penalty_counts_generated_tokens() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    logits = torch.tensor([3.0, 2.0, 1.9])
    assert [sampler(logits) for _ in range(3)] == [0, 1, 2]


def test_draws_follow_the_distribution() -> None:
    """20000 draws of a filtered distribution against it, by the chi-squared statistic."""
    logits = logits_of([0.05, 0.4, 0.25, 0.2, 0.1])
    params = SamplingParams(temperature=0.8, top_k=4, seed=11)
    p, ids = filtered(logits, params)
    sampler, n = Sampler(params), 20000
    counts = torch.zeros(5).index_add(
        0, torch.tensor([sampler(logits) for _ in range(n)]), torch.ones(n)
    )
    assert counts[0] == 0
    observed, expected = counts[ids], p * n
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    assert chi2 < 16.27  # 3 degrees of freedom, P = 0.001


def test_seed_repeats_and_none_does_not() -> None:
    logits = random_logits(3)

    def draws(seed: int | None) -> tuple[list[int], int | None]:
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed))
        return [sampler(logits) for _ in range(20)], sampler.seed

    assert draws(5) == draws(5)
    assert draws(5)[0] != draws(6)[0]
    first, seed = draws(None)
    second, other = draws(None)
    assert first != second and seed != other
    assert draws(seed) == (first, seed), "the seed chosen repeats the run"


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = random_logits(4)
    p, _ = filtered(logits, SamplingParams(temperature=temperature))
    assert bool(torch.isfinite(p).all()) and math.isclose(float(p.sum()), 1, rel_tol=1e-5)
    if temperature < 1e-5:
        params = SamplingParams(temperature=temperature, seed=0)
        assert Sampler(params)(logits) == int(logits.argmax())


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1))
    assert {sampler(logits) for _ in range(200)} == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_are_an_error(bad: float, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature))
    with pytest.raises(SamplingError, match="expected finite logits"):
        sampler(torch.tensor([0.0, bad, 1.0]))
    with pytest.raises(SamplingError, match="maximum of -inf"):
        sampler(torch.full((3,), float("-inf")))


BAD = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 1.0),
    ("top_k", 2**31),
    ("top_k", None),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", float("nan")),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", float("nan")),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 1e400),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("seed", "7"),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", None),
    ("presence_penalty", float("nan")),
    ("presence_penalty", "1"),
    ("logit_bias", [(1, 2.0)]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"7": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {7: 100.5}),
    ("logit_bias", {7: float("inf")}),
    ("logit_bias", {7: None}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("logprobs", 1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_ranges(name: str, value: object) -> None:
    with pytest.raises(SamplingError, match=f"sampling: expected {name} .*, got"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.1, 10),
)
def test_any_options_give_a_token(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty, seed)
    assert 0 <= Sampler(params, [1, 2])(random_logits(seed % 100, 50)) < 50
