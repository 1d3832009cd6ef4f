"""GGUF, the model file of llama.cpp and bitnet.cpp: a strict memory-mapped Reader; the Writer.

Headers, metadata and the place and type of every tensor are checked when a file is opened, against
our own table of sizes; tensors are handed out as raw bytes (gguf_layouts.py knows what they mean).
A damaged file gives one GgufError, never a crash, and costs time and memory in proportion to its
bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from bitnet_ops.formats.gguf_header import (
    BY_NUMBER,
    FORK_REJECTED,
    MAGIC,
    MAX_TENSORS,
    OXIBONSAI_KEYS,
    Q2_BLOCKS,
    TYPES,
    GgufError,
    Record,
    StringArray,
    TensorType,
    fail,
    is_strings,
    open_regular,
    padded,
    read_header,
)
from bitnet_ops.formats.gguf_write import Writer
from bitnet_ops.untrusted import LFS_POINTER, is_lfs_pointer

__all__ = [
    "MAX_TENSORS",
    "Q2_BLOCKS",
    "GgufError",
    "Reader",
    "StringArray",
    "TensorInfo",
    "TensorType",
    "Writer",
    "is_gguf",
    "is_strings",
]


Q2_NUMBER = TYPES["Q2_0"].number
_Q2_REMEDY = "say which with --q2-block 64 (Q2_0) or --q2-block 128 (Prism's earlier files)"


@dataclass(frozen=True, slots=True)
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
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC or path.suffix == ".gguf"
    except OSError:  # the Reader says what is wrong with it
        return path.suffix == ".gguf"


_MMPROJ = b"general.type" + struct.pack("<IQ", 8, 6) + b"mmproj"  # a string of 6 bytes
_FIRST_KEYS = 1 << 16  # bytes; writers put general.* first


def is_mmproj(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a GGUF file that says it holds a tower for images, by its first keys."""
    try:
        with Path(path).open("rb") as file:
            begin = file.read(_FIRST_KEYS)
    except OSError:
        return False
    return begin.startswith(MAGIC) and _MMPROJ in begin


