"""README's table of other engines and the performance page's, of the runs in other_engines.csv.

    python -m benchmarks.other_engines      # writes both between their marks

A row of the record is one pair of one run, in which the engines took turns on 2 threads with a
model of 2B-4T's dimensions, as benchmarks.page prints it: the other's tokens a second, and how many
times as many ours were. What the tables show of ours follows from these two, so no two figures of
different runs meet in a ratio.
"""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin other engines -->\n", "<!-- end -->"
# page -> the CPU whose rows it shows (none: all), and the columns of work
PAGES = {
    "README.md": ("Zen 3", ("decode", "prompt of 128")),
    "docs/notes/performance.md": ("", ("decode", "prompt of 128", "prompt of 512")),
}
Key = tuple[str, str, str, str]  # CPU, kernels, day, engine


def read_record() -> dict[Key, dict[str, tuple[float, float]]]:
    """Of each engine on each CPU: work -> (its tokens a second, how many times ours are)."""
    found: dict[Key, dict[str, tuple[float, float]]] = {}
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = row["cpu"], row["kernels"], row["measured"], row["engine"]
            pair = float(row["tokens_per_s"]), float(row["times"])
            found.setdefault(key, {})[row["work"]] = pair
    return found


def table(only: str, work: tuple[str, ...]) -> str:
    """The record, or its rows of the CPU `only`, with a column for each kind of `work`."""
    lines = [
        "| CPU, kernels, day | beside | " + " | ".join(work) + " |",
        "|---|---|" + "---|" * len(work),
    ]
    for (cpu, kernels, day, engine), pairs in read_record().items():
        if only not in ("", cpu):
            continue
        cells = [_cell(*pairs[name]) if name in pairs else "-" for name in work]
        lines.append(f"| {cpu}, {kernels}, {day} | {engine} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(theirs: float, times: float) -> str:
    return f"{rounded(times)} times: {rounded(theirs * times, 3)} to {rounded(theirs, 3)}"


def rounded(value: float, digits: int = 2) -> str:
    """`value` with so many digits that count, and no exponent."""
    return f"{float(f'{value:.{digits}g}'):g}"


def replaced(text: str, only: str, work: tuple[str, ...]) -> str:
    """`text` with the table between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(only, work) + END + after


def main() -> None:
    for page, shown in PAGES.items():
        path = ROOT / page
        path.write_text(replaced(path.read_text(encoding="utf-8"), *shown), encoding="utf-8")


if __name__ == "__main__":
    main()
