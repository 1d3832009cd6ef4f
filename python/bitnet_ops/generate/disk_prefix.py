"""DiskPrefix: what of an engine's prefix cache is written to a PrefixStore and read from it.

Blocks are written as soon as they are full, in the order of their text, so that one that is there
has all those before it. A request whose next block is there waits until blocks are read into the
pool, where the scheduler finds them like any others; meanwhile the others step. Of models with
recurrent layers checkpoints behind whole blocks are kept too, and read with the blocks before them.
For the thread that steps.
"""

from __future__ import annotations

import hashlib
from collections import deque

import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops.generate.prefix_store import VERSION, Fetch, PrefixStore, bytes_of, copy_parts
from bitnet_ops.generate.request import Request
from bitnet_ops.generate.states import StateSlots
from bitnet_ops.nn.blocks import BlockAllocator, Contents
from bitnet_ops.nn.kv_pool import KVPool


def root_on_disk(identity: bytes, pool: KVPool) -> bytes:
    """The key before the first block of a text, for `identity` of a model and an adapter.

    Of all that keys and values depend on, and of how they lie in a block of `pool`; instruction
    set, threads and the layout of weights are not among it.
    """
    form = VERSION, bitnet_ops.__version__, torch.__version__, str(pool.dtype), pool.layout
    sizes = [(str(part.dtype), tuple(part.shape)) for part in pool.parts(0)]
    return hashlib.sha256(repr((form, sizes, identity)).encode()).digest()


