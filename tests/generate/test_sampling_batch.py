"""Sampling in batch, penalties, logprobs and the verification of guesses.

Oracles: NumPy by hand, transformers' processors where they define the same, and each request alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as processors

from bitnet_ops import ops
from bitnet_ops.generate.sampling import (
    Sampled,
    Sampler,
    SamplingError,
    SamplingParams,
    filtered,
    sample_rows,
    verify_rows,
)

VOCAB = 60


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


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


# Penalties ----------------------------------------------------------------------------------------


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
        token = sampler(logits)
        # Three roundings of float32 of numbers up to 120 * 5, or the float64 winner itself.
        assert expected[token] >= expected.max() - 600 * 3 * 2.0**-24
        generated.append(token)


def test_repetition_and_bias_are_transformers() -> None:
    seen, bias = [3, 7, 7, 50], {3: 2.5, 8: -4.0, 20: 30.0}
    for seed in range(20):
        logits = random_logits(seed)
        sequence_bias = {(token,): value for token, value in bias.items()}
        theirs = processors.SequenceBiasLogitsProcessor(sequence_bias)(torch.tensor([seen]), logits)
        theirs = processors.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), theirs)
        params = SamplingParams(temperature=1.0, repetition_penalty=1.7, logit_bias=bias, seed=seed)
        sampler = Sampler(params, seen)
        expected = torch.softmax(theirs[0].double(), -1).cumsum(-1)
        uniform = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert sampler(logits[0]) == int(torch.searchsorted(expected, uniform, right=True))


def test_frequency_grows_and_presence_does_not() -> None:
    logits = torch.tensor([3.0, 2.2, 1.3, -9.0])
    by_frequency = Sampler(SamplingParams(frequency_penalty=0.5))
    assert [by_frequency(logits) for _ in range(8)] == [0, 0, 1, 0, 1, 0, 2, 1]
    by_presence = Sampler(SamplingParams(presence_penalty=1.0), seen=[0, 0, 0])
    assert [by_presence(logits) for _ in range(5)] == [0, 1, 0, 0, 0]


def test_more_edits_than_there_was_room_for() -> None:
    """A prompt of every token, and then every token generated."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=2.0)
    sampler, logits = Sampler(params, range(0, VOCAB, 2)), torch.linspace(1.0, 2.0, VOCAB)
    generated = list[int]()
    for _ in range(2 * VOCAB):
        expected = by_hand(logits, params, range(0, VOCAB, 2), generated)
        generated.append(sampler(logits))
        assert expected[generated[-1]] >= expected.max() - 1e-6
    assert set(generated) == set(range(VOCAB))


# Batches ------------------------------------------------------------------------------------------


def test_a_batch_gives_what_each_row_gives_alone() -> None:
    together, alone, backwards = samplers(), samplers(), samplers()
    for step in range(25):
        logits = random_logits(step, len(MIXED))
        batch = sample_rows(together, logits)
        assert batch == [sample_rows([s], logits[i : i + 1])[0] for i, s in enumerate(alone)]
        assert batch == sample_rows(backwards[::-1], logits.flip(0))[::-1]


def test_a_bad_row_ends_alone() -> None:
    logits = random_logits(0, 5)
    logits[1, 5], logits[3] = torch.nan, -torch.inf
    params = [SamplingParams(temperature=1.0, seed=2, logit_bias={i * 15: 1.0}) for i in range(5)]
    good, found = samplers(params), sample_rows(samplers(params), logits)
    assert [type(s.error) for s in found] == [type(None), SamplingError, type(None), SamplingError,
                                              SamplingError]  # fmt: skip
    assert "expected finite logits, got a NaN" in str(found[1].error)
    assert "expected finite logits, got a maximum of -inf" in str(found[3].error)
    assert "expected token ids below 60 in logit_bias and among the tokens seen, got 60" in str(
        found[4].error
    )
    assert [found[i].token for i in (1, 3, 4)] == [-1, -1, -1]
    for i in (0, 2):
        assert found[i] == sample_rows([good[i]], logits[i : i + 1])[0]


