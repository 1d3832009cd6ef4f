"""A process that answers every line on its stdin with a line of JSON: another engine or version.

Standard library only: it also runs in environments of older versions of this package.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent  # where `-m benchmarks...` is found


class Process:
    """Runs `command`, whose first answer, `about`, says that it is ready.

    Lines that are no JSON object are noise of a library. An answer {"error": text} is raised.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str] | None = None
    ):
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
        self.about = self._answer()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, *words: object) -> dict[str, Any]:
        """The answer to a line of these words."""
        assert self._process.stdin
        print(*words, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{self._name}: {answer['error']}")
                return answer
        raise RuntimeError(f"{self._name}: expected an answer, got the end of its process")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def by_turns(
    before: Process, after: Process, count: int, rate: Callable[[Process], float]
) -> Iterator[tuple[float, float]]:
    """The rates of both in each turn, the order changing from turn to turn."""
    for turn in range(count):
        if turn % 2:
            second = rate(after)
            yield rate(before), second
        else:
            yield rate(before), rate(after)


class Floor:
    """A ratio of speeds, newer / older, below which a measurement is called slower.

    A measurement is slower when three quarters of its turns are: fewer may be the host's other
    guests.
    """

    def __init__(self, ratio: float | None) -> None:
        self._ratio = ratio
        self._slower: list[str] = []

    def see(self, name: str, ratios: Sequence[float]) -> None:
        """The ratios of all turns of a measurement."""
        if self._ratio is not None and statistics.quantiles(ratios, n=4)[2] < self._ratio:
            self._slower.append(f"{name} {statistics.median(ratios):.2f}")

    def leave(self) -> None:
        """Ends the program with status 1 if a measurement was slower."""
        if self._slower:
            sys.exit(f"expected a ratio of at least {self._ratio}, got: {'; '.join(self._slower)}")


def answer(**values: object) -> None:
    """What the process prints."""
    print(json.dumps(values), flush=True)
