"""What people have -> a converted model file: a directory, .bin, checkpoint, GGUF file or id.

Checkpoints and GGUF files are converted once, into the cache directory, under a name that follows
from their files; whoever comes at the same time waits. Files of the cache are used if they are this
user's alone, and made again if not. It must not know what is in a model.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bitnet_ops import _runtime
from bitnet_ops.formats import gguf, sglbitnt
from bitnet_ops.loading import cache_files, hub
from bitnet_ops.loading.cache_files import CacheError, PrivateDirectory

CONVERTED = "converted"  # the folder of conversions in the cache directory
_VERSION = 1  # of what is converted how; raise it when conversions of old are not to be used
_REPORT = "report.json"
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "1_Pooling/config.json")
_SMALL_BYTES = 32 << 20  # smaller files are hashed whole, of larger ones samples
_SAMPLES, _SAMPLE_BYTES = 64, 4096

_log = logging.getLogger("bitnet_ops")


class LoadError(ValueError):
    """A path that holds no model; the message says what was looked for and found."""


@dataclass(frozen=True)
class Found:
    """A converted model file, and what it was converted from if it lies in the cache."""

    file: Path
    source: Path | None = None


def obtain(
    path: str | os.PathLike[str],
    *,
    convert: bool = True,
    cache: bool | str | os.PathLike[str] | None = None,
) -> Found:
    """The model file that `path` means, converted into the cache directory if it has to be.

    `convert`: False takes converted models alone. `cache`: as `cache_files.directory` has it, but
    None is the user's cache directory, and False no place for conversions.
    Raises LoadError, hub.HubError, convert.ConvertError.
    """
    place = _local(path, convert)
    if not place.exists():
        raise LoadError(f"load: expected a model at {place}, got no such file or directory")
    source, what = _to_convert(place)
    if source is None:
        return Found(sglbitnt.model_file(place))
    by_hand = f"bitnet-ops convert {source} DST"
    if not convert:
        raise LoadError(
            f"load: expected a converted model with {sglbitnt.MODEL_FILE} at {place}, got {what}; "
            f"convert it first: {by_hand}"
        )
    root = cache_files.directory(True if cache is None else cache)
    if root is None:
        raise LoadError(
            f"load: expected a cache directory to convert {what} into, got cache=False; convert it "
            f"yourself: {by_hand}"
        )
    return Found(_conversion(source, root), source)


def convert_again(found: Found, why: Exception) -> Found:
    """The conversion `found`, which is damaged as `why` says, made anew."""
    assert found.source is not None
    _warn(found.file.parent, why)
    shutil.rmtree(found.file.parent)
    return Found(_conversion(found.source, found.file.parent.parent.parent), found.source)


def _local(path: str | os.PathLike[str], convert: bool) -> Path:
    if not convert and hub.is_id(path):
        raise LoadError(
            f"load: expected a converted model at {path}, got no such file or directory (and a "
            "Hugging Face id would have to be converted)"
        )
    return hub.local(path)


def _to_convert(place: Path) -> tuple[Path | None, str]:
    """The checkpoint folder or GGUF file that `place` is or holds, and what to call it."""
    if gguf.is_gguf(place):
        return place, "a GGUF file"
    if not place.is_dir() or (place / sglbitnt.MODEL_FILE).is_file():
        return None, ""
    weights = [*place.glob("*.safetensors"), *place.glob("pytorch_model*.bin")]
    ggufs = sorted(place.glob("*.gguf"))
    if weights:
        return place, "a Hugging Face checkpoint"
    if len(ggufs) == 1:
        return ggufs[0], "a GGUF file"
    found = f"{len(ggufs)} GGUF files; name one of them" if ggufs else "none"
    raise LoadError(
        f"load: expected {sglbitnt.MODEL_FILE}, a checkpoint or a GGUF file in the directory "
        f"{place}, got {found}"
    )


# The cache of conversions -------------------------------------------------------------------------


def _conversion(source: Path, cache: Path) -> Path:
    """The model file of `source` in the cache, converted now if it is not there."""
    root = cache / CONVERTED
    try:
        for place in (cache, root):
            PrivateDirectory(place, make=True).close()
        target = root / _name(source)
        if _problem(target) is not None:
            with _turn(target):
                why = _problem(target)  # somebody else may have made it meanwhile
                if why is not None:
                    _convert(source, target, why)
    except (OSError, CacheError) as error:
        raise LoadError(
            f"load: expected room for a conversion of {source} in {root}, got {error}; name a "
            f"directory of your own (mode 700) by cache= or {cache_files.ENVIRONMENT}, or convert "
            f"it yourself: bitnet-ops convert {source} DST"
        ) from error
    return target / sglbitnt.MODEL_FILE


def _name(source: Path) -> str:
    """A name for people, then the hash of all that the conversion depends on.

    Of every file its size and both its times, for data changed in place by somebody who resets the
    time of change; the content of small files, and samples of large ones, headers included.
    """
    files = [source]
    if source.is_dir():
        files = sorted({file for p in _CHECKPOINT_FILES for file in source.glob(p)})
    about: list[object] = [_VERSION, importlib.metadata.version("bitnet-ops")]
    for file in files:
        status = file.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        name = file.relative_to(source).as_posix()
        about.append([name, status.st_size, *times, _sampled(file, status.st_size)])
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    name = source.name if source.is_dir() else source.stem  # bitnet-b1.58-2B-4T has no ending
    return re.sub(r"[^A-Za-z0-9._-]", "_", name or "model").lstrip(".")[:40] + f"-{key}"


def _sampled(file: Path, size: int) -> str:
    with open(file, "rb") as opened:
        if size <= _SMALL_BYTES:
            return _runtime.xxh3_128(opened.read()).hex()
        pieces = []
        for i in range(_SAMPLES + 1):
            opened.seek((size - _SAMPLE_BYTES) * i // _SAMPLES)
            pieces.append(opened.read(_SAMPLE_BYTES))
    return _runtime.xxh3_128(b"".join(pieces)).hex()


def _problem(target: Path) -> str | None:
    """Why there is no whole conversion of this user's at `target`; "" if nothing is there."""
    if not os.path.lexists(target):
        return ""
    try:
        if target.is_symlink():
            raise CacheError("a link")
        with PrivateDirectory(target) as folder:
            with folder.open(_REPORT) as report:
                names = json.load(report)["files"]
            for name in {sglbitnt.MODEL_FILE, *names}:
                folder.open(name).close()
        return None
    except (OSError, CacheError, ValueError, TypeError, LookupError, RecursionError) as error:
        return str(error) or type(error).__name__


