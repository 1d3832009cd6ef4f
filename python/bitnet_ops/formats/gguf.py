"""GGUF, the model file of llama.cpp and bitnet.cpp: a strict memory-mapped Reader; the Writer.

Headers, metadata and the place and type of every tensor are checked when a file is opened, against
our own table of sizes; tensors are handed out as raw bytes (gguf_layouts.py knows what they mean).
A damaged file gives one GgufError, never a crash or memory out of proportion to the file. It must
not know models, nor what a metadata key is for beyond alignment and architecture.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from bitnet_ops.formats._gguf_rules import (
    ARRAY,
    BY_NUMBER,
    DEFAULT_ALIGNMENT,
    FORK_REFUSED,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_ARRAY_BYTES,
    MAX_DIMS,
    MAX_ELEMENTS,
    MAX_KEYS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    SCALARS,
    STRING,
    VERSIONS,
    GgufError,
    TensorType,
    padded,
)
from bitnet_ops.formats._gguf_writer import Writer

__all__ = ["GgufError", "Reader", "TensorInfo", "TensorType", "Writer", "is_gguf"]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: `shape` in row-major order ([N, K] of a matrix), place and type."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the beginning of the file
    nbytes: int


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a file that says it is a GGUF, by its first bytes or else by its name."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC or path.suffix == ".gguf"


class Reader:
    """A GGUF file, checked and mapped.

    `metadata` maps keys to int, float, bool, str, a list of str, or a numpy array of numbers;
    `tensors` maps names to TensorInfo in the order of the file. A context manager. Raises
    GgufError for a file that is damaged, cut off, or of a kind that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 24:
                    self._fail("truncated", "header", f"24 bytes at least, got {self.size}")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise GgufError("io", f"{self.path}: expected a readable file, got {error}") from None
        try:
            self._read()
        except BaseException:
            self._map.close()
            raise

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name`, zero-copy; what is written to them never reaches the file."""
        info = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)

    def release(self, name: str) -> None:
        """Give back the memory behind the data of `name`, which stays readable.

        What was written to arrays of it is lost.
        """
        info = self.tensors[name]
        if hasattr(mmap, "MADV_DONTNEED"):
            begin = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, info.offset + info.nbytes - begin)

    @property
    def architecture(self) -> str:
        """general.architecture, "" where there is none."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    def close(self) -> None:
        """Unmap the file; done when the last array of `data` is gone, if some are still in use."""
        try:
            self._map.close()
        except BufferError:
            del self._map  # numpy holds it, and drops it with the last array

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- header -----------------------------------------------------------------------------------

    def _fail(self, code: str, where: str, expected_got: str, remedy: str = "") -> NoReturn:
        remedy = remedy or "the file is damaged: download or export it again"
        raise GgufError(code, f"{self.path}: {where}: expected {expected_got}; {remedy}")

    def _read(self) -> None:
        self._at = 4
        if self._map[:4] != MAGIC:
            self._fail("magic", "header", f"the bytes {MAGIC!r}, got {self._map[:4]!r}")
        self.version = self._number("I", "header")
        if self.version not in VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            kind = " (a big-endian file)" if swapped in VERSIONS else ""
            got = f"version 2 or 3, got {self.version}{kind}"
            self._fail("version", "header", got, "export the model with a current llama.cpp")
        tensors, keys = self._number("Q", "header"), self._number("Q", "header")
        # a tensor takes 24 bytes and a key 13 at the very least
        for code, count, limit in (
            ("tensor_count", tensors, min(MAX_TENSORS, self.size // 24)),
            ("key_count", keys, min(MAX_KEYS, self.size // 13)),
        ):
            if count > limit:
                self._fail(code, "header", f"a {code.replace('_', ' ')} of at most {limit}, "
                           f"got {count}")  # fmt: skip
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            self._key()
        self._alignment()
        self._tensors(tensors)

    def _take(self, count: int, where: str) -> int:
        """Step over `count` bytes; returns where they begin."""
        begin = self._at
        if count > self.size - begin:
            self._fail("truncated", where, f"{count} bytes at {begin}, got {self.size - begin}")
        self._at = begin + count
        return begin

    def _number(self, letter: str, where: str) -> Any:
        begin = self._take(struct.calcsize(f"<{letter}"), where)
        if letter == "?" and self._map[begin] > 1:  # struct takes any byte for true
            self._fail("bool", where, f"0 or 1, got {self._map[begin]}")
        return struct.unpack_from(f"<{letter}", self._map, begin)[0]

    def _string(self, where: str, limit: int = MAX_ARRAY_BYTES) -> str:
        length = self._number("Q", where)
        if length > limit:
            self._fail("string_length", where, f"a string of at most {limit} bytes, got {length}")
        begin = self._take(length, where)
        try:
            return self._map[begin : self._at].decode()
        except UnicodeDecodeError as error:
            self._fail("utf8", where, f"UTF-8, got {error.reason} at byte {begin + error.start}")

    # --- metadata ---------------------------------------------------------------------------------

    def _key(self) -> None:
        where = f"key {len(self.metadata)}"
        key = self._string(where, MAX_NAME_BYTES)
        where = f"{where} {key!r}"
        if not key or key in self.metadata:
            got = "an empty one" if not key else "one that stands in the file already"
            self._fail("key_name", where, f"a name of its own, got {got}")
        kind = self._number("I", where)
        if kind == ARRAY:
            self.metadata[key] = self._array(where)
        elif kind == STRING:
            self.metadata[key] = self._string(where)
        else:
            self.metadata[key] = self._number(self._scalar(kind, where), where)

    def _scalar(self, kind: int, where: str) -> str:
        if kind not in SCALARS:
            self._fail("value_type", where, f"a value type from 0 to 12, got {kind}")
        return SCALARS[kind][1]

    def _array(self, where: str) -> list[str] | NDArray[Any]:
        kind, count = self._number("I", where), self._number("Q", where)
        if kind == ARRAY:
            self._fail("nested_array", where, "an array of numbers or strings, got one of arrays",
                       "arrays of arrays are not supported")  # fmt: skip
        letter = "Q" if kind == STRING else self._scalar(kind, where)
        smallest = struct.calcsize(f"<{letter}")  # a string takes its length's 8 bytes at least
        limit = min(MAX_ARRAY_BYTES, self.size - self._at) // smallest
        if count > limit:
            self._fail("array_length", where, f"at most {limit} elements, got {count}")
        if kind == STRING:
            return [self._string(where) for _ in range(count)]
        begin = self._take(count * smallest, where)
        values = np.frombuffer(self._map, np.dtype(f"<{letter}"), count, begin).copy()
        if letter == "?" and count and values.view(np.uint8).max() > 1:
            self._fail("bool", where, "0 or 1, got another byte")
        return values

    def _alignment(self) -> None:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        right = type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0
        if not right:
            limit = f"general.alignment as a power of two from 8 to {MAX_ALIGNMENT}"
            self._fail("alignment", "header", f"{limit}, got {str(value)[:40]}")
        self.alignment = int(value)

    # --- tensors ----------------------------------------------------------------------------------

    def _tensors(self, count: int) -> None:
        records = [self._record(i) for i in range(count)]
        begin = padded(self._at, self.alignment)
        names = [name for name, *_ in records]
        if len(set(names)) != count:
            twice = next(name for name in names if names.count(name) > 1)
            self._fail("tensor_name", "tensors", f"names of their own, got {twice!r} twice")
        ends = {}  # offset -> where the next tensor, or the file, begins
        offsets = sorted({offset for *_, offset in records})
        if len(offsets) != count:
            self._fail("overlap", "tensors", "an offset each, got one that two tensors share")
        for offset, end in zip(offsets, [*offsets[1:], self.size - begin], strict=True):
            ends[offset] = end
        self.tensors: dict[str, TensorInfo] = {}
        rooms = [(shape, number, ends[offset] - offset) for _, shape, number, offset in records]
        for (name, shape, number, offset), (*_, room) in zip(records, rooms, strict=True):
            last = offset == offsets[-1]
            type_, nbytes = self._type(name, shape, number, room, last, rooms)
            self.tensors[name] = TensorInfo(name, type_, shape, begin + offset, nbytes)

    def _record(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        where = f"tensor {index}"
        name = self._string(where, MAX_NAME_BYTES)
        where = f"{where} {name!r}"
        ndim = self._number("I", where)
        if not 1 <= ndim <= MAX_DIMS:
            self._fail("ndim", where, f"1 to {MAX_DIMS} dimensions, got {ndim}")
        dims = [self._number("Q", where) for _ in range(ndim)]  # fastest first
        if not all(dims) or math.prod(dims) > MAX_ELEMENTS:
            limit = f"dimensions above 0 and {MAX_ELEMENTS} elements at most"
            self._fail("dims", where, f"{limit}, got {dims}")
        number, offset = self._number("I", where), self._number("Q", where)
        if offset % self.alignment:
            self._fail("offset", where, f"a multiple of {self.alignment}, got {offset}")
        return name, tuple(reversed(dims)), number, offset

    def _type(
        self,
        name: str,
        shape: tuple[int, ...],
        number: int,
        room: int,
        last: bool,
        rooms: list[tuple[tuple[int, ...], int, int]],
    ) -> tuple[TensorType, int]:
        """The type that `number` means here, and its bytes; numbers collide, sizes decide."""
        where = f"tensor {name!r}"
        official = BY_NUMBER.get(number, ())
        sizes = [(t, size) for t in official if (size := t.nbytes(shape)) is not None]
        fitting = [(t, size) for t, size in sizes if self._fits(size, room, last)]
        if len(fitting) > 1:  # so small that padding hides the difference: ask the other tensors
            others = [(s, r) for s, n, r in rooms if n == number]
            fitting = [(t, size) for t, size in fitting
                       if all(self._fits(t.nbytes(s), r, True) for s, r in others)]  # fmt: skip
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            names = " or ".join(t.name for t, _ in fitting)
            self._fail("ambiguous", where, f"a size that tells {names} apart, got {room} bytes",
                       "export the model again as TQ2_0")  # fmt: skip
        fork = FORK_REFUSED.get(number)
        if fork is not None and (not official or "bitnet" in self.architecture):
            self._fail("tiled", where, f"a type that can be read, got {fork.name}: {fork.refused}",
                       "see docs/gguf.md")  # fmt: skip
        if not official:
            known = "I2_S, TQ1_0, TQ2_0, Q2_0, F16 ..."
            self._fail("type", where, f"a known tensor type ({known}), got number {number}",
                       "the file is damaged, or newer than this package")  # fmt: skip
        if not sizes:
            blocks = f"rows of a multiple of {official[0].block} for {official[0].name}"
            self._fail("row_length", where, f"{blocks}, got shape {list(shape)}")
        if last and len(sizes) == 1 and sizes[0][1] <= room:
            return sizes[0]  # something follows the last tensor; it is nothing of ours
        expected = " or ".join(f"{size} bytes ({t.name})" for t, size in sizes)
        self._fail("size", where, f"{expected} for {list(shape)}, got room for {max(room, 0)}")

    def _fits(self, size: int | None, room: int, last: bool) -> bool:
        """Whether a tensor of `size` bytes fills its room; the last one may come unpadded."""
        return size is not None and (padded(size, self.alignment) == room or last and size == room)
