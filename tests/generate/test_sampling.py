"""Sampling: ranges, neutral defaults, options and penalties, batches, logprobs, seeds.

Oracles: transformers' logits processors where they define the same; else arithmetic by hand, and
each request alone. What the op keeps and draws at any size is tests/ops/test_sample_ops.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as processors

from bitnet_ops import ops
from bitnet_ops.generate.sampling import (
    Sampler,
    SamplingError,
    SamplingParams,
    draws_of,
    sample_rows,
)
from ops_sampling import noisy

VOCAB = 60


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def choose(sampler: Sampler, logits: Tensor) -> int:
    """The next token of one sampler from logits [V]."""
    (sampled,) = sample_rows([sampler], logits[None])
    assert sampled.error is None
    return sampled.token


# Options ----------------------------------------------------------------------------------------


BAD = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("temperature", 10**400),
    ("temperature", torch.tensor(1.0)),
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
    ("repetition_penalty", 1e39),  # infinite in float32
    ("repetition_penalty", 1e-46),  # 0 in float32
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", True),
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
    ("logit_bias", {2**31: 1.0}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("logprobs", 1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_ranges_are_checked(name: str, value: object) -> None:
    with pytest.raises(SamplingError, match=f"sampling: expected {name} .*, got"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_a_later_change_of_the_callers_passes_no_check() -> None:
    bias: dict[int, float] = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = torch.nan
    assert params.logit_bias == {3: 1.0}


def test_ids_beyond_the_vocabulary_are_known_when_the_request_is_made() -> None:
    params = SamplingParams(logit_bias={3: 1.0, VOCAB: 2.0})
    params.check_vocabulary(VOCAB + 1)
    with pytest.raises(SamplingError, match="logit_bias with token ids below 60, got 60"):
        params.check_vocabulary(VOCAB)


def test_defaults_are_neutral_and_greedy() -> None:
    logits = random_logits(0)[0]
    sampler = Sampler(SamplingParams(), seen=[int(logits.argmax())])
    assert sampler.seed is None
    assert [choose(sampler, logits) for _ in range(3)] == [int(logits.argmax())] * 3
    assert choose(sampler, torch.tensor([1.0, 5.0, 5.0, 2.0])) == 1, "the first of equals"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
        {"temperature": 2.5, "top_p": 0.95},
        {"repetition_penalty": 1.7},
        {"logit_bias": {3: 2.5, 8: -4.0, 20: 30.0}},
        {"logit_bias": {3: 2.5}, "repetition_penalty": 0.6, "top_k": 12, "min_p": 0.01},
    ],
    ids=str,
)
def test_draws_are_those_of_transformers_at_the_generators_next_number(
    options: dict[str, Any],
) -> None:
    """As it was when rows were drawn one by one: a seed gives what it gave."""
    seen = [3, 7, 7, 50]
    for seed in range(4):
        params = SamplingParams(**{"temperature": 1.0, "seed": seed, **options})
        sampler, generator = Sampler(params, seen), torch.Generator().manual_seed(seed)
        tokens = list(seen)
        for step in range(20):
            logits = random_logits(100 * seed + step)
            theirs = logits
            if bias := options.get("logit_bias"):
                biases = {(token,): value for token, value in bias.items()}
                theirs = processors.SequenceBiasLogitsProcessor(biases)(
                    torch.tensor([tokens]), theirs
                )
            theirs = processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(
                torch.tensor([tokens]), theirs
            )
            point = torch.rand((), dtype=torch.float64, generator=generator)
            if params.plain:
                v = noisy(theirs[0].double().numpy(), params.temperature, float(point))
                tokens.append(choose(sampler, logits[0]))
                assert tokens[-1] == v.argmax()
                continue
            theirs = processors.TemperatureLogitsWarper(params.temperature)(None, theirs)
            if params.top_k:
                theirs = processors.TopKLogitsWarper(params.top_k)(None, theirs)
            if params.top_p < 1:
                theirs = processors.TopPLogitsWarper(params.top_p)(None, theirs)
            if params.min_p:
                theirs = processors.MinPLogitsWarper(params.min_p)(None, theirs)
            p = torch.softmax(theirs[0].double(), -1)
            order = p.argsort(descending=True, stable=True) if params.top_k else torch.arange(VOCAB)
            at = torch.searchsorted(p[order].cumsum(-1), point, right=True)
            before = logits.clone()
            tokens.append(choose(sampler, logits[0]))
            assert tokens[-1] == int(order[at])
            assert torch.equal(logits, before), "the caller's logits were changed"


def test_seed_repeats_and_none_does_not() -> None:
    logits = random_logits(3)[0]

    def draws(seed: int | None) -> tuple[list[int], int | None]:
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed))
        return [choose(sampler, logits) for _ in range(20)], sampler.seed

    assert draws(5) == draws(5) and draws(5)[0] != draws(6)[0]
    first, seed = draws(None)
    second, other = draws(None)
    assert first != second and seed != other
    assert draws(seed) == (first, seed), "the seed chosen repeats the run"


def test_draws_follow_the_distribution() -> None:
    """20000 draws of a filtered distribution against it, by the chi-squared statistic."""
    logits = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1]).log()
    sampler, n = Sampler(SamplingParams(temperature=0.8, top_k=4, seed=11)), 20000
    counts = torch.bincount(torch.tensor([choose(sampler, logits) for _ in range(n)]), minlength=5)
    p = torch.softmax(logits[1:].double() / 0.8, -1)
    assert counts[0] == 0
    assert float(((counts[1:] - p * n) ** 2 / (p * n)).sum()) < 16.27  # 3 degrees, P = 0.001


@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.one_of(st.floats(0, 10), st.sampled_from([1e-300, 1e-30, 1e30, 10**300])),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.1, 10),
)
def test_any_options_give_a_token(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty, seed)
    logits = random_logits(seed % 100)[0]
    token = choose(Sampler(params, [1, 2]), logits)
    assert 0 <= token < VOCAB
    if 0 < temperature < 1e-20 and penalty == 1:
        assert token == int(logits.argmax())


def test_draws_of_a_step_are_those_of_its_rounds() -> None:
    plain = [Sampler(SamplingParams(temperature=0.5 + i, seed=i)) for i in range(2)]
    greedy, kept = Sampler(SamplingParams()), Sampler(SamplingParams(temperature=1, top_k=5))
    uniforms = [
        torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(2)
    ]
    assert draws_of([greedy, kept], [1, 2]) is None
    assert [s.largest for s in (*plain, greedy, kept)] == [1, 1, 1, 5]
    for done in range(3):
        at = [draws[done:] for draws in uniforms]
        found = draws_of([plain[0], greedy, plain[1], kept], [1, 0, 18, 2])
        assert found is not None and found.tolist() == [
            [0.5, at[0][0]], [1.5, at[1][0]], [0, 0],
            [1.5, at[1][1]], [0, 0],
            *([1.5, uniform] for uniform in at[1][2:18]),
        ]  # fmt: skip
        for sampler in plain:
            assert sampler.uniform() == found[0 if sampler is plain[0] else 1, 1], "nothing is used"
            sampler.add(3)
    empty = draws_of(plain, [0, 0])
    assert empty is not None and empty.shape == (0, 2)
    filtered = SamplingParams(temperature=1, top_p=0.9), SamplingParams(temperature=1, min_p=0.1)
    assert [Sampler(params).largest for params in filtered] == [0, 0]
    assert Sampler(SamplingParams(temperature=1, logprobs=0)).largest == 0


# Penalties --------------------------------------------------------------------------------------


def by_hand(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """Bias, repetition, frequency, presence: OpenAI's formula after CTRL's."""
    x = logits.double().numpy().copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *generated}:
        x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
    for token, count in Counter(generated).items():
        x[token] -= count * params.frequency_penalty + params.presence_penalty
    return torch.from_numpy(x)


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, seed=3),
    SamplingParams(repetition_penalty=1.5, logprobs=0),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02, seed=8, logprobs=4),
    SamplingParams(frequency_penalty=1.5, presence_penalty=0.5, logprobs=20),
    SamplingParams(temperature=1.0, frequency_penalty=-0.4, logit_bias={3: 5.0, 9: -100}, seed=1),
]
PROMPTS = [[1, 2, 2], [7], [5, 5, 8], [3, 9], [], [4], [0]]


def samplers(params: Sequence[SamplingParams] = MIXED) -> list[Sampler]:
    return [Sampler(p, prompt) for p, prompt in zip(params, PROMPTS, strict=False)]


@given(
    repetition=st.floats(0.2, 5),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=40),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_greedy_tokens_are_those_of_edits_by_hand(
    repetition: float, frequency: float, presence: float, bias: dict[int, float],
    prompt: list[int], seed: int,
) -> None:  # fmt: skip
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence,
        logit_bias=bias,
    )  # fmt: skip
    sampler, generated = Sampler(params, prompt), list[int]()
    for step in range(30):
        logits = random_logits(seed + step)[0]
        expected = by_hand(logits, params, prompt, generated)
        token = choose(sampler, logits)
        # Three roundings of float32 of numbers up to 120 * 5, or the float64 winner itself.
        assert expected[token] >= expected.max() - 600 * 3 * 2.0**-24
        generated.append(token)


def test_frequency_grows_and_presence_does_not() -> None:
    logits = torch.tensor([3.0, 2.2, 1.3, -9.0])
    by_frequency = Sampler(SamplingParams(frequency_penalty=0.5))
    assert [choose(by_frequency, logits) for _ in range(8)] == [0, 0, 1, 0, 1, 0, 2, 1]
    by_presence = Sampler(SamplingParams(presence_penalty=1.0), seen=[0, 0, 0])
    assert [choose(by_presence, logits) for _ in range(5)] == [0, 1, 0, 0, 0]


def test_more_edits_than_there_was_room_for() -> None:
    """A prompt of every token, and then every token generated."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=2.0)
    sampler, logits = Sampler(params, range(0, VOCAB, 2)), torch.linspace(1.0, 2.0, VOCAB)
    generated = list[int]()
    for _ in range(2 * VOCAB):
        expected = by_hand(logits, params, range(0, VOCAB, 2), generated)
        generated.append(choose(sampler, logits))
        assert expected[generated[-1]] >= expected.max() - 1e-6
    assert set(generated) == set(range(VOCAB))


