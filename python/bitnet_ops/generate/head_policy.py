"""How many tokens an MTP head should draft, for which of the requests that decode.

A head costs time for every draft, on top of what verifying costs, so it pays where drafts are right
often and streams are few. Nobody knows beforehand when: what a draft costs is learnt from this
machine, how many are right by depth from each request, and every step takes the number of drafts
that gives most tokens a second. Texts for which none do are tried now and then, for a small share
of their time. None of this changes a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bitnet_ops.generate.speculation import StepCosts

if TYPE_CHECKING:
    from bitnet_ops.generate.request import Request

MAX_DEPTH = 3  # drafts of a head one behind the other: what follows is seldom right
_PRIOR = (0.6, 0.5, 0.4)  # chances of drafts to be right if those before are, before any was tried
_PRIOR_WEIGHT, _MAX_WEIGHT, _KEPT = 2.0, 32.0, 0.97
_SHARED_WEIGHT = 8.0  # of what other requests have shown, for a new one
_UNKNOWN = 0.15  # steps that a draft costs, until some have been measured
_FIRST = 6  # times, which bind a program, write memory first and measure ways to multiply
_GAIN = 1.03  # drafts promise at least so much; costs are not known more exactly
_PROBING = 0.01  # share of the time that finding out whether drafts pay may cost
_SAVED = 2.0  # steps that a text's drafts have saved and that may be spent on finding out


class HeadAcceptance:
    """How often the drafts of a head are right for one text: by depth, if those before are."""

    def __init__(self, shared: HeadAcceptance | None = None) -> None:
        if shared is None:
            self._right = [_PRIOR_WEIGHT * p for p in _PRIOR]
            self._wrong = [_PRIOR_WEIGHT * (1 - p) for p in _PRIOR]
        else:
            pairs = [*zip(shared._right, shared._wrong, strict=True)]
            scales = [min(1.0, _SHARED_WEIGHT / (r + w)) for r, w in pairs]
            self._right = [s * r for s, (r, _) in zip(scales, pairs, strict=True)]
            self._wrong = [s * w for s, (_, w) in zip(scales, pairs, strict=True)]
        self.credit = 0.0  # saved up for probes, in steps

    def __repr__(self) -> str:
        rates = ", ".join(f"{self.rate(depth):.2f}" for depth in range(MAX_DEPTH))
        return f"HeadAcceptance({rates})"

    def rate(self, depth: int) -> float:
        """The chance of draft `depth`, from 0 on, to be right if those before are."""
        return self._right[depth] / (self._right[depth] + self._wrong[depth])

    def gain(self, drafts: int) -> float:
        """How many of so many drafts are right, on average."""
        chances = [math.prod(self.rate(i) for i in range(d + 1)) for d in range(drafts)]
        return math.fsum(chances)

    def learn(self, drafts: int, right: int) -> None:
        """Enter that the first `right` of the drafts of a step were right."""
        if right:
            self.credit = min(self.credit + right, _SAVED)
        for depth in range(min(drafts, right + 1, MAX_DEPTH)):
            was_right = depth < right
            self._right[depth] = _KEPT * self._right[depth] + was_right
            self._wrong[depth] = _KEPT * self._wrong[depth] + (not was_right)
            share = min(1.0, _MAX_WEIGHT / (self._right[depth] + self._wrong[depth]))
            self._right[depth] *= share
            self._wrong[depth] *= share


@dataclass
class HeadPolicy:
    """What drafts of a head cost on this machine, and how many are worth it.

    costs: seconds of one draft of so many streams. shared: how often drafts are right for all.
    """

    costs: StepCosts = field(default_factory=StepCosts)
    shared: HeadAcceptance = field(default_factory=HeadAcceptance)
    _measured: int = 0  # times that drafts were made

    @contextmanager
    def timed(self, streams: int, depth: int) -> Iterator[None]:
        """Learn what `depth` drafts of so many streams cost, made inside."""
        began = time.perf_counter()
        yield
        self.costs.learn(streams, (time.perf_counter() - began) / depth)
        self._measured += 1

    def learn(self, request: Request, drafts: int, right: int) -> None:
        """Enter how many of a step's drafts for a request were right."""
        self._of(request).learn(drafts, right)
        self.shared.learn(drafts, right)

    def choose(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        steps: StepCosts,
        tokens: int,
        expected: float,
    ) -> dict[int, int]:
        """How many drafts to make for which of `requests`, by their ids.

        limits: of each, at most. tokens: of the step so far, which gives `expected` tokens. steps:
        what steps cost.
        """
        without = steps.of(tokens)
        known = [
            (self._of(request), request.id, limit)
            for request, limit in zip(requests, limits, strict=True)
            if limit > 0
        ]
        if not known:
            return {}
        known.sort(key=lambda one: -one[0].gain(min(one[2], MAX_DEPTH)))
        best, chosen = _GAIN * expected / without, (0, 0)
        for depth in range(1, MAX_DEPTH + 1):
            gains = [one.gain(min(limit, depth)) for one, _, limit in known]
            for count in _counts(len(known)):
                added = sum(min(limit, depth) for _, _, limit in known[:count])
                seconds = max(without, steps.of(tokens + added)) + depth * self._cost(
                    count, without
                )
                speed = (expected + math.fsum(gains[:count])) / seconds
                if speed > best:
                    best, chosen = speed, (count, depth)
        count, depth = chosen
        found = {id: min(limit, depth) for _, id, limit in known[:count]}
        if not found:
            found = self._probe(known, steps, tokens, without)
        return found

    def _cost(self, streams: int, without: float) -> float:
        cost = self.costs.of(streams) if self.costs.known else math.inf
        return cost if self._measured >= _FIRST else min(cost, _UNKNOWN * without)

    def _probe(
        self,
        known: Sequence[tuple[HeadAcceptance, int, int]],
        steps: StepCosts,
        tokens: int,
        without: float,
    ) -> dict[int, int]:
        """One draft for the request that has waited longest for it, once its cost is small."""
        price = max(without, steps.of(tokens + 1)) + self._cost(1, without)
        price = price / without - 1
        for one, _, _ in known:
            one.credit += _PROBING / len(known)
        one, id, _ = max(known, key=lambda of: of[0].credit)
        if one.credit < price:
            return {}
        one.credit = min(one.credit, _SAVED) - price
        return {id: 1}

    def _of(self, request: Request) -> HeadAcceptance:
        if request.head_acceptance is None:
            request.head_acceptance = HeadAcceptance(self.shared)
        return request.head_acceptance


def _counts(streams: int) -> list[int]:
    """How many streams to think of: all, and powers of two below."""
    counts = [1 << i for i in range(streams.bit_length()) if 1 << i < streams]
    return [*counts, streams]
