"""Logits to tokens: greedy, temperature, top-k, top-p, min-p, penalties, biases, a seed a request.

Every default is neutral: without options the most probable token is taken. The filters act in the
order of transformers: bias and penalties, temperature, top-k, top-p, min-p, then one draw. The rows
of a batch are one call of `ops.sample_tokens`; what a row gives does not depend on the others. The
options are checked when they are made, so that the op has nothing to reject.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.arguments import shown
from bitnet_ops.errors import BitNetError
from bitnet_ops.models.step_batch import logit_rounds

if TYPE_CHECKING:
    from bitnet_ops.generate.constraint import Constraint

_BIAS, _REPETITION, _SUBTRACTED = range(3)
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # float32, in which the op takes penalties


class SamplingError(BitNetError, ValueError):
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
        _check_number(
            "repetition_penalty",
            self.repetition_penalty,
            lambda v: _SMALLEST <= v <= _LARGEST,
            "above 0 and within float32",
        )
        _check_integer("top_k", self.top_k, 2**31, "an integer at least 0 (0 keeps all tokens)")
        if self.seed is not None:
            _check_integer("seed", self.seed, 2**63, "an integer from 0 to 2^63 - 1, or None")
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), lambda v: -2 <= v <= 2, "from -2 to 2")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 21, "an integer from 0 to 20, or None")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        for name in _NUMBERS:  # an integer may be too large for a tensor
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def plain(self) -> bool:
        """Whether a token is drawn by its temperature alone, without filters."""
        filters = self.top_k, self.top_p, self.min_p
        return self.temperature > 0 and filters == (0, 1, 0)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without a draw."""
        return self.temperature == 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise SamplingError where logit_bias names a token that the model does not have."""
        if self.logit_bias and (greatest := max(self.logit_bias)) >= vocab_size:
            raise SamplingError(
                f"sampling: expected logit_bias with token ids below {vocab_size}, got {greatest}"
            )

    def seeded(self) -> SamplingParams:
        """The same with a seed, a fresh one where there is none and draws need one."""
        if self.greedy or self.seed is not None:
            return self
        return replace(self, seed=int(torch.randint(2**63 - 1, (), generator=_fresh_generator())))


_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def _check_number(
    name: str, value: object, in_range: Callable[[float], bool], expected: str
) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # compared, not converted: an integer may be too large for a float
        if abs(value) <= sys.float_info.max and in_range(value):
            return
    raise SamplingError(f"sampling: expected {name} {expected}, got {shown(value)}")


def _check_integer(name: str, value: object, limit: int, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise SamplingError(f"sampling: expected {name} {expected}, got {shown(value)}")


def _checked_bias(given: object) -> dict[int, float]:
    """A copy, so that a later change of the caller's does not pass by the checks."""
    if not isinstance(given, Mapping):
        raise SamplingError(
            f"sampling: expected logit_bias a mapping of token ids to numbers, got {shown(given)}"
        )
    for token, bias in given.items():
        _check_integer("logit_bias", token, 2**31, "with token ids that are integers at least 0")
        _check_number("logit_bias", bias, lambda v: -100 <= v <= 100, "of numbers from -100 to 100")
    return dict(given)


