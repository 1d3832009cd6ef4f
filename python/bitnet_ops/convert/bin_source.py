"""An SGLBITNT file of any writer and version as a source: its tensors are copied bit for bit.

Nothing is computed: codes, scales and values go over as they are, and are compared with the source
once the file is written. Copies that other writers keep (loading/model_contents.py) are checked and
left out.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig, UnsupportedModelError
from bitnet_ops.config.draft import KEY as DRAFT
from bitnet_ops.config.draft import PREFIX as DRAFTS
from bitnet_ops.config.scheme import Scheme, Storage
from bitnet_ops.convert.checkpoint import copy_tokenizer
from bitnet_ops.convert.draft import DraftHead
from bitnet_ops.convert.draft_sources import bin_head
from bitnet_ops.convert.errors import ConvertError, listed, reject
from bitnet_ops.convert.plan import LARGEST_SCALE
from bitnet_ops.convert.source import Plan, Source, Ternary, folder_tokens
from bitnet_ops.convert.tower import Tower, image_ids
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, is_sglbitnt, model_file
from bitnet_ops.loading.model_contents import completed_config, own_tensors
from bitnet_ops.models import TensorError, TensorSpec, check_names, expected_tensors
from bitnet_ops.vision.weights import KEY, PREFIX, vision_config
from bitnet_ops.vision.weights import shapes as tower_shapes


def is_bin(path: str | Path) -> bool:
    """Whether `path` is a .bin file of this format, or a folder with one and no checkpoint."""
    path = Path(path)
    return not (path / "config.json").is_file() and is_sglbitnt(model_file(path))


class BinSource(Source):
    """An opened file; what it holds is decided and checked before its data are read."""

    def __init__(self, path: Path, reader: Reader, *, trust_scales: bool = False) -> None:
        self.path, self._reader, self._trusted = path, reader, trust_scales
        self.nbytes = path.stat().st_size
        config = completed_config(reader.config, reader.tensors)
        try:
            model = ModelConfig.from_hf(config)
            tensors = own_tensors(reader, model)
            check_names(model, tensors)
        except UnsupportedModelError as error:
            raise ConvertError("unsupported-model", f"convert: {error}") from None
        except TensorError as error:
            raise ConvertError("bin-tensors", f"convert: {error}") from None
        specs = dict(expected_tensors(model))
        for name, spec in specs.items():
            self._check(name, spec)
        # a private block that is there says where the model comes from
        made = {
            "format_version": 1,
            "source_linear_class": "SGLBITNT",
            "source_mode": f"version {reader.version}",
            "converter_version": importlib.metadata.version("bitnet-ops"),
        }
        block = dict(config.get(PRIVATE_BLOCK) or made)  # null is none
        self._vision = vision_config(config)
        for key in (KEY, DRAFT):
            block.pop(key, None)  # which says what is written, not what was read
        known = {**made, **block}  # the block of a synthetic model has neither
        origin = str(known["source_linear_class"]), str(known["source_mode"])
        scheme = Scheme(Storage.SGLBITNT, None, *origin)
        self.plan = Plan(model, scheme, specs, {n: n for n in specs}, config, block)
        self.remarks = list(model.notes)
        beside = set() if self._vision is None else {PREFIX + n for n in tower_shapes(self._vision)}
        names = {n.removeprefix(PREFIX): n for n in beside}
        drafts = {name: name for name in reader.tensors if name.startswith(DRAFTS)}
        self.plan = dataclasses.replace(self.plan, tower=names, drafts=drafts)
        beside |= drafts.keys()
        copies = [name for name in reader.tensors if name not in tensors and name not in beside]
        if copies:
            self.remarks.append(f"left out, since they repeat others: {listed(copies)}")
        if reader.config.get("model_type") is None:
            self.remarks.append(f"model_type is absent: {model.model_type!r}, by what the file has")

    @classmethod
    @contextmanager
    def opened(cls, path: str | Path, *, trust_scales: bool = False) -> Iterator[BinSource]:
        """The file at `path` (a .bin, or the folder with model.bin); its errors as ConvertError."""
        file = model_file(path)
        try:
            with Reader(file, check_codes=False) as reader:
                yield cls(file, reader, trust_scales=trust_scales)
        except SglbitntError as error:
            raise ConvertError(f"bin-{error.code}", f"convert: {error.message}") from error

    def _check(self, name: str, spec: TensorSpec) -> None:
        info = self._reader.tensors[name]
        ternary = spec.kind == "ternary" or (spec.may_be_ternary and info.packed)
        rows = ternary and info.shape[0] == spec.shape[0]
        if info.packed != ternary or not (rows or info.shape == spec.shape):
            form = f"{info.dtype} {list(info.shape)}".removeprefix("torch.")
            reject("shape", f"{name} {spec.kind} of shape {list(spec.shape)}", form)
        if info.packed:
            self._reader.check_in_features(name, spec.shape[1])

    def check(self) -> None:
        """Reject what only a scale that should divide would explain; no one can tell for sure."""
        for name in () if self._trusted else self.plan.ternary:
            largest = float(self._reader.scales(name).max())
            if largest > LARGEST_SCALE:
                reject(
                    "scale-sense",
                    f"a scale of {name} that multiplies",
                    f"{largest:.4g}, far above any known one",
                    "its writer may have taken a bitlinear checkpoint's weight_scale, which "
                    "divides: convert that checkpoint, or use --trust-scales if the file is right",
                )

    def dense(self, name: str) -> Tensor:
        self._reader.check_data(name)
        return self._reader.tensor(name)

    def own_tower(self) -> Tower | None:
        if self._vision is None:
            return None
        return Tower(self._vision, self.path.name, lambda name: self.dense(PREFIX + name))

    def own_draft(self) -> DraftHead | None:
        return bin_head(self._reader, self.plan.config)

    def tokens(self) -> dict[int, str]:
        return folder_tokens(self.path.parent)

    def image_ids(self) -> dict[str, int]:
        return image_ids(self.path.parent)

    def holds_ternary(self, name: str) -> bool:
        return self._reader.tensors[name].packed

    def ternary(self, name: str) -> Ternary:
        self._reader.check_data(name)
        info = self._reader.tensors[name]
        scales = self._reader.scales(name).to(info.scale_dtype)  # as stored
        return Ternary(self._reader.tensor(name), scales, group_size=info.group_size)

    def release(self, name: str) -> None:
        self._reader.release(name)

    def finish(self, folder: Path) -> list[str]:
        names, remarks = copy_tokenizer(self.path.parent, folder)
        self.remarks += remarks
        return names

    def files(self) -> dict[str, Path]:
        return {self.path.name: self.path}

    def check_result(self, file: Path) -> None:
        """The new file must hold what the source does, bit for bit."""
        with Reader(file, check_codes=False) as made:
            names = [*self.plan.specs]
            if self.tower is not None and not self.tower.files:  # its own
                names += [PREFIX + name for name in tower_shapes(self.tower.config)]
            if self.draft is not None and not self.draft.files:
                names += self.draft.shapes
            wrong = [name for name in names if not self._same(made, name)]
        if wrong:
            reject(
                "verification-failed",
                "the result to hold what its source does",
                f"other bytes in {listed(wrong)}",
                "the result was not kept, please report this file",
            )

    def _same(self, made: Reader, name: str) -> bool:
        ours, theirs = made.tensors[name], self._reader.tensors[name]
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        same = same and made.memory(name) == self._reader.memory(name)
        if same and theirs.packed:
            same = torch.equal(made.scales(name), self._reader.scales(name))
        made.release(name)
        self._reader.release(name)
        return same
