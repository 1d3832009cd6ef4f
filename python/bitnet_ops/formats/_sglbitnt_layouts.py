"""How the two versions of SGLBITNT lay out what a Writer has checked: bytes in order, no more.

A layout is told the header, then tensor after tensor, then the end. The Writer has checked it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.formats._sglbitnt_rules import DTYPES, MAGIC

ALIGNMENT = 64  # of data, scales, config and index in version 2
_HEADER = struct.Struct("<8sIIQQIIQQ")  # of version 2, without its checksum
_SUM = struct.Struct("<Q")
KIND_NONE, KIND_TENSOR, KIND_ROW, KIND_GROUP = range(4)


@dataclass(frozen=True)
class Record:
    """A checked tensor. Packed: `data` uint8 [N, R], `scales` f32 or f16 [1], [N] or [N, groups].

    `in_features` is the true K and `group_size` the weights of a group, 0 without groups.
    """

    name: str
    data: Tensor
    scales: Tensor | None = None
    in_features: int = 0
    group_size: int = 0

    @property
    def scale_kind(self) -> int:
        if self.scales is None:
            return KIND_NONE
        if self.scales.dim() == 2:
            return KIND_GROUP
        return KIND_TENSOR if self.scales.numel() == 1 else KIND_ROW


def octets(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of `tensor` in row-major order, shared where that is possible."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _name_field(name: str) -> bytes:
    encoded = name.encode()
    return struct.pack("<I", len(encoded)) + encoded


class Version1:
    """Records one after the other, each header before its data."""

    def __init__(self, file: BinaryIO, config: bytes, count: int) -> None:
        self._file = file
        file.write(MAGIC + struct.pack("<II", 1, len(config)) + config + struct.pack("<I", count))

    def add(self, record: Record) -> None:
        data, shape = octets(record.data), record.data.shape
        head = _name_field(record.name)
        head += struct.pack("<II", DTYPES[record.data.dtype], len(shape))
        head += struct.pack(f"<{len(shape)}I", *shape)
        if record.scales is None:
            head += struct.pack("<I", 0)
        else:
            head += struct.pack("<If", 1, record.scales.item())
        self._file.write(head + struct.pack("<Q", data.nbytes))
        self._file.write(data.data)

    def finish(self) -> None:
        """Nothing is left to write."""


class Version2:
    """Aligned data, then the config and an index; the header is written last."""

    def __init__(self, file: BinaryIO, config: bytes, count: int) -> None:
        self._file, self._config, self._count = file, config, count
        self._index = bytearray()
        self._at = ALIGNMENT
        file.write(bytes(ALIGNMENT))

    def add(self, record: Record) -> None:
        shape = list(record.data.shape)
        if record.scales is not None:
            shape[1] = record.in_features
        kind = record.scale_kind
        index = _name_field(record.name)
        index += struct.pack("<II", DTYPES[record.data.dtype], len(shape))
        index += struct.pack(f"<{len(shape)}I", *shape) + struct.pack("<I", kind)
        if record.scales is not None:
            dtype = DTYPES[record.scales.dtype]
            if kind == KIND_TENSOR:
                index += struct.pack("<f", record.scales.item())
            elif kind == KIND_ROW:
                index += struct.pack("<I", dtype)
            else:
                index += struct.pack("<II", dtype, record.group_size)
        index += self._place(octets(record.data))
        if record.scales is not None and kind != KIND_TENSOR:
            index += self._place(octets(record.scales))
        self._index += index

    def finish(self) -> None:
        """Write the config and the index, and over the first bytes the header."""
        at = self._at
        self._place(np.frombuffer(self._config, dtype=np.uint8))
        self._file.write(self._index)
        head = tail_header(self._config, bytes(self._index), self._count, at)
        self._file.seek(0)
        self._file.write(head)

    def _place(self, data: np.ndarray[Any, Any]) -> bytes:
        """Write `data` and zeros up to the next multiple of 64; its offset, length and checksum."""
        at = self._at
        self._file.write(data.data)
        self._file.write(bytes(-data.nbytes % ALIGNMENT))
        self._at += data.nbytes + -data.nbytes % ALIGNMENT
        return struct.pack("<QQQ", at, data.nbytes, _runtime.xxh64(data.data))


def tail_header(config: bytes, index: bytes, count: int, config_offset: int) -> bytes:
    """The header of a version 2 file with this config at `config_offset` and this index."""
    size = config_offset + len(config) + -len(config) % ALIGNMENT + len(index)
    sums = _runtime.xxh64(config), _runtime.xxh64(index)
    head = _HEADER.pack(MAGIC, 2, count, size, config_offset, len(config), 0, *sums)
    return head + _SUM.pack(_runtime.xxh64(head))


LAYOUTS: dict[int, type[Version1] | type[Version2]] = {1: Version1, 2: Version2}
