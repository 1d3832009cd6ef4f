"""`convert`: any Source -> a folder with model.bin and report.json.

The order of work is one for all: open and plan the source, check the destination, check what only
data show, stream tensor by tensor into the writer, prove if asked, report, rename. Memory is
bounded by a few times the largest tensor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.config.draft import FEEDS
from bitnet_ops.config.draft import KEY as DRAFT
from bitnet_ops.convert.bin_source import BinSource, is_bin
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.draft import is_matrix
from bitnet_ops.convert.draft_choice import with_draft
from bitnet_ops.convert.errors import ConvertError, listed, reject
from bitnet_ops.convert.gguf_source import GgufSource
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.progress import Progress
from bitnet_ops.convert.report import ConvertReport, TernaryTotals
from bitnet_ops.convert.source import (
    Source,
    Stamp,
    Ternary,
    file_sha256,
    reject_changed,
    stamp,
    stamps,
)
from bitnet_ops.convert.ternary import (
    check_finite,
    damage,
    from_ternary,
    implausible,
    implausible_dense,
    looks_ternary,
)
from bitnet_ops.convert.tower_choice import with_tower
from bitnet_ops.errors import counted
from bitnet_ops.formats import destination
from bitnet_ops.formats.destination import MODEL_FILE, MODEL_FOLDER, DestinationError, Kind
from bitnet_ops.formats.gguf import is_gguf
from bitnet_ops.formats.sglbitnt import SglbitntError, Writer
from bitnet_ops.generate.tokenizer import TOKENIZER_FILE, Tokenizer, TokenizerError
from bitnet_ops.loading.generation_config import GENERATION_CONFIG, complete_ends
from bitnet_ops.loading.resolve import LoadError
from bitnet_ops.vision.weights import KEY as VISION
from bitnet_ops.vision.weights import PREFIX, shapes


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    verify: bool = False,
    text: str | Path | None = None,
    force: bool = False,
    format_version: int = 2,
    assume_online: bool = False,
    trust_scales: bool = False,
    allow_pickle: bool = False,
    lora: str | Path | None = None,
    i2s_layout: str | None = None,
    q2_block: int | None = None,
    tokenizer: str | Path | None = None,
    mmproj: str | Path | None = None,
    vision: bool = True,
    draft_from: str | Path | None = None,
    draft: bool = True,
    draft_feed: str | None = None,
    masters: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert `source` into the new folder `destination`.

    Args:
        source: a Hugging Face folder (config.json, model.safetensors or its shards, tokenizer
            files), a GGUF file, or a model.bin of any version, which is copied bit for bit.
        destination: folder to create. Holds model.bin, the tokenizer files and report.json.
        verify: compare full logits and every ternary weight of the result with the source, of a
            folder through transformers if that is installed, else through a plain forward; a
            result that does not agree is rejected and not kept. Copies are always compared.
        text: a UTF-8 file on which `verify` compares, instead of a short text of our own.
        force: replace `destination` if it is an earlier result.
        format_version: of model.bin, 2, or 1 for readers that know no other (FORMAT.md).
        assume_online: dense weights that nothing describes are masters; ternarise by absmean.
        trust_scales: convert packed weights whose scales look as if taken in the wrong sense.
        allow_pickle: read pytorch_model*.bin where there are no safetensors, by torch.load with
            weights_only=True, which runs no code of the file.
        lora: a PEFT directory whose LoRA adapter is merged into the masters of a folder before
            they are ternarised; packed sources have no masters.
        i2s_layout: "a" (as None), "b" or "c", the order of bytes of I2_S tensors of GGUF; the file
            does not say.
        q2_block: 64 or 128, how many weights share a scale in GGUF tensors of type number 42,
            where the file's sizes and keys do not say.
        tokenizer: a folder whose tokenizer files to take instead of GGUF metadata, or "none".
        mmproj: a GGUF file with the tower for images; None: the source's own, or of a GGUF file
            the mmproj file in its folder that fits.
        vision: False leaves the tower out; the result reads texts alone.
        draft_from: a base model to take the draft head from: a Hugging Face folder, a
            GGUF file or a converted model; None: the source's own, where it has one.
        draft: False leaves the draft head out.
        draft_feed: what its next draft is fed, its layer's output "after" its norm or "before" it;
            None: "after", or what a converted source says.
        masters: what is known of the masters, for the report; `quantize` gives it.
        progress: called as progress(done, total, tensor_name) before each tensor.

    Returns the report, which also lies in `destination`.
    Raises ConvertError; its `code` names the reason. Nothing is left at `destination` then.
    """
    started, path, target = time.perf_counter(), Path(source), Path(destination)
    given = dict(
        assume_online=assume_online,
        verify=verify,
        trust_scales=trust_scales,
        allow_pickle=allow_pickle,
        lora=lora,
        i2s_layout=i2s_layout,
        q2_block=q2_block,
        tokenizer=tokenizer,
    )
    options = {name: value for name, value in given.items() if value}
    if mmproj is not None and not vision:
        reject("mmproj", "an mmproj file, or no tower for images", "both", "choose one of them")
    _check_draft(draft_from, draft, draft_feed, format_version)
    before = stamps(path)
    for file in (mmproj, draft_from):
        before |= {} if file is None else stamps(Path(file))
    with (
        _write_errors(target),
        _opened(path, options) as opened,
        with_tower(opened, mmproj, vision and format_version > 1),
        with_draft(opened, draft_from, draft and format_version > 1, draft_feed),
    ):
        for file in opened.all_files().values():
            before.setdefault(file, stamp(file))
        check_destination(opened.path, target, force=force)
        opened.check()
        proof = (text,) if verify else None
        run = target, started, force, format_version, progress, proof, masters
        return _run(opened, before, *run)


