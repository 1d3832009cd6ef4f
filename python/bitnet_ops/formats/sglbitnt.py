"""SGLBITNT, the model file of FORMAT.md: a memory-mapped Reader and a streaming Writer.

The bytes are checked in C++ (csrc/format), the config in Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.formats.sglbitnt_layouts import (
    ALIGNMENT,
    DTYPES,
    HEADER_BYTES,
    MAGIC,
    MAX_DIM,
    SglbitntError,
    config_bytes,
    parse_config,
    tail_header,
    typed_errors,
)
from bitnet_ops.formats.sglbitnt_write import Writer
from bitnet_ops.memory.arena import Arena, stretch
from bitnet_ops.untrusted import LFS_POINTER, is_lfs_pointer

__all__ = [
    "MODEL_FILE",
    "Reader",
    "SglbitntError",
    "TensorInfo",
    "Writer",
    "is_sglbitnt",
    "model_file",
]

MODEL_FILE = "model.bin"  # its name inside a converted model's directory
_DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. Packed (uint8): `shape` is [N, 32*ceil(K/128)]; scales multiply.

    Dense (float32, float16, bfloat16): `shape` is its own. `offset` and `nbytes` say where the data
    lies in the file, in bytes. `scale`: the scale of a packed tensor that has one, else None;
    `scale_kind`: "none" (dense), "tensor", "row" or "group", of `group_size` weights along K.
    `in_features`: the true K of a packed tensor, None in version 1, which does not have it.
    `checksum`: XXH64 of the data, 0 in version 1.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    scale: float | None
    offset: int
    nbytes: int
    in_features: int | None = None
    scale_kind: str = "none"
    scale_dtype: torch.dtype = torch.float32
    group_size: int = 0
    scales_offset: int = 0
    scales_nbytes: int = 0
    checksum: int = 0

    @property
    def packed(self) -> bool:
        return self.dtype == torch.uint8


def model_file(path: str | os.PathLike[str]) -> Path:
    """The .bin file that `path` means: itself, or `model.bin` in the directory `path`."""
    path = Path(path)
    return path / MODEL_FILE if path.is_dir() else path


def is_sglbitnt(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a file that begins as this format does."""
    path = Path(path)
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return False


