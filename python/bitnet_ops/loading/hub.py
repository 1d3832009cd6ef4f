"""Models by their Hugging Face id, "org/name": the folder or file that huggingface_hub has or gets.

A path that exists is never an id. Whether anything may be downloaded is huggingface_hub's to say
(HF_HUB_OFFLINE), where it keeps what it gets too. It must not know what a model's files hold.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_ENDINGS = (".bin", ".gguf", ".safetensors", ".json", ".txt")
# What a conversion reads of a checkpoint; weights in other formats and code stay where they are.
_CHECKPOINT = [
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "1_Pooling/config.json",
]


class HubError(ValueError):
    """A model that is not to be had from the Hugging Face Hub; the message names a way out."""


def is_id(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has the form of a Hugging Face id and names nothing on this machine."""
    text = os.fspath(path)
    if not _ID.fullmatch(text) or text.endswith(_FILE_ENDINGS):
        return False
    return not os.path.lexists(text)


def local(path: str | os.PathLike[str]) -> Path:
    """`path` itself, or where the model with the id `path` lies after a download if need be.

    Raises HubError for an id whose files are not to be had.
    """
    return fetch(os.fspath(path)) if is_id(path) else Path(path)


def fetch(repo: str) -> Path:
    """The folder of the checkpoint `repo`, or its GGUF file where it has that and no safetensors.

    Raises HubError: huggingface_hub is not installed, must not or cannot reach the hub, there is no
    such model, or it has several GGUF files.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError:
        _reject(
            repo, "huggingface_hub to download it with", "none", "pip install 'bitnet-ops[hub]'"
        )
    if constants.HF_HUB_OFFLINE:
        found = _on_this_machine(huggingface_hub, repo)
        if found is None:
            _reject(repo, "it on this machine, for HF_HUB_OFFLINE is set", "no copy of it")
        return found
    try:
        names = huggingface_hub.HfApi().list_repo_files(repo)
    except Exception as error:  # whatever the library's HTTP client raises; it changes over time
        found = _on_this_machine(huggingface_hub, repo)
        if found is None:
            _reject(repo, "it from the Hugging Face Hub", _first_line(error))
        return found
    patterns = _wanted(repo, names)
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:
        _reject(repo, "to download it from the Hugging Face Hub", _first_line(error))
    return _chosen(folder)


def _wanted(repo: str, names: list[str]) -> list[str]:
    """The patterns of the files to get of a repository that has the files `names`."""
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        return _CHECKPOINT
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        listed = ", ".join(ggufs[:4]) + (f" and {len(ggufs) - 4} more" if ggufs[4:] else "")
        one = f"choose one: `hf download {repo} {ggufs[0]}` prints a path to give instead"
        raise HubError(
            f"hub: expected {repo} to have safetensors or one GGUF file, got {listed}; {one}"
        )
    raise HubError(
        f"hub: expected {repo} to have safetensors or a GGUF file, got {len(names)} other files; "
        "pickled weights are converted from a folder: bitnet-ops convert --allow-pickle"
    )


def _on_this_machine(huggingface_hub: Any, repo: str) -> Path | None:
    """What an earlier download has left, asking nobody."""
    try:
        return _chosen(Path(huggingface_hub.snapshot_download(repo, local_files_only=True)))
    except (OSError, ValueError):
        return None


def _chosen(folder: Path) -> Path:
    """The folder, or the one GGUF file in it if there are no safetensors."""
    ggufs = sorted(folder.rglob("*.gguf"))
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
