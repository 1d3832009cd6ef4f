"""Reading a Hugging Face checkpoint folder: config.json and safetensors, whole or sharded, or MLX.

Lists every tensor from the headers first, then hands them out one at a time, so that memory is
bounded by the largest tensor. Runs no code of the checkpoint: no auto_map, and pickles only on
request, as tensors alone. What a tensor means is decided in plan.py.

MLX packages of 2-bit ternary weights are seen as the floating tensors that they stand for. A
quantised module has weight uint32 [N, K / 16] (16 codes a word, the lowest bits first), scales and
biases [N, K / group_size]; a weight is code * scale + bias. Ternary ones have bias = -scale, so
that codes 0, 1, 2 mean -1, 0, +1 and code 3 nothing; anything else is rejected. Values are exact in
the dtype of the scales. Source: MLX's documentation of `quantize`.
"""

from __future__ import annotations

import dataclasses
import pickletools
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitnet_ops.config import UnsupportedModelError
from bitnet_ops.config.hybrid import ROTATION, flat, passed_over, written_rotation
from bitnet_ops.convert.errors import ConvertError, listed, reject
from bitnet_ops.convert.hybrid import (
    PACKAGE,
    PackageRotation,
    draft_name,
    own_name,
    read_package,
)
from bitnet_ops.convert.source import reject_changed, stamp
from bitnet_ops.formats.destination import TOKENIZER_FILES
from bitnet_ops.generate.tokenizer import CONFIG_FILE, TEMPLATE_FILE
from bitnet_ops.untrusted import (
    LFS_POINTER,
    SAFETENSORS_HEADER_BYTES,
    UntrustedFileError,
    check_links,
    check_safetensors_header,
    is_lfs_pointer,
    parse_json,
    read_json_object,
    read_text,
)

SINGLE = "model.safetensors"
DRAFT_FILE = "mtp/weights.safetensors"  # of MLX packages, where nothing else globs it
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
_PROCESSOR = "processor_config.json"  # where transformers 5 writes both
_OLD_TEMPLATE, _NAMED_TEMPLATES = "chat_template.json", "additional_chat_templates"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
# JSON takes some twenty times its size as objects, and headers are parsed by others; all limits are
# several times what the largest public models need.
_CONFIG_LIMIT_BYTES = 1 << 20  # what a model file can hold of it
_INDEX_LIMIT_BYTES = 16 << 20
_MAX_TENSORS = 1 << 16
# Pages that were read stay in memory as long as their mapping does, and mapping a file anew parses
# its header: once so many bytes a byte of header were read, that costs little beside reading them.
_REMAP_SHARE = 16


