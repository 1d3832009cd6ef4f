"""What people name -> a model file: a directory, .bin, checkpoint, GGUF file or Hugging Face id.

Checkpoints and GGUF files are converted once, into the cache directory, under a name that follows
from their files; whoever comes at the same time waits. Ids are downloaded by huggingface_hub, which
also decides whether anything may be downloaded (HF_HUB_OFFLINE). A path that exists is never an id.
"""

from __future__ import annotations

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
from typing import Any, NoReturn

from bitnet_ops.arguments import check_path
from bitnet_ops.errors import BitNetError, counted, install
from bitnet_ops.formats import gguf, sglbitnt
from bitnet_ops.untrusted import printable

ENVIRONMENT = "BITNET_OPS_CACHE"
CONVERTED = "converted"  # the folder of conversions in the cache directory
_VERSION = 3  # of what is converted how; raise it when conversions of old are not to be used
_REPORT = "report.json"
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "1_Pooling/config.json")

_OURS = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*-[0-9a-f]{32}")  # a name that `_name` makes

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_ENDINGS = (".bin", ".gguf", ".safetensors", ".json", ".txt")
# What a conversion reads of a checkpoint; weights in other formats and code are not downloaded.
_WEIGHTS = "*.safetensors"
_DOWNLOADED = [
    "config.json",
    _WEIGHTS,
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "1_Pooling/config.json",
]
# Beside the GGUF file of a model: its tower for images, layers that draft, importances of weights,
# the parts behind the first, and what macOS leaves on other disks.
_NO_MODEL = re.compile(r"(\.|mtp-).*|.*(mmproj|imatrix).*|.*-(?!00001)\d{5}-of-\d{5}\.gguf", re.I)

_log = logging.getLogger("bitnet_ops")


class LoadError(BitNetError, ValueError):
    """A path that holds no model; the message says what was looked for and found."""


class HubError(BitNetError, ValueError):
    """A model that is not to be had from the Hugging Face Hub; the message names a way out."""


@dataclass(frozen=True)
class Found:
    """A converted model file, and what it was converted from if it lies in the cache."""

    file: Path
    source: Path | None = None


