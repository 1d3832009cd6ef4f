"""In what weights, heads and KV caches may lie in memory: one table each, a row for each choice.

The command line's choices, the defaults and the tests come from these tables. It must not import
torch, which would slow every command down.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from bitnet_ops import _runtime
from bitnet_ops.arguments import shown

# Ternary weights ----------------------------------------------------------------------------------

LAYOUTS = _runtime.layouts()
# "canonical" is the layout of files; the others are those of the kernels that run (FORMAT.md), made
# from it when a model is loaded.
FORMATS = tuple(LAYOUTS)
CPU_SPECIFIC = tuple(name for name, layout in LAYOUTS.items() if layout["cpu_specific"])
WEIGHT_FORMATS = ("auto", *FORMATS)  # what a user may ask for
USUAL_FORMAT = "2bit"  # what "auto" means where loading/weight_choice.py has nothing to say
BLOCK = LAYOUTS["canonical"]["k_step"]  # weights in a block, which a group of scales covers too


def check_weight_format(weight_format: str) -> None:
    """Raise ValueError unless `weight_format` is one of WEIGHT_FORMATS."""
    _check("weight_format", weight_format, WEIGHT_FORMATS)


# Activations --------------------------------------------------------------------------------------

GROUP_SIZES = (BLOCK, BLOCK // 2)  # weights along K that may share a scale
# What ternary weights with scales of groups multiply by: int8 with one scale a token; int8, or 16
# bits, with a scale for every group of features. Weights without groups take "int8".
ACTIVATION_FORMATS = ("int8", "int8_group", "int16_group")
# What "auto" means with groups: docs/reference/model-files.md has the figures.
GROUP_ACTIVATION_FORMAT = "int8_group"


def check_activation_format(activation_format: str) -> None:
    """Raise ValueError unless `activation_format` is "auto" or one of ACTIVATION_FORMATS."""
    _check("activation_format", activation_format, ("auto", *ACTIVATION_FORMATS))


# Output heads -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadFormat:
    """A format of output heads and tied embeddings.

    `dtype`: torch's name of what a dense head is cast to; None: as the tensor is.
    `quantized`: whether `ops.quantize_head` makes it.
    """

    name: str
    dtype: str | None = None
    quantized: bool = False


_HEADS = (
    HeadFormat("int8", quantized=True),
    HeadFormat("int4", quantized=True),
    HeadFormat("bf16", "bfloat16"),
    HeadFormat("float32", "float32"),
    HeadFormat("stored"),
)
HEAD_FORMATS = {row.name: row for row in _HEADS}
DEFAULT_HEAD_FORMAT = "int8"
# Names of earlier builds, and the formats that they mean now.
OLD_HEAD_FORMATS = {"int8_screened": "int8"}


def current_head_format(name: str) -> str:
    """A name in HEAD_FORMATS for one in OLD_HEAD_FORMATS; any other as it is."""
    return OLD_HEAD_FORMATS.get(name, name)


def find_head_format(head_format: str) -> HeadFormat:
    """The format of a name, old or new. Raises ValueError for another."""
    check_head_format(head_format)
    return HEAD_FORMATS[current_head_format(head_format)]


def check_head_format(head_format: str) -> None:
    """Raise ValueError unless `head_format` is one of HEAD_FORMATS or OLD_HEAD_FORMATS."""
    if not isinstance(head_format, str) or head_format not in OLD_HEAD_FORMATS:
        _check("head_format", head_format, HEAD_FORMATS)


# KV caches ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KVType:
    """A type of KV caches, by torch's name of the dtype.

    itemsize: bytes of a number. has_scales: whether every row of a key or value has a float32
    scale beside it. error: the most that writing a row changes a number of it, by the row's absmax;
    or `floor`, if that is more: half the distance of the smallest numbers. largest: of a row's
    absmax; what lies beyond is infinity in float16 and becomes `largest` in the 8-bit floats.
    """

    name: str
    itemsize: int
    has_scales: bool = False
    error: float = 0.0
    floor: float = 0.0
    largest: float = math.inf

    def row_bytes(self, head_dim: int) -> int:
        """Of one head's key, or value, of one position."""
        return head_dim * self.itemsize + (4 if self.has_scales else 0)


_KV = (
    KVType("float32", 4),
    KVType("bfloat16", 2, error=2.0**-8, floor=2.0**-55),
    KVType("float16", 2, error=2.0**-11, floor=2.0**-25, largest=65504.0),
    KVType("float8_e4m3fn", 1, error=2.0**-4, floor=2.0**-10, largest=448.0),
    KVType("float8_e5m2", 1, error=2.0**-3, floor=2.0**-17, largest=57344.0),
    KVType("int8", 1, has_scales=True, error=0.5001 / 127),
)
KV_TYPES = {row.name: row for row in _KV}
# What `load` gives a model: half the bytes of float32, faster the longer the context is, and on the
# demo model's text the same loss to 0.0001 nats (benchmarks/compare_kv.py). int8 is smaller and
# faster still and measures alike there, but its error grows with the outliers of a row, and those
# of larger models have not been measured: it waits to be asked for.
DEFAULT_KV_TYPE = "bfloat16"


def _check(what: str, value: object, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{what}: expected one of {', '.join(known)}, got {shown(value)}")
