"""The page, a pure function of the figures stored below plots/ of its folder.

One figures.json for each kind of machine met, beside its pictures: the state of the machine and the
tables, with figures as they are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bitnet_ops.bench import report
from bitnet_ops.bench.measure import IMPOSSIBLE, Row
from bitnet_ops.bench.page import parts, plots, results
from bitnet_ops.bench.report import Report, Table, number, optional
from bitnet_ops.formats.atomic import atomic_file

Figures = dict[str, Any]
_OPS = ("gemv", "gemm")
FIGURES = "figures.json"
SCHEMA = "bitnet_ops.bench.page"
_LOAD = "load average"  # how the warning begins that the line on the state makes

HEADER = """# Performance

Written by `bitnet-ops bench page` from the figures below [plots](plots); do not edit by hand.
A section is one run on one machine, and says in what state the machine was. Figures are medians;
ratios are paired with their limit in the same process.

- **share of reading**: the time to read the same bytes, in the form of reading that is the fastest
  on the machine, divided by the time taken. 1.00 cannot be exceeded from memory.
- **share of int8 peak**: likewise for the multiply-adds of a loop that only multiplies.
- Times are those of calls from Python; shares compare the work without the call.
- Rounds in which other processes had the CPUs are left out, and those in which the int8 loop ran
  more than 6 % below its best, for then another guest uses the same physical cores. *disturbed*:
  nearly all rounds were like that, so all of them count.
- **hot**: operands are in a cache; **cold**: they come from memory, cycled over 512 MiB, in calls
  one after the other for about a millisecond, as those of a token are (before 2026-11-24: single
  calls between other work, which first have to find their code and the other threads).
- **ping-pong**: round trip of a cache line between two cores; it tells where a hypervisor put them.

Goals that are missed, with the reasons: [missed-goals.md](missed-goals.md).
"""


def slug(environment: dict[str, Any]) -> str:
    """A short name of the machine for its folder: its CPU and its kernels."""
    words = re.sub(r"[^a-z0-9]+", "-", environment["cpu"].lower()).strip("-")
    return f"{words}-{environment['isa']}".replace("_", "-")


# --- figures from reports ------------------------------------------------------------------------


def condense(measured: Report, checked: Report, models: Sequence[Report]) -> Figures:
    """What a section shows, of the reports of `bench ops`, of the goals and of `bench model`."""
    return {
        "schema": SCHEMA,
        "environment": measured["environment"],
        "limits": measured["limits"],
        "warnings": [w for w in measured["warnings"] if not w.startswith(_LOAD)],
        "goals": _goals(checked),
        "models": [_model(model) for model in models],
        "products": _products(measured),
        "others": _others(measured),
    }


def _goals(checked: Report) -> dict[str, Any]:
    rows = []
    for goal in checked["goals"]:
        row = results.cells(goal)
        row[6] = f"**{row[6]}**" if goal["missed"] else row[6]
        rows.append(row)
    counts = {name: len(checked[name]) for name in ("missed", "void")}
    return {**counts, "absent": checked["absent"], "table": ["", list(results.COLUMNS), rows]}


def _model(model: Report) -> dict[str, Any]:
    sizes = [
        f"{m['weights']} weights and {m['head']} head: "
        f"{(m['body'] + m['head_bytes']) / 1e6:.0f} MB a token and "
        f"{m['per_position'] / 1e3:.1f} kB for each cached token."
        for m in model["models"]
    ]
    rows = {kind: [r for r in model["rows"] if r["kind"] == kind] for kind in ("parts", "engine")}
    tables: list[Table] = report.model_tables(model)
    tables += [parts.parts_table(rows["parts"])] if rows["parts"] else []
    tables += [engine_table(rows["engine"])] if rows["engine"] else []
    name = model["settings"]["dummy"]
    return {"name": name, "sizes": sizes, "missing": model.get("missing", []), "tables": tables}


def engine_table(rows: Sequence[Row]) -> Table:
    """One line for each row of the kind "engine"."""
    cells = []
    for row in rows:
        measured = "tokens_per_s" in row
        notes = [row["note"]] if "note" in row else []
        cells.append(
            [
                *(str(row[name]) for name in ("name", "threads", "what", "tokens")),
                number(row["tokens_per_s"]) if measured else "-",
                number(row["speedup"]) if measured else "-",
                ", ".join(notes + ["disturbed"] * bool(row.get("disturbed"))),
            ]
        )
    titles = ["engine", "T", "what", "tokens", "its tok/s", "ours is x faster", "notes"]
    return "Other engines in this run, same threads", titles, cells


def _products(measured: Report) -> Table:
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


def _others(measured: Report) -> Table:
    """Every other op, as `bench ops` prints it, and torch's better int8 linear."""
    cells = []
    for row in measured["rows"]:
        if row["name"] in _OPS:
            continue
        *shown, notes = report.ops_cells(row)
        int8 = {
            name.replace("_", " "): b["time_us"]["median"]
            for name, b in row["baselines"].items()
            if name.startswith("torch_int8")
        }
        if int8:
            best = min(int8, key=int8.__getitem__)
            notes = ", ".join([*([notes] if notes else []), f"{best} {number(int8[best])} us"])
        cells.append([*shown, notes])
    return "", list(report.OPS_COLUMNS), cells


