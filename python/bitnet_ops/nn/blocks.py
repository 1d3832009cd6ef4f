"""Who owns which block of a paged KV cache: reference counts, copy-on-write, prefix cache.

A block is a number here; the memory behind it is kv_pool's. A block may be registered with its
contents under a key, a hash of all tokens up to its end (`block_key`), and is then found by later
sequences that begin with the same tokens, also after its last owner has freed it, until it is
needed for other contents: of the free blocks those without contents are taken first, then the one
whose contents have not been used for longest. `max_cached` bounds how many are kept so. What a
background sequence leaves counts as not used for longest, unless others have used it too.
BlockAllocator is for one thread at a time. SequenceBlocks is one sequence in a pool that several
caches share: forks share the blocks behind their common positions, and the one that writes a block
which others hold too gets a copy of it first.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from bitnet_ops.errors import BitNetError
from bitnet_ops.nn.kv_config import CacheCapacityError, KVCacheConfig
from bitnet_ops.nn.kv_pool import KVPool

_ROOT = b"bitnet_ops prefix"
_LOOKED_AT = 32  # blocks that follow the same tokens and begin alike; the newest ones


@lru_cache(256)
def root_key(extra: str | None = None, epoch: int = 0) -> bytes:
    """The key before the first block; `extra`: what K and V depend on besides the tokens.

    Such as the name of an adapter; `epoch` counts changes of the weights. Sequences of different
    roots never share a block.
    """
    name = b"" if extra is None else b":" + extra.encode()
    return hashlib.sha256(_ROOT + b"%d" % epoch + name).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block that holds `token_ids` and follows the block of key `parent`.

    SHA-256, so that no prompt can be made that is taken for another.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class Contents(NamedTuple):
    """What a block holds: `token_ids`, perhaps not to its end, after the block of key `parent`."""

    key: bytes
    parent: bytes
    token_ids: Sequence[int]

    @classmethod
    def of(cls, parent: bytes, token_ids: Sequence[int]) -> Contents:
        return cls(block_key(parent, token_ids), parent, token_ids)


class PoolFullError(BitNetError, RuntimeError):
    """Too few blocks are free. `needed` and `free` count blocks."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"KV pool: expected {needed} free blocks, got {free} of {total}; wait until other "
            "sequences end, shorten this one or make the pool larger (kv_cache_mb, --kv-cache-mb)"
        )
        self.needed, self.free, self.total = needed, free, total

    def __reduce__(self) -> tuple[type, tuple[int, int, int]]:
        return type(self), (self.needed, self.free, self.total)