def resolve(
    path: str | os.PathLike[str],
    *,
    convert: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> Found:
    """The model file that `path` means, converted into the cache directory if it has to be.

    `convert`: False takes converted models alone. `cache`: as of `cache_directory`.
    Raises LoadError, HubError, convert.ConvertError.
    """
    _check_id(path, convert)
    source = _source_at(local_path(path), convert)
    if isinstance(source, Found):
        return source
    return Found(_conversion(source, cache_directory(cache)), source)


def check_name(path: str | os.PathLike[str], *, convert: bool = True) -> None:
    """Raise what `resolve` raises of a name that means no model; nothing is made or downloaded.

    Also SglbitntError for a file that is none.
    """
    _check_id(path, convert)
    if is_id(path):
        _on_hub(os.fspath(path))
        return
    found = _source_at(local_path(path), convert)
    if isinstance(found, Found):
        sglbitnt.Reader(found.file, check_codes=False)


def _check_id(path: str | os.PathLike[str], convert: bool) -> None:
    if not convert and is_id(path):
        raise LoadError(
            f"load: expected a converted model at {path}, got no such file or directory (and a "
            "Hugging Face id would have to be converted)"
        )


def _source_at(place: Path, convert: bool) -> Path | Found:
    """What has to be converted at `place`, or the model that is there."""
    if not os.path.exists(place):  # False for a name that is too long
        raise LoadError(f"load: expected a model at {place}, got no such file or directory")
    source, kind = _to_convert(place)
    if source is None:
        return Found(sglbitnt.model_file(place))
    if not convert:
        raise LoadError(
            f"load: expected a converted model with {sglbitnt.MODEL_FILE} at {place}, got {kind}; "
            f"convert it first: bitnet-ops convert {source} DST"
        )
    return source


def convert_again(found: Found, why: Exception) -> Found:
    """The conversion `found`, which is damaged as `why` says, made anew."""
    assert found.source is not None
    target = found.file.parent
    _warn(target, why)
    shutil.rmtree(target)
    return Found(_conversion(found.source, target.parent.parent), found.source)


def _to_convert(place: Path) -> tuple[Path | None, str]:
    """The checkpoint folder or GGUF file that `place` is or holds, and what to call it."""
    if gguf.is_gguf(place):
        return place, "a GGUF file"
    if not place.is_dir() or (place / sglbitnt.MODEL_FILE).is_file():
        return None, ""
    weights = [*place.glob("[!.]*.safetensors"), *place.glob("pytorch_model*.bin")]
    ggufs = _models(sorted(place.glob("*.gguf")))
    if weights:
        return place, "a Hugging Face checkpoint"
    if len(ggufs) == 1:
        return ggufs[0], "a GGUF file"
    found = f"{len(ggufs)} GGUF files; name one of them" if ggufs else "none"
    raise LoadError(
        f"load: expected {sglbitnt.MODEL_FILE}, a checkpoint or a GGUF file in the directory "
        f"{place}, got {found}"
    )


def _models(files: list[Path]) -> list[Path]:
    """Those of GGUF files that hold a model by their names; all where none does."""
    return [file for file in files if not _NO_MODEL.fullmatch(file.name)] or files


# The cache of conversions -------------------------------------------------------------------------


def cache_directory(choice: str | os.PathLike[str] | None = None) -> Path:
    """Where conversions are kept: `choice`, or what BITNET_OPS_CACHE names, or the user's cache.

    The user's cache is bitnet_ops in $XDG_CACHE_HOME, or in ~/.cache without it.
    Raises LoadError where there is no home directory, TypeError for what is no path.
    """
    if isinstance(choice, bool):
        raise TypeError(
            f"load: expected cache to be a directory or None, got {choice}; repacked models are "
            "not kept in files any more, and convert=False keeps conversions out of the cache"
        )
    if choice is not None:
        return check_path("load: expected cache", choice)
    if given := os.environ.get(ENVIRONMENT):
        return Path(given)
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification of that variable has others ignored
        return Path(named) / "bitnet_ops"
    try:
        return Path.home() / ".cache" / "bitnet_ops"
    except RuntimeError:
        raise LoadError(
            f"load: expected a home directory, got none; set {ENVIRONMENT} to a directory"
        ) from None


def _conversion(source: Path, cache: Path) -> Path:
    """The model file of `source` in the cache, converted now if it is not there."""
    root = cache / CONVERTED
    target = root / _name(source)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_whole(target):
            with _turn(target):
                if not _is_whole(target):  # no other process made it meanwhile
                    _convert(source, target)
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


def _name(source: Path) -> str:
    """A name for people, then the hash of all that the conversion depends on.

    Of every file its size and both its times: whoever changes data in place can reset the time of
    modification, but not the time at which the system saw the change.
    """
    files = [source]
    if source.is_dir():
        files = sorted({file for p in _CHECKPOINT_FILES for file in source.glob(p)})
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


def _convert(source: Path, target: Path) -> None:
    """Convert `source`; `target` appears whole."""
    from bitnet_ops.convert import convert  # only who converts needs the converter
    from bitnet_ops.convert.progress import progress_bar

    for left in target.parent.glob(f".{target.name}.making-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        _warn(target, "some of its files")
        shutil.rmtree(target)
    told = f"converting {source} (once; kept in {target.parent})"
    _log.info(told)
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    if on_terminal:
        print(printable(told), file=sys.stderr)  # noqa: T201 (cli/terminal.py is above)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
    try:
        made = making / "model"
        with progress_bar(told) as progress:
            convert(source, made, progress=progress)
        if _name(source) != target.name:
            raise LoadError(
                f"load: expected {source} to stay as it is while it is converted, got other files "
                "or times; load it again when nobody writes to it"
            )
        os.rename(made, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


# Hugging Face ids ---------------------------------------------------------------------------------


def is_id(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has the form of a Hugging Face id and names nothing on this machine."""
    text = os.fspath(path)
    if not _ID.fullmatch(text) or text.endswith(_FILE_ENDINGS):
        return False
    return not os.path.lexists(text)


def local_path(path: str | os.PathLike[str]) -> Path:
    """`path` itself, or where the model with the id `path` lies, after a download if need be.

    Of an id: the folder of the checkpoint, or its GGUF file where it has that and no safetensors.
    Raises HubError: huggingface_hub is not installed, must not or cannot reach the hub, there is no
    such model, or it has several GGUF files.
    """
    if not is_id(path):
        return _snapshot(Path(path))
    repo = os.fspath(path)
    wanted = _on_hub(repo)
    if isinstance(wanted, Path):
        return wanted
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=wanted))
    except Exception as error:
        _reject(repo, "to download it from the Hugging Face Hub", _first_line(error))
    return _chosen(folder)


def _on_hub(repo: str) -> Path | list[str]:
    """The patterns of the files to download of a model; where it lies, if they are not to be had.

    Raises as `local_path`.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError:
        _reject(repo, "huggingface_hub to download it with", "none", install("hub"))
    if constants.HF_HUB_OFFLINE:
        found = _downloaded_before(huggingface_hub, repo)
        if found is None:
            _reject(repo, "it on this machine, for HF_HUB_OFFLINE is set", "no copy of it")
        return found
    try:
        names = huggingface_hub.HfApi().list_repo_files(repo)
    except Exception as error:  # whatever the library's HTTP client raises; it changes over time
        found = _downloaded_before(huggingface_hub, repo)
        if found is None:
            _reject(repo, "it from the Hugging Face Hub", _first_line(error))
        return found
    return _wanted(repo, names)


def _snapshot(folder: Path) -> Path:
    """`folder`, or the revision in it if it is the models--ORG--NAME of the hub's cache."""
    snapshots = folder / "snapshots"
    if not folder.name.startswith("models--") or not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    names = sorted(one.name for one in snapshots.iterdir() if one.is_dir())
    with suppress(OSError, ValueError):
        revision = main.read_text().strip()
        names = [revision] if revision in names else names
    if len(names) != 1:
        found = f"{len(names)} of them in {snapshots}"
        raise HubError(f"hub: expected one revision, got {found}; give the folder of one")
    return _chosen(snapshots / names[0])


def _wanted(repo: str, names: list[str]) -> list[str]:
    """The patterns of the files to get of a repository that has the files `names`.

    In them * stands for "/" too; other folders of a repository hold the weights once more.
    """
    weights = [name for name in names if name.endswith(".safetensors")]
    if top := [name for name in weights if "/" not in name]:
        top = [name for name in top if not name.startswith("consolidated")] or top  # once more
        return _DOWNLOADED if top == weights else [p for p in _DOWNLOADED if p != _WEIGHTS] + top
    found = _models([Path(name) for name in names if name.endswith(".gguf")])
    ggufs = sorted(map(str, found))
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        listed = ", ".join(ggufs[:4]) + (f" and {len(ggufs) - 4} more" if ggufs[4:] else "")
        one = f"choose one: `hf download {repo} {ggufs[0]}` prints a path to give instead"
        raise HubError(
            f"hub: expected {repo} to have safetensors or one GGUF file, got {listed}; {one}"
        )
    raise HubError(
        f"hub: expected {repo} to have safetensors or a GGUF file, got "
        f"{counted(len(names), 'other file')}; pickled weights are converted from a folder: "
        "bitnet-ops convert --allow-pickle"
    )


def _downloaded_before(huggingface_hub: Any, repo: str) -> Path | None:
    """What an earlier download has left, asking nobody."""
    try:
        return _chosen(Path(huggingface_hub.snapshot_download(repo, local_files_only=True)))
    except (OSError, ValueError):
        return None


def _chosen(folder: Path) -> Path:
    """The folder, or the one GGUF file in it if there are no safetensors."""
    ggufs = _models(sorted(folder.rglob("*.gguf")))
    return ggufs[0] if len(ggufs) == 1 and not any(folder.glob("*.safetensors")) else folder


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _reject(repo: str, expected: str, found: str, remedy: str = "") -> NoReturn:
    elsewhere = f"download it where that is possible (`hf download {repo}`) and give the folder"
    ways = f"{remedy}, or {elsewhere}" if remedy else elsewhere
    raise HubError(
        f"hub: {repo} is no path on this machine, so it was taken for a Hugging Face id: expected "
        f"{expected}, got {found}; {ways}"
    ) from None
