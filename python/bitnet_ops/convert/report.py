"""The record of one conversion, written as report.json beside the model.

Plain numbers and strings only: it says what was read, what was decided, what was written and, with
--verify, how close the result is to its source. It must not know how any of that is done.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bitnet_ops.convert.source import Uneven
from bitnet_ops.errors import counted
from bitnet_ops.formats.destination import REPORT_FILE, SUMMARY_FILE
from bitnet_ops.untrusted import json_text, printable


@dataclass
class TernaryTotals:
    """Sums over the packed projections; scales multiply."""

    projections: int = 0
    weights: int = 0
    zeros: int = 0
    smallest_scale: float = float("inf")
    largest_scale: float = 0.0
    uneven: Uneven = field(default_factory=Uneven)
    implausible: list[str] = field(default_factory=list)

    def add(self, codes: torch.Tensor, scale: float | torch.Tensor) -> None:
        """Count one projection: codes int8 [N, K] and its multiplying scales.

        A group without weights may have a scale of 0, which says nothing.
        """
        scales = torch.as_tensor(scale, dtype=torch.float64)
        scales = scales[scales > 0]
        self.projections += 1
        self.weights += codes.numel()
        self.zeros += codes.numel() - int(torch.count_nonzero(codes))
        self.smallest_scale = min(self.smallest_scale, float(scales.min()))
        self.largest_scale = max(self.largest_scale, float(scales.max()))


@dataclass
class ConvertReport:
    """What one conversion did; `verification` is None unless it was asked for."""

    source: str  # the name of its folder: a report travels, paths do not
    model_type: str
    linear_class: str
    quantization_mode: str
    assumed_online: bool
    tensors: int
    dense_parameters: int
    ternary: TernaryTotals
    source_bytes: int
    output_bytes: int
    seconds: float
    sha256: str
    files: list[str]
    remarks: list[str]
    versions: dict[str, str] = field(default_factory=lambda: versions())
    verification: dict[str, Any] | None = None
    source_sha256: dict[str, str] | None = None  # of every file, with a verification
    per_tensor: list[dict[str, Any]] | None = None  # likewise
    masters: dict[str, Any] | None = None  # what `quantize` found in them

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values, with the share of zeros computed."""
        result = dataclasses.asdict(self)
        weights = self.ternary.weights
        result["ternary"]["zero_share"] = self.ternary.zeros / weights if weights else 0.0
        return result

    def write(self, folder: Path) -> None:
        """Write report.json into `folder`; with a verification, report.txt too."""
        text = json_text(self.to_dict(), indent=1)
        (folder / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
        if self.verification is not None:
            summary = "\n".join(map(printable, self.summary())) + "\n"
            (folder / SUMMARY_FILE).write_text(summary, encoding="utf-8")

    def lines(self) -> list[str]:
        """The report for people, one fact a line."""
        t = self.ternary
        result = [
            f"{self.model_type}, {self.linear_class} {self.quantization_mode}"
            + (" (assumed)" if self.assumed_online else ""),
            f"{counted(self.tensors, 'tensor')}: {t.projections} ternary ({t.weights:,} weights, "
            f"{100 * t.zeros / max(t.weights, 1):.1f} % zeros, scales {t.smallest_scale:.4g} to "
            f"{t.largest_scale:.4g}), {self.dense_parameters:,} parameters dense",
            f"{self.source_bytes:,} bytes -> {self.output_bytes:,} bytes in {self.seconds:.1f} s",
        ]
        if t.uneven.groups:
            result.append(t.uneven.line())
        if self.verification is not None:
            result.append(proof_line(self.verification))
        return result + [f"note: {remark}" for remark in self.remarks]

    def summary(self) -> list[str]:
        """The whole proof in lines of text: what, from what, how close, and every tensor."""
        lines = self.lines()
        for name, value in (self.source_sha256 or {}).items():
            lines.append(f"sha256 {value}  {self.source}/{name}")
        return [*lines, f"sha256 {self.sha256}  model.bin", *table_lines(self.per_tensor or [])]


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Every tensor's zeros, scale and hash (proof.tensor_table), a tensor a line."""
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{'tensor':{width}}  format      zeros  scale        sha256"]
    for row in rows:
        zeros = f"{100 * row['zero_share']:5.1f} %" if "zero_share" in row else " " * 7
        scale = "" if row["scale"] is None else f"{row['scale']:.6g}"
        if several := row.get("scales"):
            scale = f"{several['min']:.3g}..{several['max']:.3g}"
        lines.append(
            f"{row['name']:{width}}  {row['format']:9} {zeros}  {scale:11}  {row['sha256'][:16]}"
        )
    return lines


def proof_line(proof: dict[str, Any]) -> str:
    """A verification in one sentence."""
    figures, floating = proof["logits"], proof.get("floating_activations")
    source = "" if floating is None else _source_arithmetic(floating)
    noise = "" if (alone := proof.get("noise")) is None else _own_noise(alone)
    return (
        f"verified against {proof['oracle']}: {proof['weights_different']} of {proof['weights']:,} "
        f"weights differ; {counted(figures['tokens'], 'token')}: largest logit difference "
        f"{figures['max_abs_logit_difference']:.3g} ({figures['relative_logit_difference']:.2g} of "
        f"the largest), top-1 {100 * figures['top1_agreement']:.1f} %, loss "
        f"{figures['loss_ours']:.4f} against {figures['loss_reference']:.4f} (perplexity "
        f"{figures['perplexity_ours']:.3f} against {figures['perplexity_reference']:.3f}) on the "
        f"{proof['text']}{source}{noise}{_tower(proof.get('tower'))}"
        f"{_draft(proof.get('draft'))}"
    )


def _tower(proof: dict[str, Any] | None) -> str:
    """A tower for images in half a sentence; nothing where there is none."""
    if proof is None:
        return ""
    same = f"; tower for images: {proof['tensors_different']} of {proof['tensors']} tensors differ"
    figures = proof["logits"]
    same += (
        f", {counted(figures['tokens'], 'token')} with images: largest logit difference "
        f"{figures['relative_logit_difference']:.2g} of the largest"
    )
    if proof["oracle"] is None:
        return f"{same}, its rows were not compared ({proof['why_not_transformers']})"
    return (
        f"{same}, largest difference of {counted(proof['rows'], 'row')} "
        f"{proof['relative_difference']:.2g} of the largest value against {proof['oracle']}"
    )


def _draft(proof: dict[str, Any] | None) -> str:
    """A draft head in half a sentence; nothing where there is none."""
    if proof is None:
        return ""
    if proof["why_not"] is not None:
        return f"; draft head: not compared ({proof['why_not']})"
    return (
        f"; draft head: {counted(proof['tensors'], 'tensor')}, a weight off by "
        f"{proof['largest_error']:.2g} of the step between its levels at most"
    )


def _own_noise(figures: dict[str, Any]) -> str:
    """How far the last bits carry in this very model; trained ones need no such words."""
    return (
        f"; in this model the last bits of its input alone change a logit by "
        f"{figures['relative_logit_difference']:.2g} of the largest, top-1 to "
        f"{100 * figures['top1_agreement']:.1f} %"
    )


def _source_arithmetic(figures: dict[str, Any]) -> str:
    """What rounding the activations costs where the source leaves them floating."""
    return (
        f"; with the source's floating activations: largest logit difference "
        f"{figures['relative_logit_difference']:.2g} of the largest, top-1 "
        f"{100 * figures['top1_agreement']:.1f} %, loss {figures['loss_reference']:.4f}"
    )


def versions() -> dict[str, str]:
    """Versions of everything that took part."""
    names = ("bitnet-ops", "torch", "safetensors")
    found = {name: importlib.metadata.version(name) for name in names}
    return {**found, "python": platform.python_version()}
