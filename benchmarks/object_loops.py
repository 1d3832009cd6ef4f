"""Loops of dot products in object code, as they run: for count_loops.py.

A loop is what a backward branch repeats. Its turn is one way through it: where it branches, past
inner loops that multiply nothing (edges, prefetches), and past nothing else; a function that it
calls stands in the place of the call. Standard library only; needs objdump.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from check_spills import (  # type: ignore[import-not-found]  # noqa: E402
    Instruction,
    functions,
)

# of x86, and of 64-bit Arm: b, b.lt, cbz x0, ... and tbz w0, #1, ...
JUMP = re.compile(r"((?:j\w+|b(?:\.\w+)?|[ct]bn?z\s+\w+,(?:\s#\d+,)?)\s+)([0-9a-f]+)\b")
CALL = re.compile(r"(?:call|bl)\s+([0-9a-f]+)\b")
NOTHING = re.compile(r"nop|data16|cs nop|xchg\s+%ax,%ax|endbr")
SYMBOL = re.compile(r"\s*(<.*>|# .*|//.*)$")


@dataclass(frozen=True)
class Turn:
    """The instructions of one turn of a loop, and how many of them are dot products."""

    text: tuple[str, ...]
    dots: int


@dataclass(frozen=True)
class _Way:
    """From an instruction to the end of the turn; the better of two compares greater."""

    inner_loops: int = 0
    dots: int = 0
    length: int = 0
    steps: tuple[int, ...] = ()

    def __lt__(self, other: _Way) -> bool:
        ours = (-self.inner_loops, self.dots, self.length)
        return ours < (-other.inner_loops, other.dots, other.length)


class Function:
    """The instructions of one function of an object, and its loops of dot products."""

    def __init__(self, body: list[Instruction], dot: re.Pattern[str]) -> None:
        self.text = [text for _, text in body]
        at = {address: i for i, (address, _) in enumerate(body)}
        self.is_dot = [bool(dot.match(text)) for text in self.text]
        self.jumps: dict[int, tuple[bool, int | None]] = {}  # index: always taken, target here
        for i, text in enumerate(self.text):
            if jump := JUMP.match(text):
                self.jumps[i] = (jump[1].strip() in ("jmp", "b"), at.get(int(jump[2], 16)))

    def loops(self) -> Iterator[list[int]]:
        """One turn of every loop with two dot products or more that holds no other such loop."""
        ranges = {
            (target, i)
            for i, (_, target) in self.jumps.items()
            if target is not None and target <= i and sum(self.is_dot[target : i + 1]) > 1
        }
        heads = {
            head
            for head, last in ranges
            if not any(head <= h and t <= last and (h, t) != (head, last) for h, t in ranges)
        }
        for head in sorted(heads):
            ways: dict[int, _Way | None] = {}
            way = self._best(head, head, ways, frozenset())
            if way is not None and way.dots > 1:
                yield list(way.steps)

    def _best(
        self, i: int, head: int, ways: dict[int, _Way | None], active: frozenset[int]
    ) -> _Way | None:
        """The best way from instruction i to a jump to `head`, None if there is none."""
        run: list[int] = []
        while i < len(self.text) and i not in self.jumps and not self.text[i].startswith("ret"):
            run.append(i)
            i += 1
        if i >= len(self.text) or i not in self.jumps or i in active:
            return None
        if i not in ways:
            always, target = self.jumps[i]
            found: list[_Way | None] = []
            if target == head:
                found.append(_Way())
            elif target is not None and target > head and (always or target > i):
                found.append(self._best(target, head, ways, active | {i}))
            if not always:
                behind = self._best(i + 1, head, ways, active | {i})
                if behind is not None and target is not None and head < target <= i:
                    behind = _Way(behind.inner_loops + 1, behind.dots, behind.length, behind.steps)
                found.append(behind)
            best = max((way for way in found if way is not None), default=None)
            ways[i] = best and _Way(best.inner_loops, best.dots, best.length + 1, (i, *best.steps))
        way = ways[i]
        repeated = sum(self.text[s].startswith("rep ") for s in run)
        return way and _Way(
            way.inner_loops + repeated,
            way.dots + sum(self.is_dot[s] for s in run),
            way.length + len(run),
            (*run, *way.steps),
        )


class Object:
    """The functions of an object file by name."""

    def __init__(self, path: Path) -> None:
        sys.setrecursionlimit(10000)
        self.bodies = [(name, body) for name, body in functions(path) if body]
        self.starts = {body[0][0]: body for _, body in self.bodies}

    def _spelt_out(self, text: str) -> list[str]:
        """An instruction as an assembler reads it, a call as what it calls."""
        if call := CALL.match(text):
            called = self.starts.get(int(call[1], 16), [])
            return [line for _, inner in called for line in self._spelt_out(inner)]
        jump = JUMP.match(text)
        if NOTHING.match(text) or text.startswith("ret"):
            return []
        if jump and jump[1].strip() in ("jmp", "b"):
            return []
        if jump:
            return [f"{jump[1]}loop"]
        return [SYMBOL.sub("", text)]

    def turns(self, name: str, dot: str) -> list[Turn]:
        """Turns of the loops of all functions whose name matches; of each the ones with the most
        dot products, and those with half as many or more: the passes over one part of the work."""
        pattern, found = re.compile(dot), []
        for function, body in self.bodies:
            if not re.search(name, function):
                continue
            code = Function(body, pattern)
            for steps in code.loops():
                text = [line for i in steps for line in self._spelt_out(code.text[i])]
                found.append(Turn(tuple(text), sum(code.is_dot[i] for i in steps)))
        maximum = max((turn.dots for turn in found), default=0)
        return [turn for turn in found if 2 * turn.dots >= maximum]