def _check_draft(
    base: str | Path | None, wanted: bool, feed: str | None, format_version: int
) -> None:
    """Reject options of the draft head that contradict each other."""
    if feed is not None and feed not in FEEDS:
        reject("draft-feed", f"draft_feed {' or '.join(FEEDS)}", repr(feed)[:60])
    if not wanted and (base is not None or feed is not None):
        found = "--no-draft with --draft-from or --draft-feed"
        reject("draft", "a draft head, or none", found, "choose one of them")
    if base is not None and format_version == 1:
        reject("draft", "version 2 of model.bin with --draft-from", "version 1",
               "it has no scales of groups, which such a head needs")  # fmt: skip


@contextmanager
def _opened(path: Path, options: dict[str, Any]) -> Iterator[Source]:
    """The source at `path`; options that are not for its kind are rejected."""
    if is_bin(path):
        _reject_options("bin-option", "a .bin file", path, options, {"trust_scales"})
        with BinSource.opened(path, **options) as file:
            yield file
        return
    options = {name: value for name, value in options.items() if name != "verify"}
    if is_gguf(path):
        own = {"assume_online", "i2s_layout", "q2_block", "tokenizer"}
        _reject_options("folder-option", "a GGUF file", path, options, own)
        with GgufSource.opened(path, **options) as gguf:
            yield gguf
    else:
        own = {"assume_online", "trust_scales", "allow_pickle", "lora"}
        _reject_options("gguf-option", "a folder", path, options, own)
        checkpoint = Checkpoint(path, allow_pickle=options.pop("allow_pickle", False))
        yield HfSource(checkpoint, **options)


def _reject_options(
    code: str, noun: str, path: Path, options: dict[str, Any], own: set[str]
) -> None:
    names = ", ".join(f"--{name.replace('_', '-')}" for name in options if name not in own)
    if names:
        reject(code, f"{noun} without {names}", str(path), "these belong to other kinds of sources")


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SglbitntError) as error:
        reject("write-failed", f"to write {target}", str(error), "nothing was kept")


def _run(
    source: Source,
    before: dict[Path, Stamp],
    target: Path,
    started: float,
    force: bool,
    version: int,
    progress: Progress | None,
    proof: tuple[str | Path | None] | None = None,
    masters: dict[str, Any] | None = None,
) -> ConvertReport:
    """Write, prove, report; `proof` holds the text to compare on, None asks for no proof.

    `before`: the stamps of the source's files before they were opened.
    """
    with building(target, force=force) as folder:
        totals = _write(source, folder / MODEL_FILE, version, progress)
        source.check_result(folder / MODEL_FILE)
        report = _report(source, folder, totals)
        if proof is not None:
            text = proof[0]
            if progress is not None:
                progress(report.tensors, report.tensors, "comparing with the source")
            _prove(source, folder, report, None if text is None else Path(text))
        for file in source.all_files().values():
            if file in before and stamp(file) != before[file]:
                reject_changed(file)
        report.masters = masters
        report.seconds = round(time.perf_counter() - started, 3)
        report.write(folder)
    return report


