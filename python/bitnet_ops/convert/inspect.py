"""What `bitnet-ops inspect` shows: what a model file or folder holds, tensor by tensor; totals.

Reads and checks all of it; runs no model. It must not know kinds of files, nor their bytes:
source.py hands out what is in them; nor how it is shown.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK, PROJECTIONS, ModelConfig, UnsupportedModelError
from bitnet_ops.config.families import family_of
from bitnet_ops.config.scheme import stated_linear_class
from bitnet_ops.convert import hybrid
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.draft import DraftHead, HeadError
from bitnet_ops.convert.draft_sources import bin_head
from bitnet_ops.convert.errors import ConvertError, said_by
from bitnet_ops.convert.gguf_source import GgufSource, dense, ternary
from bitnet_ops.convert.hf_source import head_of, tower_of
from bitnet_ops.convert.plan import find_naming
from bitnet_ops.convert.source import Uneven
from bitnet_ops.convert.ternary import looks_ternary, uneven_of
from bitnet_ops.convert.tower import Tower
from bitnet_ops.formats import gguf, gguf_layouts
from bitnet_ops.formats.sglbitnt import MODEL_FILE, Reader, SglbitntError, model_file
from bitnet_ops.loading.hub import local_path
from bitnet_ops.loading.model_contents import model_config, own_tensors
from bitnet_ops.models import TensorError, check_names, expected_tensors
from bitnet_ops.nn.packing import multiplying_scale, unpack_hf
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.weights import PREFIX, shapes, vision_config


@said_by("inspect")
def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything about the model at `path` as plain numbers and strings.

    Keys: file, kind, bytes, model_type, bitnet_ops (the config's private block or None), tensors
    (a list: name, format, shape, scale, scales, minus, zero, plus, nbytes, sha256), totals, vision
    (sizes of a tower for images, its tensors and their bytes; None without one), draft (what is
    known of a draft head, its tensors, their weights, and whether they are among
    `tensors`; None without one) and remarks.
    Shapes are logical, [N, K]; where nothing gives K it is 4 times the row bytes, and a remark says
    so. `scale` is a tensor's only one; where there are more, `scales` has their shape, smallest and
    largest. Raises SglbitntError, GgufError or ConvertError for a file that is damaged.
    """
    source = open_source(path)
    rows = [_row(source, name) for name in source.entries]
    return {
        "file": str(source.path),
        "kind": source.kind,
        "bytes": source.nbytes,
        "model_type": source.config.get("model_type"),
        "bitnet_ops": source.config.get(PRIVATE_BLOCK),
        "tensors": rows,
        "totals": _totals(rows),
        "vision": _vision(source, rows),
        "draft": _draft(source),
        "remarks": source.remarks,
    }


def _row(source: Contents, name: str) -> dict[str, Any]:
    entry, scales = source.entries[name], source.scales(name)
    single = scales is not None and scales.numel() == 1
    several = None
    if scales is not None and not single:
        several = {
            "shape": list(scales.shape),
            "min": float(scales.min()),
            "max": float(scales.max()),
        }
    counts = source.counts(name) or (None, None, None)
    return {
        "name": name,
        "format": entry.format,
        "shape": list(entry.shape),
        "scale": float(scales) if scales is not None and single else None,
        "scales": several,
        **dict(zip(("minus", "zero", "plus"), counts, strict=True)),
        "nbytes": entry.nbytes,
        "sha256": hashlib.sha256(source.memory(name)).hexdigest(),
    }