@dataclass(frozen=True)
class TensorRecord:
    """What a safetensors header says of one tensor; `dtype` as spelt there ("BF16", "U8")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


class Checkpoint:
    """An opened checkpoint folder.

    `config` is config.json as a dict, `tensors` maps every tensor's name to its TensorRecord.
    `allow_pickle`: where there are no safetensors, take pytorch_model.bin or its shards; `pickled`
    says that this happened. `drafts_alone`: of shards open those alone that hold layers which draft
    tokens; the others need not be there, and `tensors` has none of theirs. `packed_mlx`: the shapes
    of the weights that an MLX package holds in 2 bits; `config` and `tensors` are then those of the
    floating checkpoint. `found`: of the private block, the rotation of a package that has one.
    `remarks`: what of config.json was not read. A nested config.json is seen flat; `published` is
    the one in the folder. Raises ConvertError for anything that is not a complete, unambiguous
    checkpoint.
    """

    def __init__(
        self, folder: str | Path, *, allow_pickle: bool = False, drafts_alone: bool = False
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            found = "a file" if self.folder.exists() else "no such file or directory"
            where = f"a folder with config.json and safetensors at {folder}"
            ours = self.folder.suffix == ".safetensors" and self.folder.exists()
            reject("source-missing", where, found, "name the folder that it is in" if ours else "")
        config, adapter = self.folder / "config.json", self.folder / "adapter_config.json"
        if adapter.is_file() and not config.is_file():
            reject("config-missing", f"config.json in {folder}", "a LoRA adapter",
                   "name the model it is for, and this folder by --lora")  # fmt: skip
        self.config = _read_object(self.folder, "config.json", "config-missing", "config-json")
        self.published = self.config
        _reject_folded(self.folder, self.config)
        names, index = _weight_files(self.folder, allow_pickle, drafts_alone)
        if is_mlx(self.config) and (self.folder / DRAFT_FILE).is_file():
            names = [*names, DRAFT_FILE]
        _check_links(self.folder, names)
        self.pickled = not names[0].endswith(".safetensors")
        self._files = {name: _open(self.folder / name) for name in names}
        self.tensors = _records(self._files)
        if index is not None:
            _check_index(self.folder, index, self.tensors, set(names))
        self.packed_mlx: dict[str, tuple[int, int]] = {}
        self.found: dict[str, Any] = {}
        self.remarks: list[str] = []
        self._rotation: PackageRotation | None = None
        if self.config.get("model_type") == PACKAGE:
            self.config, blocks = read_package(self.config)
            self._see_mlx()
            self._see_rotation(blocks)
        elif is_mlx(self.config):
            self._see_mlx()
        if passed := passed_over(self.config):
            self.remarks.append(
                f"keys of config.json beside text_config not read: {listed(passed)}"
            )
        try:
            self.config = dict(flat(self.config))
        except UnsupportedModelError as error:
            raise ConvertError("unsupported-model", f"convert: {error}") from error

    def _see_rotation(self, blocks: dict[str, int]) -> None:
        """Let the signs of a package, one vector for a matrix, be one tensor for a width."""
        shapes = {name: (r.dtype, r.shape) for name, r in self._stored.items()}
        self._rotation = PackageRotation(blocks, self.packed_mlx, shapes)
        self.tensors = {n: r for n, r in self.tensors.items() if not n.endswith(".signs")}
        rotation = self._rotation.rotation
        for name, shape in (rotation.shapes if rotation else {}).items():
            self.tensors[name] = TensorRecord(name, "F32", shape, next(iter(self._files)))
        if rotation is not None:
            self.found["rotation"] = written_rotation(rotation)

    def _see_mlx(self) -> None:
        """Let an MLX package look like the floating checkpoint that it stands for."""
        self.config = _mlx_plain_config(self.config)
        stored = self.tensors
        self.packed_mlx = _mlx_quantized({n: (r.dtype, r.shape) for n, r in stored.items()})
        parts = {part for name in self.packed_mlx for part in _mlx_parts(name)}
        self.tensors = {n: record for n, record in stored.items() if n not in parts}
        for name, shape in self.packed_mlx.items():
            dtype = stored[_mlx_parts(name)[0]].dtype
            self.tensors[name] = dataclasses.replace(stored[name], dtype=dtype, shape=shape)
        self._stored = stored

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`, in the dtype and shape of the file; a view of its mapping.

        Of an MLX package the values that it stands for, made anew at each call.

        Raises ConvertError("source-changed") if the file is no longer the one that was opened.
        """
        if name in self.packed_mlx:
            return _mlx_dequantized(name, self._as_stored)
        if self._rotation is not None and name.startswith(ROTATION):
            return self._rotation.signs(name, self._as_stored)
        return self._files[self.tensors[name].file].get_tensor(name)

    def unwritten_rows(self, name: str) -> int:
        """Rows of an MLX package's matrix whose codes and scales are zero bytes; 0 for others."""
        if name not in self.packed_mlx:
            return 0
        words, scales = (self._as_stored(part) for part in (name, _mlx_parts(name)[0]))
        written = (words != 0).any(dim=1) | (scales != 0).any(dim=1)
        return int((~written).sum())

    def _as_stored(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._stored[name].file].get_tensor(name)
        return tensor

    def preprocessor(self) -> tuple[dict[str, Any] | None, dict[str, Path]]:
        """What the folder says of the pixels of images, and the file that says so."""
        for name, key in (("preprocessor_config.json", None), (_PROCESSOR, "image_processor")):
            if not (self.folder / name).is_file():
                continue
            found = _read_object(self.folder, name, "preprocessor", "preprocessor")
            inner = found if key is None else found.get(key)
            if isinstance(inner, dict):
                return inner, {name: self.folder / name}
        return None, {}

    @property
    def weight_bytes(self) -> int:
        """The size of all weight files together."""
        return sum((self.folder / name).stat().st_size for name in self._files)

    @property
    def framework(self) -> str | None:
        """What the safetensors say of their writer: "pt" or "mlx", None where they are silent."""
        return next(iter(self._files.values())).framework

    def code_files(self) -> list[str]:
        """Python files beside the weights, which are never imported."""
        return sorted(p.name for p in self.folder.glob("*.py") if not p.name.startswith("."))


