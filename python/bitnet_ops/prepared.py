"""The cache of prepared models: files that hold every tensor as the kernels want it.

A file belongs to one source file (by content, size and time of change, not by path), one set of
layouts and one number of lanes; its name is the hash of all that. It may be deleted at any time. A
file that is damaged, cut off or of another kind is ignored with a warning and made again. It is
mapped where the system maps it in huge pages, which serve every later token, and else read into
huge pages of our own. It must not know what the tensors are for.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.arena import ALIGNMENT, Arena, aligned
from bitnet_ops.formats import sglbitnt
from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.head import HeadWeight
from bitnet_ops.mapped import HUGE_PAGE, map_huge
from bitnet_ops.packing import PackedWeight

ENVIRONMENT = "BITNET_OPS_CACHE"
VERSION = 2  # of this file's format and of the private layouts; raise it when either changes
_MAGIC = b"BITNETPM"
_HEADER = struct.Struct("<8sIQ32s")  # magic, version, bytes of JSON, digest
_CHUNK = 2 * HUGE_PAGE  # bytes written, read and summed at a time: they fit the caches of the CPU
_SAMPLES, _SAMPLE_BYTES = 64, 4096

Value = Tensor | PackedWeight | HeadWeight


class _Unusable(Exception):
    """Why a cache file cannot be used."""


def directory(choice: bool | str | os.PathLike[str] | None) -> Path | None:
    """Where prepared models lie, None for no cache.

    `choice`: a directory; True, the one of the environment variable BITNET_OPS_CACHE or else
    bitnet_ops in the user's cache directory; False, none; None, that of BITNET_OPS_CACHE if set.
    """
    given = os.environ.get(ENVIRONMENT)
    if choice is False or (choice is None and not given):
        return None
    if choice is not None and choice is not True:
        return Path(choice)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_ops"


def file_name(reader: sglbitnt.Reader, formats: Sequence[str]) -> str:
    """The name of the prepared form of `reader`'s file in the layouts `formats`.

    A hash of the file's size, time of change, headers and samples of its data (not of all: reading
    them would cost what the cache saves), and of what the layouts depend on.
    """
    status = reader.path.stat()
    digest = hashlib.sha256()
    about = [VERSION, _runtime.tile_lanes(), *formats, status.st_size, status.st_mtime_ns]
    digest.update(json.dumps([about, reader.config]).encode())
    digest.update(repr(list(reader.tensors.values())).encode())
    with open(reader.path, "rb") as file:
        for i in range(_SAMPLES + 1):
            file.seek(max(0, status.st_size - _SAMPLE_BYTES) * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32] + ".prepared"


# Writing --------------------------------------------------------------------------------------


def write(file: Path, tensors: Mapping[str, Value]) -> None:
    """Write `tensors` to `file`, which appears whole or not at all.

    A directory or disk that refuses costs a warning, not the model.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_file(file) as out:
            _write_file(out, file.stem, tensors)
    except OSError as error:
        warnings.warn(
            f"cache: expected room for a prepared model in {file.parent}, got error {error}; "
            f"going on without (set {ENVIRONMENT} to another directory)",
            stacklevel=2,
        )


