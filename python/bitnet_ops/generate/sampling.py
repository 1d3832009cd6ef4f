"""Logits to a token: greedy, temperature, top-k, top-p, min-p, repetition penalty, a seed.

Every default is neutral: without options the most probable token is taken. The filters act in the
order of transformers: repetition penalty, temperature, top-k, top-p, min-p, then one draw. One row
of logits goes in, one token id comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


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
    Raises SamplingError on a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda v: v >= 0, "at least 0")
        _check_number("top_p", self.top_p, lambda v: 0 < v <= 1, "above 0 and at most 1")
        _check_number("min_p", self.min_p, lambda v: 0 <= v <= 1, "from 0 to 1")
        _check_number("repetition_penalty", self.repetition_penalty, lambda v: v > 0, "above 0")
        _check_integer("top_k", self.top_k, 2**31, "an integer at least 0 (0 keeps all tokens)")
        if self.seed is not None:
            _check_integer("seed", self.seed, 2**63, "an integer from 0 to 2^63 - 1, or None")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _check_number(
    name: str, value: object, in_range: Callable[[float], bool], expected: str
) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value) and in_range(value):
            return
    raise SamplingError(f"sampling: expected {name} {expected}, got {value!r}")


def _check_integer(name: str, value: object, limit: int, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise SamplingError(f"sampling: expected {name} {expected}, got {value!r}")


class Sampler:
    """Draws the tokens of ONE sequence: it owns the random generator and the tokens seen so far.

    Args:
        params: the options.
        seen: ids of the prompt, which the repetition penalty counts as used.
    Attributes: `seed`, the one given or the one chosen, so that a run can be repeated.
    """

    def __init__(self, params: SamplingParams, seen: Iterable[int] = ()) -> None:
        self.params = params
        self._seen = dict.fromkeys(seen) if params.repetition_penalty != 1 else None
        self._generator: torch.Generator | None = None
        self.seed = params.seed
        if not params.greedy:
            if self.seed is None:
                self.seed = int(torch.randint(2**63 - 1, (), generator=_fresh_generator()))
            self._generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token's id from logits f32 [V], which are left as they are.

        Raises SamplingError if they hold a NaN, or nothing but infinities.
        """
        if self._seen:
            logits = _penalised(logits, list(self._seen), self.params.repetition_penalty)
        token = self._greedy(logits) if self.params.greedy else self._draw(logits)
        if self._seen is not None:
            self._seen[token] = None
        return token

    def _greedy(self, logits: Tensor) -> int:
        best, index = logits.max(-1)  # a NaN is the maximum; of equals the first wins
        if not math.isfinite(float(best)):
            raise _bad_logits(logits)
        return int(index)

    def _draw(self, logits: Tensor) -> int:
        probabilities, ids = filtered(logits, self.params)
        cumulated = probabilities.cumsum(-1, dtype=torch.float64)
        point = torch.rand((), dtype=torch.float64, generator=self._generator) * cumulated[-1]
        index = int(torch.searchsorted(cumulated, point, right=True))
        return int(ids[min(index, ids.numel() - 1)])


def filtered(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Probabilities f32 [n] and ids int64 [n] of the tokens that the filters leave.

    The probabilities sum to 1. The order is descending with top_k, else that of the vocabulary. Of
    equally probable tokens at the end of top_p those of lower ids stay. params.temperature must be
    above 0.
    """
    if not math.isfinite(float(logits.max())):
        raise _bad_logits(logits)
    ids = None
    if 0 < params.top_k < logits.numel():
        logits, ids = logits.topk(params.top_k)
    # From the maximum down, so that a tiny temperature overflows to -inf, never to +inf; below
    # 1e-30 it would become 0 in float32, and 0 / 0 a NaN.
    temperature = max(params.temperature, 1e-30)
    probabilities = torch.softmax((logits - logits.max()) / temperature, -1)
    if ids is None and params.top_p < 1:
        ids = _nucleus(probabilities, params.top_p)
        probabilities = probabilities[ids]
    elif ids is None:
        ids = torch.arange(logits.numel())
    elif params.top_p < 1:
        # A token stays if those before it do not reach top_p yet: so the first always stays.
        keep = probabilities.cumsum(-1, dtype=torch.float64) - probabilities < params.top_p
        probabilities, ids = probabilities[keep], ids[keep]
    if params.min_p > 0:
        keep = probabilities >= params.min_p * probabilities.max()
        probabilities, ids = probabilities[keep], ids[keep]
    return probabilities / probabilities.sum(), ids


_SORTED_AT_MOST = 2048  # elements; above, one more pass over the bits is cheaper
_PEAKED = 0.01  # with so probable a token most others are so improbable that dropping them pays


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Ids, ascending, of the fewest tokens whose probabilities f32 [V] reach top_p.

    What sorting would keep, without the sort, which takes 10 ms and more at 128,000 tokens: floats
    from 0 up are ordered as their bits are, so buckets of their high halves find the bucket in
    which top_p is reached, and only that one is looked into.
    """
    if float(probabilities.max()) < _PEAKED or top_p > 0.999:  # float32 sums miss 1 by 1e-6
        return _top(probabilities, top_p)
    # All that are less probable than this have not even half of 1 - top_p together.
    ids = _true(probabilities >= (1 - top_p) / (2 * probabilities.numel()))
    return ids[_top(probabilities[ids], top_p)]


def _top(probabilities: Tensor, top_p: float) -> Tensor:
    bits = probabilities.view(torch.int32)
    high = bits >> 16
    bucket, before = _reaching(high, probabilities.double(), top_p)
    members = _true(high == bucket)
    if members.numel() > _SORTED_AT_MOST:
        low, above = bits[members] & 0xFFFF, bucket << 16
        bucket, before = _reaching(low, probabilities[members].double(), top_p, before)
        keep = bits > above + bucket
        members = _true(bits == above + bucket)  # of one probability
    else:
        keep = high > bucket
        members = members[probabilities[members].argsort(descending=True, stable=True)]
    mass = probabilities[members].double()
    count = int((mass.cumsum(0) - mass + before < top_p).sum())
    keep.numpy()[members[:count].numpy()] = True
    return _true(keep)


def _true(mask: Tensor) -> Tensor:
    """Where `mask` holds, int64 ascending; torch's own nonzero takes seven times as long."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _reaching(keys: Tensor, mass: Tensor, top_p: float, before: float = 0.0) -> tuple[int, float]:
    """The key at which the mass of all greater ones, after `before`, and its own reach top_p.

    Also the mass before that key. Where rounding never lets it be reached: the least key.
    """
    sums = torch.bincount(keys, mass).flip(0)
    reached = sums.cumsum(0) + before
    at = min(int(torch.searchsorted(reached, top_p)), int(keys.max() - keys.min()))
    return len(sums) - 1 - at, float(reached[at - 1]) if at else before


def _penalised(logits: Tensor, seen: list[int], penalty: float) -> Tensor:
    logits = logits.clone()
    index = torch.tensor(seen)
    values = logits[index]
    logits[index] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _bad_logits(logits: Tensor) -> SamplingError:
    found = "a NaN" if bool(torch.isnan(logits).any()) else f"a maximum of {float(logits.max())}"
    return SamplingError(f"sampling: expected finite logits, got {found}; the model is broken")


def _fresh_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator
