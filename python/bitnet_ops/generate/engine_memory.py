"""EngineMemory: blocks of keys and values, slots of states, and the scheduler that deals them out.

A MemoryPlan says how much an engine may take. The memory itself is made with the first request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bitnet_ops import machine
from bitnet_ops.arguments import check_integer, check_megabytes
from bitnet_ops.blocks.draft import STATES as DRAFT_STATES
from bitnet_ops.blocks.listing import listing
from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.scheduler import Scheduler, SchedulerOptions
from bitnet_ops.generate.states import StateSlots
from bitnet_ops.nn.blocks import BlockAllocator
from bitnet_ops.nn.kv_config import bytes_of_block, kept_of
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.state_pool import slot_bytes

_CHECKPOINTS = 32  # slots of states beside those of running requests
_MAX_BLOCK_SIZE = 2**16  # 8 GiB of the largest models; 16 to 128 are usual
_PREFIX_CACHE_MB = 256  # of an engine that nobody has told how much memory it may have


class EngineMemory(NamedTuple):
    """A pool, which of its blocks are whose, and who gets them next."""

    pool: KVPool
    blocks: BlockAllocator
    scheduler: Scheduler

    def forget_texts(self) -> None:
        """Let no request find what was computed so far."""
        self.blocks.forget_all()
        if self.scheduler.states is not None:
            self.scheduler.states.forget_all()

    def trim(self) -> None:
        """Give what no request uses back to the system."""
        self.blocks.forget_all()
        self.pool.release(self.blocks.reclaim())
        if self.scheduler.states is not None:
            self.scheduler.states.trim()


class MemorySizes(NamedTuple):
    """blocks: of an engine's pool. max_cached: how many may be cached, None: all.

    slots: of recurrent states, 0: the model has none. max_checkpoints: how many of them may be
    checkpoints, None: all.
    """

    blocks: int
    max_cached: int | None
    slots: int = 0
    max_checkpoints: int | None = None


@dataclass
class MemoryPlan:
    """How much memory an engine may take, and in which form.

    kv_dtype: of keys and values. block_size: positions of a block. fixed: whether a user named the
    size, which nothing makes smaller then. `sizes` shrinks where the system has less.
    """

    kv_dtype: torch.dtype
    block_size: int
    scheduling: SchedulerOptions
    sizes: MemorySizes
    fixed: bool

    @torch.inference_mode(False)  # or the pool could not be written outside of it
    def make(self, config: ModelConfig) -> EngineMemory:
        """The memory of an engine for this model; address space until it is written."""
        pool = self._make_pool(config)
        blocks = BlockAllocator(pool.blocks, self.sizes.max_cached)
        states = None
        if pool.states is not None:
            kept = pool.states.kept.keys()
            states = StateSlots(
                pool.states,
                pool.block_size,
                self.sizes.max_checkpoints,
                needed=bool(kept - {DRAFT_STATES}),
            )
        scheduler = Scheduler(
            blocks,
            pool.block_size,
            config.max_position_embeddings,
            pool.copy_block,
            self.scheduling,
            states,
            listing(config).unread,
        )
        return EngineMemory(pool, blocks, scheduler)

    def _make_pool(self, config: ModelConfig) -> KVPool:
        """The pool, smaller where the system refuses the address space and nobody fixed a size."""
        slots = max(1, self.sizes.slots)
        while True:
            blocks = self.sizes.blocks
            try:
                return KVPool(config, blocks, self.block_size, self.kv_dtype, state_slots=slots)
            except MemoryError:
                if blocks == 1 or self.fixed:
                    nbytes = blocks * bytes_of_block(config, self.block_size, self.kv_dtype)
                    raise MemoryError(
                        f"engine: expected {nbytes >> 20} MiB of address space for "
                        "keys and values, got less; give a smaller kv_cache_mb (--kv-cache-mb), or "
                        "raise the limit (ulimit -v)"
                    ) from None
                self.sizes = self.sizes._replace(blocks=blocks // 2)


def memory_sizes(
    config: ModelConfig,
    block_size: int,
    kv_dtype: torch.dtype,
    kv_cache_mb: float | None,
    prefix_cache_mb: float | None,
    max_sequences: int,
) -> MemorySizes:
    """How an engine divides its memory; see Engine. States have half of it at most."""
    if kv_cache_mb is not None:
        check_megabytes("engine: expected kv_cache_mb", kv_cache_mb)
    if prefix_cache_mb is not None:
        check_megabytes("engine: expected prefix_cache_mb", prefix_cache_mb, zero=True)
    check_integer("engine: expected block_size", block_size, 1, _MAX_BLOCK_SIZE)
    block_bytes = bytes_of_block(config, block_size, kv_dtype)
    longest = -(-config.max_position_embeddings // block_size)
    budget = machine.cache_budget() if kv_cache_mb is None else int(kv_cache_mb * 2**20)
    state = slot_bytes(kept_of(config))
    slots = max(1, min(max_sequences + _CHECKPOINTS, budget // 2 // state)) if state else 0
    blocks = (budget - slots * state) // block_bytes
    if kv_cache_mb is None:
        memory = machine.memory_bytes()["available"]
        room = longest
        if memory is not None:
            room = (memory * 3 // 4 - slots * state) // block_bytes
        blocks = max(1, blocks, min(longest, room))
    elif blocks < 1:
        beside = f" and a state's {state / 2**20:.2f} MiB" if state else ""
        raise ValueError(
            f"engine: expected kv_cache_mb of at least a block's {block_bytes / 2**20:.2f} MiB"
            f"{beside}, got {kv_cache_mb}"
        )
    if prefix_cache_mb is not None:
        cached = int(prefix_cache_mb * 2**20)
        return MemorySizes(blocks, cached // block_bytes, slots, cached // state if state else None)
    if kv_cache_mb is not None:
        return MemorySizes(blocks, None, slots)
    return MemorySizes(blocks, max(_PREFIX_CACHE_MB * 2**20 // block_bytes, longest), slots)
