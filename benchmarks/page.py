"""`python -m benchmarks.page FILE`: this machine's page in Markdown, from runs of the benchmarks.

Goals for speed, a large and a small model, every op, other engines that are installed, pictures
where matplotlib is. About a quarter of an hour; the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import compare_engines, engines, goal_results, goals, plots
from benchmarks.step_breakdown import parts_rows, parts_table
from benchmarks.torch_int8 import with_int8
from bitnet_ops.bench import ops, report, run_model
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.pinning import pinned
from bitnet_ops.bench.report import IMPOSSIBLE, Report, Row, Table, number
from bitnet_ops.bench.run_model import ModelBench, ModelSettings
from bitnet_ops.bench.session import Progress
from bitnet_ops.bench.shapes import USUAL
from bitnet_ops.cli.terminal import progress_line
from bitnet_ops.formats.atomic import atomic_file

_FORMATS = ((USUAL, "int8"), ("1.6bit", "int4"), ("canonical", "int8"))
_PRODUCTS = ("gemv", "gemm")
_ENGINE_SECONDS = 60.0


# --- measuring -----------------------------------------------------------------------------------


def _steps(progress: Progress, *, quick: bool) -> dict[str, Callable[[], Report]]:
    shapes = goals.settings_of(quick=quick)
    threads = shapes.threads
    if quick:
        large = small = ModelSettings(
            "tiny", _FORMATS[:1], (16,), (0, 8), (1, 2), threads, cold_mib=16, quick=True
        )
    else:
        large = ModelSettings(formats=_FORMATS, threads=threads)
        small = ModelSettings("0.7b", _FORMATS[:1], (128, 512), (0, 2048), (1, 4), threads)
    asked = () if quick else compare_engines.USUAL_ENGINES

    def more(bench: ModelBench, limits: list[MachineLimits]) -> list[Row]:
        others = compare_engines.all_rows(bench, limits, asked, _ENGINE_SECONDS)
        return parts_rows(bench, limits) + others

    return {
        "goals": lambda: goals.run(shapes, progress),
        "model": lambda: run_model.run(large, progress, more) | {"missing": engines.missing(asked)},
        "small-model": lambda: run_model.run(small, progress, parts_rows),
        "ops": lambda: ops.run(shapes, progress, with_int8),
    }


def measure(data: Path | None, progress: Progress, *, quick: bool) -> dict[str, Report]:
    """The report of every step; one whose JSON lies in `data` is not run again."""
    if data:
        data.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, step in _steps(progress, quick=quick).items():
        file = data / f"{name}.json" if data else None
        if file and file.is_file():
            found[name] = json.loads(file.read_text(encoding="utf-8"))
            continue
        progress(name)
        with pinned():
            found[name] = step()
        if file:
            report.write_json(found[name], file)
    return found


# --- the page ------------------------------------------------------------------------------------


def markdown_table(table: Table) -> list[str]:
    """A table in Markdown; its own title is not shown."""
    _, titles, rows = table
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(c.replace("|", "\\|") or " " for c in line) + " |" for line in lines]


def _goal_lines(checked: Report) -> list[str]:
    table = [goal_results.cells(goal) for goal in checked["goals"]]
    lines = ["## Goals", "", "In brackets: the goal does not speak of this thread count.", ""]
    lines += markdown_table(("", list(goal_results.COLUMNS), table))
    lines += ["", f"{len(checked['missed'])} of the goals that bind here are missed."]
    if checked["void"]:
        lines += [f"{len(checked['void'])} have no figure that could be believed."]
    if checked["absent"]:
        lines += ["", f"Not for this CPU: {'; '.join(checked['absent'])}."]
    return lines


def _model_lines(model: Report) -> list[str]:
    lines = [f"## The model {report.model_name(model)}", ""]
    lines += [
        f"{m['weights']} weights and {m['head']} head: "
        f"{(m['body'] + m['head_bytes']) / 1e6:.0f} MB a token and "
        f"{m['per_position'] / 1e3:.1f} kB for each cached token."
        for m in model["models"]
    ]
    missing = model.get("missing", [])
    lines += [f"Not installed here: {', '.join(missing)}."] if missing else []
    rows = {kind: [r for r in model["rows"] if r["kind"] == kind] for kind in ("parts", "engine")}
    tables = report.model_tables(model)
    tables += [parts_table(rows["parts"])] if rows["parts"] else []
    tables += [compare_engines.engine_table(rows["engine"])] if rows["engine"] else []
    for table in tables:
        lines += ["", f"{table[0]}:", "", *markdown_table(table)]
    return lines


def _product_table(measured: Report) -> Table:
    """gemv and gemm: the best, the median and the worst share over the shapes, for every M."""
    groups: dict[tuple[int, str, str, int], list[Row]] = {}
    for row in measured["rows"]:
        if row["name"] in _PRODUCTS and not IMPOSSIBLE & set(row["flags"]):
            key = (row["threads"], row["format"], row["memory"], row["shape"]["M"])
            groups.setdefault(key, []).append(row)
    cells = []
    for (threads, weights, memory, m), rows in sorted(groups.items()):
        rows = sorted(rows, key=lambda row: row["ratio"]["median"])
        middle, low, high = rows[len(rows) // 2], rows[0], rows[-1]
        speedups = [
            f"{name.removeprefix('torch_')} {number(b['speedup']['median'])}"
            for name, b in middle["baselines"].items()
        ]
        cells.append(
            [
                *(weights, memory, str(m), str(threads), report.shape_text(middle["shape"])),
                number(middle["time_us"]["median"]),
                number(middle["gb_s"]),
                number(middle["gmac_s"]),
                f"{middle['ratio']['median']:.2f} of {middle['limit'].replace('_', ' ')}",
                f"{low['ratio']['median']:.2f} - {high['ratio']['median']:.2f}",
                ", ".join(speedups) or "-",
            ]
        )
    titles = ["weights", "memory", "M", "T", "median shape", "us", "GB/s", "GMAC/s", "share"]
    return "", [*titles, "over shapes", "times faster than torch"], cells


def render(found: dict[str, Report], pictures: Sequence[Path] = ()) -> str:
    """The page of the reports of `measure`; pictures lie beside it."""
    measured = found["ops"]
    others = [report.ops_cells(r) for r in measured["rows"] if r["name"] not in _PRODUCTS]
    lines = [f"# {measured['environment']['cpu']}, {measured['environment']['isa']}", ""]
    lines += [f"- {line}" for line in report.header_lines(measured)]
    lines += [f"- **{warning}**" for warning in measured["warnings"]]
    lines += ["", *_goal_lines(found["goals"])]
    for name in ("model", "small-model"):
        lines += ["", *_model_lines(found[name])]
    lines += ["", "## Ternary products", "", *markdown_table(_product_table(measured))]
    lines += ["", "## Other ops", "", *markdown_table(("", report.OPS_COLUMNS, others))]
    if pictures:
        lines += ["", "## Plots", "", *(f"![{path.stem}]({path.name})" for path in pictures)]
    return "\n".join(lines) + "\n"


def _draw(found: dict[str, Report], folder: Path) -> list[Path]:
    if not plots.available():
        return []
    drawn = plots.draw_ops(found["ops"], folder)
    for name in ("model", "small-model"):
        prefix = f"{report.model_name(found[name])}-"
        drawn += plots.draw_model(found[name], folder, prefix)
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("page", type=Path, metavar="FILE", help="pictures go beside it")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="keep the JSON of every step in DIR; a step whose file is there is not run again",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the page itself")
    args = parser.parse_args(argv)
    if not args.page.absolute().parent.is_dir() or args.page.is_dir():
        parser.error(f"expected a file in a directory that exists, got {args.page}")
    with progress_line() as progress:
        found = measure(args.data, progress, quick=args.quick)
    text = render(found, _draw(found, args.page.absolute().parent))
    with atomic_file(args.page) as file:
        file.write(text.encode())
    print(f"wrote {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
