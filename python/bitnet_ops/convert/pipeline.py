"""`convert`, `convert_gguf`, `convert_bin`: any Source -> a folder with model.bin and report.json.

The order of work is one for all: open and plan the source, check the destination, check what only
data show, stream tensor by tensor into the writer, prove if asked, report, rename. Memory is
bounded by a few times the largest tensor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.convert.bin_source import BinSource
from bitnet_ops.convert.destination import building, check_destination
from bitnet_ops.convert.errors import ConvertError, reject
from bitnet_ops.convert.gguf.source import GgufSource
from bitnet_ops.convert.hf.checkpoint import Checkpoint
from bitnet_ops.convert.hf.source import HfSource
from bitnet_ops.convert.progress import Progress
from bitnet_ops.convert.report import ConvertReport, TernaryTotals, file_sha256
from bitnet_ops.convert.source import Source, Ternary
from bitnet_ops.convert.ternary import from_ternary, looks_ternary
from bitnet_ops.formats.destination import MODEL_FILE
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
            does not agree is rejected and not kept.
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
    started, target = time.perf_counter(), Path(dst)
    source = HfSource(
        Checkpoint(src_dir, allow_pickle=allow_pickle),
        assume_online=assume_online,
        lora=lora,
        trust_scales=trust_scales,
    )
    check_destination(source.path, target, force=force)
    source.check()
    proof = (text,) if verify else None
    with _write_errors(target):
        return _run(source, target, started, force, format_version, progress, proof, masters)


def convert_gguf(
    file: str | Path,
    dst: str | Path,
    *,
    i2s_layout: str = "a",
    q2_block: int | None = None,
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
        q2_block: 64 or 128, how many weights share a scale in tensors of type number 42, where the
            file's sizes and keys do not say.
        tokenizer: a folder whose tokenizer files to take instead of the file's metadata, or "none".
        assume_online: dense projections that are not ternary are masters; ternarise by absmean.
        verify: compare every weight and full logits with the file, decoded a second time; a result
            that does not agree is rejected and not kept.
        text, force, format_version, progress: as for `convert`.

    Returns the report, which also lies in `dst`. Raises ConvertError; nothing is left at `dst`.
    """
    started, target = time.perf_counter(), Path(dst)
    proof = (text,) if verify else None
    options: dict[str, Any] = dict(i2s_layout=i2s_layout, assume_online=assume_online)
    options |= dict(tokenizer=tokenizer, q2_block=q2_block)
    with _write_errors(target), GgufSource.opened(file, **options) as source:
        check_destination(source.path, target, force=force)
        return _run(source, target, started, force, format_version, progress, proof)


