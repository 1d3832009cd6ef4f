"""Reading a Hugging Face checkpoint folder: config.json and safetensors, whole or sharded.

Lists every tensor from the headers first, then hands them out one at a time, so that memory is
bounded by the largest tensor. Runs no code of the checkpoint: no pickles, no auto_map. It must not
know what a tensor means; that is decide.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from bitnet_ops.convert.errors import listed, refuse

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_JSON_LIMIT_BYTES = 64 << 20  # a shard index of the largest public models is a few MB
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class TensorRecord:
    """What a safetensors header says of one tensor; `dtype` as spelt there ("BF16", "U8")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


class Source:
    """An opened checkpoint folder.

    `config` is config.json as a dict, `tensors` maps every tensor's name to its TensorRecord.
    Raises ConvertError for anything that is not a complete, unambiguous safetensors checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            refuse("source-missing", "a folder with config.json and safetensors", str(folder))
        self.config = _read_object(self.folder / "config.json", "config-missing", "config-json")
        self._files = {name: _open(self.folder / name) for name in _weight_files(self.folder)}
        self.tensors = _records(self._files)
        _check_index(self.folder, self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`, in the dtype and shape of the file.

        It is a view of a mapping of its own: pages that were read stay in memory as long as their
        mapping does, which for one kept open would be the whole checkpoint.
        """
        file = self.tensors[name].file
        if file.endswith(".safetensors"):
            return _open(self.folder / file).get_tensor(name)
        return self._files[file].get_tensor(name)

    @property
    def weight_bytes(self) -> int:
        """The size of all weight files together."""
        return sum((self.folder / name).stat().st_size for name in self._files)

    def code_files(self) -> list[str]:
        """Python files beside the weights, which are never imported."""
        return sorted(path.name for path in self.folder.glob("*.py"))


def _read_object(path: Path, missing: str, malformed: str) -> dict[str, Any]:
    """A JSON file whose top level is an object."""
    if not path.is_file():
        refuse(missing, f"{path.name} in {path.parent}", "no such file", "is this a model folder?")
    if path.stat().st_size > _JSON_LIMIT_BYTES:
        refuse(malformed, f"{path.name} below 64 MiB", f"{path.stat().st_size} bytes")
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        refuse(malformed, f"valid JSON in {path.name}", str(error))
    if not isinstance(value, dict):
        refuse(malformed, f"a JSON object in {path.name}", type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a key twice among {listed([key for key, _ in pairs])}")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no JSON number")


def _weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files that make up the checkpoint."""
    single, index = (folder / SINGLE).is_file(), (folder / INDEX).is_file()
    if single and index:
        refuse(
            "ambiguous-weights",
            f"either {SINGLE} or {INDEX}",
            "both",
            "remove the set that does not belong to this config.json",
        )
    if single:
        return [SINGLE]
    if index:
        return _shard_names(folder, _weight_map(folder))
    _refuse_other_weights(folder)


def _refuse_other_weights(folder: Path) -> NoReturn:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        refuse(
            "pickle",
            f"{SINGLE} (a file that cannot run code)",
            listed(pickles),
            "pickled weights are never opened; save the model with safe_serialization=True",
        )
    ggufs = [name for name in names if name.endswith(".gguf")]
    found = listed(ggufs) if ggufs else "no weights"
    refuse("weights-missing", f"{SINGLE} or {INDEX} in {folder}", found)


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = _read_object(folder / INDEX, "index-json", "index-json").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        refuse("index-json", f"a non-empty object weight_map in {INDEX}", repr(weight_map)[:80])
    for file in weight_map.values():
        # A name with a separator could point anywhere on the machine.
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            refuse("index-path", f"plain *.safetensors names in {INDEX}", repr(file))
    return weight_map


def _shard_names(folder: Path, weight_map: dict[str, str]) -> list[str]:
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        refuse(
            "shard-missing",
            f"the {len(names)} files that {INDEX} names",
            f"without {listed(absent)}",
            "finish the download",
        )
    return names


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        refuse(
            "safetensors-corrupt",
            f"a valid safetensors file {path.name}",
            str(error),
            "download it again",
        )


def _records(files: dict[str, Any]) -> dict[str, TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for file, handle in files.items():
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            if name in records:
                where = f"{records[name].file} and {file}"
                refuse("duplicate-tensor", f"{name} in one file", f"it in {where}")
            view = handle.get_slice(name)
            records[name] = TensorRecord(name, view.get_dtype(), tuple(view.get_shape()), file)
    return records


def _check_index(folder: Path, records: dict[str, TensorRecord]) -> None:
    """The index and the shards' headers must say the same."""
    if not (folder / INDEX).is_file():
        return
    weight_map = _weight_map(folder)
    wrong = [n for n, file in weight_map.items() if n not in records or records[n].file != file]
    wrong += [n for n in records if n not in weight_map]
    if wrong:
        refuse(
            "index-mismatch",
            f"{INDEX} and the shards to name the same tensors",
            f"a disagreement about {listed(sorted(wrong))}",
        )
