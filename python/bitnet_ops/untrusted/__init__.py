"""Untrusted input: JSON within limits, links that stay inside a folder, printable text.

A checkpoint is a folder that somebody else has filled. Its JSON is read within limits, its links
are followed only as far as they stay inside, and what it calls things is shown without control
characters.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from bitnet_ops.errors import BitNetError
from bitnet_ops.errors import printable as printable

_LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer begins
LFS_POINTER = "a Git LFS pointer in its place; run git lfs pull in its folder, or download it"
JSON_LIMIT_BYTES = 64 << 20  # a shard index of the largest public models is a few MB
SAFETENSORS_HEADER_BYTES = 16 << 20  # several times what the largest public models have
_DEEPEST = 64  # levels of nesting; published files have less than ten


class UntrustedFileError(BitNetError, ValueError):
    """A file that is not read; the message says which and why, in one line."""


# Texts --------------------------------------------------------------------------------------------


def json_text(value: Any, indent: int | None = None, *, ascii: bool = False) -> str:
    """`value` as JSON in which no character is raw that `printable` would escape."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c == printable(c) else json.dumps(c)[1:-1] for c in text)


# JSON ---------------------------------------------------------------------------------------------


def read_json_object(
    path: str | os.PathLike[str], *, strict: bool = False, limit: int = JSON_LIMIT_BYTES
) -> dict[str, Any]:
    """The object that the JSON file `path` holds.

    `strict`: no key twice, no NaN or Infinity. Raises UntrustedFileError, whose message goes on
    from "expected ...": for a file that is none, larger than `limit` bytes, no UTF-8, no JSON,
    nested deeper than 64, or holds something else than an object.
    """
    value = parse_json(read_text(path, limit=limit), str(path), strict=strict)
    if not isinstance(value, dict):
        _reject(f"a JSON object in {path}", type(value).__name__)
    return value


def read_text(path: str | os.PathLike[str], *, limit: int = JSON_LIMIT_BYTES) -> str:
    """The UTF-8 text of the regular file `path`; UntrustedFileError if it is none, or too large."""
    try:
        # O_NONBLOCK: a FIFO would wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                _reject(f"a regular file {path}", "something else")
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, UntrustedFileError):
            raise
        _reject(f"a readable file {path}", str(error))
    if data.startswith(_LFS):
        _reject(f"the contents of {path}", LFS_POINTER)
    if len(data) > limit:
        _reject(f"{path} below {limit >> 20} MiB", "more")
    try:
        return data.decode("utf-8-sig")  # a BOM, as editors write it, is no part of the text
    except UnicodeDecodeError as error:
        _reject(f"UTF-8 in {path}", f"byte 0x{data[error.start]:02x} at offset {error.start}")


def parse_json(text: str, name: str, *, strict: bool = False) -> Any:
    """The value of a JSON text; `name` is what messages call it."""
    try:
        if strict:
            value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        else:
            value = json.loads(text)
    except RecursionError:
        _reject(f"JSON nested at most {_DEEPEST} deep in {name}", "deeper nesting")
    except ValueError as error:
        _reject(f"valid JSON in {name}", str(error))
    if is_deeper(value, _DEEPEST):
        _reject(f"JSON nested at most {_DEEPEST} deep in {name}", "deeper nesting")
    return value


def check_safetensors_header(path: str | os.PathLike[str]) -> None:
    """UntrustedFileError for a header that names a tensor twice, or is larger than 16 MiB.

    The library takes one of the two and does not say which.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > SAFETENSORS_HEADER_BYTES:
            _reject(f"a header below {SAFETENSORS_HEADER_BYTES >> 20} MiB in {path}", f"{size} B")
        text = file.read(size).decode("utf-8", "replace")
    parse_json(text, f"the header of {os.path.basename(path)}", strict=True)


def is_deeper(value: Any, limit: int) -> bool:
    """Whether `value` nests deeper than `limit`; level by level, for it may be deeper than ours."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [v for v in item.values() if isinstance(v, (dict, list))]
            elif isinstance(item, list):
                inner += [v for v in item if isinstance(v, (dict, list))]
        if not inner:
            return False
        level = inner
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"a key twice: {twice[:80]!r}")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no JSON number")


def _reject(expected: str, got: str) -> NoReturn:
    raise UntrustedFileError(f"expected {expected}, got {got}")


# Git LFS ------------------------------------------------------------------------------------------


def is_lfs_pointer(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the few lines that a clone without git-lfs has in the place of a file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(len(_LFS)) == _LFS
    except (OSError, ValueError):  # whoever reads it says what is wrong
        return False


# Links --------------------------------------------------------------------------------------------


def leads_outside(folder: Path, name: str) -> Path | None:
    """Where `folder`/`name` leads if that is outside `folder`; None if it stays inside.

    The cache of the Hugging Face hub is inside: its models--*/snapshots/REVISION/ holds links into
    models--*/blobs/, which is what `huggingface_hub` downloads look like.
    """
    try:
        root, real = folder.resolve(), (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a ring of links
        _reject(f"a path in {folder}", str(error))
    if real.is_relative_to(root):
        return None
    if root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs":
        return None
    return real


def check_links(folder: Path, names: Iterable[str]) -> None:
    """UntrustedFileError if one of `names` in `folder` is, or leads through, a link out of it."""
    for name in names:
        real = leads_outside(folder, name)
        if real is not None:
            _reject(
                f"{name} in {folder}",
                f"a link out of it, to {real}; put the file itself there if it belongs to it",
            )