def convert_bin(
    src: str | Path,
    dst: str | Path,
    *,
    force: bool = False,
    format_version: int = 2,
    trust_scales: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the model file `src` (a .bin, or the folder with model.bin) anew, as the folder `dst`.

    Args:
        dst: folder to create. Holds model.bin, the tokenizer files beside `src` and report.json.
        force: replace `dst` if it is an earlier result.
        format_version: of the new model.bin, 2, or 1 for readers that know no other (FORMAT.md).
        trust_scales: take scales above any known one, which look as if they should divide.
        progress: called as progress(done, total, tensor_name) before each tensor.

    Returns the report, which also lies in `dst`; every code, scale and value of the result has been
    compared with the source. Raises ConvertError; nothing is left at `dst` then.
    """
    started, target = time.perf_counter(), Path(dst)
    with _write_errors(target), BinSource.opened(src, trust_scales=trust_scales) as source:
        check_destination(source.path, target, force=force)
        source.check()
        return _run(source, target, started, force, format_version, progress)


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SglbitntError) as error:
        reject("write-failed", f"to write {target}", str(error), "nothing was kept")


def _run(
    source: Source,
    target: Path,
    started: float,
    force: bool,
    version: int,
    progress: Progress | None,
    proof: tuple[str | Path | None] | None = None,
    masters: dict[str, Any] | None = None,
) -> ConvertReport:
    """Write, prove, report; `proof` holds the text to compare on, None asks for no proof."""
    with building(target, force=force) as folder:
        totals = _write(source, folder / MODEL_FILE, version, progress)
        source.check_result(folder / MODEL_FILE)
        report = _report(source, folder, totals)
        if proof is not None:
            text = proof[0]
            _prove(source, folder, report, None if text is None else Path(text))
        report.masters = masters
        report.seconds = round(time.perf_counter() - started, 3)
        report.write(folder)
    return report


def _write(source: Source, output: Path, version: int, progress: Progress | None) -> TernaryTotals:
    totals, specs = TernaryTotals(), source.plan.specs
    config = {**source.plan.hf_config, PRIVATE_BLOCK: source.plan.block}
    with Writer(output, config, len(specs), specs, version=version) as writer:
        for done, (name, spec) in enumerate(specs.items()):
            if progress is not None:
                progress(done, len(specs), name)
            if spec.kind == "dense" and not source.holds_ternary(name):
                _write_dense(source, name, writer)
            else:
                found = source.ternary(name)
                _write_ternary(source, name, found, spec.shape[1], writer, totals)
            source.release(name)
    return totals


def _write_dense(source: Source, name: str, writer: Writer) -> None:
    """A dense tensor as it is; an embedding or a head of ternary values as codes and scales."""
    tensor, spec = source.dense(name), source.plan.specs[name]
    if not (spec.may_be_ternary and looks_ternary(tensor) and bool(tensor.any())):
        return writer.add_dense(name, tensor)
    if writer.version == 1:
        source.remarks.append(f"ternary {name}: stored dense, every value exactly")
        return writer.add_dense(name, tensor)
    codes, scale, group_size, uneven = from_ternary(name, tensor)
    half = scale.half()
    scale = half if torch.equal(half.float(), scale) else scale
    writer.add_packed(name, ops.pack(codes), scale, tensor.shape[1], group_size)
    source.remarks.append(f"ternary {name}: stored as codes and scales")
    if uneven is not None:
        source.remarks.append(f"{name}: {uneven.line()}")


def _write_ternary(
    source: Source, name: str, found: Ternary, k: int, writer: Writer, totals: TernaryTotals
) -> None:
    totals.add(ops.unpack(found.rows, k) if found.codes is None else found.codes, found.scale)
    totals.uneven.add(found.uneven)
    writer.add_packed(name, found.rows, found.scale, k, found.group_size)
    if found.remark is not None and found.remark not in source.remarks:
        source.remarks.append(found.remark)


def _report(source: Source, folder: Path, totals: TernaryTotals) -> ConvertReport:
    plan, output = source.plan, folder / MODEL_FILE
    files = [MODEL_FILE, *source.finish(folder)]
    dense = [spec for spec in plan.specs.values() if spec.kind == "dense"]
    return ConvertReport(
        source=source.path.resolve().name,
        model_type=plan.config.model_type,
        linear_class=plan.scheme.linear_class,
        quantization_mode=plan.scheme.quantization_mode,
        assumed_online=plan.scheme.assumed,
        tensors=len(plan.specs),
        dense_parameters=sum(torch.Size(spec.shape).numel() for spec in dense),
        ternary=totals,
        source_bytes=source.nbytes,
        output_bytes=output.stat().st_size,
        seconds=0.0,
        sha256=file_sha256(output),
        files=files,
        remarks=source.remarks,
    )


def _prove(source: Source, folder: Path, report: ConvertReport, text: Path | None) -> None:
    from bitnet_ops.convert.verify.comparison import verify_conversion
    from bitnet_ops.convert.verify.proof import record_proof

    result = verify_conversion(source, folder, text=text)
    report.verification = result.to_dict()
    if result.failures:
        raise ConvertError(
            "verification-failed",
            "convert: expected the result to agree with its source, got "
            + "; ".join(result.failures)
            + f"; the result was not kept, please report this {source.noun}",
        )
    record_proof(source.hashes(), folder, report)
