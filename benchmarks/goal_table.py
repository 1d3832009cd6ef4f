"""The goals for speed: the rows of goals.md, which says what each column means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

AMX = "amx_int8"
# What timing the parts of a step one by one may err by; below it they took longer than the step.
MIN_OVERHEAD = -0.02
COLUMNS = ["name", "title", "quantity", "arguments", "unit", "target", "stretch", "CPU", "threads"]


@dataclass(frozen=True)
class Goal:
    """One row of the table.

    quantity: a function of goal_quantities.py or goal_step_quantities.py, `arguments` are its own.
    target, stretch: what has to be reached and what is hoped for (None: nothing more), in `unit`;
        `at_most`: smaller is better.
    isa: kernels that it speaks of ("" = those that the CPU chooses); where they cannot run it is
        not a goal. `feature`: a CPU feature that it needs on top.
    unless: a CPU feature whose machines have a goal of their own in its place.
    threads: where it binds: 1, or 0 for all CPUs; elsewhere it is measured and only shown.
    """

    name: str
    title: str
    quantity: str
    unit: str
    target: float
    stretch: float | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    isa: str = ""
    feature: str = ""
    unless: str = ""
    at_most: bool = False
    threads: tuple[int, ...] = (0,)

    @property
    def maximum(self) -> float:
        """What no honest measurement can exceed: a share of a limit, with room for its error.

        Plain reading is not the fastest form of reading, so a kernel may well be above it.
        """
        if self.at_most or not self.unit.startswith("of "):
            return float("inf")
        return 1.4 if self.unit == "of plain reading" else 1.1

    @property
    def minimum(self) -> float:
        """What no honest measurement can be below: parts of a step are no more than the step."""
        return MIN_OVERHEAD if self.unit == "of a step" else 0.0


def _argument(text: str) -> tuple[str, Any]:
    """`tokens=4,8` -> ("tokens", (4, 8)); what is no list of integers stays a text."""
    name, _, value = text.partition("=")
    is_numbers = value.replace(",", "").isdigit()
    return name, tuple(map(int, value.split(","))) if is_numbers else value


def parse_row(line: str) -> Goal:
    """The goal of one line of the table."""
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    name, title, quantity, arguments, unit, target, stretch, cpu, threads = cells
    marked = {sign: w[1:] for w in cpu.split() for sign in "+-" if w.startswith(sign)}
    isa = [word for word in cpu.split() if word[0] not in "+-"]
    return Goal(
        name,
        title,
        quantity,
        unit,
        float(target.removeprefix("<= ")),
        float(stretch) if stretch else None,
        tuple(map(_argument, arguments.split())),
        isa="".join(isa),
        feature=marked.get("+", ""),
        unless=marked.get("-", ""),
        at_most=target.startswith("<="),
        threads=tuple({"1": 1, "all": 0}[word] for word in threads.split(", ")),
    )


def read_table(text: str) -> tuple[Goal, ...]:
    """Every goal of a page with one table."""
    header, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    titles = [cell.strip() for cell in header.strip("|").split("|")]
    if titles != COLUMNS:
        raise ValueError(f"goals: expected the columns {COLUMNS}, got {titles}")
    return tuple(map(parse_row, rows))


GOALS = read_table(Path(__file__).with_name("goals.md").read_text(encoding="utf-8"))