def test_a_failed_row_has_used_nothing() -> None:
    params = SamplingParams(temperature=1.3, frequency_penalty=0.5, seed=4)
    steady, shaken = Sampler(params), Sampler(params)
    for step in range(20):
        logits = random_logits(step)
        (bad,) = sample_rows([shaken], torch.full_like(logits, torch.nan))
        assert bad.error is not None
        assert sample_rows([shaken], logits) == sample_rows([steady], logits)


def test_no_rows() -> None:
    assert sample_rows([], torch.zeros(0, VOCAB)) == []


def test_rows_of_bfloat16_and_of_any_strides() -> None:
    logits = random_logits(5, 2 * len(MIXED)).bfloat16()
    expected = sample_rows(samplers(), logits[::2].float().contiguous())
    assert sample_rows(samplers(), logits[::2]) == expected


def test_the_draw_is_the_generators_next_number_on_the_cumulated_sum() -> None:
    """As it was when rows were drawn one by one: a seed gives what it gave."""
    options: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.05},
                                     {"top_k": 30, "top_p": 0.8, "min_p": 0.01}]  # fmt: skip
    for seed, chosen in enumerate(options):
        params = SamplingParams(temperature=0.9, seed=seed, **chosen)
        sampler, generator = Sampler(params), torch.Generator().manual_seed(seed)
        for step in range(40):
            logits = random_logits(step)[0]
            p, ids = filtered(logits, params)
            reached = p.double().cumsum(-1)
            point = torch.rand((), dtype=torch.float64, generator=generator) * reached[-1]
            at = int(torch.searchsorted(reached, point, right=True))
            assert sampler(logits) == int(ids[at])


# logprobs -----------------------------------------------------------------------------------------


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


def test_more_logprobs_than_tokens() -> None:
    (found,) = sample_rows([Sampler(SamplingParams(logprobs=20))], torch.tensor([[0.0, 1.0, 0.5]]))
    assert [token for token, _ in found.top_logprobs] == [1, 2, 0]


# Guesses ------------------------------------------------------------------------------------------


def logits_after(tokens: Sequence[int], vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    """A model: the last two tokens seed its logits."""
    seed = sum(31**i * (t + 1) for i, t in enumerate(tokens[-2:]))
    return random_logits(seed, vocab=vocab, scale=scale)[0]


def run_plainly(params: SamplingParams, prompt: list[int], count: int) -> list[Sampled]:
    sampler, tokens, found = Sampler(params, prompt), list(prompt), list[Sampled]()
    for _ in range(count):
        found += sample_rows([sampler], logits_after(tokens)[None])
        tokens.append(found[-1].token)
    return found


def run_with_guesses(
    all_params: Sequence[SamplingParams], prompts: Sequence[list[int]], count: int, g: Any
) -> list[list[Sampled]]:
    """Guesses that are right, nearly right or random, of several requests in one call."""
    plain = [
        run_plainly(p, prompt, count + 8) for p, prompt in zip(all_params, prompts, strict=True)
    ]
    owners = [Sampler(p, prompt) for p, prompt in zip(all_params, prompts, strict=True)]
    found: list[list[Sampled]] = [[] for _ in owners]
    while any(len(f) < count for f in found):
        drafts = []
        for f, truth in zip(found, plain, strict=True):
            at = min(len(f), count)
            draft = [s.token for s in truth[at : at + int(g.integers(0, 6))]]
            drafts.append([t if g.random() < 0.8 else int(g.integers(VOCAB)) for t in draft])
        rows = [
            logits_after([*prompt, *(s.token for s in f), *draft[:i]])
            for prompt, f, draft in zip(prompts, found, drafts, strict=True)
            for i in range(len(draft) + 1)
        ]
        for f, new, draft in zip(
            found, verify_rows(owners, drafts, torch.stack(rows)), drafts, strict=True
        ):
            assert 1 <= len(new) <= len(draft) + 1
            assert [s.token for s in new[:-1]] == draft[: len(new) - 1]
            assert len(new) == len(draft) + 1 or new[-1].token != draft[len(new) - 1]
            f += new
    return [f[:count] for f in found]


@pytest.mark.parametrize("seed", range(6))
def test_guesses_change_nothing(seed: int) -> None:
    """Tokens, logprobs, counts and draws are those of a run without guesses."""
    prompts = [prompt or [6] for prompt in PROMPTS]
    found = run_with_guesses(MIXED, prompts, 40, np.random.default_rng(seed))
    for params, prompt, tokens in zip(MIXED, prompts, found, strict=True):
        assert tokens == run_plainly(params, prompt, 40)


def chi_squared(counts: Tensor, p: Tensor) -> float:
    expected = p * counts.sum()
    return float((((counts - expected) ** 2) / expected)[p > 0].sum())


def test_a_guess_is_accepted_with_its_probability_and_the_rest_follows_the_rest() -> None:
    """20000 verifications of a likely, an unlikely and an impossible guess, against p."""
    logits = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1]).log()
    params = SamplingParams(temperature=0.8, top_k=4, seed=11)
    probabilities, ids = filtered(logits, params)
    p = torch.zeros(5, dtype=torch.float64).index_put((ids,), probabilities.double())
    for guess in (1, 4, 0):
        owner, n = Sampler(params), 20000
        counts = torch.zeros(5, dtype=torch.float64)
        for _ in range(n):
            (found,) = verify_rows([owner], [[guess]], logits.expand(2, 5))
            counts[found[0].token] += 1
        assert counts[0] == 0
        assert chi_squared(counts, p) < 16.27  # 3 degrees of freedom, P = 0.001
        accepted = float(counts[guess]) / n
        assert abs(accepted - float(p[guess])) <= 3.5 * float(
            (p[guess] * (1 - p[guess]) / n).sqrt()
        )
        others = p.index_fill(0, torch.tensor([guess]), 0.0)
        rejected = counts.index_fill(0, torch.tensor([guess]), 0.0)
        assert chi_squared(rejected, others / others.sum()) < 16.27