def _write(source: Source, output: Path, version: int, progress: Progress | None) -> TernaryTotals:
    totals, specs, warnings = TernaryTotals(), source.plan.specs, list[str]()
    offset, tower, draft = source.plan.config.family.norm_offset, source.tower, source.draft
    beside = [] if tower is None else [PREFIX + name for name in shapes(tower.config)]
    found = {} if tower is None else {VISION: tower.config.to_json()}
    found |= {} if draft is None else {DRAFT: draft.config.to_dict()}
    config = {**source.plan.hf_config, PRIVATE_BLOCK: {**source.plan.block, **found}}
    names = [*specs, *beside, *([] if draft is None else draft.shapes)]
    with Writer(output, config, len(names), names, version=version) as writer:
        for done, (name, spec) in enumerate(specs.items()):
            if progress is not None:
                progress(done, len(names), name)
            if spec.kind == "dense" and not source.holds_ternary(name):
                tensor = source.dense(name)
                if warning := implausible_dense(name, tensor, offset):
                    warnings.append(warning)
                _write_dense(source, name, tensor, writer)
            else:
                ternary = source.ternary(name)
                _write_ternary(source, name, ternary, spec.shape[1], writer, totals)
            source.release(name)
        _write_tower(source, beside, len(names), writer, progress)
        _write_draft(source, len(names), writer, progress)
    source.remarks += damage([*totals.implausible, *warnings])
    return totals


def _write_tower(
    source: Source, names: list[str], total: int, writer: Writer, progress: Progress | None
) -> None:
    """The tensors of the tower behind those of the text, so that these lie together."""
    tower, nbytes = source.tower, 0
    done = len(source.plan.specs)
    for at, name in enumerate(names):
        if progress is not None:
            progress(done + at, total, name)
        assert tower is not None
        tensor = tower.read(name.removeprefix(PREFIX)).contiguous()
        check_finite(name, tensor)
        writer.add_dense(name, tensor)
        nbytes += tensor.nbytes
    if tower is not None:
        source.tower_remarks = [*source.tower_remarks, tower.line(nbytes)]
    source.remarks += source.tower_remarks


def _write_draft(source: Source, total: int, writer: Writer, progress: Progress | None) -> None:
    """The tensors of the draft head, behind all others."""
    draft, nbytes = source.draft, 0
    for at, name in enumerate([] if draft is None else draft.shapes):
        assert draft is not None
        if progress is not None:
            progress(total - len(draft.shapes) + at, total, name)
        if not is_matrix(name):
            tensor = draft.values(name).float().contiguous()
            check_finite(name, tensor)
            writer.add_dense(name, tensor)
            nbytes += tensor.nbytes
            continue
        try:
            found = draft.digits(name)
        except ValueError as error:
            reject("non-finite", f"finite values in {name}", str(error).rpartition("got ")[2],
                   "--no-draft leaves the draft head out")  # fmt: skip
        writer.add_packed(name, found.weight, found.scale, found.in_features, found.group_size)
        nbytes += found.weight.nbytes + found.scale.nbytes
    if draft is not None:
        source.draft_remarks = [*source.draft_remarks, draft.line(nbytes)]
    source.remarks += source.draft_remarks


def _write_dense(source: Source, name: str, tensor: Tensor, writer: Writer) -> None:
    """A dense tensor as it is; an embedding or a head of ternary values as codes and scales."""
    spec = source.plan.specs[name]
    if not (spec.may_be_ternary and looks_ternary(tensor) and bool(tensor.any())):
        rotation, module = source.plan.config.rotation, name.removesuffix(".weight")
        if spec.may_be_ternary and rotation and rotation.rotates(module, spec.shape[1]):
            reject("rotated-dense", f"a rotated {name} of -s, 0 and s", "other values",
                   "rotations of dense matrices are not implemented")  # fmt: skip
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
    codes = ops.unpack(found.rows, k) if found.codes is None else found.codes
    totals.add(codes, found.scale)
    if warning := implausible(name, codes, source.unwritten_rows(name)):
        totals.implausible.append(warning)
    elif found.remark is None and not torch.count_nonzero(codes):
        source.remarks.append(f"{name} holds zeros alone")
    totals.uneven.add(found.uneven)
    writer.add_packed(name, found.rows, found.scale, k, found.group_size)
    if found.remark is not None and found.remark not in source.remarks:
        source.remarks.append(found.remark)