# What sentence-transformers does with a model, as far as `embed` does it too.
_MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_POOLING = "1_Pooling"  # where there is no modules.json


def check_embedding(folder: Path) -> None:
    """Reject an embedding model whose sentence-transformers files ask for more than `embed` does.

    That is the last token's state at length 1: no other pooling, no layer behind it, no prompt in
    front of a text by default, no lower case. Sources: sentence-transformers' Pooling (absent
    settings mean the mean of all tokens), its modules.json and config_sentence_transformers.json.
    """
    pooling = f"{_pooling_folder(folder)}/config.json"
    if (folder / pooling).is_file() or (folder / "modules.json").is_file():
        modes = _pooling_modes(_read_object(folder, pooling, "pooling", "pooling"))
        if modes != ["lasttoken"]:
            reject("pooling", f"last-token pooling in {pooling}", listed(modes) or "none",
                   "other poolings are not implemented")  # fmt: skip
    asks = {
        "config_sentence_transformers.json": "default_prompt_name",
        "sentence_bert_config.json": "do_lower_case",
    }
    for name, key in asks.items():
        there = (folder / name).is_file()
        settings = _read_object(folder, name, "embedding", "embedding") if there else {}
        if settings.get(key) not in (None, False):
            reject("embedding", f"{name} without {key}", repr(settings[key])[:80],
                   "texts are embedded as they are given: do it to them yourself, and remove the "
                   "key")  # fmt: skip


def _pooling_folder(folder: Path) -> str:
    """The folder of the pooling module; rejects modules that `embed` does not have."""
    path = folder / "modules.json"
    if not path.is_file():
        return _POOLING
    _check_links(folder, [path.name])
    try:
        modules = parse_json(read_text(path, limit=_CONFIG_LIMIT_BYTES), str(path), strict=True)
    except UntrustedFileError as error:
        raise ConvertError("embedding", f"convert: {error}") from None
    rows = modules if isinstance(modules, list) else []
    named = [(str(m.get("type")), m.get("path")) for m in rows if isinstance(m, Mapping)]
    kinds = [kind.rpartition(".")[2] for kind, _ in named]
    if kinds not in _MODULES or named[0][1] not in ("", None) or len(named) != len(rows):
        found = listed([f"{kind} in {place!r}" for kind, place in named]) or repr(modules)[:80]
        reject("embedding", "modules.json with Transformer, Pooling and Normalize alone", found,
               "other modules are not implemented: their work would be left out")  # fmt: skip
    place = named[1][1]
    if not isinstance(place, str) or Path(place).name != place:
        reject("index-path", "plain names of folders in modules.json", repr(place))
    return place


def _pooling_modes(settings: Mapping[str, Any]) -> list[str]:
    """What is pooled, by `pooling_mode` or else by `pooling_mode_*`."""
    stated = settings.get("pooling_mode")
    if stated is not None:
        return [str(mode) for mode in (stated if isinstance(stated, list) else [stated])]
    flags = {"pooling_mode_mean_tokens": True, **settings}
    modes = [k for k, v in flags.items() if k.startswith("pooling_mode_") and v is not False]
    return [mode.removeprefix("pooling_mode_") for mode in modes]


