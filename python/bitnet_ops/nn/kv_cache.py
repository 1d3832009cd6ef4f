"""KVCache: keys and values of every layer of a batch of sequences, without an engine.

An interface over a pool of blocks (kv_pool.py): a sequence has the blocks that its positions take,
and shares them with its forks until one of them writes. The lengths ARE the positions: the next
token of sequence b stands at position lengths[b]. Keys are stored after the rotary embedding. A
slot at or above its sequence's length is never read. It must not know models, sampling or text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.nn.blocks import BlockStore, SequenceBlocks, prepare, renew
from bitnet_ops.nn.kv_config import (
    TYPE_OF,
    CacheCapacityError,
    KVCacheConfig,
    KVCacheDtype,
    kept_of,
    kv_dtype_of,
)
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.storage import KVType

# in a file: what KVPool.stored calls them
_SAVED = {"key_cache": "key", "value_cache": "value", "key_scale": "key_scale",
          "value_scale": "value_scale"}  # fmt: skip


class KVCache:
    """Keys and values of `batch` sequences of at most `max_len` positions.

    Args:
        config: the model's config (layers, kv heads, head_dim, max_position_embeddings); or a
            KVCacheConfig, which says all there is to say, and no further argument.
        batch: number of sequences B, at least 1.
        max_len: positions of a sequence, at most; not above config.max_position_embeddings.
        dtype: torch.float32, in which nothing is rounded, or another row of storage.KV_TYPES:
            torch.bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
    Attributes: `config`, the KVCacheConfig; `pool`, the memory.
    A cache is for one thread at a time; its forks may be other threads'. Memory is taken as
    positions are written. Raises CacheCapacityError or ValueError on anything else, PoolFullError,
    which names the blocks needed and free, where a write finds no room; nothing is written then.
    """

    def __init__(
        self,
        config: ModelConfig | KVCacheConfig,
        batch: int | None = None,
        max_len: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(config, KVCacheConfig):
            config = _config_of(config, batch, max_len, dtype)
        elif (batch, max_len, dtype) != (None, None, None):
            raise ValueError("KVCache: expected a KVCacheConfig and nothing else, got more")
        store = BlockStore(config)
        self._hold(config, [store.add_sequence() for _ in range(config.batch)])

    def _hold(self, config: KVCacheConfig, rows: list[SequenceBlocks]) -> None:
        self.config, self._rows = config, rows
        self._store: BlockStore = rows[0].store
        self.pool: KVPool = self._store.pool

    def _over(self, rows: list[SequenceBlocks]) -> KVCache:
        """Another cache in the same pool."""
        cache = KVCache.__new__(KVCache)
        cache._hold(self.config, rows)
        return cache

    def __repr__(self) -> str:
        c = self.config
        return (
            f"KVCache({c.dtype.value}, layers={c.num_layers}, batch={self.batch}, "
            f"kv_heads={c.num_kv_heads}, head_dim={c.head_dim}, max_len={self.max_len}, "
            f"lengths={[row.length for row in self._rows]})"
        )

    # Sizes ----------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """The number of sequences B."""
        return len(self._rows)

    @property
    def max_len(self) -> int:
        """Positions of a sequence, at most."""
        return self.config.max_seq_len

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored; `get` gives float32 whatever it is."""
        return self.pool.dtype

    @property
    def type(self) -> KVType:
        """The row of the table of types that it is of."""
        return self.pool.type

    @property
    def lengths(self) -> Tensor:
        """How many positions each sequence has, int64 [B]; a copy."""
        return torch.tensor([row.length for row in self._rows])

    @property
    def nbytes(self) -> int:
        """Bytes of address space of its own keys, values and scales, written or not."""
        blocks = self.batch * self.config.blocks_per_sequence
        if self.config.blocks is not None:
            blocks = self.config.blocks
        return blocks * self.pool.block_bytes

    def memory_usage_mb(self) -> float:
        """MiB of its own keys, values and scales, once every position is written."""
        return self.nbytes / 2**20

    @property
    def used_blocks(self) -> int:
        """Blocks of the pool that this cache, its forks or what it is a fork of hold."""
        return self._store.counts()[0]

    @property
    def free_blocks(self) -> int:
        """Blocks of the pool that nobody holds."""
        return self._store.counts()[1]

    # Positions ------------------------------------------------------------------------------------

    def positions(self, new_tokens: int) -> Tensor:
        """Absolute positions int64 [B, new_tokens] of the tokens that come next.

        Raises CacheCapacityError if one sequence has no room for them.
        """
        self._check_room(new_tokens)
        return self.lengths.unsqueeze(1) + torch.arange(new_tokens)

    def _check_room(self, new_tokens: int) -> None:
        longest = max(row.length for row in self._rows)
        if longest + new_tokens > self.max_len:
            raise CacheCapacityError(
                f"KVCache: expected at most {self.max_len - longest} new tokens, got {new_tokens}; "
                f"{longest} of {self.max_len} positions are taken: make the cache or the prompt "
                "shorter by that much, or start a new sequence"
            )

    @property
    def blocks(self) -> list[list[int]]:
        """Of each sequence the blocks that its positions lie in, in order; to be read only."""
        return [row.blocks for row in self._rows]

    @property
    def slots(self) -> list[int]:
        """Of each sequence where its state lies in `pool.states`, -1: it has none."""
        return [row.slot for row in self._rows]

    def prepare(self, new_tokens: int) -> list[int]:
        """Let every sequence write that many positions into its blocks; where each begins.

        For a step that writes the pool itself; `advance` follows. Raises CacheCapacityError or
        PoolFullError, before anything is written, if one sequence has no room for them.
        """
        self._check_room(new_tokens)
        starts = [row.length for row in self._rows]
        prepare(self._rows, [(start, start + new_tokens) for start in starts])
        return starts

    def advance(self, new_tokens: int) -> None:
        """Count `new_tokens` positions, which every layer has written, in every sequence."""
        for row in self._rows:
            row.length += new_tokens

    def set_length(self, index: int, length: int) -> None:
        """Say that sequence `index` holds `length` positions; new ones have undefined contents.

        Raises CacheCapacityError for a length below 0 or above max_len, PoolFullError.
        """
        if not 0 <= length <= self.max_len:
            raise CacheCapacityError(
                f"KVCache: expected length from 0 to {self.max_len}, got {length}"
            )
        row = self._rows[index]
        row.truncate(length)
        prepare([row], [(row.length, length)])
        row.length = length

    def truncate(self, length: int | Sequence[int] | Tensor) -> None:
        """Forget the positions from `length` on in every sequence that has them.

        length: one for all sequences, or one for each. Blocks without positions become free.
        Raises ValueError for a negative length, or for as many as there are no sequences,
        CacheCapacityError for a part of a sequence with a recurrent state.
        """
        ends = torch.as_tensor(length, dtype=torch.int64)
        if ends.shape not in ((), (self.batch,)):
            raise ValueError(
                f"KVCache: expected one length, or one for each of {self.batch} sequences, got "
                f"{length}"
            )
        if int(ends.min()) < 0:
            raise ValueError(f"KVCache: expected length at least 0, got {length}")
        rows = [*zip(self._rows, ends.expand(self.batch).tolist(), strict=True)]
        for row, end in rows:
            row.check_truncate(end)
        for row, end in rows:
            row.truncate(end)

    def clear(self) -> None:
        """Forget everything; the memory stays, free for others of the pool."""
        self.truncate(0)

    def trim(self) -> None:
        """Give the memory of the pool's free blocks back to the system."""
        self._store.trim()

    # Contents -------------------------------------------------------------------------------------

    def update(
        self, layer_idx: int, key: Tensor, value: Tensor, seq_pos: int | Tensor | None = None
    ) -> None:
        """Write key and value F [B, T, KV, D] of the layer `layer_idx`, from 0 on.

        Without seq_pos after each sequence's length; the lengths do not move, for every layer
        writes at the same place, and `advance` moves them. With seq_pos, an integer or int64 [B],
        from that position on; a sequence then holds at least what was written.
        Raises ValueError for other shapes, CacheCapacityError for positions beyond max_len,
        PoolFullError.
        """
        self._check_layer(layer_idx)
        if key.dim() != 4 or key.shape[0] != self.batch or value.shape != key.shape:
            raise ValueError(
                f"KVCache: expected key and value [{self.batch}, T, KV, D], got "
                f"{list(key.shape)} and {list(value.shape)}"
            )
        tokens = key.shape[1]
        if seq_pos is None:
            starts = self.prepare(tokens)
        else:
            at = torch.as_tensor(seq_pos, dtype=torch.int64)
            if at.shape not in ((), (self.batch,)):
                raise ValueError(
                    f"KVCache: expected seq_pos one integer, or one for each of {self.batch} "
                    f"sequences, got {list(at.shape)}"
                )
            starts = at.expand(self.batch).tolist()
            if min(starts) < 0 or max(starts) + tokens > self.max_len:
                raise CacheCapacityError(
                    f"KVCache: expected seq_pos from 0 to {self.max_len - tokens} for {tokens} "
                    f"tokens, got {at.tolist()}"
                )
            prepare(self._rows, [(start, start + tokens) for start in starts])
        self.pool.update(layer_idx, key.flatten(0, 1), value.flatten(0, 1),
                         self._slots(starts, tokens))  # fmt: skip
        if seq_pos is not None:
            for row, start in zip(self._rows, starts, strict=True):
                row.length = max(row.length, start + tokens)

    def _slots(self, starts: Sequence[int], tokens: int) -> Tensor:
        """Where `tokens` of each sequence lie in the pool, int64 [B * tokens]."""
        size = self.pool.block_size
        positions = np.add.outer(starts, np.arange(tokens))
        rows = zip(self._rows, positions // size, strict=True)
        blocks = np.stack([np.array(row.blocks, dtype=np.int64)[at] for row, at in rows])
        return torch.from_numpy((blocks * size + positions % size).reshape(-1))

    def get(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values f32 [B, KV, longest length, D] of layer `layer_idx`, whatever their type.

        What attention reads: an int8 cache's codes times their scales. Zeros stand behind the end
        of a shorter sequence.
        """
        self._check_layer(layer_idx)
        c = self.config
        longest = max(row.length for row in self._rows)
        shape = self.batch, c.num_kv_heads, longest, c.head_dim
        keys, values = (torch.zeros(shape, dtype=torch.float32) for _ in range(2))
        for i, row in enumerate(self._rows):
            key, value = self.pool.read(layer_idx, row.blocks, row.length)
            keys[i, :, : row.length], values[i, :, : row.length] = key, value
        return keys, values

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.config.num_layers:
            raise IndexError(
                f"KVCache: expected a layer from 0 to {self.config.num_layers - 1}, got {layer}"
            )

    def row(self, index: int) -> KVCache:
        """Sequence `index` as a cache of batch 1: the same sequence, not a copy."""
        return self._over([self._rows[index]])

    def fork(self, row: int | None = None) -> KVCache:
        """A cache of its own with the contents of this one, or of sequence `row` alone.

        Nothing is copied: both hold the same blocks until one of them writes.
        """
        rows = self._rows if row is None else [self._rows[row]]
        return self._over([each.fork() for each in rows])

    def __deepcopy__(self, _: object) -> KVCache:
        return self.fork()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the positions that there are to a safetensors file. Raises OSError."""
        from safetensors.torch import save

        longest = max(row.length for row in self._rows)
        rows = [self.pool.stored(row.blocks, row.length) for row in self._rows]
        tensors = {"lengths": self.lengths}
        for name, part in _SAVED.items():
            if part not in rows[0]:
                continue
            first = rows[0][part]  # [layers, KV, length] and D, which scales lack
            layers, heads, _, *dim = first.shape
            whole = torch.zeros((layers, self.batch, heads, longest, *dim), dtype=first.dtype)
            for i, row in enumerate(rows):
                whole[:, i, :, : row[part].shape[2]] = row[part]
            tensors[name] = whole
        if (states := self.pool.states) is not None:
            parts = [states.views(row.slot) for row in self._rows]
            tensors |= {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        with atomic_file(path) as file:
            file.write(save(tensors))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Take back what `save` has written; after an error everything is as it was.

        Raises ValueError for another shape or dtype, PoolFullError without room.
        """
        from safetensors.torch import load_file

        try:
            found = load_file(path)
        except Exception as error:  # safetensors' own, which is no ValueError
            raise ValueError(f"KVCache: expected a saved cache, got {path}: {error}") from None
        lengths = self._check_saved(found, path)
        renew(self._rows, lengths)
        for i, row in enumerate(self._rows):
            parts = {
                part: found[name][:, i, :, : row.length]
                for name, part in _SAVED.items()
                if name in found
            }
            self.pool.store(row.blocks, parts)
            if (states := self.pool.states) is not None:
                states.store(row.slot, {name: found[name][i] for name in states.views(0)})

    def _check_saved(self, found: Mapping[str, Tensor], path: object) -> list[int]:
        """The lengths of the saved sequences, once all of them are known to fit."""
        names = [*_SAVED] if self.type.has_scales else ["key_cache", "value_cache"]
        states = {} if self.pool.states is None else self.pool.states.views(0)
        if found.keys() != (wanted := {*names, *states, "lengths"}):
            raise ValueError(
                f"KVCache: expected the tensors {', '.join(sorted(wanted))} in {path}, got "
                f"{', '.join(sorted(found))}"
            )
        lengths: list[int] = found["lengths"].flatten().tolist()
        longest = max(lengths, default=0)
        c = self.config
        for name in names:
            shape = [c.num_layers, self.batch, c.num_kv_heads, longest]
            dtype = torch.float32 if name.endswith("scale") else self.dtype
            shape += [] if name.endswith("scale") else [c.head_dim]
            if list(found[name].shape) != shape or found[name].dtype != dtype:
                raise ValueError(
                    f"KVCache: expected {name} {dtype} {shape} in {path}, got "
                    f"{found[name].dtype} {list(found[name].shape)}"
                )
        for name, part in states.items():
            shape = [self.batch, *part.shape]
            if [*found[name].shape] != shape:
                raise ValueError(
                    f"KVCache: expected {name} {shape} in {path}, got {[*found[name].shape]}"
                )
        if longest > self.max_len or len(lengths) != self.batch or min(lengths) < 0:
            raise CacheCapacityError(
                f"KVCache: expected at most {self.max_len} positions of {self.batch} sequences in "
                f"{path}, got {lengths}"
            )
        return lengths


def _config_of(
    config: ModelConfig, batch: int | None, max_len: int | None, dtype: torch.dtype | None
) -> KVCacheConfig:
    if batch is None or max_len is None:
        raise TypeError("KVCache: expected batch and max_len beside a model's config")
    dtype = kv_dtype_of(torch.float32 if dtype is None else dtype, "KVCache: expected dtype")
    if batch < 1:
        raise ValueError(f"KVCache: expected batch above 0, got {batch}")
    if not 1 <= max_len <= config.max_position_embeddings:
        raise CacheCapacityError(
            f"KVCache: expected max_len from 1 to max_position_embeddings "
            f"{config.max_position_embeddings}, got {max_len}; the model has no more positions"
        )
    keys, layers = kept_of(config)["key"]
    heads, head_dim = keys.shape
    kv_dtype = KVCacheDtype(TYPE_OF[dtype].name)
    return KVCacheConfig(max_len, layers, heads, head_dim, kv_dtype, batch, model=config)
