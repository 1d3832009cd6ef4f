"""`python -m benchmarks.plots REPORT... FOLDER`: pictures from reports of bench.

Rooflines, and tokens per second against everything. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet_ops.bench.report import model_name
from bitnet_ops.nn.storage import FORMATS

Report = dict[str, Any]
Row = dict[str, Any]
_SIZE, _DPI = (6.4, 4.0), 80
_SHAPES = "os^vDP"
_MARKS = dict(zip(FORMATS, _SHAPES, strict=False))


def available() -> bool:
    """Whether pictures can be drawn: they need matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def require(parser: argparse.ArgumentParser) -> None:
    """End with an error of the command line where pictures cannot be drawn."""
    if not available():
        parser.error("expected matplotlib, got no such module; pip install matplotlib")


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="png")
    return path


def _rows(report: Report, kind: str, **equal: object) -> list[Row]:
    return [
        row
        for row in report["rows"]
        if row["kind"] == kind and all(row.get(name) == value for name, value in equal.items())
    ]


def _title(axes: Any, report: Report, text: str) -> None:
    axes.set_title(f"{text}\n{report['environment']['cpu']}", fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def draw_roofline(report: Report, path: Path) -> Path:
    """The ternary products of `bench ops`: GMAC/s against multiply-adds for each byte read."""
    figure, axes = _figure()
    rows = [r for r in report["rows"] if r["name"] in {"gemv", "gemm"}]
    colours = {limit["threads"]: f"C{i}" for i, limit in enumerate(report["limits"])}
    intensities = [row["macs"] / row["bytes"] for row in rows] or [1.0]
    span = [min(intensities) / 2, max(intensities) * 2]
    for limit in report["limits"]:
        if limit["unstable"]:
            continue
        read, peak = limit["read_gb_s"], limit["int8_peak_gmac_s"]
        knee = peak / read
        xs = sorted({span[0], min(max(knee, span[0]), span[1]), span[1]})
        ys = [min(peak, read * x) for x in xs]
        label = f"limits, {limit['threads']} thread(s)"
        axes.plot(xs, ys, color=colours[limit["threads"]], label=label)
    for row in rows:
        filled = row["memory"] == "cold"
        colour = colours[row["threads"]]
        axes.plot(
            row["macs"] / row["bytes"],
            row["gmac_s"],
            _MARKS.get(row["format"], "x"),
            color=colour,
            markerfacecolor=colour if filled else "none",
            markersize=4,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("multiply-adds for each byte of weights (filled: from memory, open: cached)")
    axes.set_ylabel("GMAC/s")
    _title(axes, report, "gemv and gemm beside reading and the int8 peak")
    return _save(figure, path)


def draw_sweep(report: Report, path: Path) -> Path:
    """Share of the int8 peak against M, hot, every shape a line."""
    figure, axes = _figure()
    maximum = max((limit["threads"] for limit in report["limits"]), default=1)
    lines: dict[tuple[int, int, str], list[tuple[int, float]]] = {}
    for row in report["rows"]:
        if row["name"] in {"gemv", "gemm"} and row["memory"] == "hot" and row["threads"] == maximum:
            key = (row["shape"]["N"], row["shape"]["K"], row["format"])
            share = row["limits"]["int8_peak"]["ratio"]["median"]
            lines.setdefault(key, []).append((row["shape"]["M"], share))
    for (n, k, weights), points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker=_MARKS.get(weights, "x"), ms=4, label=f"{n}x{k}, {weights}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens M")
    axes.set_ylabel("share of the int8 peak")
    _title(axes, report, f"hot gemv and gemm, {maximum} thread(s)")
    return _save(figure, path)


def _decode_lines(
    report: Report,
    path: Path,
    x: str,
    label: str,
    keep: Callable[[Row], bool],
    key: Callable[[Row], str],
) -> Path:
    figure, axes = _figure()
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for row in filter(keep, _rows(report, "decode")):
        point = (row[x], row["tokens_per_s"], row["limit_tokens_per_s"])
        lines.setdefault(key(row), []).append(point)
    for number, (name, points) in enumerate(lines.items()):
        xs, ours, limit = zip(*sorted(points), strict=True)
        axes.plot(xs, ours, "o-", color=f"C{number}", label=name)
        axes.plot(xs, limit, ":", color=f"C{number}", label=f"{name}: reading alone")
    axes.set_xlabel(label)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    _title(axes, report, f"decode, {model_name(report)}")
    return _save(figure, path)


def _formats(row: Row) -> str:
    return f"{row['weights']} + {row['head']} head"


def draw_context(report: Report, path: Path) -> Path:
    """Tokens per second against the context, one sequence."""
    first = _formats(next(iter(_rows(report, "decode")), {"weights": "", "head": ""}))
    return _decode_lines(
        report,
        path,
        "context",
        "tokens of context",
        lambda row: row["batch"] == 1 and _formats(row) == first,
        lambda row: f"{row['threads']} thread(s)",
    )


def draw_threads(report: Report, path: Path) -> Path:
    """Tokens per second against threads, one sequence without a context."""
    return _decode_lines(
        report,
        path,
        "threads",
        "threads",
        lambda row: row["batch"] == 1 and row["context"] == 0,
        _formats,
    )


def draw_batch(report: Report, path: Path) -> Path:
    """Tokens per second of all sequences together against their number."""
    first = _formats(next(iter(_rows(report, "decode")), {"weights": "", "head": ""}))
    return _decode_lines(
        report,
        path,
        "batch",
        "sequences decoded together",
        lambda row: row["context"] == 0 and _formats(row) == first,
        lambda row: f"{row['threads']} thread(s)",
    )


def draw_parts(report: Report, path: Path) -> Path:
    """The time of a decode step by layer part, one bar for threads and context."""
    figure, axes = _figure()
    rows = _rows(report, "parts")
    names = [f"{r['threads']} T, context {r['context']}" for r in rows]
    left = [0.0] * len(rows)
    for part in (*(rows[0]["parts_ms"] if rows else ()), "rest"):
        values = [max(0.0, r["parts_ms"].get(part, r["rest_ms"])) for r in rows]
        axes.barh(names, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for number, row in enumerate(rows):
        axes.plot([row["limit_ms"]] * 2, [number - 0.4, number + 0.4], "k--")
    axes.set_xlabel("ms of a step (dashed: reading its bytes alone)")
    _title(axes, report, f"where a decode step goes, {model_name(report)}")
    return _save(figure, path)


@dataclass(frozen=True)
class Field:
    """One field of draw_quality: (x, y) of each line, and what y is where nothing is left out."""

    xlabel: str
    ylabel: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    whole: tuple[str, float]


def draw_quality(fields: Sequence[Field], path: Path) -> Path:
    """Fields side by side that share their lines, whose names stand below them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 * len(fields), 3.6), dpi=90, layout="constrained")
    for field, axes in zip(fields, figure.subplots(1, len(fields), squeeze=False)[0], strict=True):
        name, value = field.whole
        axes.axhline(value, color="grey", linewidth=0.8, linestyle="--", label=name)
        for number, (line, points) in enumerate(field.lines.items(), start=1):
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, f"{_SHAPES[number - 1]}-", color=f"C{number}", ms=5, label=line)
        axes.set(xlabel=field.xlabel, ylabel=field.ylabel)
        axes.grid(visible=True, alpha=0.3)
    names = figure.axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return _save(figure, path)


def draw_ops(report: Report, directory: Path) -> list[Path]:
    """Every plot of a report of `bench ops`."""
    return _draw(report, directory, {"roofline": draw_roofline, "sweep": draw_sweep})


def draw_model(report: Report, directory: Path, prefix: str = "") -> list[Path]:
    """Every plot of a report of `bench model`; `prefix` begins the names of the files."""
    drawn: dict[str, Callable[[Report, Path], Path]]
    drawn = {"context": draw_context, "threads": draw_threads, "parts": draw_parts}
    drawn["batch"] = draw_batch
    return _draw(report, directory, {prefix + name: draw for name, draw in drawn.items()})


def _draw(
    report: Report, directory: Path, drawn: Mapping[str, Callable[[Report, Path], Path]]
) -> list[Path]:
    return [draw(report, directory / f"{name}.png") for name, draw in drawn.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="of --output")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args(argv)
    require(parser)
    args.folder.mkdir(parents=True, exist_ok=True)
    for file in args.reports:
        report = json.loads(file.read_text(encoding="utf-8"))
        draw = draw_model if "models" in report else draw_ops
        for path in draw(report, args.folder):
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
