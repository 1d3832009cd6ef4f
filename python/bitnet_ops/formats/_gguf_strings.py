"""StringArray: the strings of a GGUF metadata array as the bytes of the file, text when asked for.

A vocabulary of short tokens is eight times as large in memory as text objects; here it takes what
it takes in the file.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard, overload

from bitnet_ops import _runtime

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

    def __init__(self, count: int, most_bytes: int) -> None:
        self._wanted, self._most = count, most_bytes
        self.count, self.end, self.fault, self.at = 0, 0, ENDS if count else NONE, 0
        self.marks = array("Q")
        self._rest = bytearray()  # of a string that the next piece goes on with

    def add(self, piece: bytes) -> None:
        """Go on through `piece`, the next bytes of the file."""
        self._rest += piece
        found, end, self.fault, at, marks = _runtime.gguf_strings(
            self._rest, 0, self._wanted - self.count, self._most, self.count, STRIDE
        )
        self.at = self.end + at if self.fault == BAD_UTF8 else at
        self.marks.extend(self.end + mark for mark in array("Q", marks))
        self.count += found
        self.end += end
        del self._rest[:end]


def is_strings(value: Any) -> TypeGuard[list[str] | StringArray]:
    """Whether a metadata value is an array of strings."""
    return isinstance(value, list | StringArray)
