"""`convert` for GGUF files: one file -> a folder with model.bin, the tokenizer and report.json.

The order of work is that of hf.py: read the headers, decide everything, stream tensor by tensor,
rename. Strict as there: every tensor that the metadata calls for, and no other. It must not know
how types are coded (gguf_tensors.py) or what metadata mean (gguf_config.py).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig, UnsupportedModelError
from bitnet_ops.convert.destination import MODEL_FILE, TRAVELLERS, building, check_destination
from bitnet_ops.convert.errors import ConvertError, listed, refuse
from bitnet_ops.convert.gguf.config import (
    PERMUTED,
    Architecture,
    architecture_of,
    gguf_name,
    hf_config,
    hf_name,
)
from bitnet_ops.convert.gguf.tensors import DENSE, Ternary, dense, ternary
from bitnet_ops.convert.gguf.tokenizer import tokenizer_files
from bitnet_ops.convert.hf.checkpoint import copy_files
from bitnet_ops.convert.report import ConvertReport, Progress, TernaryTotals, file_sha256
from bitnet_ops.formats.gguf import MAX_TENSORS, GgufError, Reader, TensorInfo, is_strings
from bitnet_ops.formats.gguf_layouts import I2S_LAYOUTS
from bitnet_ops.formats.sglbitnt import SglbitntError, Writer
from bitnet_ops.models import TensorSpec, expected_tensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXACT_NAMES, EXACT_SCALES = "bitnet_ops.scale_names", "bitnet_ops.scales"
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass
class GgufPlan:
    """Everything decided before data is read: config, the tensors to write, where they stand."""

    architecture: Architecture
    hf_config: dict[str, Any]
    config: ModelConfig
    specs: dict[str, TensorSpec]
    infos: dict[str, TensorInfo]  # by Hugging Face name; of `.scale` tensors too
    exact_scales: dict[str, float]  # by GGUF name
    assumed_online: bool = False
    remarks: list[str] = field(default_factory=list)


def convert_gguf(
    file: str | Path,
    dst: str | Path,
    *,
    i2s_layout: str = "a",
    tokenizer: str | Path | None = None,
    assume_online: bool = False,
    verify: bool = False,
    text: str | Path | None = None,
    force: bool = False,
    format_version: int = 2,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert the GGUF file `file` into the new folder `dst`.

    Args:
        i2s_layout: "a", "b" or "c", the order of bytes of I2_S tensors; the file does not say.
        tokenizer: a folder whose tokenizer files to take instead of the file's metadata, or "none".
        assume_online: dense projections that are not ternary are masters; ternarise by absmean.
        verify: compare every weight and full logits with the file, decoded a second time; a result
            that does not agree is refused and not kept.
        text, force, format_version, progress: as for `convert`.

    Returns the report, which also lies in `dst`. Raises ConvertError; nothing is left at `dst`.
    """
    started = time.perf_counter()
    source, target = Path(file), Path(dst)
    if i2s_layout not in I2S_LAYOUTS:
        refuse("i2s-layout", f"a layout among {', '.join(I2S_LAYOUTS)}", repr(i2s_layout))
    try:
        with gguf_errors(), Reader(source) as reader:
            plan = make_gguf_plan(reader)
            plan.assumed_online = assume_online
            check_destination(source, target, force=force)
            options = dict(i2s_layout=i2s_layout, assume_online=assume_online)
            with building(target, force=force) as folder:
                with _writer(reader, plan, folder, i2s_layout, format_version) as writer:
                    totals = _write(reader, plan, writer, progress, options)
                files = _tokenizer(reader, plan, folder, tokenizer)
                report = _report(source, reader, plan, folder, totals, files)
                if verify:
                    _verify(reader, plan, folder, i2s_layout, report, text)
                report.seconds = round(time.perf_counter() - started, 3)
                report.write(folder)
    except (OSError, SglbitntError) as error:
        refuse("write-failed", f"to write {target}", str(error), "nothing was kept")
    return report


@contextmanager
def gguf_errors() -> Iterator[None]:
    """What the reader refuses, as ConvertError."""
    try:
        yield
    except GgufError as error:
        raise ConvertError(f"gguf-{error.code}", f"convert: {error.message}") from error


