"""`bitnet-ops inspect PATH`: the tensors of a model as a table; `--diff` compares two models."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from typing import Any

from bitnet_ops.cli.arguments import add_json
from bitnet_ops.cli.terminal import print_result
from bitnet_ops.errors import counted

# of the private block: not shown as they stand
_APART = ("format_version", "verified", "vision", "draft_head")
_WIDEST = 200  # characters of a value of the private block
_COLUMNS = ("tensor", "format", "shape", "scale", "-1 / 0 / +1 %", "sha256")
_MIN_SHOWN = 3  # columns that are shown however narrow the terminal is: a name is never broken


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
        help="compare PATH with OTHER instead; exit status 0 if they are equal, 1 if not, 2 if "
        "one cannot be read",
    )
    parser.add_argument(
        "--program",
        action="store_true",
        help="print the model's program instead: its blocks, one a line, as the operator that runs "
        "it takes them (docs/reference/program.md)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; 0 on success, 1 for models that differ."""
    from bitnet_ops.convert.inspect import inspect

    if args.diff is not None:
        return _print_diff(args)
    if args.program:
        return _print_program(args)
    report = inspect(args.file)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print_result(report, lines(report, width), as_json=args.json)
    return 0


def _print_diff(args: argparse.Namespace) -> int:
    from bitnet_ops.convert import diff as inspect_diff

    try:
        found = inspect_diff.diff(args.file, args.diff)
    except Exception as error:
        error.status = 2  # type: ignore[attr-defined]  # 1 says that they differ, as diff(1) does
        raise
    print_result(found, inspect_diff.lines(found), as_json=args.json)
    return 0 if found["equal"] else 1


def _print_program(args: argparse.Namespace) -> int:
    from bitnet_ops.blocks.listing import listing
    from bitnet_ops.config import ModelConfig
    from bitnet_ops.convert.inspect import open_source
    from bitnet_ops.loading.model_contents import completed_config
    from bitnet_ops.nn.rotary import rotary

    contents = open_source(args.file)
    config = ModelConfig.from_hf(completed_config(contents.config, contents.entries))
    text = str(listing(config, attention_factor=rotary(config).attention_factor))
    print_result({"program": text}, text.splitlines(), as_json=args.json)
    return 0


def lines(report: dict[str, Any], width: int | None = None) -> list[str]:
    """The report of convert.inspect.inspect as text.

    `width`: of the terminal; columns that do not fit are left out, the last ones first. None shows
    them all.
    """
    table = [_COLUMNS, *map(_cells, report["tensors"])]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(_COLUMNS))]
    count = len(_COLUMNS)
    while (
        width is not None and count > _MIN_SHOWN and sum(widths[:count]) + 2 * (count - 1) > width
    ):
        count -= 1
    text = [
        "  ".join(c.ljust(w) for c, w in zip(cells[:count], widths, strict=False)).rstrip()
        for cells in table
    ]
    if count < len(_COLUMNS):
        text.append(f"(left out for want of room: {', '.join(_COLUMNS[count:])}; --json has all)")
    return [*text, *_summary(report)]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    scale = shares = ""
    if row["zero"] is not None:
        several = row["scales"]
        scale = f"{several['min']:.4g}..{several['max']:.4g}" if several else f"{row['scale']:.6g}"
        total = max(1, math.prod(row["shape"]))
        shares = " / ".join(f"{100 * row[key] / total:.1f}" for key in ("minus", "zero", "plus"))
    shape = " x ".join(map(str, row["shape"]))
    return row["name"], row["format"], shape, scale, shares, row["sha256"][:12]


def _summary(report: dict[str, Any]) -> list[str]:
    t = report["totals"]
    lines = [
        f"{report['file']}: {report['kind']}, {report['bytes']} bytes, "
        f"model_type {report['model_type']!r}, {counted(t['tensors'], 'tensor')}",
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
    if (tower := report["vision"]) is not None:
        lines.append(
            f"tower   {tower['tensors']:>5} tensors of these, {tower['bytes']:,} bytes: images of "
            f"{tower['min_pixels']:,} to {tower['max_pixels']:,} pixels, {tower['depth']} blocks "
            f"of {tower['hidden_size']:,} features ({tower['num_heads']} heads, MLP "
            f"{tower['intermediate_size']:,}), rows of {tower['out_hidden_size']:,}"
        )
    if (draft := report["draft"]) is not None:
        turned = f", {len(draft['rotated'])} of them rotated" if draft["rotated"] else ""
        where = "tensors of these" if draft["listed"] else "tensors beside these"
        lines.append(
            f"drafts  {draft['tensors']:>5} {where}, {draft['weights']:,} weights: a draft head, "
            f"from {draft['origin']} (MLP {draft['intermediate_size']:,}, fed "
            f"{draft['feed']} its norm{turned})"
        )
    block = report["bitnet_ops"] if isinstance(report["bitnet_ops"], dict) else {}
    lines += [f"{key}: {_short(value)}" for key, value in block.items() if key not in _APART]
    if isinstance(verified := block.get("verified"), dict):
        lines.append("verified: " + ", ".join(f"{k} {_figure(v)}" for k, v in verified.items()))
    return lines + [f"remark: {remark}" for remark in report["remarks"]]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
