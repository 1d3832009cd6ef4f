"""The proof of a conversion as people and tools want it: hashes, a table, figures in the file.

Takes what verify.py measured and the finished file; adds SHA-256 of source and result, every
tensor's zeros, scale and hash, and the key figures in the file's own config,
where `inspect` shows them. It must not know how anything was compared.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.convert.report import ConvertReport, file_sha256
from bitnet_ops.formats.destination import SUMMARY_FILE
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.formats.sglbitnt_config import replace_config

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