def _read_object(folder: Path, name: str, missing: str, malformed: str) -> dict[str, Any]:
    """A JSON file of the checkpoint whose top level is an object."""
    if not (folder / name).is_file():
        dangling = _dangling(folder, [name])
        found, remedy = dangling or ("no such file", "is this a model folder?")
        reject(missing, f"{name} in {folder}", found, remedy)
    _check_links(folder, [name])
    limit = _INDEX_LIMIT_BYTES if name.endswith(".index.json") else _CONFIG_LIMIT_BYTES
    try:
        return read_json_object(folder / name, strict=True, limit=limit)
    except UntrustedFileError as error:
        raise ConvertError(malformed, f"convert: {error}") from None


def _check_links(folder: Path, names: list[str]) -> None:
    """Reject what leads out of the checkpoint: it could be any file of this machine."""
    try:
        check_links(folder, names)
    except UntrustedFileError as error:
        raise ConvertError("link-outside", f"convert: {error}") from None


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> list[str]:
    """Copy those of `names` that `source` has into `folder`; returns them."""
    present = [name for name in names if (source / name).is_file()]
    _check_links(source, present)
    for name in present:
        if is_lfs_pointer(source / name):
            reject("lfs-pointer", f"the contents of {name}", LFS_POINTER)
        shutil.copyfile(source / name, folder / name)
    return present