class DiskPrefix:
    """One pool's traffic with a store.

    Attributes: `tokens`, how many have been read and not computed.
    """

    def __init__(
        self,
        store: PrefixStore,
        pool: KVPool,
        allocator: BlockAllocator,
        states: StateSlots | None,
        max_cached: int | None,
    ) -> None:
        self._store, self._pool, self._allocator, self._states = store, pool, allocator, states
        self._size = pool.block_size
        self._max_blocks = allocator.blocks if max_cached is None else max_cached
        self._block_bytes = bytes_of(pool.parts(0))
        self._arriving: deque[Request] = deque()
        self._coming: _Coming | None = None  # of the first one that arrives
        self.tokens = 0

    @property
    def arriving(self) -> int:
        """How many requests wait for the disk."""
        return len(self._arriving)

    # Written -------------------------------------------------------------------------------------

    def lacks(self, request: Request) -> bool:
        """Whether `save` has something to do."""
        whole, rest = divmod(request.computed, self._size)
        return request.saved < whole or (self._states is not None and not rest)

    def save(self, request: Request) -> None:
        """Have those of its full blocks written that are not; the rest at its next step."""
        size = self._size
        while request.saved < request.computed // size:
            i = request.saved
            if request.gone[0] <= i < request.gone[1]:  # the disk was too slow
                return
            parts = self._pool.parts(request.blocks[i])
            if not self._store.put(request.key(i, size), parts, request.arrived_ns, i):
                return
            request.saved += 1
        at = request.computed // size
        if self._states is None or request.computed % size or not at:
            return
        if (one := self._states.behind(request, request.computed)) is not None and not one.drafts:
            parts = self._states.pool.parts(one.slot)
            self._store.put(_state_key(request, at, size), parts, request.arrived_ns, at)

    # Read ----------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> bool:
        """Whether the request waits for what the store has of it; `arrived` gives it then."""
        if self._range(request) is None:
            return False
        self._arriving.append(request)
        return True

    def arrived(self) -> list[Request]:
        """Requests that wait no longer; what has been read for them is in the pool."""
        ready = []
        while self._arriving:
            request = self._arriving[0]
            if self._coming is None and (found := self._range(request)) is not None:
                self._coming = self._fetch(request, *found)
            if self._coming is not None:
                self._install(self._coming)
                if not self._coming.fetch.over and self._store.active:
                    break
                self._settle(self._coming)
                self._coming = None
            ready.append(self._arriving.popleft())
        return ready

    def wait(self, seconds: float) -> None:
        """Wait until `arrived` has something to do, where requests arrive."""
        if self._coming is not None:
            self._coming.fetch.wait(seconds)

    def leave(self, request: Request) -> bool:
        """A request has ended, or its weights have changed; whether it was arriving."""
        if request not in self._arriving:
            return False
        if self._coming is not None and self._coming.request is request:
            self._coming.fetch.cancel()
            self._coming = None
        self._arriving.remove(request)
        return True

    def _range(self, request: Request) -> tuple[list[int], int] | None:
        """Blocks in memory that it begins with, and up to which one the store may go on; or None.

        The last token is always left to compute.
        """
        size, known = self._size, len(request.ids) - 1
        whole = min(known // size, self._max_blocks)
        found = self._allocator.match(request.key(i, size) for i in range(whole))
        if self._states is None:
            if len(found) < whole and self._store.exists(request.key(len(found), size)):
                return found, whole
            return None
        one = self._states.find(request, min(known, (len(found) + 1) * size - 1))
        here = 0 if one is None else one.tokens // size
        for end in range(whole, here, -1):
            if self._store.exists(_state_key(request, end, size)):
                return found[:end], end
        return None

    def _fetch(self, request: Request, found: list[int], end: int) -> _Coming:
        self._allocator.touch(found)  # what is read must not take their place
        begin, size = len(found), self._size
        free = self._allocator.free_blocks - self._allocator.count_free(found)
        wanted = [(request.key(i, size), self._block_bytes) for i in range(begin, end)]
        if self._states is None:
            wanted = wanted[: max(0, free)]
        elif len(wanted) <= free:
            state = bytes_of(self._states.pool.parts(0))
            wanted.append((_state_key(request, end, size), state))
        else:
            wanted = []  # the state would be of no use
        fetch = self._store.fetch(wanted, request.arrived_ns, begin)
        keys = [request.key(i, size) for i in range(-1, end)]
        return _Coming(request, fetch, keys, begin)

    def _install(self, coming: _Coming) -> None:
        """Move what has been read into the pool."""
        while (piece := coming.fetch.take()) is not None:
            if coming.at + 1 == len(coming.keys):
                self._install_state(coming, piece)
            elif self._allocator.free_blocks:
                self._install_block(coming, piece)
            else:
                coming.fetch.cancel()
            self._store.give_back(piece)

    def _install_block(self, coming: _Coming, piece: Tensor) -> None:
        request, at, size = coming.request, coming.at, self._size
        ids = request.content[at * size : (at + 1) * size]
        blocks = self._allocator.allocate(1)
        copy_parts(self._pool.parts(blocks[0]), piece, back=True)
        self._allocator.register(blocks[0], Contents(coming.keys[at + 1], coming.keys[at], ids))
        self._allocator.free(blocks)
        coming.at += 1
        if self._states is None:
            self.tokens += size

    def _install_state(self, coming: _Coming, piece: Tensor) -> None:
        assert self._states is not None
        tokens = coming.at * self._size
        slot = self._states.restore(coming.request, tokens)
        if slot is not None:
            copy_parts(self._states.pool.parts(slot), piece, back=True)
            self.tokens += tokens

    def _settle(self, coming: _Coming) -> None:
        """Of the blocks of a text the last ones go first, as `BlockAllocator.free` has it."""
        self._allocator.touch(self._allocator.match(coming.keys[1:]))


class _Coming:
    """What is read for `request`: `keys` of its blocks, from the one before them all; `at` is next.

    Behind its last block comes a state, where models have one.
    """

    def __init__(self, request: Request, fetch: Fetch, keys: list[bytes], at: int) -> None:
        self.request, self.fetch, self.keys, self.at = request, fetch, keys, at


def _state_key(request: Request, blocks: int, size: int) -> bytes:
    """Of the state behind so many of its blocks."""
    return hashlib.sha256(b"state" + request.key(blocks - 1, size)).digest()