class BlockAllocator:
    """Reference counts and contents of the blocks 0 .. `blocks` - 1, all of them free at first.

    Args:
        blocks: how many; one that is never taken costs nothing.
        max_cached: how many free blocks keep their contents, at most; None: all of them.
    Attributes: `blocks`, how many there are. Every block is in use (one reference or more), or
    free; a free one is cached if its contents are known. `used_blocks`, `free_blocks` (cached ones
    among them) and `cached_blocks` count them.
    """

    def __init__(self, blocks: int, max_cached: int | None = None) -> None:
        self.blocks, self._max_cached = 0, max_cached
        self._references: list[int] = []  # of the blocks that have been taken once
        self._contents: list[Contents | None] = []
        self._by_key: dict[bytes, int] = {}
        # by the key before them and their first token; oldest first
        self._followers: dict[tuple[bytes, int], dict[int, None]] = {}
        # The free blocks, in the order in which they are taken. Blank ones have been used, so the
        # system has given them memory already; reclaimed ones, and those from
        # len(self._references) on, which have never been taken, have none.
        self._blank: list[int] = []
        self._reclaimed: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._found: set[int] = set()  # blocks that a second sequence has shared
        self.add_blocks(blocks)

    def __repr__(self) -> str:
        return (
            f"BlockAllocator({self.blocks} blocks: {self.used_blocks} used, {self.free_blocks} "
            f"free, {self.cached_blocks} of them cached)"
        )

    @property
    def free_blocks(self) -> int:
        never_taken = self.blocks - len(self._references)
        return len(self._blank) + len(self._reclaimed) + never_taken + len(self._cached)

    @property
    def used_blocks(self) -> int:
        return self.blocks - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        """How many sequences hold `block`; 0 where it is free."""
        return self._references[block] if block < len(self._references) else 0

    def contents(self, block: int) -> Contents | None:
        """What `block` is registered with, if anything."""
        return self._contents[block] if block < len(self._contents) else None

    def add_blocks(self, count: int) -> None:
        """Make `count` blocks more, numbered on from `blocks`."""
        if count < 0 or (not count and not self.blocks):
            raise ValueError(f"KV pool: expected blocks to add above 0, got {count}")
        self.blocks += count

    # Taking and giving back ---------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, contents undefined; all of them or none.

        Raises PoolFullError where fewer are free.
        """
        if count > self.free_blocks:
            raise PoolFullError(count, self.free_blocks, self.blocks)
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        elif self._reclaimed:
            block = self._reclaimed.pop()
        elif len(self._references) < self.blocks:
            block = len(self._references)
            self._references.append(0)
            self._contents.append(None)
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        self._found.discard(block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each: a fork, or blocks that `match` has found."""
        for block in blocks:
            if not self.references(block):
                if block not in self._cached:
                    raise ValueError(f"KV pool: expected a block in use or cached, got {block}")
                del self._cached[block]
            self._references[block] += 1
            self._found.add(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """Count blocks of a sequence, given in their order, as used now."""
        for block in reversed(blocks):
            if block in self._cached:
                self._cached.move_to_end(block)

    def free(self, blocks: Sequence[int], *, keep: bool = True) -> None:
        """One reference less to each of a sequence's `blocks`, given in their order.

        The last ones count as used longest ago: without the first nobody could find them. Without
        `keep` all that no other sequence has shared do, so that they are taken first.
        """
        for block in reversed(blocks):
            if not self.references(block):
                raise ValueError(f"KV pool: expected a block in use, got {block}, freed before")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._contents[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None
        if not keep:
            for block in blocks:
                if block in self._cached and block not in self._found:
                    self._cached.move_to_end(block, last=False)
        if self._max_cached is not None:
            while len(self._cached) > self._max_cached:
                self.forget([next(iter(self._cached))])

    def writable(self, block: int) -> int:
        """The block to write instead of `block`, whose contents are about to change.

        The same one where nobody else holds it; what it was is forgotten. Otherwise a new one, and
        the reference to `block` is given up: copy what it holds before writing. Raises
        PoolFullError if no block is free for that.
        """
        if self._references[block] > 1:
            (copy,) = self.allocate(1)
            self._references[block] -= 1
            return copy
        self._forget(block)
        return block

    # Contents -----------------------------------------------------------------------------------

    def register(self, block: int, contents: Contents) -> None:
        """Let sequences of the same tokens find `block`, which is in use.

        Its owner may write behind the registered tokens, not over them. Where another block is
        known under the key already, that one stays.
        """
        if not self.references(block):
            raise ValueError(f"KV pool: expected a block in use to register, got {block}")
        if contents.key not in self._by_key:
            self._forget(block)
            self._contents[block], self._by_key[contents.key] = contents, block
            place = contents.parent, contents.token_ids[0]
            self._followers.setdefault(place, {})[block] = None

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks known under `keys`, up to the first that is not; no reference is taken."""
        found = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            found.append(block)
        return found

    def nearest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The block after `parent` that begins like `token_ids` for longest, and how long; or None.

        No reference is taken. To go on from there it has to be copied, but for a free one all of
        whose contents are wanted.
        """
        best = None
        followers = self._followers.get((parent, token_ids[0]), {}) if token_ids else {}
        for block in islice(reversed(followers), _LOOKED_AT):
            contents = self._contents[block]
            assert contents is not None
            length = _common_prefix(contents.token_ids, token_ids)
            if best is None or length > best[1]:
                best = block, length
        return best

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free, so that sharing them leaves fewer to allocate."""
        return sum(not self.references(block) for block in blocks)

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody shall find `blocks` by their contents any more."""
        for block in blocks:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._blank.append(block)

    def forget_all(self) -> None:
        """Forget all contents, as when the weights have changed."""
        self.forget(list(self._by_key.values()))

    def _forget(self, block: int) -> None:
        if (contents := self._contents[block]) is not None:
            self._contents[block] = None
            self._found.discard(block)
            del self._by_key[contents.key]
            place = contents.parent, contents.token_ids[0]
            del self._followers[place][block]
            if not self._followers[place]:
                del self._followers[place]

    def reclaim(self) -> list[int]:
        """The free blocks that have been used and are not cached, ascending.

        Their memory may be given back to the system: those that have some are taken before them.
        """
        blocks = sorted(self._blank)
        self._reclaimed += reversed(blocks)
        self._blank.clear()
        return blocks


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


# Sequences of a shared pool -----------------------------------------------------------------------


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
        states = self.pool.states
        self._free_slots = [] if states is None else [*reversed(range(states.slots))]
        # A finalizer may run between any two lines, also of this class: it only leaves the blocks
        # here, and whoever comes next gives them back.
        self.dropped: deque[tuple[list[int], int]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def books(self) -> Iterator[BlockAllocator]:
        """The allocator, for one thread at a time, with dropped blocks entered."""
        with self._lock:
            while self.dropped:
                self._sequences -= 1
                blocks, slot = self.dropped.popleft()
                self._allocator.free(blocks)
                if slot >= 0:
                    self._free_slots.append(slot)
            yield self._allocator

    def add_sequence(self, shared: Sequence[int] = ()) -> SequenceBlocks:
        """A new sequence that begins with `shared` blocks of another."""
        with self.books() as allocator:
            slot = self._take_slot()
            self._sequences += 1
            wanted = min(self._sequences * self._per_sequence, self.pool.max_blocks)
            if (more := wanted - self.pool.blocks) > 0:
                self.pool.grow(more)
                allocator.add_blocks(more)
            allocator.share(shared)
            return SequenceBlocks(self, shared, slot)

    def _take_slot(self) -> int:
        """Of a model with recurrent layers where the new sequence's state lies; else -1."""
        if self.pool.states is None:
            return -1
        if not self._free_slots:
            raise CacheCapacityError(
                f"KVCache: expected at most {self.pool.states.slots} sequences and forks of a "
                "model with recurrent layers, got one more; drop some, or make another cache"
            )
        return self._free_slots.pop()

    def counts(self) -> tuple[int, int]:
        """Blocks in use and free ones."""
        with self.books() as allocator:
            return allocator.used_blocks, allocator.free_blocks

    def trim(self) -> None:
        """Give the memory of free blocks back to the system."""
        with self.books() as allocator:
            self.pool.release(allocator.reclaim())


class SequenceBlocks:
    """Which blocks hold the positions of a sequence, in their order, and its `length`.

    slot: where its state lies in the pool's states, -1: it has none.
    """

    def __init__(self, store: BlockStore, blocks: Sequence[int], slot: int = -1) -> None:
        self.store, self.blocks, self.length, self.slot = store, [*blocks], 0, slot

    def __del__(self) -> None:
        self.store.dropped.append((self.blocks, self.slot))

    def fork(self) -> SequenceBlocks:
        """A sequence with the same contents, which shares the blocks."""
        used = -(-self.length // self.store.pool.block_size)
        twin = self.store.add_sequence(self.blocks[:used])
        twin.length = self.length
        if self.store.pool.states is not None:
            self.store.pool.states.copy(self.slot, twin.slot)
        return twin

    def check_truncate(self, length: int) -> None:
        """Raise CacheCapacityError where `length` is in the middle of a sequence with a state."""
        if self.slot >= 0 and 0 < length < self.length:
            raise CacheCapacityError(
                f"KVCache: expected to keep all {self.length} positions or none, got {length}; the "
                "state of recurrent layers cannot go back: fork the cache before what may be "
                "taken back"
            )

    def truncate(self, length: int) -> None:
        """Hold at most `length` positions, and no block behind them. Raises as check_truncate."""
        self.check_truncate(length)
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
    maximum = blocks * (1 + _FORKS) if config.blocks is None else blocks
    form = config.block_size, config.torch_dtype
    slots = config.batch * (1 + _FORKS)
    try:
        return KVPool(config, blocks, *form, max_blocks=maximum, state_slots=slots)
    except MemoryError:  # a system that counts addresses as memory
        return KVPool(config, blocks, *form, state_slots=config.batch + 1)
