"""What people name -> where it lies: a directory, .bin, checkpoint, GGUF file or Hugging Face id.

Ids are those of hub.py, what has to be converted is conversions.py's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bitnet_ops.arguments import check_path
from bitnet_ops.errors import BitNetError
from bitnet_ops.formats import gguf, sglbitnt
from bitnet_ops.loading.hub import check_on_hub, is_id, local_path, models_of

ENVIRONMENT = "BITNET_OPS_CACHE"


class LoadError(BitNetError, ValueError):
    """A path that holds no model; the message says what was looked for and found."""


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
        check_on_hub(path)
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
    ggufs = models_of(sorted(place.glob("*.gguf")))
    if weights:
        return place, "a Hugging Face checkpoint"
    if len(ggufs) == 1:
        return ggufs[0], "a GGUF file"
    found = f"{len(ggufs)} GGUF files; name one of them" if ggufs else "none"
    raise LoadError(
        f"load: expected {sglbitnt.MODEL_FILE}, a checkpoint or a GGUF file in the directory "
        f"{place}, got {found}"
    )


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
