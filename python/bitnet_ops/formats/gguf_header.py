"""What a GGUF file says before its data: version, metadata, a record for every tensor; its rules.

Read from the file itself and never through a mapping, so that a file which is cut while it is read
gives an error. Time and memory are bounded by the bytes that are there, whatever they claim.

The table of tensor types is our own because the official package has no I2_S and cannot express its
size (a scale behind the codes, not one a block). Sources: ggml's `ggml.h` and the GGUF
specification; Microsoft's fork for 36 to 39, Prism's for 142 and 143.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard, overload

import numpy as np
from numpy.typing import NDArray

from bitnet_ops import _runtime
from bitnet_ops.formats import CodedError

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
_IK = (
    "the ternary layout of ik_llama.cpp is not implemented; take an I2_S, TQ1_0 or TQ2_0 file of "
    "the model, or convert the original checkpoint"
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

# Numbers of forks, Microsoft's and ik_llama.cpp, whose size is not told by the shape. 39 and 42 are
# shared with official types: those win where their size fits.
FORK_REJECTED = {
    37: TensorType("I8_S", 37, 1, 1, rejected="it holds activations of bitnet.cpp, never weights"),
    38: TensorType("TL1", 38, 2, 1, rejected=_TILED),
    39: TensorType("TL2", 39, 3, 1, rejected=_TILED),
    42: TensorType("TL2", 42, 3, 1, rejected=_TILED),
    134: TensorType("IQ1_BN", 134, 64, 13, rejected=_IK),
    135: TensorType("IQ2_BN", 135, 64, 16, rejected=_IK),
    335: TensorType("IQ2_BN_R4", 335, 64, 16, rejected=_IK),
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


# Arrays of strings --------------------------------------------------------------------------------

STRIDE = 64  # every 64th string's place is kept, so an index walks over 63 lengths at most
_LENGTH = struct.Struct("<Q")
NONE, ENDS, TOO_LONG, BAD_UTF8 = range(4)  # GgufStringFault of csrc/format/gguf_strings.h


class StringArray(Sequence[str]):
    """A list of str that cannot be changed; equal to any sequence of the same strings."""

    __slots__ = ("_count", "_data", "_marks")
    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __init__(self, data: bytes | bytearray, count: int, marks: array[int]) -> None:
        """`data`: `count` valid strings, each its length (u64) and UTF-8; `marks`: of the walk."""
        self._data, self._count, self._marks = data, count, marks

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return self._from(0, 0)

    def _from(self, index: int, at: int) -> Iterator[str]:
        """The strings from number `index` on, whose length stands at `at`."""
        data, unpack, width = self._data, _LENGTH.unpack_from, _LENGTH.size
        for _ in range(index, self._count):
            begin = at + width
            at = begin + unpack(data, at)[0]
            yield data[begin:at].decode()

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            chosen = range(self._count)[index]
            if chosen.step == 1:
                walk = self._from(chosen.start, self._place(chosen.start)) if chosen else iter(())
                return [text for _, text in zip(chosen, walk, strict=False)]
            return [self[i] for i in chosen]
        index = range(self._count)[index]  # negative ones, and IndexError
        return next(self._from(index, self._place(index)))

    def _place(self, index: int) -> int:
        at = self._marks[index // STRIDE]
        for _ in range(index % STRIDE):
            at += _LENGTH.size + _LENGTH.unpack_from(self._data, at)[0]
        return at

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self._count == other._count and self._data == other._data
        if not isinstance(other, list | tuple):
            return NotImplemented
        return self._count == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        """Short, since it goes into messages."""
        shown = ", ".join(repr(text[:20]) for text in self[:3])
        return f"[{shown}, ... {self._count} strings]" if self._count > 3 else f"[{shown}]"


class Walk:
    """Walks over an array piece by piece and keeps nothing of it but the places of a few strings.

    `fault` and `at` as in gguf_strings.h; `end`: bytes of the array behind the last whole string.
    """

    def __init__(self, count: int, max_bytes: int) -> None:
        self._wanted, self._max_bytes = count, max_bytes
        self.count, self.end, self.fault, self.at = 0, 0, ENDS if count else NONE, 0
        self.marks = array("Q")
        self._rest = bytearray()  # of a string that the next piece goes on with

    def add(self, piece: bytes) -> None:
        """Go on through `piece`, the next bytes of the file."""
        self._rest += piece
        found, end, self.fault, at, marks = _runtime.gguf_strings(
            self._rest, 0, self._wanted - self.count, self._max_bytes, self.count, STRIDE
        )
        self.at = self.end + at if self.fault == BAD_UTF8 else at
        self.marks.extend(self.end + mark for mark in array("Q", marks))
        self.count += found
        self.end += end
        del self._rest[:end]


def is_strings(value: Any) -> TypeGuard[list[str] | StringArray]:
    """Whether a metadata value is an array of strings."""
    return isinstance(value, list | StringArray)


# The header ---------------------------------------------------------------------------------------

HEADER_BYTES = 24  # magic, version, two counts
# An array of strings does not say how long it is: so much is read at once, for every string and at
# most.
_AHEAD_BYTES, _PIECE_BYTES = 32, 1 << 22


@dataclass(frozen=True, slots=True)
class Record:
    """What the file says of one tensor; `number` is its type's, `offset` counts from the data."""

    name: str
    shape: tuple[int, ...]  # row-major
    number: int
    offset: int


