"""What a step computes: planned tokens and drafts of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bitnet_ops.generate.draft_choice import Source
from bitnet_ops.generate.request import Request
from bitnet_ops.models.step_batch import SequenceStep


@dataclass
class PlannedStep:
    """What a request computes in a step: `tokens` of its ids from `start` on, then `drafts`.

    `source`: what has made the drafts; `sure`: their probabilities by the head, if that has.
    """

    request: Request
    start: int
    tokens: int
    drafts: Sequence[int] = ()
    source: Source = "ngram"
    sure: Sequence[float] = ()

    @property
    def token_ids(self) -> Sequence[int]:
        ids = self.request.ids[self.start : self.start + self.tokens]
        ids.extend(self.drafts)
        return ids

    def sequence(self, logits: int) -> SequenceStep:
        """What it brings to the model's step."""
        request, start = self.request, self.start
        found = SequenceStep(
            self.token_ids, start, request.blocks, logits, request.adapter, self.state
        )
        if (runs := request.runs) is None:
            return found
        end = start + self.tokens + len(self.drafts)
        return found._replace(
            shift=runs.shift(start), axes=runs.positions(start, end), rows=runs.rows(start, end)
        )

    @property
    def state(self) -> tuple[int, int, int] | None:
        """As SequenceStep has it."""
        slot = self.request.slot
        return None if slot < 0 else (slot, self.request.replays, len(self.drafts))

    @property
    def logits(self) -> int:
        """Rows of logits: of its newest token and each draft; none before the prompt's end."""
        at_end = self.start + self.tokens == len(self.request.ids)
        return 1 + len(self.drafts) if at_end else 0


@dataclass
class StepPlan:
    """`steps`: by the request's id. `failed`: requests that no step can run, with the reason.

    `budget`: tokens that it may have. `decoding`: how many requests decode in it. `drafting`: the
    seconds that went into drafts and into choosing how many.
    """

    budget: int = 0
    decoding: int = 0
    drafting: float = 0.0
    steps: dict[int, PlannedStep] = field(default_factory=dict)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(step.tokens + len(step.drafts) for step in self.steps.values())

    @property
    def left(self) -> int:
        return self.budget - self.tokens
