"""What the reader and the writer of SGLBITNT share: limits, the error type, the config, the bytes.

The rules are FORMAT.md's; those about bytes are enforced in csrc/format when reading. A layout is
told the header, then tensor after tensor, then the end; the Writer has checked it all.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.formats import CodedError

MAGIC = b"SGLBITNT"
VERSIONS = (1, 2)
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1024
MAX_DIMS = 8
MAX_DIM = 2**31 - 1
ROW_BLOCK_BYTES = 32  # a packed row is a number of blocks of 32 bytes, 128 weights each
ROW_BLOCK_WEIGHTS = 128
GROUP_SIZES = (128, 64)  # weights along K that may share a scale
PRIVATE_BLOCK = "bitnet_ops"
PRIVATE_VERSION = 1  # of the block "bitnet_ops" in the config

DTYPES = {torch.uint8: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class SglbitntError(CodedError):
    """A file or an argument that breaks a rule of FORMAT.md.

    `code`: the rule's short name as FORMAT.md lists it, e.g. "truncated" or "scale_value".
    """


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Errors of the C++ reader as SglbitntError."""
    try:
        yield
    except _runtime.FormatError as error:
        raise SglbitntError(error.code, str(error)) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key[:MAX_NAME_BYTES]!r} twice")
        out[key] = value
    return out


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}, which no float64 holds")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"the constant {text}, which JSON does not have")


def parse_config(text: str, where: str) -> dict[str, Any]:
    """The config as a dict; strict JSON: one object, no key twice, no NaN, no lone surrogate."""
    try:
        config = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_float=_finite_float,
            parse_constant=_no_constant,
        )
        json.dumps(config, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise SglbitntError(
            "config_json",
            f"{where}: header: expected the config as strict JSON, got {error}; "
            "the file is damaged: convert the model again",
        ) from None
    _check_config(config, where)
    return config


def _check_config(config: Any, where: str) -> None:
    """A JSON object whose private block, if there is one, is of the version known here."""
    if not isinstance(config, dict):
        raise SglbitntError(
            "config_json",
            f"{where}: header: expected the config as a JSON object, got {type(config).__name__}; "
            "the file is damaged: convert the model again",
        )
    if PRIVATE_BLOCK not in config:
        return
    block = config[PRIVATE_BLOCK]
    version = block.get("format_version") if isinstance(block, dict) else None
    if type(version) is not int or version != PRIVATE_VERSION:
        raise SglbitntError(
            "private_block",
            f'{where}: header: expected "bitnet_ops" in the config with format_version '
            f"{PRIVATE_VERSION}, got {block!r:.80}; convert the model again, or use the release "
            "that wrote the file",
        )


def config_bytes(config: dict[str, Any], where: str) -> bytes:
    """The config as it goes into the file; rejected unless reading it back gives the same dict."""
    _check_config(config, where)
    try:
        text = json.dumps(config, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = text.encode()
        if json.loads(text) != config:
            raise ValueError("keys or values that JSON changes (non-string keys, tuples)")
    except (TypeError, ValueError, RecursionError) as error:
        raise SglbitntError(
            "config_json",
            f"{where}: header: expected the config as strict JSON, got {error}; "
            "pass what json.load() gave",
        ) from None
    if len(data) > MAX_CONFIG_BYTES:
        raise SglbitntError(
            "config_length",
            f"{where}: header: expected a config length of 1 to {MAX_CONFIG_BYTES} bytes, "
            f"got {len(data)}; remove what the model does not need",
        )
    return data


# Bytes in order -----------------------------------------------------------------------------------

ALIGNMENT = 64  # of data, scales, config and index in version 2
_HEADER = struct.Struct("<8sIIQQIIQQ")  # of version 2, without its checksum
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _SUM.size
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