def _vision(source: Contents, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if source.vision is None:
        return None
    own = [row["nbytes"] for row in rows if row["name"].startswith(PREFIX)]
    return {**source.vision.to_json(), "tensors": len(own), "bytes": sum(own)}


def _draft(source: Contents) -> dict[str, Any] | None:
    head = source.draft
    if head is None:
        return None
    return {
        **head.config.to_dict(),
        "tensors": len(head.shapes),
        "weights": sum(map(math.prod, head.shapes.values())),
        "listed": all(name in source.entries for name in head.shapes),
    }


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    packed = [row for row in rows if row["zero"] is not None]
    dense = [row for row in rows if row["zero"] is None]
    weights = sum(math.prod(row["shape"]) for row in packed)
    parameters = sum(math.prod(row["shape"]) for row in dense)
    packed_bytes = sum(row["nbytes"] for row in packed)
    dense_bytes = sum(row["nbytes"] for row in dense)
    return {
        "tensors": len(rows),
        "packed_tensors": len(packed),
        "dense_tensors": len(dense),
        "ternary_weights": weights,
        "dense_parameters": parameters,
        "packed_bytes": packed_bytes,
        "dense_bytes": dense_bytes,
        "share_zero": _ratio(sum(row["zero"] for row in packed), weights),
        "bits_per_ternary_weight": _ratio(8 * packed_bytes, weights),
        "bits_per_parameter": _ratio(8 * (packed_bytes + dense_bytes), weights + parameters),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# What lies in a file or folder --------------------------------------------------------------------

_WEIGHTS_PER_BYTE = 4
_HF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8", "I8": "int8"}
_HF_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # others: 1


@dataclass(frozen=True)
class Entry:
    """One tensor as the headers have it: logical shape, [N, K] of a ternary matrix.

    `format`: "ternary", a dtype, or a GGUF type. `stored`: its name in the file. `nbytes`: of its
    data and scales.
    """

    name: str
    stored: str
    format: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Values:
    """Ternary: `codes` int8 [N, K] and f32 `scales` [1], [N] or [N, groups]. Else `dense`."""

    dense: Tensor | None = None
    codes: Tensor | None = None
    scales: Tensor | None = None


class Contents(Protocol):
    """A model file or folder, opened: `entries` by name, `remarks` for what could not be told.

    draft: its draft head. A model file lists its tensors, others do not: they hold
    other values than a conversion.
    """

    path: Path
    kind: str
    nbytes: int
    config: Mapping[str, Any]
    entries: dict[str, Entry]
    vision: VisionConfig | None
    draft: DraftHead | None

    @property
    def remarks(self) -> list[str]:
        """For what could not be told, or what reading has found."""

    def values(self, name: str) -> Values:
        """The tensor `name`, read and checked."""

    def memory(self, name: str) -> memoryview:
        """The bytes of its data as they lie in the file."""

    def scales(self, name: str) -> Tensor | None:
        """The multiplying scales of a ternary tensor, f32; None for others."""

    def counts(self, name: str) -> tuple[int, int, int] | None:
        """How many weights of a ternary tensor are -1, 0, +1, padding left out."""


def open_source(path: str | os.PathLike[str], i2s_layout: str = "a") -> Contents:
    """What is at `path`: a .bin or .gguf file, a folder with model.bin, or a checkpoint folder.

    Or a Hugging Face id. Raises SglbitntError, GgufError or ConvertError for what is damaged, and
    HubError.
    """
    place = local_path(path)
    if gguf.is_gguf(place):
        return GgufContents(place, i2s_layout)
    if place.is_dir() and not (place / MODEL_FILE).exists() and (place / "config.json").exists():
        return CheckpointContents(place)
    return BinContents(model_file(place))


def _counts(codes: Tensor) -> tuple[int, int, int]:
    total, nonzero = codes.numel(), int(torch.count_nonzero(codes))
    plus = int(torch.count_nonzero(codes == 1))
    return nonzero - plus, total - nonzero, plus


class BinContents:
    """An SGLBITNT file. Where neither file nor config gives K it is 4 times the row bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes = path, path.stat().st_size if path.is_file() else 0
        self.reader = Reader(path)
        self.kind = f"SGLBITNT version {self.reader.version}"
        self.config: Mapping[str, Any] = self.reader.config
        known, self.remarks = _in_features(self.reader)
        self.vision = _vision_of(self.reader, self.remarks)
        self.draft = self._head()
        self.entries = {}
        for name, info in self.reader.tensors.items():
            shape = list(info.shape)
            if info.packed:
                shape[1] = info.in_features or known.get(name, _WEIGHTS_PER_BYTE * shape[1])
            kind = "ternary" if info.packed else str(info.dtype).removeprefix("torch.")
            size = info.nbytes + info.scales_nbytes
            self.entries[name] = Entry(name, name, kind, tuple(shape), size)

    def _head(self) -> DraftHead | None:
        try:
            return bin_head(self.reader, model_config(self.reader))
        except (UnsupportedModelError, HeadError) as error:
            said = f"no draft head: {error}"
            self.remarks += [said] if isinstance(error, HeadError) else []
            return None

    def values(self, name: str) -> Values:
        tensor, info = self.reader.tensor(name), self.reader.tensors[name]
        if not info.packed:
            return Values(dense=tensor)
        codes = ops.unpack(tensor, _WEIGHTS_PER_BYTE * info.shape[1])
        return Values(codes=codes[:, : self.entries[name].shape[1]], scales=self.scales(name))

    def memory(self, name: str) -> memoryview:
        return self.reader.memory(name)

    def scales(self, name: str) -> Tensor | None:
        return self.reader.scales(name) if self.reader.tensors[name].packed else None

    def counts(self, name: str) -> tuple[int, int, int] | None:
        info = self.reader.tensors[name]
        if not info.packed:
            return None
        minus, zero, plus = self.reader.code_counts(name)
        padding = _WEIGHTS_PER_BYTE * info.shape[1] - self.entries[name].shape[1]
        return minus, zero - info.shape[0] * padding, plus


def _vision_of(reader: Reader, remarks: list[str]) -> VisionConfig | None:
    try:
        return vision_config(reader.config)
    except UnsupportedModelError as error:
        remarks += [str(error)] if str(error) not in remarks else []
        return None


def _in_features(reader: Reader) -> tuple[dict[str, int], list[str]]:
    """True K of the packed tensors as far as the config gives it, and what speaks against it."""
    packed = [name for name, info in reader.tensors.items() if info.packed]
    try:
        config = model_config(reader)
        expected = expected_tensors(config)
        check_names(config, own_tensors(reader, config))
    except (UnsupportedModelError, TensorError) as error:
        padded = packed and reader.version == 1
        return {}, [f"K is 4 * row bytes, padding included: {error}"] if padded else [str(error)]
    known, remarks = {}, []
    for name in (name for name in packed if name in expected):
        k = expected[name].shape[-1]
        try:
            reader.check_in_features(name, k)
            known[name] = k
        except SglbitntError as error:
            what = "K is 4 * row bytes, padding included: " if reader.version == 1 else ""
            remarks.append(f"{what}{error}")
    return known, remarks


class CheckpointContents:
    """A Hugging Face folder: uint8 with a weight_scale is ternary, everything else dense.

    Names are those that a conversion has, where a family spells them otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, Checkpoint(path)
        self.kind, self.nbytes = "Hugging Face checkpoint", self.source.weight_bytes
        self.config: Mapping[str, Any] = self.source.config
        self._linear_class = stated_linear_class(self.config)
        self._uneven: dict[str, Uneven | None] = {}
        self._family = family_of(self.config)
        self._hybrid = self._family is not None and self._family.hybrid
        naming = find_naming(self.config, self._family, self.source.tensors)
        self._remarks = list(naming.remarks)
        if packed := self.source.packed_mlx:
            self._remarks.append(
                f"MLX package: {len(packed)} matrices of 2 bits, shown as the values they stand for"
            )
        self.entries = {}
        for name, stored in naming.stored.items():
            if stored.endswith("_scale") and self._packed(stored.removesuffix("_scale")):
                continue
            record, size = self.source.tensors[stored], self._nbytes(stored)
            kind, shape = _HF_DTYPES.get(record.dtype, record.dtype), record.shape
            if self._packed(stored):
                kind, shape = "ternary", (4 * shape[0], shape[1])
                size += self._nbytes(f"{stored}_scale")
            if self._hybrid:
                shape = hybrid.shape_here(name, shape)
            self.entries[name] = Entry(name, stored, kind, tuple(shape), size)
        self._tower = self._read_tower(naming.tower)
        self.vision = None if self._tower is None else self._tower.config
        self.draft = self._head(naming.drafts)

    def _head(self, names: Mapping[str, str]) -> DraftHead | None:
        """The draft head; a remark on tensors of layers that are no such head."""
        if not names:
            return None
        try:
            model, summed = ModelConfig.from_hf(self.config), self._hybrid and self._summed_norms
            return head_of(self.source, names, model, summed, "the checkpoint")
        except (UnsupportedModelError, HeadError) as error:
            self._remarks += hybrid.counted([hybrid.DRAFTS] * len(names))
            self._remarks.append(f"no draft head: {error}")
            return None

    def _read_tower(self, names: Mapping[str, str]) -> Tower | None:
        """The tower for images, listed as a conversion has it; a remark where it has none."""
        try:
            tower = tower_of(self.source, names)
        except ConvertError as error:
            self._remarks.append(f"no tower for images: {error}")
            return None
        if tower is None:
            self._remarks += hybrid.counted([hybrid.TOWER] * len(names))
            return None
        for name, shape in shapes(tower.config).items():
            kind = self.source.tensors[names[name]].dtype
            kind = _HF_DTYPES.get(kind, kind)
            size = self._nbytes(names[name])
            self.entries[PREFIX + name] = Entry(PREFIX + name, names[name], kind, shape, size)
        return tower

    def _packed(self, stored: str) -> bool:
        record = self.source.tensors.get(stored)
        scale = self.source.tensors.get(f"{stored}_scale")
        matrix = record is not None and record.dtype == "U8" and len(record.shape) == 2
        return matrix and scale is not None and math.prod(scale.shape) == 1

    def _nbytes(self, stored: str) -> int:
        record = self.source.tensors[stored]
        return math.prod(record.shape) * _HF_BYTES.get(record.dtype, 1)

    def _tensor(self, name: str) -> Tensor:
        if name.startswith(PREFIX):
            assert self._tower is not None
            return self._tower.read(name.removeprefix(PREFIX)).contiguous()
        return self.source.tensor(self.entries[name].stored)

    def values(self, name: str) -> Values:
        tensor = self._tensor(name)
        if self.entries[name].format != "ternary":
            return Values(dense=self._multiplier(name, tensor))
        try:
            codes = unpack_hf(tensor, 4 * tensor.shape[0])
        except ValueError as error:
            raise ConvertError("code-3", f"inspect: {name}: {error}") from None
        return Values(codes=codes, scales=self.scales(name))

    def _multiplier(self, name: str, tensor: Tensor) -> Tensor:
        """A norm as what it multiplies by, 1 + w where the family stores w; others as they are."""
        family = self._family
        if name.startswith(PREFIX):
            return tensor
        if self._hybrid:
            tensor = hybrid.as_here(name, tensor)
        if family is None or not family.norm_offset or not name.endswith("norm.weight"):
            return tensor
        if name.endswith(hybrid.GATED_NORM) or (self._hybrid and self._summed_norms):
            return tensor
        plain = name.endswith(".rms_norm.weight") and float(tensor.float().median()) > 0.5
        return tensor if plain else tensor.float() + family.norm_offset

    @functools.cached_property
    def _summed_norms(self) -> bool:
        shapes = {n: r.shape for n, r in self.source.tensors.items()}
        return hybrid.has_summed_norms(shapes, package=bool(self.source.packed_mlx))

    def memory(self, name: str) -> memoryview:
        return self._tensor(name).reshape(-1).view(torch.uint8).numpy().data

    def scales(self, name: str) -> Tensor | None:
        entry = self.entries[name]
        if entry.format != "ternary":
            return None
        scale = self.source.tensor(f"{entry.stored}_scale")
        try:
            return multiplying_scale(scale, self._linear_class)
        except ValueError as error:
            raise ConvertError("bad-scale", f"inspect: {entry.stored}_scale: {error}") from None

    def counts(self, name: str) -> tuple[int, int, int] | None:
        found = self.values(name)
        modules = (*PROJECTIONS, *hybrid.PROJECTIONS)
        if found.codes is None and name.removesuffix(".weight").endswith(modules):
            assert found.dense is not None
            plain = found.dense.is_floating_point() and looks_ternary(found.dense)
            self._uneven[name] = uneven_of(found.dense) if plain else None
        return None if found.codes is None else _counts(found.codes)

    @property
    def remarks(self) -> list[str]:
        return [*self._remarks, *_uneven_lines(self._uneven)]


def _uneven_lines(found: Mapping[str, Uneven | None]) -> list[str]:
    """A remark on the groups with two magnitudes in the tensors read so far."""
    total = Uneven()
    for uneven in found.values():
        total.add(uneven)
    return [total.line()] if total.groups else []


class GgufContents:
    """A GGUF file under Hugging Face names where the converter can make them, else its own."""

    def __init__(self, path: Path, i2s_layout: str = "a") -> None:
        self.path, self.reader, self._layout = path, gguf.Reader(path), i2s_layout
        self.kind, self.nbytes = "GGUF", self.reader.size
        self.vision: VisionConfig | None = None  # in a file of its own
        self._remarks: list[str] = []
        self._uneven: dict[str, Uneven | None] = {}
        self._source: GgufSource | None = None
        self.draft: DraftHead | None = None
        try:
            self._source = GgufSource(self.reader, i2s_layout=i2s_layout)
            self.config: Mapping[str, Any] = self._source.plan.hf_config
            infos, self._remarks = self._source.infos, self._source.remarks
            try:
                self.draft = self._source.own_draft()
            except HeadError as error:
                count = self._source.drafts()
                self._remarks += hybrid.counted([hybrid.DRAFTS] * count)
                self._remarks.append(f"no draft head: {error}")
        except ConvertError as error:
            self.config, infos = {}, dict(self.reader.tensors)
            self._remarks = [f"names are the file's own: {error}"]
        self._infos = infos
        specs = self._source.plan.specs if self._source else {}
        self.entries = {}
        for name, info in infos.items():
            shape = tuple(specs[name].shape) if name in specs else info.shape
            self.entries[name] = Entry(name, info.name, info.type.name, shape, info.nbytes)
        rotation = self._source.plan.config.rotation if self._source else None
        for name, shape in (rotation.shapes if rotation else {}).items():
            stored = f"{hybrid.HADAMARD}sign_values"
            self.entries[name] = Entry(name, stored, "float32", shape, 4 * math.prod(shape))

    def _is_ternary(self, name: str) -> bool:
        info = self._infos.get(name)
        return (
            info is not None
            and info.type.name in gguf_layouts.TERNARY_TYPES
            and len(info.shape) == 2
        )

    def values(self, name: str) -> Values:
        source = self._source
        if not self._is_ternary(name):
            if source is not None and name in source.plan.specs:
                return Values(dense=source.dense(name))
            return Values(dense=dense(self.reader, self._infos[name]))
        info = self._infos[name]
        if source is None:
            found = ternary(self.reader, info, i2s_layout=self._layout)
        else:
            found = source.ternary(name)
        self._uneven[name] = found.uneven
        return Values(codes=ops.unpack(found.rows, info.shape[1]), scales=found.scale)

    @property
    def remarks(self) -> list[str]:
        return [*self._remarks, *_uneven_lines(self._uneven)]

    def memory(self, name: str) -> memoryview:
        if name not in self._infos:  # made of keys
            made = self.values(name).dense
            assert made is not None
            return made.view(-1).view(torch.uint8).numpy().data
        return self.reader.data(self._infos[name].name).data

    def scales(self, name: str) -> Tensor | None:
        return self.values(name).scales if self._is_ternary(name) else None

    def counts(self, name: str) -> tuple[int, int, int] | None:
        codes = self.values(name).codes if self._is_ternary(name) else None
        return None if codes is None else _counts(codes)
