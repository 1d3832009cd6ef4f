"""The types and the sizes of KV caches, in torch's dtypes and in words, without a model."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from bitnet_ops.arguments import shown
from bitnet_ops.blocks.block import PAGE, Line, Value
from bitnet_ops.blocks.listing import Kept, kept_by, listing
from bitnet_ops.config import ModelConfig
from bitnet_ops.errors import BitNetError
from bitnet_ops.nn.storage import DEFAULT_KV_TYPE, KV_TYPES

TYPE_OF = {getattr(torch, name): row for name, row in KV_TYPES.items()}  # a dtype's row
KV_DTYPES = {row.name: dtype for dtype, row in TYPE_OF.items()}
DEFAULT_KV_DTYPE = KV_DTYPES[DEFAULT_KV_TYPE]
DEFAULT_BLOCK_SIZE = 64  # positions of a block of a paged cache


def kept_of(config: ModelConfig | KVCacheConfig) -> Mapping[str, Kept]:
    """What a model of that config keeps between steps, by name."""
    return config.kept if isinstance(config, KVCacheConfig) else listing(config).kept


def memory_of_block(
    kept: Mapping[str, Kept], block_size: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the memory of a block, by name: all that is kept for its positions.

    [layers, heads, positions, features] of `dtype`, then the scales of such rows without features,
    then what is kept for pages. Raises ValueError for a block of no whole pages.
    """
    rows, scales, pages = {}, {}, {}
    for name, (buffer, layers) in kept.items():
        if buffer.per == "sequence":
            continue
        heads, features = buffer.shape
        if buffer.per == "position":
            rows[name] = (layers, heads, block_size, features), dtype
            if TYPE_OF[dtype].has_scales:
                scales[f"{name}_scale"] = (layers, heads, block_size), torch.float32
            continue
        if block_size % PAGE:
            raise ValueError(
                f"KVPool: expected block_size a multiple of {PAGE} for attention that chooses "
                f"pages, got {block_size}"
            )
        shape = layers, heads, block_size // PAGE, features
        pages[name] = shape, getattr(torch, str(buffer.dtype))
    return {**rows, **scales, **pages}


def bytes_of_block(config: ModelConfig | KVCacheConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block of a pool of that config."""
    memory = memory_of_block(kept_of(config), block_size, dtype).values()
    return sum(math.prod(shape) * of.itemsize for shape, of in memory)


def kv_dtype_of(dtype: torch.dtype | str, who: str) -> torch.dtype:
    """The dtype of a cache, which may be given by its name; raise ValueError for another."""
    if isinstance(dtype, str):
        dtype = KV_DTYPES.get(dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype) or dtype not in TYPE_OF:
        *most, last = KV_DTYPES
        raise ValueError(f"{who} {', '.join(most)} or {last}, got {shown(dtype)}")
    return dtype


class CacheCapacityError(BitNetError, ValueError):
    """More positions were asked for than the cache, or the model's context, has."""


class KVCacheDtype(enum.Enum):
    """Types of keys and values; FP8 is OCP's E4M3FN and E5M2.

    INT8 has a float32 scale, absmax / 127, for every position of every head.
    """

    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"
    FP8_E4M3 = "float8_e4m3fn"
    FP8_E5M2 = "float8_e5m2"
    INT8 = "int8"


@dataclass(frozen=True)
class KVCacheConfig:
    """Sizes of a cache.

    Args:
        max_seq_len: positions of a sequence, at most.
        num_layers, num_kv_heads, head_dim: of the model.
        dtype: a KVCacheDtype, or its name or value ("BF16", "bfloat16").
        batch: number of sequences.
        block_size: positions of a block, the piece in which a sequence gets memory; 16 to 128 are
            usual.
        model: the config of the model, if all is to be kept that its blocks keep.
        key_bounds: whether there are bounds of keys beside them, for attention that chooses pages.
        blocks: how many blocks the cache and its forks have together; None: as many as each
            sequence of each of them needs at its longest.
    Raises ValueError for a size below 1, or for an unknown dtype.
    """

    max_seq_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVCacheDtype = KVCacheDtype.BF16
    batch: int = 1
    block_size: int = DEFAULT_BLOCK_SIZE
    blocks: int | None = None
    model: ModelConfig | None = None
    key_bounds: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in ("dtype", "model", "key_bounds") or (name == "blocks" and value is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"KVCacheConfig: expected {name} an integer above 0, got {value!r}"
                )
        object.__setattr__(self, "dtype", _dtype(self.dtype))

    @property
    def blocks_per_sequence(self) -> int:
        """Of the longest."""
        return -(-self.max_seq_len // self.block_size)

    @property
    def own_blocks(self) -> int:
        """How many the cache has before it is forked."""
        return self.batch * self.blocks_per_sequence if self.blocks is None else self.blocks

    @cached_property
    def kept(self) -> Mapping[str, Kept]:
        """What is kept between steps, by name."""
        if self.model is not None:
            return listing(self.model).kept
        keys: dict[str, Value] = {"kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        if self.key_bounds:
            keys["top_k"] = 1
        return kept_by([Line("attention", keys)] * self.num_layers)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return KV_DTYPES[self.dtype.value]

    @property
    def memory_mb(self) -> float:
        """MiB of all keys, values and scales, once every position of every block is written."""
        block = bytes_of_block(self, self.block_size, self.torch_dtype)
        return self.own_blocks * block / 2**20


def _dtype(given: object) -> KVCacheDtype:
    if isinstance(given, KVCacheDtype):
        return given
    name = str(given).removeprefix("torch.")
    for known in KVCacheDtype:
        if name in (known.name, known.value):
            return known
    names = ", ".join(f"KVCacheDtype.{known.name}" for known in KVCacheDtype)
    raise ValueError(f"KVCacheConfig: expected dtype one of {names}, got {given!r}")
