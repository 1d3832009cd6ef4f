"""How many tokens an MTP head should draft, for which of the requests that decode.

A head costs time for every draft, on top of what verifying costs, so it pays where drafts are right
often and streams are few. Nobody knows beforehand when: what a draft costs is learnt from this
machine, how many are right by depth from each request, and every step takes the number of drafts
that gives most tokens a second. Texts for which none do are tried now and then, for a small share
of their time. None of this changes a token.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bitnet_ops.generate.head_acceptance import MAX_DEPTH, HeadAcceptance
from bitnet_ops.generate.request import Request
from bitnet_ops.generate.speculation import StepCosts

_UNKNOWN = 0.15  # steps that a draft costs, until some have been measured
_FIRST = 6  # times, which bind a program, write memory first and measure ways to multiply
_GAIN = 1.03  # drafts promise at least so much; costs are not known more exactly
_PROBING = 0.005  # share of the time that finding out whether drafts pay may cost
# A step with one draft a stream that has been measured less often may be as quick as hoped: as many
# tokens more cost such a share. Steps that only hope speaks for: so many, and a share of all.
_TRIES, _HOPE = 5, 0.2
_HOPEFUL_STEPS, _HOPEFUL_SHARE = 12, 0.005
# The first few drafts of a head may all have been wrong by chance: until so many have been tried,
# others may cost so many steps.
_ENOUGH, _UNLUCKY = 16, 1.5


class Confidence:
    """How often drafts are right of which the head is so sure.

    A head says what it thinks of its draft, by its probability. Whether that is so is learnt: in
    each of some ranges of probabilities, drafts are counted whose predecessors were right.
    """

    _BORDERS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
    _WEIGHT, _MAX = 6.0, 60.0  # of what is expected without having counted; of what is counted

    def __init__(self) -> None:
        self._right = [0.0] * (len(self._BORDERS) + 1)
        self._all = [0.0] * (len(self._BORDERS) + 1)

    def chance(self, probability: float, otherwise: float) -> float:
        """Of a draft to be right if those before it are; `otherwise`: of drafts of its depth."""
        i = bisect_right(self._BORDERS, probability)
        return (self._right[i] + self._WEIGHT * otherwise) / (self._all[i] + self._WEIGHT)

    def learn(self, probabilities: Sequence[float], right: int) -> None:
        """Enter that the first `right` of some drafts were right."""
        for at, probability in enumerate(probabilities[: right + 1]):
            i = bisect_right(self._BORDERS, probability)
            share = min(1.0, self._MAX / (self._all[i] + 1))
            self._right[i] = share * (self._right[i] + (at < right))
            self._all[i] = share * (self._all[i] + 1)


@dataclass(frozen=True)
class Worth:
    """What drafts have to promise beside a step, in tokens.

    verified: one draft of a stream, by depth, to be verified. made: all of one depth together, to
    be made for so many streams.
    """

    verified: tuple[float, ...] = (0.0,) * MAX_DEPTH
    made: Callable[[int], float] = lambda streams: 0.0


@dataclass
class HeadPolicy:
    """What drafts of a head cost on this machine, and how many are worth it.

    costs: seconds of one draft of so many streams. shared: how often drafts are right for all.
    confidence: how often those are of which the head is so sure.
    """

    costs: StepCosts = field(default_factory=StepCosts)
    shared: HeadAcceptance = field(default_factory=HeadAcceptance)
    confidence: Confidence = field(default_factory=Confidence)
    _promised: float = 0.0  # tokens a second, by the last choice
    _measured: int = 0  # times that drafts were made
    _choices: int = 0
    _hopeful: int = 0  # of these, such as only hope spoke for
    _hopes: bool = False  # whether the last one was
    _probes: bool = False  # whether the last one only finds out
    _spare: float = _UNLUCKY

    def made(self, streams: int, depth: int, seconds: float) -> None:
        """Enter how long `depth` drafts one behind the other took, of so many streams."""
        if depth:
            self.costs.learn(streams, seconds / depth)
            self._measured += 1

    def learn(self, request: Request, sure: Sequence[float], right: int) -> None:
        """Enter how many of a step's drafts for a request were right.

        sure: of each draft its probability by the head.
        """
        self._of(request).learn(len(sure), right)
        self.shared.learn(len(sure), right)
        self.confidence.learn(sure, right)

    def worth(self, steps: StepCosts, tokens: int, streams: int) -> Worth:
        """What drafts of so many streams cost beside a step of so many tokens.

        Counted in the tokens that the last choice promises for that time. Each depth has a price of
        its own: where multiplying begins to take longer than reading, one token more does too. A
        step that is dearer than a longer one is on the way to it. What only finds out is verified
        whatever it promises, or a price that was wrong would stay.
        """
        if self._probes:
            return Worth()
        without, speed = steps.of(tokens), self._promised
        each = [steps.of(tokens + depth * streams) for depth in range(MAX_DEPTH + 1)]
        if self._hopes:
            each[1] = min(each[1], _hoped(without, tokens, streams))
        verified = tuple(
            speed
            / streams
            * max(0.0, min((each[b] - each[a]) / (b - a) for b in range(a + 1, MAX_DEPTH + 1)))
            for a in range(MAX_DEPTH)
        )
        return Worth(verified, lambda count: self._cost(count, without) * speed)

    def going_on(self, request: Request, worth: Worth) -> GoingOn:
        """Judges the drafts of one step for a request, one behind the other."""
        return GoingOn(self.confidence, self._of(request), worth)

    def choose(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        steps: StepCosts,
        tokens: int,
        expected: float,
        elapsed: int = 1,
    ) -> dict[int, int]:
        """How many drafts to make for which of `requests`, by their ids.

        limits: of each, at most. tokens: of the step so far, which gives `expected` tokens. steps:
        what steps cost. elapsed: steps since the last call.
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
        self._choices += 1
        may_hope = self._hopeful < _HOPEFUL_STEPS + _HOPEFUL_SHARE * self._choices
        self._promised = expected / without
        best, chosen, taken, self._hopes = _GAIN * self._promised, (0, 0), 0.0, False
        for depth in range(1, MAX_DEPTH + 1):
            gains = [one.gain(min(limit, depth)) for one, _, limit in known]
            for count in _counts(len(known)):
                added = sum(min(limit, depth) for _, _, limit in known[:count])
                drafting = depth * self._cost(count, without)
                promise = expected + math.fsum(gains[:count])
                seconds = max(without, steps.of(tokens + added)) + drafting
                hoped = _hoped(without, tokens, added) + drafting
                hope = may_hope and depth == 1 and steps.measured(tokens + added) < _TRIES
                hope = hope and hoped < seconds
                speed = promise / (hoped if hope else seconds)
                if speed > best:
                    best, chosen, taken, self._hopes = speed, (count, depth), seconds, hope
                    self._promised = max(expected / without, promise / seconds)
        count, depth = chosen
        self._hopeful += self._hopes
        self._probes = not depth
        for one, _, _ in known:
            one.credit += elapsed * _PROBING / len(known)
            one.token = 1 / expected
        if depth:  # how many of them each time, their probabilities say
            for one, _, _ in known[:count]:
                one.price = (taken / without - 1) / count
            return {id: min(limit, MAX_DEPTH) for _, id, limit in known[:count]}
        return self._probe(known, steps, tokens, without)

    def speed(
        self, request: Request, limit: int, steps: StepCosts, tokens: int, expected: float
    ) -> float:
        """What at most `limit` drafts for one request promise.

        In tokens for the time of a step without drafts, as Acceptance.speed.
        """
        without, one = steps.of(tokens), self._of(request)
        draft = self._cost(1, without)
        return max(
            (expected + one.gain(depth))
            * without
            / (max(without, steps.of(tokens + depth)) + depth * draft)
            for depth in range(min(limit, MAX_DEPTH) + 1)
        )

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
        """One draft for the request that has waited longest for it, once its cost is small.

        What it takes is charged; what it may take at best decides when: it may have become cheaper.
        """
        drafting = self._cost(1, without)
        price = (max(without, steps.of(tokens + 1)) + drafting) / without - 1
        hoped = _hoped(without, tokens, 1) / without - 1 + min(drafting / without, _UNKNOWN)
        one, id, _ = max(known, key=lambda of: of[0].credit)
        if one.credit < min(price, hoped):
            if self.shared.tried > _ENOUGH or self._spare < price:
                return {}
            self._spare -= price
        one.price = price
        return {id: 1}

    def _of(self, request: Request) -> HeadAcceptance:
        if request.head_acceptance is None:
            request.head_acceptance = HeadAcceptance(self.shared)
        return request.head_acceptance


