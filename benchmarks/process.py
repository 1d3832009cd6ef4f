"""A process that answers every line on its stdin with a line of JSON: another engine or version.

Standard library only: it also runs in environments of older versions of this package.
"""

from __future__ import annotations

import json
import os
import subprocess
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


def answer(**values: object) -> None:
    """What the process prints."""
    print(json.dumps(values), flush=True)
