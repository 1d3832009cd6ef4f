"""The reports of the benchmarks: dictionaries, written as JSON and shown as tables.

It reads the fields that ops.py, run_model.py, engine.py and session.py write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bitnet_ops.errors import counted
from bitnet_ops.formats.destination import file_kind, new_file

SCHEMA_VERSION = 5
# Flags of rates that the machine cannot give; such a row has no ratio to show.
IMPOSSIBLE = frozenset({"above_limit", "above_bandwidth"})
Report = dict[str, Any]
Row = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]  # title, column titles, cells

# An earlier report of any of the benchmarks, by its first key.
REPORT_FILE = file_kind(
    "an earlier report to replace", lambda head: b'"schema": "bitnet_ops.bench.' in head
)


def as_json(report: Report) -> str:
    """The whole report as one JSON object."""
    return json.dumps(report, indent=1)


def write_json(report: Report, path: str | os.PathLike[str], *, replace: bool = False) -> None:
    """Write the report into a new file; `replace` an earlier one. Raises DestinationError."""
    with new_file(Path(path), REPORT_FILE, replace=replace) as file:
        file.write_text(as_json(report) + "\n", encoding="utf-8")


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value == 0:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def optional(value: float | None, unit: str) -> str:
    """A figure that may be missing."""
    return "not measured" if value is None else f"{value:g} {unit}"


def shape_text(shape: dict[str, int]) -> str:
    """1x640x2560 for M, N, K; names where the sizes are others."""
    if set(shape) <= {"M", "N", "K"}:
        return "x".join(str(size) for size in shape.values())
    return f"ctx {shape['context']}, {shape['heads']}/{shape['kv_heads']} heads"


OPS_COLUMNS = ["op", "shape", "T", "memory", "weights", "us", "p10-p90", "GB/s", "GMAC/s", "limit"]
OPS_COLUMNS += ["ratio", "torch bf16 us", "x", "notes"]


def ops_cells(row: dict[str, Any]) -> list[str]:
    """One row of the table of `bench ops`, in the order of OPS_COLUMNS."""
    time, baseline = row["time_us"], row["baselines"].get("torch_bf16")
    return [
        row["name"],
        shape_text(row["shape"]),
        str(row["threads"]),
        row["memory"] if row["memory"] == "cold" else f"hot {row['fits_in']}",
        row["format"],
        number(time["median"]),
        f"{number(time['p10'])}-{number(time['p90'])}",
        number(row["gb_s"]),
        number(row["gmac_s"]),
        f"{row['limit']} {number(row['limit_value'])}",
        "-" if IMPOSSIBLE & set(row["flags"]) else f"{row['ratio']['median']:.2f}",
        number(baseline["time_us"]["median"]) if baseline else "-",
        number(baseline["speedup"]["median"]) + "?" * baseline["disturbed"] if baseline else "-",
        ", ".join(row["flags"]),
    ]


_DECODE = ["weights", "head", "kv", "T", "batch", "context", "tok/s", "ms", "MB/step"]
_DECODE += ["limit tok/s", "share", "ping-pong ns", "notes"]


def _decode_cells(row: dict[str, Any]) -> list[str]:
    return [
        *(str(row[name]) for name in ("weights", "head", "kv", "threads", "batch", "context")),
        number(row["tokens_per_s"]),
        number(row["step_ms"]["median"]),
        number(row["bytes_per_step"] / 1e6),
        number(row["limit_tokens_per_s"]),
        "-" if row["impossible"] else f"{row['share']['median']:.2f}",
        "-" if row["ping_pong_ns"] is None else f"{row['ping_pong_ns']:.0f}",
        "disturbed" if row["disturbed"] else "",
    ]


_PREFILL = ["weights", "head", "kv", "T", "tokens", "tok/s", "s", "GMAC/s", "share of int8 peak"]


def _prefill_cells(row: dict[str, Any]) -> list[str]:
    return [
        *(str(row[name]) for name in ("weights", "head", "kv", "threads", "tokens")),
        *(number(row[name]) for name in ("tokens_per_s", "seconds", "gmac_s")),
        f"{row['share']:.2f}",
    ]


_IMAGE = ["weights", "head", "kv", "T", "pixels", "tokens", "tower s", "prompt s", "tok/s"]
_IMAGE += ["again s"]


def _image_cells(row: dict[str, Any]) -> list[str]:
    return [
        *(str(row[name]) for name in ("weights", "head", "kv", "threads")),
        f"{row['side']}x{row['side']}",
        str(row["tokens"]),
        *(number(row[name]) for name in ("tower_s", "prompt_s", "tokens_per_s", "again_s")),
    ]


# by the kind of a row: title, columns, and the cells of a row
_MODEL_TABLES: dict[str, tuple[str, list[str], Callable[[Row], list[str]]]] = {
    "decode": ("Decode: 64 tokens behind a context", _DECODE, _decode_cells),
    "prefill": ("Prefill: a prompt into an empty cache", _PREFILL, _prefill_cells),
    "image": ("Images: the tower, and a prompt of its tokens", _IMAGE, _image_cells),
}


def model_tables(report: Report) -> list[Table]:
    """The tables of `bench model` that have rows."""
    return [
        (title, titles, [cells(row) for row in rows])
        for kind, (title, titles, cells) in _MODEL_TABLES.items()
        if (rows := [row for row in report["rows"] if row["kind"] == kind])
    ]


def row_lines(row: Row, before: Row | None) -> list[str]:
    """A row of `bench model` as it comes, under its table's head where the row before had another.

    Nothing for a row of another kind.
    """
    if row["kind"] not in _MODEL_TABLES:
        return []
    title, titles, cells = _MODEL_TABLES[row["kind"]]
    same = before is not None and before["kind"] == row["kind"]
    return [
        *([] if same else ["", title, _in_columns(titles, titles)]),
        _in_columns(cells(row), titles),
    ]


def _in_columns(cells: list[str], titles: list[str]) -> str:
    """In widths that no later row changes: three names, then figures."""
    names = [cell.ljust(9) for cell in cells[:3]]
    figures = [c.rjust(max(5, len(t))) for c, t in zip(cells[3:], titles[3:], strict=True)]
    return "  ".join([*names, *figures]).rstrip()


def engine_tables(report: Report) -> list[Table]:
    """The tables of `bench engine` that have rows."""

    def rows(kind: str, cells: Callable[[dict[str, Any]], list[Any]]) -> list[list[str]]:
        found = [row for row in report["rows"] if row["kind"] == kind]
        return [[number(c) if isinstance(c, float) else str(c) for c in cells(r)] for r in found]

    tables = [
        (
            "Streams that decode together",
            ["T", "streams", "context", "tok/s", "gap ms", "p99", "reading ms", "computing ms",
             "share", "outside model", "notes"],
            rows("streams", lambda r: [
                r["threads"], r["streams"], r["context"], r["tokens_per_s"], r["gap_ms"]["median"],
                r["gap_ms"]["p99"], r["reading_ms"], r["computing_ms"], r["share"]["median"],
                f"{r['outside_model']:.1%}", "disturbed" if r["disturbed"] else "",
            ]),
        ),
        (
            "A queue of mixed requests, one every three steps",
            ["T", "requests", "prompt tokens", "new tokens", "new tok/s", "first ms p50", "p99",
             "gap ms p50", "p99"],
            rows("queue", lambda r: [
                r["threads"], r["requests"], r["prompt_tokens"], r["new_tokens"], r["tokens_per_s"],
                *r["first_token_ms"].values(), *r["gap_ms"].values(),
            ]),
        ),
    ]  # fmt: skip
    return [table for table in tables if table[2]]


def text_table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table as aligned lines: to the right where the first row has a number."""
    body = [list(titles), *map(list, cells)]
    widths = [max(len(line[i]) for line in body) for i in range(len(titles))]
    right = [body[-1][i][:1].isdigit() for i in range(len(titles))]
    return [
        "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in body
    ]


