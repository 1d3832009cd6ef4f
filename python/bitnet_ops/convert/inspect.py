"""`bitnet-ops inspect FILE`: what a model file holds, tensor by tensor, with totals.

Reads and checks the whole file; runs no model. It must not know how the file was made, nor its
bytes: the Reader hands out what is in it.
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

from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig, UnsupportedModelError
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, TensorInfo, model_file
from bitnet_ops.models import TensorError, check_names, expected_tensors

_COLUMNS = ("tensor", "format", "shape", "scale", "-1 / 0 / +1 %", "sha256")
_WEIGHTS_PER_BYTE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = "List the tensors of a model file, with totals; checks all of its data."
    parser.add_argument("file", metavar="FILE", help="model.bin, or the folder that holds it")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; 0 on success, 1 with one line on stderr for a file that is refused."""
    try:
        report = inspect(args.file)
    except SglbitntError as error:
        print(f"bitnet-ops: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _print_rich(report)
    else:
        print(_plain(report))
    return 0


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything about the file at `path` (or `path`/model.bin) as plain numbers and strings.

    Keys: file, bytes, model_type, bitnet_ops (the config's private block or None), tensors (a list:
    name, format, shape, scale, minus, zero, plus, nbytes, sha256), totals, remarks. Shapes are
    logical, [N, K]; where the config does not give K it is 4 times the row bytes, and a remark says
    so. Raises SglbitntError for a file that breaks a rule of FORMAT.md.
    """
    file = model_file(path)
    with Reader(file) as reader:
        in_features, remarks = _in_features(reader)
        rows = [_row(reader, info, in_features.get(name)) for name, info in reader.tensors.items()]
        return {
            "file": str(file),
            "bytes": file.stat().st_size,
            "model_type": reader.config.get("model_type"),
            "bitnet_ops": reader.config.get(PRIVATE_BLOCK),
            "tensors": rows,
            "totals": _totals(rows),
            "remarks": remarks,
        }


def _in_features(reader: Reader) -> tuple[dict[str, int], list[str]]:
    """True K of the packed tensors as far as the config gives it, and what speaks against it."""
    packed = [name for name, info in reader.tensors.items() if info.packed]
    try:
        config = ModelConfig.from_hf(reader.config)
        if config.num_hidden_layers > len(reader.tensors):  # do not list a billion names
            raise TensorError(
                f"got {config.num_hidden_layers} layers, {len(reader.tensors)} tensors"
            )
        expected = expected_tensors(config)
        check_names(config, reader.tensors)
    except (UnsupportedModelError, TensorError) as error:
        return {}, [f"K is 4 * row bytes, padding included: {error}"] if packed else [str(error)]
    known, remarks = {}, []
    for name in packed:
        k = expected[name].shape[-1]
        try:
            reader.check_in_features(name, k)
            known[name] = k
        except SglbitntError as error:
            remarks.append(f"K is 4 * row bytes, padding included: {error}")
    return known, remarks


def _row(reader: Reader, info: TensorInfo, in_features: int | None) -> dict[str, Any]:
    shape = list(info.shape)
    counts: tuple[int | None, int | None, int | None] = (None, None, None)
    if info.packed:
        padded = _WEIGHTS_PER_BYTE * shape[1]
        shape[1] = padded if in_features is None else in_features
        minus, zero, plus = reader.code_counts(info.name)
        counts = (minus, zero - shape[0] * (padded - shape[1]), plus)
    return {
        "name": info.name,
        "format": "ternary" if info.packed else str(info.dtype).removeprefix("torch."),
        "shape": shape,
        "scale": info.scale,
        **dict(zip(("minus", "zero", "plus"), counts, strict=True)),
        "nbytes": info.nbytes,
        "sha256": hashlib.sha256(reader.memory(info.name)).hexdigest(),
    }


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    packed = [row for row in rows if row["format"] == "ternary"]
    dense = [row for row in rows if row["format"] != "ternary"]
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
    if row["format"] == "ternary":
        scale = f"{row['scale']:.6g}"
        total = math.prod(row["shape"])
        shares = " / ".join(f"{100 * row[key] / total:.1f}" for key in ("minus", "zero", "plus"))
    shape = " x ".join(map(str, row["shape"]))
    return row["name"], row["format"], shape, scale, shares, row["sha256"][:12]


def _summary(report: dict[str, Any]) -> list[str]:
    t = report["totals"]
    lines = [
        f"{report['file']}: {report['bytes']} bytes, model_type {report['model_type']!r}, "
        f"{t['tensors']} tensors",
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
    return lines + [f"remark: {remark}" for remark in report["remarks"]]


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
