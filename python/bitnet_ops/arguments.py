"""What a caller hands over: checked when it comes in, and shown in a message.

Every check raises ValueError or TypeError of one line, `what` (`<who>: expected <name>`) being its
beginning. A bool is no number, and a tensor is none either.
"""

from __future__ import annotations

import math
import os
from numbers import Real
from pathlib import Path
from typing import TypeGuard

MAX_MB = 2**26  # MiB that may be asked for: 64 TiB, half of what a process can address


def shown(value: object, maximum: int = 60) -> str:
    """`repr(value)`, with its end cut off where it is long."""
    text = repr(value)
    return text if len(text) <= maximum else text[: maximum - 3] + "..."


def check_integer(what: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer of these bounds."""
    if isinstance(value, int) and not isinstance(value, bool):
        if minimum <= value and (maximum is None or value <= maximum):
            return
    bounds = f"from {minimum} to {maximum}" if maximum is not None else f"at least {minimum}"
    if maximum is None and minimum == 1:
        bounds = "above 0"
    raise ValueError(f"{what} an integer {bounds}, got {shown(value)}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, and finite."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def check_megabytes(what: str, value: object, zero: bool = False) -> None:
    """Raise ValueError unless `value` is a number of MiB; `zero`: which may be 0."""
    if is_number(value) and 0 <= value <= MAX_MB and (zero or value):
        return
    minimum = "at least 0" if zero else "above 0"
    raise ValueError(f"{what} {minimum} and at most {MAX_MB}, got {shown(value)}")


def check_flag(what: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} as True or False, got {shown(value)}")


def check_kind(what: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raise TypeError unless `value` is of that class; `what` says all of what is expected."""
    if not isinstance(value, kind):
        raise TypeError(f"{what}, got {shown(value)}")


def check_path(what: str, value: object) -> Path:
    """The path that `value` is; TypeError for another kind, ValueError for what names no file."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{what} as a path, got {shown(value)}")
    try:
        text = os.fspath(value)
        if not text or b"\0" in os.fsencode(text):
            raise ValueError
    except ValueError:  # a surrogate that stands for no byte
        raise ValueError(f"{what} as a path, got {shown(value)}") from None
    return Path(value)
