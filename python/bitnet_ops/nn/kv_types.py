"""The types of KV caches by torch's dtypes, their bytes, and the error of a cache without room."""

from __future__ import annotations

from typing import Protocol

import torch

from bitnet_ops.nn.storage import DEFAULT_KV_TYPE, KV_TYPES

TYPE_OF = {getattr(torch, name): row for name, row in KV_TYPES.items()}  # a dtype's row
KV_DTYPES = {row.name: dtype for dtype, row in TYPE_OF.items()}
DEFAULT_KV_DTYPE = KV_DTYPES[DEFAULT_KV_TYPE]
DEFAULT_BLOCK_SIZE = 64  # positions of a block of a paged cache


class KVSizes(Protocol):
    """What a cache needs of a model's config."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def bytes_of_block(sizes: KVSizes, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block of such a pool: keys and values of all layers, with their scales."""
    rows = sizes.num_hidden_layers * sizes.num_key_value_heads * block_size
    return 2 * rows * TYPE_OF[dtype].row_bytes(sizes.head_dim)


def check_kv_dtype(dtype: object, who: str) -> None:
    """Raise ValueError unless `dtype` is one that a cache can have."""
    if dtype not in TYPE_OF:
        *most, last = KV_DTYPES
        remedy = f"; pass torch.{dtype}" if isinstance(dtype, str) else ""
        raise ValueError(f"{who} {', '.join(most)} or {last}, got {dtype!r}{remedy}")


class CacheCapacityError(ValueError):
    """More positions were asked for than the cache, or the model's context, has."""
