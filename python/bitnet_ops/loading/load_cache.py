"""The load cache: files that hold every tensor of a model as the kernels want it.

A file belongs to one source file (by content, not by path), one set of layouts and one number of
lanes; its name is the hash of all that. It may be deleted at any time. A file that is damaged, cut
off, of another kind or open to other users is ignored with a warning and made again. It is mapped
where the system maps it in huge pages, which serve every later token, and else read into huge pages
of our own; also where these are dealt out over several memory nodes, for pages of a file lie where
the system has cached it. It must not know what the tensors are for.

Format: a header of 64 bytes (magic, version, bytes of JSON, bytes after the header, hash), then the
JSON that lists the tensors and then their data, everything filled up to 64 bytes with zeros. The
hash is over the header before it and over all that follows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.formats import content_hash, sglbitnt
from bitnet_ops.formats.content_hash import CHUNK
from bitnet_ops.loading.cache_files import ENVIRONMENT, CacheError, PrivateDirectory
from bitnet_ops.memory.arena import ALIGNMENT, Arena, aligned, stretch
from bitnet_ops.memory.mapped import map_huge
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.packing import PackedWeight

VERSION = 3  # of this file's format and of the CPU-specific layouts; raise it when either changes
_MAGIC = b"BITNETPM"
_SUMMED = struct.Struct("<8sIQQ")  # magic, version, bytes of JSON, bytes after the header
_HEADER_BYTES = 64  # then the hash, then zeros
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
}

Value = Tensor | PackedWeight | HeadWeight


def file_name(reader: sglbitnt.Reader, formats: Sequence[str]) -> str:
    """The name of the cached form of `reader`'s file in the layouts `formats`.

    A hash of the file's content and of what the layouts depend on.
    """
    about = [VERSION, _runtime.tile_lanes(), *formats, reader.version, reader.fingerprint().hex()]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32] + ".prepared"


# Writing --------------------------------------------------------------------------------------


def write(file: Path, tensors: Mapping[str, Value]) -> None:
    """Write `tensors` to `file`, which appears whole or not at all, for this user alone.

    A directory or disk that rejects costs a warning, not the model.
    """
    try:
        with PrivateDirectory(file.parent, make=True) as folder, folder.new(file.name) as out:
            _write_file(out, file.stem, tensors)
    except (OSError, CacheError) as error:
        warnings.warn(
            f"cache: expected room for a cached model in {file.parent}, got {_told(error)}; "
            f"going on without (a directory of your own serves: mode 700, {ENVIRONMENT} names it)",
            stacklevel=2,
        )


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, CacheError) else f"error {error}"


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
    summed = _SUMMED.pack(_MAGIC, VERSION, len(text), aligned(len(text)) + size)
    hashes: list[bytes] = []
    for block in _blocks([summed.ljust(_HEADER_BYTES, b"\0"), text, *pieces]):
        out.write(block)
        hashes.append(_runtime.xxh3_128(block[_HEADER_BYTES if not hashes else 0 :]))
    out.seek(len(summed))
    out.write(content_hash.of_chunks(summed, hashes))


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The pieces, each filled up to ALIGNMENT with zeros, in blocks of CHUNK bytes.

    A file written in whole huge pages lies in the page cache in huge pages.
    """
    block = bytearray(CHUNK)
    used = 0
    for piece in pieces:
        for part in (memoryview(piece), memoryview(bytes(-len(piece) % ALIGNMENT))):
            while len(part):
                count = min(len(part), CHUNK - used)
                block[used : used + count] = part[:count]
                part, used = part[count:], used + count
                if used == CHUNK:
                    yield memoryview(block)
                    used = 0
    if used:
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


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


# Reading --------------------------------------------------------------------------------------


