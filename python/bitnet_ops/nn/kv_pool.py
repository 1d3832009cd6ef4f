"""KVPool: the memory of a paged KV cache, in blocks of `block_size` positions of all layers.

Address space is reserved for as many blocks as the pool may ever have; the system gives memory as
positions are written, and takes it back where `release` says so. So a pool grows without copying,
and tensors over it stay valid. Which block belongs to whom is not its matter, nor are models,
sampling or text.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.nn.kv_cache import DEFAULT_KV_DTYPE, TYPE_OF, check_kv_dtype

DEFAULT_BLOCK_SIZE = 64
# Without it the system may refuse to reserve more than there is memory, written or not. Linux' own
# number for the Pythons whose mmap does not name it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class _Memory:
    """Numbers [layers, max_blocks, *block] of anonymous memory, reserved but not touched.

    In this order a block is one stretch of bytes in every layer.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        # Private: of shared memory the system would take nothing back.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"KVPool: expected {nbytes >> 20} MiB of address space, got: {error}; make "
                "max_blocks smaller"
            ) from None
        self.tensor = torch.frombuffer(self._map, dtype=dtype).view(shape)
        self.block_bytes = math.prod(shape[2:]) * dtype.itemsize

    def release(self, begin: int, end: int) -> None:
        """Give the memory of blocks [begin, end) back, except pages shared with other blocks."""
        layers, max_blocks = self.tensor.shape[:2]
        page = mmap.PAGESIZE
        for layer in range(layers):
            first = layer * max_blocks
            start = -(-(first + begin) * self.block_bytes // page) * page
            stop = (first + end) * self.block_bytes // page * page
            if start < stop:
                self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def bytes_of_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block of such a pool: keys and values of all layers, with their scales."""
    rows = config.num_hidden_layers * config.num_key_value_heads * block_size
    return 2 * rows * TYPE_OF[dtype].row_bytes(config.head_dim)


class PagedPool(Protocol):
    """What a model's step needs of a pool: KVPool's, or the memory of another engine."""

    @property
    def key_pool(self) -> Tensor: ...
    @property
    def value_pool(self) -> Tensor: ...
    @property
    def key_scale(self) -> Tensor | None: ...
    @property
    def value_scale(self) -> Tensor | None: ...
    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]: ...


class KVPool:
    """Keys and values of all layers, as the ops of a paged cache take them.

    Attributes: `key_pool` and `value_pool` [layers, blocks, block_size, kv_heads, head_dim] of
    `dtype`; `key_scale` and `value_scale` float32 [layers, blocks, block_size, kv_heads] where the
    dtype has a scale for every row, else None. In memory kv_heads stands before block_size. `grow`
    replaces them by longer ones over the same memory.

    Args:
        config: the model's config (layers, kv heads, head_dim).
        blocks: how many blocks there are, at least 1.
        block_size: positions of a block, at least 1; 16 to 128 are usual.
        dtype: one of KV_DTYPES' values.
        max_blocks: how many blocks `grow` can reach; `blocks` unless given. Address space only.
    Contents are not initialised. Raises ValueError on anything else, MemoryError without address
    space.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        dtype: torch.dtype = DEFAULT_KV_DTYPE,
        *,
        max_blocks: int | None = None,
    ) -> None:
        check_kv_dtype(dtype, "KVPool: expected dtype")
        max_blocks = blocks if max_blocks is None else max_blocks
        _check_above("blocks", blocks, 0)
        _check_above("block_size", block_size, 0)
        _check_above("max_blocks", max_blocks, blocks - 1)
        self.blocks, self.block_size, self.max_blocks = blocks, block_size, max_blocks
        self.dtype, self.type = dtype, TYPE_OF[dtype]
        self.block_bytes = bytes_of_block(config, block_size, dtype)
        shape = (
            config.num_hidden_layers,
            max_blocks,
            config.num_key_value_heads,
            block_size,
            config.head_dim,
        )
        self._rows = [_Memory(shape, dtype) for _ in "kv"]
        has_scales = self.type.has_scales
        self._scales = [_Memory(shape[:-1], torch.float32) for _ in "kv"] if has_scales else []
        self._set_views()

    def _set_views(self) -> None:
        n = slice(self.blocks)
        key, value = (m.tensor[:, n].transpose(2, 3) for m in self._rows)
        self.key_pool, self.value_pool = key, value
        self.key_scale: Tensor | None = None
        self.value_scale: Tensor | None = None
        if self._scales:
            self.key_scale, self.value_scale = (
                m.tensor[:, n].transpose(2, 3) for m in self._scales
            )

    def __repr__(self) -> str:
        layers, blocks, size, heads, dim = self.key_pool.shape
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"KVPool({dtype}, layers={layers}, blocks={blocks} of {size} positions, "
            f"kv_heads={heads}, head_dim={dim}, {self.memory_usage_mb():.0f} MiB)"
        )

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """One layer's scales of keys and values f32 [blocks, block_size, KV], or None."""
        if self.key_scale is None or self.value_scale is None:
            return None, None
        return self.key_scale[layer], self.value_scale[layer]

    @property
    def _memory(self) -> list[_Memory]:
        return [*self._rows, *self._scales]

    def memory_usage_mb(self) -> float:
        """MiB of all `blocks`, scales included, once every position has been written."""
        return self.blocks * self.block_bytes / 2**20

    def grow(self, count: int) -> None:
        """Have `count` more blocks, behind those there are; nothing is copied.

        Raises ValueError beyond max_blocks.
        """
        if not 0 <= count <= self.max_blocks - self.blocks:
            raise ValueError(
                f"KVPool: expected from 0 to {self.max_blocks - self.blocks} more blocks "
                f"({self.blocks} of max_blocks {self.max_blocks} are there), got {count}"
            )
        self.blocks += count
        self._set_views()

    def copy_block(self, source: int, target: int) -> None:
        """Block `target` becomes a copy of block `source`, in all layers."""
        for index in (source, target):
            self._check_index(index)
        for memory in self._memory:
            memory.tensor[:, target] = memory.tensor[:, source]

    def release(self, blocks: Iterable[int]) -> None:
        """Give the memory of `blocks` back to the system; their contents are lost.

        They can be written again at any time. Pages that lie in other blocks too stay: a block is
        whole pages in every layer if kv_heads * block_size * head_dim numbers are, scales seldom.
        """
        for begin, end in _runs(sorted(set(blocks))):
            self._check_index(begin)
            self._check_index(end - 1)
            for memory in self._memory:
                memory.release(begin, end)

    def _check_index(self, block: int) -> None:
        if not 0 <= block < self.blocks:
            raise ValueError(f"KVPool: expected a block from 0 to {self.blocks - 1}, got {block}")


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """The ranges [begin, end) that the ascending `numbers` are made of."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[begin], numbers[i - 1] + 1
            begin = i


def _check_above(name: str, value: object, bound: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= bound:
        raise ValueError(f"KVPool: expected {name} an integer above {bound}, got {value!r}")
