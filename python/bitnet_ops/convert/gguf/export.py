"""model.bin -> one GGUF file: I2_S (layout a) for bitnet.cpp, TQ1_0 and TQ2_0 for llama.cpp.

Codes and scales are copied, never computed again. TQ1_0 and TQ2_0 have float16 scales; the float32
ones go along under keys of our own, so that a conversion back gives the same model.bin. It must not
know bytes of tensors beyond what gguf_layouts.py makes of them.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitnet_ops.config import ModelConfig, Scalings, UnsupportedModelError
from bitnet_ops.convert.destination import building_file
from bitnet_ops.convert.errors import ConvertError, reject
from bitnet_ops.convert.gguf.config import (
    ARCHITECTURES,
    PERMUTED,
    Architecture,
    gguf_name,
    head_rows,
)
from bitnet_ops.convert.gguf.rope import exported
from bitnet_ops.convert.gguf.source import EXACT_NAMES, EXACT_SCALES
from bitnet_ops.convert.gguf.vocabulary import Keys, vocabulary_keys
from bitnet_ops.convert.progress import Progress
from bitnet_ops.formats import gguf_layouts as layouts
from bitnet_ops.formats.destination import GGUF_FILE
from bitnet_ops.formats.gguf import GgufError, Writer
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, model_file
from bitnet_ops.loading.model_contents import model_config, own_tensors
from bitnet_ops.models import TensorError, TensorSpec, check_names, expected_tensors
from bitnet_ops.untrusted import printable

TYPES = {"i2_s": "I2_S", "tq1_0": "TQ1_0", "tq2_0": "TQ2_0"}
_FILE_TYPES = {"I2_S": 40, "TQ1_0": 36, "TQ2_0": 37}  # general.file_type
_DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass
class ExportReport:
    """What an export wrote. `largest_rounding`: of a scale by float16, relative; 0 for I2_S."""

    file: str
    architecture: str
    type: str
    tensors: int
    output_bytes: int
    largest_rounding: float
    seconds: float
    remarks: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The report for people, one fact a line."""
        return [
            f"wrote {self.file}: architecture {self.architecture}, {self.type}, "
            f"{self.tensors} tensors, {self.output_bytes:,} bytes in {self.seconds:.1f} s",
            *(f"note: {remark}" for remark in self.remarks),
        ]


