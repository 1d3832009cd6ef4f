"""`convert`: a Hugging Face checkpoint -> a folder with model.bin, tokenizer and report.json.

The order of work: read headers and config, decide everything (plan.py), then stream tensor by
tensor into the writer, then verify if asked, then rename. Memory is bounded by a few times the
largest tensor.
"""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import torch

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.convert.destination import MODEL_FILE, TRAVELLERS, building, check_destination
from bitnet_ops.convert.errors import ConvertError, refuse
from bitnet_ops.convert.hf.checkpoint import Source, check_pooling, copy_files
from bitnet_ops.convert.hf.decide import check_scale_sense, unknown_options
from bitnet_ops.convert.hf.merged import MergedSource
from bitnet_ops.convert.hf.plan import EMBEDDING, HEAD, Plan, make_plan, scale_name
from bitnet_ops.convert.report import ConvertReport, Progress, TernaryTotals, file_sha256
from bitnet_ops.convert.ternary import (
    check_finite,
    from_masters,
    from_packed,
    from_ternary,
    looks_ternary,
    packed_scale,
)
from bitnet_ops.formats.sglbitnt import SglbitntError, Writer


def convert(
    src_dir: str | Path,
    dst: str | Path,
    *,
    verify: bool = False,
    force: bool = False,
    assume_online: bool = False,
    format_version: int = 2,
    text: str | Path | None = None,
    trust_scales: bool = False,
    allow_pickle: bool = False,
    lora: str | Path | None = None,
    masters: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert the checkpoint folder `src_dir` into the new folder `dst`.

    Args:
        src_dir: Hugging Face folder: config.json, model.safetensors or its shards, tokenizer files.
        dst: folder to create. Holds model.bin, the tokenizer files of the source and report.json.
        verify: compare full logits and every ternary weight of the result with the source, through
            transformers if that is installed, else through a plain fp32 forward; a result that
            does not agree is refused and not kept.
        force: replace `dst` if it is an earlier result.
        assume_online: treat a checkpoint without quantization_config as ternarised masters.
        format_version: of model.bin, 2, or 1 for readers that know no other (FORMAT.md).
        text: a UTF-8 file on which `verify` compares, instead of a short text of our own.
        trust_scales: convert packed weights whose scales look as if taken in the wrong sense.
        allow_pickle: read pytorch_model*.bin where there are no safetensors, by torch.load with
            weights_only=True, which runs no code of the file.
        lora: a PEFT directory whose LoRA adapter is merged into the masters before they are
            ternarised; packed sources have no masters.
        masters: what is known of the masters, for the report; `quantize` gives it.
        progress: called as progress(done, total, tensor_name) before each tensor.

    Returns the report, which also lies in `dst`.
    Raises ConvertError; its `code` names the reason. Nothing is left at `dst` then.
    """
    started = time.perf_counter()
    source, target = Source(src_dir, allow_pickle=allow_pickle), Path(dst)
    plan = make_plan(
        source.config,
        source.tensors,
        assume_online=assume_online,
        looks_ternary=lambda name: looks_ternary(source.tensor(name)),
    )
    check_destination(source.folder, target, force=force)
    if lora is not None:
        source = MergedSource.merge(source, plan, lora)
    if not trust_scales:
        check_scale_sense(_scales(source, plan), plan.scheme)
    try:
        with building(target, force=force) as folder:
            report = _build(source, plan, folder, format_version, progress)
            if verify:
                _verify(source, plan, folder, report, None if text is None else Path(text))
            report.masters = masters
            report.seconds = round(time.perf_counter() - started, 3)
            report.write(folder)
    except (OSError, SglbitntError) as error:
        refuse("write-failed", f"to write {target}", str(error), "nothing was kept")
    return report


def _build(
    source: Source, plan: Plan, folder: Path, version: int, progress: Progress | None
) -> ConvertReport:
    totals, remarks = TernaryTotals(), _remarks(source, plan)
    _check_tied_head(source, plan)
    config = _config(source, plan)
    names = plan.specs
    with Writer(folder / MODEL_FILE, config, len(names), names, version=version) as writer:
        for done, name in enumerate(plan.specs):
            if progress is not None:
                progress(done, len(plan.specs), name)
            remarks += _write_tensor(source, plan, name, writer, totals)
    files = copy_files(source.folder, folder, TRAVELLERS)
    output = folder / MODEL_FILE
    dense = [spec for spec in plan.specs.values() if spec.kind == "dense"]
    return ConvertReport(
        source=source.folder.resolve().name,
        model_type=plan.config.model_type,
        linear_class=plan.scheme.linear_class,
        quantization_mode=plan.scheme.quantization_mode,
        assumed_online=plan.scheme.assumed,
        tensors=len(plan.specs),
        dense_parameters=sum(torch.Size(spec.shape).numel() for spec in dense),
        ternary=totals,
        source_bytes=source.weight_bytes,
        output_bytes=output.stat().st_size,
        seconds=0.0,
        sha256=file_sha256(output),
        files=[MODEL_FILE, *files],
        remarks=remarks,
    )


def _scales(source: Source, plan: Plan) -> dict[str, float]:
    """The multiplying scales of a packed checkpoint, by weight name."""
    if plan.scheme.mode != "packed":
        return {}
    names = [name for name, spec in plan.specs.items() if spec.kind == "ternary"]
    return {name: _packed_scale(source, plan, name) for name in names}


def _packed_scale(source: Source, plan: Plan, name: str) -> float:
    return packed_scale(name, source.tensor(plan.stored[scale_name(name)]), plan.scheme)


def _write_tensor(
    source: Source, plan: Plan, name: str, writer: Writer, totals: TernaryTotals
) -> list[str]:
    """Write one tensor; returns the remarks it gives rise to."""
    spec, tensor = plan.specs[name], source.tensor(plan.stored[name])
    if spec.kind == "dense":
        check_finite(name, tensor)
        if name.endswith(".bias") and plan.scheme.bias_is_scaled:
            weight = f"{name.removesuffix('.bias')}.weight"
            tensor = tensor.float() * _packed_scale(source, plan, weight)
        writer.add_dense(name, tensor)
        return []
    remark, group_size = None, 0
    scale: float | torch.Tensor
    if plan.scheme.mode == "packed":
        scale = _packed_scale(source, plan, name)
        codes = from_packed(name, tensor, spec.shape[0])
    elif plan.scheme.mode == "ternary":
        codes, scale, group_size = from_ternary(name, tensor)
    else:
        codes, scale, remark = from_masters(name, tensor, plan.scheme)
    totals.add(codes, scale)
    writer.add_packed(name, ops.pack(codes), scale, spec.shape[1], group_size)
    return [] if remark is None else [remark]


def _config(source: Source, plan: Plan) -> dict[str, Any]:
    """The source's config.json with the private block that says how it was read."""
    model = plan.config
    block = {
        "format_version": 1,
        "source_linear_class": plan.scheme.linear_class,
        "source_mode": plan.scheme.quantization_mode,
        "converter_version": importlib.metadata.version("bitnet-ops"),
        "activation": model.hidden_act,
        "sub_norms": model.sub_norms,
        "head_dim": model.head_dim,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    return {**source.config, PRIVATE_BLOCK: {**block, **plan.found}}


def _check_tied_head(source: Source, plan: Plan) -> None:
    """A tied checkpoint may repeat the embedding as lm_head.weight, but not with other values."""
    if not plan.tied_head:
        return
    head, embedding = (source.tensor(plan.stored[name]) for name in (HEAD, EMBEDDING))
    if not torch.equal(head, embedding):
        refuse(
            "tie-mismatch",
            f"{HEAD} equal to {EMBEDDING}, since tie_word_embeddings is true",
            "different values",
            "if the head is its own matrix, set tie_word_embeddings to false",
        )


def _remarks(source: Source, plan: Plan) -> list[str]:
    remarks = [*plan.config.notes, *plan.remarks]
    if plan.config.embedding_only:
        check_pooling(source.folder)
        remarks.append("an embedding model: it has no head and generates no text; use embed()")
    if isinstance(source, MergedSource):
        remarks.append(f"{source.adapter.describe()} merged into the masters")
    if source.pickled:
        remarks.append("read from pickles, which were opened with weights_only=True")
    if source.code_files():
        files = ", ".join(source.code_files())
        remarks.append(f"code shipped with the checkpoint was not run: {files}")
    remarks += [
        f"quantization_config key {key}: unknown here; ignored"
        for key in unknown_options(source.config)
    ]
    if plan.tied_head:
        remarks.append(f"{HEAD} repeats the embedding and was not written")
    if plan.ignored:
        remarks.append(
            f"{len(plan.ignored)} rotary inv_freq buffers follow from rope_theta; ignored"
        )
    if plan.scheme.remark:
        remarks.append(plan.scheme.remark)
    return remarks


def _verify(
    source: Source, plan: Plan, folder: Path, report: ConvertReport, text: Path | None
) -> None:
    from bitnet_ops.convert.verify.comparison import verify_conversion
    from bitnet_ops.convert.verify.proof import record_proof, source_hashes

    result = verify_conversion(source, plan, folder, text=text)
    report.verification = result.to_dict()
    if result.failures:
        raise ConvertError(
            "verification-failed",
            "convert: expected the result to agree with its source, got "
            + "; ".join(result.failures)
            + "; the result was not kept, please report this checkpoint",
        )
    record_proof(source_hashes(source), folder, report)
