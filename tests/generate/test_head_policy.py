"""How many drafts a head makes: nearly as many tokens a second as the best number would give.

Machines are simulated: seconds of a step and of a draft are formulas, with noise, and drafts are
right with given chances by depth.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet_ops.generate.head_acceptance import MAX_DEPTH, HeadAcceptance
from bitnet_ops.generate.head_policy import Confidence, HeadPolicy, Worth, going_on
from bitnet_ops.generate.speculation import Rest, StepCosts

RATES = {"good": (0.75, 0.55, 0.4), "chat": (0.5, 0.25, 0.1), "wrong": (0.0, 0.0, 0.0)}


class Machine:
    """token: what one more token costs, in steps of one. draft: likewise, of one stream."""

    def __init__(self, token: float = 0.12, draft: float = 0.15, slow_start: float = 1.0) -> None:
        self.token, self.draft, self.slow_start = token, draft, slow_start
        self.rng, self.drafted = Random(1), 0

    def step(self, tokens: int) -> float:
        return (1 + self.token * (tokens - 1)) * self.rng.uniform(0.97, 1.06)

    def drafts(self, streams: int, depth: int) -> float:
        self.drafted += 1
        first = self.slow_start if self.drafted == 1 else 1.0
        each = self.draft * (1 + 0.2 * (streams - 1))
        return depth * each * first * self.rng.uniform(0.97, 1.06)


def run(machine: Machine, rates: tuple[float, ...], streams: int, steps: int) -> float:
    """Tokens a second, as a ratio to those without drafts."""
    policy, costs, rest, rng = HeadPolicy(), StepCosts(), Rest(), Random(2)
    requests: list[Any] = [SimpleNamespace(id=i, head_acceptance=None) for i in range(streams)]
    tokens = seconds = plain = 0.0
    for _ in range(steps):
        plain += machine.step(streams)
        limits = [MAX_DEPTH] * streams
        chosen = {}
        if rest.over(range(streams)):
            chosen = policy.choose(requests, limits, costs, streams, float(streams), rest.steps)
            if not chosen:
                rest.begin(0.0, costs.of(streams))
        made, made_so_far = dict[int, list[float]](), 0
        worth = policy.worth(costs, streams, max(1, len(chosen)))
        judges = {i: policy.going_on(requests[i], worth) for i in chosen}
        left, took = [*chosen], 0.0
        for depth in range(MAX_DEPTH):
            if depth and left:
                left = [left[k] for k in going_on([judges[i] for i in left])]
            left = [i for i in left if chosen[i] > depth]
            if not left:
                break
            took += machine.drafts(len(left), 1)
            made_so_far = depth + 1
            left = [i for i in left if judges[i].takes(rng.random())]
        if chosen:
            made = {i: judge.sure for i, judge in judges.items()}
            policy.made(len(chosen), made_so_far, took)
            seconds += took
        drafts = sum(map(len, made.values()))
        if drafts:
            rest.drafted()
        took = machine.step(streams + drafts)
        costs.learn(streams + drafts, took)
        seconds += took
        tokens += streams
        for i, sure in made.items():
            right = 0
            while right < len(sure) and rng.random() < rates[right]:
                right += 1
            policy.learn(requests[i], sure, right)
            tokens += right
    return (tokens / seconds) / (steps * streams / plain)


def best(machine: Machine, rates: tuple[float, ...], streams: int) -> float:
    """By formula, of the same number of drafts in every step for every stream."""
    found = [1.0]
    for depth in range(1, MAX_DEPTH + 1):
        each = 1 + sum(math.prod(rates[: d + 1]) for d in range(depth))
        step = 1 + machine.token * (streams * (1 + depth) - 1)
        drafts = depth * machine.draft * (1 + 0.2 * (streams - 1))
        found.append(each * (1 + machine.token * (streams - 1)) / (step + drafts))
    return max(found)


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
@pytest.mark.parametrize("rates", RATES)
def test_drafts_gain_what_they_can_and_lose_nothing(rates: str, streams: int) -> None:
    for token, draft in ((0.08, 0.06), (0.12, 0.15), (0.3, 0.15), (0.5, 0.4)):
        machine = Machine(token, draft)
        ratio, most = run(machine, RATES[rates], streams, 800), best(machine, RATES[rates], streams)
        assert ratio > 0.93 * most and ratio > 0.98, (token, draft, ratio, most)


def test_a_slow_first_draft_keeps_no_drafts_away() -> None:
    machine = Machine(slow_start=100.0)
    ratio, most = run(machine, RATES["good"], 1, 800), best(Machine(), RATES["good"], 1)
    assert ratio > 0.9 * most


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
@pytest.mark.parametrize("rates", RATES)
def test_where_tokens_grow_dearer_fewer_are_drafted(rates: str, streams: int) -> None:
    """Up to some tokens reading hides them, from there on each costs its multiplications."""

    class Bent(Machine):
        def exact(self, tokens: int) -> float:
            return 1 + 0.08 * (min(tokens, 2 * streams) - 1) + 0.3 * max(0, tokens - 2 * streams)

        def step(self, tokens: int) -> float:
            return self.exact(tokens) * self.rng.uniform(0.97, 1.06)

    machine, found = Bent(), [1.0]
    for depth in range(1, MAX_DEPTH + 1):
        each = 1 + sum(math.prod(RATES[rates][: d + 1]) for d in range(depth))
        step = machine.exact(streams * (1 + depth)) + depth * 0.15 * (1 + 0.2 * (streams - 1))
        found.append(each * machine.exact(streams) / step)
    ratio = run(machine, RATES[rates], streams, 800)
    assert ratio > 0.95 * max(found) and ratio > 0.98, (ratio, found)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_slow_first_steps_keep_no_drafts_away(streams: int) -> None:
    class Cold(Machine):
        seen = Counter[int]()

        def step(self, tokens: int) -> float:
            self.seen[tokens] += 1
            return super().step(tokens) * (4.0 if self.seen[tokens] == 1 else 1.0)

    cold = Cold(0.08, 0.06, slow_start=20.0)
    ratio, most = run(cold, RATES["good"], streams, 800), best(cold, RATES["good"], streams)
    assert ratio > 0.88 * most, (ratio, most)


def test_what_only_finds_out_is_verified_whatever_it_promises() -> None:
    policy, costs = HeadPolicy(), StepCosts()
    request: Any = SimpleNamespace(id=5, head_acceptance=None)
    for tokens, seconds in ((1, 1.0), (2, 9.0)) * 8:  # a price that nobody would pay
        costs.learn(tokens, seconds)
        policy.made(1, 1, 0.1)
    for _ in range(1000):
        if chosen := policy.choose([request], [3], costs, 1, 1.0):
            break
    assert chosen == {5: 1}
    judge = policy.going_on(request, policy.worth(costs, 1, 1))
    assert judge.takes(1e-4) and judge.sure == [1e-4]


@pytest.mark.parametrize("streams", [1, 2])
def test_a_neighbour_keeps_no_drafts_away_for_long(streams: int) -> None:
    """Steps with drafts took long for a while, in which hardly any other was measured."""

    class Beside(Machine):
        steps = 0

        def step(self, tokens: int) -> float:
            self.steps += 1
            busy = 100 < self.steps < 160 and tokens > streams
            return super().step(tokens) * (3.0 if busy else 1.0)

    machine = Beside()
    ratio, most = run(machine, RATES["good"], streams, 800), best(machine, RATES["good"], streams)
    assert ratio > 0.88 * most, (ratio, most)


def test_what_the_head_thinks_is_learnt() -> None:
    confidence, rng = Confidence(), Random(3)
    for _ in range(400):  # sure and right, or unsure and wrong
        confidence.learn([0.95], int(rng.random() < 0.9))
        confidence.learn([0.05], int(rng.random() < 0.1))
    assert confidence.chance(0.95, 0.5) > 0.8 and confidence.chance(0.05, 0.5) < 0.25
    assert confidence.chance(0.6, 0.37) == pytest.approx(0.37)  # nothing is known
    confidence.learn([0.6, 0.6, 0.6], 1)  # the third says nothing, for the second was wrong
    assert confidence._all[4] == 2 and confidence._right[4] == 1


def test_drafts_end_where_they_promise_too_little() -> None:
    policy = HeadPolicy()
    request: Any = SimpleNamespace(id=0, head_acceptance=None)
    for _ in range(100):
        policy.confidence.learn([0.95], 1)
        policy.confidence.learn([0.05], 0)
    dear = Worth((0.1, 0.1, 0.8), lambda streams: 0.15)
    sure = policy.going_on(request, dear)
    assert sure.takes(0.95) and going_on([sure]) == [0]
    assert sure.takes(0.95) and sure.sure == [0.95, 0.95]
    assert going_on([sure]) == []  # the third is dear to verify
    unsure = policy.going_on(request, dear)
    assert not unsure.takes(0.05) and going_on([unsure]) == [] and unsure.sure == []
    free = policy.going_on(request, Worth())
    assert free.takes(0.05) and going_on([free]) == [0]


def test_streams_share_what_making_their_drafts_costs() -> None:
    policy = HeadPolicy()
    worth = Worth((0.1, 0.1, 0.1), lambda streams: 0.5)
    judges = []
    for i in range(3):
        request: Any = SimpleNamespace(id=i, head_acceptance=None)
        judges.append(policy.going_on(request, worth))
        assert judges[i].takes(0.6)
    assert going_on(judges[:1]) == [] and going_on(judges) == [0, 1, 2]


def test_a_new_text_begins_with_what_others_have_shown() -> None:
    shared = HeadAcceptance()
    for _ in range(200):
        shared.learn(3, 3)
    assert HeadAcceptance(shared).rate(2) > 0.9 > HeadAcceptance().rate(2)
    assert "HeadAcceptance(1.00" in repr(shared) or "HeadAcceptance(0.9" in repr(shared)
