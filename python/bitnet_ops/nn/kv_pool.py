"""KVPool: the memory of a paged KV cache, in blocks of `block_size` positions of all layers.

Address space is reserved for as many blocks as the pool may ever have; the system gives memory as
positions are written, and takes it back where `release` says so. So a pool grows without copying,
and tensors over it stay valid. Which block belongs to whom is not its matter, nor are models,
sampling or text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.blocks.block import PAGE
from bitnet_ops.config import ModelConfig
from bitnet_ops.memory.reserved import Reserved
from bitnet_ops.nn.kv_config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV_DTYPE,
    TYPE_OF,
    KVCacheConfig,
    kept_of,
    kv_dtype_of,
    memory_of_block,
)
from bitnet_ops.nn.state_pool import StatePool

# Layout "panels" ----------------------------------------------------------------------------------

# Sixteen positions lie together (`ops.paged_attention`): of keys 4-byte words of neighbouring
# channels stand side by side for all sixteen, of values 4-byte words of neighbouring positions for
# every channel.
PANEL = 16  # positions that lie together


def best_layout(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """How a pool should lie: in "panels" where possible, or "rows"."""
    possible = dtype in (torch.bfloat16, torch.int8)
    return "panels" if possible and not (block_size % PANEL or head_dim % PANEL) else "rows"


def rows_of_panels(memory: Tensor, *, keys: bool) -> Tensor:
    """The rows [..., positions, D] of such memory in panels; a copy."""
    *outer, positions, dim = memory.shape
    word = 4 // memory.itemsize
    panels = *outer, positions // PANEL
    if keys:
        words = memory.reshape(*panels, dim // word, PANEL, word).transpose(-3, -2)
    else:
        words = memory.reshape(*panels, PANEL // word, dim, word).transpose(-2, -1)
    return words.reshape(memory.shape)


def panels_of_rows(rows: Tensor, *, keys: bool) -> Tensor:
    """What `rows_of_panels` undoes: rows [..., positions, D] as panels of that shape; a copy."""
    *outer, positions, dim = rows.shape
    word = 4 // rows.itemsize
    panels = *outer, positions // PANEL
    if keys:
        words = rows.reshape(*panels, PANEL, dim // word, word).transpose(-3, -2)
    else:
        words = rows.reshape(*panels, PANEL // word, word, dim).transpose(-2, -1)
    return words.reshape(rows.shape)


# Pools --------------------------------------------------------------------------------------------

_ROWS = "key", "value"


class _Memory:
    """Numbers [layers, max_blocks, ...] of reserved memory, `shape` [layers, ...] of each block.

    In memory a block has all its layers one behind the other: one stretch, which a few huge pages
    hold and which goes back to the system as a whole. With the layers outermost the first position
    of a sequence would take a huge page in each, and a freed block would leave holes in as many.
    """

    def __init__(self, max_blocks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        memory = Reserved(max_blocks, shape, dtype)
        self.tensor, self.release = memory.tensor.transpose(0, 1), memory.release
        self.block_bytes = math.prod(shape) * dtype.itemsize


class Attended(Protocol):
    """Whose positions queries attend to, in the ops' terms; a StepBatch is one."""

    @property
    def query_start_loc(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def block_table(self) -> Tensor: ...


class PagedPool:
    """What a model's step needs of a pool: KVPool's, or the memory of another engine.

    By name: "key" and "value" [layers, blocks, block_size, kv_heads, head_dim]; "key_scale" and
    "value_scale" float32 [layers, blocks, block_size, kv_heads] of int8 pools; "key_bounds" of
    pages, as `ops.paged_cache_update` makes them, where a block chooses pages. layout: of keys and
    values, as `ops.paged_attention` takes it. states: of a model whose blocks keep something for
    sequences.
    """

    # Exchanged as one: a thread may read it while another grows the pool, and keys with one number
    # of blocks beside values with another are no pool.
    _caches: Mapping[str, Tensor]
    layout: str = "rows"
    states: StatePool | None = None

    def caches(self) -> dict[str, Tensor]:
        """The tensors that a model's step writes, by name, all of one moment."""
        return {**self._caches, **(self.states.tensors if self.states is not None else {})}

    @property
    def key_pool(self) -> Tensor:
        return self._caches["key"]

    @property
    def value_pool(self) -> Tensor:
        return self._caches["value"]

    @property
    def key_scale(self) -> Tensor | None:
        return self._caches.get("key_scale")

    @property
    def value_scale(self) -> Tensor | None:
        return self._caches.get("value_scale")

    @property
    def key_bounds(self) -> Tensor | None:
        return self._caches.get("key_bounds")

    def _layer(
        self, layer: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None], Tensor | None]:
        """One layer's keys and values, their scales, and the bounds of keys."""
        of = {name: cache[layer] for name, cache in self._caches.items()}
        scales = of.get("key_scale"), of.get("value_scale")
        return (of["key"], of["value"]), scales, of.get("key_bounds")

    def update(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write key and value F [tokens, KV, D] of one layer into their slots, as the op does."""
        pools, scales, bounds = self._layer(layer)
        ops.paged_cache_update(*pools, key, value, slots, *scales, self.layout, bounds)

    def attend(
        self, layer: int, query: Tensor, batch: Attended, scale: float, policy: str = ""
    ) -> Tensor:
        """`ops.paged_attention` of one layer: query F [tokens, H, D] -> F [tokens, H, D]."""
        pools, scales, bounds = self._layer(layer)
        where = batch.query_start_loc, batch.seq_lens, batch.block_table
        return ops.paged_attention(
            query, *pools, *where, scale, *scales, self.layout, policy=policy, key_bounds=bounds
        )


def attend_rectangular(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_positions: Tensor,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """`ops.paged_attention` over rectangular caches, each sequence's a block of its own.

    Args:
        query: F [B, T, H, D], already rotated.
        key_cache, value_cache: C [B, KV, L, D], holding the keys and values of these tokens too.
        start_positions: int64 [B], how many tokens of each sequence came before.
        scale, window: as of `ops.paged_attention`.
        key_scale, value_scale: float32 [B, KV, L] of int8 caches.
    Returns F [B, T, H, D]; raises RuntimeError as the op does.
    """
    batch, tokens = query.shape[:2]
    query_start_loc, block_table = torch.arange(batch + 1) * tokens, torch.arange(batch)[:, None]
    out = ops.paged_attention(
        query.flatten(0, 1),
        key_cache.transpose(1, 2),
        value_cache.transpose(1, 2),
        query_start_loc,
        start_positions + tokens,
        block_table,
        scale,
        _scale_pool(key_scale),
        _scale_pool(value_scale),
        window=window,
    )
    return out.view(query.shape)


def update_rectangular(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    start_positions: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write key and value F [B, T, KV, D] at start_positions int64 [B] of such caches, in place.

    Raises RuntimeError as `ops.paged_cache_update` does; a position outside the cache is slot -1.
    """
    batch, tokens, length = *key.shape[:2], key_cache.shape[2]
    positions = start_positions[:, None] + torch.arange(tokens)
    slots = positions + torch.arange(batch)[:, None] * length
    slots = torch.where((positions >= 0) & (positions < length), slots, -1)
    ops.paged_cache_update(
        key_cache.transpose(1, 2),
        value_cache.transpose(1, 2),
        key.flatten(0, 1),
        value.flatten(0, 1),
        slots.flatten(),
        _scale_pool(key_scale),
        _scale_pool(value_scale),
    )


def _scale_pool(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.transpose(1, 2)


class KVPool(PagedPool):
    """Keys and values of all layers, as the ops of a paged cache take them.

    Attributes: `key_pool` and `value_pool` [layers, blocks, block_size, kv_heads, head_dim] of
    `dtype`; `key_scale` and `value_scale` float32 [layers, blocks, block_size, kv_heads] where the
    dtype has a scale for every row, else None. In memory the order is [blocks, layers, kv_heads,
    block_size, head_dim]. `grow` replaces them by longer ones over the same memory. `layout`:
    "panels" if the 16 rows that their views show together lie as `ops.paged_attention` says, which
    is faster to read, else "rows"; `read` and `stored` read either.

    Args:
        config: a model's config, or a KVCacheConfig (layers, kv heads, head_dim).
        blocks: how many blocks there are, at least 1.
        block_size: positions of a block, at least 1; 16 to 128 are usual.
        dtype: one of KV_DTYPES' values.
        max_blocks: how many blocks `grow` can reach; `blocks` unless given. Address space only.
        state_slots: of a model with recurrent layers, how many sequences have a state.
        layout: "rows" or "panels"; unless given, panels where they are possible: of bfloat16 and
            int8, if block_size and head_dim are multiples of 16.
    Contents are not initialised. Raises ValueError on anything else, MemoryError without address
    space.
    """

    def __init__(
        self,
        config: ModelConfig | KVCacheConfig,
        blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        dtype: torch.dtype | str = DEFAULT_KV_DTYPE,
        *,
        max_blocks: int | None = None,
        layout: str | None = None,
        state_slots: int = 1,
    ) -> None:
        dtype = kv_dtype_of(dtype, "KVPool: expected dtype")
        max_blocks = blocks if max_blocks is None else max_blocks
        _check_above("blocks", blocks, 0)
        _check_above("block_size", block_size, 0)
        _check_above("max_blocks", max_blocks, blocks - 1)
        self.blocks, self.block_size, self.max_blocks = blocks, block_size, max_blocks
        self.dtype, self.type = dtype, TYPE_OF[dtype]
        kept = kept_of(config)
        head_dim = kept["key"].buffer.shape[1]
        best = best_layout(dtype, block_size, head_dim)
        if layout not in (None, "rows", best):
            raise ValueError(
                'KVPool: expected layout "rows" or, of bfloat16 and int8 with block_size and '
                f'head_dim that are multiples of {PANEL}, "panels", got {layout!r}'
            )
        self.layout = layout or best
        self._memory = {
            name: _Memory(max_blocks, shape, of)
            for name, (shape, of) in memory_of_block(kept, block_size, dtype).items()
        }
        self.block_bytes = sum(memory.block_bytes for memory in self._memory.values())
        # pages follow from the rows of their positions
        self._pages = [name for name in self._memory if name in kept and kept[name].buffer.dtype]
        self._set_views()
        of_sequences = {name: one for name, one in kept.items() if one.buffer.per == "sequence"}
        if of_sequences:
            self.states = StatePool(of_sequences, state_slots)

    def _set_views(self) -> None:
        n = slice(self.blocks)
        self._caches = {
            name: memory.tensor[:, n].transpose(2, 3) for name, memory in self._memory.items()
        }

    def __repr__(self) -> str:
        layers, blocks, size, heads, dim = self.key_pool.shape
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"KVPool({dtype}, layers={layers}, blocks={blocks} of {size} positions, "
            f"kv_heads={heads}, head_dim={dim}, {self.layout}, {self.memory_usage_mb():.0f} MiB)"
        )

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

    # Contents -------------------------------------------------------------------------------------

    def stored(self, blocks: Sequence[int], length: int) -> dict[str, Tensor]:
        """Copies of the first `length` positions of the sequence that lies in `blocks`.

        As they are stored: "key" and "value" of `dtype` [layers, KV, length, D], and with scales
        "key_scale" and "value_scale" f32 [layers, KV, length].
        """
        index = self._blocks_of(blocks, length)
        return {
            name: rows.transpose(1, 2).flatten(2, 3)[:, :, :length]
            for name, rows in ((name, self._rows_at(name, index)) for name in self._named())
        }

    def store(self, blocks: Sequence[int], found: Mapping[str, Tensor]) -> None:
        """Write what `stored` has given into `blocks`, from their first position on."""
        length = found["key"].shape[2]
        index = self._blocks_of(blocks, length)
        for name, memory in self._named().items():
            rows = self._rows_at(name, index).transpose(1, 2).flatten(2, 3)
            rows[:, :, :length] = found[name]
            whole = rows.unflatten(2, (-1, self.block_size)).transpose(1, 2)
            if self.layout == "panels" and name in _ROWS:
                whole = panels_of_rows(whole, keys=name == "key")
            memory.tensor[:, index] = whole
        for name in self._pages:
            self._memory[name].tensor[:, index] = self._bounds_of(index)

    def _bounds_of(self, index: Tensor) -> Tensor:
        """The bounds of all pages of these blocks, as `ops.paged_cache_update` makes them."""
        keys = self._rows_at("key", index).float()
        if "key_scale" in self._memory:
            keys *= self._rows_at("key_scale", index).unsqueeze(-1)
        pages = keys.unflatten(3, (-1, PAGE))
        found = []
        for bound, down in ((pages.amax(4), False), (pages.amin(4), True)):
            bits = bound.contiguous().view(torch.int32)
            away = (bits & 0xFFFF != 0) & ((bits < 0) == down)  # from zero
            found.append((bits + away * 0x10000 >> 16).to(torch.int16).view(torch.bfloat16))
        return torch.cat(found, -1)

    def read(self, layer: int, blocks: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Keys and values f32 [KV, length, D] of one layer, as attention reads them.

        Of the sequence that lies in `blocks`; codes are multiplied by their scales.
        """
        index = self._blocks_of(blocks, length)
        wide = [self._rows_at(name, index, layer).float() for name in _ROWS]
        for name, rows in zip(_ROWS, wide, strict=True):
            if (scale := self._memory.get(f"{name}_scale")) is not None:
                rows *= scale.tensor[layer, index].unsqueeze(-1)
        key, value = (rows.transpose(0, 1).flatten(1, 2)[:, :length] for rows in wide)
        return key, value

    def _rows_at(self, name: str, index: Tensor, layer: int | slice = slice(None)) -> Tensor:
        """Copies [layers, blocks, KV, block_size, ...] of what `_named` calls so, in rows.

        Of one `layer`, the dimension of layers is left out.
        """
        memory = self._memory[name].tensor[layer]
        found = memory.index_select(memory.dim() - (4 if name in _ROWS else 3), index)
        if self.layout == "panels" and name in _ROWS:
            return rows_of_panels(found, keys=name == "key")
        return found

    def _blocks_of(self, blocks: Sequence[int], length: int) -> Tensor:
        """The numbers of the blocks that hold the first `length` positions."""
        used = blocks[: -(-length // self.block_size)]
        for block in used:
            self._check_index(block)
        return torch.tensor(used, dtype=torch.int64)

    def _named(self) -> dict[str, _Memory]:
        return {name: one for name, one in self._memory.items() if name not in self._pages}

    def copy_block(self, source: int, target: int) -> None:
        """Block `target` becomes a copy of block `source`, in all layers."""
        for index in (source, target):
            self._check_index(index)
        for memory in self._memory.values():
            memory.tensor[:, target] = memory.tensor[:, source]

    def parts(self, block: int) -> list[Tensor]:
        """The memory of a block, not copied: of keys, values, and their scales if there are any."""
        self._check_index(block)
        return [memory.tensor[:, block] for memory in self._memory.values()]

    def release(self, blocks: Iterable[int]) -> None:
        """Give the memory of `blocks` back to the system; their contents are lost.

        They can be written again at any time. Pages that lie in other blocks too stay, of 4 KiB;
        of a huge page that does the system takes the released part back when it is short of memory.
        """
        for begin, end in _runs(sorted(set(blocks))):
            self._check_index(begin)
            self._check_index(end - 1)
            for memory in self._memory.values():
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
