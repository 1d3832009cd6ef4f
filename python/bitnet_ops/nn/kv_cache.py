"""KVCache: keys and values of every layer, with the length of every sequence.

The lengths ARE the positions: the next token of sequence b stands at position lengths[b]. Keys are
stored after the rotary embedding. A slot at or above its sequence's length is never read.
It must not know models, sampling or text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.nn.kv_config import KVCacheConfig
from bitnet_ops.nn.storage import DEFAULT_KV_TYPE, KV_TYPES, KVType

TYPE_OF = {getattr(torch, name): row for name, row in KV_TYPES.items()}  # a dtype's row
KV_DTYPES = {row.name: dtype for dtype, row in TYPE_OF.items()}
DEFAULT_KV_DTYPE = KV_DTYPES[DEFAULT_KV_TYPE]


def check_kv_dtype(dtype: object, who: str) -> None:
    """Raise ValueError unless `dtype` is one that a cache can have."""
    if dtype not in TYPE_OF:
        *most, last = KV_DTYPES
        remedy = f"; pass torch.{dtype}" if isinstance(dtype, str) else ""
        raise ValueError(f"{who} {', '.join(most)} or {last}, got {dtype!r}{remedy}")


class CacheCapacityError(ValueError):
    """More positions were asked for than the cache, or the model's context, has."""


