"""Goals against measurements: which are met, which are missed, and the table that says so.

Pure: no tensor, no clock. A target that binds on this machine and was not reached is missed, and
so is one whose feature is not built; nothing else is. A figure that cannot be, or one below its
target in whose rounds others had the CPUs, is void: it shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.goal_table import Goal
from bitnet_ops.bench.report import text_table

STRETCH, MET, MISSED = "stretch", "met", "MISSED"
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
class Cpu:
    """What decides whether a goal applies: kernels and CPU features that are there, CPUs."""

    isas: frozenset[str]
    features: frozenset[str]
    count: int

    def lacks(self, goal: Goal) -> str:
        """Why the goal does not apply, or ""."""
        if goal.isa and goal.isa not in self.isas:
            return ABSENT
        if goal.feature and goal.feature not in self.features:
            return ABSENT
        return OTHER_GOAL if goal.unless in self.features else ""


@dataclass(frozen=True)
class Result:
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
        """Whether a target was neither met nor missed, for its measurement was no good."""
        return self.binding and self.status in VOID

    @property
    def applies(self) -> bool:
        return self.status not in {ABSENT, OTHER_GOAL}

    def to_dict(self) -> dict[str, Any]:
        measured = self.measured or Measured(None)
        return {
            "name": self.goal.name,
            "goal": self.goal.title,
            "unit": self.goal.unit,
            "at_most": self.goal.at_most,
            "target": self.goal.target,
            "stretch": self.goal.stretch,
            "threads": self.threads,
            "binding": self.binding,
            "measured": measured.value,
            "note": measured.note,
            "disturbed": measured.disturbed,
            "result": self.status,
            "missed": self.missed,
            "void": self.void,
        }


def reached(goal: Goal, bound: float | None, value: float) -> bool:
    """Whether `value` is at least `bound`, or at most where smaller is better."""
    if bound is None:
        return False
    return value <= bound if goal.at_most else value >= bound


def _status(goal: Goal, cpu: Cpu, measured: Measured | None) -> str:
    if lack := cpu.lacks(goal):
        return lack
    if measured is None or measured.value is None:
        return UNMEASURED if measured is None or measured.built else NOT_BUILT
    if measured.value > goal.maximum:
        return ABOVE_LIMIT
    if measured.value < goal.minimum:
        return IMPOSSIBLE
    if reached(goal, goal.stretch, measured.value):
        return STRETCH
    if reached(goal, goal.target, measured.value):
        return MET
    return DISTURBED if measured.disturbed else MISSED


def evaluate(goal: Goal, cpu: Cpu, threads: int, measured: Measured | None) -> Result:
    """The result of one row of the table at one thread count."""
    binding = threads in {t or cpu.count for t in goal.threads}
    return Result(goal, threads, measured, _status(goal, cpu, measured), binding)


def evaluate_all(
    goals: Iterable[Goal],
    cpu: Cpu,
    threads: Sequence[int],
    measured: Mapping[tuple[str, int], Measured],
) -> list[Result]:
    """Every goal at every thread count; measured by (name of the goal, threads)."""
    return [evaluate(g, cpu, t, measured.get((g.name, t))) for g in goals for t in threads]


def missed_lines(results: Iterable[Result]) -> list[str]:
    """One line for every target that was missed, naming it."""
    return [
        f"{r.goal.name}, {r.threads} thread(s): {r.goal.title}: expected "
        f"{'at most' if r.goal.at_most else 'at least'} {r.goal.target:g} {r.goal.unit}, "
        f"got {_got(r)}"
        for r in results
        if r.missed
    ]


def void_lines(results: Iterable[Result]) -> list[str]:
    """One line for every target without a figure that could be believed."""
    return [
        f"{r.goal.name}, {r.threads} thread(s): {r.goal.title}: {r.status}, got {_got(r)} "
        f"{r.goal.unit}; measure again on a quiet machine"
        for r in results
        if r.void
    ]


def _got(r: Result) -> str:
    if r.measured is None or r.measured.value is None:
        return f"nothing: {r.measured.note}" if r.measured else "nothing"
    note = f" ({r.measured.note})" if r.measured.note else ""
    return f"{r.measured.value:.3g}{note}"


COLUMNS = ("goal", "T", "target", "stretch", "measured", "unit", "result", "where")


def cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of the table, from Result.to_dict()."""
    sign = "<= " if row["at_most"] else ""
    note, value = row["note"], row["measured"]
    return [
        row["goal"],
        str(row["threads"]),
        f"{sign}{row['target']:g}",
        "-" if row["stretch"] is None else f"{sign}{row['stretch']:g}",
        "-" if value is None else f"{value:.3g}",
        row["unit"],
        row["result"] if row["binding"] else f"({row['result']})",
        f"{note} (disturbed)" if row["disturbed"] else note,
    ]


def absent(results: Iterable[Result]) -> list[str]:
    """The titles of the goals that do not apply to this CPU."""
    return sorted({r.goal.title for r in results if not r.applies})


def lines(results: Sequence[Result]) -> list[str]:
    """The table as text, and how to read it."""
    missed, void, rest = missed_lines(results), void_lines(results), absent(results)
    table = text_table(COLUMNS, [cells(r.to_dict()) for r in results if r.applies])
    fine = "no target missed, but:" if void else "every target of this CPU met"
    text = [*table, "(in brackets: the goal does not speak of this thread count)"]
    text += [f"not for this CPU: {'; '.join(rest)}"] if rest else []
    text += [f"{len(missed)} target(s) missed:" if missed else fine]
    text += [f"  {line}" for line in missed]
    if void:
        text += [f"{len(void)} target(s) without a measurement:", *(f"  {v}" for v in void)]
    return text