class Reader:
    """A file, checked and mapped; packed tensors, and in version 2 all, are views of the mapping.

    `check_codes`: besides the structure scan all data for code 3 and for NaN or infinity (memory
    speed). Raises SglbitntError for a file that breaks a rule of FORMAT.md or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], check_codes: bool = True) -> None:
        self.path = Path(path)
        if is_lfs_pointer(self.path):
            raise SglbitntError("magic", f"{self.path}: expected a model, got {LFS_POINTER}")
        with typed_errors():
            self._file = _runtime.SglbitntFile(os.fsencode(self.path), check_codes)
        self.version: int = self._file.version
        self.config: dict[str, Any] = parse_config(self._file.config_json, str(self.path))
        infos = [
            TensorInfo(
                t.name,
                _DTYPE_BY_NAME[t.dtype],
                t.shape,
                t.scale,
                t.offset,
                t.nbytes,
                t.in_features,
                t.scale_kind,
                _DTYPE_BY_NAME[t.scale_dtype],
                t.group_size,
                t.scales_offset,
                t.scales_nbytes,
                t.checksum,
            )
            for t in self._file.tensors
        ]
        self.tensors: dict[str, TensorInfo] = {info.name: info for info in infos}
        self._index = {info.name: i for i, info in enumerate(infos)}
        with warnings.catch_warnings():
            # torch warns that the buffer is read-only; the mapping is copy-on-write, so a write
            # through a tensor can neither crash nor reach the file
            warnings.simplefilter("ignore")
            self._bytes = torch.frombuffer(self._file, dtype=torch.uint8)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` in its dtype and shape.

        Version 2: zero-copy (it keeps the file mapped), aligned to 64 bytes. Version 1: zero-copy
        and unaligned if packed, else a copy. Raises SglbitntError("missing_tensor"), and
        ("truncated") if the file was shortened since it was opened, as all that reads data does.
        """
        info = self._mapped(name)
        data = stretch(self._bytes, info.offset, info.offset + info.nbytes)
        if info.packed or self.version > 1:
            return data.view(info.dtype).view(info.shape)
        copy = Arena(info.nbytes).take(info.shape, info.dtype)  # data is unaligned in the file
        copy.view(-1).view(torch.uint8).copy_(data)
        return copy

    def scales(self, name: str) -> Tensor:
        """The multiplying scales of the packed tensor `name`: f32 [1], [N] or [N, groups].

        Raises SglbitntError("missing_tensor"), ValueError for a dense tensor.
        """
        info = self._mapped(name)
        if info.scale is not None:
            return torch.tensor([info.scale], dtype=torch.float32)
        if not info.packed:
            raise ValueError(f"scales: expected a packed tensor, got {name} {info.dtype}")
        stored = stretch(self._bytes, info.scales_offset, info.scales_offset + info.scales_nbytes)
        values = stored.view(info.scale_dtype).float()
        return values if info.scale_kind == "row" else values.view(info.shape[0], -1)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """A copy of rows [begin, end) of the dense tensor `name`.

        Raises SglbitntError("missing_tensor"), ValueError for a packed tensor or another range.
        """
        info = self._mapped(name)
        if info.packed or not 0 <= begin <= end <= info.shape[0]:
            raise ValueError(
                f"rows: expected a dense tensor and a range within {info.shape[0]} rows, got "
                f"{name} {info.dtype}, {begin} to {end}"
            )
        row = info.nbytes // info.shape[0]
        data = self._bytes[info.offset + begin * row : info.offset + end * row].clone()
        return data.view(info.dtype).view(end - begin, *info.shape[1:])

    def memory(self, name: str) -> memoryview:
        """The data of `name` as bytes, read-only and zero-copy."""
        info = self._mapped(name)
        return memoryview(self._file)[info.offset : info.offset + info.nbytes]

    def check_in_features(self, name: str, in_features: int) -> None:
        """Check the packed tensor `name` against its true K: row bytes, and padding codes all 1.

        Raises SglbitntError("in_features") or ("padding_code").
        """
        self._info(name)
        if not 0 < in_features <= MAX_DIM:
            raise SglbitntError(
                "in_features",
                f"{self.path}: expected in_features from 1 to {MAX_DIM}, got {in_features}; "
                "take K from the config",
            )
        with typed_errors():
            self._file.check_in_features(self._index[name], in_features)

    def check_data(self, name: str) -> None:
        """Scan the data of `name` as `check_codes` does for all of them.

        Raises SglbitntError("invalid_code") or ("non_finite").
        """
        self._info(name)
        with typed_errors():
            self._file.check_data(self._index[name])

    def check_sum(self, name: str) -> None:
        """Compare the data and scales of `name` with their checksums; version 1 has none.

        Raises SglbitntError("data_checksum").
        """
        self._info(name)
        with typed_errors():
            self._file.check_sum(self._index[name])

    def digest(self) -> bytes | None:
        """A digest of the whole file, by its own checksums; version 1 has none.

        The header has the checksum of the index, and that has those of all data.
        """
        if self.version == 1:
            return None
        return hashlib.sha256(self._bytes[:HEADER_BYTES].numpy().data).digest()

    def release(self, name: str) -> None:
        """Give back the memory behind the data of `name`, which has been read and is not needed.

        Views of it stay valid and read the file again; what was written through them is lost.
        """
        self._info(name)
        self._file.release(self._index[name])

    def code_counts(self, name: str) -> tuple[int, int, int]:
        """How many weights of the packed tensor `name` are -1, 0, +1; padding counts as 0."""
        self._info(name)
        with typed_errors():
            return self._file.code_counts(self._index[name])

    def _mapped(self, name: str) -> TensorInfo:
        """The info of a tensor whose data can be read: the file has not been shortened since."""
        info = self._info(name)
        with typed_errors():
            self._file.check_length()
        return info

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise SglbitntError(
                "missing_tensor",
                f"{self.path}: expected one of the file's {len(self.tensors)} tensors, "
                f"got {name!r}; `bitnet-ops inspect` lists them",
            )
        return self.tensors[name]

    def close(self) -> None:
        """Forget the tensors; the file is unmapped once the last view of it is gone."""
        self.tensors, self._index = {}, {}
        self._bytes = torch.empty(0, dtype=torch.uint8)
        del self._file

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Another config for a file that exists ------------------------------------------------------------

_FRONT = struct.Struct("<8sII")  # magic, version and, in version 1, the config's length
_FRONT_2 = struct.Struct("<8sIIQQI")  # magic, version, tensors, file length, config offset, length


def replace_config(path: str | os.PathLike[str], config: dict[str, Any]) -> None:
    """Write `config` into the model file at `path`, which is read and checked first.

    A version 2 file is changed in place: nobody may have it open, and a crash in between leaves a
    file that its checksums reject. Raises SglbitntError for a file or a config that breaks a rule
    of FORMAT.md, OSError as the file system does.
    """
    file = Path(path)
    with Reader(file, check_codes=False) as reader:
        version = reader.version
    text = config_bytes(config, str(file))
    if version == 1:
        _copy_behind(file, text)
    else:
        _write_tail(file, text)
    Reader(file, check_codes=False).close()  # the reader has the last word


def _copy_behind(file: Path, config: bytes) -> None:
    with open(file, "rb") as source, atomic_file(file) as out:
        _, version, length = _FRONT.unpack(source.read(_FRONT.size))
        source.seek(length, os.SEEK_CUR)
        out.write(_FRONT.pack(MAGIC, version, len(config)) + config)
        shutil.copyfileobj(source, out, 1 << 20)


def _write_tail(file: Path, config: bytes) -> None:
    with open(file, "r+b") as out:
        _, _, count, _, at, length = _FRONT_2.unpack(out.read(_FRONT_2.size))
        out.seek(at + length + -length % ALIGNMENT)
        index = out.read()
        out.seek(at)
        out.write(config + bytes(-len(config) % ALIGNMENT) + index)
        out.truncate()
        out.seek(0)
        out.write(tail_header(config, index, count, at))
        out.flush()
        os.fsync(out.fileno())