def make_gguf_plan(reader: Reader) -> GgufPlan:
    """Decide how to convert a file; ConvertError names the first obstacle."""
    architecture = architecture_of(reader.metadata)
    infos, remarks = _named(reader, architecture)
    if EMBEDDING not in infos or len(infos[EMBEDDING].shape) != 2:
        refuse("missing-tensor", "token_embd.weight, a matrix", "no such tensor")
    vocab_size = infos[EMBEDDING].shape[0]
    config, more = hf_config(reader.metadata, architecture, vocab_size, HEAD not in infos)
    try:
        model = ModelConfig.from_hf(config)
    except UnsupportedModelError as error:
        raise ConvertError("unsupported-model", f"convert: {error}") from error
    if model.num_hidden_layers > len(infos):  # before a list of billions of names is made
        found = f"{len(infos)} tensors in all"
        refuse("missing-tensor", f"tensors for {model.num_hidden_layers} layers", found)
    specs = dict(expected_tensors(model))
    _check_names(specs, infos, architecture)
    for name, spec in specs.items():
        if infos[name].shape != tuple(spec.shape):
            found = f"{infos[name].type.name} {list(infos[name].shape)}"
            refuse("shape", f"{infos[name].name} of shape {list(spec.shape)}", found)
    exact = _exact_scales(reader.metadata)
    remarks += [*more, *model.notes]
    return GgufPlan(architecture, config, model, specs, infos, exact, remarks=remarks)


def _named(reader: Reader, architecture: Architecture) -> tuple[dict[str, TensorInfo], list[str]]:
    infos, unknown, remarks = {}, [], []
    for name, info in reader.tensors.items():
        if name == _ROPE_FACTORS:
            if (dense(reader, info) != 1).any():
                refuse("gguf-maths", f"no {name}", "factors other than 1", "scaled rotary "
                       "embedding (Llama 3.1 and later) is not implemented")  # fmt: skip
            remarks.append(f"{name} holds ones alone; ignored")
            continue
        renamed = hf_name(name, architecture)
        if renamed is None or renamed in infos:
            unknown.append(name)
        else:
            infos[renamed] = info
    if unknown:
        refuse("unknown-tensor", f"the tensors of {architecture.name} alone", listed(unknown),
               "this kind of model is not implemented")  # fmt: skip
    return infos, remarks


def _check_names(
    specs: dict[str, TensorSpec], infos: dict[str, TensorInfo], architecture: Architecture
) -> None:
    scales = {f"{n.removesuffix('.weight')}.scale" for n, s in specs.items() if s.kind == "ternary"}
    unknown = [
        info.name for name, info in infos.items() if name not in specs and name not in scales
    ]
    biases = [name for name in unknown if name.endswith(".bias")]
    if biases:
        refuse("bias", "projections without biases", listed(biases))
    if unknown:
        refuse("unknown-tensor", f"the {len(specs)} tensors of this model", listed(unknown))
    missing = [gguf_name(name, architecture) for name in specs if name not in infos]
    if missing:
        refuse("missing-tensor", f"all {len(specs)} tensors", f"no {listed(missing)}")


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
        refuse("gguf-metadata", f"{EXACT_NAMES} and {EXACT_SCALES} of one length", "other values")
    return dict(zip(names, scales.astype(float).tolist(), strict=True))


# Writing --------------------------------------------------------------------------------------


def _writer(reader: Reader, plan: GgufPlan, folder: Path, layout: str, version: int) -> Writer:
    config = _private_config(reader, plan, layout)
    names = plan.specs
    return Writer(folder / MODEL_FILE, config, len(names), names, version=version)


def _write(
    reader: Reader,
    plan: GgufPlan,
    writer: Writer,
    progress: Progress | None,
    options: dict[str, Any],
) -> TernaryTotals:
    totals = TernaryTotals()
    for done, (name, spec) in enumerate(plan.specs.items()):
        if progress is not None:
            progress(done, len(plan.specs), name)
        info = plan.infos[name]
        if spec.kind == "dense":
            writer.add_dense(name, dense(reader, info))
        else:
            found = _read_ternary(reader, plan, name, options)
            if found.remark is not None and found.remark not in plan.remarks:
                plan.remarks.append(found.remark)
            codes = ops.unpack(found.rows, spec.shape[1])
            totals.add(codes, float(found.scale.max()))
            writer.add_packed(name, found.rows, found.scale, spec.shape[1], found.group_size)
        reader.release(info.name)
    return totals


