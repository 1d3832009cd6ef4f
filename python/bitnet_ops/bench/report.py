"""The report of a run: a dictionary that is written as JSON, and a table for people.

It must not know how rows were made; it reads the fields that rows.py and environment.py write.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from bitnet_ops.bench.rows import IMPOSSIBLE
from bitnet_ops.formats.destination import file_kind, new_file

SCHEMA = "bitnet_ops.bench.ops"
SCHEMA_VERSION = 2  # 2: weight formats, forms of reading

Report = dict[str, Any]

# column title and whether it holds numbers
COLUMNS = (
    ("op", False),
    ("shape", False),
    ("T", True),
    ("memory", False),
    ("weights", False),
    ("us", True),
    ("p10-p90", True),
    ("GB/s", True),
    ("GMAC/s", True),
    ("limit", False),
    ("ratio", True),
    ("torch bf16 us", True),
    ("x", True),
    ("notes", False),
)


def build(
    environment: dict[str, Any],
    settings: dict[str, Any],
    limits: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    warnings: list[str],
    seconds: float,
) -> Report:
    """The whole report; `ok` is False when a result was wrong."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "ok": not any("wrong_result" in row["flags"] for row in rows),
        "seconds": round(seconds, 1),
        "environment": environment,
        "settings": settings,
        "limits": limits,
        "warnings": warnings,
        "rows": rows,
    }


# An earlier report of any of the benchmarks, by its first key.
REPORT_FILE = file_kind(
    "an earlier report to replace", lambda head: b'"schema": "bitnet_ops.bench.' in head
)


def write_json(report: Report, path: str | os.PathLike[str], *, replace: bool = False) -> None:
    """Write the report into a new file; `replace` an earlier one. Raises DestinationError."""
    with new_file(Path(path), REPORT_FILE, replace=replace) as file:
        file.write_text(as_json(report) + "\n", encoding="utf-8")


def shape_text(shape: dict[str, int]) -> str:
    """1x640x2560 for M, N, K; names where the sizes are others."""
    if set(shape) <= {"M", "N", "K"}:
        return "x".join(str(size) for size in shape.values())
    return f"ctx {shape['context']}, {shape['heads']}/{shape['kv_heads']} heads"


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value == 0:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    time, rival = row["time_us"], row["rivals"].get("torch_bf16")
    notes = list(row["flags"])
    int8 = {name: r for name, r in row["rivals"].items() if name.startswith("torch_int8")}
    if int8:
        name = min(int8, key=lambda n: int8[n]["time_us"]["median"])
        notes.append(f"{name.replace('_', ' ')} {number(int8[name]['time_us']['median'])} us")
    memory = row["memory"] if row["memory"] == "cold" else f"hot {row['fits_in']}"
    return [
        row["name"],
        shape_text(row["shape"]),
        str(row["threads"]),
        memory,
        row["format"],
        number(time["median"]),
        f"{number(time['p10'])}-{number(time['p90'])}",
        number(row["gb_s"]),
        number(row["gmac_s"]),
        f"{row['limit']} {number(row['limit_value'])}",
        "-" if IMPOSSIBLE & set(row["flags"]) else f"{row['ratio']['median']:.2f}",
        number(rival["time_us"]["median"]) if rival else "-",
        number(rival["speedup"]["median"]) + "?" * rival["disturbed"] if rival else "-",
        ", ".join(notes),
    ]


def header_lines(report: Report) -> list[str]:
    """The machine state, which belongs to every figure below it."""
    env = report["environment"]
    latency = env["ping_pong_ns"]
    load = env["load_average"]
    share = env["arena_huge_share"][0]
    lines = [
        f"{env['cpu']}{', virtual' if env['virtual'] else ''}; ISA {env['isa']}; "
        f"threads {', '.join(map(str, env['threads']))}",
        f"bitnet-ops {env['bitnet_ops']} (compiler {env['build']['compiler']}), "
        f"torch {env['torch']}, Python {env['python']}",
        f"cold memory {env['arena_bytes'][0] >> 20} MiB, page {env['page_bytes']} B, "
        f"transparent huge pages {env['transparent_huge_pages']} "
        f"({'unknown' if share is None else f'{share:.0%}'} of it backed)",
        f"load average {'unknown' if load is None else load[0]}; core-to-core round trip "
        f"{'not measured' if latency is None else f'{latency:g} ns'}; an empty op call takes "
        f"{env['op_call_us']:g} us: times contain it, shares of a limit do not",
    ]
    for limit in report["limits"]:
        if limit["disturbed"]:
            lines.append(
                f"limits, {limit['threads']} thread(s): none to show, others had the CPUs in every "
                f"attempt; ratios have limits of their own"
            )
            continue
        lines.append(
            f"limits, {limit['threads']} thread(s): read {number(limit['read_gb_s'])} GB/s "
            f"({limit['read_form']}), "
            f"int8 multiply-adds {number(limit['int8_peak_gmac_s'])} GMAC/s"
        )
    return lines


def footer_lines(report: Report) -> list[str]:
    """How to read the table, and the warnings."""
    lines = [
        "ratio = time that the limit allows / time, paired per round, both measured for this row.",
        "no ratio (above_limit, above_bandwidth) = more than the machine gives, and taken thrice.",
        "x = how many times longer torch takes for the same work in bfloat16.",
        "disturbed, or ? = in nearly all rounds others had the CPUs, or the int8 loop ran "
        "below its usual speed; elsewhere such rounds are left out.",
        f"{len(report['rows'])} rows in {report['seconds']:g} s.",
    ]
    return lines + [f"WARNING: {warning}" for warning in report["warnings"]]


def as_json(report: Report) -> str:
    """The whole report as one JSON object."""
    return json.dumps(report, indent=1)


def plain_table(rows: list[dict[str, Any]]) -> list[str]:
    """The table as lines of text."""
    body = [[title for title, _ in COLUMNS], *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in body) for i in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, (_, numeric) in zip(line, widths, COLUMNS, strict=True)
        ).rstrip()
        for line in body
    ]


def print_report(report: Report, stream: TextIO = sys.stdout) -> None:
    """Header, table, footer: rich on a terminal, plain text elsewhere."""
    if not stream.isatty():
        lines = [*header_lines(report), "", *plain_table(report["rows"]), ""]
        print("\n".join(lines + footer_lines(report)), file=stream)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream)
    # a narrow terminal wraps long lines; rich would cut figures off
    console.width = max(console.width, *map(len, plain_table(report["rows"])))
    table = Table(box=None, pad_edge=False)
    for title, numeric in COLUMNS:
        table.add_column(title, justify="right" if numeric else "left", no_wrap=title != "notes")
    for row in report["rows"]:
        table.add_row(*cells(row), style="red" if row["flags"] else None)
    for part in ("\n".join(header_lines(report)), table, "\n".join(footer_lines(report))):
        console.print(part, highlight=False, markup=False)
