"""EngineCore: requests in, events out; admits, steps and aborts many sequences at once.

A step schedules, runs the model once over the tokens of all its requests, chooses their next
tokens and reports. What the model is, it does not know: a `runner` maps a StepBatch to logits.
Nor how a token is chosen: `sample_rows` maps samplers and rows of logits to tokens.

Any thread may call add, fork, abort and the rest while another is in step: they wait for its
bookkeeping only, not for the model. Steps themselves run one at a time, for all requests, whoever
calls for them: one who drives the engine (`step`), or whoever waits for events of its own (`wait`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from bitnet_ops.generate.drafts import propose
from bitnet_ops.generate.prompts import check_prompt
from bitnet_ops.generate.request import Event, Failed, Finished, Inbox, NewToken, Request
from bitnet_ops.generate.sampling import Sampled, Sampler, sample_rows
from bitnet_ops.generate.scheduler import (
    PlannedStep,
    Propose,
    Scheduler,
    SchedulerOptions,
    StepPlan,
)
from bitnet_ops.generate.speculation import check_drafts
from bitnet_ops.models.step_batch import SequenceStep, StepBatch, logit_rounds
from bitnet_ops.nn.blocks import BlockAllocator

if TYPE_CHECKING:
    from bitnet_ops.generate.generation import Limits

Runner = Callable[[StepBatch], Tensor]
SampleRows = Callable[[Sequence[Any], Tensor], Sequence[Sampled]]


class InterruptedStepError(RuntimeError):
    """An interrupt (Ctrl-C) came while a step was entered into the books."""

    def __init__(self) -> None:
        super().__init__(
            "engine: expected a step to be done to its end, got an interrupt in its bookkeeping; "
            "the requests of that moment are lost, ask again"
        )


class Pool(Protocol):
    """What the core needs of the memory behind the blocks: KVPool, or a test's own."""

    @property
    def blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def release(self, blocks: Iterable[int]) -> None: ...
    def grow(self, count: int) -> None: ...


@dataclass(frozen=True)
class EngineStats:
    """Counts of requests and blocks at one moment, the others since the beginning (Scheduler)."""

    waiting: int
    running: int
    blocks: int
    used_blocks: int
    cached_blocks: int
    preemptions: int
    reused_tokens: int
    drafted_tokens: int
    accepted_drafts: int


