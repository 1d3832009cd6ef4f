"""A GGUF file as a source: its tensors under Hugging Face names, its metadata as config.json.

Strict as for folders: every tensor that the metadata calls for, and no other. How types are coded
is in tensors.py, what metadata mean in config.py.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bitnet_ops.config.scheme import Scheme, Storage
from bitnet_ops.convert.errors import ConvertError, listed, reject
from bitnet_ops.convert.gguf.config import (
    PERMUTED,
    Architecture,
    architecture_of,
    gguf_name,
    hf_config,
    hf_name,
    shortest,
)
from bitnet_ops.convert.gguf.rope import FACTOR_TENSORS
from bitnet_ops.convert.gguf.tensors import DENSE, dense, ternary
from bitnet_ops.convert.gguf.tokenizer import tokenizer_files
from bitnet_ops.convert.hf.checkpoint import copy_files
from bitnet_ops.convert.report import file_sha256
from bitnet_ops.convert.source import EMBEDDING, HEAD, Plan, Source, Ternary, model_of
from bitnet_ops.formats.destination import TOKENIZER_FILES
from bitnet_ops.formats.gguf import MAX_TENSORS, GgufError, Reader, TensorInfo, is_strings
from bitnet_ops.formats.gguf_layouts import I2S_LAYOUTS
from bitnet_ops.models import TensorSpec, expected_tensors

EXACT_NAMES, EXACT_SCALES = "bitnet_ops.scale_names", "bitnet_ops.scales"
_MAX_FACTORS = 1 << 16  # a number for every pair of a head


class GgufSource(Source):
    """An opened and planned file; `infos` are its tensors by Hugging Face name, `.scale` ones too.

    Args:
        i2s_layout: "a", "b" or "c", the order of bytes of I2_S tensors.
        assume_online: dense projections that are not ternary are masters.
        tokenizer: a folder whose tokenizer files `finish` takes, "none", or None: the metadata's.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        i2s_layout: str = "a",
        assume_online: bool = False,
        tokenizer: str | Path | None = None,
    ) -> None:
        q2_block = reader.q2_block
        self.path, self.nbytes, self.reader = reader.path, reader.size, reader
        self.i2s_layout, self._assume_online, self._tokenizer = i2s_layout, assume_online, tokenizer
        self.architecture = architecture_of(reader.metadata)
        self.infos, factors = _named(reader, self.architecture)
        if EMBEDDING not in self.infos or len(self.infos[EMBEDDING].shape) != 2:
            reject("missing-tensor", "token_embd.weight, a matrix", "no such tensor")
        vocab_size, tied = self.infos[EMBEDDING].shape[0], HEAD not in self.infos
        config, more = hf_config(reader.metadata, self.architecture, vocab_size, tied, factors)
        model = model_of(config)
        if model.num_hidden_layers > len(self.infos):  # before a list of billions of names is made
            found = f"{len(self.infos)} tensors in all"
            reject("missing-tensor", f"tensors for {model.num_hidden_layers} layers", found)
        specs = dict(expected_tensors(model))
        _check_names(specs, self.infos, self.architecture)
        for name, spec in specs.items():
            if self.infos[name].shape != tuple(spec.shape):
                found = f"{self.infos[name].type.name} {list(self.infos[name].shape)}"
                reject("shape", f"{self.infos[name].name} of shape {list(spec.shape)}", found)
        self.exact_scales = _exact_scales(reader.metadata)  # by GGUF name
        ones = [n for n, v in factors.items() if set(v) == {1.0} and "rope_scaling" not in config]
        remarks = [f"{name} holds ones alone; ignored" for name in ones]
        self.remarks = [*remarks, *more, *model.notes]
        kinds = _kinds(specs, self.infos)
        named = f"gguf {self.architecture.name}"
        self.plan = Plan(
            model,
            Scheme(Storage.GGUF, None, named, kinds, assumed=assume_online),
            specs,
            {name: info.name for name, info in self.infos.items()},
            config,
            {
                "format_version": 1,
                "source_linear_class": "gguf",
                "source_mode": kinds + (f" layout {i2s_layout}" if "I2_S" in kinds else ""),
                **({"source_q2_block": q2_block} if q2_block else {}),
                "source_architecture": self.architecture.name,
                "converter_version": importlib.metadata.version("bitnet-ops"),
            },
        )

    @classmethod
    @contextmanager
    def opened(
        cls,
        file: str | Path,
        *,
        i2s_layout: str = "a",
        q2_block: int | None = None,
        **options: Any,
    ) -> Iterator[GgufSource]:
        """The source in `file`; what the reader rejects comes as ConvertError.

        `q2_block`: as the Reader takes it.
        """
        if i2s_layout not in I2S_LAYOUTS:
            reject("i2s-layout", f"a layout among {', '.join(I2S_LAYOUTS)}", repr(i2s_layout))
        try:
            with Reader(Path(file), q2_block) as reader:
                yield cls(reader, i2s_layout=i2s_layout, **options)
        except GgufError as error:
            raise ConvertError(f"gguf-{error.code}", f"convert: {error.message}") from error

    def dense(self, name: str) -> Tensor:
        return dense(self.reader, self.infos[name])

    def ternary(self, name: str) -> Ternary:
        info, factor = self.infos[name], 1.0
        scale_info = self.infos.get(scale_name(name))
        if scale_info is not None:
            if scale_info.shape != (1,) or scale_info.type.name not in DENSE:
                form = f"{scale_info.type.name} {list(scale_info.shape)}"
                reject("group-scales", f"one scale in {scale_info.name}", form)
            factor = float(dense(self.reader, scale_info))
        permuted = self.architecture.permuted and name.endswith(PERMUTED)
        return ternary(
            self.reader,
            info,
            i2s_layout=self.i2s_layout,
            factor=factor,
            exact_scale=self.exact_scales.get(info.name),
            head_dim=self.plan.config.head_dim if permuted else None,
            assume_online=self._assume_online,
        )

    def release(self, name: str) -> None:
        self.reader.release(self.infos[name].name)

    def finish(self, folder: Path) -> list[str]:
        files = self._write_tokenizer(folder)
        if any(info.type.name == "I2_S" for info in self.infos.values()):
            self.remarks.append(
                "I2_S has three layouts that no file tells apart: if the model talks nonsense, "
                "convert again with another --i2s-layout (docs/guide/gguf.md)"
            )
        return files

    def _write_tokenizer(self, folder: Path) -> list[str]:
        if self._tokenizer is None:
            return self._own_tokenizer(folder)
        if str(self._tokenizer) == "none":
            return []
        given = Path(self._tokenizer)
        names = [name for name in TOKENIZER_FILES if (given / name).is_file()]
        if "tokenizer.json" not in names:
            reject("tokenizer-missing", f"tokenizer.json in {given}", "no such file")
        return copy_files(given, folder, names)

    def _own_tokenizer(self, folder: Path) -> list[str]:
        made, remarks = tokenizer_files(self.reader.metadata, self.plan.config)
        self.remarks += remarks
        for name, text in made.items():
            (folder / name).write_text(text, encoding="utf-8")
        return list(made)

    def hashes(self) -> dict[str, str]:
        return {self.path.name: file_sha256(self.path)}


