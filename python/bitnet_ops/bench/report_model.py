"""The report of `bench model` as text: one table for each kind of row.

It must not know how rows were made; it reads the fields that run_model.py writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bitnet_ops.bench.report import header_lines, number

Report = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]  # title, column titles, cells


def tables(report: Report) -> list[Table]:
    """Every table of the report that has rows."""
    makers: tuple[tuple[str, str, list[str], Callable[[dict[str, Any]], list[str]]], ...] = (
        ("decode", "Decode: 64 tokens behind a context", _DECODE, _decode),
        ("prefill", "Prefill: a prompt into an empty cache", _PREFILL, _prefill),
        ("parts", "Where a decode step goes, ms", _PARTS, _parts),
        ("rival", "Other engines in this run, same threads", _RIVAL, _rival),
    )
    found = []
    for kind, title, columns, cells in makers:
        rows = [row for row in report["rows"] if row["kind"] == kind]
        if rows:
            found.append((title, columns, [cells(row) for row in rows]))
    return found


_DECODE = ["weights", "head", "T", "batch", "context", "tok/s", "ms", "MB/step", "limit tok/s"]
_DECODE += ["share", "regions", "ping-pong ns", "notes"]


def _decode(row: dict[str, Any]) -> list[str]:
    return [
        row["weights"],
        row["head"],
        str(row["threads"]),
        str(row["batch"]),
        str(row["context"]),
        number(row["tokens_per_s"]),
        number(row["step_ms"]["median"]),
        number(row["bytes_per_step"] / 1e6),
        number(row["limit_tokens_per_s"]),
        "-" if row.get("impossible") else f"{row['share']['median']:.2f}",
        "-" if row["regions"] is None else str(row["regions"]),
        "-" if row["ping_pong_ns"] is None else f"{row['ping_pong_ns']:.0f}",
        "disturbed" if row["disturbed"] else "",
    ]


_PREFILL = ["weights", "head", "T", "tokens", "tok/s", "s", "GMAC/s", "share of int8 peak"]


def _prefill(row: dict[str, Any]) -> list[str]:
    return [
        row["weights"],
        row["head"],
        str(row["threads"]),
        str(row["tokens"]),
        number(row["tokens_per_s"]),
        number(row["seconds"]),
        number(row["gmac_s"]),
        f"{row['share']:.2f}",
    ]


_PARTS = ["weights", "head", "T", "context", "step", "reading alone", "qkv", "attention", "o"]
_PARTS += ["gate/up", "down", "head", "rest", "rest, share"]


def _parts(row: dict[str, Any]) -> list[str]:
    return [
        row["weights"],
        row["head"],
        str(row["threads"]),
        str(row["context"]),
        number(row["step_ms"]),
        number(row["limit_ms"]),
        *(number(value) for value in row["parts_ms"].values()),
        f"{row['rest_ms']:.2f}",
        "parts > step" if row.get("impossible") else f"{row['overhead']:.1%}",
    ]


_RIVAL = ["engine", "T", "what", "tokens", "its tok/s", "ours is x faster", "notes"]


def _rival(row: dict[str, Any]) -> list[str]:
    measured = "tokens_per_s" in row
    notes = [row["note"]] if "note" in row else []
    return [
        row["name"],
        str(row["threads"]),
        row["what"],
        str(row["tokens"]),
        number(row["tokens_per_s"]) if measured else "-",
        number(row["speedup"]["median"]) if measured else "-",
        ", ".join(notes + ["disturbed"] * bool(row.get("disturbed"))),
    ]


def columns_of_text(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table as aligned lines."""
    body = [list(titles), *map(list, cells)]
    widths = [max(len(line[i]) for line in body) for i in range(len(titles))]
    return [
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in body
    ]


def subject_name(report: Report) -> str:
    """The model that was measured: its file, or the name of a synthetic one."""
    settings = report["settings"]
    return str(settings.get("model") or settings["dummy"])


def lines(report: Report) -> list[str]:
    """The whole report as text."""
    text = header_lines(report)
    for model in report["models"]:
        text.append(
            f"{subject_name(report)}, {model['weights']} weights + {model['head']} head: "
            f"{(model['body'] + model['head_bytes']) / 1e6:.0f} MB a token at context 0, and "
            f"{model['per_position'] / 1e3:.1f} kB for each cached token, "
            f"{report['settings']['kv_dtype']}"
        )
    for title, titles, cells in tables(report):
        text += ["", title, *columns_of_text(titles, cells)]
    if report["rivals_missing"]:
        text += ["", f"not installed here: {', '.join(report['rivals_missing'])}"]
    text += ["", *_NOTES, f"{len(report['rows'])} rows in {report['seconds']:g} s."]
    return text + [f"WARNING: {warning}" for warning in report["warnings"]]


_NOTES = (
    "share = time to read the step's bytes / time of the step, both alternating in this process.",
    "no share = faster than reading: a cache holds the model, or reading was held up.",
    "rest = the step less its kernels called one by one: norms, quantisation, dispatch, waiting.",
)
