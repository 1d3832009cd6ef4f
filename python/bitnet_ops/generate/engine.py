"""Generation on token ids: prefill, decode, stop ids, timing; one prompt, a batch, or a queue.

A row's tokens do not depend on the other rows of its batch, nor on the prefill chunk: every row is
prefilled alone, rows decode together, and finished rows leave the batch. `start`, `generate` and
`session` keep nothing between calls; a Run, a Session and a KVCache belong to one thread at a time.
`add`, `step` and `abort` run requests that come and go over one paged cache (engine_core.py). Any
number of threads may share an Engine, and the model. The model may be anything with `.config` that
maps (input_ids [B, T], cache, logits_to_keep) to logits [B, T, V]; requests need its `step` too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.engine_core import EngineCore, EngineStats
from bitnet_ops.generate.generation import Generation, Limits, Timing
from bitnet_ops.generate.prompts import PromptError, check_prompt, kind_of, token_ids
from bitnet_ops.generate.request import Event
from bitnet_ops.generate.sampling import Sampler, SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.nn.kv_cache import (
    DEFAULT_KV_DTYPE,
    CacheCapacityError,
    KVCache,
    check_kv_dtype,
)
from bitnet_ops.nn.kv_pool import DEFAULT_BLOCK_SIZE, KVPool, bytes_of_block

# One for all engines: a lock inside an engine could not be copied or pickled.
_MAKING = threading.Lock()


class CausalModel(Protocol):
    """What the engine needs of a model."""

    @property
    def config(self) -> ModelConfig: ...

    def __call__(self, input_ids: Tensor, cache: KVCache, logits_to_keep: int = 0) -> Tensor: ...


class Engine:
    """Runs prompts on a model.

    Args:
        model: the model; never changed.
        kv_dtype: of the caches, a row of storage.KV_TYPES; torch.bfloat16 by default.
        prefill_chunk: prompt tokens per forward; bounds the memory of a long prompt, not its
            result. 128 to 512 are equally fast where it was measured (docs/log.md), more are not.
        kv_cache_mb: the most memory, in MiB, for the keys and values of the requests of `add`, the
            prefix cache included; None: a quarter of the machine's, and always enough for one
            sequence of max_position_embeddings. It is taken as positions are written.
        block_size: positions of a block of that memory.
        scheduling: how these requests share steps and blocks.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        kv_dtype: torch.dtype = DEFAULT_KV_DTYPE,
        prefill_chunk: int = 256,
        kv_cache_mb: float | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        scheduling: SchedulerOptions | None = None,
    ) -> None:
        check_kv_dtype(kv_dtype, "engine: expected kv_dtype")
        if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
            raise ValueError(f"engine: expected prefill_chunk above 0, got {prefill_chunk!r}")
        if kv_cache_mb is not None and not kv_cache_mb > 0:
            raise ValueError(f"engine: expected kv_cache_mb above 0, got {kv_cache_mb!r}")
        self.model, self.kv_dtype, self.prefill_chunk = model, kv_dtype, prefill_chunk
        self.kv_cache_mb, self.block_size, self.scheduling = kv_cache_mb, block_size, scheduling
        self._made: EngineCore | None = None  # with the first request

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
    ) -> Run:
        """A run over `prompts`, at least one; nothing is computed before its first step.

        `params` is shared or one per prompt. Raises PromptError, TypeError for what is no list of
        token ids.
        """
        limits = limits or Limits()
        ids = self._checked(prompts)
        longest = max(map(len, ids)) + limits.max_new_tokens
        capacity = min(longest, self.model.config.max_position_embeddings)
        cache = KVCache(self.model.config, len(ids), capacity, self.kv_dtype)
        return Run(self, ids, _per_prompt(params, len(ids)), limits, cache)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        limits: Limits | None = None,
    ) -> list[Generation]:
        """Run `prompts` to the end: one Generation each, in their order."""
        run = self.start(prompts, params, limits)
        for _ in run:
            pass
        return run.generations

    def session(self) -> Session:
        """An empty conversation that keeps its cache between prompts."""
        return Session(self)

    # Requests that come and go ----------------------------------------------------------------

    @property
    def _core(self) -> EngineCore:
        with _MAKING:
            if self._made is None:
                self._made = self._make_core()
            return self._made

    def _make_core(self) -> EngineCore:
        step = getattr(self.model, "step", None)
        if step is None:
            raise TypeError(
                f"engine: expected a model with step(batch, pool) for requests, got a "
                f"{type(self.model).__name__}; use generate"
            )
        config = self.model.config
        pool = KVPool(config, self._most_blocks(), self.block_size, self.kv_dtype)
        return EngineCore(
            lambda batch: step(batch, pool),
            pool,
            max_positions=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            options=self.scheduling,
        )

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
        longest = -(-config.max_position_embeddings // self.block_size)
        return max(memory // 4 // block_bytes, longest)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        *,
        max_drafts: int = 0,
    ) -> int:
        """Queue a request; its id. Its tokens come as events of the `step`s that follow.

        They are those that `generate` gives for it alone, whatever else runs. `max_drafts`: how
        many tokens a step may guess from what the text repeats and verify at once; they change the
        speed, never the tokens. Raises PromptError, SamplingError, TypeError for no list of ids.
        """
        ids = token_ids(prompt, "engine")
        return self._core.add(
            ids, params or SamplingParams(), limits or Limits(), max_drafts=max_drafts
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

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], cache: KVCache) -> Tensor:
        """Append `ids`, in chunks, to a cache of batch 1; the logits f32 [V] of the last one."""
        logits = torch.empty(0)
        for at in range(0, len(ids), self.prefill_chunk):
            chunk = torch.tensor([ids[at : at + self.prefill_chunk]])
            logits = self.model(chunk, cache, 1)[0, -1]
        return logits

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], cache: KVCache) -> Tensor:
        """Append one token to each sequence of the cache; logits f32 [B, V]."""
        return self.model(torch.tensor(tokens).unsqueeze(1), cache, 1)[:, -1]

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


