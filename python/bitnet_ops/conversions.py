"""The cache of conversions: what people name -> a model file, converted where it has to be.

Checkpoints and GGUF files are converted once, into the cache directory, under a name that follows
from their files; whoever comes at the same time waits.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bitnet_ops.formats import sglbitnt
from bitnet_ops.formats.gguf import is_gguf
from bitnet_ops.loading.resolve import (
    ENVIRONMENT,
    Found,
    LoadError,
    cache_directory,
    find,
    mmproj_beside,
)
from bitnet_ops.untrusted import printable

CONVERTED = "converted"  # the folder of conversions in the cache directory
_VERSION = 5  # of what is converted how; raise it when conversions of old are not to be used
_REPORT = "report.json"
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "1_Pooling/config.json", "mtp/*")
_OURS = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*-[0-9a-f]{32}")  # a name that `_name` makes

_log = logging.getLogger("bitnet_ops")


def resolve(
    path: str | os.PathLike[str],
    *,
    convert: bool = True,
    cache: str | os.PathLike[str] | None = None,
    mmproj: str | os.PathLike[str] | None = None,
) -> Found:
    """The model file that `path` means, converted into the cache directory if it has to be.

    `convert`: False takes converted models alone. `cache`: as of `cache_directory`. `mmproj`: the
    file with the tower for pictures, as of `convert.convert`.
    Raises LoadError, HubError, convert.ConvertError.
    """
    source = find(path, convert)
    tower = None if mmproj is None else Path(mmproj)
    if isinstance(source, Found):
        if tower is not None:
            raise LoadError(
                f"load: expected a checkpoint or a GGUF file with --mmproj {tower}, got the "
                f"converted model {source.file}; a tower joins a model when it is converted: "
                "bitnet-ops convert SRC DST --mmproj FILE"
            )
        return source
    if tower is not None and not tower.is_file():
        raise LoadError(f"load: expected a file for --mmproj, got {tower}, which is none")
    return Found(_conversion(source, tower, cache_directory(cache)), source, tower)


def convert_again(found: Found, why: Exception) -> Found:
    """The conversion `found`, which is damaged as `why` says, made anew."""
    assert found.source is not None
    target = found.file.parent
    _warn(target, why)
    shutil.rmtree(target)
    made = _conversion(found.source, found.mmproj, target.parent.parent)
    return dataclasses.replace(found, file=made)


def _conversion(source: Path, mmproj: Path | None, cache: Path) -> Path:
    """The model file of `source` in the cache, converted now if it is not there."""
    root = cache / CONVERTED
    target = root / _name(source, mmproj)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_whole(target):
            with _turn(target):
                if not _is_whole(target):  # no other process made it meanwhile
                    _convert(source, mmproj, target)
    except OSError as error:
        raise LoadError(
            f"load: expected room for a conversion of {source} in {root}, got {error}; name "
            f"another directory by cache= or {ENVIRONMENT}, or convert it yourself: "
            f"bitnet-ops convert {source} DST"
        ) from error
    with suppress(OSError):  # not ours to write to
        os.utime(target)  # for `prune`
    return target / sglbitnt.MODEL_FILE


@dataclass(frozen=True)
class Conversion:
    """One in the cache. `used`: when it was last loaded, in seconds since 1970."""

    folder: Path
    bytes: int
    used: float


def conversions(cache: Path) -> list[Conversion]:
    """Those in the cache, the one loaded last at the end."""
    found = []
    root = cache / CONVERTED
    for folder in root.iterdir() if root.is_dir() else ():
        if _OURS.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            size = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
            found.append(Conversion(folder, size, folder.stat().st_mtime))
    return sorted(found, key=lambda one: one.used)


def prune(cache: Path, age_s: float) -> list[Conversion]:
    """Remove the conversions that nothing has loaded for so long; returns them.

    A process that has one mapped keeps it until it ends.
    """
    old = [one for one in conversions(cache) if one.used <= time.time() - age_s]
    for one in old:
        with _turn(one.folder):  # nobody is making it
            shutil.rmtree(one.folder)
    return old


def _name(source: Path, mmproj: Path | None) -> str:
    """A name for people, then the hash of all that the conversion depends on.

    Of every file its size and both its times: whoever changes data in place can reset the time of
    modification, but not the time at which the system saw the change.
    """
    files = [source]
    if source.is_dir():
        files = sorted({file for p in _CHECKPOINT_FILES for file in source.glob(p)})
    elif is_gguf(source) and mmproj is None:
        files += mmproj_beside(source)
    files += [] if mmproj is None else [mmproj.resolve()]
    about: list[object] = [
        _VERSION,
        importlib.metadata.version("bitnet-ops"),
        str(source.resolve()),
    ]
    for file in files:
        status = file.stat()
        about.append([str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    name = source.name if source.is_dir() else source.stem  # bitnet-b1.58-2B-4T has no ending
    return re.sub(r"[^A-Za-z0-9._-]", "_", name or "model").lstrip(".")[:40] + f"-{key}"


def _is_whole(target: Path) -> bool:
    """Whether `target` holds every file that its report lists."""
    try:
        names = json.loads((target / _REPORT).read_text())["files"]
        return all((target / name).is_file() for name in {sglbitnt.MODEL_FILE, *names})
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def _warn(target: Path, why: object) -> None:
    warnings.warn(
        f"cache: expected a converted model in {target}, got {why}; it is made again", stacklevel=3
    )


@contextmanager
def _turn(target: Path) -> Iterator[None]:
    """One process at a time makes `target`; the lock ends with the process."""
    with open(target.with_name(f".{target.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            _log.debug("no locks in %s: two processes may do the same work", target.parent)
        yield


def _convert(source: Path, mmproj: Path | None, target: Path) -> None:
    """Convert `source`; `target` appears whole."""
    from bitnet_ops.convert import convert  # only who converts needs the converter
    from bitnet_ops.convert.progress import progress_bar

    for left in target.parent.glob(f".{target.name}.making-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        _warn(target, "some of its files")
        shutil.rmtree(target)
    line = f"converting {source} (once; kept in {target.parent})"
    _log.info(line)
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    if on_terminal:
        print(printable(line), file=sys.stderr)  # noqa: T201 (cli/terminal.py is above)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
    try:
        made = making / "model"
        with progress_bar(line) as progress:
            convert(source, made, mmproj=mmproj, progress=progress)
        if _name(source, mmproj) != target.name:
            raise LoadError(
                f"load: expected {source} to stay as it is while it is converted, got other files "
                "or times; load it again when nobody writes to it"
            )
        os.rename(made, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