# Batches ----------------------------------------------------------------------------------------


def test_a_batch_gives_what_each_row_gives_alone() -> None:
    together, alone, backwards = samplers(), samplers(), samplers()
    for step in range(25):
        logits = random_logits(step, len(MIXED))
        batch = sample_rows(together, logits)
        assert batch == [sample_rows([s], logits[i : i + 1])[0] for i, s in enumerate(alone)]
        assert batch == sample_rows(backwards[::-1], logits.flip(0))[::-1]


def test_a_bad_row_ends_alone_and_has_used_nothing() -> None:
    params = [SamplingParams(temperature=1.3, seed=2, frequency_penalty=0.5) for _ in range(4)]
    steady, shaken = samplers(params), samplers(params)
    for step in range(10):
        logits = random_logits(step, 4)
        broken = logits.clone()
        broken[1, 5], broken[3] = torch.nan, -torch.inf
        found = sample_rows(shaken, broken)
        assert "expected finite logits, got a NaN" in str(found[1].error)
        assert "expected finite logits, got a maximum of -inf" in str(found[3].error)
        assert all(isinstance(found[i].error, SamplingError) for i in (1, 3))
        expected = sample_rows(steady, logits)
        assert [found[i] for i in (0, 2)] == [expected[i] for i in (0, 2)]
        assert [sample_rows([shaken[i]], logits[i : i + 1])[0] for i in (1, 3)] == [
            expected[i] for i in (1, 3)
        ]
    (infinite,) = sample_rows(samplers()[:1], torch.full((1, 3), torch.inf))
    assert "a maximum of inf" in str(infinite.error)