class Run:
    """One batch on its way. Iterating gives (row, token id) as tokens come.

    Attributes: `generations`, one per prompt, growing; `timing`; `active`, False at the end.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        limits: Limits,
        cache: KVCache,
    ) -> None:
        self.engine, self.limits, self.cache = engine, limits, cache
        self._prompts = prompts
        self._samplers = [Sampler(p, prompt) for p, prompt in zip(params, prompts, strict=True)]
        self.generations = [Generation(seed=s.seed) for s in self._samplers]
        reused = int(cache.lengths.sum())
        self.timing = Timing(prompt_tokens=sum(map(len, prompts)), reused_tokens=reused)
        self._rows = list(range(len(prompts)))  # the prompt behind each row of the cache
        self._prefilled = False

    @property
    def active(self) -> bool:
        return bool(self._rows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.active:
            yield from self.step()

    def step(self) -> list[tuple[int, int]]:
        """Compute the next token of every active row: [(row, token id)], stop ids left out.

        The first step prefills every prompt. After an exception the run is spent.
        """
        began = time.perf_counter()
        rows, tokens = list(self._rows), []
        first = not self._prefilled
        if self.limits.max_new_tokens:
            logits = self._prefill() if first else self._decode()
            tokens = [
                self._samplers[r](row_logits) for r, row_logits in zip(rows, logits, strict=True)
            ]
        self._prefilled = True
        events = [e for e in zip(rows, tokens, strict=False) if self._accept(*e)]
        self._retire()
        elapsed = time.perf_counter() - began
        self.timing.new_tokens += len(events)
        if first:
            self.timing.first_token_s = elapsed
        else:
            self.timing.decode_s += elapsed
            self.timing.decoded_tokens += len(tokens)
        return events

    def __repr__(self) -> str:
        g = self.generations
        ended = sum(bool(one.finish_reason) for one in g)
        tokens = sum(len(one.token_ids) for one in g)
        return f"{type(self).__name__}({len(g)} prompts, {ended} ended, {tokens} new tokens)"

    def cancel(self, row: int, reason: str, stop_reason: int | str | None = None) -> None:
        """End one row for a reason of the caller's; it gets no further tokens."""
        self.generations[row].finish_reason = reason
        self.generations[row].stop_reason = stop_reason
        if row in self._rows:
            self._retire()

    def _prefill(self) -> list[Tensor]:
        if self.cache.batch == 1:
            done = int(self.cache.lengths[0])
            return [self.engine.prefill(self._prompts[0][done:], self.cache)]
        logits = []
        for i, prompt in enumerate(self._prompts):
            row = self.cache.row(i)
            logits.append(self.engine.prefill(prompt, row))
            self.cache.set_length(i, len(prompt))
        return logits

    def _decode(self) -> Tensor:
        last = [self.generations[r].token_ids[-1] for r in self._rows]
        return self.engine.decode(last, self.cache)

    def _accept(self, row: int, token: int) -> bool:
        generation = self.generations[row]
        if token in self.limits.stop_ids:
            generation.finish_reason, generation.stop_reason = "stop", token
            return False
        generation.token_ids.append(token)
        return True

    def _retire(self) -> None:
        """Take finished rows out of the batch."""
        for row in self._rows:
            generation = self.generations[row]
            if not generation.finish_reason:
                if len(generation.token_ids) >= self.limits.max_new_tokens:
                    generation.finish_reason = "length"
                elif self._position(row) >= self.cache.max_len:
                    generation.finish_reason = "context"
        keep = [i for i, r in enumerate(self._rows) if not self.generations[r].finish_reason]
        if keep and len(keep) < len(self._rows):
            self.cache = self.cache.keep(keep)
        self._rows = [self._rows[i] for i in keep]

    def _position(self, row: int) -> int:
        """Where the row's newest token, which is not in the cache yet, would stand."""
        return len(self._prompts[row]) + len(self.generations[row].token_ids) - 1


class Session:
    """A conversation: one sequence whose cache lives on, so that a shared prefix is not run again.

    The tokens are those a fresh run would give, bit for bit.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        config = engine.model.config
        self.cache = KVCache(config, 1, config.max_position_embeddings, engine.kv_dtype)
        self._ids: list[int] = []  # what the cache holds

    def start(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        limits: Limits | None = None,
    ) -> Run:
        """A run over `prompt`, the WHOLE conversation so far; its known prefix is not run again.

        Finish or drop the previous run before. Raises PromptError, also when no position is left.
        """
        (prompt,) = self.engine._checked([prompt])
        known = min(self._common_prefix(prompt), len(prompt) - 1)  # the last one gives the logits
        self.cache.truncate(known)
        self._ids = list(prompt)
        return _SessionRun(self, prompt, params or SamplingParams(), limits or Limits())

    def _common_prefix(self, prompt: Sequence[int]) -> int:
        held = self._ids[: int(self.cache.lengths[0])]
        for i, (a, b) in enumerate(zip(held, prompt, strict=False)):
            if a != b:
                return i
        return min(len(held), len(prompt))


class _SessionRun(Run):
    """A run that tells its session which tokens entered the cache."""

    def __init__(
        self, session: Session, prompt: Sequence[int], params: SamplingParams, limits: Limits
    ) -> None:
        super().__init__(session.engine, [prompt], [params], limits, session.cache)
        self._session = session

    def _accept(self, row: int, token: int) -> bool:
        accepted = super()._accept(row, token)
        if accepted:
            self._session._ids.append(token)
        return accepted


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