def _write_file(out: BinaryIO, key: str, tensors: Mapping[str, Value]) -> None:
    entries, pieces, size = [], [], 0
    # What is read for every token comes first, in the order in which it is read; sorting is stable.
    for name in sorted(tensors, key=lambda n: not isinstance(tensors[n], PackedWeight)):
        kind, parts, about = _taken_apart(tensors[name])
        places = []
        for part in parts:
            dtype = str(part.dtype).removeprefix("torch.")
            places.append([dtype, list(part.shape), size, part.nbytes])
            pieces.append(_bytes_of(part).data)
            size += aligned(part.nbytes)
        entries.append({"name": name, "kind": kind, "parts": places, "about": about})
    text = json.dumps({"key": key, "tensors": entries}).encode()
    start = aligned(_HEADER.size + len(text))
    head = _HEADER.pack(_MAGIC, VERSION, len(text), bytes(32)) + text
    for block in _blocks([head, *pieces]):
        out.write(block)
    out.flush()
    with open(out.name, "rb") as written:  # also proves that it can be read
        _, digest = _read_data(written.fileno(), start, size, text)
    out.seek(0)
    out.write(_HEADER.pack(_MAGIC, VERSION, len(text), digest))


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The pieces, each filled up to ALIGNMENT with zeros, in blocks of _CHUNK bytes.

    A file written in whole huge pages lies in the page cache in huge pages.
    """
    block = bytearray(_CHUNK)
    used = 0
    for piece in pieces:
        for part in (memoryview(piece), memoryview(bytes(-len(piece) % ALIGNMENT))):
            while len(part):
                count = min(len(part), _CHUNK - used)
                block[used : used + count] = part[:count]
                part, used = part[count:], used + count
                if used == _CHUNK:
                    yield memoryview(block)
                    used = 0
    yield memoryview(block)[:used]


def _taken_apart(value: Value) -> tuple[str, list[Tensor], list[Any]]:
    """A kind, the tensors and the numbers that `_put_together` makes the value of."""
    if isinstance(value, PackedWeight):
        about = [value.out_features, value.in_features, value.format, value.group_size]
        if value.scale.numel() == 1:  # a number between weights would break their one stream
            return "ternary", [value.weight], [*about, float(value.scale)]
        return "ternary", [value.weight, value.scale], about
    if isinstance(value, HeadWeight):
        parts = [value.weight] if value.scale is None else [value.weight, value.scale]
        return "head", parts, [value.out_features, value.in_features]
    return "dense", [value], []


def _put_together(kind: str, parts: Sequence[Tensor], about: Sequence[Any]) -> Value:
    if kind == "ternary":
        scale = parts[1] if len(parts) > 1 else torch.tensor([about[4]])
        if about[3]:
            scale = scale.view(about[0], -1)
        return PackedWeight(parts[0], scale, *about[:4])
    if kind == "head":
        return HeadWeight(parts[0], parts[1] if len(parts) > 1 else None, *about)
    return parts[0]


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


# Reading --------------------------------------------------------------------------------------


def read(file: Path) -> dict[str, Value] | None:
    """The tensors that `write` put into `file`, views of one Arena; None if it cannot be used.

    No file at all is the ordinary case; one that is there and unusable costs a warning.
    """
    try:
        with open(file, "rb") as source:
            return _read_file(source, file.stem)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, _Unusable) as error:
        warnings.warn(
            f"cache: expected a prepared model in {file}, got {error}; it is made again",
            stacklevel=2,
        )
        return None


def _read_file(source: BinaryIO, key: str) -> dict[str, Value]:
    head = source.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise _Unusable("an incomplete header")
    magic, version, length, digest = _HEADER.unpack(head)
    size = os.fstat(source.fileno()).st_size
    if magic != _MAGIC or version != VERSION or length > size:
        raise _Unusable("a file of another kind or version")
    text = source.read(length)
    start = aligned(_HEADER.size + length)
    if size < start or (size - start) % ALIGNMENT:
        raise _Unusable("an incomplete file")
    memory, found = _read_data(source.fileno(), start, size - start, text)
    if found != digest:
        raise _Unusable("other data than were written")
    content = json.loads(text)  # which the digest covers
    if content["key"] != key:
        raise _Unusable("the prepared form of another model")
    return {entry["name"]: _value(entry, memory) for entry in content["tensors"]}


def _value(entry: Mapping[str, Any], memory: Tensor) -> Value:
    parts = [
        memory[at : at + nbytes].view(getattr(torch, dtype)).view(shape)
        for dtype, shape, at, nbytes in entry["parts"]
    ]
    return _put_together(entry["kind"], parts, entry["about"])


def _read_data(descriptor: int, start: int, size: int, text: bytes) -> tuple[Tensor, bytes]:
    """The data from `start` on, and the digest of them and of the JSON `text`."""
    mapping = map_huge(descriptor)
    memory = Arena(size).memory if mapping is None else mapping[start : start + size]
    target = memoryview(memory.numpy().data)

    def sum_of_chunk(at: int) -> int:
        chunk = target[at : at + _CHUNK]
        if mapping is None:
            _fill(chunk, descriptor, start + at)
        return int(np.frombuffer(chunk, dtype=np.int64).sum())  # ALIGNMENT is a multiple of 8

    with ThreadPoolExecutor(min(4, torch.get_num_threads())) as pool:
        sums = list(pool.map(sum_of_chunk, range(0, size, _CHUNK)))
    summary = np.array([size, *sums], dtype=np.int64).tobytes()
    return memory, hashlib.sha256(text + summary).digest()


def _fill(chunk: memoryview, descriptor: int, start: int) -> None:
    """Read `chunk` from the file's bytes from `start` on."""
    done = 0
    while done < len(chunk):
        count = os.preadv(descriptor, [chunk[done:]], start + done)
        if count == 0:
            raise _Unusable("an incomplete file")
        done += count
