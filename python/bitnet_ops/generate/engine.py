"""Engine: requests in, events out, all of them over one paged cache.

Design, for those who change it:

- `add` checks and makes a `Request` (request.py) in the caller's thread, and leaves a message with
  it. `abort` leaves a message too. A step reads the messages first. So the engine's state changes
  only in steps, which run one at a time: no other lock is needed, and nothing has to be undone.
- A step (`Engine.step`) asks the scheduler which tokens of which requests come next, runs the model
  once over all of them, chooses their next tokens (sampling.py) and tells their consumers.
- One thread steps at a time (turns.py): any thread that needs a token. An engine needs no thread of
  its own. An `EngineThread` may own it; then that thread alone steps, and the others wait.
- Ctrl-C during a step is raised after it. So a step is done as a whole or, where the model fails,
  not at all: then the requests that took part in it fail, and the engine goes on with the others.
- The consumer of a request is a function, called with each event by the thread that steps:
  `queue.SimpleQueue().put`, or for asyncio `lambda event: loop.call_soon_threadsafe(put, event)`.
  Events of requests without one are what `step` returns.

A request's tokens do not depend on the others, whatever runs beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.arguments import (
    check_integer,
    check_kind,
    check_megabytes,
    check_path,
    is_number,
    shown,
)
from bitnet_ops.blocks.listing import listing
from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.constraint import Constraint
from bitnet_ops.generate.disk_prefix import DiskPrefix, root_on_disk
from bitnet_ops.generate.prefix_store import PrefixStore
from bitnet_ops.generate.prompt import (
    PromptError,
    PromptRows,
    check_prompt,
    kind_of,
    split_prompt,
    token_ids,
)
from bitnet_ops.generate.request import (
    ClosedError,
    Consumer,
    Event,
    Failed,
    Finished,
    Limits,
    NewToken,
    Request,
)
from bitnet_ops.generate.run import Generation, Run
from bitnet_ops.generate.sampling import Sampled, SamplingParams, draws_of, sample_steps
from bitnet_ops.generate.scheduler import (
    EngineStats,
    PlannedStep,
    Scheduler,
    SchedulerOptions,
    StepPlan,
    memory_sizes,
)
from bitnet_ops.generate.states import StateSlots
from bitnet_ops.generate.turns import Turn
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.blocks import BlockAllocator, root_key
from bitnet_ops.nn.kv_config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV_DTYPE,
    bytes_of_block,
    kv_dtype_of,
)
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.lora import LoraError

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT_S = 0.05  # for the disk, until messages are read again


class CausalModel(Protocol):
    """What the engine needs of a model.

    `step` gives the logits f32 [rows, V] of `batch.logit_rows`, of which `batch.largest` may want
    the largest alone and `batch.draws` the one that is drawn, and writes keys and values into the
    pool. A model whose weights may change has `weights_version` too, one with LoRA `adapters`, and
    one with a prefix cache on disk `identity` (Decoder).
    """

    @property
    def config(self) -> ModelConfig: ...

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor: ...


_CLOSED = "engine: expected an open model, got one that was closed; load it again"


class _ClosedModel:
    """In the place of a model that an engine has given up: its config, and a ClosedError."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(_CLOSED)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ClosedError(_CLOSED)


