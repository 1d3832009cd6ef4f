"""Text from outside: arguments and standard input, which have to be UTF-8.

A byte that is none is named with its place, instead of a codec's message.
"""

from __future__ import annotations

import re
import sys

from bitnet_ops.cli.streams import ClosedStdin

_ESCAPED = re.compile("[\udc80-\udcff]")  # how Python carries a byte that is no UTF-8


class TextError(ValueError):
    """Input that is no UTF-8, or that cannot be read."""

    code = "text"


def _reject(where: str, byte: int, offset: int) -> TextError:
    return TextError(
        f"{where}: expected UTF-8 text, got the byte 0x{byte:02x} at offset {offset}; convert it, "
        "for instance with iconv"
    )


def checked(text: str, where: str) -> str:
    """`text`, if it is Unicode throughout. `where` is what to call it in a message."""
    if match := _ESCAPED.search(text):
        before = text[: match.start()].encode("utf-8", "surrogateescape")
        raise _reject(where, ord(match[0]) - 0xDC00, len(before))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise TextError(f"{where}: expected UTF-8 text, got half a character, {found}") from None
    return text


def read_stdin() -> str:
    """All of standard input as text."""
    if sys.stdin is None or isinstance(sys.stdin, ClosedStdin):
        raise TextError("stdin: expected text, got a closed stream; give the text as an argument")
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:  # replaced by a stream of text
        return checked(sys.stdin.read(), "stdin")
    data: bytes = buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _reject("stdin", data[error.start], error.start) from None
