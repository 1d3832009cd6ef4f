"""Run: one batch of prompts on its way through an engine that others may use at the same time.

It queues a request for each prompt, waits for their events and enters them into generations. It
must not know models, memory or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from bitnet_ops.generate.engine_core import EngineCore
from bitnet_ops.generate.generation import Generation, Limits, Timing, TokenLogprobs
from bitnet_ops.generate.request import Failed, Inbox, NewToken
from bitnet_ops.generate.sampling import SamplingParams


class Run:
    """Some prompts, run together. Iterating gives (row, token id) as tokens come.

    Its requests are queued at the first step. From then on every step of the engine computes them
    too, whoever takes it: what comes is kept until it is asked for. A run that is closed or dropped
    ends its requests; after an exception it is closed.

    Attributes: `generations`, one per prompt, growing; `timing`; `active`, False at the end.
    """

    def __init__(
        self,
        core: Callable[[], EngineCore],
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        limits: Limits,
        patient: bool = False,
        max_drafts: int | Literal["auto"] = 0,
        adapter: str | None = None,
    ) -> None:
        self._rows: dict[int, int] = {}  # by the id of the request, of those that have not ended
        self._get_core = core
        self._core: EngineCore | None = None
        self._prompts, self._params = prompts, [p.seeded() for p in params]
        self.limits, self._patient, self._max_drafts = limits, patient, max_drafts
        self._adapter = adapter
        self.generations = [Generation(seed=p.seed) for p in self._params]
        self.timing = Timing(prompt_tokens=sum(map(len, prompts)))
        self._active = set(range(len(prompts)))
        self._silent = set(self._active)  # no token yet
        self._inbox, self._seconds = Inbox(), 0.0

    @property
    def active(self) -> bool:
        return bool(self._active)

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
        return f"{type(self).__name__}({len(g)} prompts, {ended} ended, {tokens} new tokens)"

    def cancel(self, row: int, reason: str, stop_reason: int | str | None = None) -> None:
        """End one row for a reason of the caller's; it gets no further tokens."""
        self.generations[row].finish_reason = reason
        self.generations[row].stop_reason = stop_reason
        self._active.discard(row)
        self._silent.discard(row)
        for id in [id for id, r in self._rows.items() if r == row]:
            del self._rows[id]
            if self._core is not None:
                self._core.abort(id)

    def close(self) -> None:
        """End the run; rows that have not ended keep an empty finish_reason."""
        self._active.clear()
        while self._rows:
            id, _ = self._rows.popitem()
            if self._core is not None:
                self._core.abort(id)

    def __del__(self) -> None:
        if self._rows and self._core is not None:
            self._core.abandon(self._rows)  # a finalizer may wait for no lock

    def _begin(self) -> EngineCore:
        core = self._core = self._get_core()
        for row in sorted(self._active):
            id = core.add(
                self._prompts[row],
                self._params[row],
                self.limits,
                inbox=self._inbox,
                patient=self._patient,
                adapter=self._adapter,
                max_drafts=self._max_drafts,
            )
            self._rows[id] = row
        return core

    def _wait(self) -> None:
        """Until there is an event."""
        if self._inbox:
            return
        try:
            core = self._begin() if self._core is None else self._core
            core.wait(self._inbox)
        except BaseException:
            self.close()
            raise

    def _take(self) -> tuple[int, int] | None:
        """Enter the next event; the token, if it is one."""
        event, timing, first = self._inbox.popleft(), self.timing, bool(self._silent)
        seconds, self._seconds = self._inbox.seconds - self._seconds, self._inbox.seconds
        if first:
            timing.first_token_s += seconds
            timing.reused_tokens = self._inbox.reused_tokens
        else:
            timing.decode_s += seconds
        row = self._rows.get(event.request_id)
        if row is None:  # cancelled
            return None
        generation = self.generations[row]
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
        self._active.discard(row)
        self._silent.discard(row)
        generation.finish_reason, generation.stop_reason = event.reason, event.stop_reason
        timing.decoded_tokens += not first and event.reason == "stop"
        return None
