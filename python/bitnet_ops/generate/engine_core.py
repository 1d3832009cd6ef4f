"""EngineCore: the lives of requests, from the message that brings them to their last event.

All of an engine's state that changes is here, and changes only in calls that the engine makes one
at a time (turns.py), but for two: `submit` and `abandon` leave messages, from any thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Sequence

from bitnet_ops.generate.causal_model import (
    CausalModel,
    ClosedModel,
    cache_config,
    check_adapter,
)
from bitnet_ops.generate.disk_prefix import DiskPrefix
from bitnet_ops.generate.draft_report import LOG as DRAFT_LOG
from bitnet_ops.generate.drafting import drafter_of
from bitnet_ops.generate.engine_memory import EngineMemory, MemoryPlan
from bitnet_ops.generate.engine_step import run_model
from bitnet_ops.generate.prefix_store import PrefixStore
from bitnet_ops.generate.request import Consumer, Event, Failed, Finished, NewToken, Request
from bitnet_ops.generate.sampling import Sampled
from bitnet_ops.generate.scheduler import EngineStats, Scheduler
from bitnet_ops.generate.step_plan import PlannedStep
from bitnet_ops.generate.text_roots import TextRoots
from bitnet_ops.nn.lora import LoraError

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT_S = 0.05  # for the disk, until messages are read again


class EngineCore:
    """Requests of one model in one memory, which is made with the first request.

    Attributes:
        model: the model; a ClosedModel after `shut_down`.
        plan: how much memory it may take.
        store: the prefix cache on disk, if there is one.
        messages: new requests, and ids of those to abort; read at the beginning of a step.
        requests: those that have not ended, by id.
        events: of requests without a consumer, until somebody takes them.
        memory: None before the first request and after a defect.
        seconds: of all steps so far.
    """

    def __init__(self, model: CausalModel, plan: MemoryPlan, store: PrefixStore | None) -> None:
        self.model, self.plan, self.store = model, plan, store
        self.messages: deque[Request | int] = deque()
        self.requests: dict[int, Request] = {}
        self.events: list[Event] = []
        self.memory: EngineMemory | None = None
        self.seconds = 0.0
        self._returned: list[tuple[Consumer | None, Event]] = []  # by this step
        self._roots = TextRoots(on_disk=store is not None)
        self._disk: DiskPrefix | None = None

    # From any thread -----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.id] = request
        self.messages.append(request)

    def abandon(self, ids: Sequence[int]) -> None:
        """Abort requests before the next step; takes no lock, so that a finalizer may call it."""
        self.messages.extend(ids)

    # Between steps -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Read the messages, and tell consumers what came of them."""
        self._read_messages()
        self._tell()

    def take_events(self) -> list[Event]:
        """Events of requests without a consumer, since the last call."""
        events, self.events = self.events, []
        return events

    def stats(self) -> EngineStats:
        """Requests and blocks at this moment."""
        if self.memory is None:
            stats = EngineStats(len(self.requests), 0, self.plan.sizes.blocks, 0, 0, 0, 0, 0, 0)
        else:
            stats = self.memory.scheduler.stats()
        if self.store is None:
            return stats
        pieces, nbytes = self.store.counts
        waiting, tokens = stats.waiting, 0
        if self._disk is not None:
            waiting, tokens = waiting + self._disk.arriving, self._disk.tokens
        return dataclasses.replace(
            stats,
            waiting=waiting,
            disk_pieces=pieces,
            disk_mb=nbytes / 2**20,
            disk_tokens=tokens,
        )

    def trim(self) -> None:
        """Give all memory that no request uses back to the system."""
        self.settle()
        if self.memory is not None:
            self.memory.trim()
        if self.store is not None:
            self.store.trim(2.0)

    def shut_down(self) -> None:
        """End all requests, and give the memory and the model up."""
        self.model = ClosedModel(cache_config(self.model))
        self.messages.extend(list(self.requests))
        self._read_messages()
        self.memory = self._disk = None
        self._tell()

    # A step --------------------------------------------------------------------------------------

    def step(self) -> None:
        """The next tokens of all requests, told to their consumers."""
        began = time.perf_counter()
        try:
            self._read_messages()
            if self.memory is not None and self.requests:
                self._schedule_arrived(self.memory.scheduler)
                self._compute(self.memory)
        except BaseException as error:  # a defect of the engine, or a model that ends the process
            self.memory = None  # of what blocks and queues hold nothing is certain
            for request in list(self.requests.values()):
                self._end(request, Failed(request.id, error))
            self._disk = None
            raise
        finally:
            self.seconds += time.perf_counter() - began
            self._tell()

    def _compute(self, memory: EngineMemory) -> None:
        """The next tokens of the requests that the scheduler chooses."""
        began = time.perf_counter()
        plan = memory.scheduler.schedule()
        for request, full in plan.failed:
            self._end(request, Failed(request.id, full))
        steps = [s for s in plan.steps.values() if self._may_run(s.request)]
        if not steps:
            return
        try:
            outcomes = run_model(self.model, memory, steps)
        except BaseException as error:
            for step in steps:
                self._end(step.request, Failed(step.request.id, error))
            if not isinstance(error, Exception):
                raise
            return
        for step, (sampled, failure) in zip(steps, outcomes, strict=True):
            self._commit(memory.scheduler, step, sampled, failure)
        memory.scheduler.drafts.learn(plan, time.perf_counter() - began)

    def _may_run(self, request: Request) -> bool:
        """Not where its adapter has been removed meanwhile: then it fails, alone."""
        try:
            check_adapter(self.model, request.adapter)
        except LoraError as error:
            self._end(request, Failed(request.id, error))
            return False
        return True

    def _commit(
        self,
        scheduler: Scheduler,
        step: PlannedStep,
        sampled: Sequence[Sampled],
        error: Exception | None,
    ) -> None:
        """Enter what a step gave into its request, and the request's end."""
        request, max_positions = step.request, self.model.config.max_position_embeddings
        ending: Finished | Failed | None = None
        accepted = max(0, len(sampled) - 1)
        if (remark := scheduler.drafts.verified(step, accepted)) is not None:
            DRAFT_LOG.warning(remark)
        for one in sampled:
            ending = request.accept(one.token, max_positions)
            if ending is None or ending.reason != "stop":
                new = NewToken(
                    request.id,
                    one.token,
                    one.logprob,
                    one.top_logprobs,
                    request.reused_tokens or 0,
                    request.drafts,
                )
                self._returned.append((request.consumer, new))
            if ending is not None:
                break
        if ending is None and error is not None:
            ending = Failed(request.id, error)
        scheduler.computed(step, accepted)
        if not isinstance(ending, Failed):
            self._save(request)
        if ending is not None:
            self._end(request, ending)

    # Requests come, and end ----------------------------------------------------------------------

    def _read_messages(self) -> None:
        """Requests that come, and those that are to end."""
        looked = False
        while self.messages:
            message = self.messages.popleft()
            id = message.id if isinstance(message, Request) else message
            if id not in self.requests:
                continue  # it has ended meanwhile
            if not isinstance(message, Request):
                request = self.requests[id]
                self._end(request, Finished(id, "abort", drafts=request.drafts))
                continue
            try:
                if not looked:
                    self._look_at_weights()
                looked = True
                self._join(message)
            except Exception as error:  # no memory, or an adapter that is gone
                self._end(message, Failed(id, error))

    def _look_at_weights(self) -> None:
        """New requests must not find what other weights have computed."""
        if not self._roots.weights_changed(self.model) or self.memory is None:
            return
        self.memory.forget_texts()
        for request in self.requests.values():  # what they compute is of both
            request.set_root(self._roots.in_memory(request.adapter))
            if self._disk is not None and self._disk.leave(request):
                self.memory.scheduler.add(request)

    def _join(self, request: Request) -> None:
        check_adapter(self.model, request.adapter)
        request.epoch = self._roots.epoch
        if (ending := request.end(self.model.config.max_position_embeddings)) is not None:
            self._end(request, ending)
            return
        if self.memory is None:
            self.memory = self.plan.make(cache_config(self.model))
            self.memory.scheduler.drafts.drafter = drafter_of(self.model, self.memory.pool)
            if self.store is not None:
                pool, blocks, scheduler = self.memory
                maximum = self.plan.sizes.max_cached
                self._disk = DiskPrefix(self.store, pool, blocks, scheduler.recurrent, maximum)
        request.set_root(self._roots.of(request.adapter, self.model, self.memory.pool))
        if self._disk is None or not self._disk.arrive(request):
            self.memory.scheduler.add(request)

    def _schedule_arrived(self, scheduler: Scheduler) -> None:
        """Let those be scheduled for whom the disk has given what it has."""
        if self._disk is None:
            return
        for request in self._disk.arrived():
            scheduler.add(request)
        if self._disk.arriving and not scheduler.running and not scheduler.waiting:
            self._disk.wait(_LONGEST_WAIT_S)

    def _save(self, request: Request) -> None:
        """Have those of its blocks written to disk that are full now, and all of these weights."""
        if self._disk is None or not request.keep_prefix or not self._disk.lacks(request):
            return
        self._look_at_weights()
        if request.epoch == self._roots.epoch:
            self._disk.save(request)

    def _end(self, request: Request, event: Finished | Failed) -> None:
        """The request's last event; its blocks are free."""
        del self.requests[request.id]
        if self._disk is not None:
            self._disk.leave(request)
        if self.memory is not None:
            self.memory.scheduler.remove(request, failed=isinstance(event, Failed))
        self._returned.append((request.consumer, event))

    def _tell(self) -> None:
        """Give the events of a step to the consumers."""
        returned, self._returned = self._returned, []
        for consumer, event in returned:
            if consumer is None:
                self.events.append(event)
                continue
            try:
                consumer(event)
            except Exception:  # such as an event loop that is closed
                _LOG.exception("engine: the consumer of request %d failed", event.request_id)
                self.messages.append(event.request_id)
