"""Goals against measurements: which are met, which are missed, and the table that says so.

Pure: no tensor, no clock. A "must" that binds on this machine and was not reached is missed, and
so is one for which there is nothing to measure; nothing else is. A figure that cannot be, or one
below its bar in whose rounds others had the CPUs, is void: it shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_ops.bench.goals import Goal

AMBITIOUS, MET, MISSED = "ambitious", "met", "MISSED"
ABSENT, NOT_BUILT, UNMEASURED = "not on this CPU", "NOT BUILT", "not measured"
OTHER_GOAL = "other goal on this CPU"
# No figure that could be believed, however often it was taken: nothing was shown, good or bad.
ABOVE_LIMIT, IMPOSSIBLE, DISTURBED = "ABOVE LIMIT", "IMPOSSIBLE", "DISTURBED"
VOID = frozenset({ABOVE_LIMIT, IMPOSSIBLE, DISTURBED})


@dataclass(frozen=True)
class Measured:
    """A figure in the unit of its goal; None: there is nothing to measure, `note` says why.

    built: False when the feature itself is missing, which misses the goal. note: which shape or
    setting was the worst. disturbed: other processes had the CPUs.
    """

    value: float | None
    note: str = ""
    disturbed: bool = False
    built: bool = True


@dataclass(frozen=True)
class Machine:
    """What decides whether a goal applies: kernels and CPU features that are there, CPUs."""

    isas: frozenset[str]
    features: frozenset[str]
    cpus: int

    def lacks(self, goal: Goal) -> str:
        """Why the goal does not apply, or ""."""
        if goal.isa and goal.isa not in self.isas:
            return ABSENT
        if goal.feature and goal.feature not in self.features:
            return ABSENT
        return OTHER_GOAL if goal.unless in self.features else ""


@dataclass(frozen=True)
class Verdict:
    """One goal at one thread count. binding: the goal speaks of this thread count."""

    goal: Goal
    threads: int
    measured: Measured | None
    status: str
    binding: bool

    @property
    def missed(self) -> bool:
        return self.binding and self.status in {MISSED, NOT_BUILT}

    @property
    def void(self) -> bool:
        """Whether a must was neither met nor missed, for its measurement was no good."""
        return self.binding and self.status in VOID

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.goal.id,
            "goal": self.goal.title,
            "unit": self.goal.unit,
            "at_most": self.goal.at_most,
            "must": self.goal.must,
            "ambitious": self.goal.ambitious,
            "threads": self.threads,
            "binding": self.binding,
            "measured": self.measured.value if self.measured else None,
            "note": self.measured.note if self.measured else "",
            "disturbed": self.measured.disturbed if self.measured else False,
            "verdict": self.status,
            "missed": self.missed,
            "void": self.void,
        }


def reached(goal: Goal, bar: float | None, value: float) -> bool:
    """Whether `value` is at least `bar`, or at most where smaller is better."""
    if bar is None:
        return False
    return value <= bar if goal.at_most else value >= bar


def status_of(goal: Goal, machine: Machine, measured: Measured | None) -> str:
    lack = machine.lacks(goal)
    if lack:
        return lack
    if measured is None or measured.value is None:
        return UNMEASURED if measured is None or measured.built else NOT_BUILT
    if measured.value > goal.most:
        return ABOVE_LIMIT
    if measured.value < goal.least:
        return IMPOSSIBLE
    if reached(goal, goal.ambitious, measured.value):
        return AMBITIOUS
    if reached(goal, goal.must, measured.value):
        return MET
    return DISTURBED if measured.disturbed else MISSED


def judge(
    goals: Iterable[Goal],
    machine: Machine,
    threads: Sequence[int],
    measured: Mapping[tuple[str, int], Measured],
) -> list[Verdict]:
    """A verdict for every goal at every thread count; measured by (goal id, threads)."""
    found = []
    for goal in goals:
        bound = {t or machine.cpus for t in goal.threads}
        for count in threads:
            figure = measured.get((goal.id, count))
            status = status_of(goal, machine, figure)
            found.append(Verdict(goal, count, figure, status, count in bound))
    return found


def missed_lines(verdicts: Iterable[Verdict]) -> list[str]:
    """One line for every must that was missed, naming it."""
    lines = []
    for v in verdicts:
        if v.missed:
            got = _got(v)
            bound = "at most" if v.goal.at_most else "at least"
            lines.append(
                f"{v.goal.id}, {v.threads} thread(s): {v.goal.title}: expected {bound} "
                f"{v.goal.must:g} {v.goal.unit}, got {got}"
            )
    return lines


def void_lines(verdicts: Iterable[Verdict]) -> list[str]:
    """One line for every must without a figure that could be believed."""
    return [
        f"{v.goal.id}, {v.threads} thread(s): {v.goal.title}: {v.status}, got {_got(v)} "
        f"{v.goal.unit}; measure again on a quiet machine"
        for v in verdicts
        if v.void
    ]


def _got(v: Verdict) -> str:
    if v.measured is None or v.measured.value is None:
        return f"nothing: {v.measured.note}" if v.measured else "nothing"
    note = f" ({v.measured.note})" if v.measured.note else ""
    return f"{v.measured.value:.3g}{note}"


COLUMNS = ("goal", "T", "must", "ambitious", "measured", "unit", "verdict", "note")


def table(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """The cells of the table, without the header; a goal that does not apply takes one row."""
    rows: list[list[str]] = []
    for v in verdicts:
        if v.status not in {ABSENT, OTHER_GOAL}:
            rows.append(_cells(v))
        elif rows and rows[-1][0] == v.goal.title and rows[-1][6] == v.status:
            rows[-1][1] += f", {v.threads}"
        else:
            rows.append(_cells(v))
    return rows


def _cells(v: Verdict) -> list[str]:
    sign = "<= " if v.goal.at_most else ""
    value = "-" if v.measured is None or v.measured.value is None else f"{v.measured.value:.3g}"
    status = v.status if v.binding or v.status in {ABSENT, OTHER_GOAL} else f"({v.status})"
    note = v.measured.note if v.measured else ""
    if v.measured and v.measured.disturbed:
        note = f"{note}; disturbed" if note else "disturbed"
    return [
        v.goal.title,
        str(v.threads),
        f"{sign}{v.goal.must:g}",
        "-" if v.goal.ambitious is None else f"{sign}{v.goal.ambitious:g}",
        value,
        v.goal.unit,
        status,
        note,
    ]


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """The table as text, and how to read it."""
    rows = [list(COLUMNS), *table(verdicts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    missed, void = missed_lines(verdicts), void_lines(verdicts)
    fine = "no must goal missed, but:" if void else "every must goal of this CPU met"
    summary = f"{len(missed)} must goal(s) missed:" if missed else fine
    unsure = [f"{len(void)} must goal(s) without a measurement:", *(f"  {v}" for v in void)]
    shown = "(in brackets: the goal does not speak of this thread count)"
    tail = unsure if void else []
    return [*text, shown, summary, *(f"  {line}" for line in missed), *tail]