class Reader:
    """A GGUF file, checked and mapped.

    `metadata` maps keys to int, float, bool, str, a StringArray (which behaves as a list of str),
    or a numpy array of numbers; `tensors` maps names to TensorInfo in the order of the file. A
    context manager. `q2_block`: 64 or 128, the weights of a block of type number 42 where the file
    does not say; None: its sizes and keys decide. Raises GgufError for a file that is damaged, cut
    off, or of a kind that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], q2_block: int | None = None) -> None:
        self.path, self.q2_block = Path(path), q2_block
        if is_lfs_pointer(self.path):
            raise GgufError("magic", f"{self.path}: expected a GGUF file, got {LFS_POINTER}")
        try:
            with open_regular(self.path) as file:
                self.size = os.fstat(file.fileno()).st_size
                header = read_header(file, self.size, self.path)
                self.version, self.metadata = header.version, header.metadata
                self.alignment = header.alignment
                self.tensors = self._placed(header.records, header.begin)
                self._map = self._mapped(file)
        except OSError as error:
            got = f"got {error.strerror}; check the file and the memory limits (ulimit -v)"
            raise GgufError("io", f"{self.path}: expected a readable file, {got}") from None

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name`, zero-copy; what is written to them never reaches the file.

        Raises GgufError("truncated") if the file was shortened since it was opened. Shortening it
        later still, while the array is in use, ends the process (SIGBUS), as with any mapped file.
        """
        info = self.tensors[name]
        self._check_length(self._map.size())  # of the file, not of the mapping
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

    # --- tensors ----------------------------------------------------------------------------------

    def _fail(self, code: str, where: str, expected_got: str, remedy: str = "") -> NoReturn:
        fail(self.path, code, where, expected_got, remedy)

    def _mapped(self, file: BinaryIO) -> mmap.mmap:
        try:
            return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except ValueError:  # larger than the file, which has become shorter
            self._check_length(os.fstat(file.fileno()).st_size)
            raise

    def _check_length(self, now: int) -> None:
        if now < self.size:
            got = f"the {self.size} bytes that the file had when it was opened, got {now}"
            self._fail("truncated", "file", got, "it was shortened while in use: write a new file "
                       "and rename it instead")  # fmt: skip

    def _placed(self, records: list[Record], begin: int) -> dict[str, TensorInfo]:
        """The tensors, whose data fill the file from `begin` on."""
        by_offset: dict[int, Record] = {}
        names: set[str] = set()
        for record in records:
            if record.name in names:
                got = f"names of their own, got {record.name!r} twice"
                self._fail("tensor_name", "tensors", got)
            if record.offset in by_offset:
                got = "an offset each, got one that two tensors share"
                self._fail("overlap", f"tensor {record.name!r}", got)
            names.add(record.name)
            by_offset[record.offset] = record
        offsets = sorted(by_offset)
        ends = dict(zip(offsets, [*offsets[1:], self.size - begin], strict=True))
        rooms = _Rooms(records, ends, self.alignment)
        tensors = {}
        for record in records:
            room, last = ends[record.offset] - record.offset, record.offset == offsets[-1]
            kind, nbytes = self._type(record, room, last, rooms)
            place = begin + record.offset
            tensors[record.name] = TensorInfo(record.name, kind, record.shape, place, nbytes)
        return tensors

    def _type(self, record: Record, room: int, last: bool, rooms: _Rooms) -> tuple[TensorType, int]:
        """The type that the number means here, and its bytes; numbers collide, sizes decide."""
        where, shape, number = f"tensor {record.name!r}", record.shape, record.number
        official = BY_NUMBER.get(number, ())
        if number == Q2_NUMBER and self.q2_block is not None:
            official = (TYPES[Q2_BLOCKS[self.q2_block]],)
        sizes = [(t, size) for t in official if (size := t.nbytes(shape)) is not None]
        fitting = [(t, size) for t, size in sizes if rooms.fits(size, room, last)]
        if len(fitting) > 1:  # so small that padding hides the difference: ask the other tensors
            agreed = rooms.agreed(number)
            fitting = [(t, size) for t, size in fitting if t in agreed]
        if len(fitting) == 1:
            self._check_readable(where, fitting[0][0])
            return fitting[0]
        if fitting:
            names = " or ".join(t.name for t, _ in fitting)
            remedy = _Q2_REMEDY if number == Q2_NUMBER else "export the model again as TQ2_0"
            got = f"a size that tells {names} apart, got {room} bytes"
            self._fail("ambiguous", where, got, remedy)
        fork = FORK_REJECTED.get(number)
        if fork is not None and (not official or "bitnet" in self.architecture):
            self._fail("tiled", where, f"a type that can be read, got {fork.name}: {fork.rejected}",
                       "see docs/guide/gguf.md")  # fmt: skip
        if not official:
            known = "I2_S, TQ1_0, TQ2_0, Q2_0, F16 ..."
            self._fail("type", where, f"a known tensor type ({known}), got number {number}",
                       "the file is damaged, or newer than this package")  # fmt: skip
        if not sizes:
            blocks = f"rows of a multiple of {official[0].block} for {official[0].name}"
            self._fail("row_length", where, f"{blocks}, got shape {list(shape)}")
        if last and len(sizes) == 1 and sizes[0][1] < room:
            extra = room - padded(sizes[0][1], self.alignment)
            got = f"the end of the file at {self.size - extra}, got {extra} more bytes"
            self._fail("trailing_bytes", "file", got)
        expected = " or ".join(f"{size} bytes ({t.name})" for t, size in sizes)
        remedy = f"the file is damaged, or holds {fork.name}: {fork.rejected}" if fork else ""
        got = f"{expected} for {list(shape)}, got room for {max(room, 0)}"
        self._fail("size", where, got, remedy)

    def _check_readable(self, where: str, kind: TensorType) -> None:
        """Reject a type that is known by its size and cannot be read."""
        if kind.rejected:
            self._fail("unreadable", where, f"a type that can be read, got {kind.name}: "
                       f"{kind.rejected}", "see docs/guide/gguf.md")  # fmt: skip
        if kind.name != Q2_BLOCKS[128] or self.q2_block is not None:
            return
        for key in OXIBONSAI_KEYS:
            value = self.metadata.get(key)
            if isinstance(value, str):
                got = f"{key} = {value[:40]!r}: TQ2_0_g128 of OxiBonsai, whose scales come last"
                self._fail("unreadable", where, f"Q2_0, whose scales come first, got {got}",
                           f"{_Q2_REMEDY}, if it is Prism's")  # fmt: skip


class _Rooms:
    """The bytes from every tensor's offset to the next, and which types would fill them.

    `ends`: offset -> where the next tensor, or the file, begins.
    """

    def __init__(self, records: list[Record], ends: dict[int, int], alignment: int) -> None:
        self._records, self._ends, self._alignment = records, ends, alignment
        self._agreed: dict[int, tuple[TensorType, ...]] = {}

    def fits(self, size: int | None, room: int, last: bool) -> bool:
        """Whether a tensor of `size` bytes fills its room; the last one may come unpadded."""
        if size is None:
            return False
        whole = padded(size, self._alignment)
        return size <= room <= whole if last else room == whole

    def agreed(self, number: int) -> tuple[TensorType, ...]:
        """The types of this number that fit all its tensors: one pass, whoever asks how often."""
        if number not in self._agreed:
            rooms = [
                (r.shape, self._ends[r.offset] - r.offset)
                for r in self._records
                if r.number == number
            ]
            self._agreed[number] = tuple(
                t
                for t in BY_NUMBER[number]
                if all(self.fits(t.nbytes(shape), room, True) for shape, room in rooms)
            )
        return self._agreed[number]