# --- the page from figures -----------------------------------------------------------------------


def markdown_table(table: Sequence[Any]) -> list[str]:
    """A table in Markdown; its own title is not shown."""
    _, titles, rows = table
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(c.replace("|", "\\|") or " " for c in line) + " |" for line in lines]


def _rows(figures: Figures) -> Iterator[list[str]]:
    """Every row that says whether it was disturbed."""
    yield from figures["goals"]["table"][2]
    yield from figures["others"][2]
    for model in figures["models"]:
        for _, titles, rows in model["tables"]:
            yield from rows if titles[-1] == "notes" else []


def state_line(figures: Figures) -> str:
    """Whether other processes ran, as far as can be known: the load before, and rows disturbed."""
    env, rows = figures["environment"], list(_rows(figures))
    load, cpus = env["load_average"], env["cpus_available"]
    busy = load is not None and load[0] > cpus / 2
    disturbed = sum("disturbed" in row[-1] for row in rows)
    words = f"load average {'unknown' if load is None else f'{load[0]:g}'} on {cpus} CPUs before"
    words += ", so other processes ran" if busy else ""
    words += f"; {disturbed} of {len(rows)} rows disturbed"
    return f"- **State**: {words}{': use the ratios only' if busy or disturbed else ''}"


def machine_lines(figures: Figures) -> list[str]:
    """The machine, its limits and its state."""
    env, caches = figures["environment"], figures["environment"]["cache_bytes"]
    sizes = ", ".join(f"{name} {size >> 10} KiB" for name, size in sorted(caches.items()))
    lines = [
        f"- {env['cpu']}{', virtual machine' if env['virtual'] else ''}, "
        f"{env['cpus_available']} CPUs; {sizes}; kernels `{env['isa']}`",
        f"- compiler g++ {env['build']['compiler']}, torch {env['torch']}, Python {env['python']}, "
        f"bitnet-ops {env['bitnet_ops']}",
        f"- pages: {env['page_bytes']} bytes, huge pages {env['transparent_huge_pages']}; threads "
        f"{', '.join(map(str, env['threads']))}; thread settings "
        f"{env['thread_environment'] or 'none'}",
        f"- {env['time_utc']}; ping-pong {optional(env['ping_pong_ns'], 'ns')}; an empty op "
        f"call takes {env['op_call_us']:g} us",
    ]
    for limit in figures["limits"]:
        forms = ", ".join(f"{n}: {number(v)}" for n, v in limit["read_forms_gb_s"].items())
        shown = "none, others had the CPUs"
        if not limit["unstable"]:
            shown = f"reading {limit['read_gb_s']:.1f} GB/s as {limit['read_form']} ({forms}); "
            shown += f"int8 {limit['int8_peak_gmac_s']:.0f} GMAC/s"
        lines.append(f"- limits with {limit['threads']} thread(s): {shown}")
    lines.append(state_line(figures))
    return lines + [f"- **{warning}**" for warning in figures["warnings"]]


