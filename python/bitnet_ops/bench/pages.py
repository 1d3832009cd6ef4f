"""docs/performance.md from the JSON of the benchmarks: one section for each kind of machine met.

A section is kept between two marks; writing one machine's section leaves the others as they are.
It must not know how anything was measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitnet_ops.bench import plots, report, report_model
from bitnet_ops.bench.rows import IMPOSSIBLE
from bitnet_ops.formats.atomic import atomic_file

Report = dict[str, Any]
# Kernels of this package, and the feature table of the goals: what a page may say is "not timed".
_TIMEABLE = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "neon_dotprod")
_OPS = ("gemv", "gemm")

HEADER = """# Performance

Written by `scripts/update_performance`; do not edit by hand. A section is one run on one machine;
its state (load, disturbed rows) stands in it. Figures are medians; ratios are paired with their
limit in the same process.

- **share of reading**: the time to read the same bytes, in the form of reading that is the fastest
  on the machine, divided by the time taken. 1.00 cannot be exceeded from memory.
- **share of int8 peak**: likewise for the multiply-adds of a loop that only multiplies.
- Times are those of calls from Python; shares compare the work without the call.
- Rounds in which other processes had the CPUs are left out, and those in which the int8 loop ran
  more than 6 % below its best, for then another guest uses the same physical cores. *disturbed*:
  nearly all rounds were like that, so all of them count.
- **hot**: operands are in a cache; **cold**: they come from memory, cycled over 512 MiB.
- **ping-pong**: round trip of a cache line between two cores; it tells where a hypervisor put them.

Goals that are missed, with the reasons: [missed-goals.md](missed-goals.md).
"""


def slug(environment: dict[str, Any]) -> str:
    """A short name of the machine for files and marks: its CPU and its kernels."""
    words = re.sub(r"[^a-z0-9]+", "-", environment["cpu"].lower()).strip("-")
    return f"{words}-{environment['isa']}".replace("_", "-")


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(c.replace("|", "\\|") or " " for c in line) + " |" for line in lines]


def machine_lines(result: Report) -> list[str]:
    env, caches = result["environment"], result["environment"]["cache_bytes"]
    sizes = ", ".join(f"{name} {size >> 10} KiB" for name, size in sorted(caches.items()))
    latency = env["ping_pong_ns"]
    lines = [
        f"- {env['cpu']}{', virtual machine' if env['virtual'] else ''}, "
        f"{env['cpus_available']} CPUs; {sizes}; kernels `{env['isa']}`",
        f"- compiler g++ {env['build']['compiler']}, torch {env['torch']}, Python {env['python']}, "
        f"bitnet-ops {env['bitnet_ops']}",
        f"- pages: {env['page_bytes']} bytes, huge pages {env['transparent_huge_pages']}; threads "
        f"{', '.join(map(str, env['threads']))}; thread settings "
        f"{env['thread_environment'] or 'none'}",
        f"- {env['time_utc']}; load average before {env['load_average'] and env['load_average'][0]}"
        f"; ping-pong {'not measured' if latency is None else f'{latency:g} ns'}; an empty op call "
        f"takes {env['op_call_us']:g} us",
    ]
    for limit in result["limits"]:
        forms = ", ".join(f"{n}: {report.number(v)}" for n, v in limit["read_forms_gb_s"].items())
        lines.append(
            f"- limits with {limit['threads']} thread(s): reading {limit['read_gb_s']:.1f} GB/s as "
            f"{limit['read_form']} ({forms}); int8 {limit['int8_peak_gmac_s']:.0f} GMAC/s"
        )
    return lines + [f"- **{warning}**" for warning in result["warnings"]]


def goal_lines(checked: Report) -> list[str]:
    """The verdicts of this CPU's goals, the misses, and what could not be timed here."""
    here = [g for g in checked["goals"] if not g["verdict"].endswith("on this CPU")]
    rows = []
    for g in here:
        sign = "<= " if g["at_most"] else ""
        verdict = g["verdict"] if g["binding"] else f"({g['verdict']})"
        rows.append(
            [
                g["goal"],
                str(g["threads"]),
                f"{sign}{g['must']:g}",
                "-" if g["ambitious"] is None else f"{sign}{g['ambitious']:g}",
                "-" if g["measured"] is None else f"{g['measured']:.3g}",
                g["unit"],
                f"**{verdict}**" if g["missed"] else verdict,
                g["note"] + (" (disturbed)" if g["disturbed"] else ""),
            ]
        )
    titles = ["goal", "T", "must", "ambitious", "measured", "unit", "verdict", "where"]
    absent = sorted({g["goal"] for g in checked["goals"]} - {g["goal"] for g in here})
    lines = ["### Goals", "", "In brackets: the goal does not speak of this thread count.", ""]
    lines += [*markdown_table(titles, rows), ""]
    lines += [f"{len(checked['missed'])} of the goals that bind here are missed."]
    if checked.get("void"):
        lines += [
            f"{len(checked['void'])} have no figure that could be believed: others had the CPUs."
        ]
    if absent:
        lines += ["", "Not timed here, for want of the instructions: " + "; ".join(absent) + "."]
    return lines


