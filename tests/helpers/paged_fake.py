"""A model and a pool that show every wrong slot: token ids stand where keys and values would.

The runner writes the ids by slot_mapping and makes logits of what it reads back by block table and
length, so a wrong table, a lost copy or a block that was given away shows as other tokens, and a
block that nobody has written since it was free stops the test. `alone` computes what a request has
to give by itself, from plain lists. Nothing here knows the engine or the scheduler.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.generate.engine import Limits
from bitnet_ops.generate.sampling import Sampler, SamplingError, SamplingParams
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.blocks import BlockAllocator

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
    before: int = 0,
) -> Answer:
    """What a request gives that has the model and the pool to itself; `before`: output in ids."""
    ids, tokens, sampler = list(ids), [], Sampler(params, ids)
    while True:
        if before + len(tokens) >= limits.max_new_tokens:
            return Answer(tokens, "length")
        if before + len(tokens) and len(ids) > max_positions:
            return Answer(tokens, "context")
        if len(ids) > pool_positions:
            return Answer(tokens, "PoolFullError")
        try:
            token = sampler(next_logits(ids, adapter))
        except SamplingError:
            return Answer(tokens, "SamplingError")
        if token in limits.stop_ids:
            return Answer(tokens, "stop")
        tokens.append(token)
        ids.append(token)


class FakePool:
    """Slots of token ids, [blocks, block_size]."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.slots = np.full((blocks, block_size), POISON)
        self.copies = 0

    def copy_block(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]
        self.copies += 1

    def release(self, blocks: Iterable[int]) -> None:
        self.slots[list(blocks)] = POISON

    def grow(self, count: int) -> None:
        self.blocks += count
        more = np.full((count, self.block_size), POISON)
        self.slots = np.concatenate([self.slots, more])


class PoisoningAllocator(BlockAllocator):
    """Spoils what is in a block when nobody may read it any more."""

    def __init__(self, pool: FakePool) -> None:
        super().__init__(pool.blocks)
        self.pool = pool

    def allocate(self, count: int) -> list[int]:
        blocks = super().allocate(count)
        self.pool.slots[blocks] = POISON
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks)
        gone = [b for b in blocks if not self.references(b) and self.contents(b) is None]
        self.pool.slots[gone] = POISON


class FakeRunner:
    """StepBatch to logits. Attribute `batches`: all that it has been given."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.batches: list[StepBatch] = []

    def __call__(self, batch: StepBatch) -> Tensor:
        self.batches.append(batch)
        begins, owners = batch.query_start_loc.numpy(), []
        for i in range(len(batch.adapters)):
            count = int(begins[i + 1] - begins[i])
            assert batch.positions[begins[i + 1] - 1] == batch.seq_lens[i] - 1
            owners += [i] * count
        slots, size = batch.slot_mapping.numpy(), self.pool.block_size
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        marks = np.array([_ADAPTER if batch.adapters[i] else 0 for i in owners])
        # A step writes the keys and values of all its tokens before it reads any.
        self.pool.slots.reshape(-1)[slots] = batch.token_ids.numpy() + marks
        logits = [torch.empty(0, VOCAB)]
        for row in batch.logit_rows.tolist():
            length, i = int(batch.positions[row]) + 1, owners[row]
            table = batch.block_table[i, : -(-length // size)].numpy()
            ids = self.pool.slots[table].reshape(-1)[:length] - marks[row]
            assert ids.min() >= 0 and ids.max() < VOCAB, "read a slot of nobody, or of others"
            logits.append(next_logits(ids, batch.adapters[i])[None])
        return torch.cat(logits)
