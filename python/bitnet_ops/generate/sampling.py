"""Logits to tokens: greedy, temperature, top-k, top-p, min-p, penalties, biases, a seed a request.

Every default is neutral: without options the most probable token is taken. The filters act in the
order of transformers: bias and penalties, temperature, top-k, top-p, min-p, then one draw. The rows
of a batch are one call of `ops.sample_tokens`; what a row gives does not depend on the others.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.generate.logit_edits import LogitEdits


class SamplingError(ValueError):
    """A sampling option outside its range, or logits that no distribution can be made of."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token; every default leaves the model's distribution alone.

    Args:
        temperature: 0 takes the most probable token; above 0 divides the logits.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probabilities reach top_p, in (0, 1]; 1 keeps all.
        min_p: keep tokens at least min_p times as probable as the best, in [0, 1]; 0 keeps all.
        repetition_penalty: above 0; logits of tokens already seen are divided by it where positive
            and multiplied where negative (CTRL, arXiv 1909.05858); 1 changes nothing.
        seed: 0 .. 2^63 - 1 for repeatable draws, None for a fresh one.
        frequency_penalty: -2 .. 2; taken from a token's logit once for every time it was generated.
        presence_penalty: -2 .. 2; taken from the logit of every token that was generated.
        logit_bias: token id -> -100 .. 100, added to its logit before everything else.
        logprobs: None for none; else the chosen token's logarithm of probability is reported, and
            those of so many most probable tokens, 0 .. 20: of what the model says, before biases,
            penalties, temperature and filters.
    The last four are OpenAI's. Raises SamplingError on a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda v: v >= 0, "at least 0")
        _check_number("top_p", self.top_p, lambda v: 0 < v <= 1, "above 0 and at most 1")
        _check_number("min_p", self.min_p, lambda v: 0 <= v <= 1, "from 0 to 1")
        _check_number("repetition_penalty", self.repetition_penalty, lambda v: v > 0, "above 0")
        _check_integer("top_k", self.top_k, 2**31, "an integer at least 0 (0 keeps all tokens)")
        if self.seed is not None:
            _check_integer("seed", self.seed, 2**63, "an integer from 0 to 2^63 - 1, or None")
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), lambda v: -2 <= v <= 2, "from -2 to 2")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 21, "an integer from 0 to 20, or None")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def seeded(self) -> SamplingParams:
        """The same with a seed, a fresh one where there is none and draws need one."""
        if self.greedy or self.seed is not None:
            return self
        return replace(self, seed=int(torch.randint(2**63 - 1, (), generator=_fresh_generator())))


def _check_number(
    name: str, value: object, in_range: Callable[[float], bool], expected: str
) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # compared, not converted: an integer may be too large for a float
        if abs(value) <= sys.float_info.max and in_range(value):
            return
    raise SamplingError(f"sampling: expected {name} {expected}, got {value!r}")