def read(
    file: Path, check: Callable[[dict[str, Value]], None] = lambda tensors: None
) -> dict[str, Value] | None:
    """The tensors that `write` put into `file`, over one stretch of memory; None if it is no good.

    `check` raises ValueError for tensors that are not those wanted. No file at all is the ordinary
    case; one that is there and cannot be used, whatever is in it, costs a warning.
    """
    try:
        folder = PrivateDirectory(file.parent)
    except (OSError, CacheError):
        return None  # what is wrong with the directory is said where something is written to it
    try:
        with folder, folder.open(file.name) as source:
            tensors = _read_file(source.fileno(), file.stem)
            check(tensors)
            return tensors
    except FileNotFoundError:
        return None
    except (OSError, CacheError, ValueError, RuntimeError) as error:
        warnings.warn(
            f"cache: expected a cached model in {file}, got {_told(error)}; it is made again",
            stacklevel=2,
        )
        return None


def _read_file(descriptor: int, key: str) -> dict[str, Value]:
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, _HEADER_BYTES, 0)
    if len(head) < _HEADER_BYTES:
        raise CacheError("an incomplete header")
    magic, version, length, body_bytes = _SUMMED.unpack_from(head)
    if magic != _MAGIC or version != VERSION or aligned(length) > body_bytes:
        raise CacheError("a file of another kind or version")
    if size != _HEADER_BYTES + body_bytes:
        raise CacheError("an incomplete file")
    body, hashes = _read_body(descriptor, size)
    digest = content_hash.of_chunks(head[: _SUMMED.size], hashes)
    if head[_SUMMED.size :] != digest.ljust(_HEADER_BYTES - _SUMMED.size, b"\0"):
        raise CacheError("other data than were written")
    try:
        return _tensors(bytes(body[:length].numpy()), key, body[aligned(length) :])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CacheError(f"a list of tensors that cannot be read ({error!r})") from None


def _tensors(text: bytes, key: str, data: Tensor) -> dict[str, Value]:
    content = json.loads(text)
    if content["key"] != key:
        raise CacheError("the cached form of another model")
    entries = content["tensors"]
    tensors = {entry["name"]: _value(entry, data) for entry in entries}
    if len(tensors) != len(entries):
        raise ValueError("a name twice")
    return tensors


def _value(entry: Mapping[str, Any], data: Tensor) -> Value:
    parts = [_part(data, *place) for place in entry["parts"]]
    kind, about = entry["kind"], entry["about"]
    weight, scale = parts if len(parts) == 2 else (parts[0], None)
    if kind == "ternary":
        n, k, format, group_size = about[:4]
        if scale is None:
            scale = torch.tensor([float(about[4])], dtype=torch.float32)
        if group_size:
            scale = scale.view(n, -1)
        return PackedWeight(weight, scale, n, k, format, group_size)
    if kind == "head":
        rows, features = about
        return HeadWeight(weight, scale, rows, features)
    if kind != "dense":
        raise ValueError(f"kind {kind}")
    return weight


def _part(data: Tensor, dtype: str, shape: list[int], at: int, nbytes: int) -> Tensor:
    kind = _DTYPES[dtype]
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != nbytes:
        raise ValueError(f"shape {shape} in {nbytes} bytes")
    if at < 0 or at % ALIGNMENT or at + nbytes > data.nbytes:
        raise ValueError(f"{nbytes} bytes at {at}")
    return stretch(data, at, at + nbytes).view(kind).view(shape)


def _read_body(descriptor: int, size: int) -> tuple[Tensor, list[bytes]]:
    """What follows the header in a file of `size` bytes, and the hashes of its chunks.

    Chunks are those of the file, so that each is a huge page or two of the page cache.
    """
    mapping = None if _runtime.interleaves_pages() else map_huge(descriptor)
    memory = Arena(size).memory if mapping is None else mapping
    target = memoryview(memory.numpy().data)

    def hash_of_chunk(index: int) -> bytes:
        at = CHUNK * index
        chunk = target[at : at + CHUNK]
        if mapping is None:
            _fill(chunk, descriptor, at)
        return _runtime.xxh3_128(chunk if index else chunk[_HEADER_BYTES:])

    return memory[_HEADER_BYTES:size], content_hash.each_chunk(size, hash_of_chunk)


def _fill(chunk: memoryview, descriptor: int, start: int) -> None:
    """Read `chunk` from the file's bytes from `start` on."""
    done = 0
    while done < len(chunk):
        count = os.preadv(descriptor, [chunk[done:]], start + done)
        if count == 0:
            raise CacheError("an incomplete file")
        done += count
