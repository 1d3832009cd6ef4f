"""The one exception of the converter and the one way to raise it.

Every rejection has a short stable code (tests and scripts switch on it) and one line for people:
what was expected, what was got, what to do. This module knows no files and no formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from bitnet_ops.errors import BitNetError


class ConvertError(BitNetError, ValueError):
    """A checkpoint, a destination or a result that is rejected; `code` names the reason.

    str() is the message with the code in brackets behind it.
    """

    def __init__(self, code: str, message: str) -> None:
        suffix = f" [{code}]"
        super().__init__(message if message.endswith(suffix) else message + suffix)
        self.code = code


def reject(code: str, expected: str, found: str, remedy: str = "") -> NoReturn:
    """Raise ConvertError: `convert: expected ..., got ...; remedy [code]`."""
    tail = f"; {remedy}" if remedy else ""
    raise ConvertError(code, f"convert: expected {expected}, got {found}{tail}")


@contextmanager
def said_by(name: str) -> Iterator[None]:
    """Errors of the converter inside begin with `name`, the function that the caller knows."""
    try:
        yield
    except ConvertError as error:
        message = str(error)
        if message.startswith("convert: "):
            error.args = (name + message.removeprefix("convert"),)
        raise


def shown(value: object, limit: int = 60) -> str:
    """A value for a message: numbers and arrays of NumPy as Python's own, in one line."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = (value[:16] if getattr(value, "ndim", 0) else value).tolist()  # type: ignore[index]
    return repr(value)[:limit]


def listed(names: list[str], limit: int = 4) -> str:
    """`a, b, c, d and 3 more`: names for a message, never a flood."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