def copy_tokenizer(source: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Copy the files of the tokenizer; (their names in `folder`, remarks).

    A chat template comes as chat_template.jinja, which is what transformers writes, too where it
    lies in chat_template.json alone: processors kept it there before.
    """
    names = copy_files(source, folder, TOKENIZER_FILES)
    remarks = []
    if (source / _NAMED_TEMPLATES).is_dir():
        remarks.append(f"{_NAMED_TEMPLATES} is not read: the default template serves every request")
    if TEMPLATE_FILE in names or not (source / _OLD_TEMPLATE).is_file():
        return names, remarks
    try:
        _check_links(source, [_OLD_TEMPLATE])
        template = read_json_object(source / _OLD_TEMPLATE).get("chat_template")
        config = source / CONFIG_FILE
        known = read_json_object(config).get("chat_template") if config.is_file() else None
    except (UntrustedFileError, ConvertError):
        template = known = None
    if known is not None:
        return names, remarks
    if not isinstance(template, str):
        return names, [
            *remarks,
            f"{_OLD_TEMPLATE} is not read: expected a text chat_template in it",
        ]
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    remark = f"the chat template was taken from {_OLD_TEMPLATE} and written as {TEMPLATE_FILE}"
    return [*names, TEMPLATE_FILE], [*remarks, remark]


def _weight_files(
    folder: Path, allow_pickle: bool, drafts_alone: bool
) -> tuple[list[str], str | None]:
    """The names of the files that make up the checkpoint, and that of their index if sharded."""
    found = _single_or_index(folder, SINGLE, INDEX, ".safetensors", drafts_alone)
    if found is None and allow_pickle:
        found = _single_or_index(folder, PICKLE, PICKLE_INDEX, ".bin")
    if found is None:
        _reject_other_weights(folder, allow_pickle)
    return found


def _single_or_index(
    folder: Path, single: str, index: str, suffix: str, drafts_alone: bool = False
) -> tuple[list[str], str | None] | None:
    """A single file, or what the index names; None where there is neither.

    mlx-lm writes an index beside a single file too, and transformers reads the single file where
    both are there: an index is not needed beside it, and only says whether there is another set.
    """
    if (folder / single).is_file():
        others, drafts = _others(folder, single, index, suffix)
        if others:
            reject("ambiguous-weights", f"{single}, or the files that {index} names",
                   f"both, {single} and {listed(others)}",
                   "remove the set that does not belong to this config.json")  # fmt: skip
        return [single, *drafts], None
    if (folder / index).is_file():
        weight_map = _weight_map(folder, index, suffix)
        if drafts_alone:
            kept = {file for name, file in weight_map.items() if draft_name(name) is not None}
            weight_map = {n: file for n, file in weight_map.items() if file in kept} or weight_map
        return _shard_names(folder, index, weight_map), index
    return None


def _others(folder: Path, single: str, index: str, suffix: str) -> tuple[list[str], list[str]]:
    """The files beside `single` that `index` names and that are there.

    And those of them that hold layers that draft tokens, which belong to `single`.
    """
    if not (folder / index).is_file():
        return [], []
    try:
        weight_map = _weight_map(folder, index, suffix)
    except ConvertError:  # it names no files, so there is no other set
        return [], []
    drafts = _draft_files(weight_map)
    names = [n for n in sorted(set(weight_map.values())) if n != single and (folder / n).is_file()]
    return [n for n in names if n not in drafts], [n for n in names if n in drafts]


def _draft_files(weight_map: Mapping[str, str]) -> set[str]:
    """The files of an index that hold nothing but layers that draft tokens."""
    others = {file for name, file in weight_map.items() if draft_name(name) is None}
    return set(weight_map.values()) - others


def _reject_other_weights(folder: Path, allow_pickle: bool) -> NoReturn:
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    pickled = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickled:
        reject(
            "pickle",
            f"{PICKLE} or {PICKLE_INDEX}"
            if allow_pickle
            else f"{SINGLE} (a file that cannot run code)",
            listed(pickled),
            "rename the file if it holds the whole model"
            if allow_pickle
            else "save the model as safetensors, or read it with --allow-pickle (tensors alone)",
        )
    shards = [name for name in names if _SHARD.fullmatch(name)]
    single = [name for name in names if name.endswith(".safetensors")]
    ggufs = [name for name in names if name.endswith(".gguf")]
    found, remedy = _dangling(folder, names) or (listed(ggufs or single) or "no weights", "")
    if shards and not remedy:
        remedy = f"finish the download: {INDEX} says which shards there are"
    elif single and not remedy:
        remedy = f"rename the file to {SINGLE} if it holds the whole model"
    reject("weights-missing", f"{SINGLE} or {INDEX} in {folder}", found, remedy)


_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")


def _dangling(folder: Path, names: Iterable[str]) -> tuple[str, str] | None:
    """What to say of links to files that are gone, as an interrupted download leaves them."""
    gone = [name for name in names if (folder / name).is_symlink() and not (folder / name).exists()]
    if not gone:
        return None
    return f"a link to a file that is not there, {listed(gone)}", "finish the download"


# Beside a checkpoint whose matrices were rotated; PrismML's converter to GGUF reads it.
_FOLDED = "hadamard_packing.json"


def _reject_folded(folder: Path, config: Mapping[str, Any]) -> None:
    """Reject rotated matrices whose rotation config.json does not speak of."""
    if config.get("model_type") != PACKAGE and (folder / _FOLDED).exists():
        reject("folded", f"a checkpoint without {_FOLDED}", "one: its matrices are rotated",
               "convert the GGUF or the MLX package that was made of it")  # fmt: skip


def _weight_map(folder: Path, index: str, suffix: str) -> dict[str, str]:
    weight_map = _read_object(folder, index, "index-json", "index-json").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        reject("index-json", f"a non-empty object weight_map in {index}", repr(weight_map)[:80])
    for file in weight_map.values():
        # A name with a separator could point anywhere on the machine.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
            reject("index-path", f"plain *{suffix} names in {index}", repr(file))
    return weight_map


def _shard_names(folder: Path, index: str, weight_map: dict[str, str]) -> list[str]:
    # people move this file where no pattern of names finds it, and leave the index as it was
    drafts = _draft_files(weight_map) if (folder / DRAFT_FILE).is_file() else set()
    names = [
        n for n in sorted(set(weight_map.values())) if n not in drafts or (folder / n).is_file()
    ]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        reject(
            "shard-missing",
            f"the {len(names)} files that {index} names",
            (_dangling(folder, absent) or (f"without {listed(absent)}", ""))[0],
            "finish the download",
        )
    return names


def _open(path: Path) -> Any:
    if is_lfs_pointer(path):
        reject("lfs-pointer", f"the weights in {path.name}", LFS_POINTER)
    return PickleFile(path) if path.suffix == ".bin" else _Shard(path)


class _Shard:
    """One safetensors file. Its header is parsed once for many tensors, however small they are."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, stamp(path)
        self._handle, self._header_bytes = _safe_open(path)
        try:
            check_safetensors_header(path)
        except UntrustedFileError as error:
            raise ConvertError("safetensors-corrupt", f"convert: {error}") from None
        self._read_bytes = 0

    @property
    def framework(self) -> str | None:
        found: str | None = (self._handle.metadata() or {}).get("format")
        return found

    def keys(self) -> list[str]:
        return list(self._handle.keys())

    def get_slice(self, name: str) -> Any:
        return self._handle.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        if stamp(self._path) != self._stamp:
            reject_changed(self._path)
        if self._read_bytes > _REMAP_SHARE * self._header_bytes:
            self._handle, self._header_bytes = _safe_open(self._path)
            self._read_bytes = 0
        tensor: torch.Tensor = self._handle.get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor


def _safe_open(path: Path) -> tuple[Any, int]:
    """The handle of a safetensors file, and the size of its header."""
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > SAFETENSORS_HEADER_BYTES:
            raise OSError(f"a header of {header} bytes, more than {SAFETENSORS_HEADER_BYTES}")
        return safe_open(str(path), framework="pt"), header
    except (SafetensorError, OSError) as error:
        reject(
            "safetensors-corrupt",
            f"a valid safetensors file {path.name}",
            str(error),
            "download it again",
        )


def _records(files: dict[str, Any]) -> dict[str, TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for file, handle in files.items():
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            if len(records) == _MAX_TENSORS:
                reject("tensor-count", f"at most {_MAX_TENSORS} tensors", f"more, in {file}")
            if name in records:
                where = f"{records[name].file} and {file}"
                reject("duplicate-tensor", f"{name} in one file", f"it in {where}")
            view = handle.get_slice(name)
            records[name] = TensorRecord(name, view.get_dtype(), tuple(view.get_shape()), file)
    return records


def _check_index(
    folder: Path, index: str, records: dict[str, TensorRecord], opened: set[str]
) -> None:
    """The index and the headers of the shards that were opened must say the same."""
    weight_map = _weight_map(folder, index, Path(next(iter(records.values())).file).suffix)
    moved = {name for name, record in records.items() if record.file == DRAFT_FILE}
    weight_map = {n: f for n, f in weight_map.items() if n not in moved and f in opened}
    records = {name: record for name, record in records.items() if name not in moved}
    wrong = [n for n, file in weight_map.items() if n not in records or records[n].file != file]
    wrong += [n for n in records if n not in weight_map]
    if wrong:
        reject(
            "index-mismatch",
            f"{index} and the shards to name the same tensors",
            f"a disagreement about {listed(sorted(wrong))}",
        )


class PickleFile:
    """Weights pickled by torch.save, with the methods that are used of a safetensors handle.

    torch.load(weights_only=True) builds tensors and plain containers and rejects everything that
    could run code. The file is mapped where its format allows it.
    """

    framework = "pt"

    def __init__(self, path: Path) -> None:
        self._tensors = _load_pickle(path)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> _Header:
        return _Header(self._tensors[name])


class _Header:
    """dtype and shape of one tensor, spelt as in a safetensors header."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_dtype(self) -> str:
        return _DTYPE_NAMES.get(self._tensor.dtype, str(self._tensor.dtype).removeprefix("torch."))

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    mapped = zipfile.is_zipfile(path)  # the older format cannot be mapped
    try:
        if mapped:
            with zipfile.ZipFile(path) as archive:
                if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
                    raise ValueError("compressed records, which torch.save does not write")
                for one in archive.infolist():
                    if one.filename.endswith(".pkl"):
                        with archive.open(one) as stream:
                            _check_tuples(stream)
        else:
            with path.open("rb") as stream:
                for _ in range(_LEGACY_PICKLES):
                    _check_tuples(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the protocol; what matters is rejected
            value: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a pickle is a program, and may end in any of them
        reject(
            "pickle-unsafe",
            f"tensors alone in {path.name}",
            _reason(error),
            "nothing else is ever unpickled; save the model as safetensors",
        )
    if isinstance(value, dict) and set(value) == {"state_dict"}:
        value = value["state_dict"]
    if not isinstance(value, dict) or not value:
        reject("pickle-content", f"a dict of tensors in {path.name}", type(value).__name__)
    other = [str(k) for k, v in value.items() if not (isinstance(v, torch.Tensor) and _is_plain(v))]
    if other:
        reject("pickle-content", f"dense tensors alone in {path.name}", listed(other))
    expanded = [str(k) for k, v in value.items() if v.untyped_storage().nbytes() < v.nbytes]
    if expanded:  # a few bytes could stand for any number of values
        reject("pickle-content", f"every value of each tensor in {path.name}",
               f"{listed(expanded)} with fewer")  # fmt: skip
    parts = [v.untyped_storage() for v in value.values()]
    storages = {part.data_ptr(): part.nbytes() for part in parts}
    if sum(v.nbytes for v in value.values()) > 2 * sum(storages.values()):  # a tied head repeats
        reject("pickle-content", f"values of its own for each tensor in {path.name}",
               f"{len(value)} tensors over {len(storages)} storages")  # fmt: skip
    return {str(name): tensor.detach() for name, tensor in value.items()}


_LEGACY_PICKLES = 5  # magic, protocol, system, the value, storages; then bytes
_MAX_IN_TUPLE = 1000  # torch.save's have a tensor's sizes and strides


def _check_tuples(stream: IO[bytes]) -> None:
    """Raise ValueError where a pickle makes a tuple of more than a thousand parts of parts.

    As the key of a dict it is hashed by a function of C that calls itself for every tuple inside,
    also for one that stands there many times: a deep one overflows the stack.
    """
    sizes: list[int] = []  # of what lies on the unpickler's stack; 0 is a mark
    memo: dict[int, int] = {}
    for op, argument, _ in pickletools.genops(stream):
        parts, size = [], 1
        before = [kind for kind in op.stack_before if kind is not pickletools.stackslice]
        if pickletools.markobject in before:
            while sizes and (top := sizes.pop()):
                parts.append(top)
            before.remove(pickletools.markobject)
        parts += [sizes.pop() for _ in before]
        if op.name.startswith(("TUPLE", "FROZENSET")):
            size = 1 + sum(parts)
        elif op.name in ("DUP", "MEMOIZE"):
            (size,) = parts
        elif op.name.endswith("GET"):
            size = memo[int(argument or 0)]
        if size > _MAX_IN_TUPLE:
            raise ValueError(f"a tuple of more than {_MAX_IN_TUPLE} parts")
        sizes += [0 if kind is pickletools.markobject else size for kind in op.stack_after]
        if op.name.endswith("PUT") or op.name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = sizes[-1]


def _reason(error: Exception) -> str:
    """What is wrong, without torch's advice to switch the check off."""
    text = str(error)
    at = text.find("WeightsUnpickler error:")
    lines = text[max(at, 0) :].strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


# MLX packages -------------------------------------------------------------------------------------

_KEYS = ("quantization", "quantization_config")  # mlx-lm writes the same into both
_OPTIONS = {"group_size", "bits", "mode", "quant_method"}
_GROUPS = (32, 64, 128)
_CODES = 16  # a word
_CHUNK_WORDS = 1 << 20
_PARTS = tuple(f".{part}" for part in "scales biases".split())


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that an MLX package lies beside it."""
    return isinstance(config.get("quantization"), Mapping)


def _mlx_plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without its quantisation, once that is known to be one of 2 bits in groups."""
    block = config["quantization"]
    other = config.get("quantization_config")
    if other and other != block:
        reject("mlx", "quantization_config as quantization says", repr(other)[:80])
    modules = {k: v for k, v in block.items() if k not in _OPTIONS and own_name(k) is not None}
    wrong = [k for k, v in modules.items() if v not in (True, False) and not isinstance(v, dict)]
    if wrong:
        reject("mlx", "the options of MLX's quantization alone", listed(wrong))
    for name, options in [("quantization", block), *modules.items()]:
        if isinstance(options, Mapping):
            _check_options(name, options)
    return {k: v for k, v in config.items() if k not in _KEYS}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    bits, group = options.get("bits"), options.get("group_size")
    mode = options.get("mode", "affine")
    if bits != 2 or group not in _GROUPS or mode != "affine":
        expected = f"{name} affine with 2 bits in groups of 32, 64 or 128"
        reject("mlx", expected, f"{mode} with {bits} bits in groups of {group}",
               "other MLX packages hold no ternary weights: convert the original")  # fmt: skip


def _mlx_quantized(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, int]]:
    """name of a weight -> its logical shape [N, K], of every module with scales and biases.

    Those beside the decoder may have other bits. `shapes`: dtype and shape of every tensor.
    """
    found = {}
    for name, (dtype, shape) in shapes.items():
        module = name.removesuffix(".weight")
        parts = [module + part for part in _PARTS]
        if dtype != "U32" or module == name or not all(part in shapes for part in parts):
            continue
        if own_name(name) is None:
            continue
        n, words = shape if len(shape) == 2 else (0, 0)
        k = _CODES * words
        (kind, form), (_, other) = (shapes[part] for part in parts)
        groups = form[1] if len(form) == 2 else 0
        fits = groups > 0 and k % groups == 0 and k // groups in _GROUPS
        if not n or not fits or form != other or form[0] != n or kind not in ("F16", "BF16", "F32"):
            got = f"uint32 {list(shape)} with scales {kind} {list(form)}, biases {list(other)}"
            reject("mlx", f"{name} [N, K / 16] with floating scales and biases of groups", got)
        found[name] = (n, k)
    if not found:
        reject("mlx", "modules of uint32 weights with scales and biases", "none")
    return found


def _mlx_parts(name: str) -> tuple[str, ...]:
    """The names of the scales and biases of a quantised weight."""
    module = name.removesuffix(".weight")
    return tuple(module + part for part in _PARTS)


def _mlx_dequantized(name: str, tensor: Callable[[str], Tensor]) -> Tensor:
    """The values [N, K] of the quantised weight `name`, in the dtype of its scales."""
    words = tensor(name).view(torch.int32)
    scales, offsets = (tensor(part) for part in _mlx_parts(name))
    if not torch.isfinite(scales).all() or not (scales >= 0).all():
        reject("bad-scale", f"finite scales of 0 and above in {_mlx_parts(name)[0]}", "another one")
    if not torch.equal(offsets, -scales):
        row, group = (offsets != -scales).nonzero()[0].tolist()
        got = f"{float(offsets[row, group]):.6g} beside {float(scales[row, group]):.6g}"
        reject(
            "mlx-bias",
            f"biases = -scales in {_mlx_parts(name)[1]}",
            f"{got} at [{row}, {group}]",
            "the package holds other values than -s, 0 and s",
        )
    n, k = len(words), _CODES * words.shape[1]
    size, values = k // scales.shape[1], torch.empty(n, k, dtype=scales.dtype)
    shifts = torch.arange(0, 2 * _CODES, 2, dtype=torch.int32)
    step = max(1, _CHUNK_WORDS // words.shape[1])
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        codes = (words[part].unsqueeze(-1) >> shifts & 3).flatten(1)
        if (codes == 3).any():
            row, column = (codes == 3).nonzero()[0].tolist()
            reject("code-3", f"codes 0, 1, 2 in {name}", f"code 3 at [{begin + row}, {column}]",
                   "the package is damaged, or not ternary")  # fmt: skip
        signs = (codes - 1).to(scales.dtype).view(len(codes), -1, size)
        values[part] = (signs * scales[part].unsqueeze(-1)).flatten(1) + 0.0  # no -0
    return values