def product_lines(measured: Report) -> list[str]:
    """gemv and gemm: the best, the median and the worst share over the shapes, for every M."""
    groups: dict[tuple[int, str, str, int], list[dict[str, Any]]] = {}
    for row in measured["rows"]:
        if row["name"] in _OPS and not IMPOSSIBLE & set(row["flags"]):
            key = (row["threads"], row["format"], row["memory"], row["shape"]["M"])
            groups.setdefault(key, []).append(row)
    cells = []
    for (threads, weights, memory, m), rows in sorted(groups.items()):
        rows = sorted(rows, key=lambda row: row["ratio"]["median"])
        middle, low, high = rows[len(rows) // 2], rows[0], rows[-1]
        rivals = [
            f"{name.removeprefix('torch_')} {report.number(r['speedup']['median'])}"
            for name, r in middle["rivals"].items()
        ]
        cells.append(
            [
                *(weights, memory, str(m), str(threads), report.shape_text(middle["shape"])),
                report.number(middle["time_us"]["median"]),
                report.number(middle["gb_s"]),
                report.number(middle["gmac_s"]),
                f"{middle['ratio']['median']:.2f} of {middle['limit'].replace('_', ' ')}",
                f"{low['ratio']['median']:.2f} - {high['ratio']['median']:.2f}",
                ", ".join(rivals) or "-",
            ]
        )
    titles = ["weights", "memory", "M", "T", "median shape", "us", "GB/s", "GMAC/s", "share"]
    titles += ["over shapes", "times faster than torch"]
    return ["### Ternary products", "", *markdown_table(titles, cells)]


def other_lines(measured: Report) -> list[str]:
    """Every other op, as `bench ops` prints it."""
    rows = [row for row in measured["rows"] if row["name"] not in _OPS]
    titles = [title for title, _ in report.COLUMNS]
    return ["### Other ops", "", *markdown_table(titles, [report.cells(row) for row in rows])]


def model_lines(result: Report) -> list[str]:
    """The tables of `bench model`."""
    name = result["settings"]["dummy"]
    lines = [
        f"### The model {name}",
        "",
        "Synthetic: random weights in the dimensions of the name.",
    ]
    for model in result["models"]:
        lines += [
            f"{model['weights']} weights and {model['head']} head: "
            f"{(model['body'] + model['head_bytes']) / 1e6:.0f} MB a token and "
            f"{model['per_position'] / 1e3:.1f} kB for each cached token."
        ]
    if result["rivals_missing"]:
        lines += [f"Not installed for this run: {', '.join(result['rivals_missing'])}."]
    for title, titles, cells in report_model.tables(result):
        lines += ["", f"{title}:", "", *markdown_table(titles, cells)]
    return lines


def section(
    measured: Report, checked: Report, models: Sequence[Report], pictures: Sequence[Path], to: Path
) -> str:
    """The section of one machine; pictures are named relative to the page `to`."""
    env = measured["environment"]
    shown = [f"![{p.stem}]({p.relative_to(to.parent).as_posix()})" for p in pictures]
    parts = [f"## {env['cpu']}, {env['isa']}", "", *machine_lines(measured), ""]
    parts += [*goal_lines(checked), ""]
    for model in models:
        parts += [*model_lines(model), ""]
    parts += [*product_lines(measured), "", *other_lines(measured), "", "### Plots", "", *shown]
    return "\n".join(parts) + "\n"


def replace_section(page: str, name: str, text: str) -> str:
    """`page` with the section `name` replaced, or added at the end; others stay."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text}{end}\n"
    if begin not in page:
        return (page or HEADER) + "\n" + block
    before, rest = page.split(begin, 1)
    _, after = rest.split(end + "\n", 1)
    return before + block + after


def write_page(measured: Report, checked: Report, models: Sequence[Report], page: Path) -> None:
    """Draw the plots below docs/plots/ and write this machine's section into `page`."""
    name = slug(measured["environment"])
    folder = page.parent / "plots" / name
    pictures = plots.draw_ops(measured, folder)
    for model in models:
        dummy = model["settings"]["dummy"]
        pictures += plots.draw_model(model, folder, prefix=f"{dummy}-")
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    text = section(measured, checked, models, pictures, page)
    with atomic_file(page) as file:
        file.write(replace_section(old, name, text).encode())
