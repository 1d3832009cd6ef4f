"""Regular expressions of strangers: lists of modules in a config.json or adapter_config.json.

An expression of a hundred bytes can take years on a name of thirty. Names, dots and anchors are
matched here; whatever can repeat or branch is matched in a process with limits (bounded.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bitnet_ops.untrusted.bounded import BoundedProcess, ChildError, LimitError

# no repetition, no alternatives: as quick as it is long
_HARMLESS = re.compile(r"(?:[^\\*+?{}()|\[\]]|\\.)*", re.DOTALL)
_CPU_S = 2.0  # for all names together; published lists take microseconds
_MEMORY_BYTES = 256 << 20
_process = BoundedProcess("patterns", _MEMORY_BYTES)


class PatternError(ValueError):
    """An expression that is none or does not end; the message goes on from "expected ..."."""


def matches(
    patterns: Sequence[str], names: Sequence[str], *, within: str = "%s"
) -> list[list[bool]]:
    """For each of `patterns`, which of `names` it matches from their start, as `re.match` does.

    `within`: an expression of ours with %s, where a pattern stands. Raises PatternError.
    """
    wild = [pattern for pattern in patterns if not _HARMLESS.fullmatch(pattern)]
    rows = _bounded([within % pattern for pattern in wild], names) if wild else []
    found = dict(zip(wild, rows, strict=True))
    for pattern in patterns:
        if pattern not in found:
            found[pattern] = _matched(pattern, within, names)
    return [found[pattern] for pattern in patterns]


def _matched(pattern: str, within: str, names: Sequence[str]) -> list[bool]:
    try:
        compiled = re.compile(within % pattern)
    except re.error as error:
        found = f"{pattern[:80]!r}: {error}"
        raise PatternError(f"valid regular expressions, got {found}") from None
    return [compiled.match(name) is not None for name in names]


def _bounded(patterns: list[str], names: Sequence[str]) -> list[list[bool]]:
    call = {"patterns": patterns, "names": list(names)}
    try:
        rows: list[list[bool]] = _process.call("match", _CPU_S, **call)
    except LimitError as error:
        raise PatternError(f"regular expressions that end, got {error}") from None
    except ChildError as error:  # re.error, which later versions of Python call PatternError
        raise PatternError(f"valid regular expressions, got {error.message}") from None
    return rows
