"""Who owns which block of a paged KV cache: reference counts, copy-on-write, prefix cache.

A block is a number here; the memory behind it is nn.kv_pool's. A block may be registered under a
key, a hash of all tokens up to its end (`block_key`), and is then found by later sequences that
begin with the same tokens, also after its last owner has freed it, until it is needed for other
contents: of the free blocks those without a key are taken first, then the one whose key has not
been used for longest. It must not know models, tensors or requests. For one thread at a time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_ROOT = b"bitnet_ops prefix"


def root_key(extra: str | None = None) -> bytes:
    """The key before the first block; `extra`: what K and V depend on besides the tokens.

    Such as the name of an adapter: sequences of different roots never share a block.
    """
    return hashlib.sha256(_ROOT + (b"" if extra is None else b":" + extra.encode())).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block that holds `token_ids` and follows the block of key `parent`.

    SHA-256, so that no prompt can be made that is taken for another.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PoolFullError(RuntimeError):
    """Too few blocks are free. `needed` and `free` count blocks."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"KV pool: expected {needed} free blocks, got {free} of {total}; wait until other "
            "sequences end, shorten this one or make the pool larger"
        )
        self.needed, self.free, self.total = needed, free, total

    def __reduce__(self) -> tuple[type, tuple[int, int, int]]:
        return type(self), (self.needed, self.free, self.total)


class BlockAllocator:
    """Reference counts and contents of the blocks 0 .. `blocks` - 1, all of them free at first.

    Attributes: `blocks`, how many there are. Every block is in use (one reference or more), or
    free; a free one is cached if it still has a key. `used_blocks`, `free_blocks` (cached ones
    among them) and `cached_blocks` count them.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = 0
        self._references: list[int] = []
        self._keys: list[bytes | None] = []
        self._by_key: dict[bytes, int] = {}
        # The free blocks, in the order in which they are taken. Blank ones have been used, so the
        # system has given them memory already; untouched ones may have none yet.
        self._blank: list[int] = []
        self._untouched: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.add_blocks(blocks)

    def __repr__(self) -> str:
        return (
            f"BlockAllocator({self.blocks} blocks: {self.used_blocks} used, {self.free_blocks} "
            f"free, {self.cached_blocks} of them cached)"
        )

    @property
    def free_blocks(self) -> int:
        return len(self._blank) + len(self._untouched) + len(self._cached)

    @property
    def used_blocks(self) -> int:
        return self.blocks - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        """How many sequences hold `block`; 0 where it is free."""
        return self._references[block]

    def key_of(self, block: int) -> bytes | None:
        """The key that `block` is registered under, if any."""
        return self._keys[block]

    def add_blocks(self, count: int) -> None:
        """Make `count` blocks more, numbered on from `blocks`."""
        if count < 0 or (not count and not self.blocks):
            raise ValueError(f"KV pool: expected blocks to add above 0, got {count}")
        new = range(self.blocks, self.blocks + count)
        self._untouched[:0] = reversed(new)  # the end is taken first: the lowest number
        self._references += [0] * count
        self._keys += [None] * count
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
        elif self._untouched:
            block = self._untouched.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each: a fork, or blocks that `match` has found."""
        for block in blocks:
            if not self._references[block]:
                if block not in self._cached:
                    raise ValueError(f"KV pool: expected a block in use or cached, got {block}")
                del self._cached[block]
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less to each of a sequence's `blocks`, given in their order.

        The last ones count as used longest ago: without the first nobody could find them.
        """
        for block in reversed(blocks):
            if not self._references[block]:
                raise ValueError(f"KV pool: expected a block in use, got {block}, freed before")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def writable(self, block: int) -> int:
        """The block to write instead of `block`, whose contents are about to change.

        The same one where nobody else holds it; its key is forgotten. Otherwise a new one, and
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

    def register(self, block: int, key: bytes) -> None:
        """Let sequences whose tokens have `key` find `block`, which is full and in use.

        Where another block is known under the key already, that one stays.
        """
        if not self._references[block]:
            raise ValueError(f"KV pool: expected a block in use to register, got {block}")
        if key not in self._by_key:
            self._forget(block)
            self._keys[block], self._by_key[key] = key, block

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks known under `keys`, up to the first that is not; no reference is taken."""
        found = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free, so that sharing them leaves fewer to allocate."""
        return sum(not self._references[block] for block in blocks)

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
        if (key := self._keys[block]) is not None:
            self._keys[block] = None
            del self._by_key[key]

    def reclaim(self) -> list[int]:
        """The free blocks that have been used and are not cached, ascending.

        Their memory may be given back to the system: they count as untouched from now on.
        """
        blocks = sorted(self._blank)
        self._untouched += reversed(blocks)
        self._blank.clear()
        return blocks
