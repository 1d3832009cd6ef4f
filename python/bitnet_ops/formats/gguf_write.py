"""The streaming writer of GGUF version 3; public as `gguf.Writer`.

Everything that the header says is known before the first tensor is written; only a complete file
gets its name.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.formats.gguf_header import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_NAME_BYTES,
    SCALARS,
    STRING,
    TYPES,
    GgufError,
    has_control,
    padded,
)

_NUMBERS = {name: (number, letter) for number, (name, letter) in SCALARS.items()}


class Writer:
    """Writes a GGUF file tensor by tensor, in the order announced.

    `metadata`: key -> (type, value), the type one of uint8 ... float64, bool, string, or "[t]" for
    an array of t. `tensors`: name -> (type name, shape), row-major. A context manager: leaving it
    normally renames the temporary file, leaving it by an exception removes it. Raises GgufError,
    with code "io" for what the file system rejects.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, tuple[str, Any]],
        tensors: Mapping[str, tuple[str, Sequence[int]]],
    ) -> None:
        self.path = Path(path)
        self._sizes: dict[str, int] = {}
        records, offset = [], 0
        for name, (type_name, shape) in tensors.items():
            records.append(self._record(name, type_name, tuple(shape), offset))
            offset += padded(self._sizes[name], DEFAULT_ALIGNMENT)
        keys = b"".join(self._key(key, kind, value) for key, (kind, value) in metadata.items())
        if not tensors:
            self._fail("tensor_count", "header", "one tensor at least, got 0")
        counts = struct.pack("<IQQ", 3, len(tensors), len(metadata))
        head = b"".join([MAGIC, counts, keys, *records])
        self._header = head.ljust(padded(len(head), DEFAULT_ALIGNMENT), b"\0")
        self._waiting = list(reversed(self._sizes))
        self._file: BinaryIO | None = None

    def add(self, name: str, data: NDArray[Any]) -> None:
        """Write the bytes of the next tensor, which must be `name`."""
        if self._file is None or not self._waiting or self._waiting[-1] != name:
            expected = self._waiting[-1] if self._waiting else "none"
            self._fail("order", f"tensor {name!r}", f"{expected} as announced, in a with-block")
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if data.nbytes != self._sizes[name]:
            got = f"{self._sizes[name]} bytes, got {data.nbytes}"
            self._fail("size", f"tensor {name!r}", got)
        with self._io_errors():
            self._file.write(data.data)
            self._file.write(b"\0" * (padded(data.nbytes, DEFAULT_ALIGNMENT) - data.nbytes))
        self._waiting.pop()

    # --- header -----------------------------------------------------------------------------------

    def _fail(self, code: str, where: str, expected: str) -> NoReturn:
        message = f"{self.path}: {where}: expected {expected}; correct the argument"
        raise GgufError(code, message)

    def _record(self, name: str, type_name: str, shape: tuple[int, ...], offset: int) -> bytes:
        where = f"tensor {name!r}"
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES or not 1 <= len(shape) <= MAX_DIMS:
            self._fail("dims", where, f"a name and 1 to {MAX_DIMS} dimensions, got {shape}")
        self._check_name(where, name)
        kind = TYPES[type_name]
        size = kind.nbytes(shape) if all(dim > 0 for dim in shape) else None
        if size is None:
            limit = f"rows of a multiple of {kind.block} for {type_name}"
            self._fail("row_length", where, f"{limit}, got shape {list(shape)}")
        self._sizes[name] = size
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        return _string(name) + dims + struct.pack("<IQ", kind.number, offset)

    def _check_name(self, where: str, name: str) -> None:
        if has_control(name):
            self._fail("name_control", where, f"a name without control characters, got {name!r}")

    def _key(self, key: str, kind: str, value: Any) -> bytes:
        self._check_name(f"key {key!r}", key)
        try:
            if kind.startswith("["):
                return _string(key) + struct.pack("<I", ARRAY) + _array(kind[1:-1], value)
            number = STRING if kind == "string" else _NUMBERS[kind][0]
            return _string(key) + struct.pack("<I", number) + _value(kind, value)
        except (struct.error, KeyError, AttributeError, UnicodeError, OverflowError) as error:
            self._fail("value", f"key {key!r}", f"a value of type {kind}, got {value!r:.60}: "
                       f"{error}")  # fmt: skip

    # --- file -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _io_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GgufError(
                "io",
                f"{self.path}: expected a writable file and room for it, got error {error}; "
                "check the directory, its permissions and the free space",
            ) from error

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        with self._io_errors(), atomic_file(self.path) as file:
            file.write(self._header)
            self._file = file
            try:
                yield
                if self._waiting:
                    got = f"{len(self._sizes)} tensors, got {len(self._waiting)} fewer"
                    self._fail("order", "file", got)
            finally:
                self._file = None

    def __enter__(self) -> Writer:
        self._context = self._session()
        self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: str, value: Any) -> bytes:
    return _string(value) if kind == "string" else struct.pack(f"<{_NUMBERS[kind][1]}", value)


def _array(kind: str, values: Sequence[Any]) -> bytes:
    number = STRING if kind == "string" else _NUMBERS[kind][0]
    head = struct.pack("<IQ", number, len(values))
    return head + b"".join(_value(kind, value) for value in values)
