"""Run: some prompts run to their ends by a caller who waits, on an engine that others may use too.

A run queues a request for each prompt, has the engine step until their events come, and collects
the tokens of each prompt in a Generation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from bitnet_ops.errors import counted
from bitnet_ops.generate.draft_report import NO_DRAFTS, DraftCounts
from bitnet_ops.generate.request import Event, Failed, NewToken, Request


class RequestRunner(Protocol):
    """What a run needs of an engine."""

    @property
    def seconds(self) -> float:
        """Of all steps so far."""

    def _submit(self, request: Request) -> None:
        """Queue a request."""

    def _advance(self, inbox: Sized) -> None:
        """Take a step unless `inbox` has something; while another thread steps, wait for it."""

    def abort(self, id: int) -> bool:
        """End a request."""

    def _abandon(self, ids: list[int]) -> None:
        """End requests; takes no lock, so that a finalizer may call it."""


@dataclass
class Timing:
    """Seconds of the engine's steps (not of the consumer of the stream) during one run.

    `first_token_s`: from the start until every prompt has its first token, prefill included;
    `decode_s`: the steps after.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of the decode steps, all rows together, per second; 0 where there was none."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Logarithms of probabilities at one place of an answer, before all options of sampling.

    `top_logprobs`: (token id, logarithm) of the most probable tokens there, the first one first;
    the chosen one need not be among them.
    """

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass
class Generation:
    """The answer to one prompt. `token_ids` leaves out the stop id.

    `logprobs`: of each of token_ids, if they were asked for; else empty. `drafts`: how many were
    verified, and were right, by what made them.

    `finish_reason`: "stop", "length" (max_new_tokens), "context" (no position is left), "" while it
    runs or when the consumer broke off. `stop_reason` tells what "stop" was: the stop id, or the
    stop text that whoever reads the tokens has found; else None.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    seed: int | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafts: DraftCounts = field(default=NO_DRAFTS, compare=False)

    @property
    def ending(self) -> str:
        """Why it ended, in words for people."""
        if self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            return f"stop text {self.stop_reason!r}"
        if self.finish_reason == "stop":
            return "end of text"
        words = {
            "length": "max_new_tokens reached",
            "context": "context full: no position is left",
            "": "not finished",
        }
        return words.get(self.finish_reason, self.finish_reason)


class Run:
    """Some prompts, run together. Iterating gives (row, token id) as tokens come.

    Its requests are queued at the first step. From then on every step of the engine computes them
    too, whoever takes it: what comes is kept until it is asked for. A run that is closed or dropped
    ends its requests; after an exception it is closed.

    Attributes: `generations`, one per prompt, growing; `timing`; `active`, False at the end.
    """

    def __init__(self, engine: RequestRunner, requests: Sequence[Request]) -> None:
        self._engine, self._requests = engine, list(requests)
        self._queued = False
        self._rows = {request.id: row for row, request in enumerate(requests)}
        self.generations = [Generation(seed=request.sampler.seed) for request in requests]
        self.timing = Timing(prompt_tokens=sum(request.prompt_tokens for request in requests))
        self._silent = set(self._rows.values())  # rows without a token yet
        self._inbox: deque[tuple[Event, float]] = deque()  # with the engine's seconds by then
        self._seconds = 0.0

    @property
    def active(self) -> bool:
        return bool(self._rows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.active:
            self._wait()
            if (token := self._take()) is not None:
                yield token

    def step(self) -> list[tuple[int, int]]:
        """What has come since the step before, or else comes next: [(row, token id)].

        Stop ids are left out. A step of the engine computes a token of every row whose prompt has
        been computed. Nothing comes only from what has ended.
        """
        found: list[tuple[int, int]] = []
        while self.active and not found:
            self._wait()
            while self._inbox:
                if (token := self._take()) is not None:
                    found.append(token)
        return found

    def __repr__(self) -> str:
        g = self.generations
        ended = sum(bool(one.finish_reason) for one in g)
        tokens = sum(len(one.token_ids) for one in g)
        prompts, new = counted(len(g), "prompt"), counted(tokens, "new token")
        return f"{type(self).__name__}({prompts}, {ended} ended, {new})"

    def cancel(self, row: int, reason: str, stop_reason: int | str | None = None) -> None:
        """End one row for a reason of the caller's; it gets no further tokens."""
        self.generations[row].finish_reason = reason
        self.generations[row].stop_reason = stop_reason
        self._silent.discard(row)
        for id in [id for id, r in self._rows.items() if r == row]:
            del self._rows[id]
            if self._queued:
                self._engine.abort(id)

    def close(self) -> None:
        """End the run; rows that have not ended keep an empty finish_reason."""
        if self._queued:
            self._engine._abandon(list(self._rows))
        self._rows.clear()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """What copy and pickle call. Nobody would compute a copy's requests."""
        raise TypeError(
            "run: expected a run that stays what it is, got a copy, which nobody would compute; "
            "begin another one, or copy its generations"
        )

    def __del__(self) -> None:
        if getattr(self, "_rows", None):
            self.close()

    def _wait(self) -> None:
        """Until there is an event."""
        if not self._queued:
            self._queue()
        try:
            while not self._inbox:
                self._engine._advance(self._inbox)
        except BaseException:
            self.close()
            raise

    def _queue(self) -> None:
        engine, inbox = self._engine, self._inbox

        def hear(event: Event) -> None:  # must not hold the run: see __del__
            inbox.append((event, engine.seconds))

        self._queued, self._seconds = True, engine.seconds
        for request in self._requests:
            if request.id in self._rows:
                request.consumer = hear
                engine._submit(request)

    def _take(self) -> tuple[int, int] | None:
        """Enter the next event; the token, if it is one."""
        event, at = self._inbox.popleft()
        timing, first = self.timing, bool(self._silent)
        seconds, self._seconds = at - self._seconds, at
        if first:
            timing.first_token_s += seconds
            timing.reused_tokens = sum(r.reused_tokens or 0 for r in self._requests)
        else:
            timing.decode_s += seconds
        row = self._rows.get(event.request_id)
        if row is None:  # cancelled
            return None
        generation = self.generations[row]
        if not isinstance(event, Failed):
            generation.drafts = event.drafts
        if isinstance(event, NewToken):
            self._silent.discard(row)
            generation.token_ids.append(event.token_id)
            if event.logprob is not None:
                generation.logprobs.append(
                    TokenLogprobs(event.token_id, event.logprob, event.top_logprobs)
                )
            timing.new_tokens += 1
            timing.decoded_tokens += not first
            return row, event.token_id
        del self._rows[event.request_id]
        if isinstance(event, Failed):
            self.close()
            raise event.error
        self._silent.discard(row)
        generation.finish_reason, generation.stop_reason = event.reason, event.stop_reason
        timing.decoded_tokens += not first and event.reason == "stop"
        return None