def test_rows_of_bfloat16_of_any_strides_and_none_at_all() -> None:
    logits = random_logits(5, 2 * len(MIXED)).bfloat16()
    expected = sample_rows(samplers(), logits[::2].float().contiguous())
    assert sample_rows(samplers(), logits[::2]) == expected
    assert sample_rows([], torch.zeros(0, VOCAB)) == []


def test_logprobs_are_of_the_models_own_logits() -> None:
    for step in range(5):
        logits = random_logits(step, len(MIXED))
        truth = torch.log_softmax(logits.double(), -1)
        for row, (params, found) in enumerate(
            zip(MIXED, sample_rows(samplers(), logits), strict=True)
        ):
            if params.logprobs is None:
                assert found.logprob is None and found.top_logprobs == ()
                continue
            assert found.logprob == pytest.approx(float(truth[row, found.token]), abs=1e-5)
            best = truth[row].argsort(descending=True, stable=True)[: params.logprobs].tolist()
            assert [token for token, _ in found.top_logprobs] == best
            for token, logprob in found.top_logprobs:
                assert logprob == pytest.approx(float(truth[row, token]), abs=1e-5)
    (few,) = sample_rows([Sampler(SamplingParams(logprobs=20))], torch.tensor([[0.0, 1.0, 0.5]]))
    assert [token for token, _ in few.top_logprobs] == [1, 2, 0], "more than there are tokens"


def test_a_batch_is_one_call_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], ops.sample_tokens
    monkeypatch.setattr(ops, "sample_tokens", lambda *a: calls.append(a) or real(*a))
    sample_rows(samplers(), random_logits(0, len(MIXED)))
    assert len(calls) == 1