def _named(
    reader: Reader, architecture: Architecture
) -> tuple[dict[str, TensorInfo], dict[str, list[float]]]:
    """The tensors by Hugging Face name, and the values of those that stretch rotary embedding."""
    infos, unknown, factors = {}, [], {}
    for name, info in reader.tensors.items():
        if name in FACTOR_TENSORS:
            if info.type.name != "F32" or len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS:
                found = f"{info.type.name} {list(info.shape)}"
                reject("shape", f"{name} as F32, a number for every pair of a head", found)
            factors[name] = [shortest(value) for value in dense(reader, info).tolist()]
            continue
        renamed = hf_name(name, architecture)
        if renamed is None or renamed in infos:
            unknown.append(name)
        else:
            infos[renamed] = info
    if unknown:
        reject("unknown-tensor", f"the tensors of {architecture.name} alone", listed(unknown),
               "this kind of model is not implemented")  # fmt: skip
    return infos, factors


def _check_names(
    specs: dict[str, TensorSpec], infos: dict[str, TensorInfo], architecture: Architecture
) -> None:
    scales = {f"{n.removesuffix('.weight')}.scale" for n, s in specs.items() if s.kind == "ternary"}
    unknown = [
        info.name for name, info in infos.items() if name not in specs and name not in scales
    ]
    biases = [name for name in unknown if name.endswith(".bias")]
    if biases:
        reject("bias", "projections without biases", listed(biases))
    if unknown:
        reject("unknown-tensor", f"the {len(specs)} tensors of this model", listed(unknown))
    missing = [gguf_name(name, architecture) for name in specs if name not in infos]
    if missing:
        reject("missing-tensor", f"all {len(specs)} tensors", f"no {listed(missing)}")


def scale_name(weight: str) -> str:
    """Of the tensor that newer converters put beside a projection; it multiplies."""
    return f"{weight.removesuffix('.weight')}.scale"


def _exact_scales(metadata: dict[str, Any]) -> dict[str, float]:
    """The float32 scales that our own exporter leaves beside TQ1_0 and TQ2_0 tensors."""
    names, scales = metadata.get(EXACT_NAMES), metadata.get(EXACT_SCALES)
    if names is None and scales is None:
        return {}
    if (
        not is_strings(names)
        or not isinstance(scales, np.ndarray)
        or not len(names) == len(scales) <= MAX_TENSORS
    ):
        reject("gguf-metadata", f"{EXACT_NAMES} and {EXACT_SCALES} of one length", "other values")
    return dict(zip(names, scales.astype(float).tolist(), strict=True))


def _kinds(specs: dict[str, TensorSpec], infos: dict[str, TensorInfo]) -> str:
    """The types of the projections, e.g. "I2_S"."""
    names = [name for name, spec in specs.items() if spec.kind == "ternary"]
    return ", ".join(dict.fromkeys(infos[name].type.name for name in names))
