"""What the reader and the writer of GGUF share: the tensor types with their sizes, limits, errors.

The table is our own because the official package has no I2_S and cannot express its size (a scale
behind the codes, not one a block). Sources: ggml's `ggml.h` and the GGUF specification; Microsoft's
fork for 36 to 39, Prism's for 142 and 143.
"""

from __future__ import annotations

import os
import unicodedata
from dataclasses import dataclass
from typing import NoReturn

from bitnet_ops.formats.coded_error import CodedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 3 differs from 2 by allowing big-endian files, which are rejected here
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
# Limits bound what is made of a file before it is known to be a model; real ones stay far below.
MAX_TENSORS = 1 << 16  # the largest mixtures of experts have some thousand
MAX_KEYS = 1 << 16  # models have some dozen
MAX_NAME_BYTES = 1024
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 40
MAX_STRING_BYTES = 1 << 24  # chat templates take some 10 kB
MAX_ARRAY_STRINGS = (
    1 << 22
)  # the largest vocabularies have 262 thousand tokens, 600 thousand merges
MAX_ARRAY_BYTES = 1 << 28  # of one metadata value; the largest vocabularies take a few MB


class GgufError(CodedError):
    """A file that is no GGUF this package reads, or an argument the writer rejects.

    `code` is the rule's short name, for tests and scripts; the message is one line for people.
    """


def fail(
    path: str | os.PathLike[str], code: str, where: str, expected_got: str, remedy: str = ""
) -> NoReturn:
    """Raise GgufError(`<path>: <where>: expected <expected_got>; <remedy> [<code>]`)."""
    remedy = remedy or "the file is damaged: download or export it again"
    raise GgufError(code, f"{path}: {where}: expected {expected_got}; {remedy}")


def has_control(name: str) -> bool:
    """Whether a name has control characters, U+0000-001F or U+007F-009F."""
    if name.isprintable():  # most are, and this is quick
        return False
    return any(unicodedata.category(c) == "Cc" for c in name)


@dataclass(frozen=True)
class TensorType:
    """A way to store a tensor: `block` elements of a row in `block_bytes`, `tail` bytes at the end.

    `number` is what the file says; several types share one, and sizes tell them apart. `rejected`
    says why a type cannot be read at all.
    """

    name: str
    number: int
    block: int
    block_bytes: int
    tail: int = 0
    rejected: str = ""

    def nbytes(self, shape: tuple[int, ...]) -> int | None:
        """The bytes of a tensor [.., K], or None where K is no whole number of blocks."""
        count = 1
        for dim in shape:
            count *= dim
        # I2_S is one stream over all rows; of the others every row consists of whole blocks
        if (count if self.name == "I2_S" else shape[-1]) % self.block:
            return None
        return count // self.block * self.block_bytes + self.tail


_TILED = (
    "its bytes are tiled by a kernel_config.ini that is not in the file; convert the original "
    "checkpoint, or an I2_S or TQ2_0 file of the model"
)
_SHERRY = (
    "its groups of four weights with one zero (Sherry, Hy-MT) are not implemented; use another file"
)
# Files of OxiBonsai say so in one of these keys: their blocks of number 42 are as large as Prism's
# earlier ones, but the scale stands behind the codes, whose order is not known here.
OXIBONSAI_KEYS = ("oxibonsai.quant_format", "general.quantization_version")
_TYPES = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2),
    TensorType("Q4_0", 2, 32, 18),
    TensorType("Q4_1", 3, 32, 20),
    TensorType("Q5_0", 6, 32, 22),
    TensorType("Q5_1", 7, 32, 24),
    TensorType("Q8_0", 8, 32, 34),
    TensorType("Q8_1", 9, 32, 40),
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("Q4_K", 12, 256, 144),
    TensorType("Q5_K", 13, 256, 176),
    TensorType("Q6_K", 14, 256, 210),
    TensorType("Q8_K", 15, 256, 292),
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("I8", 24, 1, 1),
    TensorType("I16", 25, 1, 2),
    TensorType("I32", 26, 1, 4),
    TensorType("I64", 27, 1, 8),
    TensorType("F64", 28, 1, 8),
    TensorType("IQ1_M", 29, 256, 56),
    TensorType("BF16", 30, 1, 2),
    TensorType("TQ1_0", 34, 256, 54),
    TensorType("TQ2_0", 35, 256, 66),
    TensorType("I2_S", 36, 4, 1, tail=32),
    TensorType("MXFP4", 39, 32, 17),
    TensorType("NVFP4", 40, 64, 36),
    TensorType("Q1_0", 41, 128, 18),
    TensorType("Q2_0", 42, 64, 18),
    TensorType("Q2_0_128", 42, 128, 34),  # Prism's files before the type was official
    TensorType("STQ1_0", 42, 256, 42, rejected=_SHERRY),
    TensorType("STQ1_0", 43, 256, 42, rejected=_SHERRY),
    TensorType("PQ2_0", 142, 128, 34),
    TensorType("PTQ1_0", 143, 128, 28),
)
TYPES = {t.name: t for t in _TYPES}
Q2_BLOCKS = {64: "Q2_0", 128: "Q2_0_128"}  # what number 42 is taken for on the caller's word
BY_NUMBER: dict[int, tuple[TensorType, ...]] = {}
for _type in _TYPES:
    BY_NUMBER[_type.number] = (*BY_NUMBER.get(_type.number, ()), _type)

# Numbers of Microsoft's fork whose size is not told by the shape. 39 and 42 are shared with
# official types: those win where their size fits.
FORK_REJECTED = {
    37: TensorType("I8_S", 37, 1, 1, rejected="it holds activations of bitnet.cpp, never weights"),
    38: TensorType("TL1", 38, 2, 1, rejected=_TILED),
    39: TensorType("TL2", 39, 3, 1, rejected=_TILED),
    42: TensorType("TL2", 42, 3, 1, rejected=_TILED),
}

# Metadata values: number -> (name, struct letter); 8 and 9 are strings and arrays.
SCALARS = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
STRING, ARRAY = 8, 9


def padded(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment
