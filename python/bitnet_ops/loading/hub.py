"""Models by their Hugging Face ids: what is downloaded of a repository, and where it lies.

They are downloaded by huggingface_hub, which also decides whether anything may be downloaded
(HF_HUB_OFFLINE). A path that exists is never an id.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from bitnet_ops.config.families import FAMILIES
from bitnet_ops.errors import BitNetError, counted, install
from bitnet_ops.formats import gguf

# with one of several GGUF files behind a colon, as llama.cpp's and Ollama's users name them
_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w.-]{1,128}))?")
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
# general.architecture of GGUF files whose models read pictures with a tower beside them
_READ_PICTURES = {name for family in FAMILIES if family.hybrid for name in family.gguf}


class HubError(BitNetError, ValueError):
    """A model that is not to be had from the Hugging Face Hub; the message names a way out."""


def models_of(files: list[Path]) -> list[Path]:
    """Those of GGUF files that hold a model by their names; all where none does."""
    return [file for file in files if not _NO_MODEL.fullmatch(file.name)] or files


def is_id(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has the form of a Hugging Face id and names nothing on this machine."""
    text = os.fspath(path)
    match = _ID.fullmatch(text)
    if match is None or match[1].endswith(_FILE_ENDINGS):
        return False
    return not os.path.lexists(text)


def _parts(name: str) -> tuple[str, str]:
    """The repository of an id, and which of its GGUF files is meant, "" if that is not said."""
    match = _ID.fullmatch(name)
    assert match is not None
    return match[1], (match[2] or "").removesuffix(".gguf")


def local_path(path: str | os.PathLike[str]) -> Path:
    """`path` itself, or where the model with the id `path` lies, after a download if need be.

    Of an id: the folder of the checkpoint, or its GGUF file where it has that and no safetensors,
    or where `org/name:WORD` says which; with it the tower of a model that reads pictures.
    Raises HubError: huggingface_hub is not installed, must not or cannot reach the hub, there is no
    such model, or it has several GGUF files.
    """
    if not is_id(path):
        return _snapshot(Path(path))
    repo, which = _parts(os.fspath(path))
    names = _on_hub(repo, which)
    if isinstance(names, Path):
        return names
    wanted = _wanted(repo, which, names)
    place = _chosen(_downloaded(repo, wanted), which)
    towers = _towers_beside(wanted[0], names)
    if towers and _reads_pictures(place):
        _downloaded(repo, [min(towers, key=_download_order)])
    return place


def check_on_hub(path: str | os.PathLike[str]) -> None:
    """Raise what `local_path` raises of an id without a download."""
    repo, which = _parts(os.fspath(path))
    names = _on_hub(repo, which)
    if not isinstance(names, Path):
        _wanted(repo, which, names)


def _towers_beside(model: str, names: list[str]) -> list[str]:
    """The towers for images in the folder of the GGUF file `model`, by their names."""
    folder = Path(model).parent
    found = (name for name in names if Path(name).parent == folder)
    return [name for name in found if re.search(r"mmproj.*\.gguf$", name, re.I)]


def _reads_pictures(place: Path) -> bool:
    """Whether it is a GGUF file of such a model; what is wrong with one its conversion says."""
    if not gguf.is_gguf(place):
        return False
    with suppress(gguf.GgufError), gguf.Reader(place) as reader:
        return reader.architecture in _READ_PICTURES
    return False


def _download_order(tower: str) -> tuple[int, str]:
    """The one that makers of models publish first: all are widened when they are converted."""
    kinds = ("q8_0", "f16", "bf16")
    found = [i for i, kind in enumerate(kinds) if kind in re.split(r"[-.]", tower.lower())]
    return min(found, default=len(kinds)), tower


def _downloaded(repo: str, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:
        _reject(repo, "to download it from the Hugging Face Hub", _first_line(error))


def _on_hub(repo: str, which: str) -> Path | list[str]:
    """The names of a repository's files; where the model lies, if they are not to be had.

    Raises as `local_path`.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError:
        _reject(repo, "huggingface_hub to download it with", "none", install("hub"))
    if constants.HF_HUB_OFFLINE:
        found = _downloaded_before(huggingface_hub, repo, which)
        if found is None:
            _reject(repo, "it on this machine, for HF_HUB_OFFLINE is set", "no copy of it")
        return found
    try:
        return list(huggingface_hub.HfApi().list_repo_files(repo))
    except Exception as error:  # whatever the library's HTTP client raises; it changes over time
        found = _downloaded_before(huggingface_hub, repo, which)
        if found is None:
            _reject(repo, "it from the Hugging Face Hub", _first_line(error))
        return found


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


def _wanted(repo: str, which: str, names: list[str]) -> list[str]:
    """The patterns of the files to get of a repository that has the files `names`.

    In them * stands for "/" too; other folders of a repository hold the weights once more.
    """
    weights = [name for name in names if name.endswith(".safetensors")]
    if (top := [name for name in weights if "/" not in name]) and not which:
        top = [name for name in top if not name.startswith("consolidated")] or top  # once more
        return _DOWNLOADED if top == weights else [p for p in _DOWNLOADED if p != _WEIGHTS] + top
    found = models_of([Path(name) for name in names if name.endswith(".gguf")])
    if not found:
        raise HubError(
            f"hub: expected {repo} to have safetensors or a GGUF file, got "
            f"{counted(len(names), 'other file')}; pickled weights are converted from a folder: "
            "bitnet-ops convert --allow-pickle"
        )
    return [_one_of(repo, which, found).as_posix()]


def _one_of(repo: str, which: str, files: list[Path]) -> Path:
    """The one of GGUF files that is meant. Raises HubError."""
    named = _named(which, files)
    if len(named) == 1:
        return named[0]
    listed = ", ".join(str(file) for file in files[:4])
    more = f" and {len(files) - 4} more" if files[4:] else ""
    one = f"one GGUF file with {which} in its name" if which else "safetensors or one GGUF file"
    example = files[0].stem.rpartition("-")[2]
    if len(_named(example, files)) != 1:
        example = files[0].stem
    raise HubError(
        f"hub: expected {repo} to have {one}, got {listed}{more}; name one behind a colon: "
        f"{repo}:{example}"
    )


def _named(which: str, files: list[Path]) -> list[Path]:
    """Files whose names are `which`, or end with it, or have it in them, whole words of any case.

    A name that ends with it comes first: a bundle names its layer that drafts behind it.
    """
    if not which:
        return files
    word = re.escape(which)
    for pattern in (word, rf"(.*[-._])?{word}", rf"(.*[-._])?{word}([-._].*)?"):
        if found := [file for file in files if re.fullmatch(pattern, file.stem, re.I)]:
            return found
    return []


def _downloaded_before(huggingface_hub: Any, repo: str, which: str) -> Path | None:
    """What an earlier download has left, asking nobody."""
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    except (OSError, ValueError):
        return None
    return _chosen(folder, which)


def _chosen(folder: Path, which: str = "") -> Path:
    """The folder, or the one GGUF file in it if there are no safetensors, or that is meant."""
    found = models_of(sorted(folder.rglob("*.gguf")))
    if not which and any(folder.glob("*.safetensors")):
        return folder
    named = _named(which, found)
    if which and len(named) != 1:
        raise HubError(
            f"hub: expected one GGUF file with {which} in its name in {folder}, got {len(named)}"
        )
    return named[0] if len(named) == 1 else folder


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
