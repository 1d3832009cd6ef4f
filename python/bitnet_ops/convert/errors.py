"""The one exception of the converter and the one way to raise it.

Every refusal has a short stable code (tests and scripts switch on it) and one line for people:
what was expected, what was found, what to do; names of a file are escaped in it. This module knows
no files and no formats.
"""

from __future__ import annotations

from typing import NoReturn

from bitnet_ops.formats.coded_error import printable


class ConvertError(ValueError):
    """A checkpoint, a destination or a result that is refused; `code` names the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(printable(message))
        self.code = code


def refuse(code: str, expected: str, found: str, remedy: str = "") -> NoReturn:
    """Raise ConvertError(`convert [code]: expected ..., found ...; remedy`)."""
    tail = f"; {remedy}" if remedy else ""
    raise ConvertError(code, f"convert [{code}]: expected {expected}, found {found}{tail}")


def listed(names: list[str], limit: int = 4) -> str:
    """`a, b, c, d and 3 more`: names for a message, never a flood."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
