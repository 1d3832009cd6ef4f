"""Replaces the config of an existing model file.

What the converter proves about a file is known only once the file exists, and is kept in its
config. In version 2 the config lies behind the data and only the tail is written anew, in place; in
version 1 it lies in front, and the file is copied.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

from bitnet_ops.formats._sglbitnt_layouts import ALIGNMENT, tail_header
from bitnet_ops.formats._sglbitnt_rules import MAGIC, config_bytes
from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.formats.sglbitnt import Reader

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