class KVCache:
    """Keys and values, per layer a tensor [B, KV, L, D] of `dtype`, and `lengths` int64 [B].

    `keys` and `values` list the layers; they are views of `key_cache` and `value_cache`
    [layers, B, KV, L, D]. With int8, `key_scale` and `value_scale` float32 [layers, B, KV, L] hold
    the scale of every position; else they are None.

    Args:
        config: the model's config (layers, kv heads, head_dim, max_position_embeddings); or a
            KVCacheConfig, which says all there is to say, and no further argument.
        batch: number of sequences B, at least 1.
        max_len: capacity L in positions, at most config.max_position_embeddings.
        dtype: torch.float32, in which nothing is rounded, or another row of storage.KV_TYPES:
            torch.bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
    It is for one thread at a time.
    Raises CacheCapacityError or ValueError on anything else. The memory is not initialised: the
    system gives it as positions are written, and slots above a length are never read.
    """

    def __init__(
        self,
        config: ModelConfig | KVCacheConfig,
        batch: int | None = None,
        max_len: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(config, KVCacheConfig):
            if (batch, max_len, dtype) != (None, None, None):
                raise ValueError("KVCache: expected a KVCacheConfig and nothing else, got more")
            c = config
            sizes = c.num_layers, c.batch, c.num_kv_heads, c.max_seq_len, c.head_dim
            self._allocate(sizes, KV_DTYPES[c.dtype.value])
            return
        if batch is None or max_len is None:
            raise TypeError("KVCache: expected batch and max_len beside a model's config")
        dtype = torch.float32 if dtype is None else dtype
        check_kv_dtype(dtype, "KVCache: expected dtype")
        if batch < 1:
            raise ValueError(f"KVCache: expected batch above 0, got {batch}")
        if not 1 <= max_len <= config.max_position_embeddings:
            raise CacheCapacityError(
                f"KVCache: expected max_len from 1 to max_position_embeddings "
                f"{config.max_position_embeddings}, got {max_len}; the model has no more positions"
            )
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        self._allocate((layers, batch, heads, max_len, config.head_dim), dtype)

    def _allocate(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
        # Not zeros: those would touch every page now, of a context that may never be that long.
        keys, values = (torch.empty(shape, dtype=dtype) for _ in "kv")
        scales = (
            [torch.empty(shape[:-1]) for _ in "kv"] if TYPE_OF[dtype].has_scales else [None, None]
        )
        self._set_memory(keys, values, *scales)
        self.lengths = torch.zeros(shape[1], dtype=torch.int64)
        self.max_len = shape[3]

    def _set_memory(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
    ) -> None:
        self.key_cache, self.value_cache = key_cache, value_cache
        self.key_scale, self.value_scale = key_scale, value_scale
        self.keys, self.values = list(key_cache.unbind()), list(value_cache.unbind())

    def __repr__(self) -> str:
        layers, batch, heads, length, dim = self.key_cache.shape
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"KVCache({dtype}, layers={layers}, batch={batch}, kv_heads={heads}, head_dim={dim}, "
            f"max_len={length}, lengths={self.lengths.tolist()})"
        )

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """One layer's scales of keys and values f32 [B, KV, L], as the ops take them."""
        if self.key_scale is None or self.value_scale is None:
            return None, None
        return self.key_scale[layer], self.value_scale[layer]

    @property
    def batch(self) -> int:
        """The number of sequences B."""
        return self.lengths.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.key_cache.dtype

    @property
    def type(self) -> KVType:
        """The row of the table of types that it is of."""
        return TYPE_OF[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of address space of all keys, values and scales, written or not."""
        return sum(t.nbytes for t in self._named().values())

    def _memory(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.key_cache, self.value_cache, self.key_scale, self.value_scale

    def _named(self) -> dict[str, Tensor]:
        """What there is of the memory, by its attributes' names."""
        names = "key_cache", "value_cache", "key_scale", "value_scale"
        pairs = zip(names, self._memory(), strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def positions(self, new_tokens: int) -> Tensor:
        """Absolute positions int64 [B, new_tokens] of the tokens that come next.

        Raises CacheCapacityError, before anything is written, if one sequence has no room for them.
        """
        longest = int(self.lengths.max())
        if longest + new_tokens > self.max_len:
            raise CacheCapacityError(
                f"KVCache: expected at most {self.max_len - longest} new tokens, got {new_tokens}; "
                f"{longest} of {self.max_len} positions are taken: make the cache or the prompt "
                "shorter by that much, or start a new sequence"
            )
        start = self.lengths.unsqueeze(1)
        return start if new_tokens == 1 else start + torch.arange(new_tokens)

    def update(
        self, layer_idx: int, key: Tensor, value: Tensor, seq_pos: int | Tensor | None = None
    ) -> None:
        """Write key and value F [B, T, KV, D] of one layer.

        Without seq_pos after each sequence's length; the lengths do not move, for every layer
        writes at the same place, and `advance` moves them. With seq_pos, an integer or int64 [B],
        from that position on; a sequence then holds at least what was written.
        """
        caches = self.keys[layer_idx], self.values[layer_idx]
        start = self.lengths
        if seq_pos is not None:
            start = torch.as_tensor(seq_pos, dtype=torch.int64).expand(self.batch).contiguous()
        ops.kv_cache_update(*caches, key, value, start, *self.scales(layer_idx))
        if seq_pos is not None:
            self.lengths = self.lengths.maximum(start + key.shape[1])

    def get(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values f32 [B, KV, longest length, D] of one layer, whatever their type.

        What attention reads: an int8 cache's codes times their scales. Zeros stand behind the end
        of a shorter sequence.
        """
        longest = int(self.lengths.max())
        behind = torch.arange(longest) >= self.lengths.view(-1, 1, 1)  # [B, 1, longest]
        found = []
        rows = self.keys[layer_idx], self.values[layer_idx]
        for row, scale in zip(rows, self.scales(layer_idx), strict=True):
            wide = row[:, :, :longest].float()
            if scale is not None:
                wide = wide * scale[:, :, :longest, None]
            found.append(wide.masked_fill(behind.unsqueeze(-1), 0.0))
        return found[0], found[1]

    def memory_usage_mb(self) -> float:
        """MiB of all keys, values and scales, once every position is written."""
        return self.nbytes / 2**20

    def fork(self, row: int | None = None) -> KVCache:
        """A cache of its own with the contents of this one, or of sequence `row` alone."""
        twin = self._view(slice(None) if row is None else slice(row, row + 1))
        longest = int(self.lengths.max())
        copies = []
        for tensor in twin._memory():
            copy = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype)
            if copy is not None and tensor is not None:
                copy[:, :, :, :longest] = tensor[:, :, :, :longest]
            copies.append(copy)
        keys, values, *scales = copies
        assert keys is not None and values is not None
        twin._set_memory(keys, values, *scales)
        twin.lengths = (self.lengths if row is None else self.lengths[row : row + 1]).clone()
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the positions that there are to a safetensors file. Raises OSError."""
        from safetensors.torch import save

        longest = int(self.lengths.max())
        tensors = {
            name: tensor[:, :, :, :longest].contiguous() for name, tensor in self._named().items()
        }
        with atomic_file(path) as file:
            file.write(save({**tensors, "lengths": self.lengths}))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Take back what `save` has written. Raises ValueError for another shape or dtype."""
        from safetensors.torch import load_file

        try:
            found = load_file(path)
        except Exception as error:  # safetensors' own, which is no ValueError
            raise ValueError(f"KVCache: expected a saved cache, got {path}: {error}") from None
        memory = self._named()
        wanted = {*memory, "lengths"}
        if found.keys() != wanted:
            raise ValueError(
                f"KVCache: expected the tensors {', '.join(sorted(wanted))} in {path}, got "
                f"{', '.join(sorted(found))}"
            )
        longest = int(found["lengths"].max())
        for name, tensor in memory.items():
            shape = [*tensor.shape[:3], longest, *tensor.shape[4:]]
            if list(found[name].shape) != shape or found[name].dtype != tensor.dtype:
                raise ValueError(
                    f"KVCache: expected {name} {tensor.dtype} {shape} in {path}, got "
                    f"{found[name].dtype} {list(found[name].shape)}"
                )
        if longest > self.max_len or found["lengths"].shape != self.lengths.shape:
            raise CacheCapacityError(
                f"KVCache: expected at most {self.max_len} positions of {self.batch} sequences in "
                f"{path}, got {longest} of {found['lengths'].numel()}"
            )
        for name, tensor in memory.items():
            tensor[:, :, :, :longest] = found[name]
        self.lengths = found["lengths"]

    def advance(self, new_tokens: int) -> None:
        """Count `new_tokens` positions, which every layer has written, in every sequence."""
        # Not in place: callers may hold the positions, which for one token are a view of the
        # lengths.
        self.lengths = self.lengths + new_tokens

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self.lengths = torch.zeros_like(self.lengths)

    def truncate(self, length: int | Sequence[int] | Tensor) -> None:
        """Forget the positions from `length` on in every sequence that has them.

        length: one for all sequences, or one for each.
        """
        ends = torch.as_tensor(length, dtype=torch.int64)
        if ends.shape not in ((), self.lengths.shape):
            raise ValueError(
                f"KVCache: expected one length, or one for each of {self.batch} sequences, got "
                f"{length}"
            )
        if int(ends.min()) < 0:
            raise ValueError(f"KVCache: expected length at least 0, got {length}")
        self.lengths = self.lengths.minimum(ends)

    def row(self, index: int) -> KVCache:
        """Sequence `index` as a cache of batch 1 over the same memory; its lengths are its own.

        Give the result's length back with `set_length` after using it.
        """
        view = self._view(slice(index, index + 1))
        view.lengths = self.lengths[index : index + 1].clone()
        return view

    def set_length(self, index: int, length: int) -> None:
        """Say that sequence `index` holds `length` positions."""
        if not 0 <= length <= self.max_len:
            raise CacheCapacityError(
                f"KVCache: expected length from 0 to {self.max_len}, got {length}"
            )
        self.lengths = self.lengths.clone()
        self.lengths[index] = length

    def _view(self, rows: slice) -> KVCache:
        view = KVCache.__new__(KVCache)
        keys, values, *scales = self._memory()
        scales = [None if t is None else t[:, rows] for t in scales]
        view._set_memory(keys[:, rows], values[:, rows], *scales)
        view.max_len = self.max_len
        return view