def _goal_lines(goals: dict[str, Any]) -> list[str]:
    lines = ["### Goals", "", "In brackets: the goal does not speak of this thread count.", ""]
    lines += [*markdown_table(goals["table"]), ""]
    lines += [f"{goals['missed']} of the goals that bind here are missed."]
    if goals["void"]:
        lines += [f"{goals['void']} have no figure that could be believed: others had the CPUs."]
    if goals["absent"]:
        absent = "; ".join(goals["absent"])
        lines += ["", f"Not timed here, for want of the instructions: {absent}."]
    return lines


def _model_lines(model: dict[str, Any]) -> list[str]:
    lines = [f"### The model {model['name']}", ""]
    lines += ["Synthetic: random weights in the dimensions of the name.", *model["sizes"]]
    lines += [f"Not installed here: {', '.join(model['missing'])}."] if model["missing"] else []
    for table in model["tables"]:
        lines += ["", f"{table[0]}:", "", *markdown_table(table)]
    return lines


def section(figures: Figures, pictures: Sequence[str]) -> str:
    """The section of one machine; pictures are named relative to the page."""
    env = figures["environment"]
    lines = [f"## {env['cpu']}, {env['isa']}", "", *machine_lines(figures), ""]
    lines += [*_goal_lines(figures["goals"]), ""]
    for model in figures["models"]:
        lines += [*_model_lines(model), ""]
    lines += ["### Ternary products", "", *markdown_table(figures["products"]), ""]
    lines += ["### Other ops", "", *markdown_table(figures["others"])]
    if pictures:
        lines += ["", "### Plots", "", *(f"![{Path(p).stem}]({p})" for p in pictures)]
    return "\n".join(lines) + "\n"


def _names(figures: Figures) -> list[str]:
    """The pictures of a section in the order in which they are shown."""
    models = [f"{m['name']}-{name}" for m in figures["models"] for name in plots.MODEL_PLOTS]
    return [f"{name}.png" for name in (*plots.OPS_PLOTS, *models)]


def render(folder: Path) -> str:
    """The page that stands in `folder`, from the figures and pictures below its plots/."""
    text = HEADER
    for file in sorted(folder.glob(f"plots/*/{FIGURES}")):
        figures = json.loads(file.read_text(encoding="utf-8"))
        shown = [f"plots/{file.parent.name}/{n}" for n in _names(figures)]
        text += "\n" + section(figures, [p for p in shown if (folder / p).is_file()])
    return text


def write_figures(figures: Figures, file: Path) -> None:
    """Write the figures of one machine, a line of text for each row of a table."""
    with atomic_file(file) as out:
        out.write(_as_lines(figures).encode())


def _as_lines(value: Any, depth: int = 0) -> str:
    """JSON with a line for every list of plain values and for every key."""
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(k)}: {_as_lines(v, depth + 1)}" for k, v in value.items()]
        return "{" + inner + f",{inner}".join(items) + outer + "}"
    if isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple, dict)) for v in value):
        items = [_as_lines(v, depth + 1) for v in value]
        return "[" + inner + f",{inner}".join(items) + outer + "]"
    return json.dumps(value, ensure_ascii=False)


def write(page: Path) -> None:
    """Write `page` from what is stored below its folder."""
    with atomic_file(page) as file:
        file.write(render(page.parent).encode())


def store(measured: Report, checked: Report, models: Sequence[Report], page: Path) -> Path:
    """Keep this machine's figures and pictures below plots/ of the page's folder: where."""
    folder = page.parent / "plots" / slug(measured["environment"])
    folder.mkdir(parents=True, exist_ok=True)
    if plots.available():
        plots.draw_ops(measured, folder)
    for model in models if plots.available() else ():
        plots.draw_model(model, folder, prefix=f"{model['settings']['dummy']}-")
    write_figures(condense(measured, checked, models), folder / FIGURES)
    return folder
