"""Engine: requests in, events out, all of them over one paged cache.

Design, for those who change it:

- `add` checks and makes a `Request` (admission.py, request.py) in the caller's thread, and leaves a
  message with it. `abort` leaves a message too. A step reads the messages first. So the engine's
  state (engine_core.py) changes only in steps, which run one at a time: no other lock is needed,
  and nothing has to be undone.
- A step asks the scheduler (scheduler.py) which tokens of which requests come next, runs the model
  once over all of them and chooses their next tokens (engine_step.py, sampling.py), and tells their
  consumers.
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

import itertools
import os
import weakref
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import torch

from bitnet_ops.arguments import (
    check_integer,
    check_kind,
    check_megabytes,
    check_path,
    is_number,
    shown,
)
from bitnet_ops.generate.admission import (
    check_prompts,
    constraints_of_prompts,
    make_request,
    params_of_prompts,
)
from bitnet_ops.generate.causal_model import (
    CLOSED,
    CausalModel,
    ClosedModel,
    cache_config,
    check_adapter,
    check_model,
)
from bitnet_ops.generate.constraint import Constraint
from bitnet_ops.generate.draft_choice import Speculation
from bitnet_ops.generate.engine_core import EngineCore
from bitnet_ops.generate.engine_memory import MemoryPlan, memory_sizes
from bitnet_ops.generate.prefix_store import PrefixStore
from bitnet_ops.generate.prompt import PromptError, PromptRows, kind_of, token_ids
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
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.scheduler import EngineStats, SchedulerOptions
from bitnet_ops.generate.turns import Turn
from bitnet_ops.nn.kv_config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV_DTYPE,
    bytes_of_block,
    kv_dtype_of,
)


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
        check_model(model, on_disk=prefix_dir is not None)
        check_integer("engine: expected prefill_chunk", prefill_chunk, 1)
        check_kind(
            "engine: expected scheduling as SchedulerOptions or None",
            scheduling,
            (SchedulerOptions, type(None)),
        )
        scheduling = scheduling or SchedulerOptions(
            prefill_chunk, min(SchedulerOptions.max_sequences, prefill_chunk)
        )
        sizes = memory_sizes(
            cache_config(model),
            block_size,
            kv_dtype,
            kv_cache_mb,
            prefix_cache_mb,
            scheduling.max_sequences,
        )
        fixed = kv_cache_mb is not None
        self._plan = MemoryPlan(kv_dtype, block_size, scheduling, sizes, fixed)
        check_megabytes("engine: expected prefix_dir_mb", prefix_dir_mb)
        self._prefix_dir: tuple[Path, float] | None = None
        if prefix_dir is not None:
            self._prefix_dir = check_path("engine: expected prefix_dir", prefix_dir), prefix_dir_mb
        self._begin(model)

    def _begin(self, model: CausalModel) -> None:
        """All that changes: no requests, and no memory before the first one."""
        self._turn, self._ids = Turn(), itertools.count()
        store = None
        if self._prefix_dir is not None and self.scheduling.prefix_cache:
            store = PrefixStore(*self._prefix_dir)
            weakref.finalize(self, store.close)
        self._core = EngineCore(model, self._plan, store)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "_plan": self._plan, "_prefix_dir": self._prefix_dir}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plan, self._prefix_dir = state["_plan"], state["_prefix_dir"]
        self._begin(state["model"])  # a copy has requests and memory of its own

    def __repr__(self) -> str:
        return (
            f"Engine({type(self.model).__name__}, kv_dtype={self.kv_dtype}, "
            f"{self.scheduling.token_budget} tokens a step)"
        )

    @property
    def model(self) -> CausalModel:
        """The model that it runs; after `shut_down` one that raises ClosedError."""
        return self._core.model

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._plan.kv_dtype

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        return self._plan.block_size

    @property
    def scheduling(self) -> SchedulerOptions:
        """How requests share steps and blocks."""
        return self._plan.scheduling

    @property
    def seconds(self) -> float:
        """Of all steps so far."""
        return self._core.seconds

    # Requests ------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int | PromptRows],
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        *,
        adapter: str | None = None,
        max_drafts: Speculation = 0,
        consumer: Consumer | None = None,
        constraint: Constraint | None = None,
        keep_prefix: bool = True,
    ) -> int:
        """Queue a request; its id. Its tokens come as events of the `step`s that follow.

        They are those that `generate` gives for it alone, whatever else runs. `prompt`: token ids,
        and among them PromptRows, rows that stand where embeddings of tokens would, such as those
        of an image; lists of ids may stand beside them too. `adapter`: name of
        its LoRA adapter, one that the model has loaded. `max_drafts`: how many tokens a step may
        guess and verify at once, or "auto": as many as make it faster here; "ngram" guesses from
        what the text repeats alone, "head" by the model's draft head alone; "off" and None are 0.
        They change the speed, never the tokens. `consumer`: called with each of its events by
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
        self.check_open()
        request = make_request(
            self.model,
            next(self._ids),
            prompt,
            params,
            limits,
            adapter=adapter,
            max_drafts=max_drafts,
            constraint=constraint,
            keep_prefix=keep_prefix,
        )
        request.consumer = consumer
        self._submit(request)
        return request.id

    def abort(self, id: int) -> bool:
        """End a request, whether it waits or runs; False if it has ended already.

        Its last event is a Finished with reason "abort", of the next step.
        """
        check_integer("engine: expected id", id, 0)
        if id not in self._core.requests:
            return False
        self._abandon([id])
        return True

    def start(
        self,
        prompts: Sequence[Sequence[int | PromptRows]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        limits: Limits | None = None,
        *,
        max_drafts: Speculation = 0,
        adapter: str | None = None,
        constraints: Sequence[Constraint] | None = None,
    ) -> Run:
        """A run over `prompts`, at least one; nothing is computed before its first step.

        `params` is shared or one per prompt. `constraints`: one of its own for each prompt.
        `max_drafts`, `adapter` and what is raised: see `add`.
        """
        check_prompts(prompts)
        count = len(prompts)
        rows = zip(
            prompts,
            params_of_prompts(params, count),
            constraints_of_prompts(constraints, count),
            strict=True,
        )
        self.check_open()
        requests = [
            make_request(
                self.model,
                next(self._ids),
                prompt,
                of_prompt,
                limits,
                adapter=adapter,
                max_drafts=max_drafts,
                constraint=constraint,
            )
            for prompt, of_prompt, constraint in rows
        ]
        return Run(self, requests)

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

    def _submit(self, request: Request) -> None:
        self._core.submit(request)
        self._turn.wake()

    def _abandon(self, ids: list[int]) -> None:
        """Abort requests before the next step; takes no lock, so that a finalizer may call it."""
        self._core.abandon(ids)

    # Memory and counts ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do or tell anything."""
        self._settle_between_steps()
        return bool(self._core.requests or self._core.events)

    @property
    def block_bytes(self) -> int:
        """Of the keys and values of `block_size` positions."""
        return bytes_of_block(cache_config(self.model), self.block_size, self.kv_dtype)

    def stats(self) -> EngineStats:
        """Requests and blocks at this moment."""
        self._settle_between_steps()
        return self._core.stats()

    @property
    def draft_remark(self) -> str | None:
        """That the model's draft head is mostly wrong, and the usual reasons; None: it is not.

        It is logged too, once, as a warning of bitnet_ops.generate.draft_report.
        """
        memory = self._core.memory
        return None if memory is None else memory.scheduler.drafts.report.remark

    def close(self, seconds: float = 2.0) -> None:
        """Write to `prefix_dir` what waits for it, for so long at most; nothing is kept there then.

        An engine that is dropped, and the end of the process, do so too.
        """
        if not is_number(seconds) or seconds < 0:
            raise ValueError(f"engine: expected seconds at least 0, got {shown(seconds)}")
        if self._core.store is not None:
            self._core.store.close(seconds)

    def shut_down(self) -> None:
        """End all requests and the thread that owns the engine, as `close`, and free the memory.

        Requests end with the reason "abort"; what is asked for afterwards is a ClosedError. The
        model is given up as well. A second call does nothing.
        """
        if self.closed:
            return
        self._turn.dismiss_owner()
        self._turn.run(self._core.shut_down)
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return isinstance(self.model, ClosedModel)

    def check_open(self) -> None:
        """Raise ClosedError after `shut_down`."""
        if self.closed:
            raise ClosedError(CLOSED)

    def trim(self) -> None:
        """Give all memory that no request uses back to the system; the prefix cache goes too.

        What is on disk stays.
        """
        self._turn.run(self._core.trim)

    # Steps ---------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Compute the next tokens of all requests in one go; what happened, in order.

        NewToken, Finished (reason "stop", "length", "context" or "abort") or Failed. A request
        whose logits are broken fails alone; where the model raises, all requests of that step fail.
        Empty when there is nothing to do.
        """
        self._turn.run(self._core.step)
        return self._core.take_events()

    def _advance(self, inbox: Sized) -> None:
        """Take a step unless `inbox` has something; while another thread steps, wait for it."""
        self._turn.run(self._core.step, unless=inbox)

    def _settle_between_steps(self) -> None:
        """Read the messages, unless a step does so anyway."""
        if self._core.messages and not self._turn.taken:
            self._turn.run(self._core.settle)


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
    "check_adapter",
    "token_ids",
]
