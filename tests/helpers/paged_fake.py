"""A model and a pool that show every wrong slot: token ids stand where keys and values would.

The runner writes the ids by slot_mapping and makes logits of what it reads back by block table and
length, so a wrong table, a lost copy or a block that was given away shows as other tokens, and a
block that nobody has written since it was free stops the test. `alone` computes what a request has
to give by itself, from plain lists.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.generate.engine_memory import EngineMemory, MemoryPlan
from bitnet_ops.generate.sampling import Sampler, SamplingParams, sample_rows
from bitnet_ops.generate.scheduler import Scheduler, SchedulerOptions
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.blocks import BlockAllocator
from tiny_models import SMALL, config_of

VOCAB = 11
POISON = -(10**6)
_ADAPTER = 1000  # keys and values under an adapter are other ones


def next_logits(ids: Sequence[int], adapter: str | None = None) -> Tensor:
    """Logits f32 [VOCAB] after `ids`; all of them count, and mostly the last two decide.

    So text repeats itself now and then, and drafts are right sometimes. One in 64 is a NaN.
    """
    data = np.asarray(ids, dtype=np.int64)
    every = zlib.crc32(data.tobytes(), 1 if adapter else 0)
    last = zlib.crc32(data[-2:].tobytes())
    logits = np.arange(VOCAB) * (every % 9973) % 97 / 97
    logits[(every >> 8 if every % 6 == 0 else last) % VOCAB] += 3
    if every % 64 == 1:
        logits[3] = np.nan
    return torch.from_numpy(logits.astype(np.float32))


def periodic(ids: Tensor) -> Tensor:
    """Logits f32 [n, VOCAB], of FakeModel, of a text that counts up again and again."""
    return torch.nn.functional.one_hot((ids + 1) % VOCAB, VOCAB).float() * 9


@dataclass(frozen=True)
class Answer:
    """The tokens of a request and how it ended: a reason, or the name of an exception."""

    tokens: list[int]
    ending: str


def alone(
    ids: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    *,
    adapter: str | None = None,
    max_positions: int,
    pool_positions: int,
) -> Answer:
    """What a request gives that has the model and the pool to itself."""
    ids, tokens, sampler = list(ids), [], Sampler(params, ids)
    while True:
        if len(tokens) >= limits.max_new_tokens:
            return Answer(tokens, "length")
        if tokens and len(ids) > max_positions:
            return Answer(tokens, "context")
        if len(ids) > pool_positions:
            return Answer(tokens, "PoolFullError")
        ((token, error, *_),) = sample_rows([sampler], next_logits(ids, adapter)[None])
        if error is not None:
            return Answer(tokens, type(error).__name__)
        if token in limits.stop_ids:
            return Answer(tokens, "stop")
        tokens.append(token)
        ids.append(token)


class FakePool:
    """Slots of token ids, [blocks, block_size]."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.dtype, self.layout, self.states = "ids", "fake", None
        self.slots = np.full((blocks, block_size), POISON)
        self.copies = 0

    def copy_block(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]
        self.copies += 1

    def parts(self, block: int) -> list[Tensor]:
        return [torch.from_numpy(self.slots[block])]

    def release(self, blocks: Iterable[int]) -> None:
        self.slots[list(blocks)] = POISON


class PoisoningAllocator(BlockAllocator):
    """Spoils what is in a block when nobody may read it any more."""

    def __init__(self, pool: FakePool) -> None:
        super().__init__(pool.blocks)
        self.pool = pool

    def allocate(self, count: int) -> list[int]:
        blocks = super().allocate(count)
        self.pool.slots[blocks] = POISON
        return blocks

    def free(self, blocks: Sequence[int], *, keep: bool = True) -> None:
        super().free(blocks, keep=keep)
        gone = [b for b in blocks if not self.references(b) and self.contents(b) is None]
        self.pool.slots[gone] = POISON


class FakeModel:
    """StepBatch to logits. Attribute `batches`: all that it has been given.

    `logits`: what to give instead of `next_logits`, from the last ids; `calls` first, if there is
    one, with the batch.
    """

    def __init__(
        self,
        max_positions: int = 1000,
        logits: Callable[[Tensor], Tensor] | None = None,
        calls: Callable[[StepBatch], None] | None = None,
    ) -> None:
        self.config = dataclasses.replace(
            config_of(SMALL["bitnet-offline"]),
            vocab_size=VOCAB,
            max_position_embeddings=max_positions,
            num_hidden_layers=1,
            num_key_value_heads=1,
            head_dim=16,
        )
        self.adapters = SimpleNamespace(check=lambda name: None)
        self.identity = lambda name: repr(name).encode()
        self.logits, self.calls = logits, calls
        self.batches: list[StepBatch] = []

    def step(self, batch: StepBatch, pool: Any) -> Tensor:
        self.batches.append(batch)
        if self.calls is not None:
            self.calls(batch)
        begins, owners = batch.query_start_loc.numpy(), []
        for i in range(len(batch.adapters)):
            count = int(begins[i + 1] - begins[i])
            assert batch.positions[begins[i + 1] - 1] == batch.seq_lens[i] - 1
            owners += [i] * count
        slots, size = batch.slot_mapping.numpy(), pool.block_size
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        marks = np.array([_ADAPTER if batch.adapters[i] else 0 for i in owners])
        # A step writes the keys and values of all its tokens before it reads any.
        pool.slots.reshape(-1)[slots] = batch.token_ids.numpy() + marks
        logits = [torch.empty(0, VOCAB)]
        for row in batch.logit_rows.tolist():
            length, i = int(batch.positions[row]) + 1, owners[row]
            table = batch.block_table[i, : -(-length // size)].numpy()
            ids = pool.slots[table].reshape(-1)[:length] - marks[row]
            assert ids.min() >= 0 and ids.max() < VOCAB, "read a slot of nobody, or of others"
            logits.append(next_logits(ids, batch.adapters[i])[None])
        if self.logits is not None:
            return self.logits(batch.token_ids[batch.logit_rows])
        return torch.cat(logits)


class FakeEngine(Engine):
    """An engine over a FakePool of so many blocks."""

    def __init__(
        self,
        blocks: int = 50,
        block_size: int = 4,
        model: Any = None,
        scheduling: SchedulerOptions | None = None,
        prefix_dir: Any = None,
        **options: Any,
    ) -> None:
        self.fake = FakeModel() if model is None else model
        scheduling = scheduling or SchedulerOptions(**options)
        super().__init__(
            self.fake, block_size=block_size, scheduling=scheduling, prefix_dir=prefix_dir
        )
        self.pool = FakePool(blocks, block_size)
        self._core.plan = _FakePlan(self.pool, self._plan)


class _FakePlan(MemoryPlan):
    """The plan of an engine, but for the pool."""

    def __init__(self, pool: FakePool, plan: MemoryPlan) -> None:
        super().__init__(**vars(plan))
        self.pool = pool

    def make(self, config: Any) -> EngineMemory:
        blocks, size = PoisoningAllocator(self.pool), self.pool.block_size
        most, copy = config.max_position_embeddings, self.pool.copy_block
        scheduler = Scheduler(blocks, size, most, copy, self.scheduling)
        return EngineMemory(self.pool, blocks, scheduler)  # type: ignore[arg-type]