class GoingOn:
    """Whether drafts of one request are worth verifying, and others worth making behind them.

    Attributes: `sure`, the probabilities of those that are.
    """

    def __init__(self, confidence: Confidence, rates: HeadAcceptance, worth: Worth) -> None:
        self._confidence, self._rates, self.worth = confidence, rates, worth
        self._chance, self.sure = 1.0, list[float]()

    def takes(self, probability: float) -> bool:
        """Whether the next draft, with that probability by the head, is to be verified."""
        depth = min(len(self.sure), MAX_DEPTH - 1)
        self._chance *= self._confidence.chance(probability, self._rates.rate(depth))
        if self._chance < self.worth.verified[depth]:
            self._chance = 0.0
            return False
        self.sure.append(probability)
        return True

    @property
    def promise(self) -> float:
        """Tokens that another draft promises beyond what verifying it costs."""
        depth = min(len(self.sure), MAX_DEPTH - 1)
        return self._chance * self._rates.rate(depth) - self.worth.verified[depth]


def going_on(judges: Sequence[GoingOn]) -> list[int]:
    """Which of some requests to make one more draft for, all of the same depth.

    None where together they promise less than that costs.
    """
    promises = [judge.promise for judge in judges]
    kept = [i for i, promise in enumerate(promises) if promise >= 0]
    pays = kept and math.fsum(promises[i] for i in kept) >= judges[0].worth.made(len(kept))
    return kept if pays else []


def _hoped(without: float, tokens: int, added: int) -> float:
    """Seconds that a step with `added` tokens takes at best; without: those of one of `tokens`."""
    return without * (1 + _HOPE * added / tokens)


def _counts(streams: int) -> list[int]:
    """How many streams to think of: all, and powers of two below."""
    counts = [1 << i for i in range(streams.bit_length()) if 1 << i < streams]
    return [*counts, streams]
