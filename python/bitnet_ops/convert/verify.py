"""The work of `bitnet-ops verify`: does a converted model still compute what its source does?

The proof of `convert --verify`, made later and on a text of one's own. The file is not changed. It
must not know how anything is compared.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.config.draft import PREFIX as DRAFTS
from bitnet_ops.config.draft import draft_config
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.comparison import Verification, verify_conversion
from bitnet_ops.convert.draft_choice import with_draft
from bitnet_ops.convert.errors import ConvertError, listed, reject, said_by
from bitnet_ops.convert.gguf_source import GgufSource
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.convert.report import ConvertReport, proof_line, table_lines
from bitnet_ops.convert.source import file_sha256
from bitnet_ops.convert.tower_choice import with_tower
from bitnet_ops.formats.destination import SUMMARY_FILE
from bitnet_ops.formats.gguf import Q2_BLOCKS, is_gguf
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, model_file, replace_config
from bitnet_ops.vision.weights import PREFIX, vision_config


@said_by("verify")
def verify(
    file: str | Path,
    src_dir: str | Path,
    *,
    text: str | Path | None = None,
    lora: str | Path | None = None,
    mmproj: str | Path | None = None,
    draft_from: str | Path | None = None,
) -> dict[str, Any]:
    """Compare a converted model with its source.

    Args:
        file: model.bin, or the folder that holds it.
        src_dir: the Hugging Face folder, or the GGUF file, that it came from.
        text: a UTF-8 file to measure logits and perplexity on; None is the converter's own text.
        lora: the PEFT directory that was merged when the file was made.
        mmproj: the file with the tower for images that was named when the file was made.
        draft_from: the base model that was named for the draft head; without it such a
            head is not compared.
    Returns JSON-ready: "verification" (its "failures" is empty where they agree), "tensors",
        "sha256", "source_sha256".
    Raises ConvertError for a source that does not convert or that belongs to another model
        ("other-source"), SglbitntError for a damaged file.
    """
    path = model_file(file)
    try:
        with Reader(path) as reader:
            config = dict(reader.config)
            names = {n for n in reader.tensors if not n.startswith((PREFIX, DRAFTS))}
    except SglbitntError as error:
        raise ConvertError(error.code, str(error)) from error
    chosen = None if text is None else Path(text)
    images = mmproj, vision_config(config) is not None
    drafts = draft_from, draft_config(config) is not None
    if is_gguf(src_dir):
        if lora is not None:
            reject("folder-option", "a folder with --lora", str(src_dir))
        result, hashes = _against_gguf(path, Path(src_dir), config, chosen, images, drafts)
    else:
        source = _folder_source(src_dir, config, names, lora)
        with with_tower(source, *images), with_draft(source, *drafts):
            result, hashes = verify_conversion(source, path, text=chosen), source.hashes()
    return {
        "verification": result.to_dict(),
        "sha256": file_sha256(path),
        "source_sha256": hashes,
        "tensors": tensor_table(path),
    }


def _against_gguf(
    path: Path,
    file: Path,
    config: dict[str, Any],
    text: Path | None,
    images: tuple[str | Path | None, bool],
    drafts: tuple[str | Path | None, bool],
) -> tuple[Verification, dict[str, str]]:
    block = config.pop(PRIVATE_BLOCK, None) or {}
    layout = str(block.get("source_mode", "")).partition(" layout ")[2] or "a"
    block_size = block.get("source_q2_block")
    q2_block = block_size if block_size in Q2_BLOCKS else None
    with GgufSource.opened(file, i2s_layout=layout, q2_block=q2_block) as source:
        _reject_another(config, source.plan.hf_config)
        with with_tower(source, *images), with_draft(source, *drafts):
            return verify_conversion(source, path, text=text), source.hashes()


def _folder_source(
    folder: str | Path, config: dict[str, Any], names: set[str], lora: str | Path | None
) -> HfSource:
    block = config.pop(PRIVATE_BLOCK, None) or {}
    checkpoint = Checkpoint(folder, allow_pickle=True)  # by weights_only
    _reject_another(config, checkpoint.config)
    online = block.get("source_mode") == "online"
    unmarked = checkpoint.config.get("quantization_config") is None
    source = HfSource(checkpoint, assume_online=online and unmarked, lora=lora, trust_scales=True)
    if set(source.plan.specs) != names:
        differing = listed(sorted(set(source.plan.specs) ^ names))
        reject("other-source", "the same tensors in file and source", f"a difference: {differing}")
    source.check()
    return source


def _reject_another(config: dict[str, Any], source: dict[str, Any]) -> None:
    keys = sorted(k for k in {*config, *source} if config.get(k) != source.get(k))
    if keys:
        reject(
            "other-source",
            "the checkpoint that the file came from",
            f"another config.json: {listed(keys)} differ",
            "verify against the checkpoint that was converted",
        )


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people, one fact a line."""
    hashes = [f"sha256 {value}  {name}" for name, value in result["source_sha256"].items()]
    return [
        proof_line(result["verification"]),
        f"sha256 {result['sha256']}  (the file)",
        *hashes,
        *table_lines(result["tensors"]),
    ]


# The proof as people and tools want it ------------------------------------------------------------

KEY = "verified"  # of the private block
_FIGURES = (
    "tokens",
    "relative_logit_difference",
    "top1_agreement",
    "loss_reference",
    "loss_ours",
    "perplexity_reference",
    "perplexity_ours",
)


def one_hash(hashes: dict[str, str]) -> str:
    """One SHA-256 for a set of files: of the lines `<hash>  <name>`, as sha256sum prints them."""
    lines = "".join(f"{value}  {name}\n" for name, value in hashes.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def tensor_table(path: Path) -> list[dict[str, Any]]:
    """Name, format, shape, scale, share of zeros and SHA-256 of every tensor of a model file."""
    rows = []
    for row in inspect(path)["tensors"]:
        values = {key: row[key] for key in ("name", "format", "shape", "scale", "sha256")}
        if row["scales"] is not None:  # one per row or group: shape, smallest and largest
            values["scales"] = row["scales"]
        if row["zero"] is not None:
            values["zero_share"] = row["zero"] / max(row["minus"] + row["zero"] + row["plus"], 1)
        rows.append(values)
    return rows


def key_figures(verification: dict[str, Any], hashes: dict[str, str]) -> dict[str, Any]:
    """What a file says about itself: how it was checked, how close it is, from what it came."""
    figures = {key: verification["logits"][key] for key in _FIGURES}
    return {
        "oracle": verification["oracle"],
        "text": verification["text"],
        "weights_different": verification["weights_different"],
        **figures,
        "source_sha256": one_hash(hashes),
    }


def record_proof(hashes: dict[str, str], folder: Path, report: ConvertReport) -> None:
    """Complete `report`, whose verification is there, and write the figures into the file.

    `hashes`: SHA-256 of the source's files, by name.
    """
    assert report.verification is not None
    file = model_file(folder)
    report.source_sha256 = hashes
    with Reader(file, check_codes=False) as reader:
        config = dict(reader.config)
    figures = key_figures(report.verification, hashes)
    config[PRIVATE_BLOCK] = {**config[PRIVATE_BLOCK], KEY: figures}
    replace_config(file, config)
    report.sha256, report.output_bytes = file_sha256(file), file.stat().st_size
    report.per_tensor = tensor_table(file)
    report.files.append(SUMMARY_FILE)
