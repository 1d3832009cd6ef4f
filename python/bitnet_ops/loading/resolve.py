"""What people name -> where it lies: a directory, .bin, checkpoint, GGUF file or Hugging Face id.

Ids are downloaded by huggingface_hub, which also decides whether anything may be downloaded
(HF_HUB_OFFLINE). A path that exists is never an id. What has to be converted is
conversions.py's.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bitnet_ops.arguments import check_path
from bitnet_ops.errors import BitNetError, counted, install
from bitnet_ops.formats import gguf, sglbitnt

ENVIRONMENT = "BITNET_OPS_CACHE"

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
    "preprocessor_config.json",
    "processor_config.json",
]
# Beside the GGUF file of a model: its tower for images, layers that draft, importances of weights,
# the parts behind the first, and what macOS leaves on other disks.
_NO_MODEL = re.compile(r"(\.|mtp-).*|.*(mmproj|imatrix).*|.*-(?!00001)\d{5}-of-\d{5}\.gguf", re.I)


class LoadError(BitNetError, ValueError):
    """A path that holds no model; the message says what was looked for and found."""


class HubError(BitNetError, ValueError):
    """A model that is not to be had from the Hugging Face Hub; the message names a way out."""


@dataclass(frozen=True)
class Found:
    """A converted model file, and what it was converted from if it lies in the cache.

    mmproj: the file that its tower for pictures was taken from, if one was named.
    """

    file: Path
    source: Path | None = None
    mmproj: Path | None = None


def find(path: str | os.PathLike[str], convert: bool) -> Path | Found:
    """The model that `path` means, or what has to be converted first: a folder, a GGUF file.

    convert: False takes converted models alone. Raises LoadError, HubError.
    """
    _check_id(path, convert)
    return _source_at(local_path(path), convert)


def check_name(path: str | os.PathLike[str], *, convert: bool = True) -> None:
    """Raise what `find` raises of a name that means no model; nothing is made or downloaded.

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


def mmproj_beside(file: Path) -> list[Path]:
    """The GGUF files in the folder of the GGUF file `file` that hold a tower for images."""
    others = (other for other in sorted(file.parent.glob("*.gguf")) if other.name != file.name)
    return [other for other in others if gguf.is_mmproj(other)]


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