def header_lines(report: Report) -> list[str]:
    """The machine state, which belongs to every figure below it."""
    env = report["environment"]
    load = env["load_average"]
    lines = [
        f"{env['cpu']}{', virtual' if env['virtual'] else ''}; ISA {env['isa']}; "
        f"threads {', '.join(map(str, env['threads']))}",
        f"bitnet-ops {env['bitnet_ops']} (compiler {env['build']['compiler']}), "
        f"torch {env['torch']}, Python {env['python']}",
        f"cold memory {env['cold_bytes'][0] >> 20} MiB, page {env['page_bytes']} B, "
        f"transparent huge pages {env['transparent_huge_pages']}",
        f"load average {'unknown' if load is None else load[0]}; core-to-core round trip "
        f"{optional(env['ping_pong_ns'], 'ns')}; an empty op call takes "
        f"{env['op_call_us']:g} us: times contain it, shares of a limit do not",
    ]
    for limit in report["limits"]:
        if limit["unstable"]:
            shown = "none to show, see the warnings; ratios have limits of their own"
        else:
            shown = (
                f"read {number(limit['read_gb_s'])} GB/s ({limit['read_form']}), "
                f"int8 multiply-adds {number(limit['int8_peak_gmac_s'])} GMAC/s"
            )
        lines.append(f"limits, {counted(limit['threads'], 'thread')}: {shown}")
    return lines


def model_name(report: Report) -> str:
    """The model that was measured: its file, or the name of a synthetic one."""
    settings = report["settings"]
    return str(settings.get("model") or settings["dummy"])


def _ops_lines(report: Report) -> list[str]:
    return [
        "",
        *text_table(OPS_COLUMNS, [ops_cells(row) for row in report["rows"]]),
        "",
        "ratio = time that the limit allows / time, paired per round, both measured for this row.",
        "no ratio (above_limit, above_bandwidth) = more than the machine gives, and taken thrice.",
        "x = how many times longer torch takes for the same work in bfloat16.",
        "disturbed, or ? = in nearly all rounds others had the CPUs, or the int8 loop ran "
        "below its usual speed; elsewhere such rounds are left out.",
    ]