def _report(source: Source, folder: Path, totals: TernaryTotals) -> ConvertReport:
    plan, output = source.plan, folder / MODEL_FILE
    files = [MODEL_FILE, *source.finish(folder)]
    try:
        ends = complete_ends(folder, plan.config)
    except LoadError as error:
        raise ConvertError("generation-config", f"convert: {error}") from error
    if ends:
        source.remarks += ends
        files = list(dict.fromkeys([*files, GENERATION_CONFIG]))
    source.remarks += _tokenizer_remarks(source, folder)
    dense = [spec for spec in plan.specs.values() if spec.kind == "dense"]
    beside = 0 if source.tower is None else len(shapes(source.tower.config))
    beside += 0 if source.draft is None else len(source.draft.shapes)
    return ConvertReport(
        source=source.path.resolve().name,
        model_type=plan.config.model_type,
        linear_class=plan.scheme.linear_class,
        quantization_mode=plan.scheme.quantization_mode,
        assumed_online=plan.scheme.assumed,
        tensors=len(plan.specs) + beside,
        dense_parameters=sum(torch.Size(spec.shape).numel() for spec in dense),
        ternary=totals,
        source_bytes=source.nbytes,
        output_bytes=output.stat().st_size,
        seconds=0.0,
        sha256=file_sha256(output),
        files=files,
        remarks=source.remarks,
    )


_OLD_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def _tokenizer_remarks(source: Source, folder: Path) -> list[str]:
    """What a user would else learn from the first prompt: no tokenizer, or one too large."""
    if not (folder / TOKENIZER_FILE).is_file():
        given = source.tokenizer_folder
        old = [name for name in _OLD_TOKENIZERS if given is not None and (given / name).is_file()]
        if not old:
            return []
        made = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        return [
            f"no {TOKENIZER_FILE}, so the model takes token ids alone: {listed(old)} are not read; "
            f"transformers makes it: {made}; then convert again"
        ]
    try:
        vocabulary = Tokenizer.from_dir(folder).backend.get_vocab()
    except TokenizerError as error:
        return [f"the model takes token ids alone: {error}"]
    rows = source.plan.config.vocab_size
    beyond = [token for token, i in sorted(vocabulary.items(), key=lambda p: p[1]) if i >= rows]
    if not beyond:
        return []
    return [
        f"{counted(len(beyond), 'token has an id', 'tokens have ids')} from {rows} on, for which "
        f"the embedding has no row; prompts must not hold them: {listed(beyond)}"
    ]


def _prove(source: Source, folder: Path, report: ConvertReport, text: Path | None) -> None:
    from bitnet_ops.convert.comparison import verify_conversion
    from bitnet_ops.convert.verify import record_proof

    result = verify_conversion(source, folder, text=text)
    report.verification = result.to_dict()
    if result.failures:
        raise ConvertError(
            "verification-failed",
            "convert: expected the result to agree with its source, got "
            + "; ".join(result.failures)
            + "; the result was not kept, "
            + ("get the source again" if result.damage else f"please report this {source.noun}"),
        )
    record_proof(source.hashes(), folder, report)


# Where a conversion goes: the rule of formats/destination.py in the converter's words -------------


def check_destination(
    source: Path,
    target: Path,
    kind: Kind = MODEL_FOLDER,
    *,
    force: bool,
    option: str = "--force",
) -> None:
    """Reject a target that exists (unless forced and one of ours) or that lies in the source.

    `option` is the name that the caller's command line has for `force`.
    """
    with _rejections():
        destination.check_name(target)
        real = Path(os.path.realpath(target))  # of a ring of links the path itself
        if real.is_relative_to(os.path.realpath(source)):
            reject("destination-in-source", f"a destination outside {source}", str(target))
        destination.check(target, kind, replace=force, option=option)


@contextmanager
def building(
    target: Path, kind: Kind = MODEL_FOLDER, *, force: bool, option: str = "--force"
) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` on success and vanishes on any failure."""
    with (
        _rejections(),
        destination.new_folder(target, kind, replace=force, option=option) as folder,
    ):
        yield folder


@contextmanager
def building_file(target: Path, kind: Kind, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path that becomes the file `target` on success."""
    with _rejections(), destination.new_file(target, kind, replace=force) as file:
        yield file


@contextmanager
def _rejections() -> Iterator[None]:
    try:
        yield
    except DestinationError as error:
        reject(error.code, error.expected, error.found, error.remedy)