def test_speculation_keeps_the_distribution_of_pairs() -> None:
    """Two tokens a time, guessed by a fixed rule, against the product of their distributions."""
    vocab, n = 4, 20000
    params = SamplingParams(temperature=1.0, min_p=0.02, seed=5)
    rows = [logits_after([t], vocab, 1.0) for t in range(vocab)]
    start = logits_after([9], vocab, 1.0)
    expected = torch.zeros(vocab, vocab, dtype=torch.float64)
    for first, of_first in zip(*(x.tolist() for x in filtered(start, params)[::-1]), strict=True):
        p, ids = filtered(rows[first], params)
        expected[first, ids] = of_first * p.double()
    owner, counts = Sampler(params), torch.zeros(vocab, vocab, dtype=torch.float64)
    for i in range(n):
        guess = i % vocab
        (found,) = verify_rows([owner], [[guess]], torch.stack([start, rows[guess]]))
        if len(found) == 1:
            found += sample_rows([owner], rows[found[0].token][None])
        counts[found[0].token, found[1].token] += 1
    assert chi_squared(counts, expected) < 37.70  # at most 15 degrees of freedom, P = 0.001


def test_an_error_behind_an_accepted_guess() -> None:
    logits = random_logits(3, 3)
    best = int(logits[0].argmax())
    logits[1] = torch.nan
    (found,) = verify_rows([Sampler(SamplingParams())], [[best, 5]], logits)
    assert found[0] == Sampled(best) and len(found) == 2
    assert found[1].error is not None and "got a NaN" in str(found[1].error)
    (found,) = verify_rows([Sampler(SamplingParams())], [[(best + 1) % VOCAB, 5]], logits)
    assert found == [Sampled(best)], "a row behind a wrong guess does not matter"


def test_rows_that_do_not_fit_the_guesses() -> None:
    for drafts, rows in (([[1]], 1), ([[1], []], 2), ([], 1)):
        with pytest.raises(ValueError, match="a row of logits for each draft and one more, got"):
            verify_rows([Sampler(SamplingParams())], drafts, random_logits(0, rows))


def test_a_batch_is_one_call_of_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    for name in ("sample_tokens", "top_logprobs"):
        real = getattr(ops, name)

        def counted(*args: Any, name: str = name, real: Any = real) -> Any:
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(ops, name, counted)
    sample_rows(samplers(), random_logits(0, len(MIXED)))
    assert calls == {"sample_tokens": 1, "top_logprobs": 1}