def export_gguf(
    model: str | Path,
    file: str | Path,
    *,
    type: str = "i2_s",
    tokenizer: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the converted model at `model` (its folder or model.bin) as the GGUF file `file`.

    Args:
        type: of the ternary matrices, "i2_s", "tq1_0" or "tq2_0".
        tokenizer: False leaves the vocabulary out.
        force: replace `file` if it exists.
        progress: called as progress(done, total, tensor_name) before each tensor.

    Returns the report. Raises ConvertError; no file is left then.
    """
    started = time.perf_counter()
    source, target = model_file(model), Path(file)
    if type not in TYPES:
        reject("gguf-type", f"a type among {', '.join(TYPES)}", repr(type))
    try:
        with (
            building_file(target, GGUF_FILE, force=force) as made,
            Reader(source, check_codes=False) as reader,  # each tensor is checked as it is read
        ):
            export = _Export(reader, TYPES[type])
            keys: Keys = {}
            remarks = ["no vocabulary was written"]
            if tokenizer:
                keys, remarks = vocabulary_keys(source.parent, export.model)
            export.write(made, target.stem, keys, progress)
    except (SglbitntError, UnsupportedModelError, TensorError) as error:
        raise ConvertError("export-source", f"export: {error}") from error
    except GgufError as error:
        raise ConvertError("write-failed", f"export: {error}") from error
    except OSError as error:
        reject("write-failed", f"to write {target}", str(error), "nothing was kept")
    if export.rounding:
        remarks.append(
            f"{export.type} keeps scales as float16, up to {export.rounding:.2g} off; converting "
            "back restores the float32 ones, other programs use the rounded ones"
        )
    return ExportReport(
        target.name,
        export.architecture.name,
        export.type,
        len(export.specs),
        target.stat().st_size,
        export.rounding,
        round(time.perf_counter() - started, 3),
        remarks,
    )


def architecture_for(model: ModelConfig) -> Architecture:
    """The GGUF architecture that computes what `model` does; ConvertError if there is none."""
    kind = (model.model_type, model.hidden_act, model.sub_norms)
    names = [
        name
        for name, found in ARCHITECTURES.items()
        if (found.family.model_type, found.family.hidden_act, found.family.sub_norms) == kind
    ]
    # parts that no GGUF architecture knows
    odd = [
        name for name in ("linear_norms", "sub_norm_eps", "embedding_only") if getattr(model, name)
    ]
    odd += ["scalings"] if model.scalings != Scalings() else []
    odd += ["sliding windows"] if model.windows else []
    if not names or odd:
        found = f"{model.model_type} with {model.hidden_act}, sub_norms {model.sub_norms}"
        found += f", {', '.join(odd)}" if odd else ""
        reject("gguf-architecture", "a model that GGUF has an architecture for", found)
    return ARCHITECTURES[names[0]]


class _Export:
    """One export: everything is decided and checked when it is made."""

    def __init__(self, reader: Reader, type_name: str) -> None:
        self.type, self.rounding = type_name, 0.0
        self.model = model_config(reader)
        self.architecture = architecture_for(self.model)
        check_names(self.model, own_tensors(reader, self.model))
        self.specs: dict[str, TensorSpec] = dict(expected_tensors(self.model))
        self._reader = reader
        self._scales: dict[str, float] = {}
        for name, spec in self.specs.items():
            if spec.kind == "ternary":
                self._check(name, spec)
            elif reader.tensors[name].packed:
                reject("group-scales", f"{name} as dense values", "packed ternary weights",
                       "GGUF's ternary types cannot hold its scales")  # fmt: skip

    def _check(self, name: str, spec: TensorSpec) -> None:
        rows, columns = spec.shape
        scale = self._reader.tensors[name].scale
        if scale is None:
            reject("group-scales", f"one scale for {name}", "none, or one for a group of weights",
                   "GGUF's ternary types cannot hold it")  # fmt: skip
        try:
            layouts.check_shape(self.type, rows, columns)
            if self.type != "I2_S":
                half = float(layouts.half_scale(scale))
                self.rounding = max(self.rounding, abs(half / scale - 1.0))
        except layouts.LayoutError as error:
            code = "gguf-row-length" if error.code == "row_length" else "bad-scale"
            remedy = "i2_s takes K % 128 == 0, tq1_0 and tq2_0 K % 256 == 0"
            raise ConvertError(code, f"convert: {name}: {error}; {remedy}") from None
        self._scales[gguf_name(name, self.architecture)] = scale

    def write(
        self, file: Path, name: str, vocabulary: dict[str, Any], progress: Progress | None
    ) -> None:
        """Write `file`; `name` is what it says the model is called."""
        tensors = {
            gguf_name(tensor, self.architecture): (self._type(tensor, spec), spec.shape)
            for tensor, spec in self.specs.items()
        }
        metadata = {**self._metadata(printable(name)), **vocabulary}
        with Writer(file, metadata, tensors) as writer:
            for done, (tensor, spec) in enumerate(self.specs.items()):
                if progress is not None:
                    progress(done, len(self.specs), tensor)
                writer.add(gguf_name(tensor, self.architecture), self._data(tensor, spec))
                self._reader.release(tensor)

    def _type(self, name: str, spec: TensorSpec) -> str:
        if spec.kind == "ternary":
            return self.type
        if len(spec.shape) == 1:
            return "F32"  # llama.cpp computes norms in nothing else
        return _DENSE[self._reader.tensors[name].dtype]

    def _data(self, name: str, spec: TensorSpec) -> Any:
        self._reader.check_sum(name)
        self._reader.check_data(name)
        tensor = self._reader.tensor(name)
        if spec.kind == "dense":
            tensor = tensor.float() if len(spec.shape) == 1 else tensor
            return tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self._reader.check_in_features(name, spec.shape[1])
        rows = tensor.numpy()
        if self.architecture.permuted and name.endswith(PERMUTED):
            rows = rows[np.argsort(head_rows(len(rows), self.model.head_dim))]
        scale = self._reader.tensors[name].scale
        assert scale is not None
        return layouts.encode(self.type, rows, spec.shape[1], scale)

    def _metadata(self, name: str) -> dict[str, tuple[str, Any]]:
        c, a = self.model, self.architecture.name
        metadata: dict[str, tuple[str, Any]] = {
            "general.architecture": ("string", a),
            "general.type": ("string", "model"),
            "general.name": ("string", name),
            "general.file_type": ("uint32", _FILE_TYPES[self.type]),
            "general.quantization_version": ("uint32", 2),
            f"{a}.vocab_size": ("uint32", c.vocab_size),
            f"{a}.context_length": ("uint32", c.max_position_embeddings),
            f"{a}.embedding_length": ("uint32", c.hidden_size),
            f"{a}.block_count": ("uint32", c.num_hidden_layers),
            f"{a}.feed_forward_length": ("uint32", c.intermediate_size),
            f"{a}.attention.head_count": ("uint32", c.num_attention_heads),
            f"{a}.attention.head_count_kv": ("uint32", c.num_key_value_heads),
            f"{a}.attention.key_length": ("uint32", c.head_dim),
            f"{a}.attention.value_length": ("uint32", c.head_dim),
            f"{a}.attention.layer_norm_rms_epsilon": ("float32", c.rms_norm_eps),
            f"{a}.rope.dimension_count": ("uint32", c.head_dim),
            f"{a}.rope.freq_base": ("float32", c.rope_theta),
            **exported(c.rope_scaling, a),
        }
        if self.type != "I2_S":
            metadata[EXACT_NAMES] = ("[string]", list(self._scales))
            metadata[EXACT_SCALES] = ("[float32]", list(self._scales.values()))
        return metadata