class Sampled(NamedTuple):
    """What one row of logits gave: a token or an error.

    `logprob` and `top_logprobs` ((token, logarithm), the most probable first) are there if params
    ask for logprobs.
    """

    token: int = -1
    error: SamplingError | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class LogitEdits:
    """The edits of `ops.sample_tokens` for one sequence: bias, then the three penalties.

    They are kept up to date token by token. The repetition penalty counts the prompt and the
    generated tokens, the frequency and presence penalties the generated ones.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self._params = params
        self._slots: dict[int, int] = {}  # where a token's edit stands
        self._ids = np.empty(16, np.int64)
        self._values = np.empty((16, 3), np.float32)
        self._counts: dict[int, int] = {}  # of generated tokens
        self._counting = (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )
        for token, added in (params.logit_bias or {}).items():
            self._edit(token)[_BIAS] = added
        if params.repetition_penalty != 1:
            for token in prompt:
                self._edit(token)[_REPETITION] = params.repetition_penalty

    def __len__(self) -> int:
        """For how many tokens there is one now."""
        return len(self._slots)

    def add(self, token: int) -> None:
        """Count a generated token."""
        if not self._counting:
            return
        params, edit = self._params, self._edit(token)
        count = self._counts[token] = self._counts.get(token, 0) + 1
        edit[_REPETITION] = params.repetition_penalty
        edit[_SUBTRACTED] = params.frequency_penalty * count + params.presence_penalty

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The ids [n] and their edits [n, 3]; views that the next `add` may change."""
        n = len(self._slots)
        return self._ids[:n], self._values[:n]

    def _edit(self, token: int) -> npt.NDArray[np.float32]:
        """The edit of a token, to be written to before another one is asked for."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._values = np.concatenate([self._values, np.empty_like(self._values)])
            self._ids[slot] = token
            self._values[slot] = 0, 1, 0
        return self._values[slot]


class Sampler:
    """What the draws of ONE sequence need: the random generator and the tokens seen so far.

    The nth token takes the generator's nth number, whatever else is in its batch and whether it was
    guessed before: a seed repeats a run.

    Args:
        params: the options.
        seen: ids of the prompt, which the repetition penalty counts as used.
        constraint: says which tokens may come.
    Attributes: `params`; `seed`, the one given or the one chosen, so that a run can be repeated.
    """

    def __init__(
        self,
        params: SamplingParams,
        seen: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.constraint = constraint
        self.params = params = params.seeded()
        self.edits = LogitEdits(params, seen)
        self.seed = params.seed
        self._generator: torch.Generator | None = None
        self._uniforms: deque[float] = deque()  # drawn from the generator and not used yet
        if not params.greedy:
            assert self.seed is not None
            self._generator = torch.Generator().manual_seed(self.seed)

    def uniform(self, ahead: int = 0) -> float:
        """In [0, 1), what the draw of the next token depends on, or of one so many behind it."""
        if self._generator is None:
            return 0.0
        while len(self._uniforms) <= ahead:
            drawn = torch.rand(16, dtype=torch.float64, generator=self._generator)
            self._uniforms.extend(drawn.tolist())
        return self._uniforms[ahead]

    @property
    def largest(self) -> int:
        """How many largest logits decide the next token, lower ids first among equals; 0: all.

        Of a plain draw 1, if its noise is known (`draws_of`).
        """
        if self.params.logprobs is not None or self.constraint is not None or self.edits:
            return 0
        return 1 if self.params.greedy or self.params.plain else self.params.top_k

    def add(self, token: int) -> None:
        """The next token is this one."""
        self.edits.add(token)
        if self.constraint is not None:
            self.constraint.add(token)
        if self._uniforms:
            self._uniforms.popleft()


def sample_rows(samplers: Sequence[Sampler], logits: Tensor) -> list[Sampled]:
    """The next token of every sampler, which counts it, from its row of logits f32 [R, V].

    A row without a distribution has its error; it counts nothing and leaves the others alone. Rows
    under a constraint may be overwritten.
    """
    if not samplers:
        return []
    logits = logits.to(torch.float32)
    allowed, errors = _constrained(samplers, logits)
    tokens = ops.sample_tokens(*_arguments(samplers, allowed)).tolist()
    found = []
    for row, (sampler, token) in enumerate(zip(samplers, tokens, strict=True)):
        if row in errors:
            found.append(Sampled(error=errors[row]))
        elif token < 0:
            found.append(Sampled(error=_no_token(logits[row])))
        else:
            sampler.add(token)
            found.append(Sampled(token))
    if any(sampler.params.logprobs is not None for sampler in samplers):
        _add_logprobs(samplers, found, logits)
    return found


def draw_ahead(samplers: Sequence[Sampler], ahead: int, logits: Tensor) -> list[int]:
    """What each sampler would choose of logits f32 [R, V], so many tokens ahead; -1: nothing.

    With the noise of that token, its biases, penalties and filters, but nothing is counted. A
    constraint holds for the next token; what it allows further on is not known yet.
    """
    errors: dict[int, SamplingError] = {}
    if ahead == 0:
        logits, errors = _constrained(samplers, logits)
    found: list[int] = ops.sample_tokens(*_arguments(samplers, logits, ahead)).tolist()
    return [-1 if row in errors else token for row, token in enumerate(found)]


def draws_of(samplers: Sequence[Sampler], wanted: Sequence[int]) -> Tensor | None:
    """`draws` of the StepBatch of a step, whose rows stand in rounds; None if none is plain."""
    if not any(sampler.params.plain for sampler in samplers):
        return None
    rows = [
        (sampler.params.temperature, sampler.uniform(k)) if sampler.params.plain else (0.0, 0.0)
        for k, members in enumerate(logit_rounds(wanted))
        for sampler in (samplers[i] for i in members)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 2)


def sample_steps(
    samplers: Sequence[Sampler],
    drafts: Sequence[Sequence[int]],
    wanted: Sequence[int],
    logits: Tensor,
) -> list[tuple[list[Sampled], SamplingError | None]]:
    """The next tokens of every sampler from the logits of a step, and the error that ended them.

    wanted: how many rows of logits each has, none or those after its newest token and after each of
    its drafts; they stand in rounds (`logit_rounds`). A draft is right if it is the token that the
    sampler chooses at that place; then the sampler goes on with the logits after the draft. So
    every sampler sees the logits that it would see without drafts, in the same order, and chooses
    the same, whatever its method.
    """
    found: list[list[Sampled]] = [[] for _ in samplers]
    errors: list[SamplingError | None] = [None] * len(samplers)
    begin = 0
    for k, members in enumerate(logit_rounds(wanted)):
        rows = list(range(len(members)))
        if k:  # those whose newest token is the draft before these logits
            rows = [
                row
                for row, i in enumerate(members)
                if len(found[i]) == k and found[i][-1].token == drafts[i][k - 1]
            ]
            if not rows:
                break
        table = logits[begin : begin + len(members)]
        table = table if len(rows) == len(members) else table[rows]
        chosen = [members[row] for row in rows]
        sampled = sample_rows([samplers[i] for i in chosen], table)
        for i, one in zip(chosen, sampled, strict=True):
            if one.error is None:
                found[i].append(one)
            else:
                errors[i] = one.error
        begin += len(members)
    return list(zip(found, errors, strict=True))


# What is added to eight logits for a byte of a mask, the lowest bit first.
_FORBID = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)


def _constrained(
    samplers: Sequence[Sampler], logits: Tensor
) -> tuple[Tensor, dict[int, SamplingError]]:
    """The logits, -inf where a constraint forbids a token; and why rows cannot go on."""
    masks: dict[int, npt.NDArray[np.uint8]] = {}
    errors: dict[int, SamplingError] = {}
    for row, sampler in enumerate(samplers):
        if sampler.constraint is None:
            continue
        try:
            mask = sampler.constraint.mask()
        except SamplingError as error:
            errors[row] = error
            continue
        except Exception as error:  # a defect, of this row: the others go on
            errors[row] = SamplingError(f"sampling: expected a mask, got: {error!r}")
            continue
        if mask is not None and 8 * len(mask) < logits.shape[1]:
            errors[row] = SamplingError("sampling: expected a mask of all tokens, got fewer")
        elif mask is not None:
            masks[row] = mask
    if masks:
        if any(sampler.params.logprobs is not None for sampler in samplers):
            logits = logits.clone()  # those are of what the model says
        values = logits.numpy()
        for row, mask in masks.items():
            values[row] += np.take(_FORBID, mask, axis=0).reshape(-1)[: logits.shape[1]]
            if not mask.any():
                errors[row] = SamplingError("sampling: expected a constraint that allows a token")
    return logits, errors


def _no_token(logits: Tensor) -> SamplingError:
    found = "a NaN" if bool(logits.isnan().any()) else f"a maximum of {float(logits.max())}"
    return SamplingError(f"sampling: expected finite logits, got {found}; the model is broken")


def _arguments(samplers: Sequence[Sampler], logits: Tensor, ahead: int = 0) -> list[Tensor]:
    """Those of ops.sample_tokens."""
    params = [sampler.params for sampler in samplers]
    if all(p.greedy for p in params):
        arguments = [logits, *_greedy_options(len(params))]
    else:
        arguments = [
            logits,
            torch.tensor([p.temperature for p in params], dtype=torch.float64),
            torch.tensor([p.top_k for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([p.min_p for p in params], dtype=torch.float64),
            torch.tensor([sampler.uniform(ahead) for sampler in samplers], dtype=torch.float64),
        ]
    if any(sampler.edits for sampler in samplers):
        ids, values = zip(*(sampler.edits.arrays() for sampler in samplers), strict=True)
        arguments += [
            torch.tensor([0, *np.cumsum([len(sampler.edits) for sampler in samplers])]),
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(np.concatenate(values)),
        ]
    return arguments


@lru_cache(64)
def _greedy_options(rows: int) -> tuple[Tensor, ...]:
    """Temperature, top-k, top-p, min-p and uniforms, of which greedy rows read the first alone."""
    zeros = torch.zeros(rows, dtype=torch.float64)
    return zeros, torch.zeros(rows, dtype=torch.int64), torch.ones_like(zeros), zeros, zeros


def _add_logprobs(samplers: Sequence[Sampler], found: list[Sampled], logits: Tensor) -> None:
    """Put logprobs into what was found by the samplers that ask for them."""
    rows = [
        row
        for row, sampler in enumerate(samplers)
        if sampler.params.logprobs is not None and found[row].error is None
    ]
    if not rows:
        return
    counts = [samplers[row].params.logprobs or 0 for row in rows]
    chosen = torch.tensor([found[row].token for row in rows])
    if len(rows) < len(logits):
        logits = logits[rows]
    top = min(max(counts), logits.shape[1])
    parts = [part.tolist() for part in ops.top_logprobs(logits, chosen, top)]
    for row, count, logprob, ids, values in zip(rows, counts, *parts, strict=True):
        pairs = tuple(zip(ids[:count], values[:count], strict=True))
        found[row] = found[row]._replace(logprob=logprob, top_logprobs=pairs)


def _fresh_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator
