"""KVCacheConfig and KVCacheDtype: a KV cache's sizes in words, without a model."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bitnet_ops.nn.storage import KV_TYPES


class KVCacheDtype(enum.Enum):
    """Types of keys and values; FP8 is OCP's E4M3FN and E5M2, INT8 has a scale for every row."""

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
    Raises ValueError for a size below 1, or for an unknown dtype.
    """

    max_seq_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVCacheDtype = KVCacheDtype.BF16
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "num_layers", "num_kv_heads", "head_dim", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"KVCacheConfig: expected {name} an integer above 0, got {value!r}"
                )
        object.__setattr__(self, "dtype", _dtype(self.dtype))

    @property
    def memory_mb(self) -> float:
        """MiB of all keys, values and scales, once every position is written."""
        row = KV_TYPES[self.dtype.value].row_bytes(self.head_dim)
        rows = self.num_layers * self.batch * self.num_kv_heads * self.max_seq_len
        return 2 * rows * row / 2**20


def _dtype(given: object) -> KVCacheDtype:
    if isinstance(given, KVCacheDtype):
        return given
    name = str(given).removeprefix("torch.")
    for known in KVCacheDtype:
        if name in (known.name, known.value):
            return known
    names = ", ".join(f"KVCacheDtype.{known.name}" for known in KVCacheDtype)
    raise ValueError(f"KVCacheConfig: expected dtype one of {names}, got {given!r}")