class Engine:
    """Runs prompts on a model. Any number of threads may share one; a Run belongs to one of them.

    Keys and values of earlier prompts are kept as a prefix cache, which starts empty again when
    weights are replaced or changed in place. What is changed behind torch's back is not seen, for
    torch counts no change of `weight.data.mul_(2)`, nor of memory that numpy shares: write
    `with torch.no_grad(): weight.mul_(2)`, or call `trim()` afterwards. Nothing holds the weights
    for a step: while one runs in another thread, in-place changes mix into its results, and memory
    that is exchanged below a weight (`weight.data = ...`) may be read after it was freed. Exchange
    weights between steps. A copy of an engine has no requests.

    Args:
        model: the model; never changed.
        kv_dtype: of keys and values, a row of storage.KV_TYPES; torch.bfloat16 by default.
        prefill_chunk: tokens of a step, at most; bounds the memory of a long prompt and changes
            no result. 128 to 512 are equally fast where it was measured. Not used with
            `scheduling`, which has its own `token_budget`.
        kv_cache_mb: the most memory, in MiB, for keys and values, the prefix cache included, and
            for states of recurrent layers and their checkpoints, which have at most half; None:
            a quarter of the machine's, or of the limit of its container or process
            (`machine.cache_budget`), and enough for one sequence of max_position_embeddings where
            there is room for it. It is taken as positions are written, and kept for later requests
            until `trim`.
        prefix_cache_mb: how much of it may hold what no request uses; None: all of kv_cache_mb,
            where that is None too 256 MiB, or one sequence of max_position_embeddings if that is
            more.
        block_size: positions of a block of that memory.
        scheduling: how requests share steps and blocks.
        prefix_dir: a directory in which the prefix cache is kept too, so that prompts begin where
            an engine before it, of the same model, came to. Other engines may use it at the same
            time. It holds what people wrote, in a form that can be turned back: it is made for this
            user alone.
        prefix_dir_mb: the most MiB that it may take; what has not been used for longest goes.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        kv_dtype: torch.dtype | str = DEFAULT_KV_DTYPE,
        prefill_chunk: int = SchedulerOptions.token_budget,
        kv_cache_mb: float | None = None,
        prefix_cache_mb: float | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        scheduling: SchedulerOptions | None = None,
        prefix_dir: str | os.PathLike[str] | None = None,
        prefix_dir_mb: float = 4096,
    ) -> None:
        kv_dtype = kv_dtype_of(kv_dtype, "engine: expected kv_dtype")
        if not callable(getattr(model, "step", None)) or not hasattr(model, "config"):
            raise TypeError(
                "engine: expected a model with config and step(batch, pool), got "
                f"{kind_of(model)}; models.build makes one"
            )
        check_integer("engine: expected prefill_chunk", prefill_chunk, 1)
        check_kind(
            "engine: expected scheduling as SchedulerOptions or None",
            scheduling,
            (SchedulerOptions, type(None)),
        )
        self.model, self.kv_dtype, self.block_size = model, kv_dtype, block_size
        self.scheduling = scheduling or SchedulerOptions(
            prefill_chunk, min(SchedulerOptions.max_sequences, prefill_chunk)
        )
        self._sizes = memory_sizes(
            model.config,
            block_size,
            kv_dtype,
            kv_cache_mb,
            prefix_cache_mb,
            self.scheduling.max_sequences,
        )
        self._fixed = kv_cache_mb is not None
        if prefix_dir is not None and not callable(getattr(model, "identity", None)):
            raise TypeError(
                f"engine: expected a model with identity(adapter) for prefix_dir, got "
                f"{kind_of(model)}; leave out prefix_dir"
            )
        check_megabytes("engine: expected prefix_dir_mb", prefix_dir_mb)
        self._prefix_dir: tuple[Path, float] | None = None
        if prefix_dir is not None:
            self._prefix_dir = check_path("engine: expected prefix_dir", prefix_dir), prefix_dir_mb
        self._begin()

    def _begin(self) -> None:
        """All that changes: no requests, and no memory before the first one."""
        self._turn = Turn()
        self._messages: deque[Request | int] = deque()  # new requests, and ids to abort
        self._requests: dict[int, Request] = {}  # those that have not ended
        self._ids = itertools.count()
        self._told: list[tuple[Consumer | None, Event]] = []  # by this step
        self._events: list[Event] = []  # of requests without a consumer
        self._memory: tuple[KVPool, BlockAllocator, Scheduler] | None = None
        self._version: Any = None  # of the weights, when the last request came
        self._epoch = 0  # how often they have changed
        self._roots: dict[str | None, bytes] = {}  # of this epoch, by the adapter
        self.seconds = 0.0  # of all steps so far
        self._store: PrefixStore | None = None
        self._disk: DiskPrefix | None = None
        if self._prefix_dir is not None and self.scheduling.prefix_cache:
            self._store = PrefixStore(*self._prefix_dir)
            weakref.finalize(self, self._store.close)

    def __getstate__(self) -> dict[str, Any]:
        own = "model kv_dtype block_size scheduling _sizes _fixed _prefix_dir"
        return {name: self.__dict__[name] for name in own.split()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()  # a copy has requests and memory of its own

    def __repr__(self) -> str:
        return (
            f"Engine({type(self.model).__name__}, kv_dtype={self.kv_dtype}, "
            f"{self.scheduling.token_budget} tokens a step)"
        )

    # Requests ------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int | PromptRows],
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        *,
        adapter: str | None = None,
        max_drafts: int | Literal["auto"] = 0,
        consumer: Consumer | None = None,
        constraint: Constraint | None = None,
        keep_prefix: bool = True,
    ) -> int:
        """Queue a request; its id. Its tokens come as events of the `step`s that follow.

        They are those that `generate` gives for it alone, whatever else runs. `prompt`: token ids,
        and among them PromptRows, rows that stand where embeddings of tokens would, such as those
        of an image; lists of ids may stand beside them too. `adapter`: name of
        its LoRA adapter, one that the model has loaded. `max_drafts`: how many tokens a step may
        guess from what the text repeats and verify at once, or "auto": as many as make it faster
        here; they change the speed, never the tokens. `consumer`: called with each of its events by
        the thread that steps; without one they are what `step` returns. `constraint`: says which
        tokens may come; it is asked and told by the thread that steps. `keep_prefix` False: of a
        request in the background, such as for a title; what only it has computed is the first to
        leave the prefix cache, and is not written to disk. Raises PromptError, SamplingError,
        LoraError, ValueError or TypeError for what cannot be run, ClosedError after `shut_down`.
        """
        if consumer is not None and not callable(consumer):
            raise TypeError(f"engine: expected consumer as a function, got {kind_of(consumer)}")
        if consumer is None and self._turn.owned:
            raise ValueError(
                "engine: expected a consumer for a request to an engine that a thread owns, got "
                "None; nobody else may step it"
            )
        request = self._make_request(
            prompt, params, limits, adapter, max_drafts, constraint, keep_prefix
        )
        request.consumer = consumer
        self._submit(request)
        return request.id

    def abort(self, id: int) -> bool:
        """End a request, whether it waits or runs; False if it has ended already.

        Its last event is a Finished with reason "abort", of the next step.
        """
        check_integer("engine: expected id", id, 0)
        if id not in self._requests:
            return False
        self._messages.append(id)
        return True

    def start(
        self,
        prompts: Sequence[Sequence[int | PromptRows]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        limits: Limits | None = None,
        *,
        max_drafts: int | Literal["auto"] = 0,
        adapter: str | None = None,
        constraints: Sequence[Constraint] | None = None,
    ) -> Run:
        """A run over `prompts`, at least one; nothing is computed before its first step.

        `params` is shared or one per prompt. `constraints`: one of its own for each prompt.
        `max_drafts`, `adapter` and what is raised: see `add`.
        """
        if (
            not isinstance(prompts, Sized)
            or isinstance(prompts, str | bytes)
            or getattr(prompts, "ndim", 1) == 0
        ):
            raise TypeError(
                f"engine: expected prompts as lists of token ids, got {kind_of(prompts)}"
            )
        if not len(prompts):
            raise PromptError("engine: expected at least one prompt, got none")
        ways = _per_prompt(params, len(prompts))
        held = [None] * len(prompts) if constraints is None else constraints
        if not isinstance(held, list | tuple) or len(held) != len(prompts):
            raise TypeError(
                f"engine: expected constraints as a list, one a prompt, got {kind_of(constraints)}"
            )
        rows = zip(prompts, ways, held, strict=True)
        return Run(
            self,
            [self._make_request(ids, p, limits, adapter, max_drafts, c) for ids, p, c in rows],
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int | PromptRows]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        limits: Limits | None = None,
    ) -> list[Generation]:
        """Run `prompts` to the end: one Generation each, in their order."""
        run = self.start(prompts, params, limits)
        for _ in run:
            pass
        return run.generations

    def _make_request(
        self,
        prompt: Sequence[int | PromptRows],
        params: SamplingParams | None,
        limits: Limits | None,
        adapter: str | None,
        max_drafts: int | Literal["auto"],
        constraint: Constraint | None = None,
        keep_prefix: bool = True,
    ) -> Request:
        """A request that can be run. Raises what `add` raises."""
        self.check_open()
        if constraint is not None and not (
            callable(getattr(constraint, "mask", None))
            and callable(getattr(constraint, "add", None))
        ):
            raise TypeError(
                f"engine: expected constraint with mask() and add(token), got {kind_of(constraint)}"
            )
        config = self.model.config
        prompt, runs = split_prompt(prompt, config.hidden_size)
        ids = token_ids(prompt, "engine")
        check_prompt(ids, config.vocab_size, config.max_position_embeddings)
        check_adapter(self.model, adapter)
        request = Request(
            next(self._ids),
            ids,
            params,
            limits,
            adapter=adapter,
            max_drafts=max_drafts,
            constraint=constraint,
            keep_prefix=keep_prefix,
            runs=runs,
        )
        request.sampler.params.check_vocabulary(config.vocab_size)
        return request

    def _submit(self, request: Request) -> None:
        self._requests[request.id] = request
        self._messages.append(request)
        self._turn.wake()

    def _abandon(self, ids: list[int]) -> None:
        """Abort requests before the next step; takes no lock, so that a finalizer may call it."""
        self._messages.extend(ids)

    # Memory and counts ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do or tell anything."""
        self._settle_between_steps()
        return bool(self._requests or self._events)

    @property
    def block_bytes(self) -> int:
        """Of the keys and values of `block_size` positions."""
        return bytes_of_block(self.model.config, self.block_size, self.kv_dtype)

    def stats(self) -> EngineStats:
        """Requests and blocks at this moment."""
        self._settle_between_steps()
        if self._memory is None:
            stats = EngineStats(len(self._requests), 0, self._sizes.blocks, 0, 0, 0, 0, 0, 0)
        else:
            stats = self._memory[2].stats()
        if self._store is None:
            return stats
        pieces, nbytes = self._store.counts
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

    def close(self, seconds: float = 2.0) -> None:
        """Write to `prefix_dir` what waits for it, for so long at most; nothing is kept there then.

        An engine that is dropped, and the end of the process, do so too.
        """
        if not is_number(seconds) or seconds < 0:
            raise ValueError(f"engine: expected seconds at least 0, got {shown(seconds)}")
        if self._store is not None:
            self._store.close(seconds)

    def shut_down(self) -> None:
        """End all requests and the thread that owns the engine, as `close`, and free the memory.

        Requests end with the reason "abort"; what is asked for afterwards is a ClosedError. The
        model is given up as well. A second call does nothing.
        """
        if self.closed:
            return
        self._turn.dismiss_owner()

        def end() -> None:
            self.model = _ClosedModel(self.model.config)
            self._messages.extend(list(self._requests))
            self._settle()
            self._memory = self._disk = None
            self._tell()

        self._turn.run(end)
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return isinstance(self.model, _ClosedModel)

    def check_open(self) -> None:
        """Raise ClosedError after `shut_down`."""
        if self.closed:
            raise ClosedError(_CLOSED)

    def trim(self) -> None:
        """Give all memory that no request uses back to the system; the prefix cache goes too.

        What is on disk stays.
        """

        def release() -> None:
            self._settle()
            self._tell()
            if self._memory is not None:
                pool, blocks, scheduler = self._memory
                blocks.forget_all()
                pool.release(blocks.reclaim())
                if scheduler.states is not None:
                    scheduler.states.trim()
            if self._store is not None:
                self._store.trim(2.0)

        self._turn.run(release)

    @torch.inference_mode(False)  # or the pool could not be written outside of it
    def _make_memory(self) -> tuple[KVPool, BlockAllocator, Scheduler]:
        config = self.model.config
        pool = self._make_pool()
        blocks = BlockAllocator(pool.blocks, self._sizes.most_cached)
        states = None
        if pool.states is not None:
            states = StateSlots(pool.states, pool.block_size, self._sizes.most_checkpoints)
        scheduler = Scheduler(
            blocks,
            pool.block_size,
            config.max_position_embeddings,
            pool.copy_block,
            self.scheduling,
            states,
            listing(config).unread,
        )
        return pool, blocks, scheduler

    def _make_pool(self) -> KVPool:
        """The pool, smaller where the system refuses the address space and nobody fixed a size."""
        config, slots = self.model.config, max(1, self._sizes.slots)
        while True:
            blocks = self._sizes.blocks
            try:
                return KVPool(config, blocks, self.block_size, self.kv_dtype, state_slots=slots)
            except MemoryError:
                if blocks == 1 or self._fixed:
                    nbytes = blocks * bytes_of_block(config, self.block_size, self.kv_dtype)
                    raise MemoryError(
                        f"engine: expected {nbytes >> 20} MiB of address space for "
                        "keys and values, got less; give a smaller kv_cache_mb (--kv-cache-mb), or "
                        "raise the limit (ulimit -v)"
                    ) from None
                self._sizes = self._sizes._replace(blocks=blocks // 2)

    # Steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Compute the next tokens of all requests in one go; what happened, in order.

        NewToken, Finished (reason "stop", "length", "context" or "abort") or Failed. A request
        whose logits are broken fails alone; where the model raises, all requests of that step fail.
        Empty when there is nothing to do.
        """
        self._turn.run(self._step)
        events, self._events = self._events, []
        return events

    def _advance(self, inbox: Sized) -> None:
        """Take a step unless `inbox` has something; while another thread steps, wait for it."""
        self._turn.run(self._step, unless=inbox)

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            self._settle()
            if self._memory is not None and self._requests:
                self._admit_arrived(self._memory[2])
                self._compute(self._memory[2])
        except BaseException as error:  # a defect of the engine, or a model that ends the process
            self._memory = None  # of what blocks and queues hold nothing is certain
            for request in list(self._requests.values()):
                self._end(request, Failed(request.id, error))
            self._disk = None
            raise
        finally:
            self.seconds += time.perf_counter() - began
            self._tell()

    def _settle_between_steps(self) -> None:
        """Read the messages, unless a step does so anyway."""
        if self._messages and not self._turn.taken:

            def settle() -> None:
                self._settle()
                self._tell()

            self._turn.run(settle)

    def _settle(self) -> None:
        """Read the messages: requests that come, and those that are to end."""
        looked = False
        while self._messages:
            message = self._messages.popleft()
            id = message.id if isinstance(message, Request) else message
            if id not in self._requests:
                continue  # it has ended meanwhile
            if not isinstance(message, Request):
                self._end(self._requests[id], Finished(id, "abort"))
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
        version = getattr(self.model, "weights_version", None)
        if version is not None and (found := version()) != self._version:
            if self._version is not None and self._memory is not None:
                self._epoch += 1
                self._memory[1].forget_all()
                if (states := self._memory[2].states) is not None:
                    states.forget_all()
                for request in self._requests.values():  # what they compute is of both
                    request.set_root(root_key(request.adapter, self._epoch))
                    if self._disk is not None and self._disk.leave(request):
                        self._memory[2].add(request)
            self._version = found
            self._roots.clear()

    def _join(self, request: Request) -> None:
        check_adapter(self.model, request.adapter)
        request.epoch = self._epoch
        if (ending := request.end(self.model.config.max_position_embeddings)) is not None:
            self._end(request, ending)
            return
        if self._memory is None:
            self._memory = self._make_memory()
            if self._store is not None:
                pool, blocks, scheduler = self._memory
                most = self._sizes.most_cached
                self._disk = DiskPrefix(self._store, pool, blocks, scheduler.states, most)
        request.set_root(self._root_of(request.adapter))
        if self._disk is None or not self._disk.arrive(request):
            self._memory[2].add(request)

    def _root_of(self, adapter: str | None) -> bytes:
        """The key before the first block of texts with this adapter, by the weights of now."""
        if adapter not in self._roots:
            root = root_key(adapter, self._epoch)
            if self._store is not None and self._memory is not None:
                identity: bytes = self.model.identity(adapter)  # type: ignore[attr-defined]
                root = root_on_disk(identity, self._memory[0])
            self._roots[adapter] = root
        return self._roots[adapter]

    def _admit_arrived(self, scheduler: Scheduler) -> None:
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
        if request.epoch == self._epoch:
            self._disk.save(request)

    def _compute(self, scheduler: Scheduler) -> None:
        """The next tokens of the requests that the scheduler chooses."""
        plan = scheduler.schedule()
        for request, full in plan.failed:
            self._end(request, Failed(request.id, full))
        steps = [s for s in plan.steps.values() if self._may_run(s.request)]
        if not steps:
            return
        try:
            outcomes = self._run_model(plan, steps)
        except BaseException as error:
            for step in steps:
                self._end(step.request, Failed(step.request.id, error))
            if not isinstance(error, Exception):
                raise
            return
        for step, (sampled, failure) in zip(steps, outcomes, strict=True):
            self._commit(step, sampled, failure)

    def _may_run(self, request: Request) -> bool:
        """Not where its adapter has been removed meanwhile: then it fails, alone."""
        try:
            check_adapter(self.model, request.adapter)
        except LoraError as error:
            self._end(request, Failed(request.id, error))
            return False
        return True

    @torch.inference_mode()
    def _run_model(
        self, plan: StepPlan, steps: Sequence[PlannedStep]
    ) -> Sequence[tuple[list[Sampled], Exception | None]]:
        """The model over all planned tokens; then the next tokens of each request."""
        assert self._memory is not None
        pool, _, scheduler = self._memory
        wanted = [step.logits for step in steps]
        samplers, drafts = [s.request.sampler for s in steps], [s.drafts for s in steps]
        batch = StepBatch.of(
            [step.sequence(logits) for step, logits in zip(steps, wanted, strict=True)],
            pool.block_size,
            _largest(sampler.largest for sampler in samplers),
            draws_of(samplers, wanted),
        )
        began = time.perf_counter()
        logits = self.model.step(batch, pool)
        if getattr(self.model.config, "policies", ()):
            for step, (read, pages) in zip(steps, _runtime.attention_pages(), strict=False):
                step.request.attention.add(read, pages)
                scheduler.attention.add(read, pages)
        if getattr(self.model.config, "sparsity", None) is not None:
            skipped, inputs = _runtime.activation_zeros()
            scheduler.inputs.add(inputs - skipped, inputs)
        scheduler.learn(plan, time.perf_counter() - began)
        return sample_steps(samplers, drafts, wanted, logits)

    def _commit(
        self, step: PlannedStep, sampled: Sequence[Sampled], error: Exception | None
    ) -> None:
        """Enter what a step gave into its request, and the request's end."""
        assert self._memory is not None
        request, max_positions = step.request, self.model.config.max_position_embeddings
        ending: Finished | Failed | None = None
        for one in sampled:
            ending = request.accept(one.token, max_positions)
            if ending is None or ending.reason != "stop":
                new = NewToken(
                    request.id,
                    one.token,
                    one.logprob,
                    one.top_logprobs,
                    request.reused_tokens or 0,
                )
                self._told.append((request.consumer, new))
            if ending is not None:
                break
        if ending is None and error is not None:
            ending = Failed(request.id, error)
        self._memory[2].computed(step, max(0, len(sampled) - 1))
        if not isinstance(ending, Failed):
            self._save(request)
        if ending is not None:
            self._end(request, ending)

    def _end(self, request: Request, event: Finished | Failed) -> None:
        """The request's last event; its blocks are free."""
        del self._requests[request.id]
        if self._disk is not None:
            self._disk.leave(request)
        if self._memory is not None:
            self._memory[2].remove(request, failed=isinstance(event, Failed))
        self._told.append((request.consumer, event))

    def _tell(self) -> None:
        """Give the events of a step to the consumers."""
        told, self._told = self._told, []
        for consumer, event in told:
            if consumer is None:
                self._events.append(event)
                continue
            try:
                consumer(event)
            except Exception:  # such as an event loop that is closed
                _LOG.exception("engine: the consumer of request %d failed", event.request_id)
                self._messages.append(event.request_id)


def _largest(wanted: Iterable[int]) -> int:
    """How many largest logits of a row decide the next token of every request; 0: all."""
    counts = set(wanted)
    return 0 if 0 in counts else max(counts)


def check_adapter(model: CausalModel, name: str | None) -> None:
    """Raise LoraError unless `name` is None or that of an adapter that the model has loaded."""
    if name is None:
        return
    adapters = getattr(model, "adapters", None)
    if adapters is None:
        raise LoraError(
            f"lora: expected a model with adapters, got a {type(model).__name__}; leave out adapter"
        )
    adapters.check(name)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"engine: expected params as SamplingParams, got {kind_of(params)}")
    if len(params) != count:
        raise ValueError(f"engine: expected params for {count} prompts, got {len(params)}")
    return list(params)


__all__ = [
    "CausalModel",
    "Engine",
    "EngineStats",
    "Event",
    "Failed",
    "Finished",
    "Generation",
    "Limits",
    "NewToken",
    "PromptError",
    "Run",
    "SamplingParams",
    "SchedulerOptions",
    "token_ids",
]