def weights_line(name: str, model: dict[str, Any]) -> str:
    """What a step of the model `name` reads, by one of the report's `models`."""
    states = (
        f"{model['per_sequence'] / 1e6:.0f} MB of states, " if model.get("per_sequence") else ""
    )
    return (
        f"{name}, {model['weights']} weights + {model['head']} head: "
        f"{(model['body'] + model['head_bytes']) / 1e6:.0f} MB a token at context 0, and "
        f"{model['per_position'] / 1e3:.1f} kB for each cached token, {states}{model['kv']}"
    )


def choice_lines(choices: Sequence[dict[str, Any]]) -> list[str]:
    """Which weight format "auto" was, by the report's `weight_choices`."""
    return [
        f"weight format auto, {counted(choice['threads'], 'thread')}: {choice['weights']}, because "
        f"{choice['reason']}"
        for choice in choices
    ]


def _model_lines(report: Report) -> list[str]:
    lines = ["", *choice_lines(report.get("weight_choices", []))]
    lines += [weights_line(model_name(report), model) for model in report["models"]]
    for before, row in zip([None, *report["rows"]], report["rows"], strict=False):
        lines += row_lines(row, before)
    return lines


def _model_notes(report: Report) -> list[str]:
    notes = [
        "share = time to read the step's bytes / time of the step, both alternating here.",
        "no share = faster than reading: a cache holds the model, or reading was held up.",
    ]
    rows = report["rows"]
    if any(
        r["kind"] == "decode" and r["share"]["median"] > 1 and not r["impossible"] for r in rows
    ):
        notes.append("a share just above 1 = as fast as reading: the two take turns, and vary.")
    if any(row["kind"] == "image" for row in rows):
        notes.append("again = tower and prompt of the same picture, from caches.")
    if any(row["kind"] == "prefill" and row["share"] > 1 for row in rows):
        notes += [
            "share of int8 peak above 1: that peak is of multiplying alone, and tables of sums do",
            "a part of a prompt's work without it (docs/notes/sums.md).",
        ]
    return notes


def _engine_lines(report: Report) -> list[str]:
    lines = [f"{report['settings']['dummy']}, {report['settings']['kv_dtype']} cache"]
    for title, titles, cells in engine_tables(report):
        lines += ["", title, *text_table(titles, cells)]
    return [
        *lines,
        "",
        "gap = time between two tokens of a stream. share = the larger of the two limits over it:",
        "reading the step's bytes once, or the int8 multiply-adds of all its tokens.",
    ]


ATTENTION_COLUMNS = "shape,context,kv,T,M,policy,us,p10-p90,x dense,read".split(",")


def _attention_lines(report: Report) -> list[str]:
    cells = [
        [
            *(str(row[key]) for key in ("shape", "context", "kv", "threads", "tokens", "policy")),
            number(row["time_us"]["median"]),
            f"{number(row['time_us']['p10'])}-{number(row['time_us']['p90'])}",
            number(row["times_dense"]["median"]),
            f"{row['read']:.1%}",
            ", ".join(row["flags"]),
        ]
        for row in report["rows"]
    ]
    return [
        "",
        *text_table([*ATTENTION_COLUMNS, "notes"], cells),
        "",
        "us: one layer, M new tokens. x dense: how many times as fast, paired per round.",
        "read: of the pages of 64 positions; random keys, each page with a mean of its own.",
    ]


SPARSITY_COLUMNS = ["model", "T", "zeros", "policy", "ms", "p10-p90", "x dense", "skipped"]


def _sparsity_lines(report: Report) -> list[str]:
    cells = [
        [
            *(str(row["model"]), str(row["threads"]), f"{row['zeros']:.1%}", str(row["policy"])),
            number(row["time_us"]["median"] / 1e3),
            f"{number(row['time_us']['p10'] / 1e3)}-{number(row['time_us']['p90'] / 1e3)}",
            number(row["times_dense"]["median"]),
            f"{row['skipped']:.1%}",
            ", ".join(row["flags"]),
        ]
        for row in report["rows"]
    ]
    return [
        "",
        *text_table([*SPARSITY_COLUMNS, "notes"], cells),
        "",
        "ms: a step of one token. x dense: how many times as fast, paired per round.",
        "zeros: of the codes that down_proj reads; skipped: those whose columns were not read.",
    ]


def closing_lines(report: Report) -> list[str]:
    """What stands below the rows."""
    notes = {"model": _model_notes}.get(_kind(report))
    warnings = [f"WARNING: {warning}" for warning in report["warnings"]]
    rows = f"{counted(len(report['rows']), 'row')} in {report['seconds']:g} s."
    return [*(["", *notes(report)] if notes else []), rows, *warnings]


def lines(report: Report) -> list[str]:
    """The whole report as text."""
    forms = {"ops": _ops_lines, "model": _model_lines, "engine": _engine_lines}
    forms |= {"attention": _attention_lines, "sparsity": _sparsity_lines}
    return [*header_lines(report), *forms[_kind(report)](report), *closing_lines(report)]


def _kind(report: Report) -> str:
    return str(report["schema"].rpartition(".")[2])
