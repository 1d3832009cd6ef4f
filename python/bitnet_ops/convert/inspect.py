"""`bitnet-ops inspect PATH`: what a model file or folder holds, tensor by tensor, with totals.

Reads and checks all of it; runs no model. `A --diff B` compares two. It must not know kinds of
files, nor their bytes: inspect_sources.py hands out what is in them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.convert import inspect_diff
from bitnet_ops.convert.errors import ConvertError
from bitnet_ops.convert.inspect_sources import Source, open_source
from bitnet_ops.formats.gguf import GgufError
from bitnet_ops.formats.sglbitnt import SglbitntError
from bitnet_ops.untrusted import printable

_APART = ("format_version", "verified")  # of the private block: not shown as they stand
_WIDEST = 200  # characters of a value of the private block
_COLUMNS = ("tensor", "format", "shape", "scale", "-1 / 0 / +1 %", "sha256")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "List the tensors of a model file (.bin, .gguf) or folder (converted, or a Hugging Face "
        "checkpoint), with totals; checks all of its data. With --diff, compare two."
    )
    parser.add_argument("file", metavar="PATH", help="model.bin, a .gguf file, or a folder")
    parser.add_argument(
        "--diff",
        metavar="OTHER",
        help="compare PATH with OTHER instead; exit status 0 if they are equal, 1 if not",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; 0 on success, 1 for models that differ, 2 for a file that is refused."""
    try:
        if args.diff is not None:
            return _print_diff(args)
        report = inspect(args.file)
    except (SglbitntError, GgufError, ConvertError) as error:
        print(f"bitnet-ops: error: {printable(error)}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _print_rich(report)
    else:
        print(_plain(report))
    return 0


def _print_diff(args: argparse.Namespace) -> int:
    found = inspect_diff.diff(args.file, args.diff)
    as_json = json.dumps(found, indent=1, ensure_ascii=False) if args.json else None
    print(as_json or "\n".join(map(printable, inspect_diff.lines(found))))
    return 0 if found["equal"] else 1


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything about the model at `path` as plain numbers and strings.

    Keys: file, kind, bytes, model_type, bitnet_ops (the config's private block or None), tensors (a
    list: name, format, shape, scale, scales, minus, zero, plus, nbytes, sha256), totals, remarks.
    Shapes are logical, [N, K]; where nothing gives K it is 4 times the row bytes, and a remark says
    so. `scale` is a tensor's only one; where there are more, `scales` has their shape, smallest and
    largest. Raises SglbitntError, GgufError or ConvertError for a file that is damaged.
    """
    source = open_source(path)
    rows = [_row(source, name) for name in source.entries]
    return {
        "file": str(source.path),
        "kind": source.kind,
        "bytes": source.nbytes,
        "model_type": source.config.get("model_type"),
        "bitnet_ops": source.config.get(PRIVATE_BLOCK),
        "tensors": rows,
        "totals": _totals(rows),
        "remarks": source.remarks,
    }


def _row(source: Source, name: str) -> dict[str, Any]:
    entry, scales = source.entries[name], source.scales(name)
    single = scales is not None and scales.numel() == 1
    several = None
    if scales is not None and not single:
        several = {
            "shape": list(scales.shape),
            "min": float(scales.min()),
            "max": float(scales.max()),
        }
    counts = source.counts(name) or (None, None, None)
    return {
        "name": name,
        "format": entry.format,
        "shape": list(entry.shape),
        "scale": float(scales) if scales is not None and single else None,
        "scales": several,
        **dict(zip(("minus", "zero", "plus"), counts, strict=True)),
        "nbytes": entry.nbytes,
        "sha256": hashlib.sha256(source.memory(name)).hexdigest(),
    }


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    packed = [row for row in rows if row["zero"] is not None]
    dense = [row for row in rows if row["zero"] is None]
    weights = sum(math.prod(row["shape"]) for row in packed)
    parameters = sum(math.prod(row["shape"]) for row in dense)
    packed_bytes = sum(row["nbytes"] for row in packed)
    dense_bytes = sum(row["nbytes"] for row in dense)
    return {
        "tensors": len(rows),
        "packed_tensors": len(packed),
        "dense_tensors": len(dense),
        "ternary_weights": weights,
        "dense_parameters": parameters,
        "packed_bytes": packed_bytes,
        "dense_bytes": dense_bytes,
        "share_zero": _ratio(sum(row["zero"] for row in packed), weights),
        "bits_per_ternary_weight": _ratio(8 * packed_bytes, weights),
        "bits_per_parameter": _ratio(8 * (packed_bytes + dense_bytes), weights + parameters),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# --- text -----------------------------------------------------------------------------------------


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    scale = shares = ""
    if row["zero"] is not None:
        several = row["scales"]
        scale = f"{several['min']:.4g}..{several['max']:.4g}" if several else f"{row['scale']:.6g}"
        total = math.prod(row["shape"])
        shares = " / ".join(f"{100 * row[key] / total:.1f}" for key in ("minus", "zero", "plus"))
    shape = " x ".join(map(str, row["shape"]))
    return printable(row["name"]), row["format"], shape, scale, shares, row["sha256"][:12]


def _summary(report: dict[str, Any]) -> list[str]:
    t = report["totals"]
    lines = [
        f"{report['file']}: {report['kind']}, {report['bytes']} bytes, "
        f"model_type {report['model_type']!r}, {t['tensors']} tensors",
        f"dense   {t['dense_tensors']:>5} tensors {t['dense_parameters']:>13} parameters "
        f"{t['dense_bytes']:>13} bytes",
    ]
    if t["packed_tensors"]:
        lines.append(
            f"ternary {t['packed_tensors']:>5} tensors {t['ternary_weights']:>13} weights    "
            f"{t['packed_bytes']:>13} bytes, {t['bits_per_ternary_weight']:.3f} bits per weight, "
            f"{100 * t['share_zero']:.1f} % zeros"
        )
    if t["tensors"]:
        lines.append(f"all     {t['bits_per_parameter']:.3f} bits per parameter")
    block = report["bitnet_ops"] or {}
    lines += [f"{key}: {_short(value)}" for key, value in block.items() if key not in _APART]
    if isinstance(verified := block.get("verified"), dict):
        lines.append("verified: " + ", ".join(f"{k} {_figure(v)}" for k, v in verified.items()))
    lines += [f"remark: {remark}" for remark in report["remarks"]]
    return [printable(line) for line in lines]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain(report: dict[str, Any]) -> str:
    table = [_COLUMNS, *map(_cells, report["tensors"])]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in table
    ]
    return "\n".join([*lines, *_summary(report)])


def _print_rich(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", justify="right" if column == "scale" else "left")
    for row in report["tensors"]:
        table.add_row(*map(Text, _cells(row)))  # Text: a name is never markup
    console = Console()
    console.print(table)
    for line in _summary(report):
        console.print(Text(line))