@dataclass
class _Outcome:
    """What a planned step gave: tokens, of which all but the last were drafted, or an error."""

    step: PlannedStep
    sampled: list[Sampled] = field(default_factory=list)
    error: Exception | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the newest token is the draft whose logits the step has computed already."""
        at, drafts = len(self.sampled) - 1, self.step.drafts
        return self.error is None and at < len(drafts) and self.sampled[at].token == drafts[at]


class EngineCore:
    """Runs requests over one pool.

    Args:
        runner: logits f32 [r, V] of a StepBatch, whose keys and values it writes into the pool.
        pool: the memory of the blocks.
        max_positions: of the model; a prompt may have as many tokens.
        vocab_size: of the model.
        options: budgets of a step, prefix cache.
        make_sampler: the sampler of (params, prompt ids); what params are is between the caller
            and it.
        sample_rows: for each row of logits the next token by the sampler beside it, or the
            error that ends that request alone.
        propose: drafts for (ids, at most so many).
        allocator: of the pool's blocks, if not a new one.
        most_cached: how many blocks that no request uses the prefix cache keeps; None: all.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        *,
        max_positions: int,
        vocab_size: int,
        options: SchedulerOptions | None = None,
        make_sampler: Callable[[Any, Sequence[int]], Any] = Sampler,
        sample_rows: SampleRows = sample_rows,
        propose: Propose = propose,
        allocator: BlockAllocator | None = None,
        most_cached: int | None = None,
    ) -> None:
        self._runner, self._pool = runner, pool
        self._max_positions, self._vocab_size = max_positions, vocab_size
        self._make_sampler, self._sample_rows = make_sampler, sample_rows
        self._allocator = allocator or BlockAllocator(pool.blocks, most_cached)
        self._most_cached, self._options, self._propose = most_cached, options, propose
        self._scheduler = self._make_scheduler()
        self._requests: dict[int, Request] = {}
        self._next_id = self._epoch = 0
        self._events: list[Event] = []  # of what happened between two steps
        self._in_flight = StepPlan()
        self._abandoned: deque[int] = deque()
        self._entered_s = 0.0  # to enter the last step; it counts to the next
        # An interrupt may come between any two lines. `_torn` is set while the books are changed,
        # `_drawn` from the first draw of a step until its tokens are entered: who finds one set
        # that he did not set himself starts anew.
        self._torn = self._drawn = False
        self._lock = threading.Lock()  # of all state; never held while the model runs
        self._stepping = threading.Lock()
        self._stepped = threading.Condition(self._lock)

    def _make_scheduler(self) -> Scheduler:
        pool = self._pool
        return Scheduler(
            self._allocator,
            pool.block_size,
            self._max_positions,
            pool.copy_block,
            self._options,
            self._propose,
        )

    def __repr__(self) -> str:
        return f"EngineCore({self.stats()})"

    # Requests ------------------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Sequence[int],
        params: Any,
        limits: Limits,
        *,
        adapter: str | None = None,
        max_drafts: int | Literal["auto"] = 0,
        inbox: Inbox | None = None,
        patient: bool = False,
    ) -> int:
        """Queue a request; its id. Its tokens come as events of later steps.

        `adapter`: name of its LoRA adapter. `max_drafts`: the most tokens to draft in a step;
        "auto": as many as make this request faster on this machine (speculation.py).
        `inbox`: gets its events, whoever steps, instead of the list that a step returns.
        `patient`: nobody waits for its single tokens, only for all of them.
        Raises PromptError for a prompt that cannot be run, and as make_sampler does.
        """
        check_prompt(prompt_ids, self._vocab_size, self._max_positions)
        check_drafts(max_drafts, "engine: expected max_drafts")
        sampler = self._make_sampler(params, prompt_ids)
        with self._lock, self._changed():
            request = Request(
                self._next_id,
                prompt_ids,
                sampler,
                limits,
                adapter=adapter,
                max_drafts=max_drafts,
                inbox=inbox,
                patient=patient,
                epoch=self._epoch,
            )
            if not self._register(request):
                self._scheduler.add(request)
            return request.id

    def fork(self, id: int, params: Any, limits: Limits, *, inbox: Inbox | None = None) -> int:
        """Queue a request that goes on from the tokens of request `id`; its id.

        Both share their blocks until they write them. The limits count the tokens that `id` has
        produced so far; no events repeat these. Raises KeyError where `id` is unknown or ended.
        """
        with self._lock:
            parent = self._requests[id]
            sampler = self._make_sampler(params, parent.ids.tolist())
            child = parent.fork(self._next_id, sampler, limits, inbox)
            with self._changed():
                ended = parent.ended  # by what was found when the books were opened
                if not ended and not self._register(child):
                    self._scheduler.fork(parent, child)
        if ended:
            raise KeyError(id)
        return child.id

    def _register(self, request: Request) -> bool:
        """Count a new request in; whether its limits leave nothing to do."""
        self._next_id += 1
        if (ending := request.end(self._max_positions)) is not None:
            request.ended = True
            self._tell(request, ending)
        else:
            self._requests[request.id] = request
        return request.ended

    def abort(self, id: int) -> bool:
        """End a request now, waiting, in its prompt or running; False if it has ended already.

        Its last event is a Finished with reason "abort".
        """
        with self._lock, self._changed():
            return self._abort(id)

    def _abort(self, id: int) -> bool:
        request = self._requests.get(id)
        if request is None:
            return False
        self._end(request, Finished(id, "abort"))
        if id not in self._in_flight.steps:  # else the step still writes its blocks
            self._scheduler.remove(request)
        return True

    def abandon(self, ids: Iterable[int]) -> None:
        """Abort requests before the next step; takes no lock, so that a finalizer may call it."""
        self._abandoned.extend(ids)

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """While the books change, with the lock held; what was abandoned is aborted first.

        Where an interrupt or another error has cut off an earlier change nothing of it can be
        trusted: all requests fail, and the blocks are counted anew.
        """
        if self._torn:
            self._start_anew()
        self._torn = True
        while self._abandoned:
            self._abort(self._abandoned.popleft())
        yield
        self._torn = False  # not after an error

    def _start_anew(self) -> None:
        self._in_flight, self._drawn = StepPlan(), False
        self._allocator = BlockAllocator(self._pool.blocks, self._most_cached)
        self._scheduler = self._make_scheduler()
        for request in list(self._requests.values()):
            self._end(request, Failed(request.id, InterruptedStepError()))

    def request(self, id: int) -> Request:
        """The request `id`, to be read only. Raises KeyError once it has ended."""
        return self._requests[id]

    @property
    def has_work(self) -> bool:
        """Whether a step would run anything or has events to give."""
        with self._lock:
            if self._abandoned:
                with self._changed():
                    pass
            return bool(self._requests or self._events)

    def forget_costs(self) -> None:
        """Learn anew what steps cost, as on another machine or model."""
        with self._lock:
            self._scheduler.forget_costs()

    # Memory --------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        with self._lock:
            with self._changed():
                pass  # what was abandoned does not count
            blocks, scheduler = self._allocator, self._scheduler
            return EngineStats(
                waiting=len(scheduler.waiting),
                running=len(scheduler.running),
                blocks=blocks.blocks,
                used_blocks=blocks.used_blocks,
                cached_blocks=blocks.cached_blocks,
                preemptions=scheduler.preemptions,
                reused_tokens=scheduler.reused_tokens,
                drafted_tokens=scheduler.drafted_tokens,
                accepted_drafts=scheduler.accepted_drafts,
            )

    def grow(self, blocks: int) -> None:
        """Make the pool larger by that many blocks, as far as it has reserved room."""
        with self._stepping, self._lock, self._changed():
            self._pool.grow(blocks)
            self._allocator.add_blocks(blocks)

    def trim(self, *, keep_cached: bool = False) -> None:
        """Give the memory of free blocks back to the system; the prefix cache goes too."""
        with self._stepping, self._lock, self._changed():
            if not keep_cached:
                self._allocator.forget_all()
            self._pool.release(self._allocator.reclaim())

    def forget_prefixes(self) -> None:
        """Requests from now on share nothing with earlier ones: weights or an adapter changed."""
        with self._lock, self._changed():
            self._epoch += 1
            self._allocator.forget_all()

    # Steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Compute the next tokens; what happened since the step before, in order.

        Events of requests with an inbox go there. An exception of the runner leaves all requests as
        they were, so that the step can be tried again; one of a single request is its Failed event.
        """
        with self._stepping:
            self._step()
        with self._lock:
            self._stepped.notify_all()
            events, self._events = self._events, []
        return events

    def wait(self, inbox: Inbox) -> None:
        """Until `inbox` has an event: takes steps, or waits for those that another thread takes.

        It must be the inbox of a request that has not ended. Raises what the runner raises.
        """
        while not inbox:
            with self._lock:
                if self._stepping.locked():
                    # Whoever steps says so afterwards, unless an interrupt keeps him from it.
                    self._stepped.wait(timeout=1.0)
                    continue
            with self._stepping:
                if not inbox:
                    self._step()
            with self._lock:
                self._stepped.notify_all()

    def run(self) -> list[Event]:
        """Step until nothing is left to do; all events."""
        events = []
        while self.has_work:
            events += self.step()
        return events

    def _step(self) -> None:
        began = time.perf_counter() - self._entered_s
        with self._lock:
            plan = self._plan()
        outcomes: list[_Outcome] = []
        try:
            outcomes = self._run(plan) if plan.steps else []
        finally:
            entering = time.perf_counter()
            with self._lock:
                self._enter(plan, outcomes, entering - began)
        self._entered_s = time.perf_counter() - entering

    def _plan(self) -> StepPlan:
        self._torn |= self._drawn
        with self._changed():
            self._take_out_ended()  # an interrupt may have come before this was done
            plan = self._in_flight = self._scheduler.schedule()
            for request, error in plan.failed:
                self._end(request, Failed(request.id, error))
        return plan

    def _take_out_ended(self) -> None:
        """End the step in flight: those that were aborted meanwhile give their blocks back."""
        steps, self._in_flight = self._in_flight.steps, StepPlan()
        for step in steps.values():
            if step.request.ended:
                self._scheduler.remove(step.request)

    def _enter(self, plan: StepPlan, outcomes: Sequence[_Outcome], seconds: float) -> None:
        """Enter what a planned step gave into the books."""
        with self._changed():
            if self._in_flight is not plan:  # `_changed` had to start anew
                return
            for inbox in {
                id(i): i for s in plan.steps.values() if (i := s.request.inbox) is not None
            }.values():
                inbox.seconds += seconds
            self._take_out_ended()
            for outcome in outcomes:
                if not outcome.step.request.ended:
                    self._commit(outcome)
        if outcomes:
            self._drawn = False  # else drawing has failed, and the samplers have gone on

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> list[_Outcome]:
        """The model over all planned tokens, then the tokens that their logits give.

        A draft is right if it is the token that its sampler chooses at that place; then the
        sampler goes on with the logits after the draft. So every sampler sees the logits that it
        would see without drafts, in the same order, and chooses the same, whatever its method.
        """
        steps = list(plan.steps.values())
        batch = StepBatch.of(
            [
                SequenceStep(s.token_ids, s.start, s.request.blocks, s.logits, s.request.adapter)
                for s in steps
            ],
            self._pool.block_size,
        )
        began = time.perf_counter()
        logits = self._runner(batch)
        self._scheduler.learn(plan, time.perf_counter() - began)
        outcomes = [_Outcome(step) for step in steps]
        self._drawn, begin = True, 0
        for k, members in enumerate(logit_rounds([s.logits for s in steps])):
            rows = [i for i, at in enumerate(members) if not k or outcomes[at].goes_on]
            if not rows:
                break
            chosen = [outcomes[members[i]] for i in rows]
            table = logits[begin : begin + len(members)]
            table = table if len(rows) == len(members) else table[rows]
            samplers = [outcome.step.request.sampler for outcome in chosen]
            for outcome, sampled in zip(chosen, self._sample_rows(samplers, table), strict=True):
                if sampled.error is not None:
                    outcome.error = sampled.error
                else:
                    outcome.sampled.append(sampled)
            begin += len(members)
        return outcomes

    def _commit(self, outcome: _Outcome) -> None:
        """Enter what a step gave into its request, and the request's end."""
        step, request = outcome.step, outcome.step.request
        ending: Event | None = None
        for one in outcome.sampled:
            finished = ending = request.accept(one.token, self._max_positions)
            if finished is None or finished.reason != "stop":
                new = NewToken(request.id, one.token, one.logprob, one.top_logprobs)
                self._tell(request, new)
            if finished is not None:
                break
        if ending is None and outcome.error is not None:
            ending = Failed(request.id, outcome.error)
        self._scheduler.computed(step, max(0, len(outcome.sampled) - 1))
        if ending is not None:
            self._scheduler.remove(request, failed=isinstance(ending, Failed))
            self._end(request, ending)

    def _end(self, request: Request, event: Event) -> None:
        request.ended = True
        del self._requests[request.id]
        self._tell(request, event)

    def _tell(self, request: Request, event: Event) -> None:
        (self._events if request.inbox is None else request.inbox).append(event)