def _read_ternary(reader: Reader, plan: GgufPlan, name: str, options: dict[str, Any]) -> Ternary:
    info = plan.infos[name]
    scale_info = plan.infos.get(scale_name(name))
    factor = 1.0
    if scale_info is not None:
        if scale_info.shape != (1,) or scale_info.type.name not in DENSE:
            form = f"{scale_info.type.name} {list(scale_info.shape)}"
            refuse("group-scales", f"one scale in {scale_info.name}", form)
        factor = float(dense(reader, scale_info))
    permuted = plan.architecture.permuted and name.endswith(PERMUTED)
    return ternary(
        reader,
        info,
        factor=factor,
        exact_scale=plan.exact_scales.get(info.name),
        head_dim=plan.config.head_dim if permuted else None,
        **options,
    )


def _private_config(reader: Reader, plan: GgufPlan, i2s_layout: str) -> dict[str, Any]:
    """config.json as transformers would have it, with the block that says where it comes from."""
    kinds = _kinds(plan)
    block = {
        "format_version": 1,
        "source_linear_class": "gguf",
        "source_mode": kinds + (f" layout {i2s_layout}" if "I2_S" in kinds else ""),
        "source_architecture": plan.architecture.name,
        "converter_version": importlib.metadata.version("bitnet-ops"),
    }
    return {**plan.hf_config, PRIVATE_BLOCK: block}


def _kinds(plan: GgufPlan) -> str:
    """The types of the projections, e.g. "I2_S"."""
    names = [name for name, spec in plan.specs.items() if spec.kind == "ternary"]
    return ", ".join(dict.fromkeys(plan.infos[name].type.name for name in names))


def _tokenizer(
    reader: Reader, plan: GgufPlan, folder: Path, choice: str | Path | None
) -> list[str]:
    """Write the tokenizer files; returns their names."""
    if choice is None:
        made, remarks = tokenizer_files(reader.metadata, plan.config)
        plan.remarks += remarks
    elif str(choice) == "none":
        made = {}
    else:
        names = [name for name in TRAVELLERS if (Path(choice) / name).is_file()]
        if "tokenizer.json" not in names:
            refuse("tokenizer-missing", f"tokenizer.json in {choice}", "no such file")
        return copy_files(Path(choice), folder, names)
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(made)


def _report(
    source: Path,
    reader: Reader,
    plan: GgufPlan,
    folder: Path,
    totals: TernaryTotals,
    files: list[str],
) -> ConvertReport:
    output = folder / MODEL_FILE
    kinds = {info.type.name for info in plan.infos.values()}
    remarks = list(plan.remarks)
    if "I2_S" in kinds:
        remarks.append(
            "I2_S has three layouts that no file tells apart: if the model talks nonsense, convert "
            "again with another --i2s-layout (docs/gguf.md)"
        )
    dense_specs = [spec for spec in plan.specs.values() if spec.kind == "dense"]
    return ConvertReport(
        source=source.resolve().name,
        model_type=plan.config.model_type,
        linear_class=f"gguf {plan.architecture.name}",
        quantization_mode=_kinds(plan),
        assumed_online=plan.assumed_online,
        tensors=len(plan.specs),
        dense_parameters=sum(torch.Size(spec.shape).numel() for spec in dense_specs),
        ternary=dataclasses.replace(totals),
        source_bytes=reader.size,
        output_bytes=output.stat().st_size,
        seconds=0.0,
        sha256=file_sha256(output),
        files=[MODEL_FILE, *files],
        remarks=remarks,
    )


def _verify(
    reader: Reader,
    plan: GgufPlan,
    folder: Path,
    layout: str,
    report: ConvertReport,
    text: str | Path | None,
) -> None:
    from bitnet_ops.convert.verify.gguf_oracle import verify_gguf
    from bitnet_ops.convert.verify.proof import record_proof

    result = verify_gguf(reader, plan, folder, layout, None if text is None else Path(text))
    report.verification = result.to_dict()
    if result.failures:
        refuse(
            "verification-failed",
            "the result to agree with its source",
            "; ".join(result.failures[:4]),
            "the result was not kept, please report this file",
        )
    record_proof({reader.path.name: file_sha256(reader.path)}, folder, report)