@dataclass
class Header:
    """`begin`: where the data begin, in bytes from the start of the file."""

    version: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    alignment: int = DEFAULT_ALIGNMENT
    records: list[Record] = field(default_factory=list)
    begin: int = 0


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`; GgufError for what cannot be opened, or is no file with a length."""
    remedy = "check the path and its permissions"
    try:
        # O_NONBLOCK: a named pipe must be rejected, not waited for
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        got = error.strerror if isinstance(error, OSError) else str(error)
        raise GgufError("io", f"{path}: expected a readable file, got {got}; {remedy}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        got = "a directory, pipe or device; name the .gguf file itself"
        raise GgufError("io", f"{path}: expected a regular file, got {got}")
    return os.fdopen(descriptor, "rb")


def read_header(file: BinaryIO, size: int, path: Path) -> Header:
    """The header of the open file of `size` bytes; `path` is for messages."""
    return _HeaderReader(file, size, path).read()


class _HeaderReader:
    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path, self._at = file, size, path, 0
        self._header = Header()

    def read(self) -> Header:
        header, where = self._header, "header"
        if self._size < HEADER_BYTES:
            self._fail("truncated", where, f"{HEADER_BYTES} bytes at least, got {self._size}")
        if (magic := self._take(4, where)) != MAGIC:
            self._fail("magic", where, f"the bytes {MAGIC!r}, got {magic!r}")
        header.version = self._version()
        tensors, keys = self._number("Q", where), self._number("Q", where)
        # a tensor takes 24 bytes and a key 13 at the very least
        for code, count, limit in (
            ("tensor_count", tensors, min(MAX_TENSORS, self._size // 24)),
            ("key_count", keys, min(MAX_KEYS, self._size // 13)),
        ):
            if count > limit:
                got = f"a {code.replace('_', ' ')} of at most {limit}, got {count}"
                self._fail(code, where, got)
        for index in range(keys):
            self._key(f"key {index}")
        self._alignment()
        if tensors == 0:
            self._fail("tensor_count", where, "one tensor at least, got 0",
                       "the file holds no model: a vocabulary alone?")  # fmt: skip
        header.records = [self._record(f"tensor {index}") for index in range(tensors)]
        header.begin = padded(self._at, header.alignment)
        return header

    def _fail(self, code: str, where: str, expected_got: str, remedy: str = "") -> NoReturn:
        fail(self._path, code, where, expected_got, remedy)

    def _version(self) -> int:
        version: int = self._number("I", "header")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = " (a big-endian file)" if swapped in VERSIONS else ""
            got = f"version 2 or 3, got {version}{kind}"
            self._fail("version", "header", got, "export the model with a current llama.cpp")
        return version

    # --- bytes ------------------------------------------------------------------------------------

    def _take(self, count: int, where: str) -> bytes:
        """The next `count` bytes."""
        begin, left = self._at, self._size - self._at
        if count > left:
            self._fail("truncated", where, f"{count} bytes at {begin}, got {left}")
        data = self._file.read(count)
        if len(data) < count:  # it was as long when it was opened
            self._fail("truncated", where, f"{count} bytes at {begin}, got {len(data)}")
        self._at += count
        return data

    def _number(self, letter: str, where: str) -> Any:
        data = self._take(struct.calcsize(f"<{letter}"), where)
        if letter == "?" and data[0] > 1:  # struct takes any byte for true
            self._fail("bool", where, f"0 or 1, got {data[0]}")
        return struct.unpack(f"<{letter}", data)[0]

    def _string(self, where: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self._number("Q", where)
        if length > limit:
            self._fail("string_length", where, f"a string of at most {limit} bytes, got {length}")
        begin = self._at
        try:
            return self._take(length, where).decode()
        except UnicodeDecodeError as error:
            self._fail("utf8", where, f"UTF-8, got {error.reason} at byte {begin + error.start}")

    def _name(self, where: str) -> str:
        """A key or the name of a tensor, which end up on terminals and in logs."""
        name = self._string(where, MAX_NAME_BYTES)
        if has_control(name):
            self._fail("name_control", where, f"a name without control characters, got {name!r}")
        return name

    # --- metadata ---------------------------------------------------------------------------------

    def _key(self, where: str) -> None:
        key, metadata = self._name(where), self._header.metadata
        where = f"{where} {key!r}"
        if not key or key in metadata:
            got = "an empty one" if not key else "one that stands in the file already"
            self._fail("key_name", where, f"a name of its own, got {got}")
        kind = self._number("I", where)
        if kind == ARRAY:
            metadata[key] = self._array(where)
        elif kind == STRING:
            metadata[key] = self._string(where)
        else:
            metadata[key] = self._number(self._scalar(kind, where), where)

    def _scalar(self, kind: int, where: str) -> str:
        if kind not in SCALARS:
            self._fail("value_type", where, f"a value type from 0 to 12, got {kind}")
        return SCALARS[kind][1]

    def _array(self, where: str) -> StringArray | NDArray[Any]:
        kind, count = self._number("I", where), self._number("Q", where)
        if kind == ARRAY:
            self._fail("nested_array", where, "an array of numbers or strings, got one of arrays",
                       "arrays of arrays are not supported")  # fmt: skip
        letter = "Q" if kind == STRING else self._scalar(kind, where)
        smallest = struct.calcsize(f"<{letter}")  # a string takes its length's 8 bytes at least
        limit = min(MAX_ARRAY_BYTES, self._size - self._at) // smallest
        limit = min(limit, MAX_ARRAY_STRINGS) if kind == STRING else limit
        if count > limit:
            self._fail("array_length", where, f"at most {limit} elements, got {count}")
        if kind == STRING:
            return self._strings(count, where)
        values = np.frombuffer(self._take(count * smallest, where), np.dtype(f"<{letter}"))
        if letter == "?" and count and values.view(np.uint8).max() > 1:
            self._fail("bool", where, "0 or 1, got another byte")
        return values

    def _strings(self, count: int, where: str) -> StringArray:
        """Look for the end of the last string by pieces, then read all of them."""
        begin, walk = self._at, Walk(count, MAX_STRING_BYTES)
        room = min(self._size - begin, MAX_ARRAY_BYTES)
        while walk.fault == ENDS:
            seen = self._at - begin
            ahead = max(_AHEAD_BYTES * (count - walk.count), seen)  # in proportion to what is there
            piece = self._take(min(ahead, _PIECE_BYTES, room - seen), where)
            if not piece:
                got = f"{count} strings in {room} bytes at {begin}, got {walk.count}"
                self._fail("truncated" if room < MAX_ARRAY_BYTES else "array_length", where, got)
            walk.add(piece)
        if walk.fault == TOO_LONG:
            got = f"a string of at most {MAX_STRING_BYTES} bytes, got {walk.at}"
            self._fail("string_length", where, got)
        if walk.fault == BAD_UTF8:
            self._fail("utf8", where, f"UTF-8, got another byte at byte {begin + walk.at}")
        self._at = begin
        self._file.seek(begin)
        return StringArray(self._take(walk.end, where), count, walk.marks)

    def _alignment(self) -> None:
        value = self._header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        right = type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0
        if not right:
            limit = f"general.alignment as a power of two from 8 to {MAX_ALIGNMENT}"
            self._fail("alignment", "header", f"{limit}, got {value!r:.40}")
        self._header.alignment = int(value)

    # --- tensors ----------------------------------------------------------------------------------

    def _record(self, where: str) -> Record:
        name = self._name(where)
        where = f"{where} {name!r}"
        ndim = self._number("I", where)
        if not 1 <= ndim <= MAX_DIMS:
            self._fail("ndim", where, f"1 to {MAX_DIMS} dimensions, got {ndim}")
        dims = [self._number("Q", where) for _ in range(ndim)]  # fastest first
        if not all(dims) or math.prod(dims) > MAX_ELEMENTS:
            limit = f"dimensions above 0 and {MAX_ELEMENTS} elements at most"
            self._fail("dims", where, f"{limit}, got {dims}")
        number, offset = self._number("I", where), self._number("Q", where)
        if offset % self._header.alignment:
            self._fail("offset", where, f"a multiple of {self._header.alignment}, got {offset}")
        return Record(name, tuple(reversed(dims)), number, offset)
