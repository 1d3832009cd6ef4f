"""Engine: prompts in, tokens out, all of them over one paged cache; one, a batch, or a queue.

`start`, `generate` and `session` queue requests for a Run (run.py) and step until it has its
tokens; `add`, `step` and `abort` leave stepping to the caller. They all share the steps: whoever
steps computes the next tokens of everybody, and a request's tokens do not depend on the others.
Any number of threads may share an Engine, and the model; a Run belongs to one thread at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.engine_core import EngineCore, EngineStats
from bitnet_ops.generate.generation import Generation, Limits, Timing
from bitnet_ops.generate.prompts import PromptError, check_prompt, kind_of, token_ids
from bitnet_ops.generate.request import Event
from bitnet_ops.generate.run import Run
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.kv_types import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV_DTYPE,
    CacheCapacityError,
    bytes_of_block,
    check_kv_dtype,
)
from bitnet_ops.nn.lora import LoraError

_PREFIX_CACHE_MB = 256  # of an engine that nobody has told how much memory it may have

# One for all engines: a lock inside an engine could not be copied or pickled.
_MAKING = threading.Lock()


class CausalModel(Protocol):
    """What the engine needs of a model.

    `step` gives the logits f32 [rows, V] of `batch.logit_rows`, and writes keys and values into the
    pool. A model whose weights may change has `weights_version` too (Decoder).
    """

    @property
    def config(self) -> ModelConfig: ...

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor: ...


class Engine:
    """Runs prompts on a model.

    Args:
        model: the model; never changed.
        kv_dtype: of keys and values, a row of storage.KV_TYPES; torch.bfloat16 by default.
        prefill_chunk: tokens of a step, at most; bounds the memory of a long prompt, not its
            result. 128 to 512 are equally fast where it was measured (docs/log.md), more are not.
            `scheduling` says it in its own words.
        kv_cache_mb: the most memory, in MiB, for keys and values, the prefix cache included; None:
            a quarter of the machine's, and always enough for one sequence of
            max_position_embeddings. It is taken as positions are written, and kept for later
            requests until `trim`.
        prefix_cache_mb: how much of it may hold what no request uses; None: all of kv_cache_mb,
            where that is None too 256 MiB, or one sequence of max_position_embeddings if that is
            more.
        block_size: positions of a block of that memory.
        scheduling: how requests share steps and blocks.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        kv_dtype: torch.dtype = DEFAULT_KV_DTYPE,
        prefill_chunk: int = SchedulerOptions.token_budget,
        kv_cache_mb: float | None = None,
        prefix_cache_mb: float | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        scheduling: SchedulerOptions | None = None,
    ) -> None:
        check_kv_dtype(kv_dtype, "engine: expected kv_dtype")
        if not callable(getattr(model, "step", None)):
            raise TypeError(
                "engine: expected a model with config and step(batch, pool), got "
                f"{kind_of(model)}; models.build makes one"
            )
        if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
            raise ValueError(f"engine: expected prefill_chunk above 0, got {prefill_chunk!r}")
        if kv_cache_mb is not None and not kv_cache_mb > 0:
            raise ValueError(f"engine: expected kv_cache_mb above 0, got {kv_cache_mb!r}")
        if prefix_cache_mb is not None and not prefix_cache_mb >= 0:
            raise ValueError(
                f"engine: expected prefix_cache_mb at least 0, got {prefix_cache_mb!r}"
            )
        self.model, self.kv_dtype, self.prefill_chunk = model, kv_dtype, prefill_chunk
        self.kv_cache_mb, self.prefix_cache_mb = kv_cache_mb, prefix_cache_mb
        self.block_size = block_size
        self.scheduling = scheduling or SchedulerOptions(
            prefill_chunk, min(SchedulerOptions.max_sequences, prefill_chunk)
        )
        self._made: EngineCore | None = None  # with the first request
        self._version: Any = None  # of the weights, when the last request came

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}  # a copy has requests and memory of its own

    def __repr__(self) -> str:
        return (
            f"Engine({type(self.model).__name__}, kv_dtype={self.kv_dtype}, "
            f"prefill_chunk={self.prefill_chunk})"
        )

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        limits: Limits | None = None,
        *,
        patient: bool = False,
        max_drafts: int | Literal["auto"] = 0,
        adapter: str | None = None,
    ) -> Run:
        """A run over `prompts`, at least one; nothing is computed before its first step.

        `params` is shared or one per prompt. `patient`: only the end is waited for, so that others'
        prompts may delay its single tokens. `max_drafts`, `adapter`: see `add`. Raises PromptError,
        LoraError, TypeError for what is no list of token ids.
        """
        ids = self._checked(prompts)
        _check_adapter(self.model, adapter)
        each = _per_prompt(params, len(ids))
        return Run(self._ready, ids, each, limits or Limits(), patient, max_drafts, adapter)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        limits: Limits | None = None,
    ) -> list[Generation]:
        """Run `prompts` to the end: one Generation each, in their order."""
        run = self.start(prompts, params, limits, patient=True)
        for _ in run:
            pass
        return run.generations

    def session(self) -> Session:
        """A conversation: see Session."""
        return Session(self)

    # Requests that come and go ----------------------------------------------------------------

    @property
    def _core(self) -> EngineCore:
        with _MAKING:
            if self._made is None:
                self._made = self._make_core()
            return self._made

    @torch.inference_mode(False)  # or the pool could not be written outside of it
    def _make_core(self) -> EngineCore:
        config, model = self.model.config, self.model
        pool = KVPool(config, self._most_blocks(), self.block_size, self.kv_dtype)
        return EngineCore(
            lambda batch: model.step(batch, pool),
            pool,
            max_positions=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            options=self.scheduling,
            most_cached=self._most_cached(pool.block_bytes),
        )

    def _ready(self) -> EngineCore:
        """The core for a new request, which must not find what other weights have computed."""
        core, version = self._core, getattr(self.model, "weights_version", None)
        if version is not None and (found := version()) != self._version:
            if self._version is not None:
                core.forget_prefixes()
            self._version = found
        return core

    def _most_blocks(self) -> int:
        config = self.model.config
        block_bytes = bytes_of_block(config, self.block_size, self.kv_dtype)
        if self.kv_cache_mb is not None:
            blocks = int(self.kv_cache_mb * 2**20) // block_bytes
            if blocks < 1:
                raise ValueError(
                    f"engine: expected kv_cache_mb of at least a block's {block_bytes / 2**20:.2f} "
                    f"MiB, got {self.kv_cache_mb}"
                )
            return blocks
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return max(memory // 4 // block_bytes, self._longest())

    def _most_cached(self, block_bytes: int) -> int | None:
        if self.prefix_cache_mb is not None:
            return int(self.prefix_cache_mb * 2**20) // block_bytes
        if self.kv_cache_mb is not None:
            return None
        return max(_PREFIX_CACHE_MB * 2**20 // block_bytes, self._longest())

    def _longest(self) -> int:
        """Blocks of a sequence of max_position_embeddings."""
        return -(-self.model.config.max_position_embeddings // self.block_size)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        *,
        adapter: str | None = None,
        max_drafts: int | Literal["auto"] = 0,
    ) -> int:
        """Queue a request; its id. Its tokens come as events of the `step`s that follow.

        They are those that `generate` gives for it alone, whatever else runs. `adapter`: name of
        its LoRA adapter, one that the model has loaded. `max_drafts`: how many tokens a step may
        guess from what the text repeats and verify at once, or "auto": as many as make it faster
        here; they change the speed, never the tokens. Raises PromptError, SamplingError, LoraError,
        TypeError for no list of ids.
        """
        ids = token_ids(prompt, "engine")
        _check_adapter(self.model, adapter)
        return self._ready().add(
            ids,
            params or SamplingParams(),
            limits or Limits(),
            adapter=adapter,
            max_drafts=max_drafts,
        )

    def fork(self, id: int, params: SamplingParams, limits: Limits | None = None) -> int:
        """Queue a request that goes on from all tokens of request `id`, sharing its memory; its id.

        The limits count the tokens that `id` has produced. Raises KeyError for one that has ended.
        """
        return self._core.fork(id, params, limits or Limits())

    def step(self) -> list[Event]:
        """Compute the next tokens of all requests in one go; what happened, in order.

        NewToken, Finished (reason "stop", "length", "context" or "abort") or Failed, which is the
        end of one request alone. Empty when there is nothing to do.
        """
        return self._core.step() if self.has_work else []

    def abort(self, id: int) -> bool:
        """End a request now, whether it waits or runs; False if it has ended already."""
        return self._core.abort(id)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do or tell anything."""
        return self._made is not None and self._made.has_work

    def stats(self) -> EngineStats:
        """Requests and blocks at this moment."""
        return self._core.stats()

    def trim(self) -> None:
        """Give all memory that no request uses back to the system; the prefix cache goes too."""
        if self._made is not None:
            self._made.trim()

    def _checked(self, given: Sequence[Sequence[int]]) -> list[list[int]]:
        config = self.model.config
        if isinstance(given, str | bytes) or not hasattr(given, "__len__"):
            raise TypeError(f"engine: expected prompts as lists of token ids, got {kind_of(given)}")
        if not len(given):
            raise PromptError("engine: expected at least one prompt, got none")
        prompts = [token_ids(prompt, "engine") for prompt in given]
        for prompt in prompts:
            check_prompt(prompt, config.vocab_size, config.max_position_embeddings)
        return prompts


def _check_adapter(model: CausalModel, name: str | None) -> None:
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
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"engine: expected params as SamplingParams, got {kind_of(params)}")
    if len(params) != count:
        raise ValueError(f"engine: expected params for {count} prompts, got {len(params)}")
    return list(params)


class Session:
    """A conversation: runs that begin with the tokens of earlier ones.

    What the engine's prefix cache still has of these is not computed again
    (`Timing.reused_tokens`); the tokens are those that a fresh run would give, bit for bit.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        *,
        max_drafts: int | Literal["auto"] = 0,
        adapter: str | None = None,
    ) -> Run:
        """A run over `prompt`, the WHOLE conversation so far. Raises PromptError, LoraError."""
        return self.engine.start([prompt], params, limits, max_drafts=max_drafts, adapter=adapter)


__all__ = [
    "CacheCapacityError",
    "CausalModel",
    "Engine",
    "Generation",
    "Limits",
    "PromptError",
    "Run",
    "Session",
    "Timing",
    "token_ids",
]
