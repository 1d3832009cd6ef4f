"""DraftPlanner: which drafts the steps of an engine verify, from what has paid so far.

One policy for both sources, the text's repetitions and the model's head: drafts are made for the
requests, and as many, as make their tokens come faster on this machine, unless a number was asked
for. For one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from bitnet_ops.generate.draft_report import NO_DRAFTS, HeadReport
from bitnet_ops.generate.head_acceptance import MAX_DEPTH
from bitnet_ops.generate.head_policy import GoingOn, HeadPolicy, Worth
from bitnet_ops.generate.request import Request
from bitnet_ops.generate.speculation import Rest, StepCosts, propose
from bitnet_ops.generate.step_plan import PlannedStep, StepPlan


class Drafter(Protocol):
    """What drafts tokens for requests that decode, from what it knows of the model's states."""

    def propose(
        self, requests: Sequence[Request], depths: Sequence[int], judges: Sequence[GoingOn]
    ) -> tuple[list[list[int]], int]:
        """At most so many ids for each request, whose blocks have room for them.

        judges: whether a draft of a request is worth it. Also returns how many drafts were made one
        behind the other.
        """


class DraftPlanner:
    """Adds drafts to planned steps, and learns from what became of them.

    Args:
        max_positions: of the model.
        room: for how many of so many drafts a request has blocks, which it then holds.
    Attributes: `drafter`, the model's head, if it has one; `policy`, what is known of its drafts;
    `costs` of steps; `counts` of drafts so far, and how many of them were right; `report`, of what
    a head drafts.
    """

    def __init__(self, max_positions: int, room: Callable[[Request, int], int]) -> None:
        self._max_positions, self._room = max_positions, room
        self.drafter: Drafter | None = None
        self.policy, self.costs, self._rest = HeadPolicy(), StepCosts(), Rest()
        self.counts, self.report = NO_DRAFTS, HeadReport()

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Enter how long a planned step took from its plan to its tokens."""
        if plan.decoding == len(plan.steps):
            self.costs.learn(plan.tokens, seconds - plan.drafting)

    def verified(self, step: PlannedStep, accepted_drafts: int) -> str | None:
        """Enter how many drafts of a step were right; a remark on the draft head, once."""
        request, drafted = step.request, len(step.drafts)
        if not drafted:
            return None
        request.drafts = request.drafts.plus(step.source, drafted, accepted_drafts)
        self.counts = self.counts.plus(step.source, drafted, accepted_drafts)
        if step.source == "head":
            self.policy.learn(request, step.sure, accepted_drafts)
            return self.report.add(drafted, accepted_drafts)
        if request.acceptance is not None:
            request.acceptance.learn(drafted, accepted_drafts)
        return None

    def add(self, plan: StepPlan, *, busy: bool) -> None:
        """Add drafts to the planned decode steps, as far as budget and free blocks allow.

        Nothing where none paid just now. busy: prompts wait, which keep half of what is left.
        """
        steps = plan.steps.values()
        adaptive = all(s.request.acceptance is not None or not s.request.max_drafts for s in steps)
        if adaptive and not self._rest.over(plan.steps):
            return
        began = time.perf_counter()
        self._draft(plan, plan.left // 2 if busy else plan.left)
        plan.drafting = time.perf_counter() - began
        if any(step.drafts for step in steps):
            self._rest.drafted()
        elif adaptive:
            self._rest.begin(plan.drafting, self.costs.of(plan.tokens))

    def _draft(self, plan: StepPlan, left: int) -> None:
        """Add at most `left` drafts.

        What the text repeats comes before what a head thinks, where it promises as much: it costs
        nothing to look up.
        """
        tokens, streams = plan.tokens, len(plan.steps)
        expected = float(streams)
        others: list[tuple[PlannedStep, int]] = []  # that a head may draft for
        for step in plan.steps.values():
            request = step.request
            maximum = min(left, request.draft_limit(self._max_positions))
            limit, acceptance = maximum, request.acceptance
            if not request.drafts_from_text:
                maximum = 0
            elif maximum > 0 and acceptance is not None:
                acceptance.read(request.content)
                wanted = acceptance.choose(self.costs, tokens, expected, streams, self._rest.steps)
                maximum = min(maximum, wanted)
            has_head = self.drafter is not None and request.drafts_from_head
            if has_head and maximum > 0 and acceptance is not None:
                head = self.policy.speed(request, limit, self.costs, tokens, expected)
                maximum = maximum if acceptance.speed >= head else 0
            drafts = self._from_text(request, maximum)
            if not drafts and has_head and limit > 0:
                others.append((step, limit))
            if drafts := drafts[: self._room(request, min(maximum, len(drafts)))]:
                step.drafts = drafts
                left -= len(drafts)
                tokens += len(drafts)
                if acceptance is not None:
                    expected += acceptance.tokens(len(drafts)) - 1
        if others and left > 0:
            self._by_head(others, left, tokens, expected)

    def _from_text(self, request: Request, maximum: int) -> list[int]:
        """At most so many drafts from what the text repeats."""
        if maximum <= 0:
            return []
        drafts = propose(request.content, maximum)
        if request.runs is not None:  # what stands for rows is no token
            drafts = [*takewhile(lambda token: token >= 0, drafts)]
        return drafts[: request.allowed(drafts)]

    def _by_head(
        self, others: Sequence[tuple[PlannedStep, int]], left: int, tokens: int, expected: float
    ) -> None:
        """Add drafts of the model's head to some of the steps, at most `left` in all."""
        assert self.drafter is not None
        began = time.perf_counter()
        each = max(1, left // len(others))
        limits = [min(limit, each) for _, limit in others]
        adaptive = any(step.request.acceptance is not None for step, _ in others)
        if not adaptive:  # so many were asked for
            chosen = {s.request.id: n for (s, _), n in zip(others, limits, strict=True)}
        else:
            requests = [step.request for step, _ in others]
            chosen = self.policy.choose(
                requests, limits, self.costs, tokens, expected, self._rest.steps
            )
        steps, depths = [], []
        for step, _ in others:
            wanted = min(left, chosen.get(step.request.id, 0), MAX_DEPTH)
            if wanted > 0 and (depth := self._room(step.request, wanted)) > 0:
                steps.append(step)
                depths.append(depth)
                left -= depth
        if not steps:
            return
        worth = Worth()
        if adaptive:
            worth = self.policy.worth(self.costs, tokens, len(steps))
        judges = [self.policy.going_on(step.request, worth) for step in steps]
        found, made = self.drafter.propose([step.request for step in steps], depths, judges)
        self.policy.made(len(steps), made, time.perf_counter() - began)
        for step, drafts, judge in zip(steps, found, judges, strict=True):
            step.drafts, step.source = drafts[: step.request.allowed(drafts)], "head"
            step.sure = judge.sure[: len(step.drafts)]
            if not step.drafts:  # they have cost their time all the same
                self.policy.learn(step.request, (), 0)