def _check_integer(name: str, value: object, limit: int, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise SamplingError(f"sampling: expected {name} {expected}, got {value!r}")


def _checked_bias(given: object) -> dict[int, float]:
    """A copy, so that a later change of the caller's does not pass by the checks."""
    if not isinstance(given, Mapping):
        raise SamplingError(
            f"sampling: expected logit_bias a mapping of token ids to numbers, got {given!r}"
        )
    for token, bias in given.items():
        _check_integer("logit_bias", token, 2**31, "with token ids that are integers at least 0")
        _check_number("logit_bias", bias, lambda v: -100 <= v <= 100, "of numbers from -100 to 100")
    return dict(given)


@dataclass(frozen=True)
class Sampled:
    """What one row of logits gave: a token or an error.

    `logprob` and `top_logprobs` ((token, logarithm), the most probable first) are there if params
    ask for logprobs.
    """

    token: int = -1
    error: SamplingError | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """What the draws of ONE sequence need: the random generator and the tokens seen so far.

    The nth token takes the generator's nth number, whatever else is in its batch and whether it was
    guessed before: a seed repeats a run.

    Args:
        params: the options.
        seen: ids of the prompt, which the repetition penalty counts as used.
    Attributes: `params`; `seed`, the one given or the one chosen, so that a run can be repeated.
    """

    def __init__(self, params: SamplingParams, seen: Iterable[int] = ()) -> None:
        self.params = params = params.seeded()
        self.edits = LogitEdits(
            params.logit_bias or {},
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            seen,
        )
        self._generator: torch.Generator | None = None
        self._uniforms: deque[float] = deque()  # drawn from the generator and not used yet
        self.seed = params.seed
        if not params.greedy:
            assert self.seed is not None
            self._generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token's id from logits f32 [V], which are left as they are.

        Raises SamplingError if they hold a NaN, or nothing but infinities.
        """
        (sampled,) = sample_rows([self], logits[None])
        if sampled.error is not None:
            raise sampled.error
        return sampled.token

    def uniform(self, ahead: int = 0) -> float:
        """In [0, 1): where the draw of the token falls that is `ahead` of the next one."""
        if self._generator is None:
            return 0.0
        while ahead >= len(self._uniforms):
            drawn = torch.rand(16, dtype=torch.float64, generator=self._generator)
            self._uniforms.extend(drawn.tolist())
        return self._uniforms[ahead]

    def add(self, token: int) -> None:
        """The next token is this one."""
        self.edits.add(token)
        if self._generator is not None:
            self.uniform()
            self._uniforms.popleft()


def sample_rows(samplers: Sequence[Sampler], logits: Tensor) -> list[Sampled]:
    """The next token of every sampler, which counts it, from its row of logits f32 [R, V].

    A row without a distribution has its error; it counts nothing and leaves the others alone.
    """
    return [only for (only,) in verify_rows(samplers, [()] * len(samplers), logits)]


def verify_rows(
    samplers: Sequence[Sampler], drafts: Sequence[Sequence[int]], logits: Tensor
) -> list[list[Sampled]]:
    """The next tokens of every sampler, one at least and at most one more than it has guesses.

    logits f32 [R, V] holds len(drafts[s]) + 1 rows for sampler s: after what it has, after its
    first guess, and so on. Each row is sampled as if its sampler had got there without guesses;
    tokens are taken up to and with the first that is not the one guessed. So a guess d is accepted
    with its probability p(d), otherwise another token comes with p without d: the rejection
    sampling of arXiv 2211.17192 for guesses that are certain. Which tokens come does not depend on
    the guesses at all, for any seed.
    """
    if len(drafts) != len(samplers) or len(logits) != sum(len(d) + 1 for d in drafts):
        raise ValueError(
            f"sampling: expected a list of drafts for each of {len(samplers)} samplers and a row "
            f"of logits for each draft and one more, got {len(drafts)} lists with "
            f"{sum(map(len, drafts))} drafts and {len(logits)} rows"
        )
    logits = logits.to(torch.float32)
    rows = [
        _Row(sampler, edits, ahead)
        for sampler, draft in zip(samplers, drafts, strict=True)
        for ahead, edits in enumerate(_edits_after(sampler, draft))
    ]
    tokens = ops.sample_tokens(*_arguments(logits, rows)).tolist() if rows else []
    results: list[list[Sampled]] = []
    wanted: list[tuple[int, int, int]] = []
    at = 0
    for sampler, draft in zip(samplers, drafts, strict=True):
        found: list[Sampled] = []
        for ahead, guess in enumerate([*draft, None]):
            token = tokens[at + ahead]
            error = rows[at + ahead].error(logits[at + ahead]) if token < 0 else None
            found.append(Sampled(token, error))
            if error is not None:
                break
            if sampler.params.logprobs is not None:
                wanted.append((at + ahead, len(results), ahead))
            sampler.add(token)
            if token != guess:
                break
        results.append(found)
        at += len(draft) + 1
    _add_logprobs(samplers, results, logits, wanted)
    return results


@dataclass(frozen=True)
class _Row:
    """One row of logits: whose it is, its edits, how far it is ahead of the next token."""

    sampler: Sampler
    edits: LogitEdits
    ahead: int

    def fits(self, vocab: int) -> bool:
        return self.edits.greatest_id < vocab

    def error(self, logits: Tensor) -> SamplingError:
        """Why the row gave no token."""
        if not self.fits(len(logits)):
            return SamplingError(
                f"sampling: expected token ids below {len(logits)} in logit_bias and among the "
                f"tokens seen, got {self.edits.greatest_id}"
            )
        found = "a NaN" if bool(logits.isnan().any()) else f"a maximum of {float(logits.max())}"
        return SamplingError(f"sampling: expected finite logits, got {found}; the model is broken")


def _edits_after(sampler: Sampler, draft: Sequence[int]) -> Iterable[LogitEdits]:
    """The edits for the next token, for the one after the first guess, ..."""
    edits = sampler.edits
    yield edits
    for guess in draft:
        if edits.counts_tokens:
            edits = edits.copy()
            edits.add(guess)
        yield edits


def _arguments(logits: Tensor, rows: Sequence[_Row]) -> list[Tensor]:
    """Those of ops.sample_tokens."""
    vocab = logits.shape[1]
    params = [row.sampler.params for row in rows]
    misfits = [r for r, row in enumerate(rows) if not row.fits(vocab)]
    if misfits:
        logits = logits.clone()
        logits[misfits] = torch.nan
    if all(p.greedy for p in params):
        arguments = [logits, *_greedy_options(len(rows))]
    else:
        arguments = [
            logits,
            torch.tensor([p.temperature for p in params], dtype=torch.float64),
            torch.tensor([p.top_k for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([p.min_p for p in params], dtype=torch.float64),
            torch.tensor([row.sampler.uniform(row.ahead) for row in rows], dtype=torch.float64),
        ]
    if not any(row.edits for row in rows):
        return arguments
    edits = [row.edits.arrays() for row in rows]
    counts = [0 if r in misfits else len(ids) for r, (ids, _) in enumerate(edits)]
    if any(counts):
        taken = [e for e, count in zip(edits, counts, strict=True) if count]
        arguments += [
            torch.tensor([0, *np.cumsum(counts)]),
            torch.from_numpy(np.concatenate([ids for ids, _ in taken])),
            torch.from_numpy(np.concatenate([values for _, values in taken])),
        ]
    return arguments


@lru_cache(64)
def _greedy_options(rows: int) -> tuple[Tensor, ...]:
    """Temperature, top-k, top-p, min-p and uniforms, of which greedy rows read the first alone."""
    zeros = torch.zeros(rows, dtype=torch.float64)
    return zeros, torch.zeros(rows, dtype=torch.int64), torch.ones_like(zeros), zeros, zeros


def _add_logprobs(
    samplers: Sequence[Sampler],
    results: Sequence[list[Sampled]],
    logits: Tensor,
    wanted: Sequence[tuple[int, int, int]],
) -> None:
    """Puts logprobs into results; wanted: row of logits, sampler, place among its tokens."""
    if not wanted:
        return
    counts = [samplers[s].params.logprobs or 0 for _, s, _ in wanted]
    chosen = torch.tensor([results[s][i].token for _, s, i in wanted])
    if len(wanted) < len(logits):
        logits = logits[[row for row, _, _ in wanted]]
    top = min(max(counts), logits.shape[1])
    found = [part.tolist() for part in ops.top_logprobs(logits, chosen, top)]
    for (_, s, i), count, logprob, ids, values in zip(wanted, counts, *found, strict=True):
        pairs = tuple(zip(ids[:count], values[:count], strict=True))
        results[s][i] = Sampled(results[s][i].token, None, logprob, pairs)


def filtered(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Probabilities f32 [n] and ids int64 [n] of the tokens of logits f32 [V] that may be drawn.

    The probabilities sum to 1. The order is that in which a draw goes by them: descending with
    top_k, else that of the vocabulary. Biases and penalties are left out.
    """
    row = _Row(Sampler(params), LogitEdits({}, 1, 0, 0), 0)
    temperature, top_k, top_p, min_p = _arguments(logits[None], [row])[1:5]
    (probabilities,) = ops.token_probabilities(logits[None], temperature, top_k, top_p, min_p)
    if bool(probabilities[0].isnan()):
        raise row.error(logits)
    ids = probabilities.nonzero()[:, 0]
    if 0 < params.top_k < len(logits):
        ids = ids[probabilities[ids].argsort(descending=True, stable=True)]
    return probabilities[ids], ids


def _fresh_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator
