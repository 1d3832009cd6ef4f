"""What a GGUF file says before its data: version, metadata, a record for every tensor.

Read from the file itself and never through a mapping, so that a file which is cut while it is read
gives an error. Time and memory are bounded by the bytes that are there, whatever they claim.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from bitnet_ops.formats._gguf_rules import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_ARRAY_BYTES,
    MAX_ARRAY_STRINGS,
    MAX_DIMS,
    MAX_ELEMENTS,
    MAX_KEYS,
    MAX_NAME_BYTES,
    MAX_STRING_BYTES,
    MAX_TENSORS,
    SCALARS,
    STRING,
    VERSIONS,
    GgufError,
    fail,
    has_control,
    padded,
)
from bitnet_ops.formats._gguf_strings import BAD_UTF8, ENDS, TOO_LONG, StringArray, Walk

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
