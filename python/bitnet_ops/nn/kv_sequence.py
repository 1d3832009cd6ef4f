"""SequenceBlocks: one sequence in a pool of blocks that several caches share.

Forks share the blocks behind their common positions; who writes one that others hold too gets a
copy of it first. The blocks of a sequence that nobody holds any more go back to the pool. It must
not know layers, ops or models.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bitnet_ops.nn.blocks import BlockAllocator, PoolFullError
from bitnet_ops.nn.kv_config import KVCacheConfig
from bitnet_ops.nn.kv_pool import KVPool

_FORKS = (
    32  # of a cache, for whose blocks there are addresses: beyond that they share what there is
)


class BlockStore:
    """The pool that a cache shares with its forks, and who holds which block.

    Unless the config says how many blocks there are, there come to be as many as every live
    sequence needs at its longest, as far as the addresses reach: memory is not taken before it is
    written. Several threads may use sequences of one store, each its own.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self._per_sequence = config.blocks_per_sequence if config.blocks is None else 0
        self.pool = _reserve(config)
        self._allocator = BlockAllocator(self.pool.blocks)
        self._sequences = 0
        # A finalizer may run between any two lines, also of this class: it only leaves the blocks
        # here, and whoever comes next gives them back.
        self.dropped: deque[list[int]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def books(self) -> Iterator[BlockAllocator]:
        """The allocator, for one thread at a time, with dropped blocks entered."""
        with self._lock:
            while self.dropped:
                self._sequences -= 1
                self._allocator.free(self.dropped.popleft())
            yield self._allocator

    def enter(self, shared: Sequence[int] = ()) -> SequenceBlocks:
        """A new sequence that begins with `shared` blocks of another."""
        with self.books() as allocator:
            self._sequences += 1
            wanted = min(self._sequences * self._per_sequence, self.pool.max_blocks)
            if (more := wanted - self.pool.blocks) > 0:
                self.pool.grow(more)
                allocator.add_blocks(more)
            allocator.share(shared)
            return SequenceBlocks(self, shared)

    def counts(self) -> tuple[int, int]:
        """Blocks in use and free ones."""
        with self.books() as allocator:
            return allocator.used_blocks, allocator.free_blocks

    def trim(self) -> None:
        """Give the memory of free blocks back to the system."""
        with self.books() as allocator:
            self.pool.release(allocator.reclaim())


class SequenceBlocks:
    """Which blocks hold the positions of a sequence, in their order, and its `length`."""

    def __init__(self, store: BlockStore, blocks: Sequence[int]) -> None:
        self.store, self.blocks, self.length = store, [*blocks], 0

    def __del__(self) -> None:
        self.store.dropped.append(self.blocks)

    def fork(self) -> SequenceBlocks:
        """A sequence with the same contents, which shares the blocks."""
        used = -(-self.length // self.store.pool.block_size)
        twin = self.store.enter(self.blocks[:used])
        twin.length = self.length
        return twin

    def truncate(self, length: int) -> None:
        """Hold at most `length` positions, and no block behind them."""
        self.length = min(self.length, length)
        kept = -(-self.length // self.store.pool.block_size)
        if kept < len(self.blocks):
            with self.store.books() as allocator:
                allocator.free(self.blocks[kept:])
                del self.blocks[kept:]


def prepare(sequences: Sequence[SequenceBlocks], ranges: Sequence[tuple[int, int]]) -> None:
    """Let each sequence write the positions [begin, end) of its range; the lengths stay.

    Each gets the blocks that it lacks up to the end, and its own of those that others hold too.
    Raises PoolFullError where the pool has too few; nothing has changed then.
    """
    store = sequences[0].store
    size = store.pool.block_size
    with store.books() as allocator:
        lacking, shared = [], []
        for sequence, (begin, end) in zip(sequences, ranges, strict=True):
            blocks, needed = sequence.blocks, -(-end // size)
            lacking.append(max(0, needed - len(blocks)))
            written = range(begin // size, min(needed, len(blocks)) if begin < end else 0)
            shared += [(blocks, i) for i in written if allocator.references(blocks[i]) > 1]
        new = allocator.allocate(sum(lacking) + len(shared))
        for blocks, i in shared:
            copy = new.pop()
            store.pool.copy_block(blocks[i], copy)
            allocator.free([blocks[i]])
            blocks[i] = copy
        for sequence, count in zip(sequences, lacking, strict=True):
            for _ in range(count):
                sequence.blocks.append(new.pop())


def renew(sequences: Sequence[SequenceBlocks], lengths: Sequence[int]) -> None:
    """Let each hold that many positions of undefined contents, in blocks of its own.

    What they held is lost. Raises PoolFullError where even so the pool has too few blocks; nothing
    has changed then.
    """
    store = sequences[0].store
    with store.books() as allocator:
        counts = [-(-length // store.pool.block_size) for length in lengths]
        own = [block for sequence in sequences for block in sequence.blocks]
        room = allocator.free_blocks + sum(allocator.references(block) == 1 for block in own)
        if sum(counts) > room:
            raise PoolFullError(sum(counts), room, allocator.blocks)
        for sequence in sequences:
            allocator.free(sequence.blocks)
            sequence.blocks.clear()
        for sequence, count, length in zip(sequences, counts, lengths, strict=True):
            sequence.blocks += allocator.allocate(count)
            sequence.length = length


def _reserve(config: KVCacheConfig) -> KVPool:
    blocks = config.own_blocks
    most = blocks * (1 + _FORKS) if config.blocks is None else blocks
    form = config.block_size, config.torch_dtype
    try:
        return KVPool(config, blocks, *form, max_blocks=most)
    except MemoryError:  # a system that counts addresses as memory
        return KVPool(config, blocks, *form)