def _warn(target: Path, why: object) -> None:
    warnings.warn(
        f"cache: expected a converted model in {target}, got {why}; it is made again", stacklevel=3
    )


@contextmanager
def _turn(target: Path) -> Iterator[None]:
    """One process at a time makes `target`."""
    name = f".{target.name}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(target.with_name(name), flags, 0o600)
    try:
        try:
            cache_files.lock(descriptor, wait=True)
        except OSError:
            _log.debug("no locks in %s: two processes may do the same work", target.parent)
        yield
    finally:
        os.close(descriptor)


def _convert(source: Path, target: Path, why: str) -> None:
    """Convert `source`; `target` appears whole, and readable to this user alone.

    `why`: what is wrong with what is there, if anything is.
    """
    from bitnet_ops.convert import convert, convert_gguf
    from bitnet_ops.convert.progress import progress_bar

    for left in target.parent.glob(f".{target.name}.making-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    if why:
        _warn(target, why)
    told = f"converting {source} (once; kept in {target.parent})"
    _log.info(told)
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    if on_terminal:
        print(told, file=sys.stderr)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
    try:
        made = making / "model"
        with progress_bar(enabled=on_terminal) as progress:
            work = convert if source.is_dir() else convert_gguf
            work(source, made, progress=progress)
        if _name(source) != target.name:
            raise LoadError(
                f"load: expected {source} to stay as it is while it is converted, got other files "
                "or times; load it again when nobody writes to it"
            )
        for file in made.iterdir():
            file.chmod(0o600)
        made.chmod(0o700)
        if os.path.lexists(target):
            os.rename(target, making / "no good")
        os.rename(made, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
